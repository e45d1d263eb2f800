"""Random numbers on a GPU: the same 32-bit hash as `random_numbers.py`, inside other kernels."""

# What Triton compiles has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from stretto.compress import random_numbers

GOLDEN = tl.constexpr(random_numbers.GOLDEN)
MULTIPLY_1, MULTIPLY_2 = tl.constexpr(random_numbers.MULTIPLY_1), tl.constexpr(random_numbers.MULTIPLY_2)


def as_argument(key: int) -> int:
    """A 32-bit key as a signed number: so it is an int32 to Triton whatever its value, and nothing is compiled twice."""
    return key - (1 << 32) if key >= 1 << 31 else key


@triton.jit
def mix(x):
    """`random_numbers.mix` for uint32."""
    x = x ^ (x >> 16)
    x = x * MULTIPLY_1
    x = x ^ (x >> 15)
    x = x * MULTIPLY_2
    return x ^ (x >> 15)


@triton.jit
def bits_of(base, index):
    """The number of element `index` of a block whose keys mix to `base`."""
    return mix(base + index.to(tl.uint32) * GOLDEN)


@triton.jit
def base_of(keys, key):
    """`keys`: those of blocks, int64. `key`: that of the round, as `as_argument` gives it."""
    return mix(keys.to(tl.uint32) ^ key.to(tl.uint32))
