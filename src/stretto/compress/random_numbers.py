"""Random numbers that are a function of where and when, not of a generator's past.

Element i of block b in round t of worker r draws

    u = mix(mix(key_r,t xor keys[b]) + i * 0x9E3779B9) / 2^32        (the upper 24 bits, so u < 1 in float32)

`mix` is a 32-bit finaliser (two multiplications, three shifts; constants from C. Wellons' search for functions of low bias). The
same on every platform and device, in torch, Numba and Triton; independent of how parameters were put into buckets; and resuming
needs no more than the number of the round.

`shared` is the same on all workers (random-k: everybody must choose the same elements), `own` differs from worker to worker.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.compress.layout import Blocks

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
MULTIPLY_1, MULTIPLY_2 = 0x21F0AAAD, 0x735A2D97


def mix(x: int) -> int:
    x &= MASK
    x ^= x >> 16
    x = (x * MULTIPLY_1) & MASK
    x ^= x >> 15
    x = (x * MULTIPLY_2) & MASK
    return x ^ (x >> 15)


def mix_tensor(x: Tensor) -> Tensor:
    """`mix` of every element of an int64 tensor, of which the lower 32 bits count."""
    x = x & MASK
    x = x ^ (x >> 16)
    x = (x * MULTIPLY_1) & MASK  # int64 wraps around, and the lower 32 bits of the product are right all the same
    x = x ^ (x >> 15)
    x = (x * MULTIPLY_2) & MASK
    return x ^ (x >> 15)


@dataclass(frozen=True, slots=True)
class RandomKeys:
    """The keys of one round: 32-bit numbers."""

    shared: int = 0
    own: int = 0

    @classmethod
    def of_round(cls, number: int, rank: int) -> RandomKeys:
        shared = mix(mix(number + GOLDEN))
        return cls(shared, mix(shared + (rank + 1) * GOLDEN))

    def again(self) -> RandomKeys:
        """Other numbers in the same round, for what is encoded a second time. They do not depend on the worker."""
        return RandomKeys(mix(self.shared + 1), mix(self.shared + 2))

    def uniform(self, blocks: Blocks, key: int, device: torch.device | None = None) -> Tensor:
        """For every element a number in [0, 1), float32. `key`: `self.own` or `self.shared`. The reference for all kernels."""
        device = device or torch.device("cpu")
        bounds, keys = blocks.on(device)
        numbers = blocks.numbers(device)
        index = torch.arange(blocks.num_elements, device=device, dtype=torch.int64) - bounds[numbers]
        bits = mix_tensor(mix_tensor(keys ^ key)[numbers] + index * GOLDEN)
        return (bits >> 8).float() * 2.0**-24
