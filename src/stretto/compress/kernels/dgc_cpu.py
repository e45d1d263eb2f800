"""CPU kernels of deep gradient compression, with the bits of the references in `dgc.py` and `sampled_selection.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.compress.dgc import Accumulators
from stretto.compress.kernels.compiling import compiled

Array = np.ndarray[Any, Any]

LARGEST = np.float32(np.finfo(np.float32).max)


def accumulate(g: Tensor, before: Accumulators, momentum: float, nesterov: bool, after: Accumulators) -> None:
    mu = torch.tensor([momentum], dtype=torch.float32, device="cpu")
    (_accumulate_nesterov if nesterov else _accumulate)(*(x.numpy() for x in (g, *before, mu, *after)))


def count_at_least(values: Tensor, threshold: Tensor) -> int:
    return int(_count_at_least(values.numpy(), threshold.numpy()))


def at_least(values: Tensor, threshold: Tensor) -> Tensor:
    found = torch.empty(count_at_least(values, threshold) + 1, dtype=torch.int64, device="cpu")
    _find_at_least(values.numpy(), threshold.numpy(), found.numpy())
    return found[:-1]


@compiled
def _accumulate(g: Array, u: Array, v: Array, momentum: Array, next_u: Array, next_v: Array) -> None:
    mu = momentum[0]
    for i in range(len(g)):
        x = min(max(mu * u[i] + g[i], -LARGEST), LARGEST)
        next_u[i] = x
        next_v[i] = min(max(v[i] + x, -LARGEST), LARGEST)


@compiled
def _accumulate_nesterov(g: Array, u: Array, v: Array, momentum: Array, next_u: Array, next_v: Array) -> None:
    mu = momentum[0]
    for i in range(len(g)):
        x = mu * min(max(u[i] + g[i], -LARGEST), LARGEST)
        next_u[i] = x
        next_v[i] = min(max((v[i] + x) + g[i], -LARGEST), LARGEST)


@compiled
def _count_at_least(values: Array, threshold: Array) -> int:
    least = threshold[0]
    count = 0
    for i in range(len(values)):
        x = abs(values[i])
        count += (x >= least) & (x > 0)
    return count


@compiled
def _find_at_least(values: Array, threshold: Array, found: Array) -> None:
    """Counts 64 at a time, which is fast, and looks closer where there are any.

    There it writes one place too far, so that it need not branch: `found` is longer by one.
    """
    least = threshold[0]
    count = 0
    for start in range(0, len(values), 64):
        part = values[start : start + 64]
        here = 0
        for i in range(len(part)):
            here += abs(part[i]) >= least
        if here > 0:
            for i in range(len(part)):
                x = abs(part[i])
                found[count] = start + i
                count += (x >= least) & (x > 0)
