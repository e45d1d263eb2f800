"""The laws of workers that average their models in groups.

1   a world of one is the plain optimizer, bit for bit
6   with everybody in time every round keeps the mean; one group of all is averaging
8   the bytes that are sent are those of the formula
9   saved, killed and resumed, nothing is lost: after an average of all everybody has the same bits
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from laws.cases import Case, mlp
from laws.training import alone, assert_close, assert_same_bits, build, share, state_of, together
from resumable_training import Training
from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.group_average import GroupAverage
from stretto.aggregate.group_average.training import WaitAvoidingAverage
from stretto.distributing import distribute, engine_of, release
from stretto.job import Job
from stretto.strategy import Strategy
from stretto.sync.local_sgd import LocalSGD
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.sync.synchronous import Synchronous
from stretto.testing import run_jobs


def plain_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05)


MLP = Case("mlp", mlp, optimizer=plain_sgd)
NUMEL = sum(parameter.numel() for parameter in build(MLP, 0).parameters())
AVERAGING = Strategy(aggregate=AllReduce("ring"), sync=LocalSGD(1))


def in_time(size: int, bound: int = 1000) -> Strategy:
    """Nobody is given up before it has ended its step."""
    return Strategy(aggregate=GroupAverage(size, patience_s=30.0), sync=StaleSynchronous(bound))


def train(job: Job, strategy: Strategy, steps: int) -> tuple[list[dict[str, Tensor]], int]:
    """The model of this worker after every step, on its own share of every batch, and the bytes that it has sent."""
    model = build(MLP, seed=job.rank)
    model, optimizer = distribute(model, plain_sgd(model), strategy, job=job)
    states = []
    for number in range(steps):
        MLP.step(model, share(MLP.batch(number), job.rank, job.world_size), number)
        optimizer.step()
        optimizer.zero_grad()
        states.append(state_of(model))
    assert job.ledger.staleness.total() == steps and max(job.ledger.staleness) == 0
    release(model)  # when the others have what they need
    return states, job.ledger.sent_by("group average")


def run(strategy: Strategy, size: int, steps: int) -> list[tuple[list[dict[str, Tensor]], int]]:
    runs: list[tuple[list[dict[str, Tensor]], int]] = run_jobs(size, train, strategy, steps)
    return runs


def test_law_1_a_world_of_one_is_the_plain_optimizer_bit_for_bit() -> None:
    for sync in (StaleSynchronous(10), Synchronous(), LocalSGD(2)):
        strategy = Strategy(aggregate=GroupAverage(4), sync=sync)
        assert_same_bits(together("mlp", strategy, 1, 5)[0].state, alone("mlp", 5))


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_one_row_of_all_is_averaging_with_the_same_bits_on_all(size: int) -> None:
    runs, averaging = run(Strategy(aggregate=GroupAverage(size)), size, 4), run_jobs(size, local, 4)
    for step in range(4):
        assert_close(runs[0][0][step], averaging[0][step])
        for states, _ in runs[1:]:
            assert_same_bits(states[step], runs[0][0][step])


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_one_group_of_all_in_time_is_averaging_with_the_same_bits_on_all(size: int) -> None:
    runs, averaging = run(in_time(1 << (size - 1).bit_length()), size, 4), run_jobs(size, local, 4)
    for step in range(4):
        assert_close(runs[0][0][step], averaging[0][step])
        for states, _ in runs[1:]:
            assert_same_bits(states[step], runs[0][0][step])


@pytest.mark.parametrize(("size", "groups_of"), [(2, 2), (4, 2), (4, 4), (8, 4)])
def test_law_8_each_worker_sends_what_the_formula_says(size: int, groups_of: int) -> None:
    """log2(S) m in a round of groups, log2(P) m in one of all."""
    steps, bound = 5, 3
    in_groups, of_all = groups_of.bit_length() - 1, size.bit_length() - 1
    for _, sent in run(in_time(groups_of, bound), size, steps):
        assert sent == ((steps - steps // bound) * in_groups + steps // bound * of_all) * 4 * NUMEL


@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_law_8_where_the_cube_has_empty_corners_less_than_twice_that_is_sent(size: int) -> None:
    for _, sent in run(in_time(4, 3), size, 3):
        assert sent <= (2 * 3 + 2 * size.bit_length() - 1) * 4 * NUMEL


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_law_6_every_round_in_time_keeps_the_mean(size: int) -> None:
    """So after each of two rounds the mean over workers is that of workers that average among all."""
    groups, averaging = run(in_time(2), size, 1), run(in_time(1 << (size - 1).bit_length()), size, 1)
    mean = {name: torch.stack([states[0][name] for states, _ in groups]).mean(0) for name in groups[0][0][0]}
    assert_close(mean, averaging[0][0][0])
    if size > 2:
        assert any(not torch.equal(groups[0][0][0][name], states[0][name]) for states, _ in groups for name in states[0])


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_law_3_after_a_round_of_all_everybody_has_the_same_bits_also_if_nobody_is_in_time(size: int) -> None:
    strategy = Strategy(aggregate=GroupAverage(2), sync=StaleSynchronous(4))
    found = run_jobs(size, states_after_rounds_of_all, strategy, 20)
    for states in found:
        assert states, "every worker came to one"
        for one, other in zip(states, found[0], strict=False):  # one that has ended its steps takes part in no more
            assert_same_bits(one, other)


def states_after_rounds_of_all(job: Job, strategy: Strategy, steps: int) -> list[dict[str, Tensor]]:
    model = build(MLP, seed=job.rank)
    model, optimizer = distribute(model, plain_sgd(model), strategy, job=job)
    states = []
    training = engine_of(model).training
    assert isinstance(training, WaitAvoidingAverage)
    for number in range(steps):
        MLP.step(model, share(MLP.batch(number), job.rank, job.world_size), number)
        optimizer.step()
        optimizer.zero_grad()
        if training.is_together:
            states.append(state_of(model))
    assert max(job.ledger.staleness) < 4
    return states


def local(job: Job, steps: int) -> list[dict[str, Tensor]]:
    model = build(MLP, seed=job.rank)
    model, optimizer = distribute(model, plain_sgd(model), AVERAGING, job=job)
    states = []
    for number in range(steps):
        MLP.step(model, share(MLP.batch(number), job.rank, job.world_size), number)
        optimizer.step()
        optimizer.zero_grad()
        states.append(state_of(model))
    return states


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("on_grid", [False, True])
def test_law_9_resumed_between_rounds_of_all_the_bits_are_the_same(size: int, on_grid: bool, tmp_path: Path) -> None:
    path, strategy = tmp_path / "c.pt", Strategy(aggregate=GroupAverage(2)) if on_grid else in_time(2, bound=4)

    def whole(job: Job) -> list[bytes]:
        return Training(job, strategy=strategy).run(9).bits

    def first(job: Job) -> list[bytes]:
        training = Training(job, strategy=strategy).run(6)
        training.save(path)
        return training.run(3).bits

    def second(job: Job) -> list[bytes]:
        training = Training(job, strategy=strategy)
        assert training.load(path).lost == ()
        return training.run(3).bits

    expected = run_jobs(size, whole)
    assert run_jobs(size, first) == expected and run_jobs(size, second) == expected
    assert size < 3 or expected[0] != expected[-1]
