"""Models that train across the iteration barrier, and the same with the barrier to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.worker import _mlp, assert_equal_everywhere, loss_of, seeded, state_of
from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.all_reduce.planning import ROUNDS_TO_WATCH
from stretto.aggregate.all_reduce.training import SynchronousAllReduce
from stretto.distributing import distribute, engine_of
from stretto.job import Job
from stretto.plan.profile import StepProfile
from stretto.plan.transfers import Gradient, TransferPlan
from stretto.schedule.orders import WaitFree
from stretto.schedule.priority import Priority
from stretto.strategy import Strategy
from stretto.testing import run_jobs


class Separately(Priority):
    """Each module's parameters by themselves, whatever the times: nothing is measured, and no two modules wait for each other."""

    __slots__ = ()

    @property
    def needs_profile(self) -> bool:
        return False

    def plan(self, gradients: Sequence[Gradient], profile: StepProfile | None) -> TransferPlan:
        return super().plan(gradients, None)


RING = AllReduce("ring")
CROSSING = Strategy(aggregate=RING, schedule=Separately(partition=64, credit=64))
BARRIER = Strategy(aggregate=RING, schedule=WaitFree())
WATCHED = 1  # without anything to measure, one round shows who reads which parameter
STEPS = ROUNDS_TO_WATCH + 4
MakeOptimizer = Callable[[Any], Optimizer]


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def crossing_of(model: nn.Module) -> Any:
    return cast(SynchronousAllReduce, engine_of(model).training)._crossing


def begin(job: Job, model: nn.Module, strategy: Strategy = CROSSING, make: MakeOptimizer = sgd) -> Optimizer:
    """Distributed, and past the rounds in which it is only watched."""
    optimizer = make(model.parameters())
    distribute(model, optimizer, strategy, job=job)
    for step in range(WATCHED):
        torch.autograd.backward(loss_of(model, job, step))
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def train(job: Job, strategy: Strategy, build: Callable[[], nn.Module], make: MakeOptimizer, steps: int) -> dict[str, Tensor]:
    """The weights after so many steps. If the strategy crosses the barrier, all steps but those that are watched do."""
    model = seeded(build)
    optimizer = make(model.parameters())
    distribute(model, optimizer, strategy, job=job)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    for step in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, job, step))
        crossing = crossing_of(model)
        assert (crossing is not None) == strategy.schedule.cross_barrier
        assert crossing is None or (step < WATCHED) == crossing.is_over
        optimizer.step()
        scheduler.step()
    return state_of(model)


def compare(
    size: int,
    strategy: Strategy,
    reference: Strategy,
    build: Callable[[], nn.Module] = _mlp,
    make: MakeOptimizer = sgd,
    hosts: Sequence[str] | None = None,
) -> None:
    """The same weights as with the barrier: to the last bit between two workers; with more, notes that ride with the gradients
    change where a ring cuts them, and so the order of additions."""
    expected, found = (run_jobs(size, train, each, build, make, STEPS, hosts=hosts) for each in (reference, strategy))
    assert_same(expected, found)


def assert_same(expected: list[dict[str, Tensor]], found: list[dict[str, Tensor]]) -> None:
    assert_equal_everywhere(found)
    if len(expected) == 2:
        assert_equal_everywhere([expected[0], found[0]])
    for name, value in expected[0].items():
        tolerance = 1e-12 if value.dtype is torch.float64 else 1e-5
        torch.testing.assert_close(found[0][name], value, rtol=tolerance, atol=tolerance)
