"""What a job does without: workers that have failed while enough others go on (`stretto run --min-workers N`).

Without it, N is the number of workers: the first failure ends the job. With it a failure is said, and noted for the summary at
the end, and nothing else happens, as long as N workers of this node run or have ended well. Which ways to train can do without a
worker is not the launcher's affair: workers that cannot fail too, which leaves fewer than N, and the job ends as it would have.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from stretto.launching.launch_report import Failure, how_it_ended
from stretto.launching.peers import ranks_text

WENT_ON = 3  # exit code of a job that has gone on to its end without some of its workers


class Survivors:
    """The workers of one launcher, and how many of them the job cannot do without."""

    def __init__(self, num_workers: int, least: int | None) -> None:
        self._least = num_workers if least is None else least
        self._lost: dict[int, str] = {}  # rank -> how it ended, and when

    def suffice(self, alive: Collection[str], ended: Mapping[str, int]) -> bool:
        """Whether enough run, or have ended well. `ended`: exit codes of those that do not run."""
        return len(alive) + sum(code == 0 for code in ended.values()) >= self._least

    def note(self, failure: Failure, alive: Collection[str]) -> str:
        """The job goes on without this one: what to say about it."""
        self._lost[failure.rank] = f"rank {failure.rank} {how_it_ended(failure.code)} after {failure.after_s:.1f} s"
        on = f"{ranks_text(map(int, alive))} go{'es' if len(alive) == 1 else ''} on" if alive else "all others have ended well"
        return f"stretto: {self._lost[failure.rank]} (pid {failure.pid}); {on}"

    def summary(self, world_size: int) -> str:
        """Who was lost: the last line of a job that has ended all the same."""
        lost = "; ".join(self._lost[rank] for rank in sorted(self._lost))
        return f"stretto: the job has ended without {len(self._lost)} of {world_size} workers: {lost}"
