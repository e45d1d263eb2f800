"""QSGD on the CPU: a bucket is read for its norm, and read again, from the cache, for its levels.

The same bytes as the reference, but for the last bit of an l2 norm where two orders of adding in float64 round to different
float32 (and then the few levels that hang on it).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from stretto.compress import bits as packing
from stretto.compress.bits import BAD_FIELD, BAD_PADDING, BAD_SCALE, FINE
from stretto.compress.kernels.bits_cpu import (
    GOLDEN_STEP,
    PIECE,
    Bytes,
    Floats,
    Ints,
    first_state,
    largest_magnitude,
    pack_fields,
    padding_is_zero,
    sum_of_squares,
    uniform,
    unpack_fields,
)
from stretto.compress.kernels.compiling import compiled
from stretto.compress.layout import Blocks
from stretto.compress.qsgd import QSGD
from stretto.compress.random_numbers import RandomKeys

_LARGEST = np.float64(np.finfo(np.float32).max)


def encode(codec: QSGD, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    new, bounds, keys = packing.blank(blocks, codec.bits, 1, values), blocks.bounds.numpy(), blocks.keys.numpy()
    norms, packed, l2 = new.scales.numpy(), new.packed.numpy(), codec.norm == "l2"
    _encode(values.numpy(), bounds, keys, random.own, codec.bits, l2, norms, packed, residual)
    return new.whole


def decode(codec: QSGD, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    _, norms, packed = packing.opened(payload, blocks, codec.bits, 1)
    packing.check(_decode(packed.numpy(), blocks.bounds.numpy(), codec.bits, norms.numpy(), out.numpy(), adding))


@compiled
def _encode(
    values: Floats, bounds: Ints, keys: Ints, key: int, bits: int, l2: bool, norms: Floats, packed: Bytes, leave_residual: bool
) -> None:
    """With `leave_residual`, values -= what is decoded."""
    fields, levels = np.empty(PIECE, np.uint8), np.float32((1 << (bits - 1)) - 1)
    at = 0
    for b in range(len(bounds) - 1):
        bucket = values[bounds[b] : bounds[b + 1]]
        norms[b] = np.float32(min(np.sqrt(sum_of_squares(bucket)), _LARGEST)) if l2 else largest_magnitude(bucket)
        for start in range(0, len(bucket), PIECE):
            piece = bucket[start : start + PIECE]
            width = (len(piece) * bits + 7) // 8
            _quantise(piece, first_state(keys[b], key, start), norms[b], levels, fields)
            pack_fields(fields[: (len(piece) + 7) // 8 * 8], bits, packed[at : at + width])
            at += width
            if leave_residual:
                _add(piece, fields, -norms[b], levels)


@compiled
def _quantise(piece: Floats, state: np.uint32, norm: np.float32, levels: np.float32, fields: Bytes) -> None:
    fields[len(piece) : (len(piece) + 7) // 8 * 8] = 0
    divisor = norm if norm > 0 else np.float32(1)
    for i in range(len(piece)):
        exact = abs(piece[i]) / divisor * levels
        level = np.int32(exact)
        level = np.int32(level + np.int32(uniform(state) < exact - np.float32(level)))
        negative = np.int32(piece[i] < 0) & np.int32(level > 0)
        fields[i] = np.uint8(2 * level + negative)
        state = np.uint32(state + GOLDEN_STEP)


@compiled
def _decode(packed: Bytes, bounds: Ints, bits: int, norms: Floats, out: Floats, adding: bool) -> int:
    """Write to `out`, or add to it."""
    fields, levels = np.empty(PIECE, np.uint8), np.float32((1 << (bits - 1)) - 1)
    at = 0
    for b in range(len(bounds) - 1):
        bucket = out[bounds[b] : bounds[b + 1]]
        if not 0 <= norms[b] < np.inf:
            return BAD_SCALE
        for start in range(0, len(bucket), PIECE):
            piece = bucket[start : start + PIECE]
            codes = packed[at : at + (len(piece) * bits + 7) // 8]
            at += len(codes)
            if not padding_is_zero(len(piece), bits, codes):
                return BAD_PADDING
            unpack_fields(codes, bits, fields)
            if _any_negative_zero(fields[: len(piece)]):
                return BAD_FIELD
            if adding:
                _add(piece, fields, norms[b], levels)
            else:
                _write(piece, fields, norms[b], levels)
    return FINE


@compiled
def _any_negative_zero(fields: Bytes) -> bool:
    found = np.uint8(0)
    for i in range(len(fields)):
        found = np.uint8(found | np.uint8(fields[i] == 1))
    return bool(found != 0)


@compiled
def _add(piece: Floats, fields: Bytes, norm: np.float32, levels: np.float32) -> None:
    for i in range(len(piece)):
        piece[i] += _value(fields[i], norm, levels)


@compiled
def _write(piece: Floats, fields: Bytes, norm: np.float32, levels: np.float32) -> None:
    for i in range(len(piece)):
        piece[i] = _value(fields[i], norm, levels)


@compiled
def _value(field: np.uint8, norm: np.float32, levels: np.float32) -> np.float32:
    level = np.int32(np.int32(field >> 1) * np.int32(1 - 2 * np.int32(field & 1)))
    return norm * (np.float32(level) / levels)
