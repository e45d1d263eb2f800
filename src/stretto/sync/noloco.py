"""NoLoCo: an outer optimizer among few workers at a time, which also pulls their slow weights together.

phi_i are worker i's slow weights, which it has set out from, x_i what it has come to since, and the sums are over its group of n:

    delta_i <- alpha delta_i + beta/n sum_j (x_j - phi_j) - gamma (phi_i - 1/n sum_j phi_j)
    phi_i   <- phi_i + delta_i,        x_i <- phi_i

With alpha = `momentum`, beta = `lr`, gamma = `pull`. In a group of all workers, whose slow weights are the same, nothing is
pulled, and it is DiLoCo with heavy ball momentum. The pull alone never changes the mean of all phi_i.

Which pulls are stable. Take gradients out of it. Of one coordinate, as it differs from the mean of all workers, the partner's is
independent, for it is drawn anew each time; u = (phi - phi_j) / 2, delta' = alpha delta - gamma u, phi' = phi + delta'. Then
A = E[phi^2], B = E[phi delta] and C = E[delta^2] are linear in those of before, with E[u^2] = E[phi u] = A/2, E[delta u] = B/2:

    C' = alpha^2 C - alpha gamma B + gamma^2 A/2,    B' = alpha B - gamma A/2 + C',    A' = A + 2 alpha B - gamma A + C'

and they vanish for 0 < gamma < 2 (1 - alpha^2): with a momentum of 0.5 below 1.5, with DiLoCo's 0.9 below 0.38. For few workers,
where pairs meet again soon, and in larger groups more is stable; the bound holds for any number.

Reference: NoLoCo, arXiv:2506.10911, and its code, which has 0.5, 0.7, 0.7 and an exchange every 50 steps.
Departs:   the paper calls it Nesterov momentum; the code, and this, is heavy ball. There pull = lr.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from stretto.errors import ConfigurationError
from stretto.sync.outer import Outer


def largest_pull(momentum: float) -> float:
    """Below it slow weights of random pairs come together."""
    return 2 * (1 - momentum * momentum)


def largest_momentum(pull: float) -> float:
    """The reverse, for pulls below 2."""
    return float((1 - pull / 2) ** 0.5)


@dataclass(frozen=True, slots=True)
class NoLoCo(Outer):
    """The outer optimizer of NoLoCo, for `Gossip(RandomMatching())`: outer steps in random pairs. `pull` says how far the slow
    weights move towards the mean of the pair, as a share of the distance; it is stable below 2 (1 - momentum^2). The defaults are
    those of the released code."""

    momentum: float = 0.5
    lr: float = 0.7
    pull: float = 0.7

    among_neighbours: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("momentum", "lr", "pull"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ConfigurationError(f"{self!r}: {name} is a number, 0 or more.\nWrite for instance NoLoCo(0.5, 0.7, 0.7).")
        if not self.momentum < 1 or self.lr == 0:
            raise ConfigurationError(
                f"{self!r}: momentum is the share of the last move in this one, below 1, and lr is above 0.\n"
                f"Write for instance NoLoCo(0.5, 0.7, 0.7)."
            )
        if self.pull == 0:
            raise ConfigurationError(
                f"{self!r}: without a pull slow weights of different workers never come together.\nWrite pull=0.7."
            )
        if self.pull >= (limit := largest_pull(self.momentum)):
            nearest = f"pull={0.99 * limit:.3g}"
            other = "" if self.pull >= 2 else f", or momentum={0.99 * largest_momentum(self.pull):.3g} or less"
            raise ConfigurationError(
                f"{self!r}: slow weights of workers that are pulled together in random pairs move apart, without bound, where "
                f"pull is 2 (1 - momentum^2) or more: {limit:.3g} for momentum={self.momentum}.\n"
                f"Write {nearest} or less{other}."
            )

    def move(self, theta: Tensor, delta: Tensor, velocity: Tensor, rate: float) -> None:
        raise AssertionError("it takes the slow weights of a group: see aggregate/gossip/outer_steps.py")
