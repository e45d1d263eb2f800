"""Orthonormal vectors, with the same bits on every machine.

Modified Gram-Schmidt, in float64: for k = 1, ..., r

    x_k <- x_k / |x_k|,    x_j <- x_j - (x_j . x_k) x_k   for j > k

twice over, since once is not enough for vectors that are nearly dependent. A vector that depends on those before it (less than
1e-10 of its length is left), is zero or is not finite becomes zero: that is orthogonal to everything, where dividing by a small
number would give a direction made of rounding errors.

Cost:       about 4 r^2 n operations for r vectors of n, in cache: little beside the products with the whole matrix.
Invariant:  a function of the bits given, the same on all machines and devices, by kernel or not. Products are rounded before
            they are added, and dot products are added in halves: x[:n/2] + x[n/2:], and again, padded with zeros to a power of
            two. Workers that start from the same sum therefore hold the same vectors, whatever instructions or number of threads
            their processors have; neither `torch.linalg.qr` nor `torch.sum` promises that.
Reference:  Giraud, Langou and Rozloznik, "The loss of orthogonality in the Gram-Schmidt orthogonalization process", Computers and
            Mathematics with Applications 50, 2005, for "twice is enough".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from stretto.compress.backend import accelerated

DEPENDENT = 1e-20  # of the squared length

Shapes = tuple[tuple[int, int], ...]  # r vectors of n each, for every tensor


@accelerated(cpu="low_rank_cpu.orthonormalise", cuda="orthogonal_cuda.orthonormalise")
def orthonormalise(flat: Tensor, shapes: Shapes) -> Tensor:
    """Make each tensor's r vectors, which lie one after the other in `flat` (float32), orthonormal, in place.

    Returns a bool for each vector, in order: True if it is zero now. Tensors with equally many vectors of about the same length
    are done together.
    """
    views = list(cut(flat, shapes))
    lost = [torch.empty(0, dtype=torch.float32, device="cpu")] * len(views)
    for members in _alike(shapes):
        r, longest = shapes[members[0]][0], max(shapes[one][1] for one in members)
        x = torch.zeros((len(members), r, power_of_two(longest)), dtype=torch.float64, device=flat.device)
        for row, one in zip(x, members, strict=True):
            row[:, : shapes[one][1]] = views[one]
        _gram_schmidt(x)
        _gram_schmidt(x)
        for row, one in zip(x, members, strict=True):
            views[one].copy_(row[:, : shapes[one][1]])
            lost[one] = (row == 0).all(1)
    return torch.cat(lost) if lost else torch.zeros(0, dtype=torch.bool, device=flat.device)


def cut(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """Matrices that lie one after the other."""
    for part, shape in zip(torch.split(flat, [r * n for r, n in shapes]), shapes, strict=True):
        yield part.view(shape)


def _alike(shapes: Shapes) -> list[list[int]]:
    groups: dict[tuple[int, int], list[int]] = {}
    for number, (r, n) in enumerate(shapes):
        groups.setdefault((r, power_of_two(n)), []).append(number)
    return list(groups.values())


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _gram_schmidt(x: Tensor) -> None:
    """`x`: (tensors, vectors, a power of two)."""
    least = _add_in_halves(x * x) * DEPENDENT
    for k in range(x.shape[1]):
        squared = _add_in_halves(x[:, k] * x[:, k])
        good = (squared > least[:, k]) & squared.isfinite()
        unit = torch.where(good[:, None], x[:, k] / _square_root(squared)[:, None], 0.0)
        x[:, k] = unit
        along = _add_in_halves(x[:, k + 1 :] * unit[:, None])
        x[:, k + 1 :] -= along[:, :, None] * unit[:, None]


def _square_root(x: Tensor) -> Tensor:
    """Rounded correctly: torch's on a CPU may be a library's that is one bit off."""
    return x.sqrt() if x.device.type != "cpu" else torch.from_numpy(np.sqrt(x.numpy()))


def _add_in_halves(x: Tensor) -> Tensor:
    """The sum over the last dimension."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]
