"""Signs on the CPU: a block is read for its mean magnitude, and read again, from the cache, for its bits.

The same bytes as the reference, but for the scale's last bit where two orders of adding in float64 round to different float32.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from stretto.compress import bits as packing
from stretto.compress.bits import BAD_PADDING, BAD_SCALE, FINE
from stretto.compress.kernels.bits_cpu import PIECE, Bytes, Floats, Ints, Words, add, pack_signs, padding_is_zero, spread_bits
from stretto.compress.kernels.compiling import compiled
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sign import Sign


def encode(codec: Sign, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    new = packing.blank(blocks, 1, codec.num_scales, values)
    _encode(values.numpy(), blocks.bounds.numpy(), new.scales.numpy(), new.packed.numpy(), residual)
    return new.whole


def decode(codec: Sign, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    _, scales, packed = packing.opened(payload, blocks, 1, codec.num_scales)
    packing.check(_decode(packed.numpy(), blocks.bounds.numpy(), scales.numpy(), out.numpy(), adding))


@compiled
def _encode(values: Floats, bounds: Ints, scales: Floats, packed: Bytes, leave_residual: bool) -> None:
    """`scales`: one per block, or none at all where only votes are sent. With `leave_residual`, values -= what is decoded."""
    at = 0
    for b in range(len(bounds) - 1):
        block = values[bounds[b] : bounds[b + 1]]
        width = (len(block) + 7) // 8
        pack_signs(block, packed[at : at + width])
        at += width
        if len(scales):
            scales[b] = _mean_magnitude(block)
            if leave_residual:
                _subtract(block, scales[b])


@compiled
def _mean_magnitude(block: Floats) -> np.float32:
    total = 0.0
    for i in range(len(block)):
        total = add(total, np.float64(abs(block[i])))
    return np.float32(total / len(block))


@compiled
def _subtract(block: Floats, scale: np.float32) -> None:
    for i in range(len(block)):
        block[i] -= scale if block[i] >= 0 else -scale


@compiled
def _decode(packed: Bytes, bounds: Ints, scales: Floats, out: Floats, adding: bool) -> int:
    """Write to `out`, or add to it. Without scales, 1."""
    flags = np.empty(PIECE, np.uint8)
    spread = flags.view(np.uint64)
    at = 0
    for b in range(len(bounds) - 1):
        block = out[bounds[b] : bounds[b + 1]]
        bits = packed[at : at + (len(block) + 7) // 8]
        at += len(bits)
        scale = scales[b] if len(scales) else np.float32(1)
        if not 0 <= scale < np.inf:
            return BAD_SCALE
        if not padding_is_zero(len(block), 1, bits):
            return BAD_PADDING
        for start in range(0, len(block), PIECE):
            _spread(block[start : start + PIECE], bits[start // 8 : (start + PIECE) // 8], scale, flags, spread, adding)
    return FINE


@compiled
def _spread(piece: Floats, bits: Bytes, scale: np.float32, flags: Bytes, spread: Words, adding: bool) -> None:
    spread_bits(bits, spread)
    if adding:
        for i in range(len(piece)):
            piece[i] += scale if flags[i] != 0 else -scale
    else:
        for i in range(len(piece)):
            piece[i] = scale if flags[i] != 0 else -scale
