"""Signed bytes with scales on the CPU: the same bytes as `int8.py` and `int8_hop.py` compute in torch.

A block is read twice while it is in the cache: for its largest magnitude, and to be divided by the scale. Largest magnitudes are
found among bits: positive floats have the order of their bits, and of integers a maximum vectorises. See `bfloat16_cpu.py` for
the rest. Codes are uint8 throughout, int8 in two's complement.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stretto.compress import bits as packing
from stretto.compress import int8
from stretto.compress.kernels.compiling import compiled
from stretto.compress.kernels.random_numbers_cpu import bits_of, mix
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys

Bits = NDArray[np.uint32]
Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Bounds = NDArray[np.int64]

MAGNITUDE, FINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F7FFFFF)
LOWER, UPPER = np.uint32(int8.LOWER_BITS), np.uint32(0xFFFFFFFF ^ int8.LOWER_BITS)
SMALLEST, LARGEST, ALL_ZERO = np.uint32(int8.SMALLEST_SCALE), np.uint32(int8.LARGEST_SCALE), np.uint32(int8.ALL_ZERO)
MOST, ONE, NOTHING = np.float32(127), np.float32(1), np.uint32(0)
ULP, EIGHT = np.float32(2.0**-24), np.uint32(8)
LARGEST_SCALE = LARGEST.view(np.float32)
ROUNDS = np.float32(1.5 * 2**23)  # leaves no room for a fraction: the lowest byte of x + it is x rounded, ties to even
GOOD, BAD_SCALE, BAD_CODE, NOT_ZERO = 0, 1, 2, 3  # numbers in `int8.PROBLEMS`


def encode(codec: int8.Int8, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    new = packing.blank(blocks, 8, 1, values)
    bits, bounds, scales, codes = (
        values.numpy().view("u4"),
        blocks.bounds.numpy(),
        new.scales.numpy().view("u4"),
        new.packed.numpy(),
    )
    if codec.stochastic:
        _encode_stochastic(bits, bounds, blocks.keys.numpy(), random.own, scales, codes, residual)
    else:
        (_encode_residual if residual else _encode)(bits, bounds, scales, codes)
    return new.whole


def decode(codec: int8.Int8, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    _, scales, codes = packing.opened(payload, blocks, 8, 1)
    kernel = _add_decoded if adding else _decode
    int8.refuse(kernel(scales.numpy().view("u4"), codes.numpy(), blocks.bounds.numpy(), out.numpy()))


@compiled
def float_of(bits: np.uint32) -> np.float32:
    return np.uint32(bits).view(np.float32)


@compiled
def scale_bits_of(bits: Bits) -> np.uint32:
    largest = np.uint32(0)
    for i in range(len(bits)):
        largest = max(largest, np.uint32(bits[i] & MAGNITUDE))
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
def quantise_residual(bits: Bits, scale: np.float32, codes: Codes) -> None:
    divisor = scale if scale > 0 else ONE
    for i in range(len(bits)):
        x = float_of(bits[i])
        rounded = nearest(x, divisor)
        codes[i] = np.uint8(np.int32(rounded))
        bits[i] = np.float32(x - rounded * scale).view(np.uint32)


@compiled
def quantise_stochastic(bits: Bits, scale: np.float32, base: np.uint32, codes: Codes) -> None:
    divisor = scale if scale > 0 else ONE
    for i in range(len(bits)):
        quotient = float_of(bits[i]) / divisor
        down = np.floor(quotient)
        uniform = np.float32(np.int32(bits_of(base, i) >> EIGHT)) * ULP
        rounded = down + (ONE if uniform < quotient - down else np.float32(0))
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
def _encode(bits: Bits, bounds: Bounds, scales: Bits, codes: Codes) -> None:
    for b in range(len(scales)):
        start, stop = bounds[b], bounds[b + 1]
        scales[b] = scale_bits_of(bits[start:stop])
        quantise(bits[start:stop], float_of(scales[b]), codes[start:stop])


@compiled
def _encode_residual(bits: Bits, bounds: Bounds, scales: Bits, codes: Codes) -> None:
    """`bits`: those of the values on entry, of the residual on return."""
    for b in range(len(scales)):
        start, stop = bounds[b], bounds[b + 1]
        scales[b] = scale_bits_of(bits[start:stop])
        quantise_residual(bits[start:stop], float_of(scales[b]), codes[start:stop])


@compiled
def _encode_stochastic(
    bits: Bits, bounds: Bounds, keys: NDArray[np.int64], key: int, scales: Bits, codes: Codes, residual: bool
) -> None:
    for b in range(len(scales)):
        x, out = bits[bounds[b] : bounds[b + 1]], codes[bounds[b] : bounds[b + 1]]
        scales[b] = scale_bits_of(x)
        quantise_stochastic(x, float_of(scales[b]), mix(np.uint32(keys[b] ^ key)), out)
        if residual:
            subtract(out, float_of(scales[b]), x)


@compiled
def _decode(scales: Bits, codes: Codes, bounds: Bounds, out: Floats) -> Any:
    """A number of `int8.PROBLEMS`: 0 if there is none."""
    for b in range(len(scales)):
        start, stop = bounds[b], bounds[b + 1]
        problem = problem_of(scales[b], codes[start:stop])
        if problem:
            return problem
        if put(codes[start:stop], float_of(scales[b]), out[start:stop]):
            return BAD_CODE
    return GOOD


@compiled
def _add_decoded(scales: Bits, codes: Codes, bounds: Bounds, total: Floats) -> Any:
    """As `decode`; if there is a problem, `total` is of no use."""
    for b in range(len(scales)):
        start, stop = bounds[b], bounds[b + 1]
        problem = problem_of(scales[b], codes[start:stop])
        if problem:
            return problem
        if add(codes[start:stop], float_of(scales[b]), total[start:stop]):
            return BAD_CODE
    return GOOD


# Hops: each unit is its scale and then its codes, at any address.


def encode_units(values: Floats, unit: int, out: Codes) -> None:
    _encode_units(values.view(np.uint32), unit, out)


def add_units(payload: Codes, unit: int, values: Floats) -> None:
    int8.refuse(_add_units(payload, unit, values))


def copy_units(payload: Codes, unit: int, values: Floats) -> None:
    int8.refuse(_copy_units(payload, unit, values))


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
            x[i] = np.float32(np.float32(np.int32(nearest(float_of(x[i]), divisor))) * scale).view(
                np.uint32
            )  # by way of int: no -0


@compiled
def _copy_units(payload: Codes, unit: int, out: Floats) -> Any:
    """A number of `int8.PROBLEMS`: 0 if there is none."""
    at = 0
    for start in range(0, len(out), unit):
        x = out[start : start + unit]
        scale, codes = read_scale(payload[at : at + 4]), payload[at + 4 : at + 4 + len(x)]
        problem = problem_of(scale, codes)
        if problem:
            return problem
        if put(codes, float_of(scale), x):
            return BAD_CODE
        at += 4 + len(x)
    return GOOD


@compiled
def _add_units(payload: Codes, unit: int, total: Floats) -> Any:
    """As `_copy_units`; if there is a problem, `total` is of no use."""
    at = 0
    for start in range(0, len(total), unit):
        x = total[start : start + unit]
        scale, codes = read_scale(payload[at : at + 4]), payload[at + 4 : at + 4 + len(x)]
        problem = problem_of(scale, codes)
        if problem:
            return problem
        if add(codes, float_of(scale), x):
            return BAD_CODE
        at += 4 + len(x)
    return GOOD
