"""Signs, scaled by the mean magnitude: one bit per value.

    C(x)_i = s sign(x_i),  s = |x|_1 / n over each block, sign(0) = +1

Bits:       n + 32 per block of `block` values. Layout: all scales (float32), then one bit per value, LSB first, all blocks one
            after the other without padding between them; 1 is x >= 0; the last byte is padded with 0.
Contraction: |x - C(x)|^2 = |x|^2 - |x|_1^2 / n, so delta = |x|_1^2 / (n |x|_2^2): 0.637 for Gaussian values, at least 1/n. (The
            norm-preserving scale |x|_2 / sqrt(n) of some systems is not a contraction on sparse vectors.)
Biased: needs `ErrorFeedback`, without which signSGD fails on simple problems.
Invariant:  encoding what was decoded gives the same payload, up to the rounding of the mean.
References: Bernstein et al., "signSGD", ICML 2018; Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019. Departs from
            them: a scale per block of a tensor, where they take one per tensor; smaller blocks follow the values more closely, and
            workers can share the blocks out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stretto.compress.codec import Codec
from stretto.compress.draw import Draw
from stretto.compress.layout import Blocks, Layout


@dataclass(frozen=True, slots=True)
class Sign(Codec):
    """`block`: how many values share a scale."""

    block: int = 4096
    splits: ClassVar[bool] = True

    def blocks(self, layout: Layout) -> Blocks:
        return layout.cut(lambda place: self.block)

    def num_bytes(self, blocks: Blocks) -> int:
        return 4 * len(blocks) + -(-blocks.num_elements // 8)

    def encode(self, values: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        raise NotImplementedError  # EXEMPLAR ONLY: helper "bits" writes it

    def decode(self, payload: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        raise NotImplementedError
