"""Moshpit: workers on a grid, averaged along its axes; also without those that die, and where the grid is not full."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import stretto
from aggregate.group_average.test_training import started, step, values
from aggregate.peers.returning_peers import come_back, kill, newcomer
from stretto.aggregate.group_average import GroupAverage
from stretto.aggregate.group_average.among import AmongMembers
from stretto.aggregate.group_average.grid import group_of, num_axes, rounds_on
from stretto.aggregate.group_average.grid_training import GridAverage
from stretto.aggregate.group_average.machine import nothing_counted
from stretto.aggregate.peers.meeting import Meet, MeetingMachine, Met
from stretto.errors import ConfigurationError, StrettoError
from stretto.job import Job
from stretto.strategy import Strategy
from stretto.sync.local_sgd import LocalSGD
from stretto.sync.outer import Nesterov
from stretto.testing import run_jobs
from stretto.testing.faults import Fault, Kill, Pause
from stretto.testing.network_model import ExponentialDelay, Link, NetworkModel
from stretto.testing.virtual_network import VirtualNetwork

PATIENCE_S = 30.0
SLOW = [pytest.param(range(15, 315), marks=pytest.mark.slow)]


def moshpit(size: int, **options: Any) -> Strategy:
    return Strategy(aggregate=GroupAverage(size, **options))


@pytest.mark.parametrize(("side", "world"), [(2, 2), (2, 8), (3, 9), (3, 7), (4, 6), (4, 64), (8, 64), (5, 33)])
def test_the_groups_of_an_axis_divide_the_workers_and_rounds_are_counted(side: int, world: int) -> None:
    axes = num_axes(side, world)
    assert side**axes >= world > side ** (axes - 1) or axes == 1
    for axis in range(axes):
        groups = [group_of(rank, axis, side, world) for rank in range(world)]
        for rank, group in enumerate(groups):
            assert rank in group and len(group) <= side and all(groups[other] == group for other in group)
        assert [rounds_on(axis, axes, rounds) for rounds in range(12)] == [
            sum(number % axes == axis for number in range(rounds)) for rounds in range(12)
        ]


class Worker:
    """Takes part in round after round, in virtual time, and keeps what comes back."""

    def __init__(self, network: VirtualNetwork, rank: int, side: int, world: int, num_rounds: int, chance: Random) -> None:
        self.network, self.rank, self.num_rounds, self.chance = network, rank, num_rounds, chance
        self.groups = [group_of(rank, axis, side, world) for axis in range(num_axes(side, world))]
        self.value = np.full(5, float(rank), np.float32)
        self.met: list[tuple[int, Met]] = []
        for axis, members in enumerate(self.groups):
            meeting = MeetingMachine(members.index(rank), len(members))
            network.add(self.name(axis), AmongMembers(meeting, [each + 1000 * axis for each in members], nothing_counted))

    def name(self, axis: int) -> int:
        return self.rank + 1000 * axis

    def go_on(self) -> None:
        axis = len(self.met) % len(self.groups)
        if len(self.met) < self.num_rounds and self.network.is_alive(self.name(axis)):
            reply = self.network.request(self.name(axis), Meet(self.value.copy(), PATIENCE_S))
            reply.add_done_callback(lambda reply: self.take(axis, reply))

    def take(self, axis: int, reply: Future[Met]) -> None:
        met = reply.result(0)
        self.value = met.vector
        self.met.append((axis, met))
        self.network.at(self.network.now + self.chance.uniform(0, 0.5), self.go_on)


def run(side: int, world: int, rounds: int, seed: int = 0, faults: Sequence[Fault] = (), storm: bool = False) -> list[Worker]:
    link = Link(latency_s=0.01, jitter=ExponentialDelay(0.02), loss=0.1) if storm else Link(latency_s=0.001)
    network = VirtualNetwork(seed=seed, model=NetworkModel(link, detect_s=0.3), faults=faults, reliable=True)
    chance = Random(seed)
    workers = [Worker(network, rank, side, world, rounds, chance) for rank in range(world)]
    for worker in workers:
        network.at(0.0, worker.go_on)
    network.run(until_s=600)
    for fault in faults:
        assert network.fired[str(fault)], "it came too late"
    return workers


@pytest.mark.parametrize(("side", "world"), [(2, 8), (3, 9), (4, 16), (8, 64), (7, 7)])
def test_the_average_of_all_is_exact_after_as_many_rounds_as_there_are_axes(side: int, world: int) -> None:
    for worker in run(side, world, num_axes(side, world)):
        np.testing.assert_allclose(worker.value, (world - 1) / 2, rtol=1e-6)


@pytest.mark.parametrize(("side", "world"), [(4, 6), (3, 7), (4, 33), (5, 12)])
def test_where_the_grid_is_not_full_the_mean_is_kept_and_workers_come_closer(side: int, world: int) -> None:
    values = np.stack([worker.value for worker in run(side, world, 12)])
    np.testing.assert_allclose(values.mean(axis=0), (world - 1) / 2, rtol=1e-5)
    assert np.ptp(values) < world / 20


@pytest.mark.parametrize("seeds", [range(15), *SLOW], ids=str)
def test_whoever_dies_the_others_of_a_group_that_take_part_get_the_same_bits(seeds: range) -> None:
    fired: Counter[str] = Counter()
    for seed in seeds:
        chance = Random(seed)
        side, world = (4, 64) if seed % 20 == 13 else chance.choice([(2, 4), (2, 8), (3, 9), (4, 6), (4, 16)])
        dying = chance.sample(range(world), chance.randint(1, world // 2))
        faults: list[Fault] = []
        for rank in dying:
            at_s = chance.uniform(0, 1.5)
            faults += [Kill(rank + 1000 * axis, at_s=at_s) for axis in range(num_axes(side, world))]
        resting = chance.choice([rank for rank in range(world) if rank not in dying])
        faults.append(Pause(resting, at_s=chance.uniform(0, 0.5), for_s=2.0))
        workers = run(side, world, 8, seed, faults, storm=True)
        fired.update(type(fault).__name__ for fault in faults)
        met: dict[tuple[int, tuple[int, ...]], bytes] = {}
        for worker in workers:
            assert np.ptp(worker.value) == 0, "made of halves"
            assert worker.rank in dying or len(worker.met) == 8, f"seed {seed}: rank {worker.rank} hangs"
            for number, (axis, each) in enumerate(worker.met):
                ranks = tuple(worker.groups[axis][member] for member in each.members)
                assert worker.rank in ranks
                assert met.setdefault((number, ranks), each.vector.tobytes()) == each.vector.tobytes(), f"seed {seed}"
    assert min(fired["Kill"], fired["Pause"]) >= len(seeds)


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "world"), [(2, 2), (2, 4), (3, 3), (2, 3), (3, 7)])
def test_rows_are_averaged_in_one_step_and_columns_in_the_next(size: int, world: int) -> None:
    def program(job: Job) -> list[float]:
        model, optimizer = started(moshpit(size))
        found = []
        for by in (float(job.rank), 0.0):
            step(model, optimizer, by=by)
            found.append(values(model)[0])
        return found

    found = run_jobs(world, program)
    first = [sum(group := group_of(rank, 0, size, world)) / len(group) for rank in range(world)]
    columns = [group_of(rank, 1 % num_axes(size, world), size, world) for rank in range(world)]
    second = [sum(first[other] for other in column) / len(column) for column in columns]
    assert found == [pytest.approx([one, two]) for one, two in zip(first, second, strict=True)]


def test_with_local_steps_groups_meet_after_every_so_many() -> None:
    def program(job: Job) -> list[float]:
        model, optimizer = started(Strategy(aggregate=GroupAverage(2), sync=LocalSGD(3)))
        found = []
        for _ in range(3):
            step(model, optimizer, by=float(job.rank))
            found.append(values(model)[0])
        return found

    assert run_jobs(2, program) == [[0, 0, 1.5], [1, 2, 1.5]]


def test_law_8_a_worker_sends_what_the_formula_says() -> None:
    def program(job: Job) -> int:
        model = torch.nn.Linear(12, 1, bias=False)
        model, optimizer = stretto.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), moshpit(3))
        for _ in range(4):
            step(model, optimizer, by=1.0)
        stretto.consensus(model)  # everybody has sent all
        return job.ledger.sent_by("group average")

    assert run_jobs(3, program) == [4 * 2 * 48 * 2 // 3] * 3


def test_the_others_go_on_without_one_that_dies_and_one_that_has_finished() -> None:
    stepped = threading.Barrier(4)

    def program(job: Job) -> Any:
        model, optimizer = started(moshpit(4))
        step(model, optimizer, by=1.0)
        stepped.wait(PATIENCE_S)
        if job.rank == 1:
            kill(job)
            return None
        for _ in range(3 if job.rank == 2 else 6):
            step(model, optimizer, by=float(job.rank))
        stretto.release(model)
        return values(model)[0]

    found = run_jobs(4, program)
    assert found[1] is None and found[0] == found[3] != found[2]


def test_a_group_does_not_wait_longer_than_it_is_told_to_and_counts_the_rounds_that_were_held(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "stretto.peers")
    slow, mean = threading.Event(), GridAverage._mean

    def patient_at_last(self: GridAverage, axis: int, vector: torch.Tensor) -> torch.Tensor:
        self._value = GroupAverage(2, patience_s=PATIENCE_S if slow.is_set() else 0.2)
        return mean(self, axis, vector)

    monkeypatch.setattr(GridAverage, "_mean", patient_at_last)

    def program(job: Job) -> Any:
        model, optimizer = started(moshpit(2, patience_s=0.2))
        found = []
        for number in range(3):
            if job.rank == 1 and number == 0:
                assert slow.wait(PATIENCE_S)  # until the other has done without it, twice
            step(model, optimizer, by=float(job.rank + 1))
            found.append(values(model)[0])
            if number == 1:
                slow.set()
        return found, dict(job.ledger.staleness), job.ledger.sent_by("group average")

    (first, *one), (second, *other) = run_jobs(2, program)
    assert first[:2] == [1.0, 2.0] and second[:2] == [2.0, 4.0], "each keeps its model"
    assert first[2] == second[2] == 4.5
    assert one == other == [{0: 1}, 16], "one round of three was held"
    did_without = [record for record in caplog.records if "no average in the group of ranks 0, 1" in record.message]
    assert sorted(record.levelname for record in did_without) == ["INFO", "INFO", "WARNING", "WARNING"]
    assert all("rank 1 did not come" in record.message for record in did_without)


def test_what_is_not_lateness_is_an_error_with_patience_too(monkeypatch: pytest.MonkeyPatch) -> None:
    mean = GridAverage._mean
    monkeypatch.setattr(GridAverage, "_mean", lambda self, axis, vector: mean(self, axis, vector[: 1 + self._job.rank]))

    def program(job: Job) -> None:
        model, optimizer = started(moshpit(2, patience_s=PATIENCE_S))
        with pytest.raises(StrettoError, match=r"(?s)rank 0 has come for the .*\[1\] of .*, and rank 1 for the .*\[2\] of"):
            step(model, optimizer, by=1.0)
        assert not job.ledger.staleness

    run_jobs(2, program)


def test_without_patience_a_member_that_does_not_come_is_an_error_for_its_group() -> None:
    failed = threading.Event()

    def program(job: Job) -> None:
        model, optimizer = started(moshpit(2))
        job.timeouts = dataclasses.replace(job.timeouts, arrive_s=0.2)
        if job.rank == 1:
            assert failed.wait(PATIENCE_S)
        with pytest.raises(StrettoError, match=r"in the group of ranks 0, 1: rank 0 has waited for 0.2 s .* rank 1 did not come"):
            step(model, optimizer, by=1.0)
        failed.set()

    run_jobs(2, program)


def test_one_that_comes_back_meets_its_groups_again() -> None:
    jobs: dict[int, Job] = {}
    back, entered, stepped = threading.Event(), threading.Event(), threading.Barrier(4)

    def second_life(job: Job) -> int:
        model, optimizer = started(moshpit(2))
        entered.set()
        while job.first_step is not None and job.ledger.staleness.total() < 8:
            step(model, optimizer, by=1.0)
        return job.ledger.sent_by("group average")

    def program(job: Job) -> Any:
        jobs[job.rank] = job
        model, optimizer = started(moshpit(2))
        step(model, optimizer, by=1.0)
        stepped.wait(PATIENCE_S)
        if job.rank == 2:
            kill(job)
            assert back.wait(PATIENCE_S)
            return come_back(job, jobs[0], second_life)
        network: Any = job.peer_network
        while 2 in network.living:
            pass
        network.admit([newcomer(jobs[2])])
        back.set()
        while not entered.is_set():
            step(model, optimizer, by=1.0)
        for _ in range(8):
            step(model, optimizer, by=1.0)
        return job.ledger.sent_by("group average")

    assert all(run_jobs(4, program))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: moshpit(4, rule="code"), "Leave rule= out"),
        (lambda: moshpit(4, patience_s=0), r"(?s)waits for nobody.*patience_s=2.0"),
        (
            lambda: Strategy(aggregate=GroupAverage(2), sync=LocalSGD(4, outer=Nesterov(0.7, 0.9))),
            r"LocalSGD\(4\), or aggregate=All",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write_instead(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_a_world_that_is_too_small_is_refused_with_the_largest_size_that_fits() -> None:
    def program(job: Job) -> None:
        with pytest.raises(ConfigurationError, match=r"job of 2 workers(.|\n)*GroupAverage\(2\)"):
            started(moshpit(3))

    run_jobs(2, program)
