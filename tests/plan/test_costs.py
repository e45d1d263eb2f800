"""Costs counted from plans equal the formulas of the literature, exactly where those are exact."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, inf, log2

import pytest
from closed_forms import (
    best_segmented,
    best_segments,
    closed_form,
    lower_bound,
    parameter_server_cost,
    segmented,
    segmented_there_and_back,
)

from stretto.collectives.binomial import depth
from stretto.collectives.broadcast_chain import broadcast_chain
from stretto.collectives.catalogue import CATALOGUE, Entry, find, names
from stretto.collectives.chain import chain
from stretto.collectives.plan import Kind
from stretto.collectives.ring import ring
from stretto.errors import ConfigurationError
from stretto.plan.costs import LinkCosts, count, plan_cost, predict

SIZES = [*range(1, 18), 24, 31, 32, 33]
EXACT = [entry for entry in CATALOGUE.values() if entry.name != "double_binary_tree"]
LINKS = [
    LinkCosts(1, 0),
    LinkCosts(0, 1),
    LinkCosts(0, 0, 1),
    LinkCosts(3, 5, 7),
    LinkCosts(11, 2, 1, lanes=2),
]  # whole numbers: floats stay exact
GRID = [(size, num_bytes) for size in (2, 3, 4, 7, 8, 16, 33, 64) for num_bytes in (1.0, 1e3, 1e6, 1e9)]
REAL_LINKS = [LinkCosts(1e-6, 1e-9), LinkCosts(50e-6, 8e-9), LinkCosts(1e-3, 1e-11), LinkCosts(0.0, 1e-9)]


def label(entry: Entry) -> str:
    return f"{entry.kind.value}-{entry.name}"


def groups(entry: Entry) -> tuple[int, ...]:
    return (1, 2, 3, 4, 8) if entry.with_group is not None else (1,)


@pytest.mark.parametrize("sizes", [SIZES[::3], pytest.param(SIZES, marks=pytest.mark.slow)], ids=["some sizes", "all sizes"])
@pytest.mark.parametrize("entry", EXACT, ids=label)
def test_the_counted_time_is_exactly_the_formulas(entry: Entry, sizes: Sequence[int]) -> None:
    for size in sizes:
        for group in groups(entry):
            maker = entry.bind(group=group)
            num_bytes = 6 * maker(0, size).num_chunks * size
            num_bytes = 0 if entry.kind is Kind.BARRIER else num_bytes
            for link in LINKS:
                formula = closed_form(entry.name, size, num_bytes, link, kind=entry.kind, group=group)
                assert count(maker, size).time(num_bytes, link) == formula, (size, group, link)


@pytest.mark.parametrize("size", [2, 3, 4, 6, 7, 8, 12, 16, 33])
def test_rounds_and_bytes_are_those_of_the_literature(size: int) -> None:
    h, levels, ring_volume = depth(size), size.bit_length() - 1, 2 * Fraction(size - 1, size)
    core, folded = 1 << levels, size & (size - 1) != 0
    expected = {
        "all_to_all": (size - 1, Fraction(size - 1)),
        "round_robin": (size - 1, Fraction(size - 1)),
        "master_worker": (2 * (size - 1), Fraction(size - 1)),
        "binomial_tree": (2 * h, Fraction(h)),
        "butterfly": (levels + 2 * folded, Fraction(levels + folded)),
        "halving_doubling": (2 * levels + 2 * folded, 2 * Fraction(core - 1, core) + folded),
        "ring": (2 * (size - 1), ring_volume),
        "direct": (2 * (size - 1), ring_volume),
        "bidirectional_ring": (4 * (size - 1), ring_volume),  # two messages a step, which share the link
        "chain": (2 * (size - 1), Fraction(2 if size > 2 else 1)),
    }
    for name, (rounds, sent) in expected.items():
        counted = plan_cost(Kind.ALL_REDUCE, name, size)
        assert (counted.num_rounds, counted.sent) == (rounds, sent), name


def test_two_links_halve_the_bidirectional_ring_and_one_link_does_not() -> None:
    entry = find(Kind.ALL_REDUCE, "bidirectional_ring")
    plain = count(ring, 8).time(1600, LinkCosts(0, 1))
    assert count(entry.bind(), 8).time(1600, LinkCosts(0, 1)) == plain
    assert count(entry.bind(), 8).time(1600, LinkCosts(0, 1, lanes=2)) == plain / 2


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("link", REAL_LINKS)
@pytest.mark.parametrize("name", names(Kind.ALL_REDUCE))
def test_no_plan_beats_the_lower_bound(name: str, link: LinkCosts) -> None:
    for size, num_bytes in GRID:
        for lanes in (1, 2):
            with_lanes = LinkCosts(link.alpha, link.beta, 0.0, lanes)
            bound = lower_bound(size, num_bytes, with_lanes) * (1 - 1e-12)
            assert plan_cost(Kind.ALL_REDUCE, name, size, group=4).time(num_bytes, with_lanes) >= bound
            for segment in (inf, 65536.0, 1e3):
                if num_bytes / segment < 1e5:
                    assert predict(Kind.ALL_REDUCE, name, size, num_bytes, with_lanes, segment, group=4) >= bound


def test_the_lower_bound_is_the_formula_of_the_survey() -> None:
    assert lower_bound(8, 1000, LinkCosts(2, 3)) == 2 * log2(8) + 2 * 1000 * 3 * 7 / 8
    assert lower_bound(1, 1000, LinkCosts(2, 3)) == 0


def test_butterfly_meets_the_bound_in_latency_and_ring_in_bandwidth() -> None:
    assert closed_form("butterfly", 16, 0, LinkCosts(1, 1)) == lower_bound(16, 0, LinkCosts(1, 1))
    assert closed_form("ring", 16, 1600, LinkCosts(0, 1)) == lower_bound(16, 1600, LinkCosts(0, 1))
    assert closed_form("halving_doubling", 16, 1600, LinkCosts(0, 1)) == lower_bound(16, 1600, LinkCosts(0, 1))


def test_the_parameter_server_costs_two_trips_of_all_workers_through_the_servers() -> None:
    assert parameter_server_cost(8, 1000, LinkCosts(2, 3), servers=4) == 2 * 8 * 1000 * 3 / 4 + 2 * 2
    assert parameter_server_cost(8, 1000, LinkCosts(0, 1), servers=16) < lower_bound(
        8, 1000, LinkCosts(0, 1)
    )  # helpers: outside its model
    with pytest.raises(ConfigurationError, match="servers=0"):
        parameter_server_cost(8, 1000, LinkCosts(2, 3), servers=0)


# ---------------------------------------------------------------- segments


@pytest.mark.parametrize("size", [2, 3, 5, 9])
@pytest.mark.parametrize("segments", [1, 2, 5, 20])
def test_a_chain_in_segments_counts_as_the_formula_says(size: int, segments: int) -> None:
    link, num_bytes = LinkCosts(3, 5), 1200
    one_way = count(broadcast_chain(0), size)
    assert one_way.pipelined(num_bytes, link, segments) == segmented(size - 1, segments, num_bytes, link)


@pytest.mark.parametrize("size", [3, 5, 9])
@pytest.mark.parametrize("segments", [1, 2, 5, 20])
def test_there_and_back_needs_a_second_link_for_its_formula_and_twice_the_time_on_one(size: int, segments: int) -> None:
    num_bytes, h, counted = 1200, size - 1, count(chain, size)
    two_links = LinkCosts(3, 5, lanes=2)
    assert counted.pipelined(num_bytes, two_links, segments) == segmented_there_and_back(h, segments, num_bytes, two_links)
    one_link = LinkCosts(3, 5)
    each = one_link.alpha + num_bytes / segments * one_link.beta
    assert counted.pipelined(num_bytes, one_link, segments) == 2 * (h + segments - 1) * each


def test_there_and_back_never_takes_longer_than_its_formula_on_two_links() -> None:
    link, counted = LinkCosts(3, 5, 2, lanes=2), count(chain, 6)
    for segments in (1, 2, 5, 20):  # the formula charges additions on the way back too
        assert counted.pipelined(1200, link, segments) <= segmented_there_and_back(5, segments, 1200, link)


@pytest.mark.parametrize("link", [LinkCosts(1e-6, 1e-9), LinkCosts(50e-6, 8e-9), LinkCosts(1e-3, 1e-11)])
@pytest.mark.parametrize("tree_depth", [1, 2, 3, 7, 63])
def test_the_best_number_of_segments_is_better_than_its_neighbours(tree_depth: int, link: LinkCosts) -> None:
    for num_bytes in (1.0, 1e3, 1e6, 1e9):
        k = best_segments(tree_depth, num_bytes, link)
        best = segmented(tree_depth, k, num_bytes, link)
        assert best <= segmented(tree_depth, k + 1, num_bytes, link) or k == int(num_bytes)
        assert k == 1 or best <= segmented(tree_depth, k - 1, num_bytes, link)
        assert best >= best_segmented(tree_depth, num_bytes, link) * (1 - 1e-12)


def test_segments_are_never_smaller_than_allowed() -> None:
    assert best_segments(63, 1e6, LinkCosts(0.0, 1e-9), least_bytes=1e5) == 10
    assert best_segments(63, 1e6, LinkCosts(1e-9, 1e-9), least_bytes=1e5) == 10
    assert best_segments(1, 1e6, LinkCosts(0.0, 1e-9)) == 1


@pytest.mark.parametrize("size", [2, 3, 4, 7, 16, 33, 64])
def test_the_double_tree_stays_within_its_approximation(size: int) -> None:
    """4(h+k)(alpha + (m/2k) beta), and at the best k the card's closed form with one level to spare."""
    counted, h, num_bytes = plan_cost(Kind.ALL_REDUCE, "double_binary_tree", size), depth(size), 1e6
    for link in (LinkCosts(1e-6, 1e-9), LinkCosts(50e-6, 8e-9)):
        times = []
        for k in range(1, 200):
            times.append(counted.pipelined(num_bytes, link, k))
            assert times[-1] <= 4 * (h + k) * (link.alpha + num_bytes / (2 * k) * link.beta)
        assert 0.4 * closed_form("double_binary_tree", size, num_bytes, link) <= min(times)
        assert min(times) <= 1.02 * closed_form("double_binary_tree", size, num_bytes, link)


# ---------------------------------------------------------------- prediction


def test_a_prediction_for_whole_messages_is_the_counted_time() -> None:
    for name in names(Kind.ALL_REDUCE):
        counted = plan_cost(Kind.ALL_REDUCE, name, 6, group=3)
        link = LinkCosts(1e-5, 1e-9, 1e-10)
        assert predict(Kind.ALL_REDUCE, name, 6, 6e6, link, inf, group=3) == counted.time(6e6, link)


def test_segments_make_a_chain_fast_for_long_vectors() -> None:
    args = (Kind.ALL_REDUCE, "chain", 8, 1e8, LinkCosts(1e-5, 1e-9))
    assert predict(*args, 1e6) < 0.2 * predict(*args, inf)


def test_the_cheapest_algorithm_sends_no_more_bytes_as_vectors_grow() -> None:
    def cheapest(num_bytes: float) -> str:
        return min(
            names(Kind.ALL_REDUCE),
            key=lambda name: plan_cost(Kind.ALL_REDUCE, name, 16, group=4).time(num_bytes, LinkCosts(1e-5, 1e-9)),
        )

    chosen = [cheapest(10.0**exponent) for exponent in range(10)]
    volumes = [plan_cost(Kind.ALL_REDUCE, name, 16, group=4).sent for name in chosen]
    assert volumes == sorted(volumes, reverse=True)
    assert chosen[0] == "butterfly"


def test_the_longest_message_decides_how_many_segments_there_are() -> None:
    counted = plan_cost(Kind.ALL_REDUCE, "ring", 4)
    assert counted.longest_message(4000) == 1000
    expected = counted.pipelined(4000, LinkCosts(1, 1, 1), ceil(1000 / 300))
    assert predict(Kind.ALL_REDUCE, "ring", 4, 4000, LinkCosts(1, 1, 1), 300) == expected


def test_a_job_of_one_costs_nothing() -> None:
    for name in names(Kind.ALL_REDUCE):
        assert predict(Kind.ALL_REDUCE, name, 1, 1e6, LinkCosts(1, 1, 1), 1e3) == 0
        assert closed_form(name, 1, 1e6, LinkCosts(1, 1, 1)) == 0


@pytest.mark.parametrize("bad", [{"alpha": -1.0}, {"beta": -1.0}, {"gamma": -1.0}, {"lanes": 0}])
def test_a_link_that_gives_time_back_is_an_error(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="cannot be negative"):
        LinkCosts(**{"alpha": 1.0, "beta": 1.0} | bad)  # type: ignore[arg-type]


def test_segments_of_no_bytes_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match="segment_bytes=0"):
        predict(Kind.ALL_REDUCE, "ring", 2, 1, LinkCosts(1, 1, 1), 0)
