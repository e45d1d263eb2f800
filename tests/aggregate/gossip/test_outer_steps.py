"""NoLoCo: outer steps in random pairs. What it equals, what it keeps, when it is stable, and what becomes of the dead."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stretto
from aggregate.peers.returning_peers import come_back, kill, newcomer
from stretto import Average, Complete, ConfigurationError, Gossip, HeavyBall, LocalSGD, NoLoCo, RandomMatching, Ring, Strategy
from stretto.aggregate.gossip.graph import MixingGraph
from stretto.job import Job
from stretto.sync.noloco import largest_momentum, largest_pull
from stretto.testing import run_jobs

Pair = tuple[nn.Module, torch.optim.Optimizer]
PAIRS = NoLoCo(0.5, 0.7, 0.7)
PATIENCE_S = 30.0


def noloco(outer: Any = PAIRS, every: int = 2, graph: MixingGraph | None = None) -> Strategy:
    return Strategy(aggregate=Gossip(graph or RandomMatching()), sync=LocalSGD(every, outer=outer))


def plain() -> nn.Module:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    return model


def started(strategy: Strategy) -> Pair:
    model = plain()
    return stretto.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)


def step(pair: Pair, job: Job, number: int) -> None:
    """A quadratic, with a minimum of each worker's own."""
    model, optimizer = pair
    optimizer.zero_grad()
    for place, parameter in enumerate(model.parameters()):
        target = torch.full_like(parameter, 0.1 * (job.rank + 1) * (place + 1) + 0.01 * number)
        parameter.grad = 2 * (parameter.detach() - target)
    optimizer.step()


def flat(pair: Pair) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in pair[0].parameters()]).clone()


def train(job: Job, strategy: Strategy, steps: int) -> list[torch.Tensor]:
    pair = started(strategy)
    out = []
    for number in range(steps):
        step(pair, job, number)
        out.append(flat(pair))
    return out


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_a_group_of_all_is_diloco_with_heavy_ball_momentum(size: int) -> None:
    one = run_jobs(size, train, noloco(NoLoCo(0.6, 0.7, 0.4), every=3, graph=Complete()), 12)
    other = run_jobs(size, train, Strategy(sync=LocalSGD(3, outer=HeavyBall(0.7, 0.6))), 12)
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_the_outer_steps_are_those_of_the_formula(size: int) -> None:
    """Against a plain simulation of all workers in float64."""
    every, rounds, outer, graph = 2, 4, NoLoCo(0.5, 0.7, 0.6), RandomMatching(seed=5)
    found = run_jobs(size, train, noloco(outer, every, graph), every * rounds)
    model = plain()
    begin = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).double().numpy()
    place = np.array([1.0] * 6 + [2.0] * 2)
    slow, move = np.stack([begin] * size), np.zeros((size, 8))
    for turn in range(rounds):
        fast = slow.copy()
        for number in range(every * turn, every * (turn + 1)):
            targets = 0.1 * (np.arange(size)[:, None] + 1) * place + 0.01 * number
            fast -= 0.1 * 2 * (fast - targets)
        weights = graph.weights(size, turn)
        move = outer.momentum * move + outer.lr * weights @ (fast - slow) - outer.pull * (slow - weights @ slow)
        slow = slow + move
        for rank in range(size):
            np.testing.assert_allclose(found[rank][every * (turn + 1) - 1].numpy(), slow[rank], rtol=0, atol=2e-6)
    assert size == 2 or np.abs(slow - slow[0]).max() > 1e-3  # workers have models of their own


@pytest.mark.parametrize("graph", [RandomMatching(), Ring()], ids=repr)
def test_average_mixes_what_workers_have_come_to(graph: MixingGraph) -> None:
    def program(job: Job) -> Any:
        pair = started(noloco(Average(), every=2, graph=graph))
        step(pair, job, 0)
        before = flat(pair)
        step(pair, job, 1)
        return before, flat(pair)

    runs = run_jobs(4, program)
    targets = [torch.tensor([0.1 * (rank + 1)] * 6 + [0.2 * (rank + 1)] * 2) + 0.01 for rank in range(4)]
    alone = torch.stack([before - 0.2 * (before - target) for (before, _), target in zip(runs, targets, strict=True)])
    mixed = torch.from_numpy(graph.weights(4, 0)).float() @ alone
    torch.testing.assert_close(torch.stack([after for _, after in runs]), mixed, rtol=1e-5, atol=1e-6)


def test_what_was_saved_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def program(job: Job) -> bool:
        pair = started(noloco())
        for number in range(7):
            step(pair, job, number)
            if number == 2:  # in the middle of a period
                stretto.save(tmp_path / "x.pt", *pair)
        end = flat(pair)
        stretto.load(tmp_path / "x.pt", *pair)
        for number in range(3, 7):
            step(pair, job, number)
        return torch.equal(end, flat(pair))

    assert run_jobs(3, program) == [True] * 3


def test_one_that_dies_is_left_out_and_the_others_go_on() -> None:
    def program(job: Job) -> Any:
        pair = started(noloco())
        for number in range(12):
            if number == 5 and job.rank == 1:
                kill(job)
                return None
            step(pair, job, number)
        stretto.consensus(pair[0])
        return flat(pair)

    results = [one for one in run_jobs(4, program) if one is not None]
    assert len(results) == 3 and bool(torch.isfinite(results[0]).all())
    assert all(torch.equal(results[0], values) for values in results)


@pytest.mark.slow
def test_one_that_comes_back_meets_the_others_from_an_exchange_on() -> None:
    jobs: dict[int, Job] = {}
    back, last = threading.Event(), list[int]()

    def second_life(job: Job) -> Any:
        pair = started(noloco())
        first = job.first_step
        last.append(first + 20)  # the others are not so far ahead: they have to meet it
        for number in range(first, last[0]):
            step(pair, job, number)
        stretto.consensus(pair[0])
        return first, job.ledger.sent_by("gossip"), flat(pair)

    together = threading.Barrier(3)  # not the job's: somebody may still wait there for whoever dies

    def program(job: Job) -> Any:
        jobs[job.rank] = job
        pair = started(noloco())
        for number in range(4):
            step(pair, job, number)
        together.wait(PATIENCE_S)
        if job.rank == 2:
            kill(job)
            assert back.wait(PATIENCE_S)
            return come_back(job, jobs[0], second_life)
        while 2 in job.peer_network.living:
            pass
        job.peer_network.admit([newcomer(jobs[2])])
        back.set()
        number, end = 4, time.monotonic() + PATIENCE_S
        while not last or number < last[0]:
            assert time.monotonic() < end
            step(pair, job, number)
            number += 1
        stretto.consensus(pair[0])
        return flat(pair)

    one, other, (first, sent, newcomers) = run_jobs(3, program, timeout_s=60)
    assert first >= 4 and first % 2 == 0 and sent > 0
    assert torch.equal(one, other) and torch.equal(one, newcomers)


def growth(momentum: float, pull: float) -> float:
    """The largest eigenvalue of the recursion that the module derives."""
    c = np.array([pull * pull / 2, -momentum * pull, momentum * momentum])
    b = np.array([-pull / 2, momentum, 0.0]) + c
    a = np.array([1 - pull, 2 * momentum, 0.0]) + c
    return float(np.abs(np.linalg.eigvals(np.stack([a, b, c]))).max())


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_the_bound_is_where_the_recursion_stops_to_shrink(momentum: float) -> None:
    limit = largest_pull(momentum)
    assert all(growth(momentum, share * limit) < 1 for share in (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99))
    assert growth(momentum, 1.01 * limit) > 1 and largest_momentum(limit) == pytest.approx(momentum)


@pytest.mark.parametrize(
    ("momentum", "share", "grows"), [(0.5, 0.9, False), (0.5, 1.15, True), (0.9, 0.9, False), (0.9, 1.2, True)]
)
def test_slow_weights_of_many_workers_come_together_below_the_bound_and_apart_above(
    momentum: float, share: float, grows: bool
) -> None:
    chance, size = np.random.default_rng(1), 32
    slow, pull = chance.standard_normal((size, 100)), share * largest_pull(momentum)
    move, begin = np.zeros_like(slow), 1.0
    for _ in range(500):
        order = chance.permutation(size)
        mean = np.empty_like(slow)
        mean[order[::2]] = mean[order[1::2]] = (slow[order[::2]] + slow[order[1::2]]) / 2
        move = momentum * move - pull * (slow - mean)
        slow = slow + move
    apart = float(np.sqrt(((slow - slow.mean(0)) ** 2).mean()))
    assert apart > 10 * begin if grows else apart < 0.1 * begin


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: NoLoCo(0.9, 0.7, 0.7), r"2 \(1 - momentum\^2\) or more: 0.38 .*\nWrite pull=0.376 or less, or momentum=0.798"),
        (lambda: NoLoCo(0.0, 0.7, 2.5), r"Write pull=1.98 or less\.$"),
        (lambda: NoLoCo(0.5, 0.7, 0.0), "never come together"),
        (lambda: NoLoCo(1.0, 0.7, 0.7), "below 1, and lr is above 0"),
        (lambda: NoLoCo(0.5, -1.0, 0.7), "lr is a number, 0 or more"),
        (lambda: Strategy(sync=LocalSGD(4, outer=PAIRS)), r"Write aggregate=Gossip\(RandomMatching\(\)\)"),
        (lambda: noloco(HeavyBall(0.7, 0.9)), "which momentum takes apart"),
        (lambda: noloco(graph=Ring()), "drawn at random"),
        (lambda: Strategy(aggregate=Gossip(RandomMatching()), sync=LocalSGD(4, outer=PAIRS, overlap=1)), "no way of training"),
        (lambda: Strategy(aggregate=Gossip(RandomMatching()), sync=LocalSGD(4, start_after=2)), "what all workers do"),
        (lambda: Strategy(aggregate=Gossip(RandomMatching(), pull=0.5), sync=LocalSGD(4, outer=PAIRS)), "both ways"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write_instead(make: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        make()
