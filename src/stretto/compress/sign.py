"""Signs, scaled by the mean magnitude: one bit per value.

    C(x)_i = s sign(x_i),  s = |x|_1 / n over each block, sign(0) = +1

Bits:       n + 32 per block of `block` values. Layout: all scales (float32), then one bit per value, LSB first, 1 is x >= 0;
            every block is padded to whole bytes with 0 (up to 7 bits).
Contraction: |x - C(x)|^2 = |x|^2 - |x|_1^2 / n, so delta = |x|_1^2 / (n |x|_2^2): 0.637 for Gaussian values, at least 1/n. (The
            norm-preserving scale |x|_2 / sqrt(n) of some systems is not a contraction on sparse vectors.)
Biased: needs `ErrorFeedback`, without which signSGD fails on simple problems.
Invariant:  encoding what was decoded gives the same payload, up to the rounding of the mean (the sum is taken in float64 and
            rounded once). A block of zeros stays zeros.

`Sign(vote=True)` is signSGD with majority vote: only the bits travel (n per block and direction), every worker's are counted,
and the gradient becomes the sign of the sum: +1 or -1, and +1 where as many are for as against. A value of 0 votes +1. The
result has no magnitude: the learning rate alone says how far a step goes. Fewer than half of the workers, whatever they send,
cannot turn an element on which the others agree.

References: Bernstein et al., "signSGD", ICML 2018, and "signSGD with Majority Vote", ICLR 2019; Karimireddy et al., "Error
            Feedback Fixes SignSGD", ICML 2019. Departs from them: a scale per block of a tensor, where they take one per
            tensor; smaller blocks follow the values more closely, and workers can share the blocks out (also those of a vote:
            no server).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from stretto.compress import bits, exchange
from stretto.compress.checks import check, is_count
from stretto.compress.codec import KernelCodec, with_kernels
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.rounds import ExchangeContext, Steps
from stretto.errors import ConfigurationError

NO_MAGNITUDE = "a vote has no magnitude, so there is no difference from the gradient to feed back"


@dataclass(frozen=True, slots=True)
class Sign(KernelCodec):
    """`block`: how many values share a scale. `vote`: send signs alone, and take the majority's."""

    block: int = 256
    vote: bool = False
    splits: ClassVar[bool] = True
    encoder, decoder = with_kernels("signs_cpu", "sign_cuda")

    @property
    def wants_feedback(self) -> bool:  # type: ignore[override]  # a vote is a method of its own
        return not self.vote

    def __post_init__(self) -> None:
        instead = "Sign(block=256), or fewer for scales that follow the values more closely (32 bits each)"
        check(is_count(self.block), self, "block", "a block has a whole number of values, at least 1", instead)
        check(isinstance(self.vote, bool), self, "vote", "it is a yes or a no", "vote=True for a majority vote, or vote=False")

    @property
    def no_abstention(self) -> str | None:  # type: ignore[override]
        return "a vote has no empty ballot: a worker without data would say +1 to everything" if self.vote else None

    @property
    def hands_out(self) -> Literal["mean", "direction"]:  # type: ignore[override]
        return "direction" if self.vote else "mean"

    @property
    def no_residual(self) -> str | None:  # type: ignore[override]
        """Why error feedback has no place around it, if so."""
        return NO_MAGNITUDE if self.vote else None

    def blocks(self, layout: Layout) -> Blocks:
        return layout.cut(lambda place: self.block)

    def num_bytes(self, blocks: Blocks) -> int:
        return bits.num_bytes(blocks, 1, self.num_scales)

    @property
    def num_scales(self) -> int:
        """How many scales each block sends."""
        return 0 if self.vote else 1

    def encode_residual(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        if self.vote:
            raise ConfigurationError(f"ErrorFeedback({self!r}): {NO_MAGNITUDE}.\nWrite {self!r} alone, or ErrorFeedback(Sign()).")
        return KernelCodec.encode_residual(self, values, blocks, random)

    def encode_in_torch(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        new = bits.blank(blocks, 1, self.num_scales, values)
        if not self.vote:
            new.scales.copy_(bits.sums(values.abs(), blocks) / blocks.lengths.to(values.device))
        new.packed.copy_(bits.pack((values >= 0).to(torch.uint8), blocks, 1))
        return new.whole

    def decode_in_torch(self, payload: Tensor, blocks: Blocks) -> Tensor:
        came = bits.opened(payload, blocks, 1, self.num_scales)
        signs = bits.unpack(came.packed, blocks, 1).float() * 2 - 1
        if self.vote:
            return signs
        bits.check_scales(came.scales)
        return signs * came.scales[blocks.numbers(payload.device)]

    def exchange(self, values: Tensor, context: ExchangeContext) -> Steps:
        """Decoded votes add up to those for less those against, so the sign of the sum is the majority's."""
        yield from exchange.exchange(self, values, context)
        if self.vote:
            torch.ge(values, 0.0, out=values).mul_(2.0).sub_(1.0)
