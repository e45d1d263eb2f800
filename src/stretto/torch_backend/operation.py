"""An operation under way: the collectives that carry it, and what is left to do when they have ended.

What is left (copying results to where the caller wants them) is done once, by whoever needs it first: the thread that waits, or,
where a future was asked for or the handle was dropped, the group's completion thread. The communication thread never does it, for
all collectives of the process would wait meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto.collectives.request import InProgress
from stretto.errors import StrettoError
from stretto.torch_backend.naming import Path


class NotYet(StrettoError, RuntimeError):
    """`wait(timeout)` has waited so long, and the operation is still under way. It can be waited for again."""


class Operation:
    """`under_way`: what it consists of (nothing: it has ended). `finish`: what is left to do then. `result`: its tensors."""

    def __init__(
        self,
        under_way: Sequence[InProgress],
        result: Sequence[Tensor],
        finish: Callable[[], None] | None = None,
        name: Path | None = None,
    ) -> None:
        self.under_way = tuple(under_way)
        self.result = list(result)
        self.name = name  # from which callbacks take the names of what they start; None: they may start no collectives
        self.error: BaseException | None = None
        self._finish = finish
        self._settled = False
        self._event: torch.cuda.Event | None = None
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        return all(one.done for one in self.under_way)

    @property
    def has_succeeded(self) -> bool:
        """Whether it has ended, and well. Settles it then."""
        if not self.done:
            return False
        self.settle()
        return self.error is None

    @property
    def needs_finishing(self) -> bool:
        return self._finish is not None and not self._settled

    def settle(self) -> None:
        """Do what is left, if nobody has. Only when it is `done`; what went wrong is in `error` then."""
        with self._lock:
            if not self._settled:
                self.error = next((one.error for one in self.under_way if one.error is not None), None)
                if self.error is None and self._finish is not None:
                    try:
                        self._finish()
                        self._event = _recorded(self.result)
                    except Exception as problem:
                        self.error = problem
                self._finish = None
                self._settled = True
        if self._event is not None:
            torch.cuda.current_stream(self.result[0].device).wait_event(self._event)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it has ended; raise what went wrong. All of it has ended then, so its memory is the caller's again."""
        if timeout_s is not None:
            self._wait_until(time.monotonic() + timeout_s, timeout_s)
        self.wait_for_end()
        self.settle()
        if self.error is not None:
            raise self.error

    def wait_for_end(self) -> None:
        """Return when everything under way has ended, well or not."""
        for one in self.under_way:
            with contextlib.suppress(Exception):  # `settle` finds it; the others have to end first
                one.wait()

    def _wait_until(self, deadline: float, timeout_s: float) -> None:
        for one in self.under_way:
            if not one.wait_until(deadline):
                raise NotYet(
                    f"Operation timed out! wait({timeout_s:g} s) is over, and the operation is still under way.\n"
                    f"Wait again, or longer."
                )

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when everything under way has ended: from the thread that ends the last, or at once."""
        left = len(self.under_way)
        if not left:
            callback()
            return
        lock = threading.Lock()

        def one_less() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                callback()

        for one in self.under_way:
            one.when_done(one_less)


def _recorded(tensors: Sequence[Tensor]) -> torch.cuda.Event | None:
    """On a GPU the way back is queued, not done: whoever settles it is not the only one whose stream has to wait."""
    if not tensors or tensors[0].device.type != "cuda":
        return None
    event: torch.cuda.Event = torch.cuda.current_stream(tensors[0].device).record_event()
    return event
