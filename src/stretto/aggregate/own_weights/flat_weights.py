"""A model's parameters as one flat float32 vector: what is exchanged where workers bring their copies together.

    [ first parameter | second parameter | ... ]        in the order of `named_parameters`, each in its logical order

float16 and bfloat16 parameters are widened when they are read and rounded when they are written. The vector is on the device of
the parameters, or on another one that is given: gossip sends it from host memory.

Cost: one pass over the model each way; no memory but the vector that is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from stretto.engine.training import Named

PIECE: Final = 1 << 22


def sum_of_squares(values: Tensor) -> Tensor:
    """In float64, one element. A piece at a time: all of it in float64 would be twice as long as the weights."""
    return torch.stack([piece.double().square().sum() for piece in torch.split(values, PIECE)]).sum().reshape(1)


class PartOfWeights(NamedTuple):
    """Where a parameter lies in the vector."""

    name: str
    start: int
    stop: int


class FlatWeights:
    """The parameters `named`, seen as one vector of `numel` elements on `device` (None: where the first parameter is)."""

    def __init__(self, named: Sequence[Named], device: torch.device | None = None) -> None:
        self.parameters = tuple(parameter for _, parameter in named)
        self.device = device if device is not None else self.parameters[0].device
        parts, stop = [], 0
        for name, parameter in named:
            start, stop = stop, stop + parameter.numel()
            parts.append(PartOfWeights(name, start, stop))
        self.parts = tuple(parts)
        self.numel = stop

    def read(self, into: Tensor | None = None) -> Tensor:
        """A copy of what they hold now, in `into` if that is given."""
        flat = self.empty() if into is None else into
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            flat[part.start : part.stop].view(parameter.shape).copy_(parameter.detach())
        return flat

    def write(self, values: Tensor) -> None:
        """They become `values`, in place."""
        with torch.no_grad():
            for parameter, part in zip(self.parameters, self.parts, strict=True):
                parameter.copy_(values[part.start : part.stop].view(parameter.shape))

    def add(self, difference: Tensor) -> None:
        """They are moved by `difference`: added in float32, and rounded once."""
        with torch.no_grad():
            for parameter, part in zip(self.parameters, self.parts, strict=True):
                moved = difference[part.start : part.stop].view(parameter.shape).to(parameter.device)
                if parameter.dtype is torch.float32:
                    parameter.add_(moved)
                else:
                    parameter.copy_(parameter.to(torch.float32).add_(moved))

    def empty(self) -> Tensor:
        return torch.empty(self.numel, dtype=torch.float32, device=self.device)

    def zeros(self) -> Tensor:
        return torch.zeros(self.numel, dtype=torch.float32, device=self.device)

    def by_name(self, values: Tensor) -> dict[str, Tensor]:
        """The parts of a vector of this kind, copied, in the shapes of the parameters."""
        return {
            part.name: values[part.start : part.stop].view(parameter.shape).clone()
            for parameter, part in zip(self.parameters, self.parts, strict=True)
        }

    def from_names(self, values: Mapping[str, Tensor]) -> Tensor:
        """The reverse of `by_name`."""
        flat = self.empty()
        for part in self.parts:
            flat[part.start : part.stop].copy_(values[part.name].reshape(-1))
        return flat
