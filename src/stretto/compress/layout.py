"""What lies where in a flat vector of gradients, and how a codec cuts it.

A bucket's gradients lie one after the other in one vector; `Layout` names them. A codec cuts every tensor into *blocks*, each
with a scale (or a choice of elements) of its own; a block never spans two tensors. So how parameters were put into buckets
changes nothing in what is sent for each of them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stretto.compress.buffer_pool import BufferPool


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor: `name`, where it begins, and its shape as it lies in memory: the outermost dimension first.

    `order`: which of the tensor's own dimensions each of these is, where they lie otherwise (channels-last, transposed).
    """

    name: str
    shape: tuple[int, ...]
    start: int
    order: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size

    def as_tensor(self, part: Tensor) -> Tensor:
        """`part`, the values of this tensor as they lie in memory, seen with its own dimensions."""
        shaped = part.view(self.shape)
        return shaped if self.order is None else shaped.permute(tuple(self.order.index(d) for d in range(len(self.order))))

    def as_vector(self, tensor: Tensor) -> Tensor:
        """The reverse, as a copy where dimensions lie otherwise."""
        return (tensor if self.order is None else tensor.permute(self.order)).reshape(-1)


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of one flat vector, in order, without gaps."""

    places: tuple[TensorPlace, ...]

    @classmethod
    def of(cls, named: Iterable[tuple[str, Sequence[int]]]) -> Layout:
        """For contiguous tensors."""
        return cls.in_memory((name, shape, None) for name, shape in named)

    @classmethod
    def in_memory(cls, named: Iterable[tuple[str, Sequence[int], tuple[int, ...] | None]]) -> Layout:
        """`named`: for each tensor its name, its shape and the order of its dimensions in memory."""
        places, start = [], 0
        for name, shape, order in named:
            lying = tuple(shape) if order is None else tuple(shape[dimension] for dimension in order)
            places.append(TensorPlace(name, lying, start, order))
            start = places[-1].stop
        return cls(tuple(places))

    @property
    def num_elements(self) -> int:
        return self.places[-1].stop if self.places else 0

    def cut(self, length_of: Callable[[TensorPlace], int]) -> Blocks:
        """Cut each tensor into blocks of `length_of(place)` elements, counted from its own beginning; the last may be shorter."""
        bounds, keys = [0], []
        for place in self.places:
            name = zlib.crc32(place.name.encode())
            for number, start in enumerate(range(place.start, place.stop, max(1, length_of(place)))):
                if start:
                    bounds.append(start)
                keys.append((name + number * 0x9E3779B1) & 0xFFFFFFFF)
        if keys:
            bounds.append(self.num_elements)
        return Blocks(torch.tensor(bounds, dtype=torch.int64, device="cpu"), torch.tensor(keys, dtype=torch.int64, device="cpu"))

    def whole(self) -> Blocks:
        """One block per tensor (none for a tensor without elements)."""
        return self.cut(lambda place: place.size)


class Blocks:
    """Where blocks begin and end: block b is elements bounds[b] to bounds[b + 1] - 1; there are no gaps and no empty blocks.

    `bounds` (B + 1) and `keys` (B) are int64 tensors on the CPU. `keys[b]` is a 32-bit number that says which part of which
    tensor a block is, wherever it lies: random numbers depend on it and not on the bucket. `pool` is where payloads of these
    blocks, and what is decoded from them, are written: they are as long in every round.
    """

    __slots__ = ("_copies", "bounds", "keys", "pool")

    def __init__(self, bounds: Tensor, keys: Tensor, pool: BufferPool | None = None) -> None:
        self.bounds = bounds
        self.keys = keys
        self.pool = BufferPool() if pool is None else pool
        self._copies: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def num_elements(self) -> int:
        return int(self.bounds[-1])

    @property
    def lengths(self) -> Tensor:
        return self.bounds.diff()

    def numbers(self, device: torch.device | None = None) -> Tensor:
        """For each element the number of its block: `per_block[blocks.numbers()]` spreads a value per block over its elements."""
        device = device or torch.device("cpu")
        if device.type == "cpu":  # torch's own starts a team of threads, also for a handful of elements
            return torch.from_numpy(np.repeat(np.arange(len(self)), self.lengths.numpy()))
        lengths = self.on(device)[0].diff()
        return torch.repeat_interleave(
            torch.arange(len(self), device=device, dtype=torch.int64), lengths, output_size=self.num_elements
        )

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Bounds and keys in that device's memory; copied once."""
        if device.type == "cpu":
            return self.bounds, self.keys
        if device not in self._copies:
            self._copies[device] = self.bounds.to(device), self.keys.to(device)
        return self._copies[device]

    def part(self, first: int, last: int) -> Blocks:
        """Blocks `first` to `last` - 1 alone, counted from zero again; their pool is that of all."""
        bounds = self.bounds[first : last + 1]
        return Blocks(bounds - bounds[0], self.keys[first:last], self.pool)

    def split(self, parts: int) -> list[tuple[int, int]]:
        """Share the blocks out, in order, as evenly in elements as whole blocks allow: (first, last + 1) for each part."""
        targets = torch.arange(1, parts, dtype=torch.float32, device="cpu") * (self.num_elements / parts)
        cuts = torch.searchsorted(self.bounds.double(), targets.double()).clamp(max=len(self)).tolist()
        edges = [0, *cuts, len(self)]
        return list(zip(edges[:-1], edges[1:], strict=True))
