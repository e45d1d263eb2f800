"""`torch.futures.collect_all` and `wait_all` of futures of ours.

The future that torch makes of several in C++ is no future of ours: whoever waits for it completes nothing, so that a callback on
the completion thread would wait for its own thread; and what it calls back has no name (`naming.py`). So where one of the futures
is ours, torch gets one of ours (`registering.py`). It is named after the first of its parts that has a name, as a callback of it
would be; whoever waits for it completes its parts; and it fails, as torch's does, with the first part that fails.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stretto.torch_backend.future import TransferFuture

Future = torch.futures.Future[Any]


class CombinedFuture(TransferFuture):
    """Its value is the list of its parts. On a GPU, whoever sees that value has waited, on its stream, for each of them."""

    def __init__(self, parts: Sequence[Future]) -> None:
        ours = [part for part in parts if isinstance(part, TransferFuture)]
        paths = (part.next_path() for part in ours)

        def drive() -> None:
            for part in ours:
                if self.done():  # one has failed: nothing is to be waited for any more
                    return
                part.drive()

        devices = {device for part in ours for device in part.devices}
        super().__init__(next((path for path in paths if path is not None), None), drive, sorted(devices, key=str))
        self._parts = list(parts)
        self._left = len(self._parts)
        self._count_lock = threading.Lock()
        for part in self._parts:
            torch.futures.Future.add_done_callback(part, self._one_less)  # not our own: it is no callback of the program's

    def _one_less(self, part: Future) -> None:
        try:
            part.value()
        except Exception as error:
            self.fail(error, None)
            return
        with self._count_lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self.complete(self._parts)

    def wait(self) -> Any:
        parts = super().wait()
        _wait_on_streams(parts)
        return parts

    def then(self, callback: Callable[[Future], Any]) -> TransferFuture:
        def on_streams(done: Future) -> Any:
            with contextlib.suppress(Exception):  # of a part that has failed; the callback finds it
                _wait_on_streams(done.value())
            return callback(done)

        return super().then(on_streams)


def _wait_on_streams(parts: Sequence[Future]) -> None:
    """They are complete, so the host waits for nothing."""
    for part in parts:
        torch.futures.Future.wait(part)
