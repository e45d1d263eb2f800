"""Gossip every so many steps: each worker trains by itself, and then with its partner of this time (NoLoCo).

In every `every`-th step, the t-th time, with W the mixing matrix of the graph at t (a half for each of a pair):

    c_i   = lr (x_i - phi_i) + pull phi_i                                     leaves
    delta_i <- momentum delta_i + sum_j W_ij c_j - pull phi_i
    phi_i   <- phi_i + delta_i,        x_i <- phi_i

which is `sync/noloco.py`, with one vector sent instead of two. `Average()` is momentum 0, lr 1 and pull 1: x_i <- sum_j W_ij x_j.

It waits for the partner, in `optimizer.step()`. One that is dead, or has finished, is left out: its weight stays with the worker
itself. So is one that sits out a matching of an odd number.

`stretto.consensus(model)`, called plainly, puts the mean into the model; slow weights begin anew there, and keep their last move.

Cost:      m bytes each way for each partner, every `every` steps; three vectors of m bytes in a worker, two more at an exchange.
Invariant: sum_i phi_i moves by sum_i (momentum delta_i + lr (x_i - phi_i)), whoever meets whom.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.aggregate.gossip import admission
from stretto.aggregate.gossip.averaging import NeighbourAverage
from stretto.aggregate.gossip.training import GossipTraining
from stretto.engine.training import Setting
from stretto.job import Job
from stretto.sync.local_sgd import LocalSGD
from stretto.sync.noloco import NoLoCo

if TYPE_CHECKING:
    from stretto.strategy import Strategy

SLOW, MOVE = "slow weights", "last move of slow weights"


class OuterGossip(GossipTraining):
    """`Gossip` + `LocalSGD` + `Replicated`."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        assert isinstance(strategy.sync, LocalSGD)
        outer = strategy.sync.outer
        self._every = strategy.sync.every
        self._outer = outer if isinstance(outer, NoLoCo) else NoLoCo(0.0, 1.0, 1.0)
        self.state_text = f"sync={strategy.sync!r}, aggregate={strategy.aggregate!r}" if self.engaged else None

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        admission.check_outer_steps(strategy)

    @property
    def rounds(self) -> int:
        """Exchanges so far."""
        return self.steps // self._every

    def _begin_exchange(self) -> None:
        """What is a step to the exchange is one of ours in `every`."""
        steps = self.steps
        self.steps = self.rounds
        super()._begin_exchange()
        if self._network is not None and self._network.life:  # it takes part from the next exchange on
            steps = self._job.first_step = self.steps * self._every
            self._ended = [steps] * len(self._ended)
        self.steps = steps

    def _begin_mixing(self) -> None:
        self._mixing = NeighbourAverage(self._job.rank, self.mixing_weights)
        self._slow, self._move = self.weights.read(), self.weights.zeros()

    def stepped(self, step: int) -> None:
        if step % self._every:
            return
        outer, slow = self._outer, self._slow
        moved = self.weights.read(self._pool.empty(self.weights.numel, torch.float32, slow.device)).sub_(slow)
        offered = moved.mul_(outer.lr).add_(slow, alpha=outer.pull)
        self._leave(self._mixing.leaves(self.rounds, offered, self._gone))
        difference = self._mixing.difference(self.rounds, self._end(self.rounds, 0))
        self._move.mul_(outer.momentum).add_(offered).sub_(slow, alpha=outer.pull)
        if difference is not None:
            self._move.add_(difference)
        slow.add_(self._move)
        self.weights.write(slow)
        self._job.ledger.count_round()

    def moved(self) -> None:
        self._slow = self.weights.read()

    def own_extra(self) -> dict[str, Tensor]:
        return {SLOW: self._slow, MOVE: self._move}

    def load_own_extra(self, saved: Mapping[str, Any]) -> None:
        self._begin_mixing()
        if saved:
            self._slow, self._move = saved[SLOW].clone(), saved[MOVE].clone()
