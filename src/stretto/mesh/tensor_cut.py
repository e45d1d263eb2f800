"""How one tensor is cut along one dimension of a mesh, so that it can be cut, and put together again.

A tensor dimension of fused projections has *parts*, q, k and v say, and each of them is cut by itself: member i has the i-th
slice of q, then that of k, then that of v. With one part it is an ordinary slice. All slices are equally large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.collectives import calls
from stretto.collectives.started import Started
from stretto.mesh.mesh import Axis


@dataclass(frozen=True, slots=True)
class TensorCut:
    """`parts`: how long each part of the dimension is in the whole tensor."""

    axis: Axis
    dim: int
    parts: tuple[int, ...]

    def describe(self) -> str:
        return f"dimension {self.dim} over {self.axis.name}, parts {list(self.parts)}"

    def slices(self, whole: Tensor) -> list[Tensor]:
        """The slices of all members, in the order of their places."""
        parts = torch.split(whole, list(self.parts), self.dim)
        pieces = [part.chunk(self.axis.size, self.dim) for part in parts]
        return [torch.cat([piece[place] for piece in pieces], self.dim) for place in range(self.axis.size)]

    def own(self, whole: Tensor) -> Tensor:
        return self.slices(whole)[self.axis.place]

    def whole(self, slices: Sequence[Tensor]) -> Tensor:
        lengths = [part // self.axis.size for part in self.parts]
        by_member = [torch.split(each, lengths, self.dim) for each in slices]
        return torch.cat([member[number] for number in range(len(lengths)) for member in by_member], self.dim)

    def gathered(self, own: Tensor) -> Tensor:
        """The whole tensor, at all members. All of them call it."""
        return self.whole(self.axis.gather(own.detach()))

    def start_scatter(self, whole: Tensor) -> Started[Tensor]:
        """Begin to give every member its slice of the tensor of place 0."""
        mine = self.own(whole).contiguous()
        parts = self.slices(whole) if self.axis.place == 0 else None
        return calls.start_scatter(self.axis.group, mine, parts, 0)


Cuts = tuple[TensorCut, ...]  # of one tensor, at most one for each of its dimensions


def own_slice(whole: Tensor, cuts: Cuts) -> Tensor:
    for cut in cuts:
        whole = cut.own(whole)
    return whole.contiguous()


def gathered(own: Tensor, cuts: Cuts) -> Tensor:
    """The whole tensor, at all members of all its axes, which all call it."""
    for cut in reversed(cuts):
        own = cut.gathered(own)
    return own
