"""A training for tests of checkpoints, in threads or as a script.

    resumable_training.py CHECKPOINT STEPS plain|noisy [KILL_AFTER]

The script resumes if the checkpoint is there. With KILL_AFTER it saves after that step, and the last worker kills itself then.
`plain` is SGD; there are 12 samples a step however many workers share them. `noisy` has dropout and draws from numpy's and
Python's random, so that every generator matters. Rank 0 prints everybody's weights.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.aggregate.all_reduce import AllReduce
from stretto.checkpoint import Resumed, load, save
from stretto.distributing import distribute
from stretto.job import Job
from stretto.sampler import Sampler
from stretto.strategy import Strategy

RING = Strategy(aggregate=AllReduce("ring"))  # not `auto`: each measurement may choose another order of addition
X = torch.randn(84, 5, generator=torch.Generator().manual_seed(7))


class Net(nn.Module):
    """Initialised from a generator of its own: the global one is shared by all threads."""

    def __init__(self, hidden: int = 8, norm: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(5, hidden)
        self.norm = nn.BatchNorm1d(hidden) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(hidden, 1, bias=False)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(torch.relu(self.norm(self.first(x)))))  # type: ignore[no-any-return]


class Training:
    """A model, its optimizer and its data, made alike on every rank."""

    def __init__(
        self,
        job: Job,
        *,
        plain: bool = False,
        noisy: bool = False,
        batch: int = 2,
        strategy: Strategy | str = RING,
        **options: Any,
    ) -> None:
        model = Net(norm=not plain, dropout=0.5 if noisy else 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if plain else torch.optim.AdamW(model.parameters(), lr=0.05)
        self.model, self.optimizer = distribute(model, optimizer, strategy, job=job, **options)
        self.sampler = Sampler(len(X), seed=5, job=job)
        self.loader = DataLoader(TensorDataset(X), batch_size=batch, sampler=self.sampler)
        self.noisy = noisy
        self.steps = self._steps()

    def _steps(self) -> Iterator[None]:
        while True:
            for (x,) in self.sampler.follow(self.loader):
                noise = random.random() + float(np.random.rand()) if self.noisy else 0.0
                (self.model(x) - x.sum(1, keepdim=True) - noise).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                yield

    def run(self, num_steps: int) -> Training:
        for _ in range(num_steps):
            next(self.steps)
        return self

    @property
    def weights(self) -> list[list[float]]:
        return [parameter.detach().flatten().tolist() for parameter in self.model.parameters()]

    @property
    def bits(self) -> list[bytes]:
        """Of the parameters, buffers and the optimizer's state."""
        state = self.optimizer.state_dict()["state"]
        tensors = [*self.model.state_dict().values(), *(state[key][name] for key in state for name in sorted(state[key]))]
        return [tensor.detach().numpy().tobytes() for tensor in tensors if isinstance(tensor, Tensor)]

    def save(self, path: Path, **options: Any) -> None:
        save(path, self.model, self.optimizer, sampler=self.sampler, **options)

    def load(self, path: Path) -> Resumed:
        return load(path, self.model, self.optimizer, sampler=self.sampler)


def main(path: Path, num_steps: int, kind: str, kill_after: int | None) -> None:
    job = stretto.init()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(job.rank)
    batch = 12 // job.world_size
    training = Training(job, plain=kind == "plain", noisy=kind == "noisy", batch=batch)
    done = training.load(path).extra["step"] if path.exists() else 0
    if kill_after is not None:
        training.run(kill_after).save(path, extra={"step": kill_after})
        if job.rank == job.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    everybody = job.gather_object(training.run(num_steps - done).weights)
    if job.rank == 0:
        print(msgspec.json.encode(everybody).decode())
    stretto.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]) if len(sys.argv) > 4 else None)
