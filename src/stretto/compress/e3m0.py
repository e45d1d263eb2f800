"""E3M0: floats of four bits, a sign and three bits of exponent, with a scale per block.

    C(x)_i = a sign(x_i) v(l_i),   a = max |x| over each block,   v(0) = 0, v(l) = 2^(l-7) for l = 1 to 7

and l_i is the level whose v is nearest to |x_i| / a; halfway, the larger one.

Levels:     the paper says that outer gradients travel as E3M0 and are accumulated in float32. It does not say how the exponent is
            biased, nor whether there is a zero. Here the largest magnitude of a block is exact (level 7), each level below is
            half the one above, down to a / 64, and the lowest exponent is the code of 0: a magnitude below a / 128 becomes 0, one
            from there up to the smallest level a / 64. There are no infinities, no NaN and no negative zero.
Bits:       4 n + 32 per block of `block` values. Layout: all a (float32), then fields of 4 bits, LSB first: the lowest bit of a
            field is the sign (1 for x < 0), the upper three are the level. So two values share a byte, the first in its lower
            half; every block is padded to whole bytes with 0. Field 1, a negative zero, is refused.
Error:      at most a third of |x_i| from 3a / 256 up (worst at 3/4 of a level), at most a / 128 below. So of d values in a block

                |C(x) - x|^2 <= (1/9 + (d - 1) / 2^14) |x|^2

            0.13 |x|^2 for 256 of them, so it is a contraction: error feedback converges. Of Gaussian values it is 0.038 |x|^2.
            Biased towards 0: what Gaussian values become has 0.965 of their length along them.
Invariant:  a value of 0 stays 0, no sign changes, and the largest value of a block is exact. Encoding what was decoded gives
            the same payload unless a is below 2^-120, where a / 64 is no longer exact.
Reference:  Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv:2501.18512, for outer gradients. In
            the paper every worker sends its gradient to all, and the sum is never rounded. Here blocks are combined as with every
            other codec (`exchange.py`): with three workers and more the mean is encoded a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stretto.compress import bits as packing
from stretto.compress.backend import Backend
from stretto.compress.checks import check, is_count
from stretto.compress.codec import Decoder, Encoder, KernelCodec, decode_by_torch, encode_by_torch
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys

BITS = 4
HALF = 1 << 22  # of a mantissa: added to a float's bits, it carries into the exponent from 3/2 of a power of two on
EXPONENT = 23  # where a float32's exponent begins
BELOW = 120  # the exponent field of 2^-7, halfway to the smallest level: subtracted, 2^-6 becomes 1
SMALLEST = BELOW << EXPONENT  # the bits of 2^-7: from here on, level 1


@dataclass(frozen=True, slots=True)
class E3M0(KernelCodec):
    """`block`: how many values share a scale."""

    block: int = 256
    splits: ClassVar[bool] = True
    # No kernel for GPUs: there the operations of torch take several passes.
    encoder: ClassVar[Encoder] = Backend(encode_by_torch, "e3m0_cpu.encode")
    decoder: ClassVar[Decoder] = Backend(decode_by_torch, "e3m0_cpu.decode")

    def __post_init__(self) -> None:
        check(is_count(self.block), self, "block", "a block has at least one value", "E3M0(block=256): so many share a scale")

    def blocks(self, layout: Layout) -> Blocks:
        return layout.cut(lambda place: self.block)

    def num_bytes(self, blocks: Blocks) -> int:
        return packing.num_bytes(blocks, BITS, 1)

    def encode_in_torch(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        new = packing.blank(blocks, BITS, 1, values)
        new.scales.copy_(packing.largest_magnitudes(values, blocks))
        scales = new.scales[blocks.numbers(values.device)]
        # Divided, not multiplied by a reciprocal: of a scale below 2^-128 that is infinite.
        words = (values.abs() / torch.where(scales > 0, scales, 1.0)).view(torch.int32)
        level = torch.maximum(((words + HALF) >> EXPONENT) - BELOW, (words >= SMALLEST).int())
        new.packed.copy_(packing.pack((2 * level + ((values < 0) & (level > 0))).to(torch.uint8), blocks, BITS))
        return new.whole

    def decode_in_torch(self, payload: Tensor, blocks: Blocks) -> Tensor:
        _, scales, packed = packing.opened(payload, blocks, BITS, 1)
        packing.check_scales(scales)
        fields = packing.unpack(packed, blocks, BITS)
        if (fields == 1).any():
            packing.check(packing.BAD_FIELD)
        table = torch.tensor(_VALUES, dtype=torch.float32, device=payload.device)
        return scales[blocks.numbers(payload.device)] * table[fields.long()]


_MAGNITUDES = [0.0, *(2.0 ** (level - 7) for level in range(1, 8))]
_VALUES = [sign * magnitude for magnitude in _MAGNITUDES for sign in (1.0, -1.0)]  # of each field
