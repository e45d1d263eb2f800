"""The order of work in a zero-bubble pipeline, found by carrying it out on paper with a rule for whoever is free.

All of forward, inputs' half and parameters' half of a backward take one unit of time. Whoever is free takes, of what can begin,

    b    the inputs' half of a backward, which the stage before waits for, or else
    F    a forward, unless it holds the activations of K+1 micro-batches whose backward has not ended, or else
    W    the parameters' half of the oldest backward that lacks it.

ZB-H1 allows every stage about as many micro-batches as 1F1B allows the first, so that no stage needs much more memory than the
one that needs most: K+1 here, for with K this rule loses two units of time in every step. What comes out is an order for each
stage, which is then kept whatever the times are. With equal ones the step takes 3 M + K-1 units, or up to two more (K = 7),
where 1F1B takes 3 (M + K-1): the bubble of the paper's handcrafted plan, (K-1) (f + b - w).

Reference: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 3 and appendix (their search has more rules).
"""

from __future__ import annotations

from collections import deque

from stretto.partition.actions import Order, StageAction, Work


class _Stage:
    """What one stage has done, at the time of the walk."""

    def __init__(self) -> None:
        self.order: list[StageAction] = []
        self.forwards = self.inputs = 0  # how many have begun
        self.without_weights: deque[int] = deque()

    @property
    def held(self) -> int:
        return self.forwards - self.inputs + len(self.without_weights)


def greedy_orders(stages: int, microbatches: int) -> tuple[Order, ...]:
    """By stage."""
    all_stages = [_Stage() for _ in range(stages)]
    length = 3 * microbatches
    while any(len(each.order) < length for each in all_stages):
        before = [(each.forwards, each.inputs) for each in all_stages]  # what had ended when this unit of time began
        for number, stage in enumerate(all_stages):
            _take(stage, before[number - 1][0] if number else microbatches, before, number, microbatches)
    return tuple(tuple(each.order) for each in all_stages)


def _take(stage: _Stage, arrived: int, ended: list[tuple[int, int]], number: int, microbatches: int) -> None:
    is_last = number == len(ended) - 1
    returned = ended[number][0] if is_last else min(ended[number + 1][1], ended[number][0])
    if stage.inputs < returned:
        stage.order.append(StageAction(Work.INPUTS, stage.inputs))
        stage.without_weights.append(stage.inputs)
        stage.inputs += 1
    elif stage.forwards < arrived and stage.held < min(microbatches, len(ended) + 1):
        stage.order.append(StageAction(Work.FORWARD, stage.forwards))
        stage.forwards += 1
    elif stage.without_weights:
        stage.order.append(StageAction(Work.WEIGHTS, stage.without_weights.popleft()))
