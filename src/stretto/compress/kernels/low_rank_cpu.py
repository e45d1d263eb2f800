"""CPU kernels of low-rank compression: one call for all tensors of a bucket.

`orthonormalise` and `multiply` give the bits of their references in `orthogonal.py` and `power_sgd.py`: the
compiler neither joins a product and a sum into one rounding nor changes the order of sums. `times_right` and `times_left` are as
fast as a BLAS for such thin matrices and equal to it up to rounding, but their bits do not depend on where in memory a matrix
lies, so not on the bucket.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.compress.kernels.compiling import compiled
from stretto.compress.matrices import Matrices
from stretto.compress.orthogonal import Shapes

Array = np.ndarray[Any, Any]

DEPENDENT = 1e-20  # as in orthogonal.py
LANES = 64  # sums side by side


def orthonormalise(flat: Tensor, shapes: Shapes) -> Tensor:
    lost = torch.zeros(sum(r for r, _ in shapes), dtype=torch.bool, device="cpu")
    _orthonormalise(flat.numpy(), np.array(shapes, np.int64).reshape(-1, 2), lost.numpy())
    return lost


def times_right(values: Tensor, right: Tensor, matrices: Matrices, left: Tensor) -> None:
    _times_right(values.numpy(), right.numpy(), _shapes(matrices), left.numpy())


def times_left(values: Tensor, left: Tensor, matrices: Matrices, right: Tensor) -> None:
    _times_left(values.numpy(), left.numpy(), _shapes(matrices), right.numpy())


def multiply(left: Tensor, right: Tensor, matrices: Matrices, out: Tensor) -> None:
    _multiply(left.numpy(), right.numpy(), _shapes(matrices), out.numpy())


def _shapes(matrices: Matrices) -> Array:
    return np.array([(m.r, m.a, m.b) for m in matrices.each], np.int64).reshape(-1, 3)


@compiled
def dot(x: Array, y: Array, products: Array) -> float:
    """Added in halves; `products` is a power of two long."""
    n = len(x)
    for i in range(n):
        products[i] = x[i] * y[i]
    for i in range(n, len(products)):
        products[i] = 0.0
    half = len(products) // 2
    while half > 0:
        for i in range(half):
            products[i] += products[half + i]
        half //= 2
    return products[0]  # type: ignore[no-any-return]


@compiled
def gram_schmidt(x: Array, products: Array, lost: Array) -> None:
    r, n = x.shape
    least = np.empty(r)
    for k in range(r):
        least[k] = dot(x[k], x[k], products) * DEPENDENT
    for k in range(r):
        squared = dot(x[k], x[k], products)
        lost[k] = not (squared > least[k] and squared < np.inf)
        length = np.sqrt(squared)
        for i in range(n):
            x[k, i] = 0.0 if lost[k] else x[k, i] / length
        for j in range(k + 1, r):
            along = dot(x[j], x[k], products)
            for i in range(n):  # apart from the subtraction: in one expression they may be fused, and not rounded in between
                products[i] = along * x[k, i]
            for i in range(n):
                x[j, i] -= products[i]


@compiled
def _orthonormalise(flat: Array, shapes: Array, lost: Array) -> None:
    start = first = 0
    for t in range(len(shapes)):
        r, n = shapes[t, 0], shapes[t, 1]
        length = 1
        while length < n:
            length *= 2
        products = np.empty(length)
        x32 = flat[start : start + r * n].reshape(r, n)
        x = x32.astype(np.float64)
        for _ in range(2):
            gram_schmidt(x, products, lost[first : first + r])
        x32[:] = x
        start, first = start + r * n, first + r


@compiled
def multiply_row(p: Array, q: Array, out: Array) -> None:
    """out = sum over k of p[k] q[k], from the left; four at a time, so that `out` is written once where r is up to four."""
    r, b = q.shape
    if r >= 4:
        p0, p1, p2, p3 = p[0], p[1], p[2], p[3]
        for j in range(b):
            out[j] = ((p0 * q[0, j] + p1 * q[1, j]) + p2 * q[2, j]) + p3 * q[3, j]
        done = 4
    else:
        p0 = p[0]
        for j in range(b):
            out[j] = p0 * q[0, j]
        done = 1
    for k in range(done, r):
        p0 = p[k]
        for j in range(b):
            out[j] += p0 * q[k, j]


@compiled
def _multiply(left: Array, right: Array, shapes: Array, out: Array) -> None:
    """For every (r, a, b): the next a b of `out` are P Q^T, of P as (r, a) in `left` and Q as (r, b) in `right`."""
    p_start = q_start = start = 0
    for t in range(len(shapes)):
        r, a, b = shapes[t, 0], shapes[t, 1], shapes[t, 2]
        p = left[p_start : p_start + r * a].reshape(r, a)
        q = right[q_start : q_start + r * b].reshape(r, b)
        for i in range(a):
            multiply_row(p[:, i], q, out[start + i * b : start + (i + 1) * b])
        p_start, q_start, start = p_start + r * a, q_start + r * b, start + a * b


@compiled
def dots(row: Array, q: Array, sums: Array) -> None:
    """sums[k, 0] = row . q[k]; the rest of `sums` is scratch. (If the compiler knew how many lanes there are it would unroll.)"""
    r, b = q.shape
    lanes = sums.shape[1]
    whole = b - b % lanes
    for k in range(r):
        for lane in range(lanes):
            sums[k, lane] = 0.0
        for j in range(whole, b):
            sums[k, j - whole] = row[j] * q[k, j]
    for j in range(0, whole, lanes):
        x = row[j : j + lanes]
        for k in range(r):
            y, total = q[k, j : j + lanes], sums[k]
            for lane in range(lanes):
                total[lane] += x[lane] * y[lane]
    for k in range(r):
        half = lanes // 2
        while half > 0:
            for lane in range(half):
                sums[k, lane] += sums[k, half + lane]
            half //= 2


@compiled
def _times_right(values: Array, right: Array, shapes: Array, left: Array) -> None:
    """For every (r, a, b): P^T = (M Q)^T, of the next a b of `values` as M and of Q^T as (r, b) in `right`."""
    p_start = q_start = start = 0
    for t in range(len(shapes)):
        r, a, b = shapes[t, 0], shapes[t, 1], shapes[t, 2]
        q = right[q_start : q_start + r * b].reshape(r, b)
        sums = np.empty((r, LANES), np.float32)
        for i in range(a):
            dots(values[start + i * b : start + (i + 1) * b], q, sums)
            for k in range(r):
                left[p_start + k * a + i] = sums[k, 0]
        p_start, q_start, start = p_start + r * a, q_start + r * b, start + a * b


@compiled
def _times_left(values: Array, left: Array, shapes: Array, right: Array) -> None:
    """For every (r, a, b): Q^T = P^T M, added up row by row of M."""
    right[:] = 0.0
    p_start = q_start = start = 0
    for t in range(len(shapes)):
        r, a, b = shapes[t, 0], shapes[t, 1], shapes[t, 2]
        q = right[q_start : q_start + r * b].reshape(r, b)
        for i in range(a):
            row = values[start + i * b : start + (i + 1) * b]
            for k in range(r):
                p = left[p_start + k * a + i]
                for j in range(b):
                    q[k, j] += p * row[j]
        p_start, q_start, start = p_start + r * a, q_start + r * b, start + a * b
