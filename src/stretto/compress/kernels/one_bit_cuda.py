"""Two means per row on a GPU: a row is read once, for its means, its bits and what is left over.

A row may be as long as a tensor, and one program alone would take far too long over it. So rows of more than TILE elements are
cut into *pieces*: programs write the bits and the sums of their pieces, others add these up, in order, and a third kernel
subtracts. Where no row is longer, every row is a piece and all of it is one kernel. Decoding is one kernel in either case.

The same bytes as the reference, but for a mean's last bit where two orders of adding in float64 round to different float32.
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

from stretto.compress import bits
from stretto.compress.kernels.bits_cuda import BAD_PADDING, BAD_SCALE, field_at, pack
from stretto.compress.kernels.device_blocks_cuda import DeviceBlocks, device_blocks_of
from stretto.compress.kernels.flag_cuda import new_flag, wait_for
from stretto.compress.kernels.int8_cuda import word_at
from stretto.compress.kernels.starting_cuda import kernel
from stretto.compress.layout import Blocks
from stretto.compress.one_bit import OneBit
from stretto.compress.random_numbers import RandomKeys
from stretto.errors import MalformedPayload

AT_A_TIME = 256  # sums of pieces that are added up at a time


@dataclass(frozen=True, slots=True)
class RowPieces:
    """One number per piece, in the device's memory; `heads` has one per row, and one more. `shape`: of a program's tile."""

    owners: Tensor  # its row (int32)
    begins: Tensor  # its first element, among all values (int64)
    sizes: Tensor  # its number of elements (int32)
    byte_begins: Tensor  # its first byte, among those of bits (int64)
    heads: Tensor  # the first piece of each row (int32)
    grid: tuple[int]
    shape: dict[str, Any]

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.begins, self.sizes, self.byte_begins


def row_pieces_of(blocks: Blocks, cut: DeviceBlocks) -> RowPieces:
    """Made once for each cut."""
    if "pieces of rows" not in cut.made:
        cut.made["pieces of rows"] = _pieces(blocks, cut)
    pieces: RowPieces = cut.made["pieces of rows"]
    return pieces


def _pieces(blocks: Blocks, cut: DeviceBlocks) -> RowPieces:
    tile, device = cut.shape["TILE"], cut.bounds.device
    counts, widths = (blocks.lengths + tile - 1) // tile, (blocks.lengths + 7) // 8
    heads = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), counts.cumsum(0)])
    owners = torch.repeat_interleave(torch.arange(len(blocks), dtype=torch.int64, device="cpu"), counts)
    firsts = (torch.arange(len(owners), dtype=torch.int64, device="cpu") - heads[owners]) * tile
    return RowPieces(
        owners.to(torch.int32).to(device),
        (blocks.bounds[owners] + firsts).to(device),
        (blocks.lengths[owners] - firsts).clamp(max=tile).to(torch.int32).to(device),
        ((widths.cumsum(0) - widths)[owners] + firsts // 8).to(device),
        heads.to(torch.int32).to(device),
        grid=(-(-len(owners) // cut.shape["ROWS"]),),
        shape={name: cut.shape[name] for name in ("ROWS", "TILE", "STEP", "num_warps")},
    )


def encode(codec: OneBit, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    cut, header = device_blocks_of(blocks, values.device), 8 * len(blocks)
    payload = torch.empty(header + cut.num_packed, dtype=torch.uint8, device=values.device)
    if not len(blocks):
        return payload
    pieces, means, whole = row_pieces_of(blocks, cut), payload[:header].view(torch.float32), cut.shape["WHOLE"]
    num_pieces = len(pieces.owners)
    tallies = means if whole else torch.empty(3 * num_pieces, dtype=torch.float64, device=values.device)
    _encode[pieces.grid](
        values, payload, tallies, *pieces.columns, num_pieces, len(blocks), WHOLE=whole, RESIDUAL=residual and whole,
        **pieces.shape,
    )  # fmt: skip
    if not whole:
        _add_up[(len(blocks),)](tallies, means, cut.bounds, pieces.heads, AT_A_TIME=AT_A_TIME, num_warps=1)
        if residual:
            _subtract[pieces.grid](values, means, *pieces.columns[:2], pieces.owners, num_pieces, **pieces.shape)
    return payload


def decode(codec: OneBit, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    cut = device_blocks_of(blocks, out.device)
    if len(payload) != 8 * len(blocks) + cut.num_packed:
        raise MalformedPayload(f"{len(payload)} bytes came where {8 * len(blocks) + cut.num_packed} must")
    if not len(blocks):
        return
    pieces, problem = row_pieces_of(blocks, cut), new_flag(out.device)
    _decode[pieces.grid](
        payload, out, problem, *pieces.columns, pieces.owners, len(pieces.owners), len(blocks), ADDING=adding, **pieces.shape
    )
    bits.check(wait_for(problem, out.device))


@triton.jit
def _extent(begins, sizes, pieces, num_pieces, STEP: tl.constexpr):
    """Where these pieces begin and how long they are; none where there is no piece. Triton is told that STEP divides both."""
    present = pieces < num_pieces
    begin = tl.multiple_of(tl.load(begins + pieces, mask=present, other=0), STEP)
    return begin, tl.multiple_of(tl.load(sizes + pieces, mask=present, other=0), STEP)


@kernel("num_pieces", "num_rows")
def _encode(
    values, payload, tallies, begins, sizes, byte_begins, num_pieces, num_rows, WHOLE: tl.constexpr, RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`tallies`: the means, if pieces are whole rows; if not, of each piece two sums and the number of those below zero."""
    pieces = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = pieces < num_pieces
    begin, size = _extent(begins, sizes, pieces, num_pieces, STEP)
    columns = tl.arange(0, TILE)[None, :]
    at, inside = values + begin[:, None] + columns, columns < size[:, None]
    x = tl.load(at, mask=inside, other=0.0)
    packed = payload + 8 * num_rows + tl.load(byte_begins + pieces, mask=present, other=0)
    pack(packed[:, None], ((x >= 0) & inside).to(tl.int32), 0, (size[:, None] + 7) // 8, 1, ROWS, TILE)
    wide = x.to(tl.float64)
    below, above = tl.sum(tl.where(x < 0, wide, 0.0), 1), tl.sum(tl.where(x < 0, 0.0, wide), 1)
    num_below = tl.sum((x < 0).to(tl.int32), 1)
    if WHOLE:
        mean_below, mean_above = _mean(below, num_below), _mean(above, size - num_below)
        tl.store(tallies + 2 * pieces, mean_below, mask=present)
        tl.store(tallies + 2 * pieces + 1, mean_above, mask=present)
        if RESIDUAL:
            tl.store(at, x - tl.where(x < 0, mean_below[:, None], mean_above[:, None]), mask=inside)
    else:
        tl.store(tallies + 3 * pieces, below, mask=present)
        tl.store(tallies + 3 * pieces + 1, above, mask=present)
        tl.store(tallies + 3 * pieces + 2, num_below.to(tl.float64), mask=present)


@triton.jit
def _mean(total, count):
    return (total / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)


@kernel()
def _add_up(tallies, means, bounds, heads, AT_A_TIME: tl.constexpr):
    row = tl.program_id(0)
    head, tail = tl.load(heads + row), tl.load(heads + row + 1)
    below, above, num_below = tl.zeros((), tl.float64), tl.zeros((), tl.float64), tl.zeros((), tl.float64)
    for first in range(head, tail, AT_A_TIME):
        piece = first + tl.arange(0, AT_A_TIME)
        below += tl.sum(tl.load(tallies + 3 * piece, mask=piece < tail, other=0.0), 0)
        above += tl.sum(tl.load(tallies + 3 * piece + 1, mask=piece < tail, other=0.0), 0)
        num_below += tl.sum(tl.load(tallies + 3 * piece + 2, mask=piece < tail, other=0.0), 0)
    length = tl.load(bounds + row + 1) - tl.load(bounds + row)
    tl.store(means + 2 * row, _mean(below, num_below))
    tl.store(means + 2 * row + 1, _mean(above, length.to(tl.float64) - num_below))


@kernel("num_pieces")
def _subtract(values, means, begins, sizes, owners, num_pieces, ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr):
    pieces = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = pieces < num_pieces
    begin, size = _extent(begins, sizes, pieces, num_pieces, STEP)
    row = tl.load(owners + pieces, mask=present, other=0)
    below, above = tl.load(means + 2 * row, mask=present), tl.load(means + 2 * row + 1, mask=present)
    columns = tl.arange(0, TILE)[None, :]
    at, inside = values + begin[:, None] + columns, columns < size[:, None]
    x = tl.load(at, mask=inside)
    tl.store(at, x - tl.where(x < 0, below[:, None], above[:, None]), mask=inside)


@kernel("num_pieces", "num_rows")
def _decode(
    payload, out, problem, begins, sizes, byte_begins, owners, num_pieces, num_rows, ADDING: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    pieces = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = pieces < num_pieces
    begin, size = _extent(begins, sizes, pieces, num_pieces, STEP)
    row = tl.load(owners + pieces, mask=present, other=0)
    below = word_at(payload, 2 * row, present).to(tl.float32, bitcast=True)
    above = word_at(payload, 2 * row + 1, present).to(tl.float32, bitcast=True)
    packed = payload + 8 * num_rows + tl.load(byte_begins + pieces, mask=present, other=0)
    # A piece is a column of the tile here: then Triton has the same threads read bits and write values.
    at, index = out + begin[None, :], tl.arange(0, TILE)[:, None]
    inside = index < size[None, :]
    x = tl.where(field_at(packed[None, :], index, inside, 1) != 0, above[None, :], below[None, :])
    if ADDING:
        x += tl.load(at + index, mask=inside)
    tl.store(at + index, x, mask=inside)
    sound = (below > -float("inf")) & (below <= 0) & (above >= 0) & (above < float("inf"))
    last = tl.load(packed + (size - 1) // 8, mask=size % 8 > 0, other=0).to(tl.int32)  # only a row's last piece is padded
    worst = tl.maximum(tl.where(sound, 0, BAD_SCALE), tl.where((last >> (size % 8)) != 0, BAD_PADDING, 0))
    worst = tl.max(worst, 0)
    tl.store(problem, worst, mask=worst > 0)
