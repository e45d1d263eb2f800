"""`stretto.join` with slices: a worker that has run out of data goes on to step what it owns.

It makes no step by itself and cannot know when the others do, nor whether they clip or unscale gradients before. So within `join`
whoever works announces what comes, and whoever does not takes part:

    ROUND          a backward: its reduce-scatters follow
    NORMS          of all gradients, of this order
    SCALE          one parameter's gradient, by this factor
    UNSCALE        a bucket's gradients, for a GradScaler, which is to know of infinities;    INFINITIES   whether there were any
    STEP           of this optimizer: slices are stepped and gathered

Cost: an all-reduce of 80 bytes for each, within `join` only. All workers have one stream of announcements, whichever of their
models they are about; so the models of one join all have slices, or none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import torch

from stretto.errors import RankMismatch
from stretto.job import Job


class Coming(IntEnum):
    """What is announced."""

    ROUND = 1
    NORMS = 2
    SCALE = 3
    UNSCALE = 4
    INFINITIES = 5
    STEP = 6


class Announcement(NamedTuple):
    what: Coming
    model: int  # by its channel
    arguments: tuple[float, float, float]


class Announcements:
    """One model's side of them. `is_joining`: whether there are any now."""

    def __init__(self, job: Job, model: int, is_joining: Callable[[], bool]) -> None:
        self._job, self._model, self._is_joining = job, model, is_joining

    @property
    def is_needed(self) -> bool:
        return self._is_joining()

    def say(self, what: Coming, *arguments: float) -> None:
        """This worker is about to do that."""
        if self._is_joining():
            padded = (*arguments, 0.0, 0.0, 0.0)[:3]
            self._meet([float(what), float(self._model), *padded])

    def hear(self) -> Announcement | None:
        """What those that work do next; None if nobody works."""
        what, model, *arguments = self._meet([-math.inf] * 5)
        if what == -math.inf:
            return None
        return Announcement(Coming(int(what)), int(model), (arguments[0], arguments[1], arguments[2]))

    def _meet(self, mine: list[float]) -> list[float]:
        both = torch.tensor([*mine, *(-each if each != -math.inf else each for each in mine)], dtype=torch.float64, device="cpu")
        self._job.all_reduce(both, op="max", algorithm="ring", label=" of what comes next, within join")
        highest, lowest = both[:5].tolist(), (-both[5:]).tolist()
        same = all(high == low or (math.isnan(high) and math.isnan(low)) for high, low in zip(highest, lowest, strict=True))
        if highest[0] != -math.inf and not same:
            raise RankMismatch(
                "within join the workers that still have data do different things: between a backward and the next all of them "
                "clip, unscale and step alike.\nGive all of them the same loop."
            )
        return highest
