"""PowerSGD: gradients as products of two thin matrices, found by one step of power iteration per round.

A tensor is seen as a matrix M_w of a = shape[0] rows and b columns (a convolution: output channels by the rest), on worker w.
Q is b x r, remembered from the round before:

    P = sum_w M_w Q              one sum of r a floats per matrix
    P <- orthonormalise(P)       all workers from the same bits, so the same P everywhere
    Q = mean_w M_w^T P           one sum of r b floats
    M^ = P Q^T                   what everybody gets
    next round's Q               an orthonormal basis of this one ("warm start"): over the rounds P finds the leading directions

Bits:       32 r (a + b) per matrix, in two sums; P lies on the wire as (r, a) and Q as (r, b), tensors one after the other.
            Both are sums, so any all-reduce may carry them. r = min(rank, a, b). Tensors with one dimension or none, and
            those that would shrink to less than 1 / `min_rate`, are not compressed.
Biased: needs `ErrorFeedback`, with the residual M_w - M^: the mean over workers of the residuals, and M^, are the mean of M.
Invariant:  where the mean of M has rank r or less, M^ is that mean. All workers get the same bits: on CPUs of any kind, with or
            without Numba; on GPUs of one kind. A worker's products do not depend on the bucket (without Numba: up to rounding).
Memory:     4 r b bytes per matrix for Q, the same on all workers; the first Q is drawn from the parameter's name.
Small matrices, zero gradients, gradients of low rank: a vector that P has no use for becomes zero (`orthogonal.py`), and so does
            its part of Q, which would then be zero for ever: it is drawn anew.
References: Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019. Departs from it: Q is orthonormal when it is remembered (the
            same P comes of it, and gradients of 1e-20 or 1e20 do not underflow or overflow when multiplied by it); momentum is
            the optimizer's business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.compress.codec import Compression
from stretto.compress.draw import Draw
from stretto.compress.exchange import bytes_of_sum
from stretto.compress.kernels.compiling import has_numba
from stretto.compress.layout import Layout, Place
from stretto.compress.none import NoCompression
from stretto.compress.orthogonal import cut, orthonormalise
from stretto.compress.rounds import Steps, Sum, Turn
from stretto.errors import ConfigurationError

Q = "q"


class Matrix(NamedTuple):
    """A tensor seen as a rows by b columns, approximated with rank r."""

    name: str
    start: int
    r: int
    a: int
    b: int

    def of(self, values: Tensor) -> Tensor:
        return values[self.start : self.start + self.a * self.b].view(self.a, self.b)


@dataclass(frozen=True, slots=True)
class PowerSGD(Compression):
    """`rank`: how many directions are kept. `min_rate`: leave alone what would not shrink by this factor."""

    rank: int = 4
    min_rate: float = 2.0

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ConfigurationError(
                f"PowerSGD(rank={self.rank!r}): the rank is the number of directions that are sent, a whole number from 1.\n"
                f"Write PowerSGD(rank=4), or less for fewer bytes."
            )
        number = isinstance(self.min_rate, int | float) and not isinstance(self.min_rate, bool)
        if not number or not 0 <= self.min_rate < math.inf:
            raise ConfigurationError(
                f"PowerSGD(min_rate={self.min_rate!r}): the least factor by which a tensor must shrink is a number from 0.\n"
                f"Write min_rate=2.0, or min_rate=0.0 to compress every matrix."
            )

    def for_parameter(self, name: str, shape: tuple[int, ...]) -> Compression:
        a, b = _sides(Place(name, shape, 0))
        r = min(self.rank, a, b)
        return self if len(shape) > 1 and r > 0 and a * b >= self.min_rate * r * (a + b) else NoCompression()

    def exchange(self, values: Tensor, turn: Turn) -> Steps:
        matrices = self._matrices_of(turn)
        right = _remembered(matrices, turn)
        left = torch.empty(sum(m.r * m.a for m in matrices), device=values.device)
        times_right(values, right, matrices, left)
        left = yield Sum(left)
        orthonormalise(left, tuple((m.r, m.a) for m in matrices))
        times_left(values, left, matrices, right)
        right = yield Sum(right.mul_(1.0 / turn.world_size))
        multiply(left, right, matrices, values)
        _remember(right, matrices, turn)

    def bytes_sent(self, layout: Layout, rank: int, world_size: int, algorithm: str = "auto") -> int:
        if world_size == 1:
            return 0
        matrices = self._matrices(layout)
        lengths = sum(m.r * m.a for m in matrices), sum(m.r * m.b for m in matrices)
        return sum(bytes_of_sum(length, 4, rank, world_size, algorithm) for length in lengths)

    def _matrices_of(self, turn: Turn) -> list[Matrix]:
        if self not in turn.kept:
            turn.kept[self] = self._matrices(turn.layout)
        return turn.kept[self]  # type: ignore[no-any-return]

    def _matrices(self, layout: Layout) -> list[Matrix]:
        sides = [(place, *_sides(place)) for place in layout.places if place.size]
        return [Matrix(place.name, place.start, min(self.rank, a, b), a, b) for place, a, b in sides]


def _sides(place: Place) -> tuple[int, int]:
    rows = place.shape[0] if place.shape else 1
    return rows, place.size // max(1, rows)


def _factors(matrices: list[Matrix], left: Tensor, right: Tensor) -> Sequence[tuple[Matrix, Tensor, Tensor]]:
    """Each matrix with its P^T and its Q^T."""
    ps, qs = cut(left, [(m.r, m.a) for m in matrices]), cut(right, [(m.r, m.b) for m in matrices])
    return list(zip(matrices, ps, qs, strict=True))


def _remembered(matrices: list[Matrix], turn: Turn) -> Tensor:
    """All Q^T, one after the other, to be overwritten."""
    parts = [torch.empty(0, device=turn.state.device)]
    for m in matrices:
        q = turn.state.shared.get(Q, m.name)
        usable = q is not None and q.shape == (m.r, m.b)  # not after a checkpoint of another rank
        parts.append((q if q is not None and usable else first_q(m).to(turn.state.device)).reshape(-1))
    return torch.cat(parts)


def _remember(right: Tensor, matrices: list[Matrix], turn: Turn) -> None:
    lost = orthonormalise(right, tuple((m.r, m.b) for m in matrices)).cpu()
    gone = torch.split(lost, [m.r for m in matrices])
    for m, q, which in zip(matrices, cut(right, [(m.r, m.b) for m in matrices]), gone, strict=True):
        if which.any():
            q[which.to(q.device)] = first_q(m)[which].to(q.device)
        turn.state.shared.set_next(Q, m.name, q)


def first_q(m: Matrix) -> Tensor:
    """(r, b), normal with variance 1 / b: a function of the parameter's name, by Box and Muller's transformation."""
    half = -(-m.r * m.b // 2)
    uniform = Draw().uniform(Layout.of([(m.name, (2 * half,))]).whole(), key=0).double()
    radius, angle = (-2.0 / m.b * torch.log1p(-uniform[:half])).sqrt(), 2.0 * math.pi * uniform[half:]
    return torch.cat((radius * angle.cos(), radius * angle.sin()))[: m.r * m.b].float().view(m.r, m.b)


def times_right(values: Tensor, right: Tensor, matrices: list[Matrix], left: Tensor) -> None:
    """Every M Q into `left`."""
    if _has_kernels(values):
        from stretto.compress.kernels import low_rank_cpu

        low_rank_cpu.times_right(values.numpy(), right.numpy(), _table(matrices), left.numpy())
        return
    for m, p, q in _factors(matrices, left, right):
        torch.mm(q, m.of(values).t(), out=p)


def times_left(values: Tensor, left: Tensor, matrices: list[Matrix], right: Tensor) -> None:
    """Every M^T P into `right`."""
    if _has_kernels(values):
        from stretto.compress.kernels import low_rank_cpu

        low_rank_cpu.times_left(values.numpy(), left.numpy(), _table(matrices), right.numpy())
        return
    for m, p, q in _factors(matrices, left, right):
        torch.mm(p, m.of(values), out=q)


def multiply(left: Tensor, right: Tensor, matrices: list[Matrix], out: Tensor) -> None:
    """Every P Q^T into `out`. On a CPU with the same bits whatever its instructions are, which a BLAS does not promise."""
    if _has_kernels(out):
        from stretto.compress.kernels import low_rank_cpu

        low_rank_cpu.multiply(left.numpy(), right.numpy(), _table(matrices), out.numpy())
    elif out.device.type == "cpu":
        multiply_reference(left, right, matrices, out)
    else:
        for m, p, q in _factors(matrices, left, right):
            torch.mm(p.t(), q, out=m.of(out))


def multiply_reference(left: Tensor, right: Tensor, matrices: list[Matrix], out: Tensor) -> None:
    """Products are rounded before they are added, from the left."""
    for m, p, q in _factors(matrices, left, right):
        whole = m.of(out)
        torch.mul(p[0][:, None], q[0], out=whole)
        for k in range(1, m.r):
            whole.add_(p[k][:, None] * q[k])


def _has_kernels(values: Tensor) -> bool:
    return values.device.type == "cpu" and has_numba()


def _table(matrices: list[Matrix]) -> Any:
    """Shapes as a kernel takes them."""
    return torch.tensor([(m.r, m.a, m.b) for m in matrices], dtype=torch.int64).view(-1, 3).numpy()
