"""The schedule alone, without any wire: its order is enough, its cuts agree on both ends, and it is compiled once."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stretto.collectives import catalogue
from stretto.collectives.catalogue import CATALOGUE
from stretto.collectives.plan import Kind, Plan, chunk_start
from stretto.collectives.run import compiled
from stretto.collectives.schedule import Action, Schedule, Task, compile_plan
from stretto.errors import ConfigurationError

SIZES = range(1, 9)
Numbers = NDArray[np.int64]


def plans(kind: Kind, algorithm: str, size: int, *, root: int = 0, group: int = 1) -> list[Plan]:
    return [catalogue.plan(kind, algorithm, rank, size, root=root, group=group) for rank in range(size)]


class Interleaving:
    """All ranks' tasks, one at a time, in any order that the dependencies allow.

    A message is read from the sender's memory when it is *delivered*, which may be long after the send began, and the
    send is done only then: the longest that a wire may take. `scale` marks final writes by multiplying them.
    """

    def __init__(self, schedules: list[Schedule], data: list[Numbers], scale: int, seed: int) -> None:
        self.schedules, self.scale = schedules, scale
        self.memory = [[x.copy(), np.full_like(x, -(10**6))] for x in data]
        self.counts = [list(schedule.num_dependencies) for schedule in schedules]
        self.ready = [(rank, task) for rank, counts in enumerate(self.counts) for task, count in enumerate(counts) if count == 0]
        self.sent: dict[tuple[int, int, int], int] = {}  # (from, to, index) -> the send task
        self.asked: dict[tuple[int, int, int], int] = {}
        self.random = random.Random(seed)
        self.num_done = 0

    def run(self) -> list[Numbers]:
        while True:
            meetings = sorted(self.sent.keys() & self.asked.keys())
            choices = len(self.ready) + len(meetings)
            if not choices:
                break
            pick = self.random.randrange(choices)
            if pick < len(self.ready):
                self._start(*self.ready.pop(pick))
            else:
                self._deliver(meetings[pick - len(self.ready)])
        assert self.num_done == sum(len(schedule.tasks) for schedule in self.schedules), "ranks wait for each other"
        assert not self.sent and not self.asked
        return [memory[0] for memory in self.memory]

    def _start(self, rank: int, number: int) -> None:
        task = self.schedules[rank].tasks[number]
        if task.action is Action.SEND:
            self.sent[rank, task.peer, task.index] = number
        elif task.action is Action.RECEIVE:
            self.asked[task.peer, rank, task.index] = number
        else:
            self._write(rank, task, self.memory[rank][task.source][task.start : task.stop].copy())
            self._done(rank, number)

    def _deliver(self, name: tuple[int, int, int]) -> None:
        source, target, _ = name
        send, receive = self.sent.pop(name), self.asked.pop(name)
        sending, receiving = self.schedules[source].tasks[send], self.schedules[target].tasks[receive]
        assert sending.stop - sending.start == receiving.stop - receiving.start
        self._write(target, receiving, self.memory[source][sending.buffer][sending.start : sending.stop].copy())
        self._done(target, receive)
        self._done(source, send)

    def _write(self, rank: int, task: Task, arrived: Numbers) -> None:
        place = self.memory[rank][task.buffer][task.start : task.stop]
        place[:] = place + arrived if task.add else arrived
        if task.final:
            place *= self.scale

    def _done(self, rank: int, number: int) -> None:
        self.num_done += 1
        for successor in self.schedules[rank].successors[number]:
            self.counts[rank][successor] -= 1
            if self.counts[rank][successor] == 0:
                self.ready.append((rank, successor))


def expected(kind: Kind, data: list[Numbers], rank: int, root: int, scale: int) -> Iterator[tuple[slice, Numbers]]:
    """Which elements of a rank hold what at the end."""
    size, length = len(data), len(data[0])
    scale = scale if size > 1 else 1  # a world of one has nothing to complete
    whole, own = slice(0, length), slice(chunk_start(rank, length, size), chunk_start(rank + 1, length, size))
    total = np.sum(data, axis=0) * scale
    if kind is Kind.ALL_REDUCE or (kind is Kind.REDUCE and rank == root):
        yield whole, total
    elif kind is Kind.REDUCE_SCATTER:
        yield own, total[own]
    elif kind is Kind.BROADCAST:
        yield whole, data[root]
    elif kind is Kind.SCATTER:
        yield own, data[root][own]
    elif kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL) or (kind is Kind.GATHER and rank == root):
        for peer in range(size):
            part = slice(chunk_start(peer, length, size), chunk_start(peer + 1, length, size))
            yield part, data[peer][own if kind is Kind.ALL_TO_ALL else part]


@settings(max_examples=250, deadline=None)
@given(
    entry=st.sampled_from([entry for entry in CATALOGUE.values() if entry.kind is not Kind.BARRIER]),
    size=st.integers(1, 9),
    length=st.integers(0, 40),
    segment=st.integers(1, 12),
    place=st.integers(0, 8),
    seed=st.integers(0, 2**32),
)
def test_any_order_that_the_dependencies_allow_gives_the_right_result(
    entry: catalogue.Entry, size: int, length: int, segment: int, place: int, seed: int
) -> None:
    root = place % size if entry.with_root is not None else 0
    group = place if entry.with_group is not None and place else 1
    if entry.kind is Kind.ALL_TO_ALL:
        length = length // size * size
    data = [np.arange(length, dtype=np.int64) * 17 + 1000 * rank + 3 for rank in range(size)]
    schedules = [compile_plan(p, length, segment) for p in plans(entry.kind, entry.name, size, root=root, group=group)]
    results = Interleaving(schedules, data, 3, seed).run()
    for rank in range(size):
        for part, numbers in expected(entry.kind, data, rank, root, 3):
            np.testing.assert_array_equal(results[rank][part], numbers)


@pytest.mark.parametrize("algorithm", catalogue.names(Kind.ALL_REDUCE))
def test_orders_that_ignore_one_dependency_are_wrong_sometimes(algorithm: str) -> None:
    """The check above can fail: without the edges it does."""
    size, length = 4, 24
    data = [np.arange(length, dtype=np.int64) + 1000 * rank for rank in range(size)]
    total = np.sum(data, axis=0)
    whole = [compile_plan(p, length, 4) for p in plans(Kind.ALL_REDUCE, algorithm, size)]
    bare = [
        Schedule(s.tasks, (0,) * len(s.tasks), ((),) * len(s.tasks), s.sources, s.destinations, s.needs_work_buffer)
        for s in whole
    ]
    results = [Interleaving(bare, data, 1, seed).run() for seed in range(5)]
    assert any((x != total).any() for result in results for x in result)


@pytest.mark.parametrize("size", SIZES)
def test_both_ends_of_every_message_agree_about_its_length(size: int) -> None:
    for entry in CATALOGUE.values():
        for length, segment in ((0, 1), (size, 1), (13 * size, 5), (64 * size, 7), (1, 8), (11 * size + 1, 3)):
            if entry.kind is Kind.ALL_TO_ALL and length % size:
                continue
            messages: Counter[tuple[int, int, int, int]] = Counter()
            for rank, plan in enumerate(plans(entry.kind, entry.name, size)):
                for task in compile_plan(plan, length * (entry.kind is not Kind.BARRIER), segment).tasks:
                    if task.action is Action.SEND:
                        messages[rank, task.peer, task.index, task.stop - task.start] += 1
                    elif task.action is Action.RECEIVE:
                        messages[task.peer, rank, task.index, task.stop - task.start] -= 1
            assert not any(messages.values()), (entry.name, length, segment)


def test_segments_are_no_longer_than_asked_for_and_cover_everything_once() -> None:
    plan = catalogue.plan(Kind.ALL_REDUCE, "ring", 0, 4)
    covered: dict[Action, Counter[int]] = defaultdict(Counter)
    for task in compile_plan(plan, 103, 8).tasks:
        assert 0 < task.stop - task.start <= 8
        covered[task.action].update(range(task.start, task.stop))
    assert set(covered[Action.SEND]) == set(range(103))
    assert covered[Action.SEND].total() == 103 + 103 - 26 - 26  # all but the chunk at rank 1, and all but that at rank 0


def test_a_segment_waits_only_for_its_own_elements() -> None:
    """The second segment of a chain can leave before the first has come back."""
    schedule = compile_plan(catalogue.plan(Kind.ALL_REDUCE, "chain", 0, 3), 16, 4)
    waits: dict[Action, list[int]] = defaultdict(list)
    for task, count in zip(schedule.tasks, schedule.num_dependencies, strict=True):
        waits[task.action].append(count)
    assert waits == {Action.SEND: [0] * 4, Action.RECEIVE: [1] * 4}


class Hearsay(Interleaving):
    """Every message carries the names of all whom its sender had heard of, directly or not, when it was sent."""

    def __init__(self, schedules: list[Schedule], seed: int) -> None:
        super().__init__(schedules, [np.zeros(0, np.int64)] * len(schedules), 1, seed)
        self.heard_of = [{rank} for rank in range(len(schedules))]
        self.carried: dict[tuple[int, int, int], set[int]] = {}

    def _start(self, rank: int, number: int) -> None:
        task = self.schedules[rank].tasks[number]
        if task.action is Action.SEND:
            self.carried[rank, task.peer, task.index] = set(self.heard_of[rank])
        super()._start(rank, number)

    def _deliver(self, name: tuple[int, int, int]) -> None:
        self.heard_of[name[1]] |= self.carried[name]
        super()._deliver(name)


@pytest.mark.parametrize("size", SIZES)
def test_an_empty_vector_still_makes_every_rank_hear_of_every_other(size: int) -> None:
    for algorithm in catalogue.names(Kind.ALL_REDUCE):
        walk = Hearsay([compile_plan(p, 0, 8) for p in plans(Kind.ALL_REDUCE, algorithm, size)], seed=size)
        walk.run()
        assert walk.heard_of == [set(range(size))] * size, algorithm


def test_a_transposition_of_what_cannot_be_divided_is_refused() -> None:
    plan = catalogue.plan(Kind.ALL_TO_ALL, "transpose", 0, 3)
    with pytest.raises(ConfigurationError, match="7 is not a multiple of 3.\nPad the tensor to 9 elements"):
        compile_plan(plan, 7, 100)


def test_a_schedule_is_compiled_once() -> None:
    first = compiled(catalogue.plan(Kind.ALL_REDUCE, "ring", 1, 4), 1000, 64)
    assert compiled(catalogue.plan(Kind.ALL_REDUCE, "ring", 1, 4), 1000, 64) is first
    assert compiled(catalogue.plan(Kind.ALL_REDUCE, "ring", 1, 4), 1001, 64) is not first
