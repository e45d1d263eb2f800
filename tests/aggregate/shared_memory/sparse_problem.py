"""A separable problem with sparse gradients, and how processes learn it together."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import stretto
from stretto.distributing import distribute

FEATURES, ACTIVE, SAMPLES = 2000, 4, 600


class Sparse(nn.Module):
    """Logistic regression: a sample is a few features, and its gradient has just their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.EmbeddingBag(FEATURES, 1, mode="sum", sparse=True)
        nn.init.zeros_(self.weight.weight)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.weight(features)[:, 0]
        return out


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randint(FEATURES, (SAMPLES, ACTIVE), generator=generator)
    truth = torch.randn(FEATURES, generator=generator)
    return features, (truth[features].sum(1) > 0).float()


def whole_loss(model: nn.Module) -> float:
    features, labels = samples()
    with torch.no_grad():
        return float(nn.functional.binary_cross_entropy_with_logits(model(features), labels))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int, epochs: int) -> None:
    features, labels = samples()
    for _ in range(epochs):
        for start in range(4 * rank, SAMPLES, 4 * size):
            part = slice(start, start + 4)
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(features[part]), labels[part])
            torch.autograd.backward(loss)
            optimizer.step()


def learn_together(epochs: int) -> tuple[float, list[float], dict[int, int], bool]:
    """In a process of its own: loss at the end, weights, the staleness of its steps, and whether its memory has no name."""
    job = stretto.init()
    model = Sparse()
    _, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.5), "hogwild")
    learn(model, optimizer, job.rank, job.world_size, epochs)
    stretto.barrier()
    found = whole_loss(model), model.weight.weight.flatten().tolist(), dict(job.ledger.staleness)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "stretto" in line]
    anonymous = bool(mapped) and all("memfd:stretto (deleted)" in line for line in mapped)
    stretto.barrier()
    stretto.shutdown()
    return *found, anonymous


def collide(steps: int) -> list[float]:
    """All write everything, as fast as they can: every gradient is 1, so each lost update is to be seen."""
    stretto.init()
    model = nn.Linear(50, 1, bias=False)
    nn.init.zeros_(model.weight)
    _, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), "hogwild")
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(model(-torch.ones(1, 50)).sum())
        optimizer.step()
    stretto.barrier()
    found = model.weight.detach().flatten().tolist()
    stretto.barrier()
    stretto.shutdown()
    return found
