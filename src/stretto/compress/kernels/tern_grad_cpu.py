"""Ternary values on the CPU: a block is read for its scale, and read again, from the cache, for its codes.

The same bytes as the reference, but for a clipped scale's last bit where two orders of adding in float64 round to different
float32 (and then the few codes that hang on it).
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
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.tern_grad import TernGrad


def encode(codec: TernGrad, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    new, bounds, keys = packing.blank(blocks, 2, 1, values), blocks.bounds.numpy(), blocks.keys.numpy()
    scales, packed = new.scales.numpy(), new.packed.numpy()
    _encode(values.numpy(), bounds, keys, random.own, codec.clip_at, scales, packed, residual)
    return new.whole


def decode(codec: TernGrad, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    _, scales, packed = packing.opened(payload, blocks, 2, 1)
    packing.check(_decode(packed.numpy(), blocks.bounds.numpy(), scales.numpy(), out.numpy(), adding))


@compiled
def _encode(
    values: Floats, bounds: Ints, keys: Ints, key: int, clip: float, scales: Floats, packed: Bytes, leave_residual: bool
) -> None:
    """`clip`: infinity for none. With `leave_residual`, values -= what is decoded."""
    fields = np.empty(PIECE, np.uint8)
    at = 0
    for b in range(len(bounds) - 1):
        block = values[bounds[b] : bounds[b + 1]]
        scales[b] = _scale(block, clip)
        for start in range(0, len(block), PIECE):
            piece = block[start : start + PIECE]
            width = (len(piece) + 3) // 4
            _draw(piece, first_state(keys[b], key, start), scales[b], fields)
            pack_fields(fields[: (len(piece) + 7) // 8 * 8], 2, packed[at : at + width])
            at += width
            if leave_residual:
                _add(piece, fields, -scales[b])


@compiled
def _scale(block: Floats, clip: float) -> np.float32:
    largest = largest_magnitude(block)
    if clip == np.inf:
        return largest
    return min(largest, np.float32(clip * np.sqrt(sum_of_squares(block) / len(block))))


@compiled
def _draw(piece: Floats, state: np.uint32, scale: np.float32, fields: Bytes) -> None:
    fields[len(piece) : (len(piece) + 7) // 8 * 8] = 0
    divisor = scale if scale > 0 else np.float32(1)  # a scale of 0: min(|x|, 0) is never drawn
    for i in range(len(piece)):
        drawn = uniform(state) < min(abs(piece[i]), scale) / divisor
        code = np.int32(2) if piece[i] < 0 else np.int32(1)
        fields[i] = np.uint8(code if drawn else np.int32(0))
        state = np.uint32(state + GOLDEN_STEP)


@compiled
def _decode(packed: Bytes, bounds: Ints, scales: Floats, out: Floats, adding: bool) -> int:
    """Write to `out`, or add to it."""
    fields = np.empty(PIECE, np.uint8)
    at = 0
    for b in range(len(bounds) - 1):
        block = out[bounds[b] : bounds[b + 1]]
        if not 0 <= scales[b] < np.inf:
            return BAD_SCALE
        for start in range(0, len(block), PIECE):
            piece = block[start : start + PIECE]
            codes = packed[at : at + (len(piece) + 3) // 4]
            at += len(codes)
            if not padding_is_zero(len(piece), 2, codes):
                return BAD_PADDING
            if _any_reserved(codes):
                return BAD_FIELD
            unpack_fields(codes, 2, fields)
            if adding:
                _add(piece, fields, scales[b])
            else:
                _write(piece, fields, scales[b])
    return FINE


@compiled
def _any_reserved(codes: Bytes) -> bool:
    found = np.uint8(0)
    for k in range(len(codes)):
        found = np.uint8(found | (codes[k] & (codes[k] >> 1) & 0x55))
    return bool(found != 0)


@compiled
def _add(piece: Floats, fields: Bytes, scale: np.float32) -> None:
    for i in range(len(piece)):
        piece[i] += _value(fields[i], scale)


@compiled
def _write(piece: Floats, fields: Bytes, scale: np.float32) -> None:
    for i in range(len(piece)):
        piece[i] = _value(fields[i], scale)


@compiled
def _value(field: np.uint8, scale: np.float32) -> np.float32:
    return scale * np.float32(np.int32(np.int32(field & 1) - np.int32(field >> 1)))
