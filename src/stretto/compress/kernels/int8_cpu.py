"""Signed bytes with scales on the CPU: the same bytes as `int8.py` and `int8_hop.py` compute in torch.

A block is read twice while it is in the cache: for its largest magnitude, and to be divided by the scale. What makes loops
vectorise is said in `sixteen_bits_cpu.py`. Codes are uint8 throughout, int8 in two's complement.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from stretto.compress import bits as packing
from stretto.compress import int8
from stretto.compress.kernels.bits_cpu import Bits, Floats, float_of, largest_bits
from stretto.compress.kernels.bits_cpu import Bytes as Codes
from stretto.compress.kernels.bits_cpu import Ints as Bounds
from stretto.compress.kernels.compiling import compiled
from stretto.compress.kernels.random_numbers_cpu import GOLDEN, first_state, uniform
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys

FINITE = np.uint32(0x7F7FFFFF)
LOWER, UPPER = np.uint32(int8.LOWER_BITS), np.uint32(0xFFFFFFFF ^ int8.LOWER_BITS)
SMALLEST, LARGEST, ALL_ZERO = np.uint32(int8.SMALLEST_SCALE), np.uint32(int8.LARGEST_SCALE), np.uint32(int8.ALL_ZERO)
MOST, ONE, NOTHING = np.float32(127), np.float32(1), np.uint32(0)
LARGEST_SCALE = LARGEST.view(np.float32)
ROUNDS = np.float32(1.5 * 2**23)  # leaves no room for a fraction: the lowest byte of x + it is x rounded, ties to even
GOOD, BAD_SCALE, BAD_CODE, NOT_ZERO = 0, 1, 2, 3  # numbers in `int8.PROBLEMS`


def encode(codec: int8.Int8, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    new, bounds, keys = packing.blank(blocks, 8, 1, values), blocks.bounds.numpy(), blocks.keys.numpy()
    scales, codes = new.scales.numpy().view("u4"), new.packed.numpy()
    _encode(values.numpy().view("u4"), bounds, keys, random.own, codec.stochastic, scales, codes, residual)
    return new.whole


def decode(codec: int8.Int8, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    _, scales, codes = packing.opened(payload, blocks, 8, 1)
    int8.refuse(_decode(scales.numpy().view("u4"), codes.numpy(), blocks.bounds.numpy(), out.numpy(), adding))


@compiled
def scale_bits_of(bits: Bits) -> np.uint32:
    largest = largest_bits(bits)
    if largest <= ALL_ZERO:
        return NOTHING
    quotient = np.float32(float_of(min(largest, FINITE)) / MOST).view(np.uint32)
    return min(max(np.uint32(np.uint32(quotient + LOWER) & UPPER), SMALLEST), LARGEST)


@compiled
def nearest(x: np.float32, divisor: np.float32) -> np.float32:
    """Also of what is not finite, which a sum on its way may become: 127 then. (A cast of such to an integer is undefined.)"""
    quotient = x / divisor
    quotient = quotient if quotient <= MOST else MOST
    return np.float32(np.rint(quotient if quotient >= -MOST else -MOST))


@compiled
def quantise(bits: Bits, scale: np.float32, codes: Codes) -> None:
    """Only with the largest scale can there be quotients that round to more than 127, or that are not finite."""
    divisor = scale if scale > 0 else ONE
    if scale >= LARGEST_SCALE:
        for i in range(len(bits)):
            codes[i] = np.uint8(np.int32(nearest(float_of(bits[i]), divisor)))
    else:
        for i in range(len(bits)):
            codes[i] = np.uint8(np.float32(float_of(bits[i]) / divisor + ROUNDS).view(np.uint32))


@compiled
def quantise_stochastic(bits: Bits, scale: np.float32, state: np.uint32, codes: Codes) -> None:
    divisor = scale if scale > 0 else ONE
    for i in range(len(bits)):
        quotient = float_of(bits[i]) / divisor
        down = np.floor(quotient)
        rounded = down + (ONE if uniform(state) < quotient - down else np.float32(0))
        state = np.uint32(state + GOLDEN)
        codes[i] = np.uint8(np.int32(max(min(rounded, MOST), -MOST)))


@compiled
def subtract(codes: Codes, scale: np.float32, bits: Bits) -> None:
    for i in range(len(codes)):
        bits[i] = np.float32(float_of(bits[i]) - np.float32(np.int8(codes[i])) * scale).view(np.uint32)


@compiled
def problem_of(scale_bits: np.uint32, codes: Codes) -> Any:
    if scale_bits == 0:
        some = np.uint8(0)
        for i in range(len(codes)):
            some |= codes[i]
        return NOT_ZERO if some else GOOD
    return GOOD if SMALLEST <= scale_bits <= LARGEST and scale_bits & LOWER == 0 else BAD_SCALE


@compiled
def put(codes: Codes, scale: np.float32, out: Floats) -> Any:
    """Whether there was a code of -128."""
    lowest = np.int8(0)
    for i in range(len(codes)):
        code = np.int8(codes[i])
        lowest = min(lowest, code)
        out[i] = np.float32(code) * scale
    return lowest == -128


@compiled
def add(codes: Codes, scale: np.float32, total: Floats) -> Any:
    lowest = np.int8(0)
    for i in range(len(codes)):
        code = np.int8(codes[i])
        lowest = min(lowest, code)
        total[i] = total[i] + np.float32(code) * scale
    return lowest == -128


@compiled
def _encode(
    bits: Bits, bounds: Bounds, keys: Bounds, key: int, stochastic: bool, scales: Bits, codes: Codes, residual: bool
) -> None:
    """`bits`: those of the values; with `residual`, on return of what the codes leave out."""
    for b in range(len(scales)):
        x, out = bits[bounds[b] : bounds[b + 1]], codes[bounds[b] : bounds[b + 1]]
        scales[b] = scale_bits_of(x)
        if stochastic:
            quantise_stochastic(x, float_of(scales[b]), first_state(keys[b], key, 0), out)
        else:
            quantise(x, float_of(scales[b]), out)
        if residual:
            subtract(out, float_of(scales[b]), x)


@compiled
def _decode(scales: Bits, codes: Codes, bounds: Bounds, out: Floats, adding: bool) -> Any:
    """Write to `out`, or add to it. A number of `int8.PROBLEMS`: 0 if there is none; else `out` is of no use."""
    for b in range(len(scales)):
        here, x = codes[bounds[b] : bounds[b + 1]], out[bounds[b] : bounds[b + 1]]
        problem = problem_of(scales[b], here)
        if problem:
            return problem
        if add(here, float_of(scales[b]), x) if adding else put(here, float_of(scales[b]), x):
            return BAD_CODE
    return GOOD


# Hops: each unit is its scale and then its codes, at any address.


def encode_units(values: Floats, unit: int, out: Codes) -> None:
    _encode_units(values.view(np.uint32), unit, out)


def decode_units(payload: Codes, unit: int, values: Floats, adding: bool) -> None:
    int8.refuse(_decode_units(payload, unit, values, adding))


def settle_units(values: Floats, unit: int) -> None:
    _settle_units(values.view(np.uint32), unit)


@compiled
def write_scale(bits: np.uint32, out: Codes) -> None:
    for i in range(4):
        out[i] = np.uint8(bits >> np.uint32(8 * i))


@compiled
def read_scale(payload: Codes) -> np.uint32:
    bits = np.uint32(0)
    for i in range(4):
        bits = np.uint32(bits | np.uint32(np.uint32(payload[i]) << np.uint32(8 * i)))
    return bits


@compiled
def _encode_units(bits: Bits, unit: int, out: Codes) -> None:
    at = 0
    for start in range(0, len(bits), unit):
        x = bits[start : start + unit]
        scale = scale_bits_of(x)
        write_scale(scale, out[at : at + 4])
        quantise(x, float_of(scale), out[at + 4 : at + 4 + len(x)])
        at += 4 + len(x)


@compiled
def _settle_units(bits: Bits, unit: int) -> None:
    for start in range(0, len(bits), unit):
        x = bits[start : start + unit]
        scale = float_of(scale_bits_of(x))
        divisor = scale if scale > 0 else ONE
        for i in range(len(x)):
            code = np.int32(nearest(float_of(x[i]), divisor))  # by way of int: no -0
            x[i] = np.float32(np.float32(code) * scale).view(np.uint32)


@compiled
def _decode_units(payload: Codes, unit: int, out: Floats, adding: bool) -> Any:
    """As `_decode`."""
    at = 0
    for start in range(0, len(out), unit):
        x = out[start : start + unit]
        scale, codes = read_scale(payload[at : at + 4]), payload[at + 4 : at + 4 + len(x)]
        problem = problem_of(scale, codes)
        if problem:
            return problem
        if add(codes, float_of(scale), x) if adding else put(codes, float_of(scale), x):
            return BAD_CODE
        at += 4 + len(x)
    return GOOD
