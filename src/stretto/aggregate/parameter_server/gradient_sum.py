"""The weighted sum and mean of gradients that arrive one after the other.

    total = sum_l a_l g_l                  weight = sum_l a_l            count = c
    mean  = total / weight

Synchronous steps and backup workers take the mean with equal weights (or `stretto.weight`'s). Softsync has a weight a_l = 1/tau_l
for each gradient and divides by c: w <- w - (rate/c) sum_l a_l g_l. As the size of a gradient means nothing to Adam, that is
written as the mean at another rate,

    w <- U(w, mean, rate * weight / count)

which is the same for SGD without momentum.

Cost:      one pass over what arrives, straight from the wire's memory; the first of a sum is copied, so nothing is set to zero.
           One buffer, and another one when a sum begins while somebody still reads the last: it may be on its way to a replica.
           A mean is one more pass over that buffer.
Invariant: gradients are added in the order in which `add` is called, so the same calls give the same bits. `add` refuses what
           does not fit and has changed nothing then.
"""

from __future__ import annotations

import weakref
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.aggregate.parameter_server import read_only
from stretto.errors import MalformedPayload

LEAST_WEIGHT: Final = 1e-18  # beyond these a sum of weights, or one over it, may be no float32
MOST_WEIGHT: Final = 1e18


class GradientSum:
    """What `take_total` and `take_mean` return lies in the buffer, and stays as it is while somebody holds it, or a memoryview of
    it. The next `add` begins a new sum."""

    __slots__ = ("_buffer", "_lent", "_tensor", "count", "weight")

    def __init__(self, size: int) -> None:
        self._take_memory(size)
        self._lent: weakref.ref[NDArray[np.float32]] | None = None  # what was taken last; nobody holds it if it is dead
        self.count = 0
        self.weight = 0.0

    def add(self, gradient: NDArray[np.float32], weight: float = 1.0) -> None:
        """Add `weight` times this gradient."""
        check_gradient(gradient, self._buffer.size)
        if not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
            raise MalformedPayload(
                f"a gradient that counts {weight} times: a weight is from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}."
            )
        if not self.count and self._lent is not None and self._lent() is not None:
            self._take_memory(self._buffer.size)
        with np.errstate(all="ignore"):  # an overflow is an infinity, as in torch, and no warning
            if weight != 1:
                self._add_weighted(gradient, weight)
            elif self.count:
                np.add(self._buffer, gradient, out=self._buffer)
            else:
                np.copyto(self._buffer, gradient)
        self.count += 1
        self.weight += weight

    def _take_memory(self, size: int) -> None:
        self._buffer = np.empty(size, np.float32)
        self._tensor = torch.from_numpy(self._buffer)

    def _add_weighted(self, gradient: NDArray[np.float32], weight: float) -> None:
        if self.count:
            self._tensor.add_(read_only.as_tensor(gradient), alpha=weight)
        else:
            np.multiply(gradient, np.float32(weight), out=self._buffer)

    def take_total(self) -> NDArray[np.float32]:
        """The sum. Ends it."""
        assert self.count, "nothing was added"
        self.clear()
        taken = self._buffer.view()
        self._lent = weakref.ref(taken)
        return taken

    def take_mean(self) -> NDArray[np.float32]:
        """The sum over the sum of weights. Ends it."""
        divisor, total = self.weight, self.take_total()
        if divisor != 1:
            with np.errstate(all="ignore"):
                np.divide(total, np.float32(divisor), out=total)
        return total

    def clear(self) -> None:
        """Forget what was added."""
        self.count = 0
        self.weight = 0.0


def check_gradient(gradient: NDArray[np.float32], size: int) -> None:
    """Raise unless there is one float32 for each element of a range."""
    if gradient.dtype != np.float32 or gradient.shape != (size,):
        raise MalformedPayload(
            f"a gradient of shape {gradient.shape} and type {gradient.dtype} for a range of {size} elements: "
            f"it needs one float32 for each of them."
        )
