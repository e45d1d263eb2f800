"""Numbers of 16 bits on the CPU: one pass each, on the bits. The same bytes as torch's conversions, which need several passes to
bring values down to a limit, subtract, add or check as well.

To a bfloat16: the upper half, rounded (add 0x7fff and the lowest bit that stays). To a half: a normal one drops 13 bits of the
mantissa, rounded in the same way, and 112 of the exponent. Below 2^-14 halves are multiples of 2^-24, as are floats in [0.5, 1):
adding 0.5 rounds, and the mantissa is the half. From a half: the reverse; below 2^-14 a multiple of 2^-24. Both results are
computed and one is chosen, so loops have no branches; of a format that does not change in a loop the compiler makes two loops.

What makes loops vectorise: indices begin at zero of a slice (elsewhere each has a check for negative ones); every step is cast
back to 32 bits (Numba widens to 64); and memory is seen through one array only, as integers (of two that overlap LLVM fears the
worst).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.compress.bfloat16 import BFloat16
from stretto.compress.kernels.bits_cpu import Bits, Floats, Ints, float_of
from stretto.compress.kernels.compiling import compiled
from stretto.compress.kernels.random_numbers_cpu import GOLDEN, first_state, mix
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sixteen_bits import SixteenBits, halves_of, refuse_if

Halves = NDArray[np.uint16]

MAGNITUDE, SIGN = np.uint32(0x7FFFFFFF), np.uint32(0x80000000)
ONE, THIRTEEN, SIXTEEN = np.uint32(1), np.uint32(13), np.uint32(16)
BELOW_HALF, BELOW_HALF_OF_BRAIN = np.uint32(0xFFF), np.uint32(0x7FFF)  # of the bits that are dropped
BIAS = np.uint32(112 << 23)
NORMAL = np.uint32(113 << 23)  # 2^-14
POINT_FIVE, POINT_FIVE_BITS = np.float32(0.5), np.uint32(0x3F000000)
HALF_MAGNITUDE, HALF_NORMAL = np.uint32(0x7FFF), np.uint32(0x400)
HALF_INFINITE, BRAIN_INFINITE = np.uint32(0x7C00), np.uint32(0x7F80)
SMALLEST = np.float32(2.0**-24)


def encode(codec: SixteenBits, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    halves = blocks.pool.empty(len(values), torch.int16, values.device)
    bits, out = values.numpy().view("u4"), halves.numpy().view("u2")
    if isinstance(codec, BFloat16) and codec.stochastic:
        _encode_stochastic(bits, blocks.bounds.numpy(), blocks.keys.numpy(), random.own, codec.limit_bits, out, residual)
    else:
        _encode(bits, codec.limit_bits, codec.payload_dtype is torch.bfloat16, out, residual)
    return halves.view(torch.uint8)


def decode(codec: SixteenBits, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    halves = halves_of(payload, blocks).numpy().view("u2")
    refuse_if(_decode(halves, codec.payload_dtype is torch.bfloat16, out.numpy(), adding))


@compiled
def to_brain(bits: np.uint32, limit: np.uint32) -> np.uint32:
    magnitude = min(np.uint32(bits & MAGNITUDE), limit)
    magnitude = np.uint32(magnitude + np.uint32(BELOW_HALF_OF_BRAIN + np.uint32(np.uint32(magnitude >> SIXTEEN) & ONE)))
    return np.uint32(np.uint32(magnitude | np.uint32(bits & SIGN)) >> SIXTEEN)


@compiled
def to_half(bits: np.uint32, limit: np.uint32) -> np.uint32:
    magnitude = min(np.uint32(bits & MAGNITUDE), limit)
    lowest = np.uint32(np.uint32(magnitude >> THIRTEEN) & ONE)
    normal = np.uint32(np.uint32(np.uint32(magnitude + BELOW_HALF) + np.uint32(lowest - BIAS)) >> THIRTEEN)
    small = np.uint32(np.float32(float_of(magnitude) + POINT_FIVE).view(np.uint32) - POINT_FIVE_BITS)
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
def value_of(half: np.uint32, brain: bool) -> np.float32:
    return float_of(np.uint32(half << SIXTEEN) if brain else from_half(half))


@compiled
def _encode(bits: Bits, limit_bits: int, brain: bool, out: Halves, residual: bool) -> None:
    """`bits`: those of the values; with `residual`, on return of what is left out."""
    limit = np.uint32(limit_bits)
    for i in range(len(bits)):
        half = to_brain(bits[i], limit) if brain else to_half(bits[i], limit)
        out[i] = np.uint16(half)
        if residual:
            bits[i] = np.float32(float_of(bits[i]) - value_of(half, brain)).view(np.uint32)


@compiled
def _encode_stochastic(bits: Bits, bounds: Ints, keys: Ints, key: int, limit_bits: int, out: Halves, residual: bool) -> None:
    limit = np.uint32(limit_bits)
    for b in range(len(keys)):
        state = first_state(keys[b], key, 0)
        x, halves = bits[bounds[b] : bounds[b + 1]], out[bounds[b] : bounds[b + 1]]
        for i in range(len(x)):
            magnitude = min(np.uint32(x[i] & MAGNITUDE), limit)
            magnitude = np.uint32(magnitude + np.uint32(mix(state) >> SIXTEEN))
            halves[i] = np.uint16(np.uint32(magnitude | np.uint32(x[i] & SIGN)) >> SIXTEEN)
            state = np.uint32(state + GOLDEN)
        if residual:
            for i in range(len(x)):
                x[i] = np.float32(float_of(x[i]) - value_of(np.uint32(halves[i]), True)).view(np.uint32)


@compiled
def _decode(halves: Halves, brain: bool, out: Floats, adding: bool) -> Any:
    """Write to `out`, or add to it. Whether any was not finite; `out` is of no use then."""
    largest = np.uint32(0)
    for i in range(len(halves)):
        half = np.uint32(halves[i])
        largest = max(largest, np.uint32(half & HALF_MAGNITUDE))
        value = value_of(half, brain)
        out[i] = out[i] + value if adding else value
    return largest >= (BRAIN_INFINITE if brain else HALF_INFINITE)
