"""Who failed first, and the last words of that worker: what a person needs on the last screenful of a failed job.

One worker's failure makes its peers fail with `PeerLost`, often before the culprit itself has ended (Python may take
a second to tear torch down). So a worker whose last words accuse another is not blamed while a worker that accuses
nobody is among the failures; if all accuse, the one that ended first is shown, and its message names the rank that
went silent.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

TAIL_LINES = 200
TAIL_BYTES = 1 << 16
WITHOUT_TRACEBACK_LINES = 20
_BEGINS = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_ACCUSES = re.compile(r"^(?:stretto\.errors\.)?PeerLost: ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker that ended badly of its own accord. `code` < 0: by signal `-code`."""

    rank: int
    pid: int
    code: int
    after_s: float
    stderr_tail: bytes

    @property
    def exit_code(self) -> int:
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def accuses_a_peer(self) -> bool:
        return bool(_ACCUSES.search(last_words(self.stderr_tail)))


def culprit(failures: Sequence[Failure]) -> Failure:
    """The failure to show, of failures in the order in which the workers ended."""
    return next((failure for failure in failures if not failure.accuses_a_peer), failures[0])


def last_words(stderr_tail: bytes) -> str:
    """The last traceback with the exceptions it was chained to, or the last lines where there is none."""
    lines = stderr_tail.decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
    starts = [number for number, line in enumerate(lines) if _BEGINS in line]
    if not starts:
        return "\n".join(lines[-WITHOUT_TRACEBACK_LINES:])
    start = starts.pop()
    while starts and any(line in _CHAINED for line in lines[starts[-1] : start]):
        start = starts.pop()
    return "\n".join(lines[start:])


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


def failure_block(failure: Failure, world_size: int, num_stopped: int) -> str:
    """Headline first, so that the traceback is the last thing on the screen."""
    headline = f"stretto: rank {failure.rank} of {world_size} failed first"
    others = f"; {num_stopped} other worker{'s were' if num_stopped > 1 else ' was'} stopped" if num_stopped else ""
    ended = f"It {how_it_ended(failure.code)} after {failure.after_s:.1f} s (pid {failure.pid}){others}."
    if -failure.code == signal.SIGKILL:
        ended += " If nobody did that, the system ran out of memory: see dmesg."
    words = last_words(failure.stderr_tail)
    if not words.strip():
        return f"\n{headline}\n{ended} It wrote nothing to stderr.\n"
    return f"\n{headline}\n{ended} Its last words on stderr:\n\n{words}\n"
