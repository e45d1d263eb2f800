"""What `QSGD` and `TernGrad` have in common: every value becomes one of a few levels of its block's unit, by a throw of the dice.

    C(x)_i = N sign(x_i) l_i / s,   l_i = floor(r) or floor(r) + 1 with probability r - floor(r),   r = s min(|x_i|, N) / N

over each block, with s = 2^(bits-1) - 1 levels above 0. N is the largest magnitude, clipped to some standard deviations or not;
or the l2 norm.

Bits:       bits * n + 32 per block. Layout: all N (float32), then fields of `bits` bits, LSB first: the lowest bit of a field is
            the sign (1 for x < 0), the others are the level; every block is padded to whole bytes with 0. A level of 0 has sign
            0: the field 1 is refused.
Invariant:  a value of 0 stays 0, no sign changes, no level is above s; numbers are drawn by element and round, whatever the
            buckets of parameters (`random_numbers.py`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from stretto.compress import bits as packing
from stretto.compress.codec import KernelCodec, with_kernels
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys


class Levels(NamedTuple):
    """`bits` per value, sign included. What they count: the l2 norm, or the largest magnitude; `clip`: infinity for none."""

    bits: int
    l2: bool = False
    clip: float = math.inf

    @property
    def number(self) -> int:
        """How many there are above 0."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def needs_squares(self) -> bool:
        return self.l2 or self.clip < math.inf

    def unit(self, largest: Tensor, squares: Tensor, lengths: Tensor) -> Tensor:
        """The unit of each block, from its largest magnitude and, where that `needs_squares`, the sum of its squares (float64).

        An l2 norm too large for float32 becomes the largest float32, which is as good a unit: no magnitude is above it."""
        if self.l2:
            return squares.sqrt().clamp(max=torch.finfo(torch.float32).max).float()
        return largest if self.clip == math.inf else torch.minimum(largest, (self.clip * (squares / lengths).sqrt()).float())


class RandomLevels(KernelCodec):
    """Abstract: a subclass says which levels, and how it cuts tensors."""

    __slots__ = ()
    splits: ClassVar[bool] = True
    encoder, decoder = with_kernels("levels_cpu", "levels_cuda")

    @property
    @abstractmethod
    def levels(self) -> Levels: ...

    def num_bytes(self, blocks: Blocks) -> int:
        return packing.num_bytes(blocks, self.levels.bits, 1)

    def encode_in_torch(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        levels = self.levels
        new = packing.blank(blocks, levels.bits, 1, values)
        squares = packing.sums(values.double().square(), blocks) if levels.needs_squares else values[:0]
        new.scales.copy_(levels.unit(packing.largest_magnitudes(values, blocks), squares, blocks.lengths.to(values.device)))
        units = new.scales[blocks.numbers(values.device)]
        exact = torch.minimum(values.abs(), units) / torch.where(units > 0, units, 1.0) * levels.number
        level = exact.floor()
        level += random.uniform(blocks, random.own, values.device) < exact - level
        negative = (values < 0) & (level > 0)
        new.packed.copy_(packing.pack((2 * level + negative).to(torch.uint8), blocks, levels.bits))
        return new.whole

    def decode_in_torch(self, payload: Tensor, blocks: Blocks) -> Tensor:
        _, units, packed = packing.opened(payload, blocks, self.levels.bits, 1)
        packing.check_scales(units)
        fields = packing.unpack(packed, blocks, self.levels.bits)
        if (fields == 1).any():
            packing.check(packing.BAD_FIELD)
        return units[blocks.numbers(payload.device)] * _parts_of_unit(self.levels).to(payload.device)[fields.long()]


def _parts_of_unit(levels: Levels) -> Tensor:
    """What each field stands for, in [-1, 1]: unit * level alone may be too large.

    Computed on the CPU, whatever the device: CUDA divides by a number by multiplying with its inverse, which rounds otherwise,
    and workers would no longer have the same bits.
    """
    fields = torch.arange(2**levels.bits, dtype=torch.int64, device="cpu")
    sizes = (fields >> 1).float() / levels.number
    return torch.where((fields & 1) == 1, -sizes, sizes)
