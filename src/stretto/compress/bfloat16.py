"""The upper half of a float32: 16 bits per value, and payloads add up.

    C(x)_i = x_i rounded to 8 significant bits, magnitudes above `limit` brought down to it

Rounding:   to nearest, ties to even (add 0x7fff and the lowest bit that stays, then cut); or with `stochastic=True` up or down
            with probabilities that make the mean right (add 16 random bits, then cut): unbiased.
Bits:       16 n. Layout: n times the upper 16 bits of the float32, little-endian.
Error:      at most 2^-8 |x_i| of normal numbers (stochastic: 2^-7 |x_i|), at most 2^-134 below (stochastic: 2^-133).
Range:      `limit` is the largest finite bfloat16, 3.39e38. Of P payloads that are to be added, the exchange divides values by P
            before, and `among(P)` brings the limit down to 2^127 / P: then no sum overflows, in whatever order it is made, P <
            100.
Contraction: 1 - delta <= 2^-16 (stochastic: 2^-14) for normal numbers. The sums are rounded too, at every addition: error
            feedback does not see that, and among many workers it is the larger part. `Float16` adds 8 times more precisely.
Invariant:  encoding what was decoded gives the same payload, stochastic or not, except that a sum above `limit` comes down to it.
References: Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", arXiv:1905.12322, 2019. BigDL (Dai et al., SoCC
            2019) sends the same 16 bits cut off without rounding, which is biased toward zero: departs from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stretto.compress.checks import check
from stretto.compress.codec import Codec, with_kernels
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sixteen_bits import SixteenBits

MAGNITUDE = 0x7FFFFFFF
LARGEST = 0x7F7F0000  # bits of the largest finite bfloat16, as a float32


@dataclass(frozen=True, slots=True)
class BFloat16(SixteenBits):
    """Values as bfloat16. `stochastic`: round at random, right in the mean."""

    stochastic: bool = False
    payload_dtype: ClassVar[torch.dtype] = torch.bfloat16
    encoder, decoder = with_kernels("sixteen_bits_cpu", "sixteen_bits_cuda")

    def __post_init__(self) -> None:
        check(isinstance(self.stochastic, bool), self, "stochastic", "it is a yes or a no", "True or False")

    @property
    def limit_bits(self) -> int:
        return LARGEST

    def among(self, world_size: int) -> Codec:
        """The codec of each of `world_size` payloads that are to be added."""
        return self if world_size == 1 else _BFloat16OfSeveral(self.stochastic, world_size)

    def encode_in_torch(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        bits = values.view(torch.int32)
        to_add = self._to_add(values, blocks, random)
        magnitude = (bits & MAGNITUDE).clamp_(max=self.limit_bits).add_(to_add) >> 16
        return (magnitude | (bits >> 16 & 0x8000)).to(torch.int16).view(torch.uint8)

    def _to_add(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        """For each value the number below 2^16 to add to its bits before the lower half is cut off."""
        if self.stochastic:
            return (random.uniform(blocks, random.own, values.device) * 65536).int()
        magnitude = (values.view(torch.int32) & MAGNITUDE).clamp(max=self.limit_bits)
        return 0x7FFF + (magnitude >> 16 & 1)


@dataclass(frozen=True, slots=True)
class _BFloat16OfSeveral(BFloat16):
    world_size: int = 1

    @property
    def limit_bits(self) -> int:
        """The bits of 2^127 / P, rounded down to 8 significant bits."""
        limit = torch.tensor(2.0**127 / self.world_size, dtype=torch.float32, device="cpu")
        return int(limit.view(torch.int32)) & 0x7FFF0000
