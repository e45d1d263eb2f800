"""TIC and TAC on graphs of receives and computation."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from stretto.schedule.receives import ComputeOp, ReceiveGraph, ReceiveMeasures, first_of, measure_receives, tac_order, tic_order


def makespan(graph: ReceiveGraph, order: tuple[int, ...]) -> float:
    """One link receives in this order; one processor runs, as soon as it can, the first operation that has what it needs."""
    arrived, now = {}, 0.0
    for number in order:
        now += graph.receive_s[number]
        arrived[number] = now
    needs, todo, now = graph.needs(), set(range(len(graph.operations))), 0.0
    while todo:
        ready = {number: max((arrived[receive] for receive in needs[number]), default=0.0) for number in todo}
        begin = max(now, min(ready.values()))
        number = min(number for number in todo if ready[number] <= begin)
        now = begin + graph.operations[number].seconds
        todo.remove(number)
    return now


def op(seconds: float, *reads: int, after: tuple[int, ...] = ()) -> ComputeOp:
    return ComputeOp(seconds=seconds, reads=frozenset(reads), after=after)


def test_tac_is_optimal_for_two_receives() -> None:
    decided = 0
    for seed in range(500):
        generator = random.Random(seed)
        operations = [op(generator.random(), *generator.choice([(0,), (1,), (0, 1)])) for _ in range(generator.randint(1, 6))]
        graph = ReceiveGraph((generator.random(), generator.random()), tuple(operations))
        ends = {order: makespan(graph, order) for order in permutations(range(2))}
        assert ends[tuple(tac_order(graph))] == pytest.approx(min(ends.values())), seed
        decided += abs(ends[0, 1] - ends[1, 0]) > 1e-9
    assert decided > 100


def test_tac_is_better_than_a_random_order_on_average() -> None:
    tac = chance = 0.0
    for seed in range(100):
        generator = random.Random(seed)
        receives = tuple(generator.random() for _ in range(5))
        operations = tuple(op(generator.random(), *generator.sample(range(5), generator.randint(1, 3))) for _ in range(6))
        graph = ReceiveGraph(receives, operations)
        tac += makespan(graph, tuple(tac_order(graph)))
        chance += makespan(graph, tuple(generator.sample(range(5), 5)))
    assert tac < 0.95 * chance


def test_tac_equals_the_paper_s_loop_that_computes_all_anew() -> None:
    orders = set()
    for seed in range(200):
        generator = random.Random(seed)
        receives = tuple(float(generator.randint(0, 9)) for _ in range(5))  # whole numbers: sums are exact, and there are ties
        operations = tuple(op(generator.randint(0, 9), *generator.sample(range(5), generator.randint(1, 4))) for _ in range(8))
        graph = ReceiveGraph(receives, operations)
        left, order = list(range(5)), []
        while left:
            needs = [needed & set(left) for needed in graph.needs()]
            wait_s = [sum(receives[number] for number in needed) for needed in needs]
            order.append(left.pop(first_of(measure_receives(graph, needs, wait_s, left))))
        assert tac_order(graph) == order, seed
        orders.add(tuple(order))
    assert len(orders) > 50


def test_the_circle_of_the_comparison_has_one_winner() -> None:
    first, second, third = (ReceiveMeasures(*three) for three in [(3, 4, 7), (5, 3, 2), (1, 1, 6)])
    assert first.is_before(second) and second.is_before(third) and third.is_before(first)
    assert first_of([first, second, third]) == 2 and first_of([third, second, first]) == 2  # of one scan, whatever a sort does
    assert first_of([first, first]) == 0  # the smaller number wins a tie


@pytest.mark.parametrize("forward_s", [1.0, 0.0, 1e-6])
def test_both_give_the_order_of_a_chain(forward_s: float) -> None:
    generator = random.Random(7)
    for count in (1, 2, 3, 4, 7, 20):
        chain = ReceiveGraph(
            tuple(generator.choice([0.0, generator.random(), 100.0]) for _ in range(count)),
            tuple(op(forward_s, i, after=(i - 1,) if i else ()) for i in range(count)),
        )
        assert tic_order(chain) == tac_order(chain) == list(range(count))


def test_needs_are_those_of_all_operations_before() -> None:
    graph = ReceiveGraph((1.0, 2.0, 4.0), (op(1, 0), op(1, 1), op(1, 2, after=(0, 1))))
    assert graph.needs() == [{0}, {1}, {0, 1, 2}]


def test_the_measures_of_the_paper_by_hand() -> None:
    graph = ReceiveGraph((1.0, 2.0, 4.0), (op(8, 0), op(16, 0), op(32, 0, 1), op(64, 1, 2, after=(0,))))
    needs = graph.needs()
    measures = measure_receives(graph, needs, [sum(graph.receive_s[r] for r in needed) for needed in needs], [0, 1, 2])
    assert measures[0] == ReceiveMeasures(receive_s=1.0, frees_s=24.0, next_s=3.0)
    assert measures[1] == ReceiveMeasures(receive_s=2.0, frees_s=0.0, next_s=3.0)
    assert measures[2] == ReceiveMeasures(receive_s=4.0, frees_s=0.0, next_s=7.0)
    without_0 = measure_receives(graph, [needed - {0} for needed in needs], [0.0, 0.0, 2.0, 6.0], [1, 2])
    assert [one.frees_s for one in without_0] == [32.0, 0.0] and without_0[1].next_s == 6.0


def test_tic_counts_receives_and_knows_no_times() -> None:
    graph = ReceiveGraph((9.0, 1.0, 1.0, 1.0), (op(1, 1, 2, 3), op(1, 0, 3)))
    assert tic_order(graph) == [0, 3, 1, 2]
    assert tic_order(ReceiveGraph((1.0, 1.0), ())) == [0, 1]
