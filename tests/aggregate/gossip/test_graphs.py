"""Graphs of gossip: for any number of workers connected, stochastic and with the gap that their formula says."""

from __future__ import annotations

from math import cos, isclose, log2, pi
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.aggregate.gossip import (
    Complete,
    Exponential,
    Gossip,
    Graph,
    OnePeerExponential,
    RandomMatching,
    Ring,
    Star,
    Torus,
    mixing,
)
from stretto.aggregate.gossip.admission import check_graph
from stretto.aggregate.gossip.graph import MixingGraph
from stretto.errors import ConfigurationError

EVERY: list[MixingGraph] = [
    Ring(), Torus(), Star(), Complete(), Exponential(), OnePeerExponential(), RandomMatching(), RandomMatching(seed=7),
]  # fmt: skip
SIZES = st.integers(min_value=1, max_value=20)


def over_a_period(graph: MixingGraph, size: int) -> list[int]:
    return list(range(graph.period(size) or 20))


@pytest.mark.parametrize("graph", EVERY, ids=repr)
@settings(deadline=None, max_examples=12)
@given(size=SIZES, step=st.integers(min_value=0, max_value=10_000))
def test_weights_are_doubly_stochastic_and_on_the_arcs_of_the_step_alone(graph: MixingGraph, size: int, step: int) -> None:
    weights = graph.weights(size, step)
    assert mixing.keeps_the_mean(weights) and graph.fault_for(size) is None
    arcs = {(sender, receiver) for receiver, sender in zip(*np.nonzero(weights), strict=True) if sender != receiver}
    assert arcs == set(graph.arcs(size, step))
    assert graph.directed or mixing.is_symmetric(weights)


@pytest.mark.parametrize("graph", EVERY, ids=repr)
@settings(deadline=None, max_examples=12)
@given(size=SIZES, step=st.integers(min_value=0, max_value=10_000))
def test_sources_are_those_who_have_a_worker_among_their_targets(graph: MixingGraph, size: int, step: int) -> None:
    for rank in range(size):
        assert graph.sources(rank, size, step) == [other for other in range(size) if rank in graph.targets(other, size, step)]
        assert rank not in graph.targets(rank, size, step)
        assert list(graph.targets(rank, size, step)) == sorted(graph.targets(rank, size, step))


@pytest.mark.parametrize("graph", EVERY, ids=repr)
@settings(deadline=None, max_examples=10)
@given(size=SIZES)
def test_every_graph_is_connected_over_a_period(graph: MixingGraph, size: int) -> None:
    arcs = [arc for step in over_a_period(graph, size) for arc in graph.arcs(size, step)]
    assert len(mixing.components(arcs, size)) == 1


@pytest.mark.parametrize("graph", [each for each in EVERY if not isinstance(each, RandomMatching)], ids=repr)
@settings(deadline=None, max_examples=10)
@given(size=SIZES, seed=st.integers(min_value=0, max_value=1000))
def test_differences_shrink_at_least_as_the_gap_says(graph: MixingGraph, size: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal(size)
    before = values - values.mean()
    after = before
    for step in over_a_period(graph, size):
        after = graph.weights(size, step) @ after
    rho = (1.0 - graph.spectral_gap(size)) ** len(over_a_period(graph, size))
    # All of these matrices are normal, so the eigenvalue bounds the length of what is left.
    assert np.linalg.norm(after) <= rho * np.linalg.norm(before) + 1e-9


@pytest.mark.parametrize("size", [3, 4, 5, 8, 13, 64])
def test_the_gap_of_a_ring_is_that_of_its_formula(size: int) -> None:
    others = [abs(1 / 3 + 2 / 3 * cos(2 * pi * k / size)) for k in range(1, size)]
    assert isclose(Ring().spectral_gap(size), 1 - max(others), abs_tol=1e-9)
    assert size < 13 or isclose(Ring().spectral_gap(size), 4 * pi**2 / (3 * size**2), rel_tol=0.05)


def test_the_gaps_of_star_and_complete_are_1_over_p_and_1() -> None:
    for size in range(2, 20):
        assert isclose(Complete().spectral_gap(size), 1.0, abs_tol=1e-9)
        assert size == 2 or isclose(Star().spectral_gap(size), 1 / size, abs_tol=1e-9)


@pytest.mark.parametrize("size", range(2, 34))
def test_one_peer_exponential_is_the_average_after_a_period_for_powers_of_two_and_no_others(size: int) -> None:
    graph = OnePeerExponential()
    product = np.eye(size)
    for step in over_a_period(graph, size):
        product = graph.weights(size, step) @ product
    is_average = bool(np.abs(product - 1 / size).max() < 1e-12)
    assert is_average == log2(size).is_integer() == (graph.spectral_gap(size) == 1.0)


@pytest.mark.parametrize("size", [2, 3, 7, 8, 64])
def test_matchings_shrink_squared_distances_in_the_mean_as_the_gap_says(size: int) -> None:
    graph, total, rounds = RandomMatching(seed=3), np.zeros((size, size)), 1000 if size < 64 else 100
    for step in range(rounds):
        weights = graph.weights(size, step)
        total += weights.T @ weights
    others = np.sort(np.linalg.eigvalsh(total / rounds))[:-1]
    expected = (1 - graph.spectral_gap(size)) ** 2
    assert abs(others.mean() - expected) < 0.02  # all of them are equal but for chance


def test_every_pair_meets_in_matchings_and_seeds_differ() -> None:
    met = {arc for step in range(200) for arc in RandomMatching().arcs(7, step)}
    assert len(met) == 7 * 6
    assert RandomMatching(1).arcs(8, 0) != RandomMatching(2).arcs(8, 0) or RandomMatching(1).arcs(8, 1) != RandomMatching(2).arcs(
        8, 1
    )


@settings(deadline=None, max_examples=50)
@given(size=st.integers(min_value=2, max_value=12), data=st.data())
def test_a_graph_of_ones_own_is_doubly_stochastic_with_metropolis_weights_or_refused(size: int, data: Any) -> None:
    pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True, min_size=1))
    connected = len(mixing.components([*edges, *((b, a) for a, b in edges)], 1 + max(map(max, edges)))) == 1
    if not connected:
        with pytest.raises(ConfigurationError, match=r"is not connected.*(?s:.)*Add for instance the edge \(\d+, \d+\)"):
            Graph(tuple(edges))
        return
    graph = Graph(tuple(edges))
    weights = graph.weights(graph.size)
    assert mixing.keeps_the_mean(weights) and mixing.is_symmetric(weights)
    degree = [len(graph.targets(rank, graph.size)) for rank in range(graph.size)]
    for a, b in edges:
        assert isclose(weights[a, b], 1 / (1 + max(degree[a], degree[b])))


@settings(deadline=None, max_examples=30)
@given(size=st.integers(min_value=2, max_value=8), data=st.data())
def test_the_edge_that_a_refusal_names_brings_groups_together(size: int, data: Any) -> None:
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True, min_size=1))
    for _ in range(size * size):
        try:
            graph = Graph(tuple(edges), one_way=True)
            break
        except ConfigurationError as problem:
            first, last = str(problem).rsplit("(", 1)[1].rstrip(").").split(", ")
            assert (int(first), int(last)) not in edges
            edges.append((int(first), int(last)))
    weights = graph.weights(graph.size)
    assert mixing.keeps_the_sum(weights)
    assert graph.spectral_gap(graph.size) > 0


def test_shares_are_weights_and_what_is_not_given_is_kept() -> None:
    graph = Graph(((0, 1), (1, 2)), shares=(0.25, 0.5))
    assert graph.weights(3).tolist() == [[0.75, 0.25, 0.0], [0.25, 0.25, 0.5], [0.0, 0.5, 0.5]]
    one_way = Graph(((0, 1), (1, 2), (2, 0)), one_way=True, shares=(0.5, 0.25, 1.0))
    assert one_way.weights(3).tolist() == [[0.5, 0.0, 1.0], [0.5, 0.75, 0.0], [0.0, 0.25, 0.0]]
    assert not mixing.keeps_the_mean(one_way.weights(3)) and mixing.keeps_the_sum(one_way.weights(3))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Graph(()), "give its edges as pairs of ranks"),
        (lambda: Graph(((0, 0),)), "is no edge"),
        (lambda: Graph(((0, -1),)), "is no edge"),
        (lambda: Graph(((0, 1), (1, 0))), "comes twice"),
        (lambda: Graph(((0, 1), (2, 3))), r"no path leads from worker 1 to 2(?s:.)*Add for instance the edge \(1, 2\)"),
        (lambda: Graph(((0, 1), (1, 2)), one_way=True), r"no path leads from worker 1 to 0(?s:.)*the edge \(1, 0\)"),
        (lambda: Graph(((0, 1), (1, 2)), shares=(0.75, 0.5)), "(?s)worker 1 gives away 1.25.*not stochastic.*by 0.8 or less"),
        (lambda: Graph(((0, 1),), shares=(0.5, 0.5)), "2 shares for 1 edges"),
        (lambda: Graph(((0, 1),), shares=(-0.5,)), "is no share"),
        (lambda: Graph(((0, 1), (1, 2))).check_size(4), "(?s)in a job of 4 workers: its edges join 3.*join ranks 0 to 3"),
        (lambda: Torus(rows=3).check_size(8), r"(?s)8 workers do not make 3 rows.*Torus\(rows=2\), or Torus\(\) for 2 rows"),
        (lambda: Torus(rows=0), "1 or more"),
        (lambda: Torus(rows=9).check_size(4), r"Torus\(rows=4\)"),
        (lambda: RandomMatching(seed=0.5), "a seed is a whole number"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_graph_is_refused_with_what_to_write(make: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make()


@pytest.mark.parametrize("graph", [*EVERY, Torus(rows=2), Graph(((0, 1), (1, 2)), shares=(0.5, 0.25))], ids=repr)
def test_a_graph_reads_back_from_its_text(graph: MixingGraph) -> None:
    names = {type(each).__name__: type(each) for each in (*EVERY, Graph(((0, 1),)))}
    assert eval(repr(graph), dict(names)) == graph and hash(graph) == hash(eval(repr(graph), dict(names)))


def test_a_graph_describes_itself_with_its_gap() -> None:
    assert Ring().describe(8) == "Ring() of 8 workers: 2 neighbours, spectral gap 0.195"
    assert "1 neighbour, the same again after 3 steps, spectral gap 1" in OnePeerExponential().describe(8)
    assert "0 to 1 neighbours, others in every step" in RandomMatching().describe(7)
    assert "1 to 3 neighbours" in Star().describe(4)


@pytest.mark.parametrize("graph", EVERY, ids=repr)
@pytest.mark.parametrize("size", [0, -3, 2.5, True])
def test_a_world_without_workers_is_refused(graph: MixingGraph, size: Any) -> None:
    for ask in (graph.check_size, graph.describe, graph.spectral_gap):
        with pytest.raises(ConfigurationError, match=f"of {size} workers: a job has 1 or more"):
            ask(size)


class OnlyUpwards(MixingGraph):
    """Says that it is undirected, and is not."""

    def targets(self, rank: int, size: int, step: int = 0) -> list[int]:
        return [(rank + 1) % size] if step % 2 else sorted({(rank + 1) % size, (rank - 1) % size} - {rank})

    def period(self, size: int) -> int:
        return 2


@pytest.mark.parametrize("push_sum", [False, True])
def test_a_graph_of_ones_own_that_is_one_way_and_does_not_say_so_is_refused(push_sum: bool) -> None:
    check_graph(Gossip(OnlyUpwards(), push_sum=push_sum), 2)  # where both directions are the same edge
    with pytest.raises(ConfigurationError, match=r"(?s)worker 0 sends to 1 in step 1, .*directed = True.*targets\(1, 3, 1\)"):
        check_graph(Gossip(OnlyUpwards(), push_sum=push_sum), 3)
