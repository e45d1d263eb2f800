"""What the tests of the engine share: small models that are alike on every rank, and a job of threads to train them in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.aggregate.all_reduce import AllReduce
from stretto.distributing import distribute, engine_of
from stretto.engine.training import TrainingState
from stretto.job import Job
from stretto.schedule.orders import Buckets
from stretto.strategy import Strategy

RING = Strategy(aggregate=AllReduce("ring"), schedule=Buckets(bytes=128, first_bytes=64))
_building = threading.Lock()  # torch's random state belongs to the process, and ranks are threads here


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> Any:
    with _building, torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def mlp(seed: int = 0) -> nn.Sequential:
    model: nn.Sequential = seeded(_mlp, seed)
    return model


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def data(rank: int, step: int = 0, length: int = 6, width: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(length, width, generator=generator, dtype=torch.float64)


def start(job: Job, model: nn.Module, strategy: Strategy = RING, lr: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    distribute(model, optimizer, strategy, job=job, **options)
    return optimizer


def loss_of(model: nn.Module, job: Job, step: int = 0) -> Tensor:
    loss: Tensor = model(data(job.rank, step).to(next(model.parameters()).dtype)).pow(2).mean()
    return loss


def take_step(model: nn.Module, job: Job, *optimizers: torch.optim.Optimizer, step: int = 0) -> None:
    torch.autograd.backward(loss_of(model, job, step))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


class Refusing(torch.autograd.Function):
    """An operation whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("this backward cannot go on")


class OneAtATime:
    """`with tracing:` lets ranks, which are threads here, trace or compile a model one after the other, and go on together.

    torch.fx and what is built on it (export, AOT autograd, unpickling a graph) replace `nn.Module.__call__` for the whole process
    while they trace: a rank that calls a model meanwhile ends up in the other's graph, and two that trace at once leave the
    replacement behind for ever.
    """

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._everybody = threading.Barrier(size, timeout=60)

    def __enter__(self) -> None:
        self._everybody.wait()  # nobody is still in a model
        self._lock.acquire()

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._lock.release()
        if kind is not None:
            self._everybody.abort()
            return
        self._everybody.wait()


def bytes_sent(job: Job) -> int:
    assert job.wire is not None
    return job.wire.bytes_sent


def rounds(model: nn.Module) -> int:
    return engine_of(model).rounds


def remembered(model: nn.Module) -> TrainingState:
    """What the compressions of a distributed model remember."""
    return engine_of(model).training.state()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal_everywhere(states: Sequence[dict[str, Tensor]]) -> None:
    for state in states[1:]:
        for name, value in states[0].items():
            assert torch.equal(state[name], value), name


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
