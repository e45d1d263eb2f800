"""What one program (Triton's word for a thread block) takes of a block of values: a *span*, a stretch of up to SPAN elements.

Spans of all blocks are numbered through. Where a span begins and ends is looked up in one step, not by way of its block: on a GPU
each step of such a chain takes as long as reading a thousand values.
"""

# What Triton compiles has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.compress.kernels.starting_cuda import kernel
from stretto.compress.layout import Blocks

SPAN = 2048
NUM_WARPS = 4  # of a program that takes one
ADDED = 1024
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True, slots=True)
class Spans:
    """One number per span, in the device's memory; `bounds` has one per block, and one more."""

    owners: Tensor  # its block (int32)
    begins: Tensor  # its first element, among all values (int64)
    ends: Tensor  # the end of its block, which may lie far beyond the span's
    heads: Tensor  # the first span of its block (int32)
    tails: Tensor  # the first span of the next block
    bounds: Tensor  # of each block the first span

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.owners, self.begins, self.ends

    @staticmethod
    def of(blocks: Blocks, wanted: Tensor, device: torch.device) -> Spans:
        """The spans of the blocks for which `wanted` is true."""
        counts = (blocks.lengths + SPAN - 1) // SPAN * wanted
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), counts.cumsum(0)]).to(torch.int32)
        owners = torch.repeat_interleave(torch.arange(len(blocks), dtype=torch.int64, device="cpu"), counts)
        heads, tails = bounds[owners], bounds[owners + 1]
        begins = blocks.bounds[owners] + (torch.arange(len(owners), dtype=torch.int64, device="cpu") - heads) * SPAN
        columns = (owners.to(torch.int32), begins, blocks.bounds[owners + 1], heads, tails, bounds)
        return Spans(*(column.to(device) for column in columns))


@triton.jit
def magnitudes_at(values, begin, end, SPAN: tl.constexpr, STEP: tl.constexpr):
    """The bits of a span's elements without the sign; -1 beyond the end of the block. STEP divides `begin`."""
    values += tl.multiple_of(begin, STEP)
    index = tl.arange(0, SPAN)
    if begin + SPAN <= end:  # without a mask, which would have every thread read one element at a time
        magnitude = tl.load(values + index).to(tl.int32, bitcast=True) & MAGNITUDE
    else:
        inside = index < (end - begin).to(tl.int32)
        magnitude = tl.load(values + index, mask=inside, other=0.0).to(tl.int32, bitcast=True) & MAGNITUDE
        magnitude = tl.where(inside, magnitude, -1)
    return magnitude


@triton.jit
def eights_of(flags, SPAN: tl.constexpr):
    """A byte for every eight flags of a span, the first in the lowest bit, as int32."""
    return tl.sum(tl.reshape(flags.to(tl.int32), (SPAN // 8, 8)) << tl.arange(0, 8)[None, :], 1)


@triton.jit
def num_ones(byte):
    byte -= (byte >> 1) & 0x55
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    return (byte + (byte >> 4)) & 0x0F


@triton.jit
def lowest_one(byte):
    """The number of the lowest bit that is set; 7 if none is."""
    bit = ((byte & 0xF) == 0).to(tl.int32) * 4
    bit += (((byte >> bit) & 3) == 0).to(tl.int32) * 2
    return bit + (((byte >> bit) & 1) == 0).to(tl.int32)


def sums_of(tallies: Tensor) -> Tensor:
    """sums[r, i] = tallies[r, 0] + ... + tallies[r, i - 1], for i up to the number of columns (int64)."""
    rows, num = tallies.shape
    sums = torch.empty(rows, num + 1, dtype=torch.int64, device=tallies.device)
    _add_up[(rows, num // ADDED + 1)](tallies, sums, num, ADDED=ADDED, WIDTH=4096, num_warps=4)
    return sums


@kernel("num")
def _add_up(tallies, sums, num, ADDED: tl.constexpr, WIDTH: tl.constexpr):
    """A program writes ADDED of the sums, and adds up all before them by itself: less work than it is to wait for each other."""
    first = tl.program_id(1) * ADDED
    tallies, sums = tallies + tl.program_id(0) * num, sums + tl.program_id(0) * (num + 1)
    before = tl.zeros((WIDTH,), tl.int64)
    for start in range(0, first, WIDTH):
        index = start + tl.arange(0, WIDTH)
        before += tl.load(tallies + index, mask=index < first, other=0)
    index = first + tl.arange(0, ADDED)
    held = tl.load(tallies + index, mask=index < num, other=0)
    tl.store(sums + index, tl.sum(before, 0) + tl.cumsum(held, 0) - held, mask=index <= num)
