"""Groups of workers with servers that step: synchronous inside a group, and as `sync=` says among groups.

    backward        p.grad <- the mean over the group, in every worker of it         all-reduce, in buckets, under backward
    before_step     its first worker pushes p.grad as it is now (clipped, say)       `parameter_server/stepping.py`
    after_step      its first worker pulls, and gives the values to its group        a broadcast

To the servers a group is one worker: clocks, versions and staleness are the group's, and P in the rules of `sync=` is the number
of groups. One group is large-batch training; groups of one worker are servers as without groups.

Where an update is a mean (`SoftSync`, `BackupWorkers`), a group counts as much as its workers do: by their number, and by their
`stretto.weight`.

Invariant: after each step all workers of a group hold the same bits.
Cost:      inside, an all-reduce of the gradients and a broadcast of the values; the servers have one client for each group, so
           P/G times less to receive and to send.
Failure:   a worker that dies takes its group with it: the others of the group raise `PeerLost`, and the group leaves the servers.
           Other groups go on, as workers do where there are no groups.
Reference: Mamidala et al., "MXNET-MPI: embedding MPI parallelism in parameter server task model", arXiv:1801.03855.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.all_reduce.bucket import ReducedBucket
from stretto.aggregate.all_reduce.training import SynchronousAllReduce
from stretto.aggregate.hierarchy import group_admission as admission
from stretto.aggregate.hierarchy.group_job import GroupJob
from stretto.aggregate.hierarchy.hosts import group_of
from stretto.aggregate.parameter_server.consistency import rule_for
from stretto.aggregate.parameter_server.stepping import SteppingServers
from stretto.aggregate.parameter_server.training import clients_of
from stretto.collectives import calls
from stretto.collectives.group import Group
from stretto.collectives.plan import Kind
from stretto.engine.bucket import Bucket
from stretto.engine.training import NOBODY, Named, RoundEnd, RoundResult, Setting
from stretto.engine.watch import Watch
from stretto.errors import PeerLost, StrettoError, WireError
from stretto.job import Job
from stretto.sync.synchronous import Synchronous

if TYPE_CHECKING:
    from stretto.strategy import Strategy


def train_inside(strategy: Strategy, job: Job, group: Group, setting: Setting) -> SynchronousAllReduce | None:
    """Synchronous training of one group. None: it has one worker."""
    if group.size == 1:
        return None
    algorithm = admission.hierarchy_of(strategy).inner.algorithm
    inner = AllReduce("auto" if algorithm == "native" else algorithm)
    inside = replace(strategy, aggregate=inner, sync=Synchronous())
    return SynchronousAllReduce(inside, GroupJob(job, group), replace(setting, channel=group.new_channel()))


class GroupsWithSteppingServers(SteppingServers):
    """`Hierarchy(outer=ParameterServer())` + `StaleSynchronous`, `Asynchronous`, `SoftSync` or `BackupWorkers` + `Replicated`."""

    goes_on_without = False  # it needs those of its group

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self._within = group_of(job, admission.hierarchy_of(strategy).group_size)
        self._spreading = self._within.new_channel()
        self._inside = train_inside(strategy, job, self._within, setting) if self.engaged else None
        self._share = self._within.size * len(clients_of(strategy, job)) / job.world_size  # of a group in a mean
        self._mean_weight: float | None = None  # of the group's workers in the last round; None: there was none

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        admission.check_answers(strategy)
        super().check_strategy(strategy)

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        super().check(model, optimizers, strategy, job)
        if job.world_size > 1:
            rule_for(strategy.sync, len(clients_of(strategy, job)))

    @property
    def _is_first(self) -> bool:
        return self._within.rank == 0

    def arrange(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[Bucket]:
        super().arrange(dense, sparse)
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

    # -- rounds, which are the group's --------------------------------------------------------------------------------

    def before_forward(self, buffers: Watch | None, *, saved: bool) -> None:
        if self._inside is not None:
            with self._leaving():
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
            return super().backward_ended(end)
        with self._leaving():
            result = self._inside.backward_ended(end)
        if result.combined:
            self._mean_weight = self._inside.closing.read()[0].weight
        return result

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """If a worker of the group is lost, the group is, and no other group is to wait for it."""
        try:
            yield
        except PeerLost as lost:
            self._broken = lost
            if self._service is not None:
                self._end_service()
            raise

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def _weight(self) -> float:
        mine = self._job.weight if self._mean_weight is None else self._mean_weight
        return mine * self._share

    def before_step(self, optimizer: Optimizer) -> Set[Tensor] | None:
        if self._is_first:
            return super().before_step(optimizer)
        self._look(optimizer)
        return NOBODY

    def after_step(self, optimizer: Optimizer) -> None:
        number = next((number for number, given in enumerate(self._optimizers) if given is optimizer), None)
        if number is not None:
            with self._telling([number]):
                super().after_step(optimizer)
            self._spread([number])

    def _pull_all(self) -> None:
        everything = range(len(self._optimizers))
        with self._telling(everything):
            if self._is_first:
                super()._pull_all()
        self._spread(everything)

    @property
    def _is_untouched(self) -> bool:
        """All workers of a group decide alike what happens to their values."""
        mine = super()._is_untouched
        return mine if self._within.size == 1 else all(calls.gather_object(self._within, mine))

    # -- what the first worker has pulled -----------------------------------------------------------------------------

    def _parts(self, numbers: Sequence[int]) -> list[Tensor]:
        """The values of these optimizers' parameters, which lie together."""
        parts = []
        for number in numbers:
            if entries := [each for each in self._inventory.entries if each.optimizer == number]:
                parts.append(self._flat[entries[0].start : entries[-1].stop])
        return parts

    def _spread(self, numbers: Sequence[int]) -> None:
        """All workers of the group get the values that the first has."""
        if self._within.size == 1:
            return
        for part in self._parts(numbers):
            name = self._within.next_name(self._spreading)
            try:
                with self._leaving():
                    self._within.run(Kind.BROADCAST, part, "chain", root=0, name=name, label=self._label)
            except StrettoError as error:
                self._broken = error  # this worker has other values than its group
                raise
        if not self._is_first:
            self._copy(each for each in self._inventory.entries if each.optimizer in numbers)

    @contextmanager
    def _telling(self, numbers: Sequence[int]) -> Iterator[None]:
        """The first worker's error is that of its group, which waits for the values."""
        try:
            yield
        except Exception as error:
            parts = self._parts(numbers)
            if self._is_first and self._within.size > 1 and parts and not self._job.closed:
                name, text = self._within.next_name(self._spreading), f"{type(error).__name__}: {error}"
                told = WireError(f"rank {self._job.rank} did not get the values for its group from the servers: {text}")
                never = self._within.start(
                    Kind.BROADCAST, parts[0], "chain", root=0, name=name, ready=lambda: False, label=self._label
                )
                self._within.fail(never, told)
            raise

    @property
    def _label(self) -> str:
        return f" of the values of {self._setting.name}, from the servers"
