"""LAMB: layerwise adaptive moments, for Adam.

For each parameter tensor w with gradient g, in its step t,

    m <- b1 m + (1 - b1) g             m^ = m / (1 - b1^t)
    v <- b2 v + (1 - b2) g^2           v^ = v / (1 - b2^t)
    u  = m^ / (sqrt(v^) + eps) + weight_decay w
    w <- w - lr phi(|w|) / |u| u

phi is the identity, or cuts |w| to `norm_bounds`. The ratio phi(|w|) / |u| is 1 where |w| or |u| is zero and for parameters that
are not adapted; those have no weight decay either, unless told otherwise.

Cost:      two buffers of the parameter's size; two norms per parameter and step.
Invariant: a step of an adapted parameter has the length lr phi(|w|), whatever the gradient. With weight_decay = 0 it does not
           change when all gradients are multiplied by a constant (eps aside).
           With adapt="none" and weight_decay = 0 it is torch.optim.Adam.
Reference: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020, arXiv:1904.00962.
Departs:   not from the paper's algorithm 2. A variant in use divides all gradients by their common norm first: to have it,
           call torch.nn.utils.clip_grad_norm_ before the step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from stretto.errors import ConfigurationError
from stretto.optim.layerwise import (
    Adapt,
    Decay,
    Layerwise,
    Steps,
    check_number,
    check_which,
    decay_of,
    in_working_dtype,
    is_adapted,
    ratio_or_one,
)


class LAMB(Layerwise):
    """Adam in which each layer moves by `lr` times its own norm: for large batches, mostly of transformers.

        optimizer = stretto.LAMB(model.parameters(), lr=2e-3)

    Parameters that are not adapted (`adapt="matrices"`: biases, norm layers) move as under Adam at the same rate. All options
    may differ by group. The paper lets the rate grow with the square root of the batch, and the warm-up with the batch.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        norm_bounds: tuple[float, float] | None = None,
        adapt: Adapt = "matrices",
        decay: Decay = "matrices",
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, norm_bounds=norm_bounds, adapt=adapt, decay=decay
        )

    def check(self, options: dict[str, Any]) -> None:
        """Raise ConfigurationError for the first option of a group that cannot work."""
        check_number("LAMB: lr", options["lr"])
        for number, beta in enumerate(_pair("betas", options["betas"])):
            check_number(f"LAMB: betas[{number}]", beta, below=1)
        check_number("LAMB: eps", options["eps"], positive=True)  # 0/0 in an element whose gradient is always zero
        check_which("LAMB", options)
        if options["norm_bounds"] is not None:
            low, high = _pair("norm_bounds", options["norm_bounds"])
            check_number("LAMB: norm_bounds[0]", low)
            check_number("LAMB: norm_bounds[1]", high, positive=True)
            if low > high:
                raise ConfigurationError(
                    f"LAMB(norm_bounds=({low}, {high})): no norm lies between them.\nWrite the smaller first: ({high}, {low})."
                )

    def steps(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], whole: Tensor) -> Steps:
        """One step of one parameter, in place."""
        if not state:
            # A plain number: load_state_dict keeps it, and reading it asks no device.
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        state["step"] += 1
        direction = adam_direction(gradient, state, group["betas"], group["eps"])
        w = in_working_dtype(weight)
        if decay := decay_of(whole, group):
            direction.add_(w, alpha=decay)
        if is_adapted(whole, group):
            w_norm, u_norm = yield w, direction
            direction.mul_(ratio_by_norms(w_norm, u_norm, group["norm_bounds"]))
        weight.add_(direction, alpha=-group["lr"])


def adam_direction(gradient: Tensor, state: dict[str, Any], betas: tuple[float, float], eps: float) -> Tensor:
    """Take `gradient` into the moments and return m^ / (sqrt(v^) + eps), a new tensor of the gradient's dtype."""
    b1, b2 = betas
    t: int = state["step"]
    m: Tensor = state["exp_avg"]
    v: Tensor = state["exp_avg_sq"]
    m.mul_(b1).add_(gradient, alpha=1 - b1)
    v.mul_(b2).add_(gradient.square(), alpha=1 - b2)
    m, v = m.to(gradient.dtype), v.to(gradient.dtype)
    root = v.sqrt().div_(math.sqrt(1 - b2**t)).add_(eps)
    return (m / (1 - b1**t)).div_(root)


def trust_ratio(weight: Tensor, direction: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    """phi(|w|) / |u|: a 0-d tensor."""
    return ratio_by_norms(torch.linalg.vector_norm(weight), torch.linalg.vector_norm(direction), bounds)


def ratio_by_norms(w: Tensor, u: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    phi = w if bounds is None else w.clamp(*bounds)
    return ratio_or_one(phi, u, w, u)


def _pair(option: str, value: object) -> tuple[Any, Any]:
    if isinstance(value, tuple | list) and len(value) == 2:
        return value[0], value[1]
    example = "(0.9, 0.999)" if option == "betas" else "(0.0, 10.0)"
    raise ConfigurationError(f"LAMB({option}={value!r}): two numbers are needed, such as {example}.")
