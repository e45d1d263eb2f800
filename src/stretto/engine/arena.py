"""Memory for what lives as long as training: slices of parameters, gradients and optimizer state, each kind of them in one piece.

Everything else comes and goes with every step. If what stays were many tensors, they would lie wherever there was room when they
were made, and what is freed between them is of no use for anything larger: a process then holds more memory than it uses. So what
stays is laid out at once:

    arena    [ slice of bucket 0 | slice of bucket 1 | ... ]        one for each dtype and device

On a CPU an arena is a mapping of its own, so it does not lie in the heap, which can shrink when the whole parameters, which were
there before, are gone. Every part begins at a multiple of 64 bytes.

Cost:       nothing: it takes the place of as many bytes, up to 64 for each part.
Reference:  M_D of ZeRO-R: Rajbhandari et al., "ZeRO", arXiv:1910.02054, section 6.3, which copies checkpointed activations and
            gradients there. Departs from it: parameters and optimizer state lie there too; activations have an arena of their
            own (`mesh/kept_arena.py`).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNED_BYTES = 64
LARGE_BYTES = 64 << 10  # smaller ones are not worth a mapping


class MemoryKind(NamedTuple):
    """What lies in one arena."""

    dtype: torch.dtype
    device: torch.device
    pinned: bool = False


def laid_out(wanted: Iterable[tuple[MemoryKind, int]]) -> list[Tensor]:
    """Vectors of so many elements, of undefined values; those of one kind lie side by side in one memory."""
    wanted = list(wanted)
    ends: dict[MemoryKind, int] = {}
    starts = []
    for kind, length in wanted:
        starts.append(ends.get(kind, 0))
        step = max(1, ALIGNED_BYTES // kind.dtype.itemsize)
        ends[kind] = starts[-1] + -(-length // step) * step
    arenas = {kind: _memory(kind, length) for kind, length in ends.items()}
    return [arenas[kind][start : start + length] for (kind, length), start in zip(wanted, starts, strict=True)]


def _memory(kind: MemoryKind, length: int) -> Tensor:
    num_bytes = length * kind.dtype.itemsize
    with torch.inference_mode(False):
        if kind.device.type == "cpu" and not kind.pinned and num_bytes >= LARGE_BYTES:
            mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return torch.frombuffer(mapped, dtype=kind.dtype, count=length)
        return torch.empty(length, dtype=kind.dtype, device=kind.device, pin_memory=kind.pinned)


def shrink_heap() -> None:
    """Give back what is free in the heap of the C library, where that is glibc: it does not do so by itself for what lies between
    pieces that are in use."""
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
