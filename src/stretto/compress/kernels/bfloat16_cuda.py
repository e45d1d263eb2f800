"""bfloat16 on a GPU: one pass each, on the bits. The same bytes as `BFloat16.encode_in_torch`."""

# What Triton compiles has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.compress.bfloat16 import BFloat16
from stretto.compress.kernels.device_blocks_cuda import Pieces, device_blocks_of, pieces_of
from stretto.compress.kernels.flag_cuda import new_flag, wait_for
from stretto.compress.kernels.random_numbers_cuda import as_argument, base_of, bits_of
from stretto.compress.kernels.starting_cuda import kernel
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sixteen_bits import halves_of, refuse_if

TILE = 4096
MAGNITUDE, SIGN, INFINITE = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x8000), tl.constexpr(0x7F80)


def encode(codec: BFloat16, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    """With `residual`, `values` becomes what the payload leaves out."""
    halves = torch.empty(len(values), dtype=torch.int16, device=values.device)
    if len(values) and codec.stochastic:
        cut = device_blocks_of(blocks, values.device)
        if "pieces" not in cut.made:
            cut.made["pieces"] = pieces_of(blocks.lengths, TILE, values.device)
        pieces: Pieces = cut.made["pieces"]
        _encode_stochastic[(len(pieces.owners),)](
            values, halves, cut.bounds, cut.keys, pieces.owners, pieces.firsts, as_argument(random.own), codec.limit_bits,
            RESIDUAL=residual, TILE=TILE,
        )  # fmt: skip
    elif len(values):
        grid = (triton.cdiv(len(values), TILE),)
        _encode[grid](values, halves, len(values), codec.limit_bits, RESIDUAL=residual, TILE=TILE)
    return halves.view(torch.uint8)


def decode(codec: BFloat16, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    """Waits for the device."""
    halves, problem = halves_of(payload, blocks), new_flag(out.device)
    if len(out):
        _decode[(triton.cdiv(len(out), TILE),)](halves, out, problem, len(out), ADDING=adding, TILE=TILE)
        refuse_if(bool(wait_for(problem, out.device)))


@kernel("limit", "n")
def _encode(values, halves, n, limit, RESIDUAL: tl.constexpr, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    at = first + tl.arange(0, TILE)
    if first + TILE <= n:  # a mask that may end anywhere would have every thread move one element at a time
        _encode_at(values, halves, at, None, limit, RESIDUAL)
    else:
        _encode_at(values, halves, at, at < n, limit, RESIDUAL)


@triton.jit
def _encode_at(values, halves, at, mask, limit, RESIDUAL: tl.constexpr):
    x = tl.load(values + at, mask=mask)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & MAGNITUDE, limit)
    _put(values, halves, at, mask, x, magnitude + 0x7FFF + ((magnitude >> 16) & 1), RESIDUAL)


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
def _decode(halves, out, problem, n, ADDING: tl.constexpr, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    at = first + tl.arange(0, TILE)
    if first + TILE <= n:
        _decode_at(halves, out, problem, at, None, ADDING)
    else:
        _decode_at(halves, out, problem, at, at < n, ADDING)


@triton.jit
def _decode_at(halves, out, problem, at, mask, ADDING: tl.constexpr):
    half = tl.load(halves + at, mask=mask).to(tl.int32)
    x = (half << 16).to(tl.float32, bitcast=True)
    if ADDING:
        x += tl.load(out + at, mask=mask)
    tl.store(out + at, x, mask=mask)
    bad = (half & 0x7FFF) >= INFINITE
    if mask is not None:
        bad &= mask
    worst = tl.max(bad.to(tl.int32), 0)
    tl.store(problem, worst, mask=worst > 0)
