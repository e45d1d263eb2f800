"""Models, and training runs of them, for the tests of sharded state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from stretto.aggregate.all_reduce import AllReduce
from stretto.distributing import distribute
from stretto.job import Job
from stretto.schedule.orders import Buckets
from stretto.shard.replicated import Replicated
from stretto.shard.zero import Zero
from stretto.strategy import Schedule, Strategy

Make = Callable[[nn.Module], Optimizer]
STEPS = 5
SMALL = Buckets(bytes=256, first_bytes=64)
STAGES = (1, 2)


def strategy(stage: int, schedule: Schedule = SMALL, algorithm: str = "ring", **options: Any) -> Strategy:
    """Stage 0: replicated."""
    shard = Zero(stage, **options) if stage else Replicated()
    return Strategy(aggregate=AllReduce(algorithm), schedule=schedule, shard=shard)


def net() -> nn.Sequential:
    """The same on all workers, which are threads and share torch's generator."""
    model = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 7), nn.Tanh(), nn.Linear(7, 3))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def batch(step: int, job: Job, samples: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    whole = torch.randn(samples * 7, 6, generator=generator)
    return whole[: samples * job.world_size].chunk(job.world_size)[job.rank].clone()


def backward(model: nn.Module, x: Tensor) -> None:
    (model(x) - x[:, :3].sin()).pow(2).mean().backward()


def values(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def train(job: Job, how: Strategy, make: Make = adamw, steps: range = range(STEPS), after: Any = None) -> list[Tensor]:
    """Plain training. `after(model, optimizer)`: between backward and step."""
    model = net()
    model, optimizer = distribute(model, make(model), how, job=job)
    go_on(job, model, optimizer, steps, after)
    return values(model)


def go_on(job: Job, model: nn.Module, optimizer: Optimizer, steps: range, after: Any = None) -> None:
    for step in steps:
        backward(model, batch(step, job))
        if after is not None:
            after(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def close(one: list[Tensor], other: list[Tensor], tolerance: float = 1e-6) -> bool:
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(one, other, strict=True))
