"""Random levels on a GPU: a block is a row of a program's tile, read once for its unit and its levels; those longer than a tile
twice.

The same bytes as the reference, but for the last bit of an l2 norm or a clipped unit where two orders of adding in float64 round
to different float32 (and then the few levels that hang on it). Quotients come from a division that rounds correctly (Triton's `/`
may not), and products are rounded before anything is added to them (`enable_fp_fusion=False`).
"""

# What Triton compiles has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.compress import bits as packing
from stretto.compress.kernels.bits_cuda import (
    blank,
    check_length,
    field_at,
    largest_of,
    measure,
    pack,
    place,
    plan_of,
    problem_of_rows,
    squares_of,
)
from stretto.compress.kernels.flag_cuda import new_flag, wait_for
from stretto.compress.kernels.int8_cuda import extent, word_at
from stretto.compress.kernels.random_numbers_cuda import as_argument, base_of, bits_of
from stretto.compress.kernels.starting_cuda import kernel
from stretto.compress.layout import Blocks
from stretto.compress.levels import RandomLevels
from stretto.compress.random_numbers import RandomKeys

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
ULP = tl.constexpr(2.0**-24)
BAD_FIELD = tl.constexpr(packing.BAD_FIELD)


def encode(codec: RandomLevels, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    levels = codec.levels
    plan = plan_of(blocks, levels.bits, values.device)
    payload, units = blank(plan, values.device)
    if not plan.num_blocks:
        return payload
    if not plan.whole:
        units.copy_(levels.unit(*measure(values, plan, squares=levels.needs_squares), plan.columns[0].diff()))
    clipped = levels.clip < math.inf
    # The clip is compiled in: as an argument it would be a float32.
    _encode[plan.grid](
        values, payload, units, *plan.columns, plan.keys, plan.num_blocks, as_argument(random.own),
        BITS=levels.bits, LEVELS=float(levels.number), L2=levels.l2, CLIP=levels.clip if plan.whole and clipped else None,
        CLIPPED=clipped, RESIDUAL=residual, **plan.shape, enable_fp_fusion=False,
    )  # fmt: skip
    return payload


def decode(codec: RandomLevels, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    levels = codec.levels
    plan = plan_of(blocks, levels.bits, out.device)
    check_length(payload, plan)
    if not plan.num_blocks:
        return
    problem = new_flag(out.device)
    _decode[plan.grid](
        payload, out, problem, *plan.columns, plan.num_blocks,
        BITS=levels.bits, LEVELS=float(levels.number), ADDING=adding, **plan.shape, enable_fp_fusion=False,
    )  # fmt: skip
    packing.check(wait_for(problem, out.device))


@kernel("num_blocks", "key")
def _encode(
    values, payload, units, bounds, packed_bounds, owners, numbers, keys, num_blocks, key,
    BITS: tl.constexpr, LEVELS: tl.constexpr, L2: tl.constexpr, CLIP: tl.constexpr, CLIPPED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PACKED_STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    rows, first = place(owners, numbers, WHOLE, ROWS, TILE)
    starts, lengths = extent(bounds, rows, num_blocks, STEP)
    first_bytes, widths = extent(packed_bounds, rows, num_blocks, PACKED_STEP)
    base = base_of(tl.load(keys + rows, mask=rows < num_blocks, other=0), key)
    at, index = values + starts[:, None], first + tl.arange(0, TILE)[None, :]
    x = tl.load(at + index, mask=index < lengths[:, None], other=0.0)
    if WHOLE:
        unit = tl.minimum(tl.sqrt(squares_of(x)), LARGEST).to(tl.float32) if L2 else largest_of(x)
        if CLIP is not None:
            sigma = tl.sqrt(squares_of(x) / tl.maximum(lengths, 1).to(tl.float64))
            unit = tl.minimum(unit, (tl.full(sigma.shape, CLIP, tl.float64) * sigma).to(tl.float32))
        tl.store(units + rows, unit, mask=rows < num_blocks)
    else:
        unit = tl.load(units + rows)
    field = _field(x, unit[:, None], base[:, None], index, LEVELS, CLIPPED)  # 0 behind the end of a block, where x is 0
    pack(payload + 4 * num_blocks + first_bytes[:, None], field, first, widths[:, None], BITS, ROWS, TILE)
    if RESIDUAL:
        tl.store(at + index, x - _value(field, unit[:, None], LEVELS), mask=index < lengths[:, None])


@triton.jit
def _field(x, unit, base, index, LEVELS: tl.constexpr, CLIPPED: tl.constexpr):
    size = tl.minimum(tl.abs(x), unit) if CLIPPED else tl.abs(x)
    exact = tl.div_rn(size, tl.broadcast_to(tl.where(unit > 0, unit, 1.0), x.shape)) * LEVELS
    down = tl.floor(exact)
    uniform = (bits_of(base, index) >> 8).to(tl.int32).to(tl.float32) * ULP
    level = down.to(tl.int32) + (uniform < exact - down).to(tl.int32)
    return 2 * level + ((x < 0) & (level > 0)).to(tl.int32)


@triton.jit
def _value(field, unit, LEVELS: tl.constexpr):
    """unit * (level / levels), each rounded as in `levels.py`.

    A quotient that may be off by a bit, corrected by what it leaves over: exact for all levels, faster than `div_rn`.
    """
    level = (field >> 1).to(tl.float32)
    levels, inverse = tl.full(level.shape, LEVELS, tl.float32), tl.full(level.shape, 1.0 / LEVELS, tl.float32)
    quotient = level * inverse
    quotient = tl.fma(tl.fma(-quotient, levels, level), inverse, quotient)
    size = unit * quotient
    return tl.where((field & 1) != 0, -size, size)


@kernel("num_blocks")
def _decode(
    payload, out, problem, bounds, packed_bounds, owners, numbers, num_blocks,
    BITS: tl.constexpr, LEVELS: tl.constexpr, ADDING: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PACKED_STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    rows, first = place(owners, numbers, WHOLE, ROWS, TILE)
    starts, lengths = extent(bounds, rows, num_blocks, STEP)
    first_bytes, widths = extent(packed_bounds, rows, num_blocks, PACKED_STEP)
    unit = word_at(payload, rows, rows < num_blocks).to(tl.float32, bitcast=True)
    packed, at, index = payload + 4 * num_blocks + first_bytes, out + starts[:, None], first + tl.arange(0, TILE)[None, :]
    inside = index < lengths[:, None]
    field = field_at(packed[:, None], index, inside, BITS)
    x = _value(field, unit[:, None], LEVELS)
    if ADDING:
        x += tl.load(at + index, mask=inside)
    tl.store(at + index, x, mask=inside)
    bad = tl.max(tl.max(tl.where(field == 1, BAD_FIELD, 0), 1), 0)
    worst = tl.maximum(bad, problem_of_rows(packed, lengths, widths, unit, BITS))
    tl.store(problem, worst, mask=worst > 0)
