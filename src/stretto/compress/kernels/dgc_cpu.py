"""CPU kernels of deep gradient compression, with the bits of the references in `dgc.py` and `sampled_selection.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from stretto.compress.kernels.compiling import compiled

Array = np.ndarray[Any, Any]

LARGEST = np.float32(np.finfo(np.float32).max)


@compiled
def accumulate(g: Array, u: Array, v: Array, momentum: Array, next_u: Array, next_v: Array) -> None:
    mu = momentum[0]
    for i in range(len(g)):
        x = min(max(mu * u[i] + g[i], -LARGEST), LARGEST)
        next_u[i] = x
        next_v[i] = min(max(v[i] + x, -LARGEST), LARGEST)


@compiled
def accumulate_nesterov(g: Array, u: Array, v: Array, momentum: Array, next_u: Array, next_v: Array) -> None:
    mu = momentum[0]
    for i in range(len(g)):
        x = min(max(mu * (u[i] + g[i]), -LARGEST), LARGEST)
        next_u[i] = x
        next_v[i] = min(max((v[i] + x) + g[i], -LARGEST), LARGEST)


@compiled
def count_at_least(values: Array, threshold: Array) -> int:
    least = threshold.item()
    count = 0
    for i in range(len(values)):
        x = abs(values[i])
        count += (x >= least) & (x > 0)
    return count


@compiled
def find_at_least(values: Array, threshold: Array, found: Array) -> None:
    """Writes one place too far, so that it need not branch: `found` is longer by one."""
    least = threshold.item()
    count = 0
    for i in range(len(values)):
        x = abs(values[i])
        found[count] = i
        count += (x >= least) & (x > 0)
