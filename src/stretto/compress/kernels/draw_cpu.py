"""`draw.py` for CPU kernels: the same 32-bit numbers, one at a time.

Every step is cast back to uint32: Numba widens the result of an operation to 64 bits, and then loops vectorise half as well.
"""

from __future__ import annotations

import numpy as np

from stretto.compress.draw import GOLDEN as GOLDEN_NUMBER
from stretto.compress.draw import MULTIPLY_1, MULTIPLY_2
from stretto.compress.kernels.compiling import compiled

GOLDEN = np.uint32(GOLDEN_NUMBER)
FIRST, SECOND = np.uint32(MULTIPLY_1), np.uint32(MULTIPLY_2)


@compiled
def mix(x: np.uint32) -> np.uint32:
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * FIRST)
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x * SECOND)
    return np.uint32(x ^ (x >> np.uint32(15)))


@compiled
def bits_of(base: np.uint32, index: int) -> np.uint32:
    """Of element `index` in the block whose `base` is mix(block's key xor round's key). `Draw.uniform` is its upper 24 bits."""
    return mix(np.uint32(base + np.uint32(np.uint32(index) * GOLDEN)))
