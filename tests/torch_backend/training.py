"""What the tests of torch's libraries train, and the one process that they are compared with.

`n` workers see the batch of that process in equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from largest import largest

dist: Any = torch.distributed  # whose stubs leave out what its pages describe
STEPS = 4
Difference = float


class Case(NamedTuple):
    """`folder`: for files, the same on all workers. `is_long`: 20 steps, and what takes long."""

    folder: Path
    is_long: bool = False

    @property
    def steps(self) -> int:
        return 20 if self.is_long else STEPS


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def batch(step: int, size: int = 24) -> Tensor:
    return torch.randn(size, 16, generator=torch.Generator().manual_seed(step))


def part(whole: Tensor) -> Tensor:
    mine: Tensor = whole.chunk(dist.get_world_size())[dist.get_rank()]
    return mine


def part_of_batch(step: int) -> Tensor:
    return part(batch(step))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Callable[[int], Tensor], steps: int = STEPS, first: int = 0
) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        optimizer.step()


def trained_alone(steps: int = STEPS, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw) -> nn.Module:
    """The model of one process with the whole batches, and the gradients of the last."""
    model = mlp()
    train(model, optimizer(model), batch, steps)
    return model


def alone(steps: int = STEPS) -> list[Tensor]:
    return [parameter.detach() for parameter in trained_alone(steps).parameters()]


def whole(tensors: Iterable[Any]) -> list[Tensor]:
    """DTensors in one piece."""
    return [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]


def difference(mine: Iterable[Any], theirs: Iterable[Tensor]) -> Difference:
    return largest(float((a.detach() - b.detach()).abs().max()) for a, b in zip(whole(mine), theirs, strict=True))
