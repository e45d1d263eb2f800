"""`random_numbers.py` for CPU kernels: the same 32-bit numbers, one at a time.

Every step is cast back to uint32: Numba widens the result of an operation to 64 bits, and then loops vectorise half as well.
"""

from __future__ import annotations

import numpy as np

from stretto.compress import random_numbers
from stretto.compress.kernels.compiling import compiled

GOLDEN = np.uint32(random_numbers.GOLDEN)
FIRST, SECOND = np.uint32(random_numbers.MULTIPLY_1), np.uint32(random_numbers.MULTIPLY_2)
SIXTEEN, FIFTEEN, EIGHT = np.uint32(16), np.uint32(15), np.uint32(8)
ULP = np.float32(2.0**-24)


@compiled
def mix(x: np.uint32) -> np.uint32:
    x = np.uint32(x ^ np.uint32(x >> SIXTEEN))
    x = np.uint32(x * FIRST)
    x = np.uint32(x ^ np.uint32(x >> FIFTEEN))
    x = np.uint32(x * SECOND)
    return np.uint32(x ^ np.uint32(x >> FIFTEEN))


@compiled
def first_state(block_key: int, round_key: int, index: int) -> np.uint32:
    """The state of element `index` of a block; the next one's is `GOLDEN` more (cheaper than a multiplication for each)."""
    base = mix(np.uint32(block_key ^ round_key))
    return np.uint32(base + np.uint32(np.uint32(index) * GOLDEN))


@compiled
def uniform(state: np.uint32) -> np.float32:
    """That element's number in [0, 1): what `RandomKeys.uniform` has."""
    return np.float32(np.float32(np.int32(mix(state) >> EIGHT)) * ULP)
