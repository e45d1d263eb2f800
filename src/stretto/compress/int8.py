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

from stretto.compress.codec import Codec
from stretto.compress.draw import Draw
from stretto.compress.kernels.compiling import has_numba, runs_triton
from stretto.compress.layout import Blocks, Layout
from stretto.errors import ConfigurationError, MalformedPayload

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
class Int8(Codec):
    """`block`: how many values share a scale. `stochastic`: round at random, right in the mean."""

    block: int = 256
    stochastic: bool = False
    splits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < 1:
            raise ConfigurationError(
                f"Int8(block={self.block!r}): a block has at least one value. Write how many share a scale: Int8(block=256)."
            )
        if not isinstance(self.stochastic, bool):
            raise ConfigurationError(f"Int8(stochastic={self.stochastic!r}): it is a yes or a no. Write True or False.")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]  # of a class in general, of this one by its argument
        return self.stochastic

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
        return 4 * len(blocks) + blocks.num_elements

    def encode(self, values: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        if runs_triton(values):
            return self._encode_on_gpu(values, blocks, draw, residual=False)
        if _has_kernel(values):
            return self._encode_by_kernel(values, blocks, draw, residual=False)
        uniform = draw.uniform(blocks, draw.own, values.device) if self.stochastic else None
        return torch.cat([part.view(torch.uint8) for part in encode_in_torch(values, blocks, uniform)])

    def decode(self, payload: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        if runs_triton(payload):
            return self._decode_on_gpu(payload, blocks, None)
        scales, codes = self._parts(payload, blocks)
        if not _has_kernel(payload):
            return decode_in_torch(scales, codes, blocks)
        from stretto.compress.kernels import int8_cpu as kernels

        out = blocks.memory.empty(len(codes), torch.float32, payload.device)
        refuse(kernels.decode(scales.numpy().view("u4"), codes.numpy(), blocks.bounds.numpy(), out.numpy()))
        return out

    def encode_residual(self, values: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        if runs_triton(values):
            return self._encode_on_gpu(values, blocks, draw, residual=True)
        if _has_kernel(values):
            return self._encode_by_kernel(values, blocks, draw, residual=True)
        payload = self.encode(values, blocks, draw)
        values.sub_(self.decode(payload, blocks, draw))
        return payload

    def add_decoded(self, payload: Tensor, blocks: Blocks, draw: Draw, total: Tensor) -> None:
        if runs_triton(payload):
            self._decode_on_gpu(payload, blocks, total)
            return
        scales, codes = self._parts(payload, blocks)
        if not _has_kernel(payload):
            total.add_(decode_in_torch(scales, codes, blocks))
            return
        from stretto.compress.kernels import int8_cpu as kernels

        refuse(kernels.add_decoded(scales.numpy().view("u4"), codes.numpy(), blocks.bounds.numpy(), total.numpy()))

    def _parts(self, payload: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Scales (float32) and codes (bytes)."""
        if len(payload) != self.num_bytes(blocks):
            raise MalformedPayload(f"{len(payload)} bytes where {self.num_bytes(blocks)} must come")
        split = 4 * len(blocks)
        return payload[:split].clone().view(torch.float32), payload[split:]  # a copy: the payload may lie at an odd address

    def _encode_by_kernel(self, values: Tensor, blocks: Blocks, draw: Draw, *, residual: bool) -> Tensor:
        from stretto.compress.kernels import int8_cpu as kernels

        payload = blocks.memory.empty(self.num_bytes(blocks), torch.uint8, values.device)
        split = 4 * len(blocks)
        scales, codes = payload[:split].numpy().view("u4"), payload[split:].numpy()
        bits, bounds = values.numpy().view("u4"), blocks.bounds.numpy()
        if self.stochastic:
            kernels.encode_stochastic(bits, bounds, blocks.keys.numpy(), draw.own, scales, codes, residual)
        else:
            (kernels.encode_residual if residual else kernels.encode)(bits, bounds, scales, codes)
        return payload

    def _encode_on_gpu(self, values: Tensor, blocks: Blocks, draw: Draw, *, residual: bool) -> Tensor:
        from stretto.compress.kernels import int8_cuda

        return int8_cuda.encode(values, blocks, draw.own if self.stochastic else None, residual)

    def _decode_on_gpu(self, payload: Tensor, blocks: Blocks, total: Tensor | None) -> Tensor:
        from stretto.compress.kernels import int8_cuda

        return int8_cuda.decode(payload, blocks, total)


def encode_in_torch(values: Tensor, blocks: Blocks, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scales and codes (int8) of finite values. `uniform`: for each value a number in [0, 1) to round with at random, or None."""
    numbers = blocks.numbers(values.device)
    largest = torch.zeros(len(blocks), device=values.device, dtype=torch.float32).scatter_reduce_(
        0, numbers, values.abs(), "amax"
    )
    scales = scales_of(largest)
    return scales, codes_of(values, scales[numbers], uniform)


def decode_in_torch(scales: Tensor, codes: Tensor, blocks: Blocks) -> Tensor:
    numbers = blocks.numbers(codes.device)
    check(scales, codes, scales[numbers])
    return codes.view(torch.int8) * scales[numbers]


def scales_of(largest: Tensor) -> Tensor:
    """From the largest magnitude of each block."""
    # Divided by a tensor: on a GPU torch multiplies by the reciprocal of a plain number, and the last bit may differ.
    bits = (largest / torch.full_like(largest, 127.0)).view(torch.int32)
    bits = ((bits + LOWER_BITS) & ~LOWER_BITS).clamp_(SMALLEST_SCALE, LARGEST_SCALE)
    return torch.where(largest.view(torch.int32) > ALL_ZERO, bits, 0).view(torch.float32)


def codes_of(values: Tensor, scales: Tensor, uniform: Tensor | None = None) -> Tensor:
    """`scales`: of each value's block."""
    quotients = values / torch.where(scales > 0, scales, 1.0)
    if uniform is None:
        return quotients.round_().clamp_(-127, 127).to(torch.int8)
    down = quotients.floor()
    # Not floor(quotient + u): that sum may be rounded up to the next integer.
    return (down + (uniform < quotients - down)).clamp_(-127, 127).to(torch.int8)


def check(scales: Tensor, codes: Tensor, spread: Tensor) -> None:
    """Refuse what no encoder writes. `spread`: for each code its scale."""
    bits = scales.view(torch.int32)
    in_range = (bits >= SMALLEST_SCALE) & (bits <= LARGEST_SCALE) & (bits & LOWER_BITS == 0)
    refuse(1 if not bool((in_range | (bits == 0)).all()) else 0)
    refuse(2 if bool((codes == 128).any()) else 0)
    refuse(3 if bool(((codes != 0) & (spread == 0)).any()) else 0)


def refuse(problem: int) -> None:
    if problem:
        raise MalformedPayload(PROBLEMS[problem])


def _has_kernel(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and has_numba()
