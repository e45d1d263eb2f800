"""The accumulators of deep gradient compression on the CPU, with the bits of the reference in `dgc.py`."""

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
    _accumulate(nesterov, *(x.numpy() for x in (g, *before, mu, *after)))


@compiled
def _accumulate(nesterov: bool, g: Array, u: Array, v: Array, momentum: Array, next_u: Array, next_v: Array) -> None:
    mu = momentum[0]
    for i in range(len(g)):
        if nesterov:  # the compiler makes two loops of it
            x = mu * min(max(u[i] + g[i], -LARGEST), LARGEST)
            next_v[i] = min(max((v[i] + x) + g[i], -LARGEST), LARGEST)
        else:
            x = min(max(mu * u[i] + g[i], -LARGEST), LARGEST)
            next_v[i] = min(max(v[i] + x, -LARGEST), LARGEST)
        next_u[i] = x
