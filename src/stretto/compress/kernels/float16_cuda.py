"""Halves on a GPU: one pass each. The same bytes as `Float16.encode_in_torch`, of finite values.

Magnitudes come down to the limit first and are rounded after, which is the same: the limit is a half, and rounding keeps order.
The device converts by itself, to the nearest half with ties to even, those below 2^-14 included.
"""

# What Triton compiles has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.compress.float16 import Float16
from stretto.compress.kernels.flag_cuda import new_flag, wait_for
from stretto.compress.kernels.starting_cuda import kernel
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sixteen_bits import halves_of, refuse_if

TILE = 4096
MAGNITUDE, INFINITE = tl.constexpr(0x7FFF), tl.constexpr(0x7C00)


def encode(codec: Float16, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    """With `residual`, `values` becomes what the payload leaves out."""
    halves = torch.empty(len(values), dtype=torch.float16, device=values.device)
    if len(values):
        _encode[(triton.cdiv(len(values), TILE),)](values, halves, len(values), codec.limit, RESIDUAL=residual, TILE=TILE)
    return halves.view(torch.uint8)


def decode(codec: Float16, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    """Waits for the device."""
    halves, problem = halves_of(payload, blocks), new_flag(out.device)
    if len(out):
        _decode[(triton.cdiv(len(out), TILE),)](halves, out, problem, len(out), ADDING=adding, TILE=TILE)
        refuse_if(bool(wait_for(problem, out.device)))


@kernel("n")
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
    half = tl.minimum(tl.maximum(x, -limit), limit).to(tl.float16)
    tl.store(halves + at, half, mask=mask)
    if RESIDUAL:
        tl.store(values + at, x - half.to(tl.float32), mask=mask)


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
    half = tl.load(halves + at, mask=mask)
    x = half.to(tl.float16, bitcast=True).to(tl.float32)
    if ADDING:
        x += tl.load(out + at, mask=mask)
    tl.store(out + at, x, mask=mask)
    bad = (half.to(tl.int32) & MAGNITUDE) >= INFINITE
    if mask is not None:
        bad &= mask
    worst = tl.max(bad.to(tl.int32), 0)
    tl.store(problem, worst, mask=worst > 0)
