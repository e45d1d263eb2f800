"""Memory that is used again in the next round instead of being taken anew.

The C library gives allocations above 32 MB back to the system as soon as they are freed. So in every round their pages come anew,
each zeroed at its first touch, and that takes several times as long as encoding into them. What is lent here comes back when the
last tensor that sees it is gone, and is lent again.

Invariant:  what is lent is nobody else's. A payload that a caller holds on to, that a wire still reads, or of which some view or
            array is left, is not written to by a later call: that one gets other memory.
Kept:       of each length (in whole MiB) at most `most` that nobody uses, and of the `MOST_LENGTHS` lengths last asked for; the
            rest is given back. Nothing below 1 MiB, which the C library keeps by itself, and nothing on a GPU, where torch does.
"""

from __future__ import annotations

import math
import weakref
from typing import Final

import torch
from torch import Tensor

UNIT_BYTES: Final = 1 << 20
MOST_FREE: Final = 2  # a collective's result may still be seen when the next one's memory is asked for
MOST_LENGTHS: Final = 8  # a round has fewer; a caller that asks for ever new ones must not make the pool grow


class BufferPool:
    """Lends memory and takes it back. Any thread may ask and any may let go. A copy of it begins with nothing."""

    __slots__ = ("_free", "_most")

    def __init__(self, most: int = MOST_FREE) -> None:
        self._most = most
        self._free: dict[int, list[Tensor]] = {}  # by number of units; the length asked for last is the last one

    def __reduce__(self) -> tuple[type[BufferPool], tuple[int]]:
        return BufferPool, (self._most,)

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """As `torch.empty`: what is in it is undefined. It cannot be resized."""
        shape = (shape,) if isinstance(shape, int) else shape
        num_bytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or num_bytes < UNIT_BYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        num_units = -(-num_bytes // UNIT_BYTES)
        memory = self._take(num_units)
        # Every tensor over this memory, and every array over such a tensor, keeps this one array alive: its end is theirs.
        seen = memory.numpy()[:num_bytes]
        weakref.finalize(seen, self._take_back, num_units, memory).atexit = False
        return torch.from_numpy(seen).view(dtype).view(shape)

    def _take(self, num_units: int) -> Tensor:
        free = self._free.pop(num_units, [])
        self._free[num_units] = free  # now the last
        for forgotten in list(self._free)[:-MOST_LENGTHS]:
            self._free.pop(forgotten, None)
        try:
            return free.pop()
        except IndexError:
            return torch.empty(num_units * UNIT_BYTES, dtype=torch.uint8, device="cpu")

    def _take_back(self, num_units: int, memory: Tensor) -> None:
        free = self._free.get(num_units)
        if free is not None and len(free) < self._most:
            free.append(memory)
