"""TernGrad: every value becomes -s, 0 or +s by a throw of the dice that keeps its expectation.

    clip to +-clip * sigma;   s = max |x_i|;   C(x)_i = s sign(x_i) with probability |x_i| / s, else 0        over each block

Bits:       2 n + 32 per block of `block` values. Layout: all s (float32), then 2-bit codes, LSB first: 00 is 0, 01 is +s, 10 is
            -s, 11 is refused; every block is padded to whole bytes with 0 (up to 6 bits).
Unbiased without clipping (`clip=None`): E[C(x)] = x, and E|C(x) - x|^2 = s |x|_1 - |x|^2 <= omega |x|^2 with omega = (sqrt(n) -
            1) / 2 for blocks of n values (2.0 for 4096 Gaussian values). Clipping (the default) makes s smaller and with it the
            variance (1.0), for a bias on the few values beyond.
With error feedback: refused, whatever the block. It is no contraction (omega >= 1 from blocks of 9 values on): of Gaussian
            gradients, residuals get 25 times as long as a gradient within 400 rounds, in one block of 65,536
            values more than 90 times, and still grow.
Invariant:  a value of 0 stays 0, no sign changes; numbers are drawn by element and round, whatever the buckets
            (`random_numbers.py`).
Reference: Wen et al., "TernGrad", NeurIPS 2017. Departs from it: a scale per block, where it has one per layer: s and the
           variance are smaller, and workers can share the blocks out; `block=None` is as published. sigma is taken about 0, not
           about the mean: the same for gradients, whose mean is small beside it, and a block of equal values (or of one) is not
           clipped to nothing. Workers do not share s, as payloads here are not added before they are decoded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stretto.compress import bits
from stretto.compress.checks import is_count, is_number
from stretto.compress.codec import KernelCodec, with_kernels
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class TernGrad(KernelCodec):
    """`clip`: in standard deviations, None for no clipping. `block`: how many values share a scale, None for a whole tensor."""

    clip: float | None = 2.5
    block: int | None = 4096
    splits: ClassVar[bool] = True
    encoder, decoder = with_kernels("tern_grad")
    no_contraction: ClassVar[str | None] = "it may err by more than it is given, so what is left over grows and is not said"

    def __post_init__(self) -> None:
        if self.clip is not None and (not is_number(self.clip) or self.clip <= 0):
            raise ConfigurationError(
                f"TernGrad(clip={self.clip!r}): values are clipped to so many standard deviations, a finite number above 0.\n"
                f"Write TernGrad(clip=2.5) as published, or TernGrad(clip=None) for no clipping."
            )
        if self.block is not None and not is_count(self.block):
            raise ConfigurationError(
                f"TernGrad(block={self.block!r}): a block has a whole number of values, at least 1.\n"
                f"Write TernGrad(block=4096), or TernGrad(block=None) for one scale per tensor."
            )

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """E[decode(encode(x))] = x."""
        return self.clip is None

    def blocks(self, layout: Layout) -> Blocks:
        return layout.cut(lambda place: place.size if self.block is None else self.block)

    def num_bytes(self, blocks: Blocks) -> int:
        return bits.num_bytes(blocks, 2, 1)

    @property
    def clip_at(self) -> float:
        """Infinity for none."""
        return math.inf if self.clip is None else float(self.clip)

    def encode_in_torch(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        new, numbers = bits.blank(blocks, 2, 1, values), blocks.numbers(values.device)
        new.scales.copy_(bits.largest_magnitudes(values, blocks))
        if self.clip is not None:
            sigma = (bits.sums(values.double().square(), blocks) / blocks.lengths.to(values.device)).sqrt()
            new.scales.copy_(torch.minimum(new.scales, (self.clip * sigma).float()))
        scales = new.scales[numbers]
        probability = torch.minimum(values.abs(), scales) / torch.where(scales > 0, scales, 1.0)
        drawn = random.uniform(blocks, random.own, values.device) < probability
        new.packed.copy_(bits.pack(drawn.to(torch.uint8) << (values < 0).to(torch.uint8), blocks, 2))
        return new.whole

    def decode_in_torch(self, payload: Tensor, blocks: Blocks) -> Tensor:
        _, scales, packed = bits.opened(payload, blocks, 2, 1)
        bits.check_scales(scales)
        codes = bits.unpack(packed, blocks, 2)
        if (codes == 3).any():
            bits.check(bits.BAD_FIELD)
        signs = (codes & 1).float() - (codes >> 1).float()
        return signs * scales[blocks.numbers(payload.device)]
