"""Floats of four bits on the CPU: a block is read for its scale, and read again, from the cache, for its levels. The same bytes
as `e3m0.py` computes in torch."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from stretto.compress import bits as packing
from stretto.compress import e3m0
from stretto.compress.bits import BAD_FIELD, BAD_PADDING, BAD_SCALE, FINE
from stretto.compress.kernels import bits_cpu
from stretto.compress.kernels.bits_cpu import PIECE, Bits, Bytes, Floats, Ints, float_of
from stretto.compress.kernels.compiling import compiled
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys

BITS, MAGNITUDE, HALF = e3m0.BITS, np.uint32(0x7FFFFFFF), np.uint32(e3m0.HALF)
EXPONENT, BELOW, SMALLEST = np.uint32(e3m0.EXPONENT), np.int32(e3m0.BELOW), np.uint32(e3m0.SMALLEST)


def encode(codec: e3m0.E3M0, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    new = packing.blank(blocks, BITS, 1, values)
    _encode(values.numpy().view("u4"), blocks.bounds.numpy(), new.scales.numpy().view("u4"), new.packed.numpy(), residual)
    return new.whole


def decode(codec: e3m0.E3M0, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    _, scales, packed = packing.opened(payload, blocks, BITS, 1)
    packing.check(_decode(packed.numpy(), blocks.bounds.numpy(), scales.numpy(), out.numpy(), adding))


@compiled
def _encode(bits: Bits, bounds: Ints, scales: Bits, packed: Bytes, residual: bool) -> None:
    """`bits`: those of the values; with `residual`, on return of what the fields leave out."""
    fields, at = np.empty(PIECE, np.uint8), 0
    for b in range(len(scales)):
        block = bits[bounds[b] : bounds[b + 1]]
        scales[b] = bits_cpu.largest_bits(block)
        scale = float_of(scales[b])
        divisor = scale if scales[b] else np.float32(1)
        for start in range(0, len(block), PIECE):
            piece = block[start : start + PIECE]
            width = (len(piece) * BITS + 7) // 8
            fields[len(piece) : (len(piece) + 7) // 8 * 8] = 0
            for i in range(len(piece)):
                fields[i] = _field(piece[i], divisor)
            bits_cpu.pack_fields(fields[: (len(piece) + 7) // 8 * 8], BITS, packed[at : at + width])
            at += width
            if residual:
                for i in range(len(piece)):
                    piece[i] = np.float32(float_of(piece[i]) - _value(fields[i], scale)).view(np.uint32)


@compiled
def _field(word: np.uint32, divisor: np.float32) -> np.uint8:
    quotient = np.float32(float_of(word & MAGNITUDE) / divisor).view(np.uint32)
    level = np.int32((quotient + HALF) >> EXPONENT) - BELOW
    level = max(level, np.int32(quotient >= SMALLEST))
    negative = np.int32(word >> np.uint32(31)) & np.int32(level > 0)
    return np.uint8(2 * level + negative)


@compiled
def _value(field: np.uint8, scale: np.float32) -> np.float32:
    level = np.uint32(field >> 1)
    part = (level + np.uint32(BELOW)) << EXPONENT if level else np.uint32(0)
    return np.float32(scale * float_of(part | np.uint32(field & 1) << np.uint32(31)))


@compiled
def _decode(packed: Bytes, bounds: Ints, scales: Floats, out: Floats, adding: bool) -> int:
    """Write to `out`, or add to it."""
    fields, at = np.empty(PIECE, np.uint8), 0
    for b in range(len(scales)):
        block, scale = out[bounds[b] : bounds[b + 1]], scales[b]
        if not 0 <= scale < np.inf:
            return BAD_SCALE
        for start in range(0, len(block), PIECE):
            piece = block[start : start + PIECE]
            codes = packed[at : at + (len(piece) * BITS + 7) // 8]
            at += len(codes)
            if not bits_cpu.padding_is_zero(len(piece), BITS, codes):
                return BAD_PADDING
            bits_cpu.unpack_fields(codes, BITS, fields)
            bad = np.uint8(0)
            for i in range(len(piece)):
                bad |= np.uint8(fields[i] == 1)
            if bad:
                return BAD_FIELD
            if adding:
                for i in range(len(piece)):
                    piece[i] += _value(fields[i], scale)
            else:
                for i in range(len(piece)):
                    piece[i] = _value(fields[i], scale)
    return FINE
