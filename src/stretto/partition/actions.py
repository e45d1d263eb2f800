"""A pipeline's plan as data: for each stage, in which order it computes what.

    F3      forward of micro-batch 3                B3      its backward: gradients of inputs and of parameters
    F3.1    the same through this worker's part 1   b3, W3  backward in two: gradients of inputs, and of parameters later

Stage k of K holds `chunks` parts of the model, c = 0 .. chunks-1; part c of stage k is the (c K + k)-th *piece* of the model in
the order of its layers. A plan says nothing of messages: what an action needs from another stage it waits for, and what it makes
for one is sent at once. Any order of actions in which every action's needs come before it, taken over all stages, therefore ends
(`walk.py` finds it, or says where it is stuck).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Work(Enum):
    """What is computed of one micro-batch in one part of the model."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of inputs and parameters
    INPUTS = "b"  # gradients of inputs only,
    WEIGHTS = "W"  # and those of parameters, later


class StageAction(NamedTuple):
    """One thing a stage computes."""

    work: Work
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.work.value}{self.microbatch}{f'.{self.chunk}' if self.chunk else ''}"


Order = tuple[StageAction, ...]  # of one stage


class PipelinePlan(NamedTuple):
    """What each stage computes, in order."""

    microbatches: int
    chunks: int
    orders: tuple[Order, ...]  # by stage

    @property
    def stages(self) -> int:
        return len(self.orders)

    @property
    def pieces(self) -> int:
        return self.stages * self.chunks

    def __str__(self) -> str:
        return "\n".join(f"stage {stage}: {' '.join(map(str, order))}" for stage, order in enumerate(self.orders))


def piece_of(stage: int, chunk: int, stages: int) -> int:
    """Which piece of the model a part of a stage is, in the order of layers."""
    return chunk * stages + stage


def place_of(piece: int, stages: int) -> tuple[int, int]:
    """Where a piece of the model is: (stage, chunk)."""
    return piece % stages, piece // stages


def needs(action: StageAction, stage: int, plan: PipelinePlan) -> list[tuple[int, StageAction]]:
    """What must have ended before, and where: (stage, action)."""
    piece = piece_of(stage, action.chunk, plan.stages)
    if action.work is Work.FORWARD:
        return [_at(Work.FORWARD, action.microbatch, piece - 1, plan)] if piece else []
    if action.work is Work.WEIGHTS:
        return [(stage, action._replace(work=Work.INPUTS))]
    before = [(stage, action._replace(work=Work.FORWARD))]
    if piece + 1 < plan.pieces:
        before.append(_at(action.work, action.microbatch, piece + 1, plan))
    return before


def _at(work: Work, microbatch: int, piece: int, plan: PipelinePlan) -> tuple[int, StageAction]:
    stage, chunk = place_of(piece, plan.stages)
    return stage, StageAction(work, microbatch, chunk)
