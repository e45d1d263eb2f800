"""DelayCompensation: a gradient that was computed on an old model is corrected for what has happened since (DC-ASGD).

Worker k has pulled the model w_k and computed g on it. When g arrives the model is w. To first order in w - w_k the gradient
there is g + H (w - w_k), and the diagonal of the Hessian H is estimated by the square of the gradient:

    g~ = g + lambda_t g*g*(w - w_k)                    * element by element
    lambda_t = strength                                DC-ASGD-c: decay=None
    lambda_t = strength / sqrt(M_t + 1e-7)             DC-ASGD-a: M_t = decay M_(t-1) + (1 - decay) g*g,   M_0 = 0

Cost:      the server keeps w_k, one more model for each worker (workers that have pulled the same values share theirs), and for
           DC-ASGD-a M, one more model. Some passes over each gradient.
Invariant: strength 0 is `Asynchronous()`, bit by bit. A gradient of the model as it is (w = w_k) is applied as it came.
Reference: Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML 2017, arXiv:1609.08326. Its
           settings: 0.04 (c); 2 with decay 0.95 on CIFAR-10 and 2 with decay 0 on ImageNet (a).
Departs:   g~ is handed to the optimizer whichever it is, where the paper has SGD alone. A worker of which no pull is known (it
           has just come back, say) has its gradients applied as they came.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stretto.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class DelayCompensation:
    """`DelayCompensation(0.04)`: with a constant factor. `DelayCompensation(2.0, decay=0.95)`: divided by the root of a running
    mean of squared gradients."""

    strength: float
    decay: float | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.strength) or not 0 <= self.strength < math.inf:
            raise ConfigurationError(
                f"DelayCompensation(strength={self.strength!r}): that is the factor lambda of the correction, finite and not "
                f"negative.\nWrite DelayCompensation(0.04), or DelayCompensation(2.0, decay=0.95)."
            )
        if self.decay is not None and (not _is_number(self.decay) or not 0 <= self.decay < 1):
            raise ConfigurationError(
                f"DelayCompensation(decay={self.decay!r}): that is the share of the old mean of squared gradients in the new "
                f"one, from 0 to below 1.\nWrite decay=0.95, or leave it out for a constant factor."
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
