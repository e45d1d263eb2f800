"""What the kernels of few bits have in common: packing, magnitudes and sums.

All of it works on a piece of a block that lies in the first cache: at most `PIECE` values, a multiple of 8, so that pieces of any
width end with a byte. LLVM makes vector code of these loops because they run over slices (an index that may be negative stops
it), floats are not added or compared across lanes (`add` allows any order; magnitudes are compared as integers), and numbers keep
32 bits.

Numba recompiles a kernel when its own file changes, not when this one does: delete `__pycache__/*.nb?` after changing it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import intrinsic

from stretto.compress.kernels.compiling import compiled

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint32]  # of floats
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

PIECE = 4096

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_EVERY_BYTE, _DIAGONAL = np.uint64(0x0101010101010101), np.uint64(0x8040201008040201)


def _type_add(typing_context: Any, a: Any, b: Any) -> Any:
    """a + b in float64, in any order: without leave to reorder, a sum is one addition after the other."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fadd(*arguments, flags=("reassoc",))

    return types.float64(types.float64, types.float64), generate


add: Any = intrinsic(_type_add)


@compiled
def float_of(bits: np.uint32) -> np.float32:
    return np.uint32(bits).view(np.float32)


@compiled
def largest_bits(bits: Bits) -> np.uint32:
    """The bits of the largest magnitude: without their sign bit, floats are in the order of the integers that have their bits."""
    most = np.uint32(0)
    for i in range(len(bits)):
        most = max(most, np.uint32(bits[i] & _MAGNITUDE))
    return most


@compiled
def largest_magnitude(values: Floats) -> np.float32:
    return float_of(largest_bits(values.view(np.uint32)))


@compiled
def sum_of_squares(values: Floats) -> float:
    total: float = 0.0
    for i in range(len(values)):
        total = add(total, np.float64(values[i]) * np.float64(values[i]))
    return total


@compiled
def pack_signs(values: Floats, packed: Bytes) -> None:
    """One bit per value, 1 for x >= 0."""
    for k in range(len(values) // 8):
        byte = np.uint32(0)
        for j in range(8):
            byte |= np.uint32(values[8 * k + j] >= 0) << np.uint32(j)
        packed[k] = byte
    whole = len(values) // 8 * 8
    if whole < len(values):
        byte = np.uint32(0)
        for j in range(len(values) - whole):
            byte |= np.uint32(values[whole + j] >= 0) << np.uint32(j)
        packed[whole // 8] = byte


@compiled
def spread_bits(packed: Bytes, spread: Words) -> None:
    """Every byte to eight bytes, of which those whose bit is set are not zero."""
    for k in range(len(packed)):
        spread[k] = (np.uint64(packed[k]) * _EVERY_BYTE) & _DIAGONAL


@compiled
def padding_is_zero(length: int, bits: int, packed: Bytes) -> bool:
    used = length * bits % 8
    return used == 0 or packed[len(packed) - 1] >> used == 0


@compiled
def pack_fields(fields: Bytes, bits: int, packed: Bytes) -> None:
    """`fields`: one per byte, a multiple of 8 of them, zeros behind the last; `packed` may end within the last eight."""
    if bits == 8:
        for k in range(len(packed)):
            packed[k] = fields[k]
    elif bits == 4:
        for k in range(len(packed)):
            packed[k] = fields[2 * k] | fields[2 * k + 1] << 4
    elif bits == 2:
        for k in range(len(packed)):
            packed[k] = fields[4 * k] | fields[4 * k + 1] << 2 | fields[4 * k + 2] << 4 | fields[4 * k + 3] << 6
    else:
        _pack_eights(fields, bits, packed)


@compiled
def _pack_eights(fields: Bytes, bits: int, packed: Bytes) -> None:
    for k in range(len(fields) // 8):
        word = np.uint64(0)
        for j in range(8):
            word |= np.uint64(fields[8 * k + j]) << np.uint64(bits * j)
        for j in range(min(bits, len(packed) - bits * k)):
            packed[bits * k + j] = (word >> np.uint64(8 * j)) & np.uint64(255)


@compiled
def unpack_fields(packed: Bytes, bits: int, fields: Bytes) -> None:
    """The reverse; writes whole eights of fields."""
    if bits == 8:
        for k in range(len(packed)):
            fields[k] = packed[k]
    elif bits == 4:
        for k in range(len(packed)):
            fields[2 * k] = packed[k] & 15
            fields[2 * k + 1] = packed[k] >> 4
    elif bits == 2:
        for k in range(len(packed)):
            for j in range(4):
                fields[4 * k + j] = (packed[k] >> 2 * j) & 3
    else:
        _unpack_eights(packed, bits, fields)


@compiled
def _unpack_eights(packed: Bytes, bits: int, fields: Bytes) -> None:
    mask = np.uint64((1 << bits) - 1)
    for k in range(-(-len(packed) // bits)):
        word = np.uint64(0)
        for j in range(min(bits, len(packed) - bits * k)):
            word |= np.uint64(packed[bits * k + j]) << np.uint64(8 * j)
        for j in range(8):
            fields[8 * k + j] = (word >> np.uint64(bits * j)) & mask
