"""What the tests of servers that step share: small models, reference runs in one process, and workers that take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import stretto
from engine.worker import seeded
from stretto.aggregate.parameter_server import ParameterServer
from stretto.distributing import distribute
from stretto.job import Job
from stretto.strategy import Strategy

PATIENCE_S = 20.0
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def strategy(sync: Any, shards: int = 2, replicas: int = 0) -> Strategy:
    return Strategy(aggregate=ParameterServer(shards, replicas), sync=sync)


def mlp(seed: int = 0) -> nn.Sequential:
    model: nn.Sequential = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), seed)
    return model


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * number + rank))


def backward(model: nn.Module, rank: int, number: int) -> None:
    loss = model(batch(rank, number).to(next(model.parameters()).dtype)).pow(2).mean()
    torch.autograd.backward(loss)


def values_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def train(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Iterable[int]) -> list[list[Tensor]]:
    """The parameters after every step."""
    seen = []
    for number in numbers:
        backward(model, job.rank, number)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(values_of(model))
    return seen


def one_after_the_other(make: MakeOptimizer, size: int, steps: int) -> list[list[Tensor]]:
    """One process does what servers do with a bound of 0: all gradients of a step on the same values, applied by rank."""
    model = mlp()
    optimizer = make(model.parameters())
    seen = []
    for number in range(steps):
        gradients = []
        for rank in range(size):
            model.zero_grad()
            backward(model, rank, number)
            gradients.append([parameter.grad for parameter in model.parameters()])
        for each in gradients:
            for parameter, gradient in zip(model.parameters(), each, strict=True):
                parameter.grad = gradient
            optimizer.step()
        seen.append(values_of(model))
    return seen


class Scalar(nn.Module):
    """One parameter w; the gradient is what the call is given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, gradient: float) -> Tensor:
        return (self.w * gradient).sum()


def start_scalar(job: Job, sync: Any, lr: float = 1.0, **options: Any) -> tuple[Scalar, torch.optim.Optimizer]:
    model = Scalar()
    return distribute(model, torch.optim.SGD(model.parameters(), lr=lr), strategy(sync), job=job, **options)


def step_by(model: Scalar, optimizer: torch.optim.Optimizer, gradient: float) -> float:
    """The value afterwards."""
    optimizer.zero_grad()
    torch.autograd.backward(model(gradient))
    optimizer.step()
    return float(model.w.detach())


class Turns:
    """Ranks take turns: `with turns(rank):` is entered by 0, 1, ..., P-1, 0, 1, ..."""

    def __init__(self, size: int) -> None:
        self._size, self._next = size, 0
        self._changed = threading.Condition()

    def __call__(self, rank: int) -> Turns:
        with self._changed:
            assert self._changed.wait_for(lambda: self._next % self._size == rank, PATIENCE_S)
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._next += 1
            self._changed.notify_all()


def learn_by_servers(text: str, steps: int) -> tuple[list[float], dict[int, int]]:
    """In a process of its own."""
    job = stretto.init()
    model = mlp(job.rank)
    _, optimizer = distribute(model, sgd(model.parameters()), text)
    train(job, model, optimizer, range(steps))
    stretto.barrier()
    found = [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]
    staleness = dict(job.ledger.staleness)
    stretto.shutdown()
    return found, staleness
