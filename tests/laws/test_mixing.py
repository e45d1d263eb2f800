"""The laws of workers that mix their models with those of neighbours.

1   a world of one is the plain optimizer, bit for bit
6   mixing keeps the mean: it moves as the mean of what the optimizers do
8   bytes on the wire are those of the formula
9   save, kill, resume: the same bits, where nobody takes what comes late
The complete graph with SGD is synchronous training; public copies with a codec that loses nothing are D-PSGD; push-sum without
lateness sends the same as with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from laws.cases import Case, mlp
from laws.training import alone, assert_close, assert_same_bits, build, share, state_of, together
from stretto import recipes
from stretto.aggregate.gossip import Complete, Exponential, Gossip, OnePeerExponential, RandomMatching, Ring, Star, Torus
from stretto.aggregate.gossip.graph import MixingGraph
from stretto.checkpoint import load, save
from stretto.compress.bfloat16 import BFloat16
from stretto.compress.codec import Codec
from stretto.compress.layout import Blocks, Layout
from stretto.compress.qsgd import QSGD
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sign import Sign
from stretto.compress.top_k import TopK
from stretto.distributing import distribute
from stretto.job import Job
from stretto.strategy import Strategy
from stretto.testing import run_jobs

SIZES = [pytest.param(size, marks=[pytest.mark.slow] if size in (2, 7) else []) for size in (2, 3, 4, 7)]
State = dict[str, Tensor]


def plain_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05)


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01)


MLP = Case("mlp", mlp, optimizer=plain_sgd)
MLP_ADAM = Case("mlp", mlp, optimizer=adam)


@dataclass(frozen=True, slots=True)
class AsTheyAre(Codec):
    """A codec that loses nothing and does not say so."""

    splits: ClassVar[bool] = True

    def blocks(self, layout: Layout) -> Blocks:
        return layout.whole()

    def num_bytes(self, blocks: Blocks) -> int:
        return 4 * blocks.num_elements

    def encode(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        return values.clone().view(torch.uint8)

    def decode(self, payload: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        return payload.view(torch.float32).clone()


def train(job: Job, case: Case, strategy: Strategy, steps: int) -> list[State]:
    """The model of this worker after every step, on its own share of every batch."""
    model = build(case, seed=job.rank)
    model, optimizer = distribute(model, case.optimizer(model), strategy, job=job)
    states = []
    for number in range(steps):
        case.step(model, share(case.batch(number), job.rank, job.world_size), number)
        optimizer.step()
        optimizer.zero_grad()
        states.append(state_of(model))
    return states


def run(case: Case, strategy: Strategy, size: int, steps: int) -> list[list[State]]:
    """By worker, by step."""
    states: list[list[State]] = run_jobs(size, train, case, strategy, steps)
    return states


def mean_of(states: list[State]) -> State:
    return {name: torch.stack([one[name].double() for one in states]).mean(0) for name in states[0]}


EVERY = [
    recipes.dpsgd(),
    recipes.sgp(),
    recipes.overlap_sgp(),
    recipes.choco_sgd(),
    recipes.adpsgd(),
    recipes.noloco(2),
    recipes.dpsgd(Exponential()),
    recipes.dpsgd(RandomMatching()),
]


@pytest.mark.parametrize("strategy", EVERY, ids=repr)
def test_law_1_a_world_of_one_is_the_plain_optimizer_bit_for_bit(strategy: Strategy) -> None:
    assert_same_bits(together("mlp", strategy, 1, 4)[0].state, alone("mlp", 4))


@pytest.mark.parametrize("size", SIZES)
def test_averaging_over_the_complete_graph_with_sgd_is_synchronous_training(size: int) -> None:
    """Gradients are at the models of before, which differ by the last gradients: it is their mean that is the same, as long as
    the gradient is linear. So one step from equal models, and then the average of it."""
    gossip = Strategy(aggregate=Gossip(Complete(), push_sum=True))
    mixed, synchronous = run(MLP, gossip, size, 4), run(MLP, Strategy(), size, 4)
    for states in mixed:
        for step in range(4):
            assert_close(states[step], synchronous[0][step])


def moved_by_itself(job: Job, strategy: Strategy, steps: int) -> list[tuple[State, State]]:
    """The model after each step, and what the optimizer alone has done in it."""
    model = build(MLP, seed=job.rank)
    model, optimizer = distribute(model, plain_sgd(model), strategy, job=job)
    found = []
    for number in range(steps):
        MLP.step(model, share(MLP.batch(number), job.rank, job.world_size), number)
        moved = {name: -0.05 * value.grad.double() for name, value in model.named_parameters() if value.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        found.append((state_of(model), moved))
    return found


GRAPHS: list[MixingGraph] = [Ring(), Torus(), Star(), Complete(), Exponential(), OnePeerExponential(), RandomMatching()]


@pytest.mark.parametrize(
    "strategy",
    [
        *(Strategy(aggregate=Gossip(graph)) for graph in GRAPHS),
        *(
            pytest.param(Strategy(aggregate=Gossip(graph, push_sum=True)), marks=[pytest.mark.slow] if number % 3 else [])
            for number, graph in enumerate(GRAPHS)
        ),
        *(Strategy(aggregate=Gossip(Ring(), pull=0.2), compress=codec) for codec in (TopK(0.1), Sign(), QSGD(8), BFloat16())),
    ],
    ids=repr,
)
def test_law_6_the_mean_moves_as_the_mean_of_the_optimizers_steps(strategy: Strategy) -> None:
    size = 4
    runs: list[list[tuple[State, State]]] = run_jobs(size, moved_by_itself, strategy, 4)
    begin = state_of(build(MLP, seed=0))
    expected = {name: value.double() for name, value in begin.items()}
    for step in range(4):
        for name in expected:
            expected[name] = expected[name] + sum(one[step][1][name] for one in runs) / size
        found = mean_of([one[step][0] for one in runs])
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6)
    if "Complete" not in repr(strategy):
        assert any(not torch.equal(runs[0][3][0][name], runs[1][3][0][name]) for name in expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("graph", [Ring(), Star()], ids=repr)
def test_public_copies_with_a_codec_that_loses_nothing_are_averaging(graph: MixingGraph, size: int) -> None:
    copies = run(MLP, Strategy(aggregate=Gossip(graph), compress=AsTheyAre()), size, 5)
    plain = run(MLP, Strategy(aggregate=Gossip(graph)), size, 5)
    for one, other in zip(copies, plain, strict=True):
        for step in range(5):
            assert_close(one[step], other[step])


def bytes_of(job: Job, strategy: Strategy, steps: int) -> tuple[int, int, int]:
    train(job, MLP, strategy, steps)
    return job.ledger.sent_by("gossip"), job.ledger.bytes_received, sum(p.numel() for p in build(MLP, 0).parameters())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(aggregate=Gossip(Ring())),
        Strategy(aggregate=Gossip(Star())),
        Strategy(aggregate=Gossip(OnePeerExponential(), push_sum=True)),
        Strategy(aggregate=Gossip(Torus(), pull=0.2), compress=TopK(0.05)),
    ],
    ids=repr,
)
def test_law_8_a_step_sends_one_message_of_the_payloads_length_to_each_target(strategy: Strategy, size: int) -> None:
    assert isinstance(strategy.aggregate, Gossip)
    graph, runs = strategy.aggregate.graph, run_jobs(size, bytes_of, strategy, 3)
    length = 4 * runs[0][2]
    if isinstance(strategy.compress, TopK):
        model = build(MLP, 0)
        layout = Layout.of((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())
        length = strategy.compress.num_bytes(strategy.compress.blocks(layout))
    for rank, (sent, _, _) in enumerate(runs):
        assert sent == length * sum(len(graph.targets(rank, size, step)) for step in range(3))


@pytest.mark.parametrize(
    "strategy", [recipes.dpsgd(), recipes.sgp(), recipes.choco_sgd(), recipes.dpsgd(RandomMatching())], ids=repr
)
@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_law_9_resuming_gives_the_bits_of_not_having_stopped(strategy: Strategy, size: int, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"

    def some_steps(job: Job, model: nn.Module, optimizer: Optimizer, begin: int, end: int) -> State:
        for number in range(begin, end):
            MLP_ADAM.step(model, share(MLP_ADAM.batch(number), job.rank, job.world_size), number)
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    def without_stop(job: Job) -> State:
        model = build(MLP_ADAM, seed=job.rank)
        model, optimizer = distribute(model, adam(model), strategy, job=job)
        some_steps(job, model, optimizer, 0, 4)
        model(MLP_ADAM.batch(0))  # weights may be on their way
        save(path, model, optimizer, job=job)
        return some_steps(job, model, optimizer, 4, 7)

    def resumed(job: Job) -> State:
        model = build(MLP_ADAM, seed=job.rank + 10)
        model, optimizer = distribute(model, adam(model), strategy, job=job)
        load(path, model, optimizer, job=job)
        return some_steps(job, model, optimizer, 4, 7)

    for one, other in zip(run_jobs(size, without_stop), run_jobs(size, resumed), strict=True):
        assert_same_bits(one, other)
