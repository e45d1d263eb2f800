"""Delay compensation on a server: what each worker has, and its gradients corrected for what has changed since (DC-ASGD).

    g~ = g + lambda_t g*g*(w - w_k),        lambda_t = strength, or strength / sqrt(M_t + 1e-7)

`stretto/sync/delay_compensation.py` has the method, its reference and its settings; `RangeState` lends w_k, which is a copy only
once the values have changed: workers that hold the same version share it, and one that holds the current version costs nothing.

Invariant: a gradient is returned as it is, the very array, if its worker has the current values, if nothing is known of the
           worker, or if strength is 0. M_t takes part in every gradient all the same.
Memory:    at most one more copy of the values for each worker, M if there is a decay, and two arrays while a gradient is
           corrected.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from stretto.sync.delay_compensation import DelayCompensation

EPSILON: Final = np.float32(1e-7)
Floats = NDArray[np.float32]


class Compensation:
    """The backups of one range: `backups[k]` is what worker k has pulled last, and must not change."""

    def __init__(self, method: DelayCompensation, size: int) -> None:
        self._method = method
        self.backups: dict[int, Floats] = {}
        self.mean_square: Floats | None = None if method.decay is None else np.zeros(size, np.float32)

    def compensated(self, gradient: Floats, values: Floats, worker: int | None) -> Floats:
        """The gradient as it would be about at `values`."""
        with np.errstate(all="ignore"):
            if self.mean_square is not None:
                self._square_into(self.mean_square, gradient)
            backup = None if worker is None else self.backups.get(worker)
            if backup is None or self._method.strength == 0 or _is_same_memory(backup, values):
                return gradient
            correction = values - backup
            correction *= gradient
            correction *= gradient
            correction *= np.float32(self._method.strength)
            if self.mean_square is not None:
                root = self.mean_square + EPSILON
                correction /= np.sqrt(root, out=root)
            correction += gradient
        return correction

    def _square_into(self, mean_square: Floats, gradient: Floats) -> None:
        decay = np.float32(self._method.decay)
        mean_square *= decay
        square = np.square(gradient)
        square *= 1 - decay
        mean_square += square


def _is_same_memory(one: Floats, other: Floats) -> bool:
    return one.ctypes.data == other.ctypes.data
