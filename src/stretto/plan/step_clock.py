"""The clocks that a step is timed with: the host's, or a GPU's own.

A *mark* is a moment, taken cheaply in the middle of a step and read when recording is over. On a GPU it is an event in the stream
that is current where it is taken: reading the host's clock there would tell when work was queued, and waiting for the GPU to make
the two agree would change what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from stretto.errors import ConfigurationError


class StepClock(Protocol):
    def runs(self) -> bool:
        """Whether marks may be taken now."""

    def mark(self) -> Any:
        """This moment."""

    def settle(self) -> None:
        """Wait until all marks can be read."""

    def seconds(self, begin: Any, end: Any) -> float:
        """The time between two marks."""


class HostClock:
    """Moments of `time.perf_counter_ns`."""

    mark = staticmethod(time.perf_counter_ns)

    def runs(self) -> bool:
        return True

    def settle(self) -> None:
        pass

    def seconds(self, begin: int, end: int) -> float:
        return (end - begin) * 1e-9


class CudaClock:
    """Events on the current stream of one GPU. `new_event` is there for tests on machines without one."""

    def __init__(self, device: torch.device, new_event: Callable[..., Any] | None = None) -> None:
        self._device = device
        self._new_event = new_event or torch.cuda.Event
        self._last: Any = None

    def runs(self) -> bool:
        """Not while a CUDA graph is captured: an event would become part of the graph."""
        return not torch.cuda.is_current_stream_capturing()

    def mark(self) -> Any:
        event = self._new_event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._last = event
        return event

    def settle(self) -> None:
        """Streams wait for each other before a step is over, so the last event of all ends it."""
        if self._last is not None:
            self._last.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) * 1e-3


def clock_for(devices: Iterable[torch.device]) -> StepClock:
    """The clock of a model whose parameters are on these devices."""
    found = set(devices)
    if not any(device.type == "cuda" for device in found):
        return HostClock()
    if len(found) == 1:
        return CudaClock(found.pop())
    raise ConfigurationError(
        f"recording the steps of a model on {', '.join(sorted(map(str, found)))}: events of different devices cannot be "
        f"compared, so there is no clock that shows when its parts ran.\n"
        f"Put the model on one device, or pass clock=HostClock() to time when its work is queued instead."
    )
