"""The dynamic tree on the CPU: the same bytes as `dynamic8.py` computes in torch, without its binary search.

The magnitude of a quotient falls into one of 1401 cells, named by the exponent and the upper six bits of the mantissa. A cell
holds at most one of the numbers halfway between two codes. So an entry per cell says how many of those lie in cells before it,
and the lower 17 bits of the one in it: a comparison with these finds the code. One look-up per value, in a table of 6 kB.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from stretto.compress import bits as packing
from stretto.compress import dynamic8
from stretto.compress.kernels.bits_cpu import Bits, Floats, float_of, largest_bits
from stretto.compress.kernels.bits_cpu import Bytes as Codes
from stretto.compress.kernels.bits_cpu import Ints as Bounds
from stretto.compress.kernels.compiling import compiled
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys

SHIFT, LOWER, NEVER = dynamic8.SHIFT, np.uint32(dynamic8.LOWER), dynamic8.NEVER
MAGNITUDE, FINITE = np.uint32(0x7FFFFFFF), np.uint32(dynamic8.FINITE)
ZERO = np.uint8(dynamic8.ZERO)

VALUES = np.array(dynamic8.table(), np.float32)
ENTRIES, FIRST_CELL = dynamic8.cells().entries.numpy().view(np.uint32), dynamic8.cells().first
FIRST, LAST = np.int32(FIRST_CELL), np.int32(FIRST_CELL + len(ENTRIES) - 1)


def encode(codec: dynamic8.Dynamic8, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    new = packing.blank(blocks, 8, 1, values)
    _encode(values.numpy().view("u4"), blocks.bounds.numpy(), new.scales.numpy().view("u4"), new.packed.numpy(), residual)
    return new.whole


def decode(codec: dynamic8.Dynamic8, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    _, scales, codes = packing.opened(payload, blocks, 8, 1)
    dynamic8.refuse_if(not _decode(scales.numpy().view("u4"), codes.numpy(), blocks.bounds.numpy(), out.numpy(), adding))


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
def _encode(bits: Bits, bounds: Bounds, scales: Bits, codes: Codes, residual: bool) -> None:
    """`bits`: those of the values; with `residual`, on return of what the codes leave out."""
    for b in range(len(scales)):
        x, k = bits[bounds[b] : bounds[b + 1]], codes[bounds[b] : bounds[b + 1]]
        scales[b] = largest_bits(x)
        scale = float_of(scales[b])
        divisor = scale if scales[b] else np.float32(1)
        for i in range(len(x)):
            k[i] = code_of(float_of(x[i]), divisor)
        if residual:
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
def _decode(scales: Bits, codes: Codes, bounds: Bounds, out: Floats, adding: bool) -> Any:
    """Write to `out`, or add to it. Whether an encoder may have written it; if not, `out` is of no use."""
    for b in range(len(scales)):
        k, x, scale = codes[bounds[b] : bounds[b + 1]], out[bounds[b] : bounds[b + 1]], float_of(scales[b])
        if not well_formed(scales[b], k):
            return False
        for i in range(len(k)):
            value = VALUES[k[i]] * scale
            x[i] = x[i] + value if adding else value
    return True
