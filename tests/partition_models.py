"""What the tests of pipelines train, and how a plain loop trains it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH = 6
_ONE_AT_A_TIME = threading.Lock()  # torch's random state is one for all threads
Batches = list[tuple[Tensor, Tensor]]


def made(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with _ONE_AT_A_TIME:
        torch.manual_seed(seed)
        return make()


def chain() -> nn.Sequential:
    """Eight layers with parameters; some cuts leave an activation that works in place at the beginning of a stage."""
    layers: list[nn.Module] = []
    for _ in range(7):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True) if len(layers) % 4 else nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 2))


def batches(steps: int, sizes: tuple[int, ...] = (8, 7)) -> Batches:
    """Their sizes take turns."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, WIDTH, generator=generator), torch.randn(size, 2, generator=generator))
        for size in (sizes[step % len(sizes)] for step in range(steps))
    ]


def trained_alone(model: nn.Module, data: Batches, clip: float | None = None) -> tuple[dict[str, Tensor], list[float]]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def share(batch: Tensor, replica: int, replicas: int) -> Tensor:
    return batch[len(batch) * replica // replicas : len(batch) * (replica + 1) // replicas]
