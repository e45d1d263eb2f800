"""TernGrad: every value becomes -s, 0 or +s by a throw of the dice that keeps its expectation.

    clip to +-clip * sigma;   s = max |x_i|;   C(x)_i = s sign(x_i) with probability |x_i| / s, else 0        over each block

Bits:       2 n + 32 per block of `block` values, laid out as in `levels.py`: 00 is 0, 10 is +s, 11 is -s, 01 is refused.
Unbiased without clipping (`clip=None`): E[C(x)] = x, and E|C(x) - x|^2 = s |x|_1 - |x|^2 <= omega |x|^2 with omega = (sqrt(n) -
            1) / 2 for blocks of n values (2.0 for 4096 Gaussian values). Clipping (the default) makes s smaller and with it the
            variance (1.0), for a bias on the few values beyond.
With error feedback: refused, whatever the block. It is no contraction (omega >= 1 from blocks of 9 values on): of Gaussian
            gradients, residuals get 25 times as long as a gradient within 400 rounds, in one block of 65,536
            values more than 90 times, and still grow.
Reference: Wen et al., "TernGrad", NeurIPS 2017. Departs from it: a scale per block, where it has one per layer: s and the
           variance are smaller, and workers can share the blocks out; `block=None` is as published. sigma is taken about 0, not
           about the mean: the same for gradients, whose mean is small beside it, and a block of equal values (or of one) is not
           clipped to nothing. Workers do not share s, as payloads here are not added before they are decoded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from stretto.compress.checks import check, is_count, is_number
from stretto.compress.layout import Blocks, Layout
from stretto.compress.levels import Levels, RandomLevels


@dataclass(frozen=True, slots=True)
class TernGrad(RandomLevels):
    """`clip`: in standard deviations, None for no clipping. `block`: how many values share a scale, None for a whole tensor."""

    clip: float | None = 2.5
    block: int | None = 4096
    no_contraction: ClassVar[str | None] = "it may err by more than it is given, so what is left over grows and is not said"

    def __post_init__(self) -> None:
        clips = self.clip is None or (is_number(self.clip) and self.clip > 0)
        why = "values are clipped to so many standard deviations, a finite number above 0"
        check(clips, self, "clip", why, "TernGrad(clip=2.5) as published, or TernGrad(clip=None) for no clipping")
        why, instead = (
            "a block has a whole number of values, at least 1",
            "TernGrad(block=4096), or block=None for a scale per tensor",
        )
        check(self.block is None or is_count(self.block), self, "block", why, instead)

    def blocks(self, layout: Layout) -> Blocks:
        return layout.cut(lambda place: place.size if self.block is None else self.block)

    @property
    def levels(self) -> Levels:
        return Levels(bits=2, clip=math.inf if self.clip is None else float(self.clip))
