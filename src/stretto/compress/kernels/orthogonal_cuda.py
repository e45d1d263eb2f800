"""Orthonormal vectors on a GPU: the bits of the reference in `orthogonal.py`, in one launch and with no waiting.

A program takes one tensor, of which it keeps a copy in float64 in the device's memory, and one vector x_j after the other:

    x_j <- x_j - (x_j . x_k) x_k   for k = 1, ..., j - 1,    x_j <- x_j / |x_j|

which does to every vector what the reference does, in the same order. There is one pass over x_j for each k: the same tile gives
up its part of x_k and is multiplied by x_(k+1), and by itself in the end, for the next dot product.

Dot products are added in halves. With t = 1/ROWS of the padded length, the sums of ROWS elements t apart are what is left after
log2(ROWS) halvings. They do not depend on each other, so a tile is ROWS pieces of COLUMNS elements, t apart: a column for each
thread. These sums are added in the same way until COLUMNS are left, and those from thread to thread. Where a tile is larger than
a padded vector, it is filled up with -0.0: x + -0.0 is x for every x, so the sum is that of fewer halvings.

Memory while it runs: 8 bytes per element, and up to 8/ROWS for sums.
"""

# What Triton compiles has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.compress import orthogonal
from stretto.compress.kernels.starting_cuda import kernel
from stretto.compress.orthogonal import Shapes, power_of_two

DEPENDENT = tl.constexpr(orthogonal.DEPENDENT)
NEGATIVE_ZERO = tl.constexpr(-(1 << 63))  # its bits: Triton makes 0.0 of a constant -0.0
SMALL, LARGE = (8, 128), (16, 256)  # ROWS and COLUMNS of a tile
MOST = 1 << 20  # elements of a tensor that one program takes: where r^2 n operations are many, all of the device does them sooner
NUM_FIELDS = tl.constexpr(6)  # of a tensor in the table


@dataclass(frozen=True, slots=True)
class GramSchmidtPlan:
    """What does not depend on the values. `table`, in the device's memory: of each tensor its r, its n, n padded, where in `flat`
    it begins, where in the scratch memory its sums begin, and the number of its first vector. `too_large`: that of the others."""

    table: Tensor
    too_large: list[tuple[int, int, int, int, int, int]]
    num_vectors: int
    num_scratch: int
    rows: int
    columns: int


@lru_cache(maxsize=1024)  # two for each bucket
def plan_of(shapes: Shapes, device: torch.device) -> GramSchmidtPlan:
    rows, columns = SMALL if all(n <= SMALL[0] * SMALL[1] for _, n in shapes) else LARGE
    fields, start, first = [], 0, 0
    sums = sum(r * n for r, n in shapes)
    for r, n in shapes:
        fields.append((r, n, power_of_two(n), start, sums, first))
        start, first = start + r * n, first + r
        if n > rows * columns:
            sums += 2 * power_of_two(n) // rows
    fields.sort(key=lambda one: -(one[0] ** 2) * one[1])  # what takes longest begins first
    mine = [one for one in fields if one[0] * one[1] <= MOST]
    too_large = [one for one in fields if one[0] * one[1] > MOST]
    return GramSchmidtPlan(torch.tensor(mine, dtype=torch.int64, device="cpu").to(device), too_large, first, sums, rows, columns)


def orthonormalise(flat: Tensor, shapes: Shapes) -> Tensor:
    """See `orthogonal.orthonormalise`."""
    plan = plan_of(shapes, flat.device)
    lost = torch.empty(plan.num_vectors, dtype=torch.bool, device=flat.device)
    if len(plan.table):
        scratch = torch.empty(plan.num_scratch, dtype=torch.float64, device=flat.device)
        _orthonormalise[(len(plan.table),)](
            flat, plan.table, scratch, lost.view(torch.uint8), ROWS=plan.rows, COLUMNS=plan.columns,
            LOG_ROWS=plan.rows.bit_length() - 1, LOG_COLUMNS=plan.columns.bit_length() - 1,
            num_warps=plan.columns // 32, enable_fp_fusion=False,
        )  # fmt: skip
    for r, n, _, start, _, first in plan.too_large:
        lost[first : first + r] = orthogonal.orthonormalise.reference(flat[start : start + r * n], ((r, n),))
    return lost


@kernel()
def _orthonormalise(
    flat, table, scratch, lost,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOG_ROWS: tl.constexpr, LOG_COLUMNS: tl.constexpr,
):  # fmt: skip
    fields = table + tl.program_id(0) * NUM_FIELDS
    r, n, padded = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    start, sums, first = tl.load(fields + 3), scratch + tl.load(fields + 4), tl.load(fields + 5)
    x = scratch + start
    TILE: tl.constexpr = ROWS * COLUMNS
    for at in range(0, r * n, TILE):
        index = at + tl.arange(0, TILE)
        tl.store(x + index, tl.load(flat + start + index, mask=index < r * n).to(tl.float64), mask=index < r * n)
    for _ in range(2):
        for j in range(r):
            mine = x + j * n
            least = _dot(mine, mine, mine, 0.0, sums, n, padded, False, True, ROWS, COLUMNS, LOG_ROWS, LOG_COLUMNS)
            least *= tl.full((), DEPENDENT, tl.float64)
            total = _dot(mine, x, mine, 0.0, sums, n, padded, False, True, ROWS, COLUMNS, LOG_ROWS, LOG_COLUMNS)
            for k in range(j):
                unit = x + k * n
                total = _dot(mine, unit + n, unit, total, sums, n, padded, True, k + 1 < j, ROWS, COLUMNS, LOG_ROWS, LOG_COLUMNS)
            good = (total > least) & (total < float("inf"))  # the total is the squared length now
            _divide(mine, n, good, tl.sqrt(total), TILE)
            tl.store(lost + first + j, tl.where(good, 0, 1).to(tl.uint8))
    tl.debug_barrier()
    for at in range(0, r * n, TILE):
        index = at + tl.arange(0, TILE)
        tl.store(flat + start + index, tl.load(x + index, mask=index < r * n).to(tl.float32), mask=index < r * n)


@triton.jit
def _dot(
    x, y, unit, along, sums, n, padded, SUBTRACT: tl.constexpr, is_other,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOG_ROWS: tl.constexpr, LOG_COLUMNS: tl.constexpr,
):  # fmt: skip
    """x . y. With SUBTRACT, x becomes x - along unit before; then, unless `is_other`, y is what x has become."""
    tl.debug_barrier()  # what other threads have written is there, and what they have read in `sums` may be overwritten
    index = tl.arange(0, ROWS * COLUMNS)
    row, column = (index // COLUMNS).to(tl.int64), index % COLUMNS
    nothing = tl.full((ROWS * COLUMNS,), NEGATIVE_ZERO, tl.int64).to(tl.float64, bitcast=True)
    length = tl.maximum(padded // ROWS, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float64)
    for first in range(0, length, COLUMNS):
        at = row * length + first + column
        a = tl.load(x + at, mask=at < n, other=0.0)
        b = tl.load(y + at, mask=(at < n) & is_other, other=0.0)
        if SUBTRACT:
            a -= along * tl.load(unit + at, mask=at < n, other=0.0)
            tl.store(x + at, a, mask=at < n)
            b = tl.where(is_other, b, a)
        total = _halved(tl.where(at < padded, a * b, nothing), LOG_ROWS)
        if length > COLUMNS:
            tl.store(sums + first + tl.arange(0, COLUMNS), total)
    while length > COLUMNS:
        tl.debug_barrier()
        before, length = length, tl.maximum(length // ROWS, COLUMNS)
        for first in range(0, length, COLUMNS):
            at = row * length + first + column
            total = _halved(tl.where(at < before, tl.load(sums + at, mask=at < before, other=0.0), nothing), LOG_ROWS)
            tl.store(sums + before + first + tl.arange(0, COLUMNS), total)
        sums += before
    return tl.sum(_halved(total, LOG_COLUMNS), 0)


@triton.jit
def _halved(x, TIMES: tl.constexpr):
    """Add the second half to the first, so many times. (A sum of two numbers does not depend on their order.)"""
    for _ in tl.static_range(TIMES):
        x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), 0)
    return x


@triton.jit
def _divide(x, n, good, length, TILE: tl.constexpr):
    tl.debug_barrier()
    for at in range(0, n, TILE):
        index = at + tl.arange(0, TILE)
        value = tl.load(x + index, mask=index < n, other=0.0)
        tl.store(x + index, tl.where(good, value / length, 0.0), mask=index < n)
