"""At stage 2 the order in which buckets leave is learned: gradients do not stay whole until backward has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from aggregate.zero.sliced import same_bits, strategy, values
from stretto.aggregate.zero.bucket import AT_ONCE
from stretto.aggregate.zero.gradient import GradientInSlices
from stretto.aggregate.zero.training import ShardedAllReduce
from stretto.distributing import distribute
from stretto.job import Job
from stretto.schedule.orders import Buckets
from stretto.testing import run_jobs

WIDTH, LAYERS = 8, 12
ONE_LAYER = Buckets(bytes=4 * WIDTH * WIDTH, first_bytes=4 * WIDTH * WIDTH)


class Layers(nn.Module):
    """`kind`: where there is a layer that is not used, and whether the others are called as they are registered."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "unused first":
            self.never = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        if kind == "unused last":
            self.never = nn.Linear(WIDTH, WIDTH, bias=False)
        self.called = list(reversed(self.layers)) if kind == "registered in reverse" else list(self.layers)
        self.look: Callable[[], None] = lambda: None
        for number, parameter in enumerate(self.parameters()):
            parameter.data.copy_(torch.eye(WIDTH) + torch.arange(WIDTH) * 0.01 * number)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.called:
            x = layer(x)
            x.register_hook(lambda _: self.look())  # type: ignore[no-untyped-call]
        return x


def whole(training: ShardedAllReduce, model: nn.Module) -> int:
    """The gradients that have memory of their own, and those under way."""
    kept = [given for bucket in training.sliced for given in bucket._given if given is not None]
    kept += [p.grad for p in model.parameters() if p.grad is not None and not isinstance(p.grad, GradientInSlices)]
    return len({each.data_ptr() for each in kept}) + sum(training._room._lent.values())


@pytest.mark.parametrize("kind", ["plain", "unused first", "unused last", "registered in reverse", "watched"])
def test_gradients_leave_while_backward_goes_on(kind: str) -> None:
    """After the first round, from which the order is learned."""

    def program(job: Job, stage: int) -> tuple[list[int], list[Tensor]]:
        model = Layers(kind)
        optimizer = AdamW(model.parameters(), lr=0.01)
        distribute(model, optimizer, strategy(stage, ONE_LAYER), job=job)
        training: Any = next(iter(job.engines)).training
        most: list[int] = []

        def look() -> None:
            most[-1] = max(most[-1], whole(training, model))

        if kind == "watched":
            next(reversed(list(model.layers.parameters()))).register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
        for _ in range(4):
            most.append(0)
            model.look = look if stage else model.look
            model(torch.ones(1, WIDTH) * (job.rank + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return most, values(model)

    replicated = run_jobs(2, lambda job: program(job, 0))[0][1]
    for most, mine in run_jobs(2, lambda job: program(job, 2)):
        held_back = 1 if kind == "watched" else 0
        assert max(most[1:]) <= AT_ONCE + 1 + held_back, most
        assert same_bits(mine, replicated)


@pytest.mark.parametrize("size", [3, 4])
def test_workers_whose_buckets_fill_in_different_orders_keep_to_that_of_rank_0(size: int) -> None:
    """Nobody waits for ever, and the graph may change from round to round."""

    def program(job: Job, stage: int) -> list[Tensor]:
        model = Layers("plain")
        optimizer = AdamW(model.parameters(), lr=0.01)
        distribute(model, optimizer, strategy(stage, ONE_LAYER, "direct"), job=job)
        for step in range(6):
            called = list(model.layers)
            model.called = called[(job.rank + step) % 5 :] + called[: (job.rank * step) % 4]
            model(torch.ones(1, WIDTH) * (job.rank + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    replicated = run_jobs(size, lambda job: program(job, 0), timeout_s=30)[0]
    for mine in run_jobs(size, lambda job: program(job, 2), timeout_s=30):
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(mine, replicated, strict=True))
