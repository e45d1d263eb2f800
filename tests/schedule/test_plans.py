"""Every schedule's plan: complete, of one kind each, the same every time, and what its text says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from step_profiles import chain_profile, chain_profiles, gradients_of
from stretto.errors import ConfigurationError
from stretto.parsing import parse
from stretto.plan.profile import StepProfile, TransferCost
from stretto.plan.simulate import simulate
from stretto.plan.transfers import Gradient, TransferPlan
from stretto.schedule.best_plan import best_plan
from stretto.schedule.caramel import (
    MAX_DEPTH,
    START_UP_SHARES,
    Caramel,
    TransferWindow,
    batch_small,
    bytes_at_share,
    depth_of,
    part_bytes_of,
    pipelined_seconds,
    windows_of,
)
from stretto.schedule.first_use import (
    CREDIT_BYTES,
    LARGEST_PARTITION,
    LEAST_PARTITION,
    best_partition,
    credit_for,
    groups_by_first_use,
)
from stretto.schedule.merged import MARGIN, Merged
from stretto.schedule.orders import AfterBackward, Buckets, WaitFree
from stretto.schedule.priority import Priority
from stretto.schedule.readiness import in_order_of_readiness
from stretto.schedule.tictac import Tac, Tic
from stretto.strategy import Strategy

OLD: list[Any] = [AfterBackward(), WaitFree(), Buckets(), Buckets(bytes=5_000_000, first_bytes=1000)]
NEW: list[Any] = [
    Merged(),
    Tic(),
    Tic(cross_barrier=False),
    Tac(),
    Priority(),
    Priority(partition=100_000, credit=300_000, cross_barrier=False),
    Caramel(),
    Caramel(cross_barrier=False),
]
EVERY = [*OLD, *NEW]
BY_URGENCY = [schedule for schedule in NEW if not isinstance(schedule, Merged)]
MS = 1e-3
COST = TransferCost(start_s=1 * MS, per_byte_s=1e-8)  # a / b = 100,000 bytes, B* = 900,000


def names(plan: TransferPlan) -> list[tuple[str, ...]]:
    return [transfer.parameters for transfer in plan.transfers]


@pytest.mark.parametrize("schedule", EVERY, ids=repr)
def test_the_text_reads_back_and_the_value_is_hashable(schedule: Any) -> None:
    read: list[Any] = []

    def keep(schedule: Any) -> Strategy:
        read.append(schedule)
        return Strategy()

    parse(f"Strategy(schedule={schedule!r})", extra={"Strategy": keep, type(schedule).__name__: type(schedule)})
    assert read == [schedule] and hash(read[0]) == hash(schedule) and not hasattr(schedule, "__dict__")


@pytest.mark.parametrize(
    ("kind", "bad", "instead"),
    [
        (Priority, {"partition": 0}, r"Priority\(partition=0\).*Write for instance Priority\(partition=1048576\)"),
        (Priority, {"partition": True}, r"Priority\(partition=True\)"),
        (Priority, {"credit": 2.5}, r"Priority\(credit=2.5\).*Write for instance Priority\(credit=2097152\)"),
        (Priority, {"partition": 100, "credit": 50}, r"partition=100, credit=50\).*Write credit=100 .* or credit=200"),
        (Priority, {"cross_barrier": 1}, r"Priority\(cross_barrier=1\).*Write Priority\(cross_barrier=True\)"),
        (Tic, {"cross_barrier": None}, r"Tic\(cross_barrier=None\)"),
        (Tac, {"cross_barrier": "yes"}, r"Tac\(cross_barrier='yes'\)"),
        (Caramel, {"cross_barrier": 0}, r"Caramel\(cross_barrier=0\)"),
    ],
)
def test_nonsense_is_refused_with_what_to_write(kind: type, bad: dict[str, Any], instead: str) -> None:
    with pytest.raises(ConfigurationError, match=instead):
        kind(**bad)


@settings(max_examples=60, deadline=None)
@given(
    profile=chain_profiles(),
    schedule=st.sampled_from(EVERY),
    known=st.sampled_from(["profile", "no profile", "a profile that lacks some"]),
    bias_kind=st.sampled_from(["", "uncompressed"]),
)
def test_every_plan_is_complete_deterministic_and_in_order(
    profile: StepProfile, schedule: Any, known: str, bias_kind: str
) -> None:
    gradients = gradients_of(profile, bias_kind=bias_kind)
    if known == "a profile that lacks some":
        profile = msgspec.structs.replace(profile, parameters=profile.parameters[1::2])
    used = None if known == "no profile" else profile
    plan = schedule.plan(gradients, used)
    plan.check(gradients)
    assert plan.schedule == repr(schedule) and plan == schedule.plan(list(gradients), used) and str(plan)
    assert plan.num_bytes == sum(gradient.num_bytes for gradient in gradients)
    assert schedule.needs_profile == (schedule in NEW) and ("no profile yet" in plan.reason) == (schedule in NEW and used is None)
    if schedule not in OLD:
        place = {gradient.name: number for number, gradient in enumerate(in_order_of_readiness(gradients, used))}
        last = [max(place[name] for name in transfer.parameters) for transfer in plan.transfers]
        assert last == sorted(last)
    priorities = sorted(transfer.priority for transfer in plan.transfers)
    assert priorities == (list(range(len(priorities))) if schedule in BY_URGENCY else [0] * len(priorities))
    assert (plan.credit_bytes is not None) == (schedule in BY_URGENCY)
    simulate(profile, plan, cross_barrier=schedule.cross_barrier)


@settings(max_examples=40, deadline=None)
@given(profile=chain_profiles(), schedule=st.sampled_from(BY_URGENCY), bias_kind=st.sampled_from(["", "uncompressed"]))
def test_priorities_are_in_the_order_of_first_use(profile: StepProfile, schedule: Any, bias_kind: str) -> None:
    user = {one.name: -1 if one.used_by is None else one.used_by for one in profile.parameters}
    plan = schedule.plan(gradients_of(profile, bias_kind=bias_kind), profile)
    by_priority = sorted(plan.transfers, key=lambda transfer: transfer.priority)
    first = [min(user[name] for name in transfer.parameters) for transfer in by_priority]
    assert first == sorted(first)


def buckets_by_hand(gradients: Sequence[Gradient], schedule: Any) -> list[tuple[str, ...]]:
    """The rule in other words: kind by kind, close a bucket when it has reached its limit; the first one that is closed, of any
    kind, has a limit of its own. In the order in which they are closed, then those that are left, by when they were begun."""
    first, each = {AfterBackward: (None, None), WaitFree: (0, 0)}.get(type(schedule), (None, None))
    if isinstance(schedule, Buckets):
        each = 25 << 20 if schedule.bytes is None else schedule.bytes
        first = min(1 << 20 if schedule.first_bytes is None else schedule.first_bytes, each)
    closed: list[list[Gradient]] = []
    left: list[list[Gradient]] = []
    for gradient in gradients[::-1]:
        mine = next((bucket for bucket in left if bucket[0].kind == gradient.kind), None)
        if mine is None:
            left.append(mine := [])
        mine.append(gradient)
        limit = each if closed else first
        if limit is not None and sum(member.num_bytes for member in mine) >= limit:
            closed.append(mine)
            left = [bucket for bucket in left if bucket is not mine]
    return [tuple(gradient.name for gradient in bucket) for bucket in (*closed, *left)]


@pytest.mark.parametrize("schedule", OLD, ids=repr)
def test_buckets_are_filled_in_reverse_order_of_registration_and_kind_by_kind(schedule: Any) -> None:
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        count = int(torch.randint(1, 40, (), generator=generator))
        sizes = torch.randint(0, 2_000_000, (count,), generator=generator).tolist()
        dtypes = [(torch.float32, torch.float16)[i] for i in torch.randint(0, 2, (count,), generator=generator).tolist()]
        named = [
            (f"p{i}", torch.empty(size, dtype=dtype, device="meta"))
            for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))
        ]
        gradients = [Gradient(name, p.numel() * p.element_size(), f"{p.dtype} {name[-1] == '7'}") for name, p in named]
        plan = schedule.plan(gradients, None)
        assert names(plan) == buckets_by_hand(gradients, schedule)
        assert plan.early == (not isinstance(schedule, AfterBackward))


def test_only_schedules_by_urgency_may_cross_the_barrier() -> None:
    assert {type(schedule) for schedule in EVERY if schedule.cross_barrier} == {Tic, Tac, Priority, Caramel}


def test_the_order_of_readiness_is_the_profile_s_with_unknown_parameters_last() -> None:
    profile = chain_profile([8, 8], [MS] * 2, [MS] * 2, cost=COST, biases=4)
    gradients = [Gradient("new", 1), *gradients_of(profile), Gradient("newer", 1)]
    expected = ["m1.bias", "m1.weight", "m0.bias", "m0.weight", "newer", "new"]
    assert [gradient.name for gradient in in_order_of_readiness(gradients, profile)] == expected
    assert [gradient.name for gradient in in_order_of_readiness(gradients, None)] == ["newer", *expected[:4], "new"]


def test_merged_is_never_later_than_wait_free_or_a_single_bucket() -> None:
    tiny = chain_profile([400] * 100, [0.2 * MS] * 100, [0.3 * MS] * 100, cost=COST)
    large = chain_profile([3_000_000] * 20, [5 * MS] * 20, [10 * MS] * 20, cost=COST, biases=4000)
    for profile in (tiny, large):
        gradients = gradients_of(profile)
        merged, *others = (
            simulate(profile, s.plan(gradients, profile), cross_barrier=False).iteration_s
            for s in (Merged(), WaitFree(), AfterBackward())
        )
        assert merged <= min(others) * (1 + MARGIN)
        assert 1 < len(Merged().plan(gradients, profile).transfers) < len(gradients)


def test_merged_joins_each_kind_of_an_interleaved_model() -> None:
    profile = chain_profile([4000] * 10, [MS] * 10, [0.01 * MS] * 10, cost=COST, biases=40)
    assert len(Merged().plan(gradients_of(profile), profile).transfers) == 1
    plan = Merged().plan(gradients_of(profile, bias_kind="uncompressed"), profile)
    assert [len(transfer.parameters) for transfer in plan.transfers] == [10, 10]


def test_parameters_of_one_module_travel_together_and_tiny_neighbours_too() -> None:
    # m0 and m1 are tiny and ready within a start-up, m2 is large, m3 tiny but ready long before m4.
    sizes, backward_s = [4000, 4000, 4_000_000, 4000, 4000], [0.1 * MS, 0.1 * MS, 50 * MS, 50 * MS, MS]
    profile = chain_profile(sizes, [MS] * 5, backward_s, cost=COST, biases=40)
    groups = [[g.name for g in group] for group in groups_by_first_use(gradients_of(profile), profile)]
    assert groups == [
        ["m0.weight", "m0.bias", "m1.weight", "m1.bias"],
        ["m2.weight", "m2.bias"],
        ["m3.weight", "m3.bias"],
        ["m4.weight", "m4.bias"],
    ]
    by_kind = groups_by_first_use(gradients_of(profile, bias_kind="uncompressed"), profile)
    assert [[g.name for g in group] for group in by_kind][:2] == [["m0.weight", "m1.weight"], ["m0.bias", "m1.bias", "m2.bias"]]


def test_one_module_that_reads_everything_does_not_make_one_transfer() -> None:
    profile = chain_profile([4_000_000] * 4, [MS] * 4, [20 * MS] * 4, cost=COST, unseen=frozenset(range(4)))
    assert len(groups_by_first_use(gradients_of(profile), profile)) == 4
    assert len(Priority().plan(gradients_of(profile), profile).transfers) > 1


def test_without_a_profile_modules_are_told_by_name_and_order_by_registration() -> None:
    profile = chain_profile([4_000_000] * 3, [MS] * 3, [MS] * 3, cost=COST, biases=40)
    for schedule in (Tic(), Priority()):
        plan = schedule.plan(gradients_of(profile), None)
        assert names(plan) == [("m2.bias", "m2.weight"), ("m1.bias", "m1.weight"), ("m0.bias", "m0.weight")]
        assert [transfer.priority for transfer in plan.transfers] == [2, 1, 0]


def test_without_a_profile_buckets_with_the_first_parameters_are_the_most_urgent() -> None:
    gradients = [Gradient(f"p{i}", 20 << 20) for i in range(5)]
    for schedule in (Tac(), Caramel()):
        plan = schedule.plan(gradients, None)
        assert names(plan) == names(Merged().plan(gradients, None)) == [("p4",), ("p3", "p2"), ("p1", "p0")]
        assert [transfer.priority for transfer in plan.transfers] == [2, 1, 0]


def test_the_part_of_priority_follows_the_network_unless_the_user_says() -> None:
    profile = chain_profile([12_500_000] * 4, [MS] * 4, [20 * MS] * 4, cost=COST)
    gradients = gradients_of(profile)

    def sizes(schedule: Priority, profile: StepProfile | None) -> tuple[int | None, int | None]:
        plan = schedule.plan(gradients, profile)
        return plan.transfers[0].part_bytes, plan.credit_bytes

    assert best_partition(gradients_of(profile), profile) == 203_776  # sqrt(S theta / 4 (P - 1) b) = 204,124, in whole KiB
    tried = [(203_776, 203_776), (4 * 203_776, 4 * 203_776), (None, 203_776)]
    assert sizes(Priority(), profile) in tried and sizes(Priority(), None) == (1 << 20, 1 << 20)
    assert sizes(Priority(partition=5000), profile) == (5000, 5000)
    assert sizes(Priority(credit=5000), None) == (5000, 5000) and sizes(Priority(credit=5000), profile)[1] == 5000
    free = msgspec.structs.replace(profile, cost=TransferCost(start_s=1.0, per_byte_s=0.0))
    assert best_partition(gradients_of(profile), free) == LARGEST_PARTITION
    assert best_partition([], profile) == LEAST_PARTITION
    assert credit_for([], None) == CREDIT_BYTES and credit_for(gradients_of(profile), profile) == 203_776


def test_the_best_plan_has_the_shortest_step_and_says_so() -> None:
    profile = chain_profile([400] * 100, [0.2 * MS] * 100, [0.3 * MS] * 100, cost=COST)
    gradients = gradients_of(profile)
    plans = [schedule.plan(gradients, profile) for schedule in (WaitFree(), Merged(), AfterBackward())]
    seconds = [simulate(profile, plan, cross_barrier=False).iteration_s for plan in plans]
    best = best_plan(plans, profile, cross_barrier=False)
    assert best.transfers == plans[seconds.index(min(seconds))].transfers
    for margin in (0.5 * (max(seconds) / min(seconds) - 1), max(seconds) / min(seconds)):
        first = next(plan for plan, taken in zip(plans, seconds, strict=True) if taken <= (1 + margin) * min(seconds))
        assert best_plan(plans, profile, cross_barrier=False, margin=margin).transfers == first.transfers
        assert best_plan(plans[::-1], profile, cross_barrier=False, margin=10.0).transfers == plans[-1].transfers
    assert len(set(seconds)) > 1 and best.reason.endswith(f"{1e3 * min(seconds):.1f} ms expected")


@pytest.mark.parametrize("rho", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("sizes", [[4_000_000] * 16, [4000] * 100, [60_000_000, *[400, 7_000_000, 2_000_000] * 8]])
def test_across_the_barrier_no_step_is_longer_than_with_it(sizes: list[int], rho: float) -> None:
    """Large layers, tiny layers, and an embedding before layers of all sizes; 150 ms of computation."""
    count = len(sizes)
    cost = TransferCost(start_s=0.5 * MS, per_byte_s=rho * 150 * MS / sum(sizes))
    profile = chain_profile(sizes, [50 * MS / count] * count, [100 * MS / count] * count, cost=cost, update_s=3 * MS)
    gradients = gradients_of(profile)
    step_s = {
        type(schedule): simulate(profile, schedule.plan(gradients, profile), cross_barrier=schedule.cross_barrier).iteration_s
        for schedule in (AfterBackward(), WaitFree(), Buckets(), Merged(), Priority(), Caramel())
    }
    with_barrier = min(step_s[kind] for kind in (AfterBackward, WaitFree, Buckets, Merged))
    assert step_s[Merged] <= with_barrier * (1 + MARGIN)
    assert step_s[Priority] <= with_barrier * (1 + 1e-9) and step_s[Caramel] <= 1.05 * with_barrier


def test_priority_cuts_into_parts_and_tic_and_tac_do_not() -> None:
    profile = chain_profile([4_000_000] * 3, [MS] * 3, [20 * MS] * 3, cost=COST)
    gradients = gradients_of(profile)
    plan = Priority(partition=1000, credit=5000).plan(gradients, profile)
    assert plan.credit_bytes == 5000 and {transfer.part_bytes for transfer in plan.transfers} == {1000}
    tic, tac = (schedule.plan(gradients, profile) for schedule in (Tic(), Tac()))
    assert tic.transfers == tac.transfers and {transfer.part_bytes for transfer in tic.transfers} == {None}


@settings(max_examples=60, deadline=None)
@given(profile=chain_profiles(), cross_barrier=st.booleans())
def test_every_transfer_of_caramel_lies_inside_its_window(profile: StepProfile, cross_barrier: bool) -> None:
    gradients = gradients_of(profile)
    windows = windows_of(gradients, profile, cross_barrier=cross_barrier)
    plan = Caramel(cross_barrier=cross_barrier).plan(gradients, profile)
    small = bytes_at_share(profile.cost.start_s, min(START_UP_SHARES), profile.cost)
    size = {gradient.name: gradient.num_bytes for gradient in gradients}
    for transfer in plan.transfers:
        begin, end = max(windows[n].begin_s for n in transfer.parameters), min(windows[n].end_s for n in transfer.parameters)
        assert begin <= end
        if len(transfer.parameters) > 1:
            assert all(size[name] < small for name in transfer.parameters) and transfer.num_bytes < 2 * small
    step = simulate(profile, plan, cross_barrier=cross_barrier, steps=1)
    link = [span for span in step.timeline if span.resource == "link"]
    for span in link:  # and in the step that comes of it, between the gradient and the module that reads it
        assert span.transfer is not None
        for name in plan.transfers[span.transfer].parameters:
            user = next(one.used_by for one in profile.parameters if one.name == name) or 0
            reads = next(s.begin_s for s in step.timeline if s.what == f"forward m{user}")
            assert windows[name].begin_s <= span.begin_s and span.end_s <= reads


def test_windows_by_hand_and_wider_across_the_barrier() -> None:
    profile = chain_profile([1, 1, 1], [1, 2, 3], [4, 5, 6], cost=COST, unseen=frozenset({2}))
    gradients = gradients_of(profile)
    wide = windows_of(gradients, profile, cross_barrier=True)
    assert list(wide.values()) == [TransferWindow(15, 15), TransferWindow(11, 16), TransferWindow(6, 15)]
    narrow = windows_of(gradients, profile, cross_barrier=False)
    assert list(narrow.values()) == [TransferWindow(15, 15), TransferWindow(11, 15), TransferWindow(6, 15)]


def test_windows_that_do_not_overlap_are_not_batched() -> None:
    gradients = [Gradient("a", 10), Gradient("b", 10), Gradient("c", 10)]
    windows = {"a": TransferWindow(0, 1), "b": TransferWindow(2, 9), "c": TransferWindow(3, 9)}
    for fitting in (True, False):
        assert batch_small(gradients, windows, COST, 900_000, fitting=fitting) == [gradients[:1], gradients[1:]]


def test_a_batch_that_would_miss_its_window_is_not_made_larger_unless_it_is_mostly_start_up() -> None:
    for size, length_s, fitting, batches in [
        (400_000, 10 * MS, True, 1),  # together 9 ms
        (400_000, 8 * MS, True, 2),
        (400_000, 8 * MS, False, 1),
        (40_000, 0.0, True, 1),
    ]:
        gradients = [Gradient("a", size), Gradient("b", size)]
        windows = {"a": TransferWindow(0, 1), "b": TransferWindow(0.5, 0.5 + length_s)}
        assert len(batch_small(gradients, windows, COST, 900_000, fitting=fitting)) == batches


def test_large_transfers_go_in_parts_and_small_ones_whole() -> None:
    assert bytes_at_share(COST.start_s, 0.1, COST) == pytest.approx(900_000)
    assert COST.start_s / COST.seconds(900_000) == pytest.approx(0.1)
    assert depth_of(900_000, COST) == 1 and part_bytes_of(900_000, COST) is None
    depths = [depth_of(size, COST) for size in (10**5, 10**6, 10**7, 10**8, 10**9)]
    assert depths == [1, 2, 20, MAX_DEPTH, MAX_DEPTH]
    for size in (10**6, 10**7):
        depth, part = depth_of(size, COST), part_bytes_of(size, COST)
        assert part is not None and part % 64 == 0 and -(-size // part) == depth
        assert all(pipelined_seconds(size, depth, COST) <= pipelined_seconds(size, other, COST) for other in range(1, depth + 1))
    free = TransferCost(start_s=0.0, per_byte_s=0.0)
    assert depth_of(10**8, free) == 1 and bytes_at_share(1.0, 0.1, free) == float("inf")
