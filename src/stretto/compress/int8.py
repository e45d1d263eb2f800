"""Signed bytes with a scale per block: 8 bits per value.

    C(x)_i = q_i s,   s = max |x| / 127 over each block, rounded up to 16 significant bits,   q_i = x_i / s rounded to an integer

Rounding:   to nearest, ties to even; or with `stochastic=True` up or down with probabilities that make the mean right: unbiased.
Bits:       8 n + 32 per block of `block` values. Layout: all scales (float32), then all q (int8, -127 to 127; -128 is not a
            code).
Error:      |x_i - C(x)_i| <= s / 2 <= max |x| / 254 (1 + 2^-15), up to the rounding of x_i / s (2^-16 of it); stochastic: below
            s.
Contraction: of Gaussian values 1 - delta is about 5e-5 at 256 per block; to nearest, never above 1.
Scale:      q_i s is exact in float32 (7 and 16 bits), and the largest value of a block has |q| = 127. So the scale of what was
            decoded is the same again.
Invariant:  encoding what was decoded gives the same payload, bit for bit (rounded to nearest): a ring that encodes at every hop
            needs it.
Limits:     s is at least 2^-126, so that products stay exact, and at most what makes 127 s finite. A block with no value above
            2^-127 is all zeros with s = 0.
References: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016; Alistarh et al., "QSGD", NeurIPS 2017
            (with the maximum as norm). Departs from the usual form: the scale travels, not the maximum. x_i / s with a rounded s
            = max / 127 does not come out even, so the usual form drifts when it is encoded again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from stretto.compress import bits
from stretto.compress.checks import check, is_count
from stretto.compress.codec import KernelCodec, with_kernels
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.errors import MalformedPayload

if TYPE_CHECKING:
    from stretto.compress.int8_hop import Int8Hop

LOWER_BITS = 0xFF  # of 24 significant bits of a float32, what a scale does not use
SMALLEST_SCALE, LARGEST_SCALE = 0x00800000, 0x7C010200  # bits of 2^-126, and of the largest s with 127 s finite
ALL_ZERO = 0x00400000  # bits of 2^-127: half of the smallest scale is rounded to zero

PROBLEMS = (
    "",
    "a scale that is negative, not finite, too large, too small or not of 16 significant bits",
    "a code of -128",
    "a scale of zero with codes that are not",
)


@dataclass(frozen=True, slots=True)
class Int8(KernelCodec):
    """`block`: how many values share a scale. `stochastic`: round at random, right in the mean."""

    block: int = 256
    stochastic: bool = False
    splits: ClassVar[bool] = True
    encoder, decoder = with_kernels("int8_cpu", "int8_cuda")

    def __post_init__(self) -> None:
        check(is_count(self.block), self, "block", "a block has at least one value", "Int8(block=256): so many share a scale")
        check(isinstance(self.stochastic, bool), self, "stochastic", "it is a yes or a no", "True or False")

    @property
    def no_contraction(self) -> str | None:  # type: ignore[override]
        """Rounded to the nearest, no value errs by more than itself; at random, d values err by up to d / (4 * 127^2) |x|^2."""
        if not self.stochastic or self.block < 4 * 127**2:
            return None
        return (
            f"rounding at random in blocks of {self.block:,} may err by more than it is given (not in blocks of fewer than "
            f"{4 * 127**2:,}), so what is left over may grow without bound"
        )

    def hop(self) -> Int8Hop | None:
        """None with `stochastic`: a hop has no random numbers of its own, and ends must not differ."""
        from stretto.compress.int8_hop import Int8Hop

        return None if self.stochastic else Int8Hop(self.block)

    def blocks(self, layout: Layout) -> Blocks:
        return layout.cut(lambda place: self.block)

    def num_bytes(self, blocks: Blocks) -> int:
        return bits.num_bytes(blocks, 8, 1)

    def encode_in_torch(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        new, numbers = bits.blank(blocks, 8, 1, values), blocks.numbers(values.device)
        largest = torch.zeros_like(new.scales).scatter_reduce_(0, numbers, values.abs(), "amax")
        new.scales.copy_(scales_of(largest))
        uniform = random.uniform(blocks, random.own, values.device) if self.stochastic else None
        new.packed.copy_(codes_of(values, new.scales[numbers], uniform).view(torch.uint8))
        return new.whole

    def decode_in_torch(self, payload: Tensor, blocks: Blocks) -> Tensor:
        _, scales, codes = bits.opened(payload, blocks, 8, 1)
        spread = scales[blocks.numbers(codes.device)]
        check_codes(scales, codes, spread)
        return codes.view(torch.int8) * spread


def scales_of(largest: Tensor) -> Tensor:
    """From the largest magnitude of each block."""
    # Divided by a tensor: on a GPU torch multiplies by the reciprocal of a plain number, and the last bit may differ.
    words = (largest / torch.full_like(largest, 127.0)).view(torch.int32)
    words = ((words + LOWER_BITS) & ~LOWER_BITS).clamp_(SMALLEST_SCALE, LARGEST_SCALE)
    return torch.where(largest.view(torch.int32) > ALL_ZERO, words, 0).view(torch.float32)


def codes_of(values: Tensor, scales: Tensor, uniform: Tensor | None = None) -> Tensor:
    """`scales`: of each value's block."""
    quotients = values / torch.where(scales > 0, scales, 1.0)
    if uniform is None:
        return quotients.round_().clamp_(-127, 127).to(torch.int8)
    down = quotients.floor()
    # Not floor(quotient + u): that sum may be rounded up to the next integer.
    return (down + (uniform < quotients - down)).clamp_(-127, 127).to(torch.int8)


def check_codes(scales: Tensor, codes: Tensor, spread: Tensor) -> None:
    """Refuse what no encoder writes. `spread`: for each code its scale."""
    words = scales.view(torch.int32)
    in_range = (words >= SMALLEST_SCALE) & (words <= LARGEST_SCALE) & (words & LOWER_BITS == 0)
    refuse(1 if not bool((in_range | (words == 0)).all()) else 0)
    refuse(2 if bool((codes == 128).any()) else 0)
    refuse(3 if bool(((codes != 0) & (spread == 0)).any()) else 0)


def refuse(problem: int) -> None:
    if problem:
        raise MalformedPayload(PROBLEMS[problem])
