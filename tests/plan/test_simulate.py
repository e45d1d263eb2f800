"""The simulator of a step: cases computed by hand, and what holds for every profile and plan."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from step_profiles import chain_profile, chain_profiles, gradients_of
from stretto.errors import ConfigurationError
from stretto.plan.profile import StepProfile, TransferCost
from stretto.plan.simulate import MOST_MESSAGES, PART_SHARE, Simulated, simulate, transfer_ready_s
from stretto.plan.transfers import Transfer, TransferPlan
from stretto.schedule.caramel import Caramel
from stretto.schedule.merged import Merged
from stretto.schedule.orders import AfterBackward, Buckets, WaitFree
from stretto.schedule.priority import Priority
from stretto.schedule.tictac import Tac, Tic

SCHEDULES: list[Any] = [
    AfterBackward(),
    WaitFree(),
    Buckets(bytes=3_000_000, first_bytes=100_000),
    Merged(),
    Tic(),
    Tac(),
    Priority(partition=1_000_000, credit=1_000_000),
    Caramel(),
]
COST = TransferCost(start_s=1.0, per_byte_s=0.1)

# Three modules: forward 1, 2, 3; backward 3, 2, 1 of modules 2, 1, 0; gradients of 10, 20 and 30 bytes ready at 6, 5 and 3.
THREE = chain_profile([10, 20, 30], [1, 2, 3], [1, 2, 3], cost=COST, update_s=6.0)


def one_each(order: tuple[int, ...], *, credit: int | None, part_bytes: int | None = None, early: bool = True) -> TransferPlan:
    """The three modules' weights by themselves, with priorities as in forward."""
    transfers = [Transfer(parameters=(f"m{i}.weight",), num_bytes=10 * (i + 1), priority=i, part_bytes=part_bytes) for i in order]
    return TransferPlan(schedule="by hand", transfers=tuple(transfers), credit_bytes=credit, early=early)


def spans(simulated: Simulated, resource: str) -> list[tuple[str, float, float]]:
    return [(span.what, span.begin_s, span.end_s) for span in simulated.timeline if span.resource == resource]


def test_first_come_first_served_with_the_barrier_by_hand() -> None:
    step = simulate(THREE, one_each((2, 1, 0), credit=None), hops=1, cross_barrier=False, steps=1)
    assert spans(step, "link") == [("transfer 0", 3.0, 7.0), ("transfer 1", 7.0, 10.0), ("transfer 2", 10.0, 12.0)]
    assert [begin for _, begin, _ in spans(step, "compute")] == [0.0, 12.0, 18.0, 19.0, 21.0]
    assert (step.iteration_s, step.communication_s, step.computation_s) == (24.0, 9.0, 18.0)
    assert (step.alpha, step.rho, step.utilisation, step.efficiency) == (3 / 9, 0.5, 0.75, 3 / 9)


def test_across_the_barrier_each_module_waits_for_its_own_by_hand() -> None:
    step = simulate(THREE, one_each((2, 1, 0), credit=1), hops=1, cross_barrier=True, steps=1)
    # At 7 both others are ready, and the first module's goes first.
    assert spans(step, "link") == [("transfer 0", 3.0, 7.0), ("transfer 2", 7.0, 9.0), ("transfer 1", 9.0, 12.0)]
    assert spans(step, "compute") == [
        ("backward", 0.0, 6.0),
        ("update m0", 9.0, 10.0),
        ("forward m0", 10.0, 11.0),
        ("update m1", 12.0, 14.0),
        ("forward m1", 14.0, 16.0),
        ("update m2", 16.0, 19.0),
        ("forward m2", 19.0, 22.0),
    ]
    assert step.iteration_s == 22.0 and step.alpha == pytest.approx(5 / 9)


def test_parts_let_the_urgent_one_in_between_by_hand() -> None:
    plan = one_each((2, 1, 0), credit=1, part_bytes=10)
    step = simulate(THREE, plan, hops=1, cross_barrier=True, steps=1, part_start_s=0.5)
    assert spans(step, "link") == [
        ("transfer 0, part 1 of 3", 3.0, 5.0),
        ("transfer 1, part 1 of 2", 5.0, 7.0),
        ("transfer 2", 7.0, 9.0),
        ("transfer 1, part 2 of 2", 9.0, 10.5),
        ("transfer 0, part 2 of 3", 10.5, 12.0),
        ("transfer 0, part 3 of 3", 12.0, 13.5),
    ]
    default = simulate(THREE, plan, hops=1, cross_barrier=True, steps=1)
    assert step.communication_s == 10.5 and default.communication_s == pytest.approx(9.0 + 3 * 0.1)


def test_what_the_credit_has_let_out_is_not_overtaken() -> None:
    plan = one_each((2, 1, 0), credit=30, part_bytes=10)
    step = simulate(THREE, plan, hops=1, cross_barrier=True, steps=1, part_start_s=0.5)
    order = [what.split(",")[0] for what, _, _ in spans(step, "link")]
    # Three parts of the first to be ready are out at 3; at 5 one of module 1 may follow, at 6.5 what is most urgent.
    assert order == ["transfer 0"] * 3 + ["transfer 1", "transfer 2", "transfer 1"]


def test_a_plan_that_is_not_early_waits_for_backward() -> None:
    step = simulate(THREE, one_each((2, 1, 0), credit=None, early=False), hops=1, cross_barrier=False)
    assert spans(step, "link")[0][1] == 6.0 and step.iteration_s == 6 + 9 + 6 + 6 and step.alpha == 0


def test_a_codec_sends_less_and_takes_time_to_encode() -> None:
    plan = one_each((2, 1, 0), credit=None)
    assert simulate(THREE, plan, hops=1, cross_barrier=False, wire_ratio=0.5).communication_s == pytest.approx(3 + 3)
    assert simulate(THREE, plan, hops=1, cross_barrier=False, encode_s_per_byte=1.0).communication_s == pytest.approx(9 + 60)
    fast = TransferCost(start_s=0.0, per_byte_s=0.01)
    assert simulate(THREE, plan, hops=1, cross_barrier=False, cost=fast).communication_s == pytest.approx(0.6)


def test_steps_follow_each_other_on_the_timeline() -> None:
    plan = one_each((2, 1, 0), credit=1)
    once, thrice = (simulate(THREE, plan, hops=1, cross_barrier=True, steps=steps) for steps in (1, 3))
    assert len(thrice.timeline) == 3 * len(once.timeline)
    assert thrice.timeline[-1].end_s == pytest.approx(3 * once.iteration_s) and thrice.iteration_s == once.iteration_s


def test_what_the_profile_gives_to_no_module_is_shared_out() -> None:
    longer = msgspec.structs.replace(THREE, forward_s=12.0)
    step = simulate(longer, one_each((2, 1, 0), credit=None), cross_barrier=False)
    assert [end - begin for what, begin, end in spans(step, "compute") if what.startswith("forward")][:3] == [2, 4, 6]


def test_a_model_without_modules_or_transfers_has_a_step_too() -> None:
    bare = msgspec.structs.replace(THREE, modules=(), parameters=())
    step = simulate(bare, TransferPlan(schedule="", transfers=()), cross_barrier=True)
    assert step.iteration_s == step.computation_s == 18 and step.alpha == step.efficiency == 1 and step.rho == 0
    nothing = msgspec.structs.replace(bare, forward_s=0.0, backward_s=0.0, update_s=0.0)
    step = simulate(nothing, TransferPlan(schedule="", transfers=()), cross_barrier=True)
    assert (step.iteration_s, step.utilisation, step.rho) == (0, 1, 0)


NONSENSE: list[dict[str, Any]] = [
    {"wire_ratio": -1.0}, {"encode_s_per_byte": float("nan")}, {"steps": 0}, {"steps": True}, {"hops": 0}, {"hops": 1.5},
]  # fmt: skip


@pytest.mark.parametrize("bad", NONSENSE)
def test_nonsense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=rf"simulate\({next(iter(bad))}="):
        simulate(THREE, one_each((0, 1, 2), credit=None), cross_barrier=True, **bad)  # type: ignore[arg-type]


def planned(profile: StepProfile, number: int) -> TransferPlan:
    plan: TransferPlan = SCHEDULES[number].plan(gradients_of(profile), profile)
    return plan


NUMBERS = st.sampled_from(range(len(SCHEDULES)))


@settings(max_examples=80, deadline=None)
@given(profile=chain_profiles(), number=NUMBERS, cross_barrier=st.booleans(), ratio=st.sampled_from([0.01, 1.0]))
def test_bounds_hold_for_every_schedule(profile: StepProfile, number: int, cross_barrier: bool, ratio: float) -> None:
    plan = planned(profile, number)
    step = simulate(profile, plan, cross_barrier=cross_barrier, wire_ratio=ratio, hops=1, steps=1)
    slack = 1e-9 * (step.communication_s + step.computation_s)
    assert max(step.communication_s, step.computation_s) <= step.iteration_s + slack
    assert step.iteration_s <= step.communication_s + step.computation_s + slack
    assert -1e-6 <= step.alpha <= 1 + 1e-6 and step.efficiency == pytest.approx(step.alpha, abs=1e-6)
    assert step.utilisation <= 1 + 1e-9
    with_barrier = simulate(profile, plan, cross_barrier=False, wire_ratio=ratio, hops=1, steps=1)
    assert step.iteration_s <= with_barrier.iteration_s + slack


@settings(max_examples=80, deadline=None)
@given(profile=chain_profiles(), number=NUMBERS, cross_barrier=st.booleans())
def test_dependencies_hold_and_bytes_are_conserved(profile: StepProfile, number: int, cross_barrier: bool) -> None:
    plan = planned(profile, number)
    step = simulate(profile, plan, cross_barrier=cross_barrier, steps=1)  # with the hops of a ring
    link = [span for span in step.timeline if span.resource == "link"]
    compute = [span for span in step.timeline if span.resource == "compute"]
    for one_resource in (link, compute):  # one thing at a time
        assert all(a.end_s <= b.begin_s for a, b in zip(one_resource, one_resource[1:], strict=False))
    ready = transfer_ready_s(profile, plan)
    sent = [0] * len(plan.transfers)
    for span in link:
        assert span.transfer is not None and span.begin_s >= ready[span.transfer]
        sent[span.transfer] += span.num_bytes
    assert sent == [transfer.num_bytes for transfer in plan.transfers]
    arrived = {name: max(s.end_s for s in link if s.transfer == i) for i, t in enumerate(plan.transfers) for name in t.parameters}
    begun: dict[str, float] = {}
    for span in compute:
        begun.setdefault(span.what.split(" ")[-1], span.begin_s)
    for parameter in profile.parameters:
        user = 0 if parameter.used_by is None else parameter.used_by
        assert arrived[parameter.name] <= begun[f"m{user}"]


@settings(max_examples=50, deadline=None)
@given(profile=chain_profiles(), partition=st.sampled_from([100_000, 3_000_000]))
def test_at_each_decision_the_most_urgent_ready_part_goes_first(profile: StepProfile, partition: int) -> None:
    plan = msgspec.structs.replace(Priority(partition, partition).plan(gradients_of(profile), profile), credit_bytes=1)
    link = [span for span in simulate(profile, plan, cross_barrier=True, hops=1, steps=1).timeline if span.resource == "link"]
    link.sort(key=lambda span: span.begin_s)
    ready = transfer_ready_s(profile, plan)
    for place, span in enumerate(link):
        if span.num_bytes == 0:
            continue  # takes no credit: it may have been let out before
        assert span.transfer is not None
        for later in link[place + 1 :]:
            assert later.transfer is not None
            if ready[later.transfer] < span.begin_s - 1e-12 and later.num_bytes > 0:
                assert plan.transfers[later.transfer].priority >= plan.transfers[span.transfer].priority


@settings(max_examples=50, deadline=None)
@given(profile=chain_profiles(), number=NUMBERS)
def test_with_the_barrier_priority_gains_nothing(profile: StepProfile, number: int) -> None:
    plan = planned(profile, number)
    by_priority = msgspec.structs.replace(plan, credit_bytes=1)
    in_order = msgspec.structs.replace(plan, credit_bytes=None)
    first, second = (simulate(profile, one, cross_barrier=False, hops=1, steps=1) for one in (by_priority, in_order))
    assert first.iteration_s == pytest.approx(second.iteration_s, rel=1e-9)


@settings(max_examples=80, deadline=None)
@given(profile=chain_profiles(), number=NUMBERS, hops=st.sampled_from([2, 4, 6]))
def test_hops_leave_the_link_free_and_cost_no_more_than_transfers_one_by_one(
    profile: StepProfile, number: int, hops: int
) -> None:
    plan = planned(profile, number)
    crossing, with_barrier = (
        simulate(profile, plan, cross_barrier=crosses, hops=hops, steps=1, part_start_s=0.0) for crosses in (True, False)
    )
    parts = sum(len(range(0, max(one.num_bytes, 1), one.part_bytes or max(one.num_bytes, 1))) for one in plan.transfers)
    one_by_one = parts * profile.cost.start_s + sum(one.num_bytes for one in plan.transfers) * profile.cost.per_byte_s
    slack = 1e-9 * (one_by_one + crossing.computation_s)
    assert max(crossing.communication_s, crossing.computation_s) <= crossing.iteration_s + slack
    assert crossing.iteration_s <= with_barrier.iteration_s + slack
    assert with_barrier.iteration_s <= one_by_one + with_barrier.computation_s + slack


@pytest.mark.parametrize("hops", [1, 2, 6])
def test_a_transfer_that_has_the_network_to_itself_takes_what_was_measured(hops: int) -> None:
    plan = TransferPlan(schedule="", transfers=(Transfer(parameters=("m2.weight",), num_bytes=30),))
    step = simulate(THREE, plan, cross_barrier=False, hops=hops, steps=1)
    update = next(span for span in step.timeline if span.what == "update")
    assert update.begin_s == pytest.approx(3.0 + 1.0 + 0.1 * 30)  # ready at 3


def test_while_a_hop_is_on_its_way_another_transfer_has_the_link_by_hand() -> None:
    both = tuple(Transfer(parameters=(f"m{i}.weight",), num_bytes=20, priority=i) for i in (0, 1))
    plan = TransferPlan(schedule="", transfers=both, early=False, credit_bytes=1)
    step = simulate(THREE, plan, cross_barrier=True, hops=2, part_start_s=0.0, steps=1)
    # Two messages of 1 s each, received 0.5 s later. The more urgent one's second is ready at 7.5, when the other has the link.
    assert spans(step, "link") == [
        ("transfer 0", 6.0, 7.0), ("transfer 1", 7.0, 8.0), ("transfer 0", 8.0, 9.0), ("transfer 1", 9.0, 10.0),
    ]  # fmt: skip
    assert spans(step, "compute")[1][:2] == ("update m0", 9.5)


def test_an_urgent_transfer_overtakes_between_hops_what_was_not_handed_over_yet() -> None:
    """Two modules of 4 MB; the second one's gradient is ready first. The credit and what is buffered hold one message of 1 MB."""
    cost = TransferCost(start_s=0.0, per_byte_s=1e-9)
    profile = chain_profile([4_000_000] * 2, [1e-3] * 2, [1e-3, 1e-3], cost=cost)
    transfers = tuple(Transfer(parameters=(f"m{i}.weight",), num_bytes=4_000_000, priority=i) for i in (1, 0))

    def order(credit: int | None) -> list[int | None]:
        plan = TransferPlan(schedule="", transfers=transfers, credit_bytes=credit)
        step = simulate(profile, plan, cross_barrier=True, hops=6, steps=1)
        return [span.transfer for span in step.timeline if span.resource == "link"]

    # The first hops of the other one take 4 ms / 6 each: at 2 ms, when the urgent one comes, two have passed and a third is out.
    assert order(1) == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]
    assert order(None) == order(1 << 30) != order(1)


def test_of_a_plan_with_very_many_parts_several_are_taken_for_one() -> None:
    cost = TransferCost(start_s=1e-3, per_byte_s=1e-9)
    profile = chain_profile([400_000_000] * 8, [0.1] * 8, [0.2] * 8, cost=cost)
    coarse, fine = (
        simulate(profile, Priority(size, size).plan(gradients_of(profile), profile), cross_barrier=True, steps=1)
        for size in (1_000_000, 100_000)
    )
    assert MOST_MESSAGES / 3 < len(fine.timeline) < 2 * MOST_MESSAGES
    parts = 8 * 400_000_000 / 100_000
    assert fine.communication_s == pytest.approx(parts * PART_SHARE * 1e-3 + 3.2, rel=1e-3)
    assert fine.communication_s > coarse.communication_s


def equal_layers(rho: float) -> StepProfile:
    """An MLP of 16 equal layers of 4 MB, 100 ms of computation, and a network that takes rho times as long."""
    cost = TransferCost(start_s=1e-4, per_byte_s=rho * 0.1 / 64e6)
    return chain_profile([4_000_000] * 16, [0.033 / 16] * 16, [0.066 / 16] * 16, cost=cost, update_s=0.001)


def test_across_the_barrier_priority_gains_at_rho_1() -> None:
    profile = equal_layers(1.0)
    gradients = gradients_of(profile)
    fifo = simulate(profile, WaitFree().plan(gradients, profile), cross_barrier=False)
    priority, caramel = (simulate(profile, s.plan(gradients, profile), cross_barrier=True) for s in (Priority(), Caramel()))
    assert priority.alpha > 0.85 and caramel.alpha > 0.85
    assert fifo.iteration_s > 1.2 * priority.iteration_s and fifo.iteration_s > 1.2 * caramel.iteration_s
