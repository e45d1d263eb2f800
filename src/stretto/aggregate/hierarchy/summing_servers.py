"""Synchronous training of groups with servers: a group sums up inside, and its first worker is its one client of the servers.

    workers of a group      sum up a bucket                                   over what they share (`fabric/`)
    its first worker        pushes the sum, pulls that of all groups          `parameter_server/training.py`
    workers of a group      get it from the first                             over what they share

The servers add up in the order of groups, so all workers end with the same bits, and so does every run. It is large-batch
training, also with groups of different sizes: what is pushed are sums, divided by the number of workers at the end.

All of it belongs to one round of the whole job: where a part fails, because a worker has died or the servers of some parameters
have, it fails on all workers.

Reference: Mamidala et al., "MXNET-MPI: embedding MPI parallelism in parameter server task model", arXiv:1801.03855.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stretto.aggregate.all_reduce.bucket import ReducedBucket
from stretto.aggregate.all_reduce.exchange import UnderWay
from stretto.aggregate.hierarchy import group_admission as admission
from stretto.aggregate.hierarchy.hosts import group_of
from stretto.aggregate.parameter_server.training import IncompleteSum, SynchronousServers
from stretto.collectives.request import InProgress
from stretto.engine.training import Named, Setting
from stretto.errors import WireError
from stretto.fabric.base import Area, Fabric
from stretto.fabric.choose import ASKED_FOR, choose_fabric
from stretto.job import Job

if TYPE_CHECKING:
    from stretto.strategy import Strategy


class GroupsWithSummingServers(SynchronousServers):
    """`Hierarchy(outer=ParameterServer())` + `Synchronous` + `Replicated`."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        hierarchy = admission.hierarchy_of(strategy)
        self._within = group_of(job, hierarchy.group_size)
        self._why_wire = ASKED_FOR if hierarchy.inner.algorithm == "ring" else None
        self._fabric: Fabric | None = None
        self._areas: dict[ReducedBucket, int] = {}
        self._cause: WireError | None = None  # what this worker has made the round fail with
        super().__init__(strategy, job, setting)

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        admission.check_answers(strategy)
        super().check_strategy(strategy)

    # -- what is served -----------------------------------------------------------------------------------------------

    def arrange(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[ReducedBucket]:
        buckets = super().arrange(dense, sparse)
        served = [bucket for bucket in buckets if self._ranges.get(bucket)]
        self._areas = {bucket: number for number, bucket in enumerate(served)}
        if served and self._within.size > 1:
            areas = [Area(self._ranges[bucket][-1][2], torch.float32, owner=0) for bucket in served]
            self._fabric = choose_fabric(self._within, self._job.peers, areas, why_wire=self._why_wire, former=self._fabric)
            self._job.threads.add(self._fabric)
            self._channels |= self._fabric.channels
        return buckets

    def close(self) -> None:
        super().close()
        if self._fabric is not None:
            self._fabric.stop()

    # -- rounds -------------------------------------------------------------------------------------------------------

    def round_begins(self) -> None:
        super().round_begins()
        self._cause = None

    def _begin(self, bucket: ReducedBucket, under_way: UnderWay) -> None:
        if self._meeting is None:
            this_round = self._setting.channel, self._round & 0xFFFFFFFF
            self._within.part_of = this_round
            self._meeting = self._meet(part_of=this_round)
        super()._begin(bucket, under_way)

    def _combine(self, bucket: ReducedBucket, values: Tensor, number: int, label: str) -> UnderWay:
        if self._service is None or self._fabric is None or bucket not in self._areas:
            return super()._combine(bucket, values, number, label)
        to_servers = partial(self._sum, self._service, self._clock_of[bucket], bucket)
        return self._by_group(self._fabric, self._areas[bucket], to_servers, values, number, label)

    def _by_group(
        self, fabric: Fabric, area: int, to_servers: Callable[[Tensor], InProgress], values: Tensor, number: int, label: str
    ) -> UnderWay:
        flat = values if values.dtype is torch.float32 and values.device.type == "cpu" else values.to("cpu", torch.float32)
        yield from fabric.sum(area, flat, 1.0, number, label)
        if self._within.rank == 0:
            try:
                yield to_servers(flat)
            except IncompleteSum:
                raise  # somebody has died, and every part of the round finds out
            except Exception as error:
                self._fail_round(error)
                raise
            flat.mul_(1.0 / self._job.world_size)
        yield from fabric.share(area, flat, number, label)
        if flat is not values:
            values.copy_(flat)

    def _fail_round(self, error: Exception) -> None:
        """The servers' answer was an error, and the other workers of the group wait for this one."""
        self._cause = self._cause or (error if isinstance(error, WireError) else None)
        assert self._meeting is not None, "the round is under way"
        text = f"rank {self._job.rank} could not combine the gradients of its group: {type(error).__name__}: {error}"
        self._job.world.fail(self._meeting, WireError(text))

    def _wait(self, buckets: Sequence[ReducedBucket]) -> None:
        try:
            super()._wait(buckets)
        except WireError:
            if self._cause is not None:
                raise self._cause from None  # that is why
            raise
