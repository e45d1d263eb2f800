"""Random levels on the CPU: a block is read for its unit, and read again, from the cache, for its levels.

The same bytes as the reference, but for the last bit of an l2 norm or a clipped unit where two orders of adding in float64 round
to different float32 (and then the few levels that hang on it).
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from stretto.compress import bits as packing
from stretto.compress.bits import BAD_FIELD, BAD_PADDING, BAD_SCALE, FINE
from stretto.compress.kernels import bits_cpu
from stretto.compress.kernels.bits_cpu import PIECE, Bytes, Floats, Ints
from stretto.compress.kernels.compiling import compiled
from stretto.compress.kernels.random_numbers_cpu import GOLDEN, first_state, uniform
from stretto.compress.layout import Blocks
from stretto.compress.levels import RandomLevels
from stretto.compress.random_numbers import RandomKeys

_LARGEST = np.float64(np.finfo(np.float32).max)


def encode(codec: RandomLevels, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    bits, l2, clip = codec.levels
    new, bounds, keys = packing.blank(blocks, bits, 1, values), blocks.bounds.numpy(), blocks.keys.numpy()
    units, packed = new.scales.numpy(), new.packed.numpy()
    _encode(values.numpy(), bounds, keys, random.own, bits, l2, clip, units, packed, residual)
    return new.whole


def decode(codec: RandomLevels, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    bits = codec.levels.bits
    _, units, packed = packing.opened(payload, blocks, bits, 1)
    packing.check(_decode(packed.numpy(), blocks.bounds.numpy(), bits, units.numpy(), out.numpy(), adding))


@compiled
def _encode(
    values: Floats, bounds: Ints, keys: Ints, key: int, bits: int, l2: bool, clip: float, units: Floats, packed: Bytes,
    leave_residual: bool,
) -> None:  # fmt: skip
    """With `leave_residual`, values -= what is decoded."""
    fields, levels = np.empty(PIECE, np.uint8), np.float32((1 << (bits - 1)) - 1)
    at = 0
    for b in range(len(bounds) - 1):
        block = values[bounds[b] : bounds[b + 1]]
        units[b] = _unit(block, l2, clip)
        for start in range(0, len(block), PIECE):
            piece = block[start : start + PIECE]
            width = (len(piece) * bits + 7) // 8
            _quantise(piece, first_state(keys[b], key, start), units[b], levels, fields)
            bits_cpu.pack_fields(fields[: (len(piece) + 7) // 8 * 8], bits, packed[at : at + width])
            at += width
            if leave_residual:
                _add(piece, fields, -units[b], levels)


@compiled
def _unit(block: Floats, l2: bool, clip: float) -> np.float32:
    if l2:
        return np.float32(min(np.sqrt(bits_cpu.sum_of_squares(block)), _LARGEST))
    largest = bits_cpu.largest_magnitude(block)
    if clip == math.inf:
        return largest
    return min(largest, np.float32(clip * np.sqrt(bits_cpu.sum_of_squares(block) / len(block))))


@compiled
def _quantise(piece: Floats, state: np.uint32, unit: np.float32, levels: np.float32, fields: Bytes) -> None:
    fields[len(piece) : (len(piece) + 7) // 8 * 8] = 0
    divisor = unit if unit > 0 else np.float32(1)
    for i in range(len(piece)):
        if levels == 1:  # also the only one whose unit may be clipped. The compiler makes two loops of it
            level = np.int32(uniform(state) < min(abs(piece[i]), unit) / divisor)
        else:
            exact = abs(piece[i]) / divisor * levels
            level = np.int32(exact)
            level = np.int32(level + np.int32(uniform(state) < exact - np.float32(level)))
        negative = np.int32(piece[i] < 0) & np.int32(level > 0)
        fields[i] = np.uint8(2 * level + negative)
        state = np.uint32(state + GOLDEN)


@compiled
def _decode(packed: Bytes, bounds: Ints, bits: int, units: Floats, out: Floats, adding: bool) -> int:
    """Write to `out`, or add to it."""
    fields, levels = np.empty(PIECE, np.uint8), np.float32((1 << (bits - 1)) - 1)
    at = 0
    for b in range(len(bounds) - 1):
        block = out[bounds[b] : bounds[b + 1]]
        if not 0 <= units[b] < np.inf:
            return BAD_SCALE
        for start in range(0, len(block), PIECE):
            piece = block[start : start + PIECE]
            codes = packed[at : at + (len(piece) * bits + 7) // 8]
            at += len(codes)
            if not bits_cpu.padding_is_zero(len(piece), bits, codes):
                return BAD_PADDING
            bits_cpu.unpack_fields(codes, bits, fields)
            if _any_negative_zero(fields[: len(piece)]):
                return BAD_FIELD
            if adding:
                _add(piece, fields, units[b], levels)
            else:
                _write(piece, fields, units[b], levels)
    return FINE


@compiled
def _any_negative_zero(fields: Bytes) -> bool:
    found = np.uint8(0)
    for i in range(len(fields)):
        found = np.uint8(found | np.uint8(fields[i] == 1))
    return bool(found != 0)


@compiled
def _add(piece: Floats, fields: Bytes, unit: np.float32, levels: np.float32) -> None:
    for i in range(len(piece)):
        piece[i] += _value(fields[i], unit, levels)


@compiled
def _write(piece: Floats, fields: Bytes, unit: np.float32, levels: np.float32) -> None:
    for i in range(len(piece)):
        piece[i] = _value(fields[i], unit, levels)


@compiled
def _value(field: np.uint8, unit: np.float32, levels: np.float32) -> np.float32:
    level, sign = np.int32(field >> 1), np.int32(field & 1)
    if levels == 1:
        return unit * np.float32(np.int32(level - 2 * sign))
    return unit * (np.float32(np.int32(level * np.int32(1 - 2 * sign))) / levels)
