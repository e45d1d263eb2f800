"""Walks through a plan as its stages would: who computes what from when to when, if anybody is stuck, and what is held meanwhile.

    walked = walk(plan, seconds=lambda stage, action: 1.0)
    walked.bubble              the share of time in which stages wait
    walked.peaks               by stage: the most micro-batches whose activations it holds at once

The model: a stage computes one action at a time, in its plan's order, each as soon as it is free and what the action needs has
come; what an action has made is at the next stage `latency_s` later, and sending keeps no stage from computing. That is what
`running.py` does, but for what the processors and links of a real machine share.

`check` proves a plan, for those who write a schedule of their own too: each forward and backward once, nobody stuck.
Cost: O(actions).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from stretto.errors import ConfigurationError
from stretto.partition.actions import PipelinePlan, StageAction, Work, needs

Seconds = Callable[[int, StageAction], float]  # (stage, action) -> how long it takes


class StageSpan(NamedTuple):
    """An action of a stage, and when it was computed."""

    stage: int
    action: StageAction
    begin_s: float
    end_s: float


class Walked(NamedTuple):
    """What became of a plan."""

    spans: tuple[StageSpan, ...]  # in the order of their ends within each stage
    peaks: tuple[int, ...]  # by stage
    stuck: tuple[str, ...]  # what stages wait for that never comes; empty if all have ended

    @property
    def seconds(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they compute nothing."""
        busy = sum(span.end_s - span.begin_s for span in self.spans)
        return 1.0 - busy / (self.seconds * len(self.peaks)) if self.seconds else 0.0


def walk(plan: PipelinePlan, seconds: Seconds = lambda stage, action: 1.0, latency_s: float = 0.0) -> Walked:
    """Carry the plan out on paper."""
    ended: dict[tuple[int, StageAction], float] = {}
    free_at = [0.0] * plan.stages
    next_up = [0] * plan.stages
    spans: list[StageSpan] = []
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(plan.orders):
            while next_up[stage] < len(order):
                action = order[next_up[stage]]
                before = needs(action, stage, plan)
                if not all(need in ended for need in before):
                    break
                comes = [ended[need] + (latency_s if need[0] != stage else 0.0) for need in before]
                begin = max([free_at[stage], *comes])
                free_at[stage] = ended[stage, action] = begin + seconds(stage, action)
                spans.append(StageSpan(stage, action, begin, free_at[stage]))
                next_up[stage] += 1
                moved = True
    stuck = tuple(
        f"stage {stage} waits for what {order[next_up[stage]]} needs"
        for stage, order in enumerate(plan.orders)
        if next_up[stage] < len(order)
    )
    return Walked(tuple(spans), tuple(peak_of(order) for order in plan.orders), stuck)


def peak_of(order: tuple[StageAction, ...]) -> int:
    """The most micro-batches, counted in each part, whose activations a stage holds at once: from their forward until the last of
    their backward has ended."""
    held = peak = 0
    for action in order:
        if action.work is Work.FORWARD:
            held += 1
            peak = max(peak, held)
        elif action.work is not Work.INPUTS:
            held -= 1
    return peak


def check(plan: PipelinePlan, stages: int, microbatches: int, chunks: int, name: str) -> None:
    """Refuse a plan that is not one for so many stages and micro-batches, or that cannot be carried out."""
    if (plan.stages, plan.microbatches, plan.chunks) != (stages, microbatches, chunks):
        raise ConfigurationError(
            f"schedule={name} was asked for a plan of {stages} stages, {microbatches} micro-batches and {chunks} parts a stage, "
            f"and gave one of {plan.stages}, {plan.microbatches} and {plan.chunks}.\nGive the plan that was asked for."
        )
    for stage, order in enumerate(plan.orders):
        if wrong := wrong_counts(order, microbatches, chunks):
            raise ConfigurationError(
                f"schedule={name}: stage {stage} of its plan for {stages} stages and {microbatches} micro-batches {wrong}.\n"
                f"Give every micro-batch in every part one F and one B, or one b and one W instead of the B."
            )
    if stuck := walk(plan).stuck:
        raise ConfigurationError(
            f"schedule={name}: its plan for {stages} stages and {microbatches} micro-batches never ends: {'; '.join(stuck)}.\n"
            f"Order the actions so that everything an action needs comes before it."
        )


def wrong_counts(order: tuple[StageAction, ...], microbatches: int, chunks: int) -> str:
    """What a stage computes too often or never, in words; empty if nothing."""
    count = Counter(order)
    for microbatch in range(microbatches):
        for chunk in range(chunks):
            forward, whole, inputs, weights = (count.pop(StageAction(work, microbatch, chunk), 0) for work in Work)
            if forward != 1 or (whole, inputs, weights) not in ((1, 0, 0), (0, 1, 1)):
                where = f"micro-batch {microbatch}, part {chunk}"
                return f"has {forward} forwards and {whole} whole, {inputs} and {weights} halves of backwards of {where}"
    return f"has {next(iter(count))}, of which there is nothing" if count else ""
