"""Ternary values on a GPU: a block is a row of a program's tile, read once for its scale and its codes; those longer than a tile
twice.

The same bytes as the reference, but for a clipped scale's last bit where two orders of adding in float64 round to different
float32 (and then the few codes that hang on it). Quotients come from a division that rounds correctly (Triton's `/` may not).
"""

# What Triton compiles has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.compress import bits
from stretto.compress.kernels.bits_cuda import (
    PackingPlan,
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
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.tern_grad import TernGrad

ULP = tl.constexpr(2.0**-24)
PLUS, MINUS, RESERVED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
BAD_FIELD = tl.constexpr(bits.BAD_FIELD)


def encode(codec: TernGrad, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    """With `residual`, `values` becomes what the payload leaves out."""
    clip = codec.clip_at
    plan = plan_of(blocks, 2, values.device)
    payload, scales = blank(plan, values.device)
    if not plan.num_blocks:
        return payload
    if not plan.whole:
        scales.copy_(_scales(values, plan, clip))
    # `clip` is compiled in: as an argument it would be a float32.
    _encode[plan.grid](
        values, payload, scales, *plan.columns, plan.keys, plan.num_blocks, as_argument(random.own),
        CLIP=clip if plan.whole and clip < math.inf else None, RESIDUAL=residual, **plan.shape,
    )  # fmt: skip
    return payload


def _scales(values: Tensor, plan: PackingPlan, clip: float) -> Tensor:
    largest, squares = measure(values, plan, squares=clip < math.inf)
    if clip == math.inf:
        return largest
    return torch.minimum(largest, (clip * (squares / plan.columns[0].diff()).sqrt()).float())


def decode(codec: TernGrad, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    """Waits for the device."""
    plan = plan_of(blocks, 2, out.device)
    check_length(payload, plan)
    if not plan.num_blocks:
        return
    problem = new_flag(out.device)
    _decode[plan.grid](payload, out, problem, *plan.columns, plan.num_blocks, ADDING=adding, **plan.shape)
    bits.check(wait_for(problem, out.device))


@kernel("num_blocks", "key")
def _encode(
    values, payload, scales, bounds, packed_bounds, owners, numbers, keys, num_blocks, key,
    CLIP: tl.constexpr, RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PACKED_STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    rows, first = place(owners, numbers, WHOLE, ROWS, TILE)
    starts, lengths = extent(bounds, rows, num_blocks, STEP)
    first_bytes, widths = extent(packed_bounds, rows, num_blocks, PACKED_STEP)
    base = base_of(tl.load(keys + rows, mask=rows < num_blocks, other=0), key)
    at, index = values + starts[:, None], first + tl.arange(0, TILE)[None, :]
    x = tl.load(at + index, mask=index < lengths[:, None], other=0.0)
    if WHOLE:
        scale = largest_of(x)
        if CLIP is not None:
            sigma = tl.sqrt(squares_of(x) / tl.maximum(lengths, 1).to(tl.float64))
            scale = tl.minimum(scale, (tl.full(sigma.shape, CLIP, tl.float64) * sigma).to(tl.float32))
        tl.store(scales + rows, scale, mask=rows < num_blocks)
    else:
        scale = tl.load(scales + rows)
    code = _code(x, scale[:, None], base[:, None], index)  # 0 behind the end of a block, where x is 0
    pack(payload + 4 * num_blocks + first_bytes[:, None], code, first, widths[:, None], 2, ROWS, TILE)
    if RESIDUAL:
        tl.store(at + index, x - _value(code, scale[:, None]), mask=index < lengths[:, None])


@triton.jit
def _code(x, scale, base, index):
    unit = tl.broadcast_to(tl.where(scale > 0, scale, 1.0), x.shape)  # a scale of 0: min(|x|, 0) is never drawn
    probability = tl.div_rn(tl.minimum(tl.abs(x), scale), unit)
    uniform = (bits_of(base, index) >> 8).to(tl.int32).to(tl.float32) * ULP
    return tl.where(uniform < probability, tl.where(x < 0, MINUS, PLUS), 0)


@triton.jit
def _value(code, scale):
    return tl.where(code == PLUS, scale, tl.where(code == MINUS, -scale, 0.0))


@kernel("num_blocks")
def _decode(
    payload, out, problem, bounds, packed_bounds, owners, numbers, num_blocks, ADDING: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, PACKED_STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    rows, first = place(owners, numbers, WHOLE, ROWS, TILE)
    starts, lengths = extent(bounds, rows, num_blocks, STEP)
    first_bytes, widths = extent(packed_bounds, rows, num_blocks, PACKED_STEP)
    scale = word_at(payload, rows, rows < num_blocks).to(tl.float32, bitcast=True)
    packed, at, index = payload + 4 * num_blocks + first_bytes, out + starts[:, None], first + tl.arange(0, TILE)[None, :]
    inside = index < lengths[:, None]
    code = field_at(packed[:, None], index, inside, 2)
    x = _value(code, scale[:, None])
    if ADDING:
        x += tl.load(at + index, mask=inside)
    tl.store(at + index, x, mask=inside)
    bad = tl.max(tl.max(tl.where(code == RESERVED, BAD_FIELD, 0), 1), 0)
    worst = tl.maximum(bad, problem_of_rows(packed, lengths, widths, scale, 2))
    tl.store(problem, worst, mask=worst > 0)
