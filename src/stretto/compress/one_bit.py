"""1-bit SGD: the sign of each value, and for each row of a matrix two numbers to stand for its values of either sign.

    C(x)_i = a_plus if x_i >= 0 else a_minus,   a_plus = mean of the row's x_i >= 0,  a_minus = mean of its x_i < 0

Rows:       a tensor of two or more dimensions is seen as shape[0] rows of all the rest (a unit's incoming weights); one of
            fewer dimensions is one row. A mean over no value is 0.
Bits:       n + 64 per row. Layout: of all rows a_minus, a_plus (float32), then one bit per value, LSB first, 1 is x >= 0; every
            row is padded to whole bytes with 0 (up to 7 bits). A row of 8 or fewer values costs 9 bytes: where rows are that
            short (depthwise convolutions, n x 1 matrices) nothing is gained over float32 or it is even longer; `Sign` cuts by
            length.
Contraction: the two means are the best two numbers for these bits: |x - C(x)|^2 = |x|^2 - n_plus a_plus^2 - n_minus a_minus^2,
            and at least 1/n of |x|^2 is sent. Gaussian values: 0.637, as `Sign`; values with a mean far from 0 lose less than
            there.
Biased: needs `ErrorFeedback`; the paper has it from the start.
Invariant:  encoding what was decoded gives the same payload, up to the rounding of the means (sums are taken in float64 and
            rounded once); the mean of each row is kept.
Reference: Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
           Training of Speech DNNs", Interspeech 2014. Departs from it: what it calls a column is a row of a tensor here; the
           threshold between the two values is 0 throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stretto.compress import bits
from stretto.compress.codec import KernelCodec, with_kernels
from stretto.compress.layout import Blocks, Layout, TensorPlace
from stretto.compress.random_numbers import RandomKeys


@dataclass(frozen=True, slots=True)
class OneBit(KernelCodec):
    """Two means per row of each tensor; nothing to choose."""

    num_scales: ClassVar[int] = 2  # per row: the mean of its values below zero, and that of the others
    splits: ClassVar[bool] = True
    wants_feedback: ClassVar[bool] = True
    encoder, decoder = with_kernels("signs_cpu", "one_bit_cuda")

    def blocks(self, layout: Layout) -> Blocks:
        return layout.cut(row_length)

    def num_bytes(self, blocks: Blocks) -> int:
        return bits.num_bytes(blocks, 1, self.num_scales)

    def encode_in_torch(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        new = bits.blank(blocks, 1, self.num_scales, values)
        below = values < 0
        num_below = bits.sums(below, blocks)
        num_above = blocks.lengths.to(values.device) - num_below
        new.scales[0::2] = (bits.sums(values * below, blocks) / num_below.clamp(min=1)).float()
        new.scales[1::2] = (bits.sums(values * ~below, blocks) / num_above.clamp(min=1)).float()
        new.packed.copy_(bits.pack((~below).to(torch.uint8), blocks, 1))
        return new.whole

    def decode_in_torch(self, payload: Tensor, blocks: Blocks) -> Tensor:
        _, means, packed = bits.opened(payload, blocks, 1, self.num_scales)
        below, above = means[0::2], means[1::2]
        if not (means.isfinite().all() and (below <= 0).all() and (above >= 0).all()):
            bits.check(bits.BAD_SCALE)
        above_zero = bits.unpack(packed, blocks, 1).bool()
        rows = blocks.numbers(payload.device)
        return torch.where(above_zero, above[rows], below[rows])


def row_length(place: TensorPlace) -> int:
    return place.size // place.shape[0] if len(place.shape) > 1 and place.size else place.size
