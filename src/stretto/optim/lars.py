"""LARS: layerwise adaptive rate scaling, for SGD with momentum.

For each parameter tensor w with gradient g, at the rate gamma_t,

    lambda = eta |w| / (|g| + beta |w| + eps)
    u     <- mu u + lambda (g + beta w)
    w     <- w - gamma_t u

with eta = trust_coefficient, beta = weight_decay, mu = momentum. Where |w| or |g| is zero, and for parameters that are not
adapted, lambda = 1; those have beta = 0 too, unless told otherwise.

Cost:      one buffer of the parameter's size; two norms per parameter and step.
Invariant: |lambda (g + beta w)| <= eta |w| for adapted parameters, whatever the gradient (where no norm is zero).
           With beta = 0 the step does not change when g is multiplied by a constant (eps aside).
           With adapt="none" it is torch.optim.SGD, bit by bit.
Reference: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", arXiv:1708.03888.
Departs:   the paper folds the rate into the momentum, v <- mu v + gamma_t lambda (g + beta w), w <- w - v. Here v = gamma_t u.
           At a constant rate this is the same. When the rate changes it is the paper's rule with Goyal's momentum correction,
           v <- mu (gamma_t / gamma_t-1) v + gamma_t lambda (g + beta w): old gradients count at the new rate. Without it the
           momentum, built at smaller rates, lags behind during warm-up. It also survives a rate of zero.
           The paper has no eps; it keeps lambda finite for tiny gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

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


class LARS(Layerwise):
    """SGD with momentum in which each layer moves by a part of its own norm: for large batches, mostly of convolutional networks.

        optimizer = stretto.LARS(model.parameters(), lr=2.0)

    A rate means something else than for SGD: the first step moves a layer by `lr * trust_coefficient` of its norm. Parameters
    that are not adapted (`adapt="matrices"`: biases, norm layers) move as under SGD at the rate `lr`; if that is too much for
    them, give them a group with an `lr` of its own. All options may differ by group.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        adapt: Adapt = "matrices",
        decay: Decay = "matrices",
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            trust_coefficient=trust_coefficient,
            eps=eps,
            adapt=adapt,
            decay=decay,
        )

    def check(self, options: dict[str, Any]) -> None:
        """Raise ConfigurationError for the first option of a group that cannot work."""
        check_number("LARS: lr", options["lr"])
        check_number("LARS: momentum", options["momentum"], below=1)
        check_number("LARS: trust_coefficient", options["trust_coefficient"], positive=True)
        check_number("LARS: eps", options["eps"])
        check_which("LARS", options)

    def steps(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], whole: Tensor) -> Steps:
        """One step of one parameter, in place."""
        decay, w = decay_of(whole, group), in_working_dtype(weight)
        step = gradient.add(w, alpha=decay) if decay else gradient
        if is_adapted(whole, group):
            w_norm, g_norm = yield w, gradient
            step = step * rate_by_norms(w_norm, g_norm, decay, group["trust_coefficient"], group["eps"])
        if group["momentum"]:
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = step.to(weight.dtype, copy=True)  # never the gradient's own memory
            else:
                state["momentum_buffer"].mul_(group["momentum"]).add_(step)
            step = state["momentum_buffer"]
        weight.add_(step, alpha=-group["lr"])


def local_rate(weight: Tensor, gradient: Tensor, decay: float, trust: float, eps: float) -> Tensor:
    """lambda: a 0-d tensor."""
    return rate_by_norms(torch.linalg.vector_norm(weight), torch.linalg.vector_norm(gradient), decay, trust, eps)


def rate_by_norms(w: Tensor, g: Tensor, decay: float, trust: float, eps: float) -> Tensor:
    return ratio_or_one(trust * w, g + decay * w + eps, w, g)
