"""`random_numbers.py` for CPU kernels: the same 32-bit numbers, one at a time.

Every step is cast back to uint32: Numba widens the result of an operation to 64 bits, and then loops vectorise half as well.
"""

from __future__ import annotations

import numpy as np

from stretto.compress.kernels.compiling import compiled
from stretto.compress.random_numbers import GOLDEN as GOLDEN_NUMBER
from stretto.compress.random_numbers import MULTIPLY_1, MULTIPLY_2

GOLDEN = np.uint32(GOLDEN_NUMBER)
FIRST, SECOND = np.uint32(MULTIPLY_1), np.uint32(MULTIPLY_2)
SIXTEEN, FIFTEEN = np.uint32(16), np.uint32(15)


@compiled
def mix(x: np.uint32) -> np.uint32:
    x = np.uint32(x ^ np.uint32(x >> SIXTEEN))
    x = np.uint32(x * FIRST)
    x = np.uint32(x ^ np.uint32(x >> FIFTEEN))
    x = np.uint32(x * SECOND)
    return np.uint32(x ^ np.uint32(x >> FIFTEEN))


@compiled
def bits_of(base: np.uint32, index: int) -> np.uint32:
    """The number of element `index` in a block; `base`: mix(block's key xor round's key). `uniform` has its upper 24 bits."""
    return mix(np.uint32(base + np.uint32(np.uint32(index) * GOLDEN)))
