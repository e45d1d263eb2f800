"""Half precision: 16 bits per value, and payloads add up.

    C(x)_i = x_i rounded to the nearest half (ties to even), magnitudes above `limit` brought down to it

Bits:       16 n. Layout: n halves (IEEE binary16), little-endian.
Error:      at most 2^-11 |x_i| where 2^-14 <= |x_i| <= limit; at most 2^-25 below (halves have no more than 2^-24 there). So
            gradients that are small throughout lose much: scale the loss, or use `BFloat16`.
Range:      `limit` is 65504, the largest half. Of P payloads that are to be added, the exchange divides values by P before, and
            `among(P)` brings the limit down to 32768 / P: then no sum of them overflows, in whatever order it is made, P < 1000.
            (At 65504 each, two workers with large values would give infinity.) With `ErrorFeedback` what is above is said later.
Contraction: elementwise, 1 - delta <= 2^-22 for values in range; never more than 1, as rounding moves no value past zero or twice
            its size. Biased. The sums are rounded too, at every addition: error feedback does not see that.
Invariant:  encoding what was decoded gives the same payload, except that a sum above `limit` comes down to it.
Reference:  Micikevicius et al., "Mixed Precision Training", ICLR 2018. Departs from it: saturates where a conversion overflows.
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
from stretto.errors import MalformedPayload

LARGEST = 65504.0
SHARED_OUT = 32768.0  # half of it: room for the rounding of a sum


@dataclass(frozen=True, slots=True)
class Float16(Codec):
    """Values as halves."""

    payload_dtype: ClassVar[torch.dtype | None] = torch.float16

    @property
    def limit(self) -> float:
        return LARGEST

    def among(self, world_size: int) -> Codec:
        """The codec of one payload of `world_size` that are to be added."""
        return self if world_size == 1 else _Float16OfSeveral(world_size)

    def blocks(self, layout: Layout) -> Blocks:
        return layout.whole()

    def num_bytes(self, blocks: Blocks) -> int:
        return 2 * blocks.num_elements

    def encode(self, values: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        if runs_triton(values):
            return _encode_on_gpu(values, self.limit, residual=False)
        if _has_kernel(values):
            return self._encode_by_kernel(values, blocks, residual=False)
        return encode_in_torch(values, self.limit)

    def decode(self, payload: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        halves = _halves(payload, blocks)
        if runs_triton(payload):
            return _decode_on_gpu(halves, blocks.memory.empty(len(halves), torch.float32, payload.device), adding=False)
        if not _has_kernel(payload):
            return decode_in_torch(halves)
        from stretto.compress.kernels import float16_cpu as kernels

        out = blocks.memory.empty(len(halves), torch.float32, payload.device)
        _refuse_if(kernels.decode(halves.numpy().view("u2"), out.numpy().view("u4")))
        return out

    def encode_residual(self, values: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        if runs_triton(values):
            return _encode_on_gpu(values, self.limit, residual=True)
        if _has_kernel(values):
            return self._encode_by_kernel(values, blocks, residual=True)
        payload = encode_in_torch(values, self.limit)
        values.sub_(payload.view(torch.float16))
        return payload

    def add_decoded(self, payload: Tensor, blocks: Blocks, draw: Draw, total: Tensor) -> None:
        halves = _halves(payload, blocks)
        if runs_triton(payload):
            _decode_on_gpu(halves, total, adding=True)
            return
        if not _has_kernel(payload):
            total.add_(decode_in_torch(halves))
            return
        from stretto.compress.kernels import float16_cpu as kernels

        _refuse_if(kernels.add_decoded(halves.numpy().view("u2"), total.numpy()))

    def _encode_by_kernel(self, values: Tensor, blocks: Blocks, *, residual: bool) -> Tensor:
        from stretto.compress.kernels import float16_cpu as kernels

        halves = blocks.memory.empty(len(values), torch.int16, values.device)
        limit_bits = int(torch.tensor(self.limit, dtype=torch.float32, device="cpu").view(torch.int32))
        encode = kernels.encode_residual if residual else kernels.encode
        encode(values.numpy().view("u4"), limit_bits, halves.numpy().view("u2"))
        return halves.view(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Float16OfSeveral(Float16):
    world_size: int

    @property
    def limit(self) -> float:
        mantissa, exponent = math.frexp(SHARED_OUT / self.world_size)
        return math.ldexp(math.floor(mantissa * 2048), exponent - 11)  # a half: 11 significant bits, rounded down


def encode_in_torch(values: Tensor, limit: float) -> Tensor:
    # Rounded first and brought down after, which is the same: `limit` is a half, and rounding keeps order.
    return values.to(torch.float16).clamp_(-limit, limit).view(torch.uint8)


def decode_in_torch(halves: Tensor) -> Tensor:
    # A sum in float32 of finite halves is finite, however many they are; of others it is not.
    numbers = halves.view(torch.float16)
    _refuse_if(not math.isfinite(numbers.sum(dtype=torch.float32)))
    return numbers.float()


def _halves(payload: Tensor, blocks: Blocks) -> Tensor:
    if len(payload) != 2 * blocks.num_elements:
        raise MalformedPayload(f"{len(payload)} bytes where {blocks.num_elements} halves need {2 * blocks.num_elements}")
    return (payload if payload.storage_offset() % 2 == 0 else payload.clone()).view(torch.int16)


def _refuse_if(not_finite: bool) -> None:
    if not_finite:
        raise MalformedPayload("a half that is not finite")


def _has_kernel(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and has_numba()


def _encode_on_gpu(values: Tensor, limit: float, *, residual: bool) -> Tensor:
    from stretto.compress.kernels import float16_cuda

    return float16_cuda.encode(values, limit, residual)


def _decode_on_gpu(halves: Tensor, out: Tensor, *, adding: bool) -> Tensor:
    from stretto.compress.kernels import float16_cuda

    _refuse_if(float16_cuda.decode(halves, out, adding))
    return out
