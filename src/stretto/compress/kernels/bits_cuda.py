"""Fields of 1 to 8 bits on a GPU, inside other kernels: the layout of `bits.py`, packed and unpacked in registers.

    values of a tile:   f0 f1 f2 f3 f4 f5 f6 f7 | f8 ...          eight fields make exactly `bits` bytes
    bytes:              b0 ... b(bits-1)        | b(bits) ...

Where `bits` divides 8, a byte has 8 / bits whole fields, and so many are put together; else eight, in a word of 64 bits. To
unpack, every value reads its own byte, and the next one if its field goes on there: neighbours read the same bytes, which are in
the first cache by then. A payload may lie at any address.

A program takes some whole blocks, each a row of its tile. If a block is too long for that, programs take a tile each of one block
instead, and what describes a whole block (`measure`) must be known before.
"""

# What Triton compiles has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.compress import bits as packing
from stretto.compress.kernels.device_blocks_cuda import LONGEST, VECTOR, device_blocks_of, pieces_of
from stretto.compress.kernels.int8_cuda import extent
from stretto.compress.kernels.starting_cuda import kernel
from stretto.compress.layout import Blocks
from stretto.errors import MalformedPayload

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
BAD_SCALE, BAD_PADDING = tl.constexpr(packing.BAD_SCALE), tl.constexpr(packing.BAD_PADDING)


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """How blocks are shared out among programs. `columns`, for kernels: `bounds`; `packed_bounds`, where each block's bytes begin
    behind the scales, and the last ends; and where programs take tiles of a block (not `whole`), its number (`owners`), and which
    of its tiles it is (`numbers`)."""

    columns: tuple[Tensor, Tensor, Tensor, Tensor]
    keys: Tensor
    num_blocks: int
    num_packed: int
    grid: tuple[int]
    shape: dict[str, Any]
    whole: bool
    counts: Tensor  # not `whole`: how many tiles each block has


def plan_of(blocks: Blocks, bits: int, device: torch.device) -> PackingPlan:
    """Worked out once."""
    cut = device_blocks_of(blocks, device)
    if ("plan", bits) not in cut.made:
        packed_bounds = torch.zeros(len(blocks) + 1, dtype=torch.int64, device="cpu")
        torch.cumsum((blocks.lengths * bits + 7) // 8, 0, out=packed_bounds[1:])
        step, whole = 1 if bool((packed_bounds % VECTOR).any()) else VECTOR, cut.shape["WHOLE"]
        in_tiles = blocks.lengths[:0] if whole else blocks.lengths
        owners, firsts = pieces_of(in_tiles, LONGEST, device).columns
        cut.made["plan", bits] = PackingPlan(
            columns=(cut.bounds, packed_bounds.to(device), owners, (firsts // LONGEST).to(torch.int32)),
            keys=cut.keys,
            num_blocks=len(blocks),
            num_packed=int(packed_bounds[-1]),
            grid=cut.grid if whole else (len(owners),),
            shape={**cut.shape, "PACKED_STEP": step},
            whole=whole,
            counts=((in_tiles + LONGEST - 1) // LONGEST).to(device),
        )
    plan: PackingPlan = cut.made["plan", bits]
    return plan


def blank(plan: PackingPlan, device: torch.device) -> tuple[Tensor, Tensor]:
    """A payload to be written, and its scales (float32), which are a view of it."""
    payload = torch.empty(4 * plan.num_blocks + plan.num_packed, dtype=torch.uint8, device=device)
    return payload, payload[: 4 * plan.num_blocks].view(torch.float32)


def check_length(payload: Tensor, plan: PackingPlan) -> None:
    expected = 4 * plan.num_blocks + plan.num_packed
    if len(payload) != expected:
        raise MalformedPayload(f"{len(payload)} bytes came where {expected} must")


def measure(values: Tensor, plan: PackingPlan, squares: bool) -> tuple[Tensor, Tensor]:
    """The largest magnitude of each block and, if asked for, the sum of squares (float64). For plans of tiles (not `whole`)."""
    largest = torch.empty(plan.grid, device=values.device, dtype=torch.float32)
    total = torch.empty(plan.grid if squares else (0,), dtype=torch.float64, device=values.device)
    bounds, _, owners, numbers = plan.columns
    _measure[plan.grid](
        values, bounds, owners, numbers, largest, total, plan.num_blocks,
        SQUARES=squares, TILE=plan.shape["TILE"], STEP=plan.shape["STEP"],
    )  # fmt: skip
    return (
        torch.segment_reduce(largest, "max", lengths=plan.counts, unsafe=True),
        torch.segment_reduce(total, "sum", lengths=plan.counts, unsafe=True) if squares else total,
    )


@kernel("num_blocks")
def _measure(
    values, bounds, owners, numbers, largest, total, num_blocks, SQUARES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr
):
    rows, first = place(owners, numbers, False, 1, TILE)
    starts, lengths = extent(bounds, rows, num_blocks, STEP)
    index = first + tl.arange(0, TILE)[None, :]
    x = tl.load(values + starts[:, None] + index, mask=index < lengths[:, None], other=0.0)
    here = tl.program_id(0) + tl.arange(0, 1)
    tl.store(largest + here, largest_of(x))
    if SQUARES:
        tl.store(total + here, squares_of(x))


@triton.jit
def place(owners, numbers, WHOLE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """This program's blocks, and the index in them where its tile begins."""
    if WHOLE:
        rows, first = tl.program_id(0) * ROWS + tl.arange(0, ROWS), 0
    else:
        rows, first = tl.load(owners + tl.program_id(0) + tl.arange(0, ROWS)), tl.load(numbers + tl.program_id(0)) * TILE
    return rows, first


@triton.jit
def largest_of(x):
    """The largest magnitude of each row, found among bits, which are in the same order."""
    return tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE, 1).to(tl.float32, bitcast=True)


@triton.jit
def squares_of(x):
    """The sum of squares of each row, in float64."""
    return tl.sum(x.to(tl.float64) * x.to(tl.float64), 1)


@triton.jit
def pack(packed, fields, first, widths, BITS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """The fields (int32, ROWS x TILE) of one tile, 0 behind the end of a block. `first`: which element of its block column 0 is,
    a multiple of TILE. `packed`, `widths`: where a block's bytes begin and how many they are, ROWS x 1."""
    if BITS == 8:
        byte = first + tl.arange(0, TILE)[None, :]
        tl.store(packed + byte, fields.to(tl.uint8), mask=byte < widths)
    elif 8 % BITS == 0:
        PER_BYTE: tl.constexpr = 8 // BITS
        parts = tl.reshape(fields, (ROWS, TILE // PER_BYTE, PER_BYTE)) << (BITS * tl.arange(0, PER_BYTE))[None, None, :]
        byte = first // PER_BYTE + tl.arange(0, TILE // PER_BYTE)[None, :]
        tl.store(packed + byte, tl.sum(parts, 2).to(tl.uint8), mask=byte < widths)
    else:
        parts = tl.reshape(fields, (ROWS, TILE // 8, 8)).to(tl.int64) << (BITS * tl.arange(0, 8))[None, None, :]
        eights = tl.sum(parts, 2)
        byte = (first // 8 + tl.arange(0, TILE // 8)[None, :]) * BITS
        for j in tl.static_range(BITS):
            tl.store(packed + byte + j, (eights >> (8 * j)).to(tl.uint8), mask=byte + j < widths)


@triton.jit
def field_at(packed, index, inside, BITS: tl.constexpr):
    """Field `index` (not negative) of a block whose bytes begin at `packed`, int32; 0 where it is not `inside`."""
    if BITS == 8:
        field = tl.load(packed + index, mask=inside, other=0).to(tl.int32)
    else:
        bit = (index & 7) * BITS
        at, shift = packed + (index >> 3) * BITS + (bit >> 3), bit & 7
        field = tl.load(at, mask=inside, other=0).to(tl.int32) >> shift
        if 8 % BITS != 0:
            goes_on = inside & (shift + BITS > 8)
            field |= tl.load(at + 1, mask=goes_on, other=0).to(tl.int32) << (8 - shift)
        field = field & (2**BITS - 1)
    return field


@triton.jit
def problem_of_rows(packed, lengths, widths, scale, BITS: tl.constexpr):
    """The worst of scales that are no scales, and of padding bits that are set. All one for each block of the tile."""
    used = (lengths % 8) * BITS % 8  # bits of the last byte; 0: all
    last = tl.load(packed + widths - 1, mask=used > 0, other=0).to(tl.int32)
    padding = tl.where((last >> used) != 0, BAD_PADDING, 0)
    sound = (scale >= 0) & (scale < float("inf"))
    return tl.max(tl.maximum(padding, tl.where(sound, 0, BAD_SCALE)), 0)
