"""The merge plan: equal to brute force, never worse than the paper's rule."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate, combinations

import pytest

from stretto.plan.profile import TransferCost
from stretto.schedule.merge import exact_merge, greedy_merge, last_end

# Of layers 4, 3, 2, 1: when their gradients are ready, their bytes, and the network.
COUNTER_EXAMPLE = (
    list(accumulate([0.275, 1.77, 1.19, 1.52])),
    [9.23, 0.0014, 1.73, 0.024],
    TransferCost(start_s=2.0, per_byte_s=0.3),
)


def all_merges(count: int) -> Iterator[list[range]]:
    for num_cuts in range(count):
        for cuts in combinations(range(1, count), num_cuts):
            edges = [0, *cuts, count]
            yield [range(begin, end) for begin, end in zip(edges, edges[1:], strict=False)]


def instance(generator: random.Random, most_layers: int) -> tuple[list[float], list[float], TransferCost]:
    count = generator.randint(1, most_layers)
    ready_s = list(accumulate(generator.choice([0.0, 0.1, 1.0, 2.0]) * generator.random() for _ in range(count)))
    num_bytes = [generator.choice([0.01, 1.0, 10.0]) * generator.random() for _ in range(count)]
    return ready_s, num_bytes, TransferCost(start_s=2 * generator.random(), per_byte_s=generator.random())


def test_greedy_is_not_optimal_and_the_exact_plan_is() -> None:
    greedy, exact = greedy_merge(*COUNTER_EXAMPLE), exact_merge(*COUNTER_EXAMPLE)
    assert greedy == [range(0, 4)] and exact == [range(0, 1), range(1, 4)]
    assert last_end(greedy, *COUNTER_EXAMPLE) == pytest.approx(10.05, abs=0.005)
    assert last_end(exact, *COUNTER_EXAMPLE) == pytest.approx(7.57, abs=0.005)


def test_the_exact_plan_equals_brute_force_and_beats_greedy() -> None:
    worse = 0
    for seed in range(1000):
        ready_s, num_bytes, cost = instance(random.Random(seed), 12 if seed % 10 == 0 else 8)
        exact = last_end(exact_merge(ready_s, num_bytes, cost), ready_s, num_bytes, cost)
        best = min(last_end(groups, ready_s, num_bytes, cost) for groups in all_merges(len(ready_s)))
        greedy = last_end(greedy_merge(ready_s, num_bytes, cost), ready_s, num_bytes, cost)
        assert exact == pytest.approx(best, rel=1e-12), seed
        assert exact <= greedy * (1 + 1e-12), seed
        worse += greedy > exact * (1 + 1e-9)
    assert worse > 50  # else the two are never told apart


def test_greedy_is_never_worse_than_no_merging_or_one_group() -> None:
    for seed in range(1000):
        ready_s, num_bytes, cost = instance(random.Random(seed), 30)
        count = len(ready_s)
        greedy = last_end(greedy_merge(ready_s, num_bytes, cost), ready_s, num_bytes, cost)
        alone = last_end([range(i, i + 1) for i in range(count)], ready_s, num_bytes, cost)
        together = last_end([range(count)], ready_s, num_bytes, cost)
        assert greedy <= min(alone, together) * (1 + 1e-12), seed


def test_waves_of_several_kinds_equal_brute_force_over_waves() -> None:
    for seed in range(100):
        generator = random.Random(seed)
        ready_s, num_bytes, cost = instance(generator, 8)
        kinds = [generator.choice(["weight", "bias"]) for _ in ready_s]
        exact = last_end(exact_merge(ready_s, num_bytes, cost, kinds), ready_s, num_bytes, cost, kinds)
        best = min(last_end(groups, ready_s, num_bytes, cost, kinds) for groups in all_merges(len(ready_s)))
        assert exact == pytest.approx(best, rel=1e-12), seed


def test_ties_are_broken_for_fewer_groups() -> None:
    free = TransferCost(start_s=0.0, per_byte_s=0.0)
    assert exact_merge([0.0, 0.0, 1.0], [1, 1, 1], free) == [range(0, 3)]


def test_there_may_be_nothing_to_merge() -> None:
    cost = TransferCost(start_s=1.0, per_byte_s=1.0)
    assert exact_merge([], [], cost) == greedy_merge([], [], cost) == []
    assert last_end([], [], [], cost) == 0.0
