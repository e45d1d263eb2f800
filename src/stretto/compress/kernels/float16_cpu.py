"""Halves on the CPU: one pass each, on the bits. The same bytes as torch's conversion, which needs several passes to subtract,
add or check as well.

To a half: a normal one drops 13 bits of the mantissa, rounded (add 0xfff and the lowest bit that stays), and 112 of the exponent.
Below 2^-14 halves are multiples of 2^-24, as are floats in [0.5, 1): adding 0.5 rounds, and the mantissa is the half. From a
half: the reverse; below 2^-14 a multiple of 2^-24. Both results are computed and one is chosen, so loops have no branches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.compress.float16 import Float16
from stretto.compress.kernels.compiling import compiled
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sixteen_bits import halves_of, refuse_if

Bits = NDArray[np.uint32]
Halves = NDArray[np.uint16]

MAGNITUDE, SIGN = np.uint32(0x7FFFFFFF), np.uint32(0x80000000)
ONE, THIRTEEN, SIXTEEN = np.uint32(1), np.uint32(13), np.uint32(16)
BELOW_HALF = np.uint32(0xFFF)
BIAS = np.uint32(112 << 23)
NORMAL = np.uint32(113 << 23)  # 2^-14
POINT_FIVE, POINT_FIVE_BITS = np.float32(0.5), np.uint32(0x3F000000)
HALF_MAGNITUDE, HALF_NORMAL, HALF_INFINITE = np.uint32(0x7FFF), np.uint32(0x400), np.uint32(0x7C00)
SMALLEST = np.float32(2.0**-24)


def encode(codec: Float16, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    halves = blocks.pool.empty(len(values), torch.int16, values.device)
    limit_bits = int(torch.tensor(codec.limit, dtype=torch.float32, device="cpu").view(torch.int32))
    (_encode_residual if residual else _encode)(values.numpy().view("u4"), limit_bits, halves.numpy().view("u2"))
    return halves.view(torch.uint8)


def decode(codec: Float16, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    halves = halves_of(payload, blocks).numpy().view("u2")
    refuse_if(_add_decoded(halves, out.numpy()) if adding else _decode(halves, out.numpy().view("u4")))


@compiled
def to_half(bits: np.uint32, limit: np.uint32) -> np.uint32:
    magnitude = min(np.uint32(bits & MAGNITUDE), limit)
    lowest = np.uint32(np.uint32(magnitude >> THIRTEEN) & ONE)
    normal = np.uint32(np.uint32(np.uint32(magnitude + BELOW_HALF) + np.uint32(lowest - BIAS)) >> THIRTEEN)
    small = np.uint32(np.float32(np.uint32(magnitude).view(np.float32) + POINT_FIVE).view(np.uint32) - POINT_FIVE_BITS)
    half = normal if magnitude >= NORMAL else small
    return np.uint32(half | np.uint32(np.uint32(bits & SIGN) >> SIXTEEN))


@compiled
def from_half(half: np.uint32) -> np.uint32:
    magnitude = np.uint32(half & HALF_MAGNITUDE)
    normal = np.uint32(np.uint32(magnitude << THIRTEEN) + BIAS)
    small = np.float32(np.float32(np.int32(magnitude)) * SMALLEST).view(np.uint32)
    bits = normal if magnitude >= HALF_NORMAL else small
    return np.uint32(bits | np.uint32(np.uint32(half << SIXTEEN) & SIGN))


@compiled
def _encode(bits: Bits, limit_bits: int, out: Halves) -> None:
    limit = np.uint32(limit_bits)
    for i in range(len(bits)):
        out[i] = np.uint16(to_half(bits[i], limit))


@compiled
def _encode_residual(bits: Bits, limit_bits: int, out: Halves) -> None:
    """`bits`: those of the values on entry, of the residual on return."""
    limit = np.uint32(limit_bits)
    for i in range(len(bits)):
        half = to_half(bits[i], limit)
        out[i] = np.uint16(half)
        said = np.uint32(from_half(half)).view(np.float32)
        bits[i] = np.float32(np.uint32(bits[i]).view(np.float32) - said).view(np.uint32)


@compiled
def _decode(halves: Halves, out: Bits) -> Any:
    """Whether any was not finite."""
    largest = np.uint32(0)
    for i in range(len(halves)):
        half = np.uint32(halves[i])
        largest = max(largest, np.uint32(half & HALF_MAGNITUDE))
        out[i] = from_half(half)
    return largest >= HALF_INFINITE


@compiled
def _add_decoded(halves: Halves, total: NDArray[np.float32]) -> Any:
    """Whether any was not finite; `total` is of no use then."""
    largest = np.uint32(0)
    for i in range(len(halves)):
        half = np.uint32(halves[i])
        largest = max(largest, np.uint32(half & HALF_MAGNITUDE))
        total[i] = total[i] + np.uint32(from_half(half)).view(np.float32)
    return largest >= HALF_INFINITE
