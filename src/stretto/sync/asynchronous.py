"""Asynchronous: nobody waits for anybody; a server applies each gradient when it arrives.

    w <- U(w, g_k)        whenever worker k has pushed g_k, which it has computed on whatever it pulled last

The staleness tau of a gradient is the number of updates between the model that it was computed on and the one that it is applied
to: about P - 1 for P workers that are equally fast, without a bound. `staleness_aware` divides the learning rate by it,

    rate = rate_0 / tau   for tau > 0,        rate_0 otherwise

and `delay_compensation` corrects the gradient (`delay_compensation.py`). They work on different things, and may be used together.

Cost:      each worker as fast as it is; per update one push and one pull of the model.
Invariant: every gradient is applied once. With one worker tau is 0: the same steps as without servers.
Reference: Dean et al., "Large scale distributed deep networks" (Downpour SGD), NIPS 2012; Zhang, Gupta, Lian and Liu,
           "Staleness-aware async-SGD for distributed deep learning", IJCAI 2016, arXiv:1511.05950, for the rate.
Departs:   the *rate* is divided, not the gradient. For SGD without momentum that is the same; an optimizer that divides by the
           size of gradients, such as Adam, would undo a smaller gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.errors import ConfigurationError
from stretto.sync.delay_compensation import DelayCompensation


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """Each gradient is applied on arrival. `staleness_aware`: at the rate divided by its staleness. `delay_compensation`:
    corrected for what has changed since it was computed."""

    staleness_aware: bool = False
    delay_compensation: DelayCompensation | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.staleness_aware, bool):
            raise ConfigurationError(
                f"Asynchronous(staleness_aware={self.staleness_aware!r}): whether the learning rate is divided by the staleness "
                f"is a yes or no.\nWrite Asynchronous(staleness_aware=True), or leave it out."
            )
        if self.delay_compensation is not None and not isinstance(self.delay_compensation, DelayCompensation):
            raise ConfigurationError(
                f"Asynchronous(delay_compensation={self.delay_compensation!r}): that is not a DelayCompensation.\n"
                f"Write delay_compensation=DelayCompensation(0.04), DelayCompensation(2.0, decay=0.95), or leave it out."
            )
