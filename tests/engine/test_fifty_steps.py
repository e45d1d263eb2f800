"""After fifty steps all schedules have led to the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.crossing import RING, Separately, sgd
from engine.worker import assert_equal_everywhere, loss_of, mlp, state_of
from stretto.distributing import distribute
from stretto.job import Job
from stretto.schedule.caramel import Caramel
from stretto.schedule.merged import Merged
from stretto.schedule.orders import AfterBackward, Buckets, WaitFree
from stretto.schedule.priority import Priority
from stretto.schedule.tictac import Tac, Tic
from stretto.strategy import Strategy
from stretto.testing import run_jobs

pytestmark = pytest.mark.slow
STEPS = 50
SCHEDULES = (
    AfterBackward(), Buckets(), Buckets(bytes=128, first_bytes=64), Merged(), Tic(), Tac(), Tac(cross_barrier=False), Priority(),
    Priority(partition=100, credit=100), Priority(cross_barrier=False), Caramel(), Caramel(cross_barrier=False),
)  # fmt: skip


def weights(job: Job, schedule: Any) -> dict[str, Tensor]:
    model = mlp()
    optimizer = sgd(model.parameters())
    distribute(model, optimizer, Strategy(aggregate=RING, schedule=schedule), job=job)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.8)
    for step in range(STEPS):
        torch.autograd.backward(loss_of(model, job, step))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return state_of(model)


@lru_cache
def by_parameter(size: int) -> Sequence[dict[str, Tensor]]:
    return tuple(run_jobs(size, weights, WaitFree()))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_weights_are_equal_whatever_the_schedule(schedule: Any, size: int) -> None:
    """To the last bit between two workers, whose sums have one order. With more, a ring cuts other transfers elsewhere, and each
    piece is added in an order of its own."""
    expected, found = by_parameter(size), run_jobs(size, weights, schedule)
    assert_equal_everywhere(found)
    if size == 2:
        assert_equal_everywhere([expected[0], found[0]])
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("size", [3, 4, 7])
def test_weights_have_the_same_bits_where_the_plan_is_the_same(size: int) -> None:
    """In which order messages leave, and when gradients arrive, changes nothing of what is added to what."""
    crossing, again = (run_jobs(size, weights, Separately(partition=64, credit=64)) for _ in range(2))
    all_at_once = run_jobs(size, weights, Separately(partition=64, credit=1 << 20))
    assert_equal_everywhere([crossing[0], again[0], all_at_once[0]])
