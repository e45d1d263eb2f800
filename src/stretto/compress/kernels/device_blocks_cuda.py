"""What GPU kernels ask of a cut into blocks: worked out once for each `Blocks`, since every round asks again.

Two ways to share elements out among programs (Triton's word for thread blocks):

    rows      a program takes some whole blocks, each a row of its tile; long blocks, tile by tile    where there is a scale
    pieces    a program takes a part of one block                                                     where blocks are tensors
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from stretto.compress.layout import Blocks
from stretto.errors import ConfigurationError

LONGEST = 4096  # elements of a program's row: longer blocks are taken tile by tile
TILES = (16, 64, 256, 512, 1024, LONGEST)  # few lengths, as kernels are compiled for each
PER_WARP = 512  # elements. One warp for as many rows as that is: then rows are added up without waiting for other warps
VECTOR = 4  # elements that one thread moves at a time, where they begin at a multiple of it


@dataclass(frozen=True, slots=True)
class DeviceBlocks:
    """`bounds`, `keys`: in the device's memory. `step`: VECTOR if it divides all bounds, else 1. With a bit per element and each
    block padded to whole bytes, `byte_starts` says where they begin and `num_packed` how many there are."""

    bounds: Tensor
    keys: Tensor
    byte_starts: Tensor
    num_packed: int
    num_elements: int
    num_blocks: int
    grid: tuple[int]  # of kernels that take rows
    shape: dict[str, Any]  # of their tiles, and how many warps take one
    step: int
    made: dict[Any, Any] = field(default_factory=dict)  # what kernels add, by a key of their own


@dataclass(frozen=True, slots=True)
class Pieces:
    """For each piece its block (int32), and the index in the block where it begins (int64)."""

    owners: Tensor
    firsts: Tensor

    @property
    def columns(self) -> tuple[Tensor, Tensor]:
        return self.owners, self.firsts


# By identity of `bounds`, which live as long as their Blocks do; then by device. Two threads that meet here do the work twice.
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def device_blocks_of(blocks: Blocks, device: torch.device) -> DeviceBlocks:
    by_device: dict[torch.device, DeviceBlocks] = _known.setdefault(blocks.bounds, {})  # type: ignore[no-untyped-call]
    if device not in by_device:
        by_device[device] = _cut(blocks, device)
    return by_device[device]


def _cut(blocks: Blocks, device: torch.device) -> DeviceBlocks:
    widths, longest = (blocks.lengths + 7) // 8, max(blocks.lengths.tolist(), default=0)
    if longest >= 2**31:
        raise ConfigurationError(
            f"{longest} elements in one block on a GPU: kernels there count them in 32 bits.\n"
            f'Choose another codec for this tensor: compress=ByParameter(("its name", BFloat16()), ("*", ...)).'
        )
    tile = next((tile for tile in TILES if tile >= longest), LONGEST)
    rows, step = max(1, PER_WARP // tile), 1 if bool((blocks.bounds % VECTOR).any()) else VECTOR
    return DeviceBlocks(
        *blocks.on(device),
        byte_starts=(widths.cumsum(0) - widths).to(device),
        num_packed=int(widths.sum()),
        num_elements=blocks.num_elements,
        num_blocks=len(blocks),
        grid=(-(-len(blocks) // rows),),
        shape={"ROWS": rows, "TILE": tile, "STEP": step, "WHOLE": longest <= tile, "num_warps": rows * tile // PER_WARP},
        step=step,
    )


def pieces_of(lengths: Tensor, size: int, device: torch.device) -> Pieces:
    """Cut each of these lengths (on the CPU) into pieces of `size`, the last perhaps shorter."""
    counts = (lengths + size - 1) // size
    owners = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int64, device="cpu"), counts)
    firsts = (torch.arange(len(owners), dtype=torch.int64, device="cpu") - (counts.cumsum(0) - counts)[owners]) * size
    return Pieces(owners.to(torch.int32).to(device), firsts.to(device))
