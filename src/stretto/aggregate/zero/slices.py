"""Which part of a bucket is whose, and the pieces of parameters that lie in it.

A bucket of n elements is cut into P parts of equal length, wherever that cuts a parameter; worker r owns part r:

    | weight 0                      | bias 0 | weight 1                  |
    | worker 0        | worker 1        | worker 2        | worker 3     |

So every worker owns 1/P of every bucket, to one element, whatever the shapes: bytes and work are shared out evenly, and each
reduce-scatter takes and gives everybody the same. A *piece* is what of one parameter lies in this worker's part. Elements are
counted as they lie in memory (`Layout`), so a piece of a dense parameter is a view of it.

Invariant: every element of a bucket belongs to exactly one worker. A parameter without elements has a piece at worker 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stretto.collectives.plan import chunk_start
from stretto.compress.layout import Layout, TensorPlace


@dataclass(frozen=True, slots=True)
class SliceBounds:
    """How one bucket is cut: worker r has elements bounds[r] to bounds[r + 1] - 1."""

    bounds: tuple[int, ...]
    rank: int

    @classmethod
    def even(cls, num_elements: int, rank: int, size: int) -> SliceBounds:
        return cls(tuple(chunk_start(place, num_elements, size) for place in range(size + 1)), rank)

    @property
    def is_even(self) -> bool:
        """Whether these are the parts that collectives cut a vector into."""
        return self.bounds == SliceBounds.even(self.bounds[-1], self.rank, len(self.bounds) - 1).bounds

    @property
    def start(self) -> int:
        return self.bounds[self.rank]

    @property
    def stop(self) -> int:
        return self.bounds[self.rank + 1]


@dataclass(eq=False, slots=True)
class Piece:
    """A part of one parameter that this worker owns: elements `begin` to `end` - 1 of it, as they lie in memory, and from `start`
    on in this worker's slice of the bucket. `weight` is what the optimizer steps: a view of the parameter, where that can be."""

    slot: int
    name: str
    parameter: Tensor
    place: TensorPlace
    begin: int
    end: int
    start: int
    weight: nn.Parameter
    is_apart: bool = False  # `weight` is not in the parameter
    seen: int = 0  # autograd's count of writes to the parameter when `weight` was last what is in it

    @property
    def stop(self) -> int:
        return self.start + self.end - self.begin

    def of(self, values: Tensor) -> Tensor:
        """This part of a tensor that is like the parameter."""
        return self.place.as_vector(values)[self.begin : self.end]

    @property
    def in_parameter(self) -> Tensor:
        """The part of the parameter itself: a view, or a copy if its memory has gaps."""
        return self.of(self.parameter.detach())


class Apart(NamedTuple):
    """Where the owner keeps the weights that it steps, if not in the parameters."""

    device: torch.device
    dtype: torch.dtype | None  # None: that of the parameter

    def copy(self, part: Tensor) -> Tensor:
        pinned = self.device.type == "cpu" and part.is_cuda
        made = torch.empty(len(part), dtype=self.dtype or part.dtype, device=self.device, pin_memory=pinned)
        return made.copy_(part)


def pieces_of(parameters: Sequence[Tensor], layout: Layout, cut: SliceBounds, apart: Apart | None = None) -> list[Piece]:
    """What this worker owns of these parameters."""
    pieces = []
    for slot, (parameter, place) in enumerate(zip(parameters, layout.places, strict=True)):
        begin, end = max(cut.start - place.start, 0), min(cut.stop - place.start, place.size)
        if begin < end or (place.size == 0 and cut.rank == 0):
            end = max(begin, end)
            part = place.as_vector(parameter.detach())[begin:end]
            if apart is not None:
                part = apart.copy(part)
            start = place.start + begin - cut.start
            weight = nn.Parameter(part, requires_grad=part.is_floating_point() or part.is_complex())
            seen = parameter._version
            pieces.append(Piece(slot, place.name, parameter, place, begin, end, start, weight, apart is not None, seen))
    return pieces
