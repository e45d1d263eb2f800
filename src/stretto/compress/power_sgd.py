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
Memory:     4 r b bytes per matrix for Q, the same on all workers; the first Q is drawn from the parameter's name, and kept too.
On a GPU:   three products for each batch of equal matrices (`matrices.py`), two launches for all orthonormal vectors of a bucket
            (thousands where a P or Q has more than a million elements), and no waiting for the device.
Small matrices, zero gradients, gradients of low rank: a vector that P has no use for becomes zero (`orthogonal.py`), and so does
            its part of Q, which would then be zero for ever: it is drawn anew.
References: Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019. Departs from it: Q is orthonormal when it is remembered (the
            same P comes of it, and gradients of 1e-20 or 1e20 do not underflow or overflow when multiplied by it); momentum is
            the optimizer's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stretto.compress.backend import accelerated
from stretto.compress.checks import check, is_count, is_number
from stretto.compress.codec import Compression
from stretto.compress.exchange import bytes_of_sum
from stretto.compress.layout import Layout, TensorPlace
from stretto.compress.matrices import Matrices, Matrix
from stretto.compress.none import NoCompression
from stretto.compress.orthogonal import cut, orthonormalise
from stretto.compress.rounds import ExchangeContext, Steps, Sum

Q = "q"


@dataclass(frozen=True, slots=True)
class PowerSGD(Compression):
    """`rank`: how many directions are kept. `min_rate`: leave alone what would not shrink by this factor."""

    rank: int = 4
    min_rate: float = 2.0
    wants_feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        why = "the rank is the number of directions that are sent, a whole number from 1"
        check(is_count(self.rank), self, "rank", why, "PowerSGD(rank=4), or less for fewer bytes")
        why = "the least factor by which a tensor must shrink is a number from 0"
        shrinks = is_number(self.min_rate) and self.min_rate >= 0
        check(shrinks, self, "min_rate", why, "min_rate=2.0, or min_rate=0.0 to compress every matrix")

    def for_parameter(self, name: str, shape: tuple[int, ...]) -> Compression:
        a, b = _sides(TensorPlace(name, shape, 0))
        r = min(self.rank, a, b)
        return self if len(shape) > 1 and r > 0 and a * b >= self.min_rate * r * (a + b) else NoCompression()

    def exchange(self, values: Tensor, context: ExchangeContext) -> Steps:
        matrices = context.keep(self, lambda: self._matrices(context.layout))
        right = _remembered(matrices, context)
        left = torch.empty(sum(r * a for r, a in matrices.lefts), device=values.device, dtype=torch.float32)
        times_right(values, right, matrices, left)
        left = yield Sum(left)
        orthonormalise(left, matrices.lefts)
        times_left(values, left, matrices, right)
        right = yield Sum(right.mul_(1.0 / context.world_size))
        multiply(left, right, matrices, values)
        _remember(right, matrices, context)

    def bytes_sent(self, layout: Layout, rank: int, world_size: int, algorithm: str = "auto") -> int:
        if world_size == 1:
            return 0
        matrices = self._matrices(layout)
        lengths = (sum(r * n for r, n in shapes) for shapes in (matrices.lefts, matrices.rights))
        return sum(bytes_of_sum(length, 4, rank, world_size, algorithm) for length in lengths)

    def _matrices(self, layout: Layout) -> Matrices:
        sides = [(place, *_sides(place)) for place in layout.places if place.size]
        return Matrices(Matrix(place.name, place.start, min(self.rank, a, b), a, b) for place, a, b in sides)


def _sides(place: TensorPlace) -> tuple[int, int]:
    rows = place.shape[0] if place.shape else 1
    return rows, place.size // max(1, rows)


def _remembered(matrices: Matrices, context: ExchangeContext) -> Tensor:
    """All Q^T, one after the other, to be overwritten."""
    device = context.state.device
    parts = [context.state.shared.get(Q, m.name) for m in matrices.each]
    if not all(map(_is_usable, parts, matrices.rights)):
        first = cut(matrices.first(device), matrices.rights)
        parts = [q if _is_usable(q, (m.r, m.b)) else new for q, m, new in zip(parts, matrices.each, first, strict=True)]
    return torch.cat([torch.empty(0, device=device, dtype=torch.float32), *(q.reshape(-1) for q in parts if q is not None)])


def _is_usable(q: Tensor | None, shape: tuple[int, int]) -> bool:
    return q is not None and q.shape == shape  # not after a checkpoint of another rank


def _remember(right: Tensor, matrices: Matrices, context: ExchangeContext) -> None:
    lost = orthonormalise(right, matrices.rights)
    if right.device.type != "cpu" or bool(lost.any()):  # to ask a GPU would be to wait for it
        spread = torch.repeat_interleave(lost, matrices.lengths(right.device), output_size=len(right))
        torch.where(spread, matrices.first(right.device), right, out=right)
    for m, q in zip(matrices.each, cut(right, matrices.rights), strict=True):
        context.state.shared.set_next(Q, m.name, q)


@accelerated(cpu="low_rank_cpu.times_right")
def times_right(values: Tensor, right: Tensor, matrices: Matrices, left: Tensor) -> None:
    """Every M Q into `left`."""
    for batch in matrices.batches:
        torch.bmm(batch.q(right), batch.m(values).mT, out=batch.p(left))


@accelerated(cpu="low_rank_cpu.times_left")
def times_left(values: Tensor, left: Tensor, matrices: Matrices, right: Tensor) -> None:
    """Every M^T P into `right`."""
    for batch in matrices.batches:
        torch.bmm(batch.p(left), batch.m(values), out=batch.q(right))


@accelerated(cpu="low_rank_cpu.multiply")
def multiply(left: Tensor, right: Tensor, matrices: Matrices, out: Tensor) -> None:
    """Every P Q^T into `out`. On a CPU with the same bits whatever its instructions are, which a BLAS does not promise:
    products are rounded before they are added, from the left."""
    if out.device.type != "cpu":
        for batch in matrices.batches:
            torch.bmm(batch.p(left).mT, batch.q(right), out=batch.m(out))
        return
    for m, p, q in matrices.factors(left, right):
        whole = m.of(out)
        torch.mul(p[0][:, None], q[0], out=whole)
        for k in range(1, m.r):
            whole.add_(p[k][:, None] * q[k])
