"""Signed bytes with scales on a GPU: the same bytes as `int8.py` computes in torch, in one pass.

A program takes some blocks, a row of its tile each, and keeps them in registers from the search for the largest magnitude to the
division; of a block too long for that the tiles are read twice. Largest magnitudes are found among bits, as on the CPU. Quotients
come from a division that rounds correctly (Triton's `/` may not).
"""

# What Triton compiles has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.compress import int8
from stretto.compress.kernels.device_blocks_cuda import device_blocks_of
from stretto.compress.kernels.flag_cuda import new_flag, wait_for
from stretto.compress.kernels.random_numbers_cuda import as_argument, base_of, bits_of
from stretto.compress.kernels.starting_cuda import kernel
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys
from stretto.errors import MalformedPayload

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
LOWER, UPPER = tl.constexpr(int8.LOWER_BITS), tl.constexpr(~int8.LOWER_BITS)
SMALLEST, LARGEST, ALL_ZERO = tl.constexpr(int8.SMALLEST_SCALE), tl.constexpr(int8.LARGEST_SCALE), tl.constexpr(int8.ALL_ZERO)
ROUNDS = tl.constexpr(1.5 * 2**23)  # leaves no room for a fraction, so x + it - it is x rounded, ties to even
ULP = tl.constexpr(2.0**-24)
BAD_SCALE, BAD_CODE, NOT_ZERO = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # numbers in `int8.PROBLEMS`


def encode(codec: int8.Int8, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    payload = torch.empty(4 * len(blocks) + len(values), dtype=torch.uint8, device=values.device)
    if len(blocks):
        cut = device_blocks_of(blocks, values.device)
        _encode[cut.grid](
            values, payload, payload[: 4 * len(blocks)].view(torch.int32), cut.bounds, cut.keys, len(blocks),
            as_argument(random.own if codec.stochastic else 0), STOCHASTIC=codec.stochastic, RESIDUAL=residual, **cut.shape,
        )  # fmt: skip
    return payload


def decode(codec: int8.Int8, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    cut, problem = device_blocks_of(blocks, payload.device), new_flag(out.device)
    if len(payload) != 4 * cut.num_blocks + cut.num_elements:
        raise MalformedPayload(f"{len(payload)} bytes came where {4 * cut.num_blocks + cut.num_elements} must")
    if cut.num_blocks:
        _decode[cut.grid](payload, cut.bounds, out, problem, cut.num_blocks, ADDING=adding, **cut.shape)
        int8.refuse(wait_for(problem, out.device))


@kernel("key", "num_blocks")
def _encode(
    values, payload, scales, bounds, keys, num_blocks, key,
    STOCHASTIC: tl.constexpr, RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    starts, lengths = extent(bounds, rows, num_blocks, STEP)
    codes = payload + 4 * num_blocks
    base = base_of(tl.load(keys + rows, mask=rows < num_blocks, other=0), key)[:, None]
    columns = tl.arange(0, TILE)[None, :]
    inside = columns < lengths[:, None]
    x = tl.load(values + starts[:, None] + columns, mask=inside, other=0.0)
    largest = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, 1)
    if not WHOLE:
        for first in range(TILE, tl.max(lengths, 0), TILE):
            more = tl.load(values + starts[:, None] + first + columns, mask=first + columns < lengths[:, None], other=0.0)
            largest = tl.maximum(largest, tl.max(more.to(tl.int32, bitcast=True) & MAGNITUDE, 1))
    scale_bits = _scale_bits(largest)
    tl.store(scales + rows, scale_bits, mask=rows < num_blocks)
    scale = scale_bits.to(tl.float32, bitcast=True)[:, None]
    _quantise(values, codes, starts[:, None], columns, inside, x, scale, base, STOCHASTIC, RESIDUAL)
    if not WHOLE:
        for first in range(TILE, tl.max(lengths, 0), TILE):
            index = first + columns
            inside = index < lengths[:, None]
            x = tl.load(values + starts[:, None] + index, mask=inside, other=0.0)
            _quantise(values, codes, starts[:, None], index, inside, x, scale, base, STOCHASTIC, RESIDUAL)


@triton.jit
def extent(bounds, rows, num_blocks, STEP: tl.constexpr):
    """Where these blocks begin and how long they are; none where there is no block. Triton is told that STEP divides both."""
    present = rows < num_blocks
    starts = tl.multiple_of(tl.load(bounds + rows, mask=present, other=0), STEP)
    stops = tl.multiple_of(tl.load(bounds + rows + 1, mask=present, other=0), STEP)
    return starts, tl.multiple_of((stops - starts).to(tl.int32), STEP)


@triton.jit
def _scale_bits(largest):
    value = largest.to(tl.float32, bitcast=True)
    bits = tl.div_rn(value, tl.full(value.shape, 127.0, tl.float32)).to(tl.int32, bitcast=True)
    bits = tl.minimum(tl.maximum((bits + LOWER) & UPPER, SMALLEST), LARGEST)
    return tl.where(largest > ALL_ZERO, bits, 0)


@triton.jit
def _quantise(values, codes, starts, index, inside, x, scale, base, STOCHASTIC: tl.constexpr, RESIDUAL: tl.constexpr):
    quotient = tl.div_rn(x, tl.broadcast_to(tl.where(scale > 0, scale, 1.0), x.shape))
    if STOCHASTIC:
        down = tl.floor(quotient)
        uniform = (bits_of(base, index) >> 8).to(tl.int32).to(tl.float32) * ULP
        rounded = down + tl.where(uniform < quotient - down, 1.0, 0.0)
        rounded = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
    else:
        rounded = (tl.minimum(tl.maximum(quotient, -127.0), 127.0) + ROUNDS) - ROUNDS
    tl.store(codes + starts + index, rounded.to(tl.int32).to(tl.uint8), mask=inside)
    if RESIDUAL:
        tl.store(values + starts + index, x - rounded * scale, mask=inside)


@triton.jit
def word_at(payload, index, mask):
    """Word `index` of a payload that may lie at any address, as int32."""
    word = tl.load(payload + 4 * index, mask=mask, other=0).to(tl.int32)
    for j in tl.static_range(1, 4):
        word |= tl.load(payload + 4 * index + j, mask=mask, other=0).to(tl.int32) << (8 * j)
    return word


@kernel("num_blocks")
def _decode(
    payload, bounds, out, problem, num_blocks, ADDING: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    starts, lengths = extent(bounds, rows, num_blocks, STEP)
    bits = word_at(payload, rows, rows < num_blocks)
    known = (bits == 0) | ((bits >= SMALLEST) & (bits <= LARGEST) & ((bits & LOWER) == 0))
    codes, scale = payload + 4 * num_blocks, bits.to(tl.float32, bitcast=True)[:, None]
    columns = tl.arange(0, TILE)[None, :]
    if WHOLE:
        worst = _put(codes, out, starts[:, None], columns, lengths[:, None], scale, ADDING)
    else:
        worst = 0
        for first in range(0, tl.max(lengths, 0), TILE):
            worst = tl.maximum(worst, _put(codes, out, starts[:, None], first + columns, lengths[:, None], scale, ADDING))
    worst = tl.maximum(worst, tl.max(tl.where(known, 0, BAD_SCALE), 0))
    tl.store(problem, worst, mask=worst > 0)


@triton.jit
def _put(codes, out, starts, index, lengths, scale, ADDING: tl.constexpr):
    """The worst problem of these codes."""
    at, inside = starts + index, index < lengths
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int8, bitcast=True)
    x = code.to(tl.float32) * scale
    if ADDING:
        x += tl.load(out + at, mask=inside)
    tl.store(out + at, x, mask=inside)
    problems = tl.where(code == -128, BAD_CODE, tl.where((scale == 0) & (code != 0), NOT_ZERO, 0))
    return tl.max(tl.max(problems, 1), 0)
