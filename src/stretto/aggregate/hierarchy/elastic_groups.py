"""Elastic averaging among groups: each trains by itself, and now and then it and a center on the servers move to each other.

    backward        p.grad <- the mean over the group                                     all-reduce inside
    before_step     in every `every`-th step: x~ is pulled, and  d_i = rate (x_i - x~)    by the group's first worker
    step            x_i <- U(x_i, g)                                                      every worker's own optimizer
    after_step      in these steps:  x_i <- x_i - d_i,  x~ <- x~ + d_i                    the first worker pushes d_i

With SGD that is x_i - eta g - rate (x_i - x~), gradient and difference both at the x_i of before. What a group loses the center
gains, to the rounding of one addition each: sum_i x_i + x~ is changed by gradients alone.

    sync=Synchronous()            all groups pull the same x~, and their differences are added in the order of groups
    sync=StaleSynchronous(s)      nobody is more than s exchanges ahead of the slowest
    sync=Asynchronous()           nobody waits for anybody

While training the model is the group's own x_i. The result is x~ (`center_groups.py`).

Invariant: all workers of a group hold the same bits after each step.
Cost:      in every `every`-th step m bytes up and m down for each group, and a broadcast inside; m more memory in each worker.
Reference: Zhang, Choromanska and LeCun, "Deep learning with elastic averaging SGD", NIPS 2015; Mamidala et al., "MXNET-MPI",
           arXiv:1801.03855, for groups.
Departs:   a group waits until the center has taken its difference, so that whoever reads the center when all have come to a
           checkpoint reads all of them.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.hierarchy import group_admission as admission
from stretto.aggregate.hierarchy.center import ADDING
from stretto.aggregate.hierarchy.center_groups import GroupsWithCenter
from stretto.aggregate.parameter_server.consistency import SyncAnswer
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec
from stretto.aggregate.parameter_server.step_under_way import check_finite
from stretto.aggregate.parameter_server.training import clients_of
from stretto.engine.training import EVERYBODY, Setting
from stretto.job import Job
from stretto.sync.local_sgd import LocalSGD
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.sync.synchronous import Synchronous

if TYPE_CHECKING:
    from stretto.strategy import Strategy


class ElasticGroups(GroupsWithCenter):
    """`Hierarchy(outer=ParameterServer(), elastic=Elastic(...))` + `Synchronous`, `StaleSynchronous` or `Asynchronous` +
    `Replicated`."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self._rate = admission.elastic_of(strategy).rate_for(len(self._clients))
        self._differences: dict[int, Tensor] = {}  # by optimizer, between the beginning of a step and its end

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        admission.check_answers(strategy)
        admission.check_elastic_sync(strategy)

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        admission.elastic_of(strategy).rate_for(len(clients_of(strategy, job)))
        super().check(model, optimizers, strategy, job)

    @property
    def _every(self) -> int:
        return admission.elastic_of(self._strategy).every

    def _sync_of_center(self) -> SyncAnswer:
        sync = self._strategy.sync
        assert not isinstance(sync, LocalSGD), "another way of training"
        return StaleSynchronous(0) if isinstance(sync, Synchronous) else sync

    def _optimizer_of_center(self) -> OptimizerSpec:
        return ADDING

    def before_step(self, optimizer: Optimizer) -> Set[Tensor] | None:
        self._job.check_usable()
        number = self._number_of(optimizer)
        admission.refuse_deciding_by_loss(optimizer)
        entries = [] if number is None else self._of(number)
        if self._setting.check_finite and self._inside is None:
            check_finite(entries, self._job.rank)
        if number is not None and (self._steps[number] + 1) % self._every == 0 and entries:
            begin = entries[0].start
            center = self._pull(number)
            difference = torch.empty_like(center)
            for each in entries:
                difference[each.start - begin : each.stop - begin].copy_(each.parameter.detach().reshape(-1))
            self._differences[number] = difference.sub_(center).mul_(self._rate)
        return EVERYBODY

    def after_step(self, optimizer: Optimizer) -> None:
        number = self._number_of(optimizer)
        if number is None:
            return
        entries, difference = self._of(number), self._differences.pop(number, None)
        self._steps[number] += 1
        self._is_at_center = False
        if difference is not None:
            begin = entries[0].start
            with torch.no_grad():
                for each in entries:
                    part = difference[each.start - begin : each.stop - begin].view(each.parameter.shape).to(each.parameter.device)
                    each.parameter.copy_(each.parameter.to(torch.float32).sub(part))
            if self._is_first:
                assert self._center is not None
                self._center.add(number, difference)
        self._note_written(entries)
