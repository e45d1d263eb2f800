"""`stretto.clip_grad_norm_` under every kind of strategy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import stretto
from aggregate.zero.sliced import adamw, backward, batch, close, net, values
from stretto import LocalSGD, ParameterServer, Priority, Strategy, Zero
from stretto.distributing import distribute
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.testing import run_jobs

STEPS = 7  # more than a schedule watches before gradients cross the barrier


def clipped(job: Job, strategy: Strategy) -> tuple[list[Tensor], list[float]]:
    model = net()
    optimizer = adamw(model)
    distribute(model, optimizer, strategy, job=job)
    norms = []
    for step in range(STEPS):
        backward(model, batch(step, job))
        norms.append(float(stretto.clip_grad_norm_(model.parameters(), 0.05)))
        assert float(stretto.clip_grad_norm_(list(model.parameters()), 1.0)) == pytest.approx(0.05, rel=1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return values(model), norms


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(schedule=Priority()),
        Strategy(aggregate=ParameterServer(shards=2)),
        Strategy(shard=Zero(1)),
        Strategy(shard=Zero(2)),
        Strategy(shard=Zero(2), schedule=Priority()),
    ],
    ids=repr,
)
def test_the_norm_is_that_of_the_mean_over_all_workers(strategy: Strategy) -> None:
    plain, expected = run_jobs(3, clipped, Strategy())[0]
    for mine, norms in run_jobs(3, clipped, strategy):
        assert close(mine, plain, 1e-5) and norms == pytest.approx(expected, rel=1e-5)


def test_where_gradients_are_a_workers_own_so_is_the_norm() -> None:
    def program(job: Job) -> tuple[float, float]:
        model = net()
        distribute(model, adamw(model), Strategy(sync=LocalSGD(4)), job=job)
        backward(model, batch(0, job))
        own = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        expected = float(torch.stack([gradient.norm() for gradient in own]).norm())
        return expected, float(stretto.clip_grad_norm_(model.parameters(), 0.1))

    found = run_jobs(2, program)
    assert all(norm == pytest.approx(expected) for expected, norm in found) and found[0] != found[1]


def test_torchs_own_across_the_barrier_says_what_to_write() -> None:
    def program(job: Job) -> None:
        model = net()
        optimizer = adamw(model)
        distribute(model, optimizer, Strategy(shard=Zero(1), schedule=Priority()), job=job)
        for step in range(STEPS):
            backward(model, batch(step, job))
            if step == STEPS - 1:
                with pytest.raises(ConfigurationError, match=r"optimizer\.synchronize"):
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        model.state_dict()

    run_jobs(2, program)
