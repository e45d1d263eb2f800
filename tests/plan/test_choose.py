"""Which all-reduce for which size, and the measurement that decides it."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.ranks import Rank
from stretto.collectives.catalogue import find, names
from stretto.collectives.plan import Kind
from stretto.collectives.request import DEFAULT_SEGMENT_BYTES
from stretto.plan.choose import (
    FINALISTS,
    MARGIN,
    RING_FROM_BYTES,
    SIZES,
    TRIAL_S,
    TRIAL_SIZES,
    Choices,
    Trial,
    choose,
    ranking,
    trials,
)
from stretto.plan.costs import LinkCosts, plan_cost
from stretto.plan.network import PROBE_BYTES, measure, slowest
from stretto.testing import run_virtual
from stretto.testing.network_model import Link, NetworkModel
from stretto.testing.virtual import VirtualWire

GIGABIT = LinkCosts(alpha=5e-5, beta=8e-9, gamma=1e-10)
WORLDS = [2, 3, 4, 7, 8, 16, 64]


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("alpha", [1e-6, 5e-5, 1e-3])
@pytest.mark.parametrize("beta", [1e-10, 8e-9, 1e-6])
def test_larger_tensors_get_algorithms_that_send_no_more(size: int, alpha: float, beta: float) -> None:
    """As the bytes come to matter more than the messages, what the busiest rank sends never grows.

    Chains and trees are left out of the comparison where segments make them as good as the least: a pipeline's time does
    not follow its bytes.
    """
    choices = choose(size, LinkCosts(alpha, beta, 1e-10), DEFAULT_SEGMENT_BYTES)
    sent = [
        plan_cost(Kind.ALL_REDUCE, name, size).sent for name in choices.algorithms if not find(Kind.ALL_REDUCE, name).segments
    ]
    assert all(before >= after for before, after in pairwise(sent)), choices


@pytest.mark.parametrize("size", WORLDS)
def test_the_smallest_get_few_rounds_and_the_largest_the_fewest_bytes(size: int) -> None:
    choices = choose(size, GIGABIT, DEFAULT_SEGMENT_BYTES)
    smallest, largest = (plan_cost(Kind.ALL_REDUCE, choices.algorithm(n), size) for n in (64, 1 << 33))
    rounds = [plan_cost(Kind.ALL_REDUCE, name, size).num_rounds for name in names(Kind.ALL_REDUCE)]
    assert smallest.num_rounds == min(rounds)
    assert largest.sent <= 2


def test_the_table_covers_every_size_in_order() -> None:
    choices = choose(8, GIGABIT, DEFAULT_SEGMENT_BYTES)
    assert choices.limits == sorted(set(choices.limits)) and choices.limits[-1] == SIZES[-1]
    assert len(choices.limits) == len(choices.algorithms)
    assert all(before != after for before, after in pairwise(choices.algorithms))
    for limit, algorithm in zip(choices.limits, choices.algorithms, strict=True):
        assert choices.algorithm(limit) == algorithm
    assert choices.algorithm(0) == choices.algorithms[0]
    assert choices.algorithm(1 << 40) == choices.algorithms[-1]


@settings(max_examples=30, deadline=None)
@given(
    alphas=st.lists(st.floats(1e-7, 1e-2), min_size=3, max_size=3),
    betas=st.lists(st.floats(1e-11, 1e-6), min_size=3, max_size=3),
)
def test_ranks_that_measured_differently_choose_alike(alphas: list[float], betas: list[float]) -> None:
    """All compute from everybody's numbers, in whatever order they hold them."""
    estimates = [LinkCosts(alpha, beta, 1e-10) for alpha, beta in zip(alphas, betas, strict=True)]
    tables = {
        msgspec.json.encode(choose(4, slowest(order), DEFAULT_SEGMENT_BYTES))
        for order in (estimates, estimates[::-1], estimates[1:] + estimates[:1])
    }
    assert len(tables) == 1


def test_a_table_survives_the_way_to_the_other_ranks() -> None:
    choices = choose(5, GIGABIT, DEFAULT_SEGMENT_BYTES)
    assert msgspec.convert(msgspec.to_builtins(choices), Choices) == choices


def test_what_is_tried_out_is_cheap_and_the_best_of_the_ranking() -> None:
    wanted = trials(4, GIGABIT, DEFAULT_SEGMENT_BYTES)
    assert {trial.num_bytes for trial in wanted} <= set(TRIAL_SIZES)
    for num_bytes in TRIAL_SIZES:
        ranked = ranking(4, num_bytes, GIGABIT, DEFAULT_SEGMENT_BYTES, 1)
        assert ranked == sorted(ranked, key=lambda pair: pair[0])
        best = [name for _, name in ranked[:FINALISTS]]
        tried = [trial.algorithm for trial in wanted if trial.num_bytes == num_bytes]
        assert tried == ([] if ranked[0][0] >= TRIAL_S else [*best, "ring"] if "ring" not in best else best)


def test_what_was_tried_out_beats_the_prediction_near_the_sizes_tried() -> None:
    tried = {Trial(4096, "ring"): 2e-4, Trial(4096, "master_worker"): 1e-4}
    choices = choose(4, GIGABIT, DEFAULT_SEGMENT_BYTES, tried=tried)
    assert {choices.algorithm(n) for n in (64, 1024, 4096, 8192)} == {"master_worker"}
    assert choices.algorithm(1 << 26) == choose(4, GIGABIT, DEFAULT_SEGMENT_BYTES).algorithm(1 << 26)


def test_a_ring_is_taken_where_it_is_hardly_slower_for_several_buckets_do_not_get_in_each_others_way() -> None:
    slow = LinkCosts(alpha=6e-4, beta=3e-7, gamma=3e-11)  # four hosts at 28 Mbit/s, as measured
    (best, first), *others = ranking(4, 4 << 20, slow, DEFAULT_SEGMENT_BYTES, 1)
    ring = next(seconds for seconds, name in others if name == "ring")
    assert first == "halving_doubling" and best < ring < (1 + MARGIN) * best
    choices = choose(4, slow, DEFAULT_SEGMENT_BYTES)
    assert choices.algorithm(4 << 20) == "ring"
    assert choices.algorithm(64) != "ring"  # six rounds instead of two: far more than the margin


def test_trials_that_differ_by_less_than_they_can_tell_leave_the_prediction_as_it_is() -> None:
    names = ["butterfly", "all_to_all", "halving_doubling"]  # in the order of the prediction
    for times, chosen in [
        ((1.15, 1.0, 1.3), "butterfly"),
        ((1.3, 1.15, 1.0), "all_to_all"),
        ((1.3, 1.4, 1.0), "halving_doubling"),
    ]:
        for num_bytes, with_ring in ((4096, chosen), (RING_FROM_BYTES, "ring")):
            tried = {Trial(num_bytes, name): 1e-3 * seconds for name, seconds in zip(names, times, strict=True)}
            assert choose(4, GIGABIT, DEFAULT_SEGMENT_BYTES, tried=tried).algorithm(num_bytes) == chosen
            tried[Trial(num_bytes, "ring")] = 1e-3 * (min(times) + 0.15)
            assert choose(4, GIGABIT, DEFAULT_SEGMENT_BYTES, tried=tried).algorithm(num_bytes) == with_ring


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("link", [Link(latency_s=5e-5, bytes_per_s=1.25e8), Link(latency_s=1e-3, bytes_per_s=1e7)])
def test_what_is_measured_is_what_the_links_are(size: int, link: Link) -> None:
    def program(wire: VirtualWire) -> LinkCosts:
        me = Rank(wire)

        def ring(probe: torch.Tensor) -> None:
            me.all_reduce("ring", probe)

        return measure(size, me.barrier, ring, lambda seconds: seconds, wire.now)  # all ranks measure alike in virtual time

    estimate = slowest(run_virtual(size, program, model=NetworkModel(link)))
    assert estimate.alpha == pytest.approx(link.latency_s, rel=0.2)
    assert estimate.beta == pytest.approx(1 / link.bytes_per_s, rel=0.2)
    assert 0 < estimate.gamma < 1e-6


def test_the_probe_is_longer_than_its_latency_on_ordinary_links() -> None:
    """Otherwise beta would be the difference of two nearly equal numbers."""
    assert PROBE_BYTES * GIGABIT.beta > 10 * 2 * math.log2(64) * GIGABIT.alpha
