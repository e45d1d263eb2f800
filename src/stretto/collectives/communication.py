"""The communication thread: a communicator with a thread of its own, so that communication overlaps whatever the caller does."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from stretto.collectives.execute import Communicator
from stretto.collectives.request import Pending, Request
from stretto.errors import StrettoError

READY_POLL_S: Final = 0.0005

log = logging.getLogger("stretto.collectives")


class _Call:
    """Something to be done in the communication thread."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self.finished = threading.Event()
        self._action = action

    def run(self) -> None:
        try:
            self._action()
        except Exception as error:  # it is the caller's: raised again where `call` waits
            self.error = error
        self.finished.set()


class CommunicationThread:
    """A communicator with a thread of its own: `start` from any thread, overlap with whatever the caller does."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        communicator.queued = lambda: self._unready + list(self._submitted)
        self._submitted: deque[Pending] = deque()
        self._calls: deque[_Call] = deque()
        self._unready: list[Pending] = []
        self._stopping = False
        self._ended = False
        self._broken: StrettoError | None = None
        self._thread = threading.Thread(target=self._run, name="stretto-communication", daemon=True)
        self._thread.start()

    def start(self, request: Request, ready: Callable[[], bool] | None = None) -> Pending:
        """Begin a collective; with `ready`, once that returns True (it is asked often, in the communication thread)."""
        pending = Pending(request, watch=self.communicator.watch)
        pending.ready = ready
        if self._broken is not None:
            pending.finish(self._broken)
            return pending
        self._submitted.append(pending)
        self.communicator.wire.wake()
        if self._ended and not pending.done:  # set before what is left was failed for the last time: nobody will look at it
            pending.finish(self._broken or StrettoError("the job was shut down"))
        return pending

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` in the communication thread, the only one that may touch the wire, and wait for it."""
        call = _Call(action)
        self._calls.append(call)
        self.communicator.wire.wake()
        while not call.finished.wait(1.0):
            if not self._thread.is_alive():
                raise self._broken or StrettoError("the job was shut down")
        if call.error is not None:
            raise call.error

    def stop(self, timeout_s: float) -> None:
        """End the thread; collectives still under way fail. The wire is then the caller's to close."""
        self._stopping = True
        self.communicator.wire.wake()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._begin_submitted()
                while self._calls:
                    self._calls.popleft().run()
                patience_s = READY_POLL_S if self._unready else self.communicator.patience_s()
                self.communicator.step(patience_s)
        except Exception as error:  # a bug of ours must not leave the caller waiting for ever
            log.exception("the communication thread failed")
            self._broken = StrettoError(f"the communication thread failed: {error!r}")
            self._broken.__cause__ = error
        self._ended = True
        self._fail_all(self._broken or StrettoError("the job was shut down while this collective was under way"))

    def _begin_submitted(self) -> None:
        while self._submitted:
            self._unready.append(self._submitted.popleft())
        for pending in list(self._unready):
            if self._waits_in_vain(pending):
                self._unready.remove(pending)
            elif pending.ready is None or pending.ready():
                self.communicator.begin(pending)
                self._unready.remove(pending)  # only now: if beginning it fails, it must be among those that are told so

    def _waits_in_vain(self, pending: Pending) -> bool:
        patience_s = self.communicator.timeouts.arrive_s
        late = pending.ready is not None and time.monotonic() - pending.made_at > patience_s
        if late:
            what = f"the data for {pending.request.belief} did not arrive in host memory within {patience_s:g} s"
            pending.finish(StrettoError(f"{what}: the device it comes from does not make progress."))
        return late

    def _fail_all(self, error: StrettoError) -> None:
        for pending in self.communicator.pending() + self._unready + list(self._submitted):
            if not pending.done:
                pending.finish(error)
