"""What a launcher tells the coordinator: which of its workers have ended, so that nobody waits for them until the deadline.

A worker that ends without having called `stretto.init()` is missing to all that call it. The launcher does not know who has
called it, and the coordinator does not know who has ended; so the one tells the other, which fails the job if somebody waits
(`membership.Ended`). It is told when workers have ended and others still run `GRACE_S` later, so that a job whose workers end
together says nothing; and by the launchers of other nodes than the coordinator's also at their end.

Telling takes a thread, at most two seconds, and is not repeated: where no coordinator listens yet (node 0 is started later)
nobody is told, and the others wait for `--meet-timeout`, as they would for a machine that was switched off.
"""

from __future__ import annotations

import threading
import time

from stretto.launching.detect import Launch
from stretto.launching.introduction_messages import Ended

GRACE_S = 1.0
TELL_S = 2.5


class EndedWorkers:
    """The workers of one launcher that have ended and of whom the coordinator was not told."""

    def __init__(self) -> None:
        self.due_at: float | None = None
        self._untold: list[Ended] = []
        self._telling: list[threading.Thread] = []

    def note(self, message: Ended, *, soon: bool) -> None:
        """`soon`: not where this end is about to end the others of this launcher anyway."""
        self._untold.append(message)
        if soon and self.due_at is None:
            self.due_at = time.monotonic() + GRACE_S

    def forget(self) -> None:
        self._untold, self.due_at = [], None

    def tell(self, launch: Launch) -> None:
        """Begin to tell. `launch`: that of any of the workers."""
        if self._untold:
            self._telling.append(threading.Thread(target=_tell, args=(launch, self._untold), daemon=True))
            self._telling[-1].start()
        self.forget()

    def wait(self) -> None:
        """Until all is told, or cannot be."""
        deadline = time.monotonic() + TELL_S
        for thread in self._telling:
            thread.join(max(0.0, deadline - time.monotonic()))


def _tell(launch: Launch, ended: list[Ended]) -> None:
    from stretto.launching.introduce import report_ended  # ZeroMQ: most launchers never need it

    report_ended(launch, ended)
