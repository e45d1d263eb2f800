"""Learning how a backward pass ends: well, or in an exception.

autograd calls what was queued in a backward when that backward has ended well. When it ends in an exception autograd says
nothing, but drops what was queued; an object that notices its own end without having been called therefore tells of a failure,
at once and in the thread that failed.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, Protocol

import torch

NO_TASK: Final = -1  # autograd's own number for "not in a backward"


def current_task() -> int:
    """The number of the backward that runs in this thread, or NO_TASK."""
    return int(torch._C._current_graph_task_id())


class BackwardListener(Protocol):
    def end_of_backward(self) -> None:
        """The backward has ended well."""

    def backward_died(self, number: int) -> None:
        """The backward that was waited for under this number has failed. An exception is in flight: not to communicate here."""


class EndOfBackward:
    """Tells `listener`, which it holds weakly: autograd's own references are beyond the garbage collector's sight."""

    def __init__(self, listener: BackwardListener, number: int) -> None:
        self._listener: weakref.ref[Any] = weakref.ref(listener)
        self._number = number
        self._called = False
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        self._called = True
        if (listener := self._listener()) is not None:
            listener.end_of_backward()

    def __del__(self) -> None:
        if not self._called and (listener := self._listener()) is not None:
            listener.backward_died(self._number)
