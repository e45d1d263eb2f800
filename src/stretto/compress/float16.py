"""Half precision: 16 bits per value, and payloads add up.

    C(x)_i = x_i rounded to the nearest half (ties to even), magnitudes above `limit` brought down to it

Bits:       16 n. Layout: n halves (IEEE binary16), little-endian.
Error:      at most 2^-11 |x_i| where 2^-14 <= |x_i| <= limit; at most 2^-25 below (halves have no more than 2^-24 there). So
            gradients that are small throughout lose much: scale the loss, or use `BFloat16`.
Range:      `limit` is 65504, the largest half. Of P payloads that are to be added, the exchange divides values by P before, and
            `among(P)` brings the limit down to 32768 / P: then no sum of them overflows, in whatever order it is made, P < 1000.
            (At 65504 each, two workers with large values would give infinity.) With `ErrorFeedback` what is above is sent later.
Contraction: elementwise, 1 - delta <= 2^-22 for values in range; never more than 1, as rounding moves no value past zero or twice
            its size. Biased. The sums are rounded too, at every addition: error feedback does not see that.
Invariant:  encoding what was decoded gives the same payload, except that a sum above `limit` comes down to it.
Reference:  Micikevicius et al., "Mixed Precision Training", ICLR 2018. Departs from it: saturates where a conversion overflows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stretto.compress.codec import Codec, with_kernels
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sixteen_bits import SixteenBits

LARGEST = 65504.0
SHARED_OUT = 32768.0  # half of it: room for the rounding of a sum


@dataclass(frozen=True, slots=True)
class Float16(SixteenBits):
    """Values as halves."""

    payload_dtype: ClassVar[torch.dtype] = torch.float16
    encoder, decoder = with_kernels("sixteen_bits_cpu", "sixteen_bits_cuda")

    @property
    def limit(self) -> float:
        return LARGEST

    @property
    def limit_bits(self) -> int:
        return int(torch.tensor(self.limit, dtype=torch.float32, device="cpu").view(torch.int32))

    def among(self, world_size: int) -> Codec:
        """The codec of each of `world_size` payloads that are to be added."""
        return self if world_size == 1 else _Float16OfSeveral(world_size)

    def encode_in_torch(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        # Rounded first and brought down after, which is the same: `limit` is a half, and rounding keeps order.
        return values.to(torch.float16).clamp_(-self.limit, self.limit).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Float16OfSeveral(Float16):
    world_size: int

    @property
    def limit(self) -> float:
        mantissa, exponent = math.frexp(SHARED_OUT / self.world_size)
        return math.ldexp(math.floor(mantissa * 2048), exponent - 11)  # a half: 11 significant bits, rounded down
