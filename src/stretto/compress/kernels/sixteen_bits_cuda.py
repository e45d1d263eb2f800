"""Numbers of 16 bits on a GPU: one pass each. The same bytes as the references, of finite values.

bfloat16 (BRAIN) is rounded on the bits. Halves: magnitudes come down to the limit first and are rounded after, which is the same:
the limit is a half, and rounding keeps order. The device converts by itself, to the nearest half with ties to even, those below
2^-14 included.
"""

# What Triton compiles has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.compress.bfloat16 import BFloat16
from stretto.compress.float16 import Float16
from stretto.compress.kernels.device_blocks_cuda import Pieces, device_blocks_of, pieces_of
from stretto.compress.kernels.flag_cuda import new_flag, wait_for
from stretto.compress.kernels.random_numbers_cuda import as_argument, base_of, bits_of
from stretto.compress.kernels.starting_cuda import kernel
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sixteen_bits import halves_of, refuse_if

TILE = 4096
MAGNITUDE, SIGN = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x8000)
HALF_MAGNITUDE, HALF_INFINITE, BRAIN_INFINITE = tl.constexpr(0x7FFF), tl.constexpr(0x7C00), tl.constexpr(0x7F80)


def encode(codec: Float16 | BFloat16, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    brain = isinstance(codec, BFloat16)
    halves = torch.empty(len(values), dtype=torch.int16 if brain else torch.float16, device=values.device)
    if len(values) and isinstance(codec, BFloat16) and codec.stochastic:
        cut = device_blocks_of(blocks, values.device)
        if "pieces" not in cut.made:
            cut.made["pieces"] = pieces_of(blocks.lengths, TILE, values.device)
        pieces: Pieces = cut.made["pieces"]
        _encode_stochastic[(len(pieces.owners),)](
            values, halves, cut.bounds, cut.keys, pieces.owners, pieces.firsts, as_argument(random.own), codec.limit_bits,
            RESIDUAL=residual, TILE=TILE,
        )  # fmt: skip
    elif len(values):
        grid, limit = (triton.cdiv(len(values), TILE),), codec.limit_bits if isinstance(codec, BFloat16) else codec.limit
        _encode[grid](values, halves, len(values), limit, BRAIN=brain, RESIDUAL=residual, TILE=TILE)
    return halves.view(torch.uint8)


def decode(codec: Float16 | BFloat16, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    halves, problem, brain = halves_of(payload, blocks), new_flag(out.device), isinstance(codec, BFloat16)
    if len(out):
        _decode[(triton.cdiv(len(out), TILE),)](halves, out, problem, len(out), BRAIN=brain, ADDING=adding, TILE=TILE)
        refuse_if(bool(wait_for(problem, out.device)))


@kernel("limit", "n")
def _encode(values, halves, n, limit, BRAIN: tl.constexpr, RESIDUAL: tl.constexpr, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    at = first + tl.arange(0, TILE)
    if first + TILE <= n:  # a mask that may end anywhere would have every thread move one element at a time
        _encode_at(values, halves, at, None, limit, BRAIN, RESIDUAL)
    else:
        _encode_at(values, halves, at, at < n, limit, BRAIN, RESIDUAL)


@triton.jit
def _encode_at(values, halves, at, mask, limit, BRAIN: tl.constexpr, RESIDUAL: tl.constexpr):
    x = tl.load(values + at, mask=mask)
    if BRAIN:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = tl.minimum(bits & MAGNITUDE, limit)
        _put(values, halves, at, mask, x, magnitude + 0x7FFF + ((magnitude >> 16) & 1), RESIDUAL)
    else:
        half = tl.minimum(tl.maximum(x, -limit), limit).to(tl.float16)
        tl.store(halves + at, half, mask=mask)
        if RESIDUAL:
            tl.store(values + at, x - half.to(tl.float32), mask=mask)


@triton.jit
def _put(values, halves, at, mask, x, magnitude, RESIDUAL: tl.constexpr):
    half = (magnitude >> 16) | ((x.to(tl.int32, bitcast=True) >> 16) & SIGN)
    tl.store(halves + at, half.to(tl.int16), mask=mask)
    if RESIDUAL:
        tl.store(values + at, x - (half << 16).to(tl.float32, bitcast=True), mask=mask)


@kernel("key", "limit")
def _encode_stochastic(values, halves, bounds, keys, owners, firsts, key, limit, RESIDUAL: tl.constexpr, TILE: tl.constexpr):
    block = tl.load(owners + tl.program_id(0))
    start, stop = tl.load(bounds + block), tl.load(bounds + block + 1)
    index = tl.load(firsts + tl.program_id(0)) + tl.arange(0, TILE)
    at, mask = start + index, start + index < stop
    x = tl.load(values + at, mask=mask)
    magnitude = tl.minimum(x.to(tl.int32, bitcast=True) & MAGNITUDE, limit)
    drawn = bits_of(base_of(tl.load(keys + block), key), index) >> 16
    _put(values, halves, at, mask, x, magnitude + drawn.to(tl.int32), RESIDUAL)


@kernel("n")
def _decode(halves, out, problem, n, BRAIN: tl.constexpr, ADDING: tl.constexpr, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    at = first + tl.arange(0, TILE)
    if first + TILE <= n:
        _decode_at(halves, out, problem, at, None, BRAIN, ADDING)
    else:
        _decode_at(halves, out, problem, at, at < n, BRAIN, ADDING)


@triton.jit
def _decode_at(halves, out, problem, at, mask, BRAIN: tl.constexpr, ADDING: tl.constexpr):
    half = tl.load(halves + at, mask=mask)
    x = (half.to(tl.int32) << 16).to(tl.float32, bitcast=True) if BRAIN else half.to(tl.float16, bitcast=True).to(tl.float32)
    if ADDING:
        x += tl.load(out + at, mask=mask)
    tl.store(out + at, x, mask=mask)
    bad = (half.to(tl.int32) & HALF_MAGNITUDE) >= (BRAIN_INFINITE if BRAIN else HALF_INFINITE)
    if mask is not None:
        bad &= mask
    worst = tl.max(bad.to(tl.int32), 0)
    tl.store(problem, worst, mask=worst > 0)
