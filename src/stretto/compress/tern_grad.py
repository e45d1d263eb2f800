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
Invariant:  a value of 0 stays 0, no sign changes; numbers are drawn by element and round (`draw.py`), whatever the buckets.
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
from stretto.compress.codec import Codec
from stretto.compress.draw import Draw
from stretto.compress.kernels.compiling import runs_triton
from stretto.compress.layout import Blocks, Layout
from stretto.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class TernGrad(Codec):
    """`clip`: in standard deviations, None for no clipping. `block`: how many values share a scale, None for a whole tensor."""

    clip: float | None = 2.5
    block: int | None = 4096
    splits: ClassVar[bool] = True
    no_contraction: ClassVar[str | None] = "it may err by more than it is given, so what is left over grows and is not said"

    def __post_init__(self) -> None:
        if self.clip is not None and (not _is_number(self.clip) or not 0 < self.clip < math.inf):
            raise ConfigurationError(
                f"TernGrad(clip={self.clip!r}): values are clipped to so many standard deviations, a finite number above 0.\n"
                f"Write TernGrad(clip=2.5) as published, or TernGrad(clip=None) for no clipping."
            )
        if self.block is not None and (not isinstance(self.block, int) or isinstance(self.block, bool) or self.block < 1):
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

    def encode(self, values: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        return self._encode(values, blocks, draw, leave_residual=False)

    def encode_residual(self, values: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        return self._encode(values, blocks, draw, leave_residual=True)

    def _encode(self, values: Tensor, blocks: Blocks, draw: Draw, leave_residual: bool) -> Tensor:
        clip = math.inf if self.clip is None else float(self.clip)
        if runs_triton(values):
            from stretto.compress.kernels import tern_grad_cuda

            return tern_grad_cuda.encode(values, blocks, draw.own, clip, leave_residual)
        if not bits.runs_compiled(values):
            payload = encode(values, blocks, draw, clip)
            if leave_residual:
                values.sub_(decode(payload, blocks))
            return payload
        from stretto.compress.kernels import tern_grad_cpu

        new, bounds, keys = bits.blank(blocks, 2, 1, values), blocks.bounds.numpy(), blocks.keys.numpy()
        scales, packed = new.scales.numpy(), new.packed.numpy()
        tern_grad_cpu.encode(values.numpy(), bounds, keys, draw.own, clip, scales, packed, leave_residual)
        return new.whole

    def decode(self, payload: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        if not (bits.runs_compiled(payload) or runs_triton(payload)):
            return decode(payload, blocks)
        out = blocks.memory.empty(blocks.num_elements, torch.float32, payload.device)
        _decode(payload, blocks, out, adding=False)
        return out

    def add_decoded(self, payload: Tensor, blocks: Blocks, draw: Draw, total: Tensor) -> None:
        if bits.runs_compiled(payload) or runs_triton(payload):
            _decode(payload, blocks, total, adding=True)
        else:
            total.add_(decode(payload, blocks))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _decode(payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    if runs_triton(payload):
        from stretto.compress.kernels import tern_grad_cuda

        bits.check(tern_grad_cuda.decode(payload, blocks, out, adding))
        return
    from stretto.compress.kernels import tern_grad_cpu

    _, scales, packed = bits.opened(payload, blocks, 2, 1)
    bits.check(tern_grad_cpu.decode(packed.numpy(), blocks.bounds.numpy(), scales.numpy(), out.numpy(), adding))


def encode(values: Tensor, blocks: Blocks, draw: Draw, clip: float) -> Tensor:
    """The reference. `clip`: infinity for none."""
    new, numbers = bits.blank(blocks, 2, 1, values), blocks.numbers(values.device)
    new.scales.copy_(bits.largest_magnitudes(values, blocks))
    if clip < math.inf:
        sigma = (bits.sums(values.double().square(), blocks) / blocks.lengths.to(values.device)).sqrt()
        new.scales.copy_(torch.minimum(new.scales, (clip * sigma).float()))
    scales = new.scales[numbers]
    probability = torch.minimum(values.abs(), scales) / torch.where(scales > 0, scales, 1.0)
    drawn = draw.uniform(blocks, draw.own, values.device) < probability
    new.packed.copy_(bits.pack(drawn.to(torch.uint8) << (values < 0).to(torch.uint8), blocks, 2))
    return new.whole


def decode(payload: Tensor, blocks: Blocks) -> Tensor:
    _, scales, packed = bits.opened(payload, blocks, 2, 1)
    if not (scales.isfinite() & (scales >= 0)).all():
        bits.check(bits.BAD_SCALE)
    codes = bits.unpack(packed, blocks, 2)
    if (codes == 3).any():
        bits.check(bits.BAD_FIELD)
    signs = (codes & 1).float() - (codes >> 1).float()
    return signs * scales[blocks.numbers(payload.device)]
