"""Local steps, and an outer optimizer on servers: each group exchanges with the center when it is due, and waits for no other.

    every step                  x_i <- U_i(x_i, g_i)                   each worker's own optimizer; the mean gradient in a group
    every `every`-th step       Delta_i = theta_i - x_i                theta_i: the center as this group has pulled it last
                                theta <- outer(theta, Delta_i)         on the servers, in the order of arrival
                                x_i <- theta                           with `overlap` so many steps later, and then
                                x_i <- merge x_i + (1 - merge) theta

With `LocalSGD` and all-reduce one outer step takes the mean Delta of all P groups. Here each Delta_i is a step of its own:

    Average()                   theta <- theta - Delta_i / P
    HeavyBall(lr, mu)           v <- mu v + Delta_i,  theta <- theta - (lr / P) v
    Nesterov(lr, mu)            v <- mu v + Delta_i,  theta <- theta - (lr / P) (Delta_i + mu v)

so that in the long run a Delta_i moves theta by lr / (P (1 - mu)) of it, as it does with all-reduce. But v decays with each
exchange instead of each round of P exchanges, so its memory is P times as short. A longer one would keep Deltas that were
computed from older centers.

Cost:      in every `every`-th step m bytes up and m down for each group, and a broadcast inside. Nothing waits for a slow group.
           m more memory in each worker, with `overlap` 2 m; m on the servers, 2 m with momentum.
Invariant: each Delta_i is applied exactly once, also when a server dies (`replicas=1`). With one group, and with `Average()` and
           groups that take turns, theta is what all-reduce would make of it.
Staleness: of an exchange, in the ledger: the Deltas of others that the center took since this group has pulled.
Reference: Liu et al., "Asynchronous local-SGD training for language modeling", 2024, arXiv:2401.09135, who find that momentum on
           every arrival hurts where workers are uneven, and that one remedy is to take it more rarely.
Departs:   v decays with every exchange, see above. In the paper slow workers take fewer steps between exchanges; here all take
           `every`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.hierarchy import group_admission as admission
from stretto.aggregate.hierarchy.center import ExchangeWithCenter
from stretto.aggregate.hierarchy.center_groups import GroupsWithCenter
from stretto.aggregate.local_sgd.optimizer_state import check_reset, reset
from stretto.aggregate.parameter_server.consistency import SyncAnswer
from stretto.aggregate.parameter_server.inventory import KeptParameter
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec
from stretto.aggregate.parameter_server.step_under_way import check_finite
from stretto.engine.finite import is_finite
from stretto.engine.training import EVERYBODY, Setting
from stretto.errors import NonFiniteGradient
from stretto.job import Job
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.local_sgd import LocalSGD
from stretto.sync.outer import HeavyBall, Nesterov

if TYPE_CHECKING:
    from collections.abc import Set

    from stretto.strategy import Strategy


class Due(NamedTuple):
    """An exchange under way, of this optimizer's parameters. Only the first worker of a group has one with the servers."""

    number: int
    until: int  # the step of this optimizer after which its result is taken
    exchange: ExchangeWithCenter | None


class OuterSteps(GroupsWithCenter):
    """`ParameterServer()` or `Hierarchy(outer=ParameterServer())` + `LocalSGD` + `Replicated`."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        assert isinstance(strategy.sync, LocalSGD), "another way of training"
        self._sync = strategy.sync
        super().__init__(strategy, job, setting)
        self._due: list[Due] = []  # one for each optimizer at most
        if self.engaged and self._sync.outer.remembers:
            self.state_text = f"sync={strategy.sync!r} with a center"

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        admission.check_answers(strategy)
        admission.check_outer_steps(strategy)

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        super().check(model, optimizers, strategy, job)
        assert isinstance(strategy.sync, LocalSGD)
        if strategy.sync.optimizer_state == "reset":
            for optimizer in optimizers:
                check_reset(optimizer)

    @property
    def _every(self) -> int:
        return self._sync.every

    def _sync_of_center(self) -> SyncAnswer:
        return Asynchronous()

    def _optimizer_of_center(self) -> OptimizerSpec:
        num_groups = len(self._clients)
        match self._sync.outer:
            case HeavyBall(lr, momentum):
                return OptimizerSpec("SGD", {"lr": lr / num_groups, "momentum": momentum})
            case Nesterov(lr, momentum):
                return OptimizerSpec("SGD", {"lr": lr / num_groups, "momentum": momentum, "nesterov": momentum > 0})
        return OptimizerSpec("SGD", {"lr": 1 / num_groups})

    # -- steps --------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> Set[Tensor] | None:
        self._job.check_usable()
        number = self._number_of(optimizer)
        admission.refuse_deciding_by_loss(optimizer)
        if self._setting.check_finite and self._inside is None and number is not None:
            check_finite(self._of(number), self._job.rank)
        return EVERYBODY

    def after_step(self, optimizer: Optimizer) -> None:
        number = self._number_of(optimizer)
        if number is None:
            return
        self._steps[number] += 1
        self._is_at_center = False
        step, entries = self._steps[number], self._of(number)
        if step % self._every == 0 and entries:
            self._begin(number, step)
        self._take_due(step, number)
        self._note_written(entries)

    def _begin(self, number: int, step: int) -> None:
        assert self._center is not None
        if self._setting.check_finite:
            self._check_weights(number)
        exchange = None
        if self._is_first:
            entries = self._of(number)
            gradient = self._center.values[entries[0].start : entries[-1].stop] - _values_of(entries)
            exchange = self._center.begin_exchange(number, gradient)
        self._due.append(Due(number, step + self._sync.overlap, exchange))
        if self._sync.optimizer_state == "reset":
            reset([self._optimizers[number]])

    def _check_weights(self, number: int) -> None:
        """What is pushed becomes part of the center for good. The workers of a group have the same bits, so all or none raise."""
        for each in self._of(number):
            if not is_finite(each.parameter.detach()):
                raise NonFiniteGradient({self._job.rank: each.name}, "a weight")

    def _take_due(self, step: int, number: int) -> None:
        """Take what came of the exchanges that end with this step."""
        for due in [each for each in self._due if each.number == number and each.until <= step]:
            self._due.remove(due)
            self._merge(self._came(due), self._of(number))

    def _merge(self, center: Tensor, entries: Sequence[KeptParameter]) -> None:
        keep = self._sync.merge
        with torch.no_grad():
            for each in entries:
                theirs = center[each.start : each.stop].view(each.parameter.shape).to(each.parameter)
                each.parameter.copy_(theirs if keep == 0 else theirs.lerp(each.parameter, keep))

    def _came(self, due: Due) -> Tensor:
        """The center as it was pulled, the same for all workers of the group."""
        assert self._center is not None
        entries = self._of(due.number)
        part = self._center.values[entries[0].start : entries[-1].stop]
        with self._from_first.telling(part):
            if due.exchange is not None:
                self._center.end_exchange(due.number, due.exchange)
        with self._in_group():
            self._from_first.give(part)
        return self._center.values

    def _settle(self) -> None:
        """What this group has pushed is in the center, and nothing is under way."""
        due, self._due = self._due, []
        for each in due:
            self._came(each)


def _values_of(entries: Sequence[KeptParameter]) -> Tensor:
    begin = entries[0].start
    values = torch.empty(entries[-1].stop - begin, dtype=torch.float32, device="cpu")
    for each in entries:
        values[each.start - begin : each.stop - begin].copy_(each.parameter.detach().reshape(-1))
    return values
