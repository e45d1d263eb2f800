"""Signs on the CPU, with one scale for each block (`Sign`) or two means (`OneBit`): a block is read for its bits and its scales,
and read again, from the cache, where the residual is to be left.

The same bytes as the references, but for a scale's last bit where two orders of adding in float64 round to different float32.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from stretto.compress import bits as packing
from stretto.compress.bits import BAD_PADDING, BAD_SCALE, FINE
from stretto.compress.kernels.bits_cpu import PIECE, Bytes, Floats, Ints, Words, add, pack_signs, padding_is_zero, spread_bits
from stretto.compress.kernels.compiling import compiled
from stretto.compress.layout import Blocks
from stretto.compress.one_bit import OneBit
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sign import Sign


def encode(codec: Sign | OneBit, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    new = packing.blank(blocks, 1, codec.num_scales, values)
    _encode(values.numpy(), blocks.bounds.numpy(), new.scales.numpy(), new.packed.numpy(), codec.num_scales, residual)
    return new.whole


def decode(codec: Sign | OneBit, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    _, scales, packed = packing.opened(payload, blocks, 1, codec.num_scales)
    packing.check(_decode(packed.numpy(), blocks.bounds.numpy(), scales.numpy(), codec.num_scales, out.numpy(), adding))


@compiled
def _encode(values: Floats, bounds: Ints, scales: Floats, packed: Bytes, num_scales: int, leave_residual: bool) -> None:
    """`num_scales`, per block: none where only votes are sent; one; or two, for the values below zero and for the others. With
    `leave_residual`, values -= what is decoded."""
    at = 0
    for b in range(len(bounds) - 1):
        block = values[bounds[b] : bounds[b + 1]]
        width = (len(block) + 7) // 8
        pack_signs(block, packed[at : at + width])
        at += width
        if num_scales == 1:
            scales[b] = _mean_magnitude(block)
        elif num_scales == 2:
            _find_means(block, scales[2 * b : 2 * b + 2])
        if leave_residual:
            _subtract(block, *_below_and_above(scales, num_scales, b))


@compiled
def _below_and_above(scales: Floats, num_scales: int, b: int) -> tuple[np.float32, np.float32]:
    """What the two signs of a block stand for."""
    if num_scales == 2:
        return scales[2 * b], scales[2 * b + 1]
    scale = scales[b] if num_scales else np.float32(1)
    return -scale, scale


@compiled
def _mean_magnitude(block: Floats) -> np.float32:
    total = 0.0
    for i in range(len(block)):
        total = add(total, np.float64(abs(block[i])))
    return np.float32(total / len(block))


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
def _subtract(block: Floats, below: np.float32, above: np.float32) -> None:
    for i in range(len(block)):
        block[i] -= above if block[i] >= 0 else below


@compiled
def _decode(packed: Bytes, bounds: Ints, scales: Floats, num_scales: int, out: Floats, adding: bool) -> int:
    """Write to `out`, or add to it."""
    flags = np.empty(PIECE, np.uint8)
    spread = flags.view(np.uint64)
    at = 0
    for b in range(len(bounds) - 1):
        block = out[bounds[b] : bounds[b + 1]]
        bits = packed[at : at + (len(block) + 7) // 8]
        at += len(bits)
        below, above = _below_and_above(scales, num_scales, b)
        if not (-np.inf < below <= 0 <= above < np.inf):
            return BAD_SCALE
        if not padding_is_zero(len(block), 1, bits):
            return BAD_PADDING
        for start in range(0, len(block), PIECE):
            _spread(block[start : start + PIECE], bits[start // 8 : (start + PIECE) // 8], below, above, flags, spread, adding)
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
