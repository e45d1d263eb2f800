"""Gradients of parameters that no bucket had a place for when they came.

A parameter that was unfrozen or added, and trained by a way that does not pass the model's own forward, is noticed only when its
gradient is there. It is combined by itself then, uncompressed, before anybody can use it.

Cost: one small all-reduce of flags, and one of each such gradient. From the next round on the parameter has its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.engine.bucket import gradient_dtype
from stretto.job import Job


def combine_unplaced(job: Job, named: Sequence[tuple[str, Tensor]], weight: float) -> float:
    """Replace each parameter's gradient by the weighted mean over all workers; gives the mean of their weights.

    A parameter without a gradient on some workers counts with zeros there; without one anywhere it keeps none.
    """
    flags = [weight, *(float(parameter.grad is not None) for _, parameter in named)]
    combined = torch.tensor(flags, dtype=torch.float64, device="cpu")
    mean_weight, *shares = job.all_reduce(combined, op="mean", algorithm="ring").tolist()
    for (_, parameter), share in zip(named, shares, strict=True):
        if share:
            gradient = torch.zeros_like(parameter, dtype=gradient_dtype(parameter), memory_format=torch.preserve_format)
            if parameter.grad is not None and weight:
                gradient.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad).mul_(weight)
            job.all_reduce(gradient, op="mean", algorithm="ring")
            parameter.grad = gradient.div_(mean_weight) if mean_weight not in (0.0, 1.0) else gradient
    return float(mean_weight)
