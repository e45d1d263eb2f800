"""Training loops of which one rank takes another way: all are told, with the places, instead of waiting for each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stretto
from engine.worker import RING, Refusing, data, mlp, start
from stretto import AllReduce, Strategy
from stretto.collectives import inquiry
from stretto.compress.bfloat16 import BFloat16
from stretto.distributing import join
from stretto.errors import RankMismatch
from stretto.job import Job
from stretto.testing import run_jobs


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask after a twentieth of a second: what is concluded does not depend on time."""
    monkeypatch.setattr(inquiry, "ASK_S", 0.05)


LOSSY = Strategy(aggregate=AllReduce("ring"), compress=BFloat16())
Part = Callable[[], None]


class Training:
    """Two models on one rank, and what its program may do next."""

    def __init__(self, job: Job, folder: Path, strategy: Strategy = RING) -> None:
        self.job, self.folder = job, folder
        self.first, self.second = mlp(), mlp(1)
        self.optimizer, self.other = start(job, self.first, strategy), start(job, self.second, strategy)
        self.step()

    def step(self) -> None:
        self.first(data(self.job.rank)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def other_step(self) -> None:
        self.second(data(self.job.rank)).square().mean().backward()
        self.other.step()
        self.other.zero_grad()

    def save(self) -> None:
        stretto.save(self.folder / "last.pt", self.first, self.optimizer)

    def validate(self) -> None:
        stretto.all_reduce(torch.ones(3), algorithm="ring")

    def barrier(self) -> None:
        stretto.barrier()

    def join(self) -> None:
        with join(self.first):
            pass

    def loss_inside_join(self) -> None:
        with join(self.first):
            stretto.all_reduce(torch.ones(1), algorithm="ring")


WAYS = {
    "a barrier": ("step", "barrier", "for gradients", "barrier("),
    "a checkpoint": ("step", "save", "for gradients", "all_gather("),
    "a batch less, then a validation": ("step", "validate", "for gradients", "all_reduce(float32[3]"),
    "models in another order": ("step", "other_step", "for gradients", "for gradients"),
    "a loss inside join": ("join", "loss_inside_join", "for gradients", "all_reduce(float32[1]"),
}


def told(training: Training, part: str) -> str:
    with pytest.raises(RankMismatch) as caught:
        getattr(training, part)()
    return str(caught.value)


@pytest.mark.parametrize("strategy", [RING, LOSSY], ids=["plain", "compressed"])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_takes_another_way(way: str, strategy: Strategy, tmp_path: Path) -> None:
    usual, odd, its_text, odd_text = WAYS[way]

    def program(job: Job) -> str:
        training = Training(job, tmp_path, strategy)
        return told(training, odd if job.rank == 1 else usual)

    for text in run_jobs(3 if strategy is RING else 2, program):
        odd_line = next(line for line in text.splitlines() if line.startswith("  rank 1: "))
        usual_line = next(line for line in text.splitlines() if line.startswith(("  ranks 0, 2: ", "  rank 0: ")))
        assert odd_text in odd_line and f"in {odd}" in odd_line
        assert its_text in usual_line and f"in {usual}" in usual_line
        assert "test_elsewhere.py:" in odd_line and "test_elsewhere.py:" in usual_line


def test_after_catching_it_everybody_can_train_on(tmp_path: Path) -> None:
    """Every stream was given up where it was: each rank hears of each of them once."""

    def program(job: Job) -> list[float]:
        training = Training(job, tmp_path)
        for part in ("barrier", "step") if job.rank == 1 else ("step", "barrier"):
            told(training, part)
        training.barrier()
        training.step()
        return [float(parameter.detach().sum()) for parameter in training.first.parameters()]

    first, *others = run_jobs(3, program)
    assert all(other == first for other in others)


def test_a_backward_that_fails_before_a_synchronised_batch_norm_and_is_caught() -> None:
    """The others wait in the layer's backward; the one whose backward failed comes to close its round."""

    def program(job: Job) -> str:
        model = nn.Sequential(nn.Linear(4, 3), stretto.SyncBatchNorm(3), nn.Identity(), nn.Linear(3, 1)).double()
        start(job, model)
        with pytest.raises(RankMismatch) as caught:
            for _ in range(2):
                model[2] = Refused() if job.rank == 1 else nn.Identity()
                try:
                    model(data(job.rank)).square().mean().backward()
                except RankMismatch:  # a RuntimeError too
                    raise
                except RuntimeError as error:
                    assert "this backward cannot go on" in str(error)
        return str(caught.value)

    for text in run_jobs(2, program):
        assert "for gradients" in text and "of SyncBatchNorm" in text


class Refused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        refused: Tensor = Refusing.apply(x)  # type: ignore[no-untyped-call]
        return refused
