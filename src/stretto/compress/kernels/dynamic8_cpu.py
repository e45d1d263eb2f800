"""The dynamic tree on the CPU: the same bytes as `dynamic8.py` computes in torch, without its binary search.

The magnitude of a quotient falls into one of 1401 cells, named by the exponent and the upper six bits of the mantissa. A cell
holds at most one of the numbers halfway between two codes. So an entry per cell says how many of those lie in cells before it,
and the lower 17 bits of the one in it: a comparison with these finds the code. One look-up per value, in a table of 6 kB.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stretto.compress import bits as packing
from stretto.compress import dynamic8
from stretto.compress.kernels.compiling import compiled
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys

Bits = NDArray[np.uint32]
Codes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Bounds = NDArray[np.int64]

SHIFT, LOWER, NEVER = dynamic8.SHIFT, np.uint32(dynamic8.LOWER), dynamic8.NEVER
MAGNITUDE, FINITE = np.uint32(0x7FFFFFFF), np.uint32(dynamic8.FINITE)
ZERO = np.uint8(dynamic8.ZERO)

VALUES = np.array(dynamic8.table(), np.float32)


ENTRIES, FIRST_CELL = dynamic8.cells().entries.numpy().view(np.uint32), dynamic8.cells().first
FIRST, LAST = np.int32(FIRST_CELL), np.int32(FIRST_CELL + len(ENTRIES) - 1)


def encode(codec: dynamic8.Dynamic8, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    new = packing.blank(blocks, 8, 1, values)
    kernel = _encode_residual if residual else _encode
    kernel(values.numpy().view("u4"), blocks.bounds.numpy(), new.scales.numpy().view("u4"), new.packed.numpy())
    return new.whole


def decode(codec: dynamic8.Dynamic8, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    _, scales, codes = packing.opened(payload, blocks, 8, 1)
    kernel = _add_decoded if adding else _decode
    dynamic8.refuse_if(not kernel(scales.numpy().view("u4"), codes.numpy(), blocks.bounds.numpy(), out.numpy()))


@compiled
def code_of(x: np.float32, scale: np.float32) -> np.uint8:
    bits = np.float32(x / scale).view(np.uint32)
    magnitude, negative = np.uint32(bits & MAGNITUDE), np.uint32(bits >> np.uint32(31))
    cell = min(max(np.int32(magnitude >> np.uint32(SHIFT)), FIRST), LAST) - FIRST
    entry = ENTRIES[np.uint32(cell)]
    # halfway, the lower index: the smaller magnitude of a positive, the larger of a negative number
    above = np.int32(np.uint32(magnitude & LOWER) + negative > np.uint32(entry & np.uint32(NEVER)))
    steps = np.int32(np.int32(entry >> np.uint32(SHIFT + 1)) + above)
    return np.uint8(127 - min(steps, np.int32(127))) if negative else np.uint8(127 + steps)


@compiled
def float_of(bits: np.uint32) -> np.float32:
    return np.uint32(bits).view(np.float32)


@compiled
def largest_of(bits: Bits) -> np.uint32:
    largest = np.uint32(0)
    for i in range(len(bits)):
        largest = max(largest, np.uint32(bits[i] & MAGNITUDE))
    return largest


@compiled
def encode_block(bits: Bits, codes: Codes) -> np.uint32:
    """The scale's bits."""
    largest = largest_of(bits)
    divisor = float_of(largest) if largest else np.float32(1)
    for i in range(len(bits)):
        codes[i] = code_of(float_of(bits[i]), divisor)
    return largest


@compiled
def _encode(bits: Bits, bounds: Bounds, scales: Bits, codes: Codes) -> None:
    for b in range(len(scales)):
        scales[b] = encode_block(bits[bounds[b] : bounds[b + 1]], codes[bounds[b] : bounds[b + 1]])


@compiled
def _encode_residual(bits: Bits, bounds: Bounds, scales: Bits, codes: Codes) -> None:
    """`bits`: those of the values on entry, of the residual on return."""
    for b in range(len(scales)):
        x, k = bits[bounds[b] : bounds[b + 1]], codes[bounds[b] : bounds[b + 1]]
        scales[b] = encode_block(x, k)
        scale = float_of(scales[b])
        for i in range(len(x)):
            x[i] = np.float32(float_of(x[i]) - VALUES[k[i]] * scale).view(np.uint32)


@compiled
def well_formed(scale_bits: np.uint32, codes: Codes) -> Any:
    if scale_bits == 0:
        other = np.uint8(0)
        for i in range(len(codes)):
            other |= codes[i] ^ ZERO
        return other == 0
    return scale_bits <= FINITE


@compiled
def _decode(scales: Bits, codes: Codes, bounds: Bounds, out: Floats) -> Any:
    """Whether an encoder may have written it."""
    for b in range(len(scales)):
        k, x, scale = codes[bounds[b] : bounds[b + 1]], out[bounds[b] : bounds[b + 1]], float_of(scales[b])
        if not well_formed(scales[b], k):
            return False
        for i in range(len(k)):
            x[i] = VALUES[k[i]] * scale
    return True


@compiled
def _add_decoded(scales: Bits, codes: Codes, bounds: Bounds, total: Floats) -> Any:
    """As `decode`; if not, `total` is of no use."""
    for b in range(len(scales)):
        k, x, scale = codes[bounds[b] : bounds[b + 1]], total[bounds[b] : bounds[b + 1]], float_of(scales[b])
        if not well_formed(scales[b], k):
            return False
        for i in range(len(k)):
            x[i] = x[i] + VALUES[k[i]] * scale
    return True
