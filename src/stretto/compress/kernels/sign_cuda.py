"""Signs on a GPU: a block is a row of a program's tile, read once for its mean magnitude and its bits; long ones tile by tile.

The same bytes as the reference, but for the scale's last bit where two orders of adding in float64 round to different float32.
"""

# What Triton compiles has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.compress import bits
from stretto.compress.kernels.bits_cuda import BAD_PADDING, BAD_SCALE, pack
from stretto.compress.kernels.device_blocks_cuda import device_blocks_of
from stretto.compress.kernels.flag_cuda import new_flag, wait_for
from stretto.compress.kernels.int8_cuda import extent, word_at
from stretto.compress.kernels.starting_cuda import kernel
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sign import Sign
from stretto.errors import MalformedPayload


def encode(codec: Sign, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    cut, scaled = device_blocks_of(blocks, values.device), not codec.vote
    header = 4 * len(blocks) if scaled else 0
    payload = torch.empty(header + cut.num_packed, dtype=torch.uint8, device=values.device)
    scales = payload[:header].view(torch.float32)
    if len(blocks):
        _encode[cut.grid](
            values, payload, scales, cut.bounds, cut.byte_starts, len(blocks), SCALED=scaled, RESIDUAL=residual, **cut.shape
        )
    return payload


def decode(codec: Sign, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    cut, scaled = device_blocks_of(blocks, out.device), not codec.vote
    expected = cut.num_packed + (4 * len(blocks) if scaled else 0)
    if len(payload) != expected:
        raise MalformedPayload(f"{len(payload)} bytes came where {expected} must")
    if not len(blocks):
        return
    problem = new_flag(out.device)
    _decode[cut.grid](payload, cut.bounds, cut.byte_starts, out, problem, len(blocks), SCALED=scaled, ADDING=adding, **cut.shape)
    bits.check(wait_for(problem, out.device))


@kernel("num_blocks")
def _encode(
    values, payload, scales, bounds, byte_starts, num_blocks, SCALED: tl.constexpr, RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    starts, lengths = extent(bounds, rows, num_blocks, STEP)
    packed = payload + 4 * num_blocks if SCALED else payload
    packed += tl.load(byte_starts + rows, mask=rows < num_blocks, other=0)[:, None]
    at, columns = values + starts[:, None], tl.arange(0, TILE)[None, :]
    x = tl.load(at + columns, mask=columns < lengths[:, None], other=0.0)
    widths = ((lengths + 7) // 8)[:, None]
    pack(packed, ((x >= 0) & (columns < lengths[:, None])).to(tl.int32), 0, widths, 1, ROWS, TILE)
    total = tl.sum(tl.abs(x).to(tl.float64), 1)
    if not WHOLE:
        for first in range(TILE, tl.max(lengths, 0), TILE):
            inside = first + columns < lengths[:, None]
            more = tl.load(at + first + columns, mask=inside, other=0.0)
            pack(packed, ((more >= 0) & inside).to(tl.int32), first, widths, 1, ROWS, TILE)
            total += tl.sum(tl.abs(more).to(tl.float64), 1)
    if SCALED:
        scale = (total / tl.maximum(lengths, 1).to(tl.float64)).to(tl.float32)
        tl.store(scales + rows, scale, mask=rows < num_blocks)
        if RESIDUAL:
            _subtract(at + columns, x, columns < lengths[:, None], scale[:, None])
            if not WHOLE:
                for first in range(TILE, tl.max(lengths, 0), TILE):
                    inside = first + columns < lengths[:, None]
                    more = tl.load(at + first + columns, mask=inside, other=0.0)
                    _subtract(at + first + columns, more, inside, scale[:, None])


@triton.jit
def _subtract(at, x, inside, scale):
    tl.store(at, x - tl.where(x >= 0, scale, -scale), mask=inside)


@kernel("num_blocks")
def _decode(
    payload, bounds, byte_starts, out, problem, num_blocks, SCALED: tl.constexpr, ADDING: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = rows < num_blocks
    starts, lengths = extent(bounds, rows, num_blocks, STEP)
    packed, scale = payload, tl.full((ROWS,), 1.0, tl.float32)
    if SCALED:
        packed += 4 * num_blocks
        scale = word_at(payload, rows, present).to(tl.float32, bitcast=True)
    packed += tl.load(byte_starts + rows, mask=present, other=0)[:, None]
    columns = tl.arange(0, TILE)[None, :]
    if WHOLE:
        _put(packed, out + starts[:, None], columns, lengths[:, None], scale[:, None], ADDING)
    else:
        for first in range(0, tl.max(lengths, 0), TILE):
            _put(packed, out + starts[:, None], first + columns, lengths[:, None], scale[:, None], ADDING)
    last = tl.load(packed + (lengths[:, None] - 1) // 8, mask=present[:, None] & (lengths[:, None] % 8 > 0), other=0).to(tl.int32)
    padding = tl.max(tl.where((last >> (lengths[:, None] % 8)) != 0, BAD_PADDING, 0), 1)
    sound = (scale >= 0) & (scale < float("inf"))
    worst = tl.max(tl.maximum(tl.where(lengths % 8 > 0, padding, 0), tl.where(sound, 0, BAD_SCALE)), 0)
    tl.store(problem, worst, mask=worst > 0)


@triton.jit
def _put(packed, out, index, lengths, scale, ADDING: tl.constexpr):
    inside = index < lengths
    eight = tl.load(packed + index // 8, mask=inside, other=0).to(tl.int32)
    x = tl.where(((eight >> (index % 8)) & 1) != 0, scale, -scale)
    if ADDING:
        x += tl.load(out + index, mask=inside)
    tl.store(out + index, x, mask=inside)
