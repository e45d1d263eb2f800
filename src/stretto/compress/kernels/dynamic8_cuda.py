"""The dynamic tree on a GPU: the same bytes as `dynamic8.py` computes in torch, in one pass and without its binary search.

A program takes some blocks and keeps them in registers from the search for the largest magnitude to the codes; of a block too
long for that the tiles are read twice. A code is found by one look-up (`dynamic8.cells`) in a table of 6 kB, which the first
cache holds. Quotients come from a division that rounds correctly (Triton's `/` may not), and products are rounded before
anything is added to them (`EXACT`).

Each block is a column of its program's tile, not a row: then Triton has look-ups made by the threads that hold the values. With
rows, every value would go to another thread and back by way of shared memory.
"""

# What Triton compiles has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.compress import dynamic8
from stretto.compress.kernels.device_blocks_cuda import device_blocks_of
from stretto.compress.kernels.flag_cuda import new_flag, wait_for
from stretto.compress.kernels.int8_cuda import extent, word_at
from stretto.compress.kernels.starting_cuda import kernel
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys
from stretto.errors import MalformedPayload

MAGNITUDE, FINITE = tl.constexpr(0x7FFFFFFF), tl.constexpr(dynamic8.FINITE)
SHIFT, LOWER, NEVER = tl.constexpr(dynamic8.SHIFT), tl.constexpr(dynamic8.LOWER), tl.constexpr(dynamic8.NEVER)
FIRST, LAST = tl.constexpr(dynamic8.cells().first), tl.constexpr(dynamic8.cells().last)
ZERO = tl.constexpr(dynamic8.ZERO)
EXACT: dict[str, Any] = {"enable_fp_fusion": False}


class Tables(NamedTuple):
    """In a device's memory."""

    entries: Tensor  # of `dynamic8.cells`
    table: Tensor  # the numbers that the codes stand for


@lru_cache(maxsize=64)
def tables_on(device: torch.device) -> Tables:
    return Tables(dynamic8.cells().entries.to(device), torch.tensor(dynamic8.table(), dtype=torch.float32, device=device))


def encode(codec: dynamic8.Dynamic8, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    payload = torch.empty(4 * len(blocks) + len(values), dtype=torch.uint8, device=values.device)
    if len(blocks):
        cut, scales = device_blocks_of(blocks, values.device), payload[: 4 * len(blocks)].view(torch.int32)
        _encode[cut.grid](
            values, payload, scales, cut.bounds, *tables_on(values.device), len(blocks), RESIDUAL=residual, **EXACT, **cut.shape
        )
    return payload


def decode(codec: dynamic8.Dynamic8, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    if len(payload) != codec.num_bytes(blocks):
        raise MalformedPayload(f"{len(payload)} bytes came where {codec.num_bytes(blocks)} must")
    if not len(blocks):
        return
    cut, problem = device_blocks_of(blocks, out.device), new_flag(out.device)
    _decode[cut.grid](
        payload, cut.bounds, tables_on(out.device).table, out, problem, len(blocks), ADDING=adding, **EXACT, **cut.shape
    )
    dynamic8.refuse_if(bool(wait_for(problem, out.device)))


@kernel("num_blocks")
def _encode(
    values, payload, scales, bounds, entries, table, num_blocks, RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    starts, lengths = extent(bounds, which, num_blocks, STEP)
    at, codes = values + starts[None, :], payload + 4 * num_blocks + starts[None, :]
    index = tl.arange(0, TILE)[:, None]
    x = tl.load(at + index, mask=index < lengths[None, :], other=0.0)
    largest = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, 0)
    if not WHOLE:
        for first in range(TILE, tl.max(lengths, 0), TILE):
            more = tl.load(at + first + index, mask=first + index < lengths[None, :], other=0.0)
            largest = tl.maximum(largest, tl.max(more.to(tl.int32, bitcast=True) & MAGNITUDE, 0))
    tl.store(scales + which, largest, mask=which < num_blocks)
    scale = largest.to(tl.float32, bitcast=True)[None, :]
    _say(at, codes, entries, table, index, lengths[None, :], x, scale, RESIDUAL)
    if not WHOLE:
        for first in range(TILE, tl.max(lengths, 0), TILE):
            more = tl.load(at + first + index, mask=first + index < lengths[None, :], other=0.0)
            _say(at, codes, entries, table, first + index, lengths[None, :], more, scale, RESIDUAL)


@triton.jit
def _say(at, codes, entries, table, index, lengths, x, scale, RESIDUAL: tl.constexpr):
    inside = index < lengths
    code = _code_of(entries, tl.div_rn(x, tl.broadcast_to(tl.where(scale > 0, scale, 1.0), x.shape)))
    tl.store(codes + index, code.to(tl.uint8), mask=inside)
    if RESIDUAL:
        tl.store(at + index, x - tl.load(table + code) * scale, mask=inside)


@triton.jit
def _code_of(entries, quotient):
    bits = quotient.to(tl.int32, bitcast=True)
    magnitude, negative = bits & MAGNITUDE, (bits < 0).to(tl.int32)
    cell = tl.minimum(tl.maximum(magnitude >> SHIFT, FIRST), LAST) - FIRST
    entry = tl.load(entries + cell)
    # halfway, the lower index: the smaller magnitude of a positive, the larger of a negative number
    above = ((magnitude & LOWER) + negative > (entry & NEVER)).to(tl.int32)
    steps = (entry >> (SHIFT + 1)) + above
    return tl.where(bits < 0, ZERO - tl.minimum(steps, ZERO), ZERO + steps)


@kernel("num_blocks")
def _decode(
    payload, bounds, table, out, problem, num_blocks, ADDING: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    starts, lengths = extent(bounds, which, num_blocks, STEP)
    bits = word_at(payload, which, which < num_blocks)
    codes, at = payload + 4 * num_blocks + starts[None, :], out + starts[None, :]
    index = tl.arange(0, TILE)[:, None]
    bad = tl.max(((bits < 0) | (bits > FINITE)).to(tl.int32), 0)
    if WHOLE:
        bad = tl.maximum(bad, _put(codes, at, table, index, lengths[None, :], bits[None, :], ADDING))
    else:
        for first in range(0, tl.max(lengths, 0), TILE):
            bad = tl.maximum(bad, _put(codes, at, table, first + index, lengths[None, :], bits[None, :], ADDING))
    tl.store(problem, bad, mask=bad > 0)


@triton.jit
def _put(codes, at, table, index, lengths, scale_bits, ADDING: tl.constexpr):
    """1 if a scale is zero where a code is not."""
    inside = index < lengths
    code = tl.load(codes + index, mask=inside, other=ZERO).to(tl.int32)
    x = tl.load(table + code) * scale_bits.to(tl.float32, bitcast=True)
    if ADDING:
        x += tl.load(at + index, mask=inside)
    tl.store(at + index, x, mask=inside)
    return tl.max(tl.max(((scale_bits == 0) & (code != ZERO)).to(tl.int32), 1), 0)
