"""Outer optimizers: what all workers make of their mean progress since the last exchange.

theta is what all workers held after the last exchange, x_i what worker i has come to since, and

    Delta = (1/P) sum_i (theta - x_i)            the outer gradient: minus the mean progress

    Average()                theta <- theta - Delta                              the mean of the x_i
    HeavyBall(lr, mu)        v <- mu v + Delta,          theta <- theta - lr v
    Nesterov(lr, mu)         v <- mu v + Delta,          theta <- theta - lr (Delta + mu v)
    SlowMo(beta, lr)         u <- beta u + Delta / g,    theta <- theta - lr g u      g: the inner learning rate, as it is now

and all workers go on from the new theta. v and u begin at 0, so the first step of `Nesterov` moves by lr (1 + mu) Delta, as that
of torch.optim.SGD(nesterov=True) does: with 0.7 and 0.9 by 1.33 times the mean progress, and the loss may rise for a moment.

Invariants: `Nesterov(1, 0)`, `HeavyBall(1, 0)` and `SlowMo(0)` are `Average()`, to rounding. One worker that takes one step of
            SGD (rate eta) from exchange to exchange trains as torch.optim.SGD with rate lr eta, and momentum mu (nesterov or
            not). `SlowMo` where the inner rate never changes is `HeavyBall(lr, beta)`.
Cost:       theta and v in each worker, two vectors of 4 bytes a parameter; nothing more is sent. `Average()` needs no v, and
            theta only where what is sent is compressed.
References: Douillard et al., "DiLoCo", arXiv:2311.08105, which has Nesterov(0.7, 0.9) for 100 to 500 steps of AdamW; Wang et al.,
            "SlowMo", ICLR 2020, arXiv:1910.00643, with beta 0.4 to 0.8 and lr 1.
Departs:    where a parameter's rate is 0 at an exchange, `SlowMo` takes the mean and keeps u, instead of dividing by 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from stretto.errors import ConfigurationError


class Outer:
    """An outer optimizer: a frozen value. Theta and the velocity are kept by the caller."""

    __slots__ = ()
    remembers: ClassVar[bool] = True  # theta and a velocity, from exchange to exchange
    divides_by_rate: ClassVar[bool] = False  # needs the inner learning rate of each parameter
    among_neighbours: ClassVar[bool] = False  # takes the slow weights of a few other workers, and is for gossip alone

    def move(self, theta: Tensor, delta: Tensor, velocity: Tensor, rate: float) -> None:
        """One step: `theta` and `velocity` are brought up to date in place. `delta` may be overwritten. `rate`: the inner one."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Average(Outer):
    """All workers go on from the mean."""

    remembers: ClassVar[bool] = False

    def move(self, theta: Tensor, delta: Tensor, velocity: Tensor, rate: float) -> None:
        theta.sub_(delta)


@dataclass(frozen=True, slots=True)
class HeavyBall(Outer):
    """Momentum over exchanges: v <- momentum v + Delta, theta <- theta - lr v."""

    lr: float
    momentum: float

    def __post_init__(self) -> None:
        _check_rate(self, self.lr, "HeavyBall(0.7, 0.9)")
        _check_momentum(self, self.momentum, "HeavyBall(0.7, 0.9)")

    def move(self, theta: Tensor, delta: Tensor, velocity: Tensor, rate: float) -> None:
        velocity.mul_(self.momentum).add_(delta)
        theta.sub_(velocity, alpha=self.lr)


@dataclass(frozen=True, slots=True)
class Nesterov(Outer):
    """DiLoCo's: v <- momentum v + Delta, theta <- theta - lr (Delta + momentum v). Theirs: `Nesterov(0.7, 0.9)`."""

    lr: float
    momentum: float

    def __post_init__(self) -> None:
        _check_rate(self, self.lr, "Nesterov(0.7, 0.9)")
        _check_momentum(self, self.momentum, "Nesterov(0.7, 0.9)")

    def move(self, theta: Tensor, delta: Tensor, velocity: Tensor, rate: float) -> None:
        velocity.mul_(self.momentum).add_(delta)
        theta.sub_(delta.add_(velocity, alpha=self.momentum), alpha=self.lr)


@dataclass(frozen=True, slots=True)
class SlowMo(Outer):
    """Slow momentum, in units of the inner learning rate g: u <- momentum u + Delta / g, theta <- theta - lr g u."""

    momentum: float
    lr: float = 1.0

    divides_by_rate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_momentum(self, self.momentum, "SlowMo(0.6)")
        _check_rate(self, self.lr, "SlowMo(0.6)")

    def move(self, theta: Tensor, delta: Tensor, velocity: Tensor, rate: float) -> None:
        if rate == 0:
            theta.sub_(delta)
            return
        velocity.mul_(self.momentum).add_(delta, alpha=1 / rate)
        theta.sub_(velocity, alpha=self.lr * rate)


def _check_rate(value: Outer, lr: object, instead: str) -> None:
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 < lr < math.inf:
        raise ConfigurationError(
            f"{value!r}: lr is the outer learning rate, finite and above 0 (1 goes as far as the workers have gone).\n"
            f"Write for instance {instead}."
        )


def _check_momentum(value: Outer, momentum: object, instead: str) -> None:
    if isinstance(momentum, bool) or not isinstance(momentum, (int, float)) or not 0 <= momentum < 1:
        raise ConfigurationError(
            f"{value!r}: momentum is the share of the old velocity in the new one, from 0 to below 1: with 1 and more it grows "
            f"for ever.\nWrite for instance {instead}."
        )
