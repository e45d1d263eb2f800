"""Bytes that name one of 256 numbers, spread over seven decades, with a scale per block: 8 bits per value.

    C(x)_i = a c[k_i],   a = max |x| over each block,   k_i = the code c[k] nearest to x_i / a

Codes:      for each decade 10^(e-7) < |c| < 10^(e-6), e = 0 to 6, the midpoints of 2^e equal parts of [0.1, 1], scaled, with both
            signs; and 0 and 1. Sorted: c[127] = 0, c[255] = 1; there is no -1. A dynamic tree: in a byte, the more zeros lead,
            the smaller the decade and the fewer bits are left for the place in it.
Bits:       8 n + 32 per block of `block` values. Layout: all a (float32), then all k (uint8).
Ties:       halfway between two codes the lower index is taken; halfway is their mean, rounded to float32.
Error:      |x_i - C(x)_i| <= 0.0071 a; of |x_i| 6.2 % down to a / 10, 11 % down to a / 100, 18, 28, 47, 71 % in the decades
            below, all of it under 2.75e-7 a. `Int8` loses everything under a / 254: hence the larger blocks here.
Contraction: of Gaussian values 1 - delta is about 1.7e-4 at 4096 per block; never above 1, as 0 is a code. Biased.
Invariant:  encoding what was decoded gives the same payload where the largest value of a block is positive (its code is 1); where
            it is negative, it comes out as -0.993 a and the block's scale shrinks.
References: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016; with blocks: Dettmers et al., "8-bit
            Optimizers via Block-wise Quantization", ICLR 2022. Departs from them in nothing but the rule for ties.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from stretto.compress import bits
from stretto.compress.checks import check, is_count
from stretto.compress.codec import KernelCodec, with_kernels
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.errors import MalformedPayload

ZERO = 127  # the code of 0
FINITE = 0x7F7FFFFF  # bits of the largest finite float32
SHIFT = 17  # a float32's bits above these name its cell: the exponent and the upper six bits of the mantissa
LOWER = (1 << SHIFT) - 1
ONE = 0x3F800000  # the bits of 1.0
NEVER = (1 << (SHIFT + 1)) - 1  # above all lower bits: a cell without a halfway number


@dataclass(frozen=True, slots=True)
class Dynamic8(KernelCodec):
    """`block`: how many values share a scale."""

    block: int = 4096
    splits: ClassVar[bool] = True
    encoder, decoder = with_kernels("dynamic8_cpu", "dynamic8_cuda")

    def __post_init__(self) -> None:
        check(
            is_count(self.block), self, "block", "a block has at least one value", "Dynamic8(block=4096): so many share a scale"
        )

    def blocks(self, layout: Layout) -> Blocks:
        return layout.cut(lambda place: self.block)

    def num_bytes(self, blocks: Blocks) -> int:
        return bits.num_bytes(blocks, 8, 1)

    def encode_in_torch(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        new, numbers = bits.blank(blocks, 8, 1, values), blocks.numbers(values.device)
        new.scales.zero_().scatter_reduce_(0, numbers, values.abs(), "amax")
        # Divided, not multiplied by a reciprocal: of a scale below 2^-128 that is infinite.
        quotients = values / torch.where(new.scales > 0, new.scales, 1.0)[numbers]
        new.packed.copy_(torch.searchsorted(torch.tensor(halfway(), dtype=torch.float32, device=values.device), quotients))
        return new.whole

    def decode_in_torch(self, payload: Tensor, blocks: Blocks) -> Tensor:
        _, scales, codes = bits.opened(payload, blocks, 8, 1)
        spread, words = scales[blocks.numbers(codes.device)], scales.view(torch.int32)
        refuse_if(bool(((words < 0) | (words > FINITE)).any()) or bool(((spread == 0) & (codes != ZERO)).any()))
        return torch.tensor(table(), dtype=torch.float32, device=codes.device)[codes.long()] * spread


@lru_cache(maxsize=1)
def table() -> tuple[float, ...]:
    """The 256 codes, sorted; each is rounded to float32 where it is used."""
    middles = [10.0 ** (e - 6) * (0.1 + 0.9 * (2 * part + 1) / 2 ** (e + 1)) for e in range(7) for part in range(2**e)]
    return tuple(sorted([0.0, 1.0, *middles, *(-middle for middle in middles)]))


@lru_cache(maxsize=1)
def halfway() -> tuple[float, ...]:
    """Between each code and the next: 255 numbers."""
    return tuple((lower + upper) / 2 for lower, upper in zip(table()[:-1], table()[1:], strict=True))


class Cells(NamedTuple):
    """A magnitude from 0 to 1 lies in a cell, numbered by its bits above `SHIFT`. A cell has at most one halfway number.

    `entries` (int32), from cell `first`, which has none, nor any before it, to `last`, that of 1: how many halfway numbers above
    zero lie in the cells before, times 2^(SHIFT + 1); and the lower bits of the one in it, or `NEVER`. So one look-up and one
    comparison find a code, where a search takes eight of each.
    """

    entries: Tensor
    first: int
    last: int


@lru_cache(maxsize=1)
def cells() -> Cells:
    middles = torch.tensor(halfway()[ZERO:], dtype=torch.float32, device="cpu").view(torch.int32)
    owners = middles >> SHIFT
    assert len(set(owners.tolist())) == len(owners), "two halfway numbers in one cell"
    first, last = int(owners[0]) - 1, ONE >> SHIFT
    entries = torch.searchsorted(owners, torch.arange(first, last + 1, dtype=torch.int32, device="cpu")) << (SHIFT + 1) | NEVER
    entries[owners - first] = torch.arange(len(owners), device="cpu", dtype=torch.int64) << (SHIFT + 1) | (middles & LOWER)
    return Cells(entries.to(torch.int32), first, last)


def refuse_if(malformed: bool) -> None:
    if malformed:
        raise MalformedPayload("a scale that is negative or not finite, or one of zero with codes that are not")
