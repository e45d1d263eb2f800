"""The communication thread: a communicator with a thread of its own, so that communication overlaps whatever the caller does."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from stretto.collectives.execute import Communicator
from stretto.collectives.failures import HasFailed
from stretto.collectives.request import Pending, Request
from stretto.errors import StrettoError
from stretto.protocol.loop import Loop

READY_POLL_S: Final = 0.0005

log = logging.getLogger("stretto.collectives")


class CommunicationThread:
    """A communicator with a thread of its own: `start` from any thread, overlap with whatever the caller does.

    The same thread drives the machines of protocols: `loop.start`, from any thread. It is one thread for all of them: whatever
    blocks it, such as a machine's event, holds up every collective.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.loop = Loop(communicator.wire)
        communicator.failures.queued = lambda: [pending.request for pending in self._unready + list(self._submitted)]
        self._submitted: deque[Pending] = deque()
        self._unready: list[Pending] = []
        self._stopping = False
        self._ended = False
        self._broken: StrettoError | None = None
        self._thread = threading.Thread(target=self._run, name="stretto-communication", daemon=True)
        self._thread.start()

    def start(self, request: Request, ready: Callable[[], bool] | None = None) -> Pending:
        """Begin a collective; with `ready`, once that returns True (it is asked often, in the communication thread), or once the
        collective cannot succeed: what a GPU is doing for it may never end without the peer that was lost."""
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

    def fail(self, pending: Pending, error: StrettoError) -> None:
        """Have a collective fail on all its members, and the round that it is part of on all workers: this one will not do its
        part."""
        self.loop.call(lambda: self.communicator.tell(HasFailed(pending.request, error)))

    def stop(self, timeout_s: float) -> None:
        """End the thread; collectives still under way fail. The wire is then the caller's to close."""
        self._stopping = True
        self.communicator.wire.wake()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._begin_submitted()
                idle_s = self.loop.turn()
                patience_s = READY_POLL_S if self._unready else self.communicator.patience_s()
                self.communicator.step(min(patience_s, idle_s))
        except BaseException as error:  # a bug of ours must not leave the caller waiting for ever
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
            elif pending.ready is None or pending.ready() or self.communicator.failures.is_doomed(pending.request):
                self.communicator.begin(pending)
                self._unready.remove(pending)  # only now: if beginning it fails, it must be among those that are told so

    def _waits_in_vain(self, pending: Pending) -> bool:
        own_s = pending.request.arrive_s
        patience_s = self.communicator.timeouts.arrive_s if own_s is None else own_s
        late = pending.ready is not None and time.monotonic() - pending.made_at > patience_s
        if late:
            what = f"what {pending.request.belief} waits for on its device did not end within {patience_s:g} s"
            error = StrettoError(f"{what}: the device does not make progress.")
            self.communicator.tell(HasFailed(pending.request, error))
            pending.finish(error)
        return late

    def _fail_all(self, error: StrettoError) -> None:
        self.loop.close(self._broken or StrettoError("the job was shut down"))
        for pending in self.communicator.pending() + self._unready + list(self._submitted):
            if not pending.done:
                pending.finish(error)
