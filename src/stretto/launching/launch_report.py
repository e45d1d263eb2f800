"""Which worker failed first, and its last words: what a person needs on the last screenful of a failed job.

One worker's failure makes its peers fail with errors that name it (`PeerLost`, `WireTimeout`, `FrameError`, `BackwardFailed`,
the `JobError` about a worker that ended before all had met), often before the culprit itself has ended (Python may take a second
to tear torch down). So:

    1. a worker that accuses nobody is the culprit, although its victims ended first;
    2. if all accuse, and all of their fingers point at one worker that has not failed (it is stopped, hangs, sits on another
       machine), that one was lost: the report says who named it and what its process was doing;
    3. else the one that ended first is shown.

Parameter servers have the ranks after those of the workers, and no report of their own: a worker that names one is shown, and its
words say what was lost.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.launching.peers import ranks_text

TAIL_LINES = 200
TAIL_BYTES = 1 << 16
WITHOUT_TRACEBACK_LINES = 20
_BEGINS = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_ACCUSES = re.compile(
    r"^(?:stretto\.errors\.)?(?:PeerLost: rank (\d+) is lost: |WireTimeout: rank (\d+) did not take part in |"
    r"FrameError: rank (\d+) sent a bad frame: |JobError: Rank (\d+) of \d+ \(pid |"
    r"BackwardFailed: backward ended in an exception on ranks? (\d+)\b)",
    re.MULTILINE,
)
_STATES = {
    "R": "running (R)",
    "S": "sleeping (S), which is also how waiting for a lock or a socket looks",
    "D": "waiting in the kernel (D), for a disk or a device",
    "T": "stopped (T): by SIGSTOP or Ctrl-Z; SIGCONT would have let it go on",
    "t": "stopped by a debugger (t)",
}


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
    def accused(self) -> int | None:
        """The rank that its last words blame."""
        found = list(_ACCUSES.finditer(last_words(self.stderr_tail)))
        if not found:
            return None
        return int(next(filter(None, found[-1].groups())))  # the last: those before it are what it was chained to


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker that others named and that has not failed itself. `accusers` in the order in which they ended."""

    rank: int
    accusers: tuple[Failure, ...]

    @property
    def exit_code(self) -> int:
        return self.accusers[0].exit_code


def culprit(failures: Sequence[Failure], world_size: int) -> Failure | Lost:
    """The failure to show, given all of them in the order in which the workers ended."""
    for failure in failures:
        if failure.accused is None or failure.accused >= world_size:
            return failure
    failed = {failure.rank for failure in failures}
    named = {failure.accused for failure in failures} - failed
    if len(named) != 1:
        return failures[0]
    (rank,) = named
    assert rank is not None  # whoever accuses nobody was returned above
    return Lost(rank, tuple(failure for failure in failures if failure.accused == rank))


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


def what_it_does(pid: int) -> str:
    """The state of a process, as the kernel shows it; "gone" if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            state = stat.read().rpartition(b")")[2].split()[0].decode()  # the name before it may hold spaces and ')'
    except FileNotFoundError:
        return "gone"
    except (OSError, IndexError):  # no /proc here
        return "in an unknown state"
    return "gone" if state in "ZX" else _STATES.get(state, f"in state {state}")


def failure_block(failure: Failure, world_size: int, num_stopped: int) -> str:
    """Headline first, so that the traceback is the last thing on the screen."""
    headline = f"stretto: rank {failure.rank} of {world_size} failed first"
    ended = f"It {how_it_ended(failure.code)} after {failure.after_s:.1f} s (pid {failure.pid}){_others(num_stopped)}."
    if -failure.code == signal.SIGKILL:
        ended += " If nobody did that, the system ran out of memory: see dmesg."
    words = last_words(failure.stderr_tail)
    if not words.strip():
        return f"\n{headline}\n{ended} It wrote nothing to stderr.\n"
    return f"\n{headline}\n{ended} Its last words on stderr:\n\n{words}\n"


def lost_block(lost: Lost, world_size: int, num_stopped: int, doing: str, stderr_tail: bytes) -> str:
    """`doing`: a sentence on what the lost one's process did when it was named; `stderr_tail`: its own, until then."""
    first = lost.accusers[0]
    accusers = " and ".join(ranks_text(failure.rank for failure in lost.accusers).rsplit(", ", 1))
    headline = f"stretto: rank {lost.rank} of {world_size} was lost to the others: named by {accusers}"
    said = (
        f"{doing}\nRank {first.rank} {how_it_ended(first.code)} after {first.after_s:.1f} s (pid {first.pid})"
        f"{_others(num_stopped)}. Its last words on stderr:\n\n{last_words(first.stderr_tail)}"
    )
    own = last_words(stderr_tail).rstrip()
    return f"\n{headline}\n{said}\n" + (f"\nThe last words of rank {lost.rank} itself:\n\n{own}\n" if own else "")


def _others(num_stopped: int) -> str:
    if not num_stopped:
        return ""
    return f"; {num_stopped} other worker{'s were' if num_stopped > 1 else ' was'} stopped"
