"""Clipping by the norm of all gradients, also where parameters are cut over workers.

    norm = (sum over all elements of |g|^p)^(1/p)       g <- g min(1, max_norm / (norm + 1e-6))

A parameter that is whole is on every worker along the dimensions of a mesh, and counts once. Of one that is cut each worker has a
slice, and all slices count: sums of powers are added up along the dimensions that it is cut over.

Cost:      one all-reduce of a number for each set of dimensions that parameters are cut over; without a mesh nothing is sent.
Invariant: all workers that share the gradients of a model compute the same norm, to the bit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.mesh.cutting import cuts_of
from stretto.mesh.mesh import Axis

EPSILON = 1e-6  # as in torch


@torch.no_grad()
def clip_slices(parameters: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` where some of the parameters are cut. All workers along the dimensions that they are cut
    over call it."""
    gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    norm = total_norm(gradients, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"The total norm of order {norm_type} for gradients is {norm}, so it cannot be clipped.")
    scale = torch.clamp(max_norm / (norm + EPSILON), max=1.0)
    for _, gradient in gradients:
        gradient.mul_(scale.to(gradient.device))
    return norm


def total_norm(gradients: list[tuple[Tensor, Tensor]], norm_type: float) -> Tensor:
    """The norm of the whole model's gradients. `gradients`: pairs (parameter, gradient) that this worker has."""
    by_axes: dict[tuple[Axis, ...], list[Tensor]] = defaultdict(list)
    for parameter, gradient in gradients:
        by_axes[tuple(cut.axis for cut in cuts_of(parameter))].append(gradient)
    largest = math.isinf(norm_type)
    device = gradients[0][1].device if gradients else torch.device("cpu")
    parts = []
    # All workers have the same parameters, so they come here in one order.
    for axes, found in by_axes.items():
        norms = torch.stack([torch.linalg.vector_norm(each, norm_type).to(device, torch.float32) for each in found])
        part = norms.max() if largest else norms.pow(norm_type).sum()
        for axis in axes:
            part = axis.combine_(part.reshape(1), "max" if largest else "sum")[0]
        parts.append(part)
    if not parts:
        return torch.zeros((), dtype=torch.float32, device=device)
    together = torch.stack(parts)
    return together.max() if largest else together.sum().pow(1.0 / norm_type)
