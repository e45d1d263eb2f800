"""What a job does without: workers that have failed while enough others go on (`stretto run --min-workers N`).

Without it, N is the number of workers: the first failure ends the job. With it a failure is said, and noted for the summary at
the end, and nothing else happens, as long as N workers of this node run or have ended well. Which ways to train can do without a
worker is not the launcher's affair: workers that cannot fail too, which leaves fewer than N, and the job ends as it would have.

With `--max-restarts M` a worker that has failed is started again, alone, M times for all workers of the node together. It comes
back to the job under its rank, as another life (`lasting_membership.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from stretto.launching.launch_report import Failure, how_it_ended
from stretto.launching.peers import ranks_text

WENT_ON = 3  # exit code of a job that has gone on to its end without some of its workers


class Survivors:
    """The workers of one launcher, how many of them the job cannot do without, and which come back when."""

    def __init__(self, num_workers: int, least: int | None, restarts: int = 0) -> None:
        self._least = num_workers if least is None else least
        self._restarts = 0 if least is None else restarts
        self._lost: dict[int, str] = {}  # rank -> how its last life that failed has ended, and when
        self._due: dict[str, float] = {}  # name -> when it is started again
        self._lives: Counter[str] = Counter()  # name -> how often it was

    def suffice(self, alive: Collection[str], ended: Mapping[str, int]) -> bool:
        """Whether enough run, or have ended well. `ended`: exit codes of those that do not run."""
        return len(alive) + sum(code == 0 for code in ended.values()) >= self._least

    def note(self, failure: Failure, alive: Collection[str], restart_at: float = 0.0) -> str:
        """The job goes on without this one, or until it is back: what to say about it."""
        self._lost[failure.rank] = f"rank {failure.rank} {how_it_ended(failure.code)} after {failure.after_s:.1f} s"
        on = f"{ranks_text(map(int, alive))} go{'es' if len(alive) == 1 else ''} on" if alive else "all others have ended well"
        begun = self._lives.total() + len(self._due)
        again = ""
        if begun < self._restarts and alive:
            self._due[str(failure.rank)] = restart_at
            again = f", and it is started again (restart {begun + 1} of {self._restarts})"
        return f"stretto: {self._lost[failure.rank]} (pid {failure.pid}); {on}{again}"

    @property
    def next_at(self) -> float | None:
        """When the next one is to be started again."""
        return min(self._due.values(), default=None)

    def due(self, now: float) -> list[tuple[str, int]]:
        """The workers to start again now, each with the number of its restart, the first being 1."""
        names = [name for name, at in self._due.items() if at <= now]
        for name in names:
            del self._due[name]
        self._lives.update(names)
        return [(name, self._lives[name]) for name in names]

    def summary(self, world_size: int, ended: Mapping[str, int]) -> str:
        """The last line of a job that ended well although workers were lost: which, and which of them came back. `ended`: exit
        codes."""
        for_good = [rank for rank in sorted(self._lost) if ended[str(rank)] != 0]
        back = [self._lost[rank] for rank in sorted(self._lost) if rank not in for_good]
        without = f"without {len(for_good)} of {world_size} workers: {'; '.join(self._lost[rank] for rank in for_good)}"
        said = [without] if for_good else []
        said += [f"with {len(back)} that came back: {'; '.join(back)}"] if back else []
        return f"stretto: the job has ended {', and '.join(said)}"
