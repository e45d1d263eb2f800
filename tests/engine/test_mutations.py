"""What each worker gives to a round, where a small change of the engine went unnoticed by every other test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.worker import RING, data, mlp, seeded, start
from stretto.distributing import engine_of, join, weight
from stretto.errors import RankMismatch
from stretto.job import Job
from stretto.schedule.orders import WaitFree
from stretto.strategy import Strategy
from stretto.testing import run_jobs

AT_ONCE = Strategy(aggregate=RING.aggregate, schedule=WaitFree())


def gradients(build: Any, parts: list[tuple[float, Tensor]]) -> dict[str, Tensor]:
    """What one process computes as the weighted mean over these batches."""
    model, total = build(), sum(weight for weight, _ in parts)
    for share, x in parts:
        (share / total * model(x).pow(2).mean()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("strategy", [RING, AT_ONCE], ids=["in buckets", "at once"])
def test_a_worker_of_weight_0_gives_nothing_be_it_a_number_or_nan(strategy: Strategy) -> None:
    def program(job: Job) -> None:
        for nothing in (1.0, float("nan")):
            model = mlp()
            start(job, model, strategy)
            weight(job.rank % 2, job=job)
            model(data(job.rank) * (nothing if job.rank != 1 else 1.0)).pow(2).mean().backward()
            assert_gradients(model, gradients(mlp, [(1.0, data(1))]))

    run_jobs(3, program)


def test_a_worker_that_has_run_out_gives_nothing_of_its_last_batch() -> None:
    """It did not call zero_grad after it: neither the values nor the mere presence of its old gradients may count."""

    def program(job: Job) -> None:
        model: Any = nn.ModuleDict({"always": nn.Linear(2, 1, bias=False), "at first": nn.Linear(2, 1, bias=False)})
        optimizer = start(job, model)
        with join(model):
            for step in range(1 + job.rank):
                optimizer.zero_grad()
                names = model if step == 0 else ["always"]
                x = torch.full((1, 2), 1.0 + step + 10 * job.rank)
                sum(model[name](x).sum() for name in names).backward()
                if step > 0:
                    working = [10.0 * rank + step + 1.0 for rank in range(step, 3)]
                    assert torch.equal(model["always"].weight.grad, torch.full((1, 2), sum(working) / len(working)))
                    assert model["at first"].weight.grad is None, "nobody has used it in this round"
                optimizer.step()

    run_jobs(3, program)


class Segments(nn.Module):
    """One layer in four checkpointed segments: its gradient comes in four parts, and all but the first come late."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(4):
            hidden = checkpoint(self._segment, hidden, use_reentrant=self.reentrant, preserve_rng_state=False)
        assert isinstance(hidden, Tensor)
        return hidden

    def _segment(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.shared(hidden).tanh()
        return out


@pytest.mark.parametrize("batches", [[1, 1, 1], [0, 1, 1]], ids=["all work", "one has run out"])
def test_late_gradients_are_added_up_and_weighed(batches: list[int]) -> None:
    def plain() -> Any:
        return seeded(lambda: Segments(False).double())

    parts = [(rank + 1.0, data(rank)) for rank in range(3) if batches[rank]]

    def program(job: Job) -> int:
        model = seeded(lambda: Segments(True).double())
        start(job, model, AT_ONCE)
        engine, late = engine_of(model), list[int]()
        keep_late = engine._keep_late

        def count(parameter: Tensor) -> None:
            late.append(1)
            keep_late(parameter)

        engine._keep_late = count  # type: ignore[method-assign]
        with join(model):
            for _ in range(batches[job.rank]):
                weight(job.rank + 1.0, job=job)
                model(data(job.rank)).pow(2).mean().backward()
                assert_gradients(model, gradients(plain, parts))
        return len(late)

    for rank, num_late in enumerate(run_jobs(3, program)):
        assert num_late == 6 * batches[rank]  # three times the weight and the bias


def test_a_gradient_that_came_only_late_is_handed_out() -> None:
    """A hook of the user's own has taken the first part away, before its bucket left."""

    def program(job: Job) -> None:
        model = seeded(lambda: Segments(True).double())
        start(job, model)
        engine = engine_of(model)
        bucket, slot = engine.places.of[model.shared.bias]
        assert len(bucket.parameters) > 1 and slot == 0 and bucket.early
        taken: list[Tensor] = []

        def take(parameter: Tensor) -> None:
            if not taken and parameter.grad is not None:
                taken.append(parameter.grad)
                parameter.grad = None

        model.shared.bias.register_post_accumulate_grad_hook(take)
        model(data(job.rank)).pow(2).mean().backward()
        assert len(taken) == 1
        assert model.shared.bias.grad is not None and bool(model.shared.bias.grad.any())

    run_jobs(2, program)


def test_parameters_that_lie_differently_in_memory_on_one_worker_are_a_mismatch_on_all() -> None:
    """Of one shape, but with another order of their elements: flat, one worker's would be added to others of the rest."""

    def program(job: Job) -> str:
        model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 1)).double())
        model[2].bias.requires_grad_(False)
        start(job, model)
        x = torch.ones(1, 2, 3, 3, dtype=torch.float64)
        model(x).sum().backward()
        if job.rank == 1:
            model[0].to(memory_format=torch.channels_last)
        model[2].bias.requires_grad_(True)  # on all: parameters get a new place
        model.zero_grad()
        with pytest.raises(RankMismatch) as caught:
            model(x).sum().backward()
        return str(caught.value)

    assert all("layout" in said for said in run_jobs(3, program))
