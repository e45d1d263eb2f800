"""A group of workers as a job of its own: what trains all workers of a job trains those of a group in it.

Ranks, number of workers, peers and collectives are those of the group; everything else is the job's: its timeouts, its weight,
its wire, what it counts and traces. Rounds are not counted as such: what they say of staleness is about the group alone,
and whoever exchanges something between groups knows more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from stretto.collectives.group import Group
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.observe.ledger import Ledger

if TYPE_CHECKING:
    from stretto.strategy import Strategy


WITHIN: Final = "outer=AllReduce"  # the variant of `Hierarchy` that needs no servers


class GroupJob(Job):
    """`group`: made of the job's world, with this worker in it."""

    def __init__(self, job: Job, group: Group) -> None:
        self._whole = job
        self.world = group
        self.start, self.run, self.new_channel = group.start, group.run, group.new_channel
        self.rank, self.world_size = group.rank, group.size
        self.peers = [msgspec.structs.replace(job.all_peers[rank], rank=place) for place, rank in enumerate(group.ranks)]
        self.ledger = _WaitsOnly(job.ledger)
        self.launch = job.launch if job.rank == 0 else replace(job.launch, trace=None)  # one plan is written, as in a job

    @property
    def weight(self) -> float:
        """What `stretto.weight` says holds for whatever the worker trains."""
        return self._whole.weight

    @weight.setter
    def weight(self, value: float) -> None:
        self._whole.weight = value

    def __reduce__(self) -> Any:
        """A model that refers to it (a stage of a pipeline) may be copied or pickled: its copy is in no job."""
        return type(None), ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


class _WaitsOnly(Ledger):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def count_wait(self, waited_ns: int) -> None:
        self._ledger.count_wait(waited_ns)


def check_in_group(strategy: Strategy, job: Job) -> None:
    """Refuse what takes all workers of the job: servers, and networks beside the job's own, which all of them open together."""
    aggregate = strategy.aggregate
    if not isinstance(job, GroupJob) or type(aggregate).__name__ == "AllReduce" or getattr(aggregate, "variant", "") == WITHIN:
        return
    raise ConfigurationError(
        f"strategy={strategy!r} among {job.world_size} workers of the job, replicas of a stage or of what is cut over a mesh: "
        f"servers, and peers that reach each other one to one, are of the whole job, whose workers train different parameters.\n"
        f"Write aggregate=AllReduce() or aggregate=Hierarchy(), with any sync, compress and schedule that go with them."
    )
