"""Plans of pipelines, on paper: complete, never stuck, as fast and as frugal as their papers say."""

from __future__ import annotations

import pytest

from stretto import ConfigurationError, GPipe, Interleaved, OneForwardOneBackward, PipelineSchedule, ZeroBubble
from stretto.partition.actions import PipelinePlan, StageAction, Work
from stretto.partition.walk import check, peak_of, walk, wrong_counts

SCHEDULES: tuple[PipelineSchedule, ...] = (
    GPipe(), OneForwardOneBackward(), OneForwardOneBackward(eager=1), ZeroBubble(),
    Interleaved(2), Interleaved(3), Interleaved(4),
)  # fmt: skip
STAGES, MICROBATCHES = range(1, 9), range(1, 25)
UNITS = {Work.FORWARD: 1.0, Work.BACKWARD: 2.0, Work.INPUTS: 1.0, Work.WEIGHTS: 1.0}


def seconds(stage: int, action: StageAction) -> float:
    return UNITS[action.work]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_every_plan_is_complete_and_ends(schedule: PipelineSchedule) -> None:
    for stages in STAGES:
        for microbatches in MICROBATCHES:
            check(schedule.plan(stages, microbatches), stages, microbatches, schedule.chunks, repr(schedule))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_the_bubble_is_that_of_the_paper(schedule: PipelineSchedule) -> None:
    for stages in STAGES:
        for microbatches in MICROBATCHES:
            bubble = walk(schedule.plan(stages, microbatches), seconds).bubble
            if isinstance(schedule, ZeroBubble):  # K-1 units of time and at most two more, where 1F1B loses 3 (K-1)
                idle = bubble / (1 - bubble) * 3 * microbatches
                assert stages > microbatches or idle <= stages + 1 + 1e-9
                assert bubble <= walk(OneForwardOneBackward().plan(stages, microbatches), seconds).bubble + 1e-9
            elif microbatches >= stages:
                assert bubble == pytest.approx((stages - 1) / (schedule.chunks * microbatches + stages - 1))


def test_activations_held_are_as_few_as_promised() -> None:
    for stages in STAGES:
        for microbatches in MICROBATCHES:
            held = {
                type(schedule): [peak_of(order) for order in schedule.plan(stages, microbatches).orders]
                for schedule in (GPipe(), OneForwardOneBackward(), ZeroBubble())
            }
            assert held[GPipe] == [microbatches] * stages
            assert held[OneForwardOneBackward] == [min(microbatches, stages - stage) for stage in range(stages)]
            for eager in (1, 2):
                orders = OneForwardOneBackward(eager).plan(stages, microbatches).orders
                most = [min(microbatches, 1 + (1 + eager) * (stages - stage - 1)) for stage in range(stages)]
                assert [peak_of(order) for order in orders] == most
            assert max(held[ZeroBubble]) <= min(microbatches, stages + 1)


def test_a_latency_costs_gpipe_and_1f1b_little() -> None:
    """Each message delays what waits for it, and nothing else: K-1 hops forward and back, and for 1F1B in every round."""
    plan = GPipe().plan(4, 16)
    assert walk(plan, seconds, latency_s=0.1).seconds == pytest.approx(walk(plan, seconds).seconds + 6 * 0.1)


@pytest.mark.parametrize("latency_s", [0.1, 0.5, 1.0, 1.4])
def test_eager_forwards_hide_the_way_of_letters(latency_s: float) -> None:
    """As long as there and back take less than a forward and a backward, here 3, only the first letters and the last are waited
    for: K-1 hops each way, as with GPipe. Without them each round waits."""
    for stages, microbatches in ((2, 8), (3, 16), (4, 32)):
        plan, eager = (OneForwardOneBackward(number).plan(stages, microbatches) for number in (0, 1))
        least = walk(plan, seconds).seconds + 2 * (stages - 1) * latency_s
        assert walk(eager, seconds, latency_s).seconds == pytest.approx(least)
        assert walk(plan, seconds, latency_s).seconds > least + 0.99 * (microbatches - stages) * latency_s


def test_letters_that_take_longer_ask_for_more_eager_forwards() -> None:
    taken = [walk(OneForwardOneBackward(eager).plan(3, 24), seconds, latency_s=2.5).seconds for eager in (0, 1, 2)]
    assert taken[0] > 1.3 * taken[1] and taken[1] > 1.2 * taken[2]


@pytest.mark.parametrize("eager", [-1, True, 0.5, "1"])
def test_eager_is_a_number_of_forwards(eager: object) -> None:
    with pytest.raises(ConfigurationError, match=r"how many forwards more than it must.*\n"):
        OneForwardOneBackward(eager)  # type: ignore[arg-type]


def test_a_plan_that_never_ends_is_refused() -> None:
    late = (StageAction(Work.BACKWARD, 0), StageAction(Work.FORWARD, 0))
    with pytest.raises(ConfigurationError, match=r"never ends: stage 0 waits for what B0 needs"):
        check(PipelinePlan(1, 1, (late, late)), 2, 1, 1, "mine")


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([StageAction(Work.FORWARD, 0)], "1 forwards and 0 whole, 0 and 0 halves"),
        ([StageAction(Work.FORWARD, 0), StageAction(Work.BACKWARD, 0), StageAction(Work.INPUTS, 0)], "1 whole, 1 and 0 halves"),
        (
            [StageAction(Work.FORWARD, 0), StageAction(Work.BACKWARD, 0), StageAction(Work.FORWARD, 1)],
            "F1, of which there is nothing",
        ),
    ],
)
def test_what_is_missing_or_twice_is_named(order: list[StageAction], words: str) -> None:
    assert words in wrong_counts(tuple(order), 1, 1)


def test_a_plan_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="asked for a plan of 2 stages, 4 micro-batches"):
        check(GPipe().plan(2, 3), 2, 4, 1, "mine")


def test_plans_can_be_read() -> None:
    assert str(OneForwardOneBackward().plan(2, 2)) == "stage 0: F0 F1 B0 B1\nstage 1: F0 B0 F1 B1"
    assert "F0.1" in str(Interleaved(2).plan(2, 2))


@pytest.mark.parametrize("chunks", [1, 0, True, "2"])
def test_interleaved_needs_two_parts(chunks: object) -> None:
    with pytest.raises(ConfigurationError, match="how many parts of the model each stage holds"):
        Interleaved(chunks)  # type: ignore[arg-type]
