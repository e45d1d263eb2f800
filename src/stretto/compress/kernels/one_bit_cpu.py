"""Two means per row on the CPU: a row is read for its means, and read again, from the cache, for its bits.

The same bytes as the reference, but for a mean's last bit where two orders of adding in float64 round to different float32.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from stretto.compress import bits as packing
from stretto.compress.bits import BAD_PADDING, BAD_SCALE, FINE
from stretto.compress.kernels.bits_cpu import PIECE, Bytes, Floats, Ints, Words, add, pack_signs, padding_is_zero, spread_bits
from stretto.compress.kernels.compiling import compiled
from stretto.compress.layout import Blocks
from stretto.compress.one_bit import MEANS, OneBit
from stretto.compress.random_numbers import RandomKeys


def encode(codec: OneBit, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    new = packing.blank(blocks, 1, MEANS, values)
    _encode(values.numpy(), blocks.bounds.numpy(), new.scales.numpy(), new.packed.numpy(), residual)
    return new.whole


def decode(codec: OneBit, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    _, means, packed = packing.opened(payload, blocks, 1, MEANS)
    packing.check(_decode(packed.numpy(), blocks.bounds.numpy(), means.numpy(), out.numpy(), adding))


@compiled
def _encode(values: Floats, bounds: Ints, means: Floats, packed: Bytes, leave_residual: bool) -> None:
    """`means`: of each row the one below zero, then the other. With `leave_residual`, values -= what is decoded."""
    at = 0
    for b in range(len(bounds) - 1):
        row = values[bounds[b] : bounds[b + 1]]
        width = (len(row) + 7) // 8
        pack_signs(row, packed[at : at + width])
        at += width
        _find_means(row, means[2 * b : 2 * b + 2])
        if leave_residual:
            _subtract(row, means[2 * b], means[2 * b + 1])


@compiled
def _find_means(row: Floats, means: Floats) -> None:
    below, above, num_below = 0.0, 0.0, 0
    for i in range(len(row)):
        below = add(below, np.float64(min(row[i], np.float32(0))))
        above = add(above, np.float64(max(row[i], np.float32(0))))
        num_below += row[i] < 0
    means[0] = np.float32(below / max(num_below, 1))
    means[1] = np.float32(above / max(len(row) - num_below, 1))


@compiled
def _subtract(row: Floats, below: np.float32, above: np.float32) -> None:
    for i in range(len(row)):
        row[i] -= above if row[i] >= 0 else below


@compiled
def _decode(packed: Bytes, bounds: Ints, means: Floats, out: Floats, adding: bool) -> int:
    """Write to `out`, or add to it."""
    flags = np.empty(PIECE, np.uint8)
    spread = flags.view(np.uint64)
    at = 0
    for b in range(len(bounds) - 1):
        row, below, above = out[bounds[b] : bounds[b + 1]], means[2 * b], means[2 * b + 1]
        bits = packed[at : at + (len(row) + 7) // 8]
        at += len(bits)
        if not (-np.inf < below <= 0 <= above < np.inf):
            return BAD_SCALE
        if not padding_is_zero(len(row), 1, bits):
            return BAD_PADDING
        for start in range(0, len(row), PIECE):
            _spread(row[start : start + PIECE], bits[start // 8 : (start + PIECE) // 8], below, above, flags, spread, adding)
    return FINE


@compiled
def _spread(piece: Floats, bits: Bytes, below: np.float32, above: np.float32, flags: Bytes, spread: Words, adding: bool) -> None:
    spread_bits(bits, spread)
    if adding:
        for i in range(len(piece)):
            piece[i] += above if flags[i] != 0 else below
    else:
        for i in range(len(piece)):
            piece[i] = above if flags[i] != 0 else below
