"""What a launcher tells the coordinator: which of its workers have ended, so that nobody waits for them until the deadline.

A worker that ends without having called `stretto.init()` is missing to all that call it. The launcher does not know who has
called it, and the coordinator does not know who has ended; so the one tells the other, which fails the job if somebody waits
(`membership.Ended`). It is told when workers have ended and others still run `GRACE_S` later, so that a job whose workers end
together says nothing; and by the launchers of other nodes than the coordinator's also at their end.

Telling takes a thread, at most two seconds, and is not repeated: where no coordinator listens yet (node 0 is started later)
nobody is told, and the others wait for `--meet-timeout`, as they would for a machine that was switched off. Of servers it is
repeated (`again=True`), for they come before rank 0 has opened the place where they and the workers meet.
"""

from __future__ import annotations

import threading
import time

from stretto.launching.detect import Launch
from stretto.launching.introduction_messages import Ended

GRACE_S = 1.0
TELL_S = 2.5
AGAIN_S = 1.0  # the pause before it is said again; it doubles with each
LONGEST_AGAIN_S = 8.0


class EndedWorkers:
    """The workers of one launcher that have ended and of whom the coordinator was not told."""

    def __init__(self) -> None:
        self.due_at: float | None = None
        self._untold: list[Ended] = []
        self._telling: list[threading.Thread] = []
        self._over = threading.Event()

    def note(self, message: Ended, *, soon: bool) -> None:
        """`soon`: not where this end is about to end the others of this launcher anyway."""
        self._untold.append(message)
        if soon and self.due_at is None:
            self.due_at = time.monotonic() + GRACE_S

    def forget(self) -> None:
        self._untold, self.due_at = [], None

    def tell(self, launch: Launch, *, again: bool = False) -> None:
        """Begin to tell. `launch`: that of any of the workers. `again`: until somebody has heard it, or this launcher ends."""
        if self._untold:
            telling = (launch, self._untold, self._over if again else None)
            self._telling.append(threading.Thread(target=_tell, args=telling, daemon=True))
            self._telling[-1].start()
        self.forget()

    def wait(self) -> None:
        """Until all is told, or cannot be."""
        self._over.set()
        deadline = time.monotonic() + TELL_S
        for thread in self._telling:
            thread.join(max(0.0, deadline - time.monotonic()))


def _tell(launch: Launch, ended: list[Ended], over: threading.Event | None) -> None:
    from stretto.launching.introduce import report_ended  # ZeroMQ: most launchers never need it

    pause_s = AGAIN_S
    while not report_ended(launch, ended) and over is not None and not over.wait(pause_s):
        pause_s = min(LONGEST_AGAIN_S, 2 * pause_s)
