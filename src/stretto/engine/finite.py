"""Which gradients are not finite, and whose fault it was.

Off, NaN and infinity spread by themselves: a sum with one of them in it is not finite on any worker, so `GradScaler` skips the
step on all of them. With `check_finite=True` each worker remembers the first parameter that it spoiled; when the combined
gradient turns out bad, which all workers see alike, they tell each other and all raise the same `NonFiniteGradient`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from stretto.errors import NonFiniteGradient
from stretto.job import Job


class FiniteCheck:
    """This worker's memory of the first bad gradient of the round."""

    def __init__(self) -> None:
        self._first_bad: str | None = None

    def look(self, name: str, gradient: Tensor | None) -> None:
        """Remember `name` if its own gradient is the first that is not finite."""
        if self._first_bad is None and gradient is not None and not is_finite(gradient):
            self._first_bad = name

    def conclude(self, job: Job, combined: Iterable[Tensor], *, alike: bool = True) -> None:
        """Raise on all workers if anything combined is not finite. `alike`: `combined` is the same on all of them."""
        mine, self._first_bad = self._first_bad, None
        bad = not all(is_finite(gradient) for gradient in combined)
        if not alike:
            bad = any(job.gather_object(bad))
        if bad:
            raise NonFiniteGradient({rank: name for rank, name in enumerate(job.gather_object(mine)) if name is not None})

    def conclude_alone(self, rank: int, combined: Iterable[Tensor], what: str) -> None:
        """The same where nothing may be sent: each worker knows only whether it was its own."""
        mine, self._first_bad = self._first_bad, None
        if not all(is_finite(gradient) for gradient in combined):
            raise NonFiniteGradient({} if mine is None else {rank: mine}, what)


def is_finite(gradient: Tensor) -> bool:
    """In one pass: the largest magnitude is infinite or not a number if any value is."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    if values.numel() == 0 or not (values.is_floating_point() or values.is_complex()):
        return True
    return math.isfinite(float(torch.linalg.vector_norm(values, math.inf)))
