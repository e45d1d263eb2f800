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

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.hierarchy import group_admission as admission
from stretto.aggregate.hierarchy.from_first import FromFirst
from stretto.aggregate.hierarchy.group_rounds import GroupRounds
from stretto.aggregate.parameter_server.consistency import SyncAnswer, rule_for
from stretto.aggregate.parameter_server.stepping import SteppingServers
from stretto.aggregate.parameter_server.training import clients_of
from stretto.collectives import calls
from stretto.engine.bucket import Bucket
from stretto.engine.training import NOBODY, Named, Setting
from stretto.errors import PeerLost, StrettoError
from stretto.job import Job

if TYPE_CHECKING:
    from stretto.strategy import Strategy


class GroupsWithSteppingServers(GroupRounds, SteppingServers):
    """`Hierarchy(outer=ParameterServer())` + `StaleSynchronous`, `Asynchronous`, `SoftSync` or `BackupWorkers` + `Replicated`."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self._values = FromFirst(self._within, f"the values of {setting.name} from the servers")
        self._share = self._within.size * len(clients_of(strategy, job)) / job.world_size  # of a group in a mean

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        admission.check_answers(strategy)
        super().check_strategy(strategy)

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        super().check(model, optimizers, strategy, job)
        if job.world_size > 1:
            assert isinstance(strategy.sync, SyncAnswer), "another way of training"
            rule_for(strategy.sync, len(clients_of(strategy, job)))

    def arrange(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[Bucket]:
        SteppingServers.arrange(self, dense, sparse)
        return self._arrange_inside(dense, sparse)

    def _lose_group(self, lost: PeerLost) -> None:
        self._broken = lost
        if self._service is not None:
            self._end_service()

    @property
    def _weight(self) -> float:
        mine = self._job.weight if self._mean_weight is None else self._mean_weight
        return mine * self._share

    # -- steps --------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> Set[Tensor] | None:
        if self._is_first:
            return super().before_step(optimizer)
        self._look(optimizer)
        return NOBODY

    def after_step(self, optimizer: Optimizer) -> None:
        number = next((number for number, given in enumerate(self._optimizers) if given is optimizer), None)
        if number is not None:
            with self._values.telling(self._part(number)):
                super().after_step(optimizer)
            self._spread([number])

    def _pull_all(self) -> None:
        with self._values.telling(self._part(0)):
            if self._is_first:
                super()._pull_all()
        self._spread(range(len(self._optimizers)))

    @property
    def _is_untouched(self) -> bool:
        """All workers of a group decide alike what happens to their values."""
        mine = super()._is_untouched
        return mine if self._within.size == 1 else all(calls.gather_object(self._within, mine))

    def _spread(self, numbers: Sequence[int]) -> None:
        """All workers of the group get the values that the first has pulled, of these optimizers."""
        try:
            with self._in_group():
                for number in numbers:
                    self._values.give(self._part(number))
        except StrettoError as error:
            self._broken = error  # this worker has other values than its group
            raise
        if not self._is_first:
            self._copy(each for each in self._inventory.entries if each.optimizer in numbers)

    def _part(self, number: int) -> Tensor:
        """The values of an optimizer's parameters, which lie together."""
        places = [place for each in self._inventory.entries if each.optimizer == number for place in (each.start, each.stop)]
        return self._flat[min(places) : max(places)] if places else self._flat[:0]
