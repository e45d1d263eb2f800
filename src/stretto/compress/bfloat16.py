"""The upper half of a float32: 16 bits per value, and payloads add up.

    C(x)_i = x_i rounded to 8 significant bits, magnitudes above `limit` brought down to it

Rounding:   to nearest, ties to even (add 0x7fff and the lowest bit that stays, then cut); or with `stochastic=True` up or down
            with probabilities that make the mean right (add 16 random bits, then cut): unbiased.
Bits:       16 n. Layout: n times the upper 16 bits of the float32, little-endian.
Error:      at most 2^-8 |x_i| of normal numbers (stochastic: 2^-7 |x_i|), at most 2^-134 below (stochastic: 2^-133).
Range:      `limit` is the largest finite bfloat16, 3.39e38. Of P payloads that are to be added, the exchange divides values by P
            before, and `among(P)` brings the limit down to 2^127 / P: then no sum overflows, in whatever order it is made, P <
            100.
Contraction: 1 - delta <= 2^-16 (stochastic: 2^-14) for normal numbers. The sums are rounded too, at every addition: error
            feedback does not see that, and among many workers it is the larger part. `Float16` adds 8 times more precisely.
Invariant:  encoding what was decoded gives the same payload, stochastic or not, except that a sum above `limit` comes down to it.
References: Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", arXiv:1905.12322, 2019. BigDL (Dai et al., SoCC
            2019) sends the same 16 bits cut off without rounding, which is biased toward zero: departs from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stretto.compress.codec import Codec
from stretto.compress.draw import Draw
from stretto.compress.kernels.compiling import has_numba, runs_triton
from stretto.compress.layout import Blocks, Layout
from stretto.errors import ConfigurationError, MalformedPayload

MAGNITUDE = 0x7FFFFFFF
LARGEST = 0x7F7F0000  # bits of the largest finite bfloat16, as a float32


@dataclass(frozen=True, slots=True)
class BFloat16(Codec):
    """Values as bfloat16. `stochastic`: round at random, right in the mean."""

    stochastic: bool = False
    payload_dtype: ClassVar[torch.dtype | None] = torch.bfloat16

    def __post_init__(self) -> None:
        if not isinstance(self.stochastic, bool):
            raise ConfigurationError(f"BFloat16(stochastic={self.stochastic!r}): it is a yes or a no. Write True or False.")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]  # of a class in general, of this one by its argument
        return self.stochastic

    @property
    def limit_bits(self) -> int:
        return LARGEST

    def among(self, world_size: int) -> Codec:
        """The codec of one payload of `world_size` that are to be added."""
        return self if world_size == 1 else _BFloat16OfSeveral(self.stochastic, world_size)

    def blocks(self, layout: Layout) -> Blocks:
        return layout.whole()

    def num_bytes(self, blocks: Blocks) -> int:
        return 2 * blocks.num_elements

    def encode(self, values: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        if runs_triton(values):
            return self._encode_on_gpu(values, blocks, draw, residual=False)
        if not _has_kernel(values):
            return encode_in_torch(values, self._to_add(values, blocks, draw), self.limit_bits)
        return self._encode_by_kernel(values, blocks, draw, residual=False)

    def decode(self, payload: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        halves = _halves(payload, blocks)
        if runs_triton(payload):
            return self._decode_on_gpu(halves, blocks.memory.empty(len(halves), torch.float32, payload.device), adding=False)
        if not _has_kernel(payload):
            return decode_in_torch(halves)
        from stretto.compress.kernels import bfloat16_cpu as kernels

        out = blocks.memory.empty(len(halves), torch.float32, payload.device)
        _refuse_if(kernels.decode(halves.numpy().view("u2"), out.numpy().view("u4")))
        return out

    def encode_residual(self, values: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        if runs_triton(values):
            return self._encode_on_gpu(values, blocks, draw, residual=True)
        if _has_kernel(values):
            return self._encode_by_kernel(values, blocks, draw, residual=True)
        payload = self.encode(values, blocks, draw)
        values.sub_(payload.view(torch.bfloat16))
        return payload

    def add_decoded(self, payload: Tensor, blocks: Blocks, draw: Draw, total: Tensor) -> None:
        halves = _halves(payload, blocks)
        if runs_triton(payload):
            self._decode_on_gpu(halves, total, adding=True)
            return
        if not _has_kernel(payload):
            total.add_(decode_in_torch(halves))
            return
        from stretto.compress.kernels import bfloat16_cpu as kernels

        _refuse_if(kernels.add_decoded(halves.numpy().view("u2"), total.numpy()))

    def _to_add(self, values: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        """For each value the number below 2^16 to add to its bits before the lower half is cut off."""
        if self.stochastic:
            return (draw.uniform(blocks, draw.own, values.device) * 65536).int()
        magnitude = (values.view(torch.int32) & MAGNITUDE).clamp(max=self.limit_bits)
        return 0x7FFF + (magnitude >> 16 & 1)

    def _encode_by_kernel(self, values: Tensor, blocks: Blocks, draw: Draw, *, residual: bool) -> Tensor:
        from stretto.compress.kernels import bfloat16_cpu as kernels

        halves = blocks.memory.empty(len(values), torch.int16, values.device)
        bits, out = values.numpy().view("u4"), halves.numpy().view("u2")
        if self.stochastic:
            bounds, keys = blocks.bounds.numpy(), blocks.keys.numpy()
            kernels.encode_stochastic(bits, bounds, keys, draw.own, self.limit_bits, out, residual)
        else:
            (kernels.encode_residual if residual else kernels.encode)(bits, self.limit_bits, out)
        return halves.view(torch.uint8)

    def _encode_on_gpu(self, values: Tensor, blocks: Blocks, draw: Draw, *, residual: bool) -> Tensor:
        from stretto.compress.kernels import bfloat16_cuda

        if self.stochastic:
            return bfloat16_cuda.encode_stochastic(values, blocks, draw.own, self.limit_bits, residual)
        return bfloat16_cuda.encode(values, self.limit_bits, residual)

    def _decode_on_gpu(self, halves: Tensor, out: Tensor, *, adding: bool) -> Tensor:
        from stretto.compress.kernels import bfloat16_cuda

        _refuse_if(bfloat16_cuda.decode(halves, out, adding))
        return out


@dataclass(frozen=True, slots=True)
class _BFloat16OfSeveral(BFloat16):
    world_size: int = 1

    @property
    def limit_bits(self) -> int:
        """Of 2^127 / P, rounded down to 8 significant bits."""
        limit = torch.tensor(2.0**127 / self.world_size, dtype=torch.float32, device="cpu")
        return int(limit.view(torch.int32)) & 0x7FFF0000


def encode_in_torch(values: Tensor, to_add: Tensor, limit_bits: int) -> Tensor:
    bits = values.view(torch.int32)
    magnitude = (bits & MAGNITUDE).clamp_(max=limit_bits).add_(to_add) >> 16
    return (magnitude | (bits >> 16 & 0x8000)).to(torch.int16).view(torch.uint8)


def decode_in_torch(halves: Tensor) -> Tensor:
    # A sum in float64 of finite bfloat16 is finite, however many they are; of others it is not.
    numbers = halves.view(torch.bfloat16)
    _refuse_if(not math.isfinite(numbers.sum(dtype=torch.float64)))
    return numbers.float()


def _halves(payload: Tensor, blocks: Blocks) -> Tensor:
    if len(payload) != 2 * blocks.num_elements:
        raise MalformedPayload(f"{len(payload)} bytes where {blocks.num_elements} bfloat16 need {2 * blocks.num_elements}")
    return (payload if payload.storage_offset() % 2 == 0 else payload.clone()).view(torch.int16)


def _refuse_if(not_finite: bool) -> None:
    if not_finite:
        raise MalformedPayload("a bfloat16 that is not finite")


def _has_kernel(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and has_numba()
