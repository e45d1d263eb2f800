"""bfloat16 on the CPU: one pass each, on the bits. The same bytes as `BFloat16.encode_in_torch`.

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
from stretto.compress.kernels.compiling import compiled
from stretto.compress.kernels.random_numbers_cpu import bits_of, mix
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sixteen_bits import halves_of, refuse_if

Bits = NDArray[np.uint32]
Halves = NDArray[np.uint16]

MAGNITUDE, SIGN = np.uint32(0x7FFFFFFF), np.uint32(0x80000000)
BELOW_HALF, ONE, SIXTEEN = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)
INFINITE = np.uint16(0x7F80)
FINITE_BITS = np.uint16(0x7FFF)


def encode(codec: BFloat16, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    halves = blocks.pool.empty(len(values), torch.int16, values.device)
    bits, out = values.numpy().view("u4"), halves.numpy().view("u2")
    if codec.stochastic:
        bounds, keys = blocks.bounds.numpy(), blocks.keys.numpy()
        _encode_stochastic(bits, bounds, keys, random.own, codec.limit_bits, out, residual)
    else:
        (_encode_residual if residual else _encode)(bits, codec.limit_bits, out)
    return halves.view(torch.uint8)


def decode(codec: BFloat16, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    halves = halves_of(payload, blocks).numpy().view("u2")
    refuse_if(_add_decoded(halves, out.numpy()) if adding else _decode(halves, out.numpy().view("u4")))


@compiled
def rounded(bits: np.uint32, limit: np.uint32) -> np.uint32:
    magnitude = min(np.uint32(bits & MAGNITUDE), limit)
    magnitude = np.uint32(magnitude + np.uint32(BELOW_HALF + np.uint32(np.uint32(magnitude >> SIXTEEN) & ONE)))
    return np.uint32(magnitude | np.uint32(bits & SIGN))


@compiled
def _encode(bits: Bits, limit_bits: int, out: Halves) -> None:
    limit = np.uint32(limit_bits)
    for i in range(len(bits)):
        out[i] = np.uint16(rounded(bits[i], limit) >> SIXTEEN)


@compiled
def without(bits: np.uint32, half: np.uint32) -> np.uint32:
    return np.float32(np.uint32(bits).view(np.float32) - np.uint32(half << SIXTEEN).view(np.float32)).view(np.uint32)


@compiled
def _encode_residual(bits: Bits, limit_bits: int, out: Halves) -> None:
    """`bits`: those of the values on entry, of the residual on return."""
    limit = np.uint32(limit_bits)
    for i in range(len(bits)):
        half = np.uint32(rounded(bits[i], limit) >> SIXTEEN)
        out[i] = np.uint16(half)
        bits[i] = without(bits[i], half)


@compiled
def _encode_stochastic(
    bits: Bits, bounds: NDArray[np.int64], keys: NDArray[np.int64], key: int, limit_bits: int, out: Halves, residual: bool
) -> None:
    limit = np.uint32(limit_bits)
    for b in range(len(keys)):
        base = mix(np.uint32(keys[b] ^ key))
        x, halves = bits[bounds[b] : bounds[b + 1]], out[bounds[b] : bounds[b + 1]]
        for i in range(len(x)):
            magnitude = min(np.uint32(x[i] & MAGNITUDE), limit)
            magnitude = np.uint32(magnitude + np.uint32(bits_of(base, i) >> SIXTEEN))
            halves[i] = np.uint16(np.uint32(magnitude | np.uint32(x[i] & SIGN)) >> SIXTEEN)
        if residual:
            for i in range(len(x)):
                x[i] = without(x[i], np.uint32(halves[i]))


@compiled
def _decode(halves: Halves, out: Bits) -> Any:
    """Whether any was not finite."""
    largest = np.uint16(0)
    for i in range(len(halves)):
        largest = max(largest, np.uint16(halves[i] & FINITE_BITS))
        out[i] = np.uint32(np.uint32(halves[i]) << SIXTEEN)
    return largest >= INFINITE


@compiled
def _add_decoded(halves: Halves, total: NDArray[np.float32]) -> Any:
    """Whether any was not finite; `total` is of no use then."""
    largest = np.uint16(0)
    for i in range(len(halves)):
        largest = max(largest, np.uint16(halves[i] & FINITE_BITS))
        total[i] = total[i] + np.uint32(np.uint32(halves[i]) << SIXTEEN).view(np.float32)
    return largest >= INFINITE
