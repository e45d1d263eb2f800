"""Asynchronous pairwise averaging over many seeds: no deadlock, and nothing of the sum is lost, whoever dies."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from random import Random
from typing import Any

import numpy as np
import pytest

from stretto.aggregate.gossip import pairwise
from stretto.aggregate.gossip.graph import MixingGraph
from stretto.aggregate.gossip.graphs import Complete, RandomMatching, Ring
from stretto.aggregate.gossip.pairwise import (
    AskPair,
    PairMove,
    PairReady,
    PairValues,
    PairwiseAveraging,
    ReplaceModel,
    SettlePairs,
    TakeStep,
)
from stretto.aggregate.peers.until_quit import PeerSays, UntilQuit
from stretto.testing.faults import Fault, Kill, Pause
from stretto.testing.network_model import ExponentialDelay, Link, NetworkModel
from stretto.testing.virtual_network import VirtualNetwork

MODEL = NetworkModel(Link(latency_s=0.01, jitter=ExponentialDelay(0.02), loss=0.05), detect_s=0.05)
NUMEL = 10


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise, "PIECE_BYTES", 16)


class Workers:
    """Each takes steps of its own length, at its own pace, and settles at the end."""

    def __init__(
        self, network: VirtualNetwork, size: int, graph: MixingGraph, chance: Random, steps: int, slow: int = -1, most: int = 3
    ) -> None:
        self.most = most
        self.network, self.chance, self.steps, self.slow = network, chance, steps, slow
        self.taken = Counter[int]()
        self.staleness: list[int] = []
        self.settled: dict[int, Future[Any]] = {}
        self.given = np.zeros(NUMEL)  # the sum of all that steps have added
        self.machines: dict[int, PairwiseAveraging] = {}
        for rank in range(size):
            values = np.arange(NUMEL, dtype=np.float32) * (rank + 1)
            self.machines[rank] = PairwiseAveraging(rank, size, graph, values.copy(), seed=1)
            self.given += values
            network.add(rank, UntilQuit(self.machines[rank], rank, size))
            self.later(rank)

    def later(self, rank: int) -> None:
        pace = 0.4 if rank == self.slow else self.chance.uniform(0.02, 0.1)
        self.network.at(self.network.now + pace, lambda: self.step(rank))

    def step(self, rank: int) -> None:
        if not self.network.is_alive(rank):
            return
        if self.taken[rank] == self.steps:
            self.settled[rank] = self.network.request(rank, SettlePairs())
            return
        moved = np.full(NUMEL, self.chance.randint(-self.most, self.most), np.float32)
        reply = self.network.request(rank, TakeStep(moved, np.empty(NUMEL, np.float32)))

        def done(reply: Future[Any]) -> None:
            self.taken[rank] += 1
            self.given += moved
            self.staleness.append(reply.result(0))
            self.later(rank)

        reply.add_done_callback(done)


def run_pairs(seed: int) -> Counter[str]:
    chance = Random(seed)
    size = 64 if seed % 30 == 7 else chance.choice([1, 2, 3, 4, 7, 16])
    graph: MixingGraph = chance.choice([Complete(), Ring(), RandomMatching(seed=3)])
    dying = chance.sample(range(size), chance.choice([0, size // 2]))
    faults: list[Fault] = [Kill(rank, at_s=chance.uniform(0, 1)) for rank in dying]
    faults.append(Pause(chance.randrange(size), at_s=chance.uniform(0, 1), for_s=0.3))
    network = VirtualNetwork(seed=seed, model=MODEL, faults=faults, reliable=True)
    workers = Workers(network, size, graph, chance, steps=20)
    network.run(100)
    living = [rank for rank in range(size) if rank not in dying]
    assert all(workers.settled[rank].done() for rank in living), f"seed {seed}"
    models = np.stack([workers.settled[rank].result(0) for rank in living])
    assert np.isfinite(models).all()
    if not dying:
        np.testing.assert_allclose(models.sum(0, dtype=np.float64), workers.given, rtol=1e-4, atol=1e-3)
    return Counter({name.partition("(")[0] for name in network.fired}) + Counter(["stale"] if max(workers.staleness) else [])


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 1200), marks=pytest.mark.slow)], ids=str)
def test_the_sum_of_all_models_is_what_steps_have_made_it_and_nobody_is_stuck(seeds: range) -> None:
    fired: Counter[str] = Counter()
    for seed in seeds:
        fired += run_pairs(seed)
    assert fired.keys() == {"loss", "Kill", "Pause", "stale"} and min(fired.values()) > len(seeds) / 6, fired


@pytest.mark.parametrize("size", [2, 3, 7, 64])
def test_without_steps_that_move_anything_all_come_to_the_mean(size: int) -> None:
    network = VirtualNetwork(seed=size, model=MODEL, reliable=True)
    workers = Workers(network, size, Complete(), Random(size), steps=200 if size < 64 else 100, most=0)
    begin = np.stack([machine.model.copy() for machine in workers.machines.values()])
    network.run(200)
    end = np.stack([reply.result(0) for reply in workers.settled.values()])
    assert (
        len(end) == size
        and np.abs(end - begin.mean(0)).max() < (0.02 if size < 64 else 0.2) * np.abs(begin - begin.mean(0)).max()
    )


def test_the_others_take_as_many_steps_beside_a_slow_worker() -> None:
    network = VirtualNetwork(seed=5, model=MODEL, reliable=True)
    workers = Workers(network, 4, Complete(), Random(5), steps=1000, slow=3)
    network.run(12)
    assert min(workers.taken[rank] for rank in range(3)) > 150 > 4 * workers.taken[3]
    assert np.abs(workers.machines[3].model - workers.machines[0].model).max() < 30


def pair(**faults: Any) -> tuple[VirtualNetwork, list[PairwiseAveraging]]:
    network = VirtualNetwork(seed=2, model=NetworkModel(Link(latency_s=0.01), detect_s=0.001), reliable=True, **faults)
    machines = [PairwiseAveraging(rank, 2, Complete(), np.full(NUMEL, 8.0 * rank, np.float32)) for rank in range(2)]
    for rank, machine in enumerate(machines):
        network.add(rank, UntilQuit(machine, rank, 2))
    network.run(0.001)
    return network, machines


def step(network: VirtualNetwork, rank: int, by: float = 0.0) -> Future[Any]:
    return network.request(rank, TakeStep(np.full(NUMEL, by, np.float32), np.empty(NUMEL, np.float32)))


@pytest.mark.parametrize(("at_s", "expected"), [(0.015, [8.0]), (0.025, [8.0]), (0.035, [4.0]), (0.045, [4.0])])
def test_if_the_one_that_asked_dies_the_other_has_its_own_values_or_the_mean(at_s: float, expected: list[float]) -> None:
    network, machines = pair(faults=[Kill(0, at_s=at_s)])  # asked at 0, ready at 10 ms, values at 30, move at 40
    step(network, 0)
    network.run(1)
    assert machines[1].model.tolist() == expected * NUMEL and machines[1]._pair is None
    network.assert_all_fired()


@pytest.mark.parametrize(("at_s", "expected"), [(0.015, [0.0]), (0.025, [0.0]), (0.035, [0.0]), (0.045, [4.0])])
def test_if_the_one_that_was_asked_dies_the_other_has_its_own_values_or_the_mean(at_s: float, expected: list[float]) -> None:
    network, machines = pair(faults=[Kill(1, at_s=at_s)])
    step(network, 0)
    network.run(1)
    assert machines[0].model.tolist() == expected * NUMEL and machines[0]._pair is None
    network.assert_all_fired()


def test_two_that_ask_each_other_average_once_and_then_again() -> None:
    network, machines = pair()
    step(network, 0)
    step(network, 1)
    network.run(1)
    assert [machine.model.tolist() for machine in machines] == [[4.0] * NUMEL] * 2
    assert machines[0]._moves == machines[1]._moves == 2


def test_a_step_while_values_are_under_way_stays() -> None:
    network, machines = pair()
    step(network, 0)
    network.run(0.025)  # its values are on their way
    assert step(network, 0, by=1.0).result is not None
    network.run(0.045)
    assert machines[0].model.tolist() == [5.0] * NUMEL and machines[1].model.tolist() == [4.0] * NUMEL


def test_who_has_settled_changes_no_more_and_goes_on_from_what_it_is_given() -> None:
    network, machines = pair()
    settled = network.request(1, SettlePairs())
    step(network, 0)
    network.run(0.2)
    assert settled.result(0).tolist() == machines[1].model.tolist() == [8.0] * NUMEL
    network.request(1, ReplaceModel(np.full(NUMEL, 2.0, np.float32)))
    step(network, 1)
    network.run(0.4)
    assert machines[0].model.tolist() == [1.0] * NUMEL == machines[1].model.tolist()


def test_values_that_do_not_fit_or_that_nobody_asked_for_change_nothing() -> None:
    network, machines = pair()
    for header in (PairValues(1, 0), PairMove(1, 0), PairReady(7), AskPair(3), PairValues(3, 4), PairValues(3, 8)):
        network.send(1, 0, PeerSays(header), bytes(16))
    network.send(1, 0, PeerSays(PairValues(3, 0)), bytes(15))
    network.run(0.1)
    assert machines[0].model.tolist() == [0.0] * NUMEL and machines[0]._moves == 0
