"""`LocalSGD(every, grow_to=...)`: periods that grow while the replicas agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import stretto
from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.local_sgd.training import LocalAveraging
from stretto.compress.codec import Compression
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.int8 import Int8
from stretto.compress.none import NoCompression
from stretto.distributing import distribute, engine_of
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.parsing import parse
from stretto.strategy import Strategy
from stretto.sync.growing_period import chance_in, next_period
from stretto.sync.local_sgd import LocalSGD
from stretto.testing import run_jobs


def test_the_share_of_chance_is_that_of_the_model_behind_it() -> None:
    """Progress d in common, and n of each worker's own: r is (n^2 / P) / (d^2 + n^2 / P)."""
    generator = torch.Generator().manual_seed(0)
    for size in (2, 4, 7):
        for common in (0.0, 0.5, 3.0):
            own = torch.randn(size, 20_000, generator=generator)
            deltas = own + common
            found = chance_in(float(deltas.square().sum(1).mean()), float(deltas.mean(0).square().sum()), size)
            assert found == pytest.approx((1 / size) / (common**2 + 1 / size), abs=0.03)


def test_the_rule() -> None:
    assert [next_period(8, chance, 4, 20) for chance in (0.0, 0.25, 0.3, 0.49, 0.5, 1.0)] == [16, 16, 8, 8, 4, 4]
    assert next_period(16, 0.0, 4, 20) == 20 and next_period(5, 1.0, 4, 20) == 4
    for bad in (float("nan"), float("inf")):  # of workers whose weights are not finite: nothing follows from these
        assert next_period(8, chance_in(bad, 1.0, 3), 4, 20) == 8 == next_period(8, chance_in(bad, bad, 3), 4, 20)
    assert chance_in(3.0, 3.0, 1) == 0 and chance_in(0.0, 0.0, 4) == 0 and chance_in(1.0, 0.0, 4) == 1


def net() -> nn.Module:
    model = nn.Linear(40, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def take_step(model: nn.Module, optimizer: SGD, pull: Tensor) -> None:
    loss = (model.weight * pull).sum()  # type: ignore[operator]
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def strategy(compress: Compression | None) -> Strategy:
    return Strategy(
        aggregate=AllReduce("ring" if compress is None else "auto"),
        sync=LocalSGD(2, grow_to=8),
        compress=compress or NoCompression(),
    )


def pull_of(rank: int, step: int, agree: bool) -> Tensor:
    noise = torch.randn(1, 40, generator=torch.Generator().manual_seed(100 * step + rank))
    return torch.ones(1, 40) + 0.1 * noise if agree else noise


def begin(job: Job, compress: Compression | None) -> tuple[nn.Module, SGD, LocalAveraging]:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    distribute(model, optimizer, strategy(compress), job=job)
    training = engine_of(model).training
    assert isinstance(training, LocalAveraging)
    return model, optimizer, training


@pytest.mark.parametrize("compress", [None, ErrorFeedback(Int8(block=8))], ids=repr)
def test_periods_grow_while_replicas_agree_and_shrink_when_they_do_not(compress: Compression | None) -> None:
    def run(job: Job) -> tuple[list[int], int]:
        model, optimizer, training = begin(job, compress)
        met, rounds = [], 0
        for step in range(1, 37):
            take_step(model, optimizer, pull_of(job.rank, step, agree=step <= 22))
            if sum(job.ledger.staleness.values()) > rounds:
                rounds += 1
                met.append(step)
        return met, training.period

    results = run_jobs(3, run)
    assert all(result == results[0] for result in results)
    # 2, then 4, then 8 steps; from 22 on nothing is in common: 8 that are still due, then 4, then 2
    assert results[0][0] == [2, 6, 14, 22, 30, 34, 36] and results[0][1] == 2


def test_the_number_rides_in_the_same_exchange() -> None:
    def run(job: Job) -> int:
        model, optimizer, _ = begin(job, None)
        before = job.ledger.bytes_sent
        for step in (1, 2):
            take_step(model, optimizer, pull_of(job.rank, step, agree=True))
        return job.ledger.bytes_sent - before

    def plain(job: Job) -> int:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        distribute(model, optimizer, Strategy(aggregate=AllReduce("ring"), sync=LocalSGD(2)), job=job)
        before = job.ledger.bytes_sent
        for step in (1, 2):
            take_step(model, optimizer, pull_of(job.rank, step, agree=True))
        return job.ledger.bytes_sent - before

    assert sum(run_jobs(2, run)) - sum(run_jobs(2, plain)) == 2 * 4  # a ring of two sends 2 (P - 1) times each element in all


def test_the_period_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def go_on(job: Job, model: nn.Module, optimizer: SGD, first: int) -> Tensor:
        for step in range(first, 25):
            take_step(model, optimizer, pull_of(job.rank, step, agree=True))
        return next(model.parameters()).detach().clone()

    def save(job: Job) -> Tensor:
        model, optimizer, _ = begin(job, None)
        for step in range(1, 10):
            take_step(model, optimizer, pull_of(job.rank, step, agree=True))
        stretto.save(path, model, optimizer, job=job)
        return go_on(job, model, optimizer, 10)

    def load(job: Job) -> Tensor:
        model, optimizer, training = begin(job, None)
        stretto.load(path, model, optimizer, job=job)
        assert training.period == 8
        return go_on(job, model, optimizer, 10)

    assert all(torch.equal(one, other) for one, other in zip(run_jobs(2, save), run_jobs(2, load), strict=True))


@pytest.mark.parametrize(
    "arguments", [{"grow_to": 3}, {"grow_to": 8, "overlap": 2}, {"grow_to": 8, "fragments": 2}, {"grow_to": 4.0}]
)
def test_bad_limits_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="grow_to="):
        LocalSGD(4, **arguments)  # type: ignore[arg-type]


def test_it_reads_back_from_text() -> None:
    assert parse(repr(strategy(None))) == strategy(None)
