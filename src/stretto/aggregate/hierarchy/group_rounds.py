"""The part inside a group, of ways to train in which groups are synchronous and the rest is not.

Rounds are those of synchronous all-reduce among the workers of the group: after backward every p.grad is the group's mean. What
happens at a step is for a class to say that derives from this one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.all_reduce.bucket import ReducedBucket
from stretto.aggregate.all_reduce.training import SynchronousAllReduce
from stretto.aggregate.hierarchy import group_admission as admission
from stretto.aggregate.hierarchy.group_job import GroupJob
from stretto.aggregate.hierarchy.hosts import group_of
from stretto.engine.bucket import Bucket
from stretto.engine.training import Named, RoundEnd, RoundResult, Setting, Training
from stretto.engine.watch import Watch
from stretto.errors import PeerLost
from stretto.job import Job
from stretto.sync.synchronous import Synchronous

if TYPE_CHECKING:
    from stretto.strategy import Strategy


class GroupRounds(Training[Bucket]):
    """See the module's text."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        hierarchy = admission.hierarchy_of(strategy)
        self._within = group_of(job, hierarchy.group_size)
        self._is_first = self._within.rank == 0
        self._inside: SynchronousAllReduce | None = None  # in a group of one there is nothing to combine
        self._mean_weight: float | None = None  # of the group's workers in the last round; None: there was none
        if self._within.size > 1:
            algorithm = hierarchy.inner.algorithm
            inner = AllReduce("auto" if algorithm == "native" else algorithm)
            inside = replace(strategy, aggregate=inner, sync=Synchronous())
            channel = self._within.new_channel()
            self._inside = SynchronousAllReduce(inside, GroupJob(job, self._within), replace(setting, channel=channel))

    @abstractmethod
    def _lose_group(self, lost: PeerLost) -> None:
        """A worker of the group is lost, so the group is: no other group is to wait for it."""

    @contextmanager
    def _in_group(self) -> Iterator[None]:
        try:
            yield
        except PeerLost as lost:
            self._lose_group(lost)
            raise

    # -- parameters ---------------------------------------------------------------------------------------------------

    def _arrange_inside(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[Bucket]:
        return () if self._inside is None else self._inside.arrange(dense, sparse)

    def is_current(self) -> bool:
        return self._inside is None or self._inside.is_current()

    def adopt(self, new: Sequence[Tensor], found: Sequence[Named]) -> None:
        if self._inside is not None:
            self._inside.adopt(new, found)

    def close(self) -> None:
        if self._inside is not None:
            self._inside.close()
        super().close()

    # -- rounds -------------------------------------------------------------------------------------------------------

    def before_forward(self, buffers: Watch | None, *, saved: bool) -> None:
        if self._inside is not None:
            with self._in_group():
                self._inside.before_forward(buffers, saved=saved)

    def round_begins(self) -> None:
        if self._inside is not None:
            self._inside.round_begins()

    def bucket_ready(self, bucket: Bucket) -> None:
        assert self._inside is not None and isinstance(bucket, ReducedBucket)
        self._inside.bucket_ready(bucket)

    def is_complete(self, parameter: Tensor) -> bool:
        return self._inside is not None and self._inside.is_complete(parameter)

    def backward_ended(self, end: RoundEnd) -> RoundResult:
        if self._inside is None:
            return RoundResult(combined=False)
        with self._in_group():
            result = self._inside.backward_ended(end)
        if result.combined:
            self._mean_weight = self._inside.closing.read()[0].weight
        return result
