"""A group of workers as a job of its own: what trains all workers of a job trains those of a group in it.

Ranks, number of workers, peers and collectives are those of the group; everything else is the job's: its timeouts, its weight,
its wire, what it counts and traces. Rounds are not counted as such: what they say of staleness is about the group alone,
and whoever exchanges something between groups knows more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stretto.collectives.group import Group
from stretto.job import Job
from stretto.observe.ledger import Ledger


class GroupJob(Job):
    """`group`: made of the job's world, with this worker in it."""

    def __init__(self, job: Job, group: Group) -> None:
        self._whole = job
        self.world = group
        self.start, self.run, self.new_channel = group.start, group.run, group.new_channel
        self.rank, self.world_size = group.rank, group.size
        self.peers = [job.peers[rank] for rank in group.ranks]
        self.ledger = _WaitsOnly(job.ledger)
        self.launch = job.launch if job.rank == 0 else replace(job.launch, trace=None)  # one plan is written, as in a job

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


class _WaitsOnly(Ledger):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def count_wait(self, waited_ns: int) -> None:
        self._ledger.count_wait(waited_ns)
