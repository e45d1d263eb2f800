"""A model and its optimizers as what servers keep, and back.

Parameters lie one after the other in one flat memory, those of an optimizer together, those of one of its groups too:

    | group 0 of optimizer 0 | group 1 of optimizer 0 | group 0 of optimizer 1 |

so a range of the servers is a piece of it. A group's name to the servers has three numbers, "optimizer.group.age": parameters
of one range have one step counter, so those that were updated a different number of times before (`optimizer.state` says) are
kept apart, and so are those that are compressed differently.

An optimizer's state is on the servers while they step. `Inventory.content` writes what a range begins with, of values and of
`optimizer.state` as torch has it; `read` is the way back, into tensors of the parameters' shapes. So `optimizer.state_dict()` is
torch's own, and training may go on with servers, with all-reduce or without stretto, wherever it came from.

Values and state are float32, also those of parameters in half precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.aggregate.parameter_server import range_format
from stretto.aggregate.parameter_server.encoding import codec_of_values, unit_of
from stretto.aggregate.parameter_server.layout import ParameterRange, ParameterSlice, ServedParameter
from stretto.aggregate.parameter_server.range_format import RangeContent
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec, spec_of
from stretto.compress.codec import Compression
from stretto.sync.delay_compensation import DelayCompensation

Named = tuple[str, Tensor]
VALUES, MEAN_SQUARE = "values", "mean square"  # beside the names of an optimizer's vectors


class KeptParameter(NamedTuple):
    """A parameter, and where it lies."""

    name: str
    parameter: Tensor
    optimizer: int
    group: str
    start: int
    stop: int


@dataclass
class Kept:
    """What servers keep of one parameter: flat float32 tensors by name, and the numbers of its optimizer's state."""

    vectors: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)


class Inventory:
    """See the module's text. All workers make the same one: their models and optimizers are alike when they do.

    `known`: vectors that are neither the parameters' own values nor in `optimizer.state`, by parameter.
    `compress`: what gradients are compressed with.
    """

    def __init__(
        self,
        named: Sequence[Named],
        optimizers: Sequence[Optimizer],
        method: DelayCompensation | None,
        known: Mapping[str, Mapping[str, Tensor]],
        compress: Compression,
    ) -> None:
        self._method, self._compress = method, compress
        self.compressions: dict[str, Compression] = {}  # of the groups that are compressed
        self.specs: dict[str, OptimizerSpec] = {}
        self.entries: list[KeptParameter] = []
        self.bases = [spec_of(optimizer) for optimizer in optimizers]
        self._begin: dict[str, Kept] = {}
        names = {parameter: name for name, parameter in named}
        stop = 0
        for number, optimizer in enumerate(optimizers):
            for position, group in enumerate(optimizer.param_groups):
                aged = self._by_age(f"{number}.{position}", group, optimizer, self.bases[number], names)
                for key, parameter in sorted(aged, key=lambda each: each[0]):
                    start, stop = stop, stop + parameter.numel()
                    self.entries.append(KeptParameter(names[parameter], parameter, number, key, start, stop))
        for name, vectors in known.items():
            if name in self._begin:
                self._begin[name].vectors |= vectors
        self.numel = stop

    def _by_age(
        self, place: str, group: Mapping[str, Any], optimizer: Optimizer, base: OptimizerSpec, names: Mapping[Tensor, str]
    ) -> list[tuple[str, Tensor]]:
        """The parameters of a group, with the names that the servers have for it."""
        ages: dict[Any, str] = {}
        found = []
        for parameter in group["params"]:
            if parameter in names:
                kept = _kept_of(base, optimizer.state.get(parameter, {}))
                answer = self._compress.for_parameter(names[parameter], tuple(parameter.shape))
                age = (tuple(sorted(kept.scalars.items())), tuple(sorted(kept.vectors)), answer)
                key = ages.setdefault(age, f"{place}.{len(ages)}")
                if not answer.lossless:
                    self.compressions[key] = answer
                self.specs.setdefault(key, OptimizerSpec(base.name, base.options_of(group)))
                self._begin[names[parameter]] = kept
                found.append((key, parameter))
        return found

    @property
    def parameters(self) -> list[ServedParameter]:
        return [
            ServedParameter(each.name, each.stop - each.start, each.group, tuple(each.parameter.shape), self._unit_of(each))
            for each in self.entries
        ]

    def travels_rounded(self, group: str) -> bool:
        """Whether values of this group come in 16 bits."""
        compression = self.compressions.get(group)
        return compression is not None and codec_of_values(compression) is not None

    def _unit_of(self, each: KeptParameter) -> int:
        compression = self.compressions.get(each.group)
        return 1 if compression is None else unit_of(compression, each.name, tuple(each.parameter.shape))

    def flat_values(self) -> Tensor:
        """What the parameters hold, or what is known better."""
        flat = torch.empty(self.numel, dtype=torch.float32, device="cpu")
        for each in self.entries:
            known = self._begin[each.name].vectors.get(VALUES)
            flat[each.start : each.stop].copy_(each.parameter.detach().reshape(-1) if known is None else known.reshape(-1))
        return flat

    # -- what a range begins with -------------------------------------------------------------------------------------

    def content(self, each: ParameterRange, values: Tensor) -> bytes | None:
        """All of a range as bytes; None if values are all that there is."""
        parts = [(self._begin[piece.name], piece) for piece in each.slices]
        first = parts[0][0]
        names = [name for name in first.vectors if name not in (VALUES, MEAN_SQUARE)]
        if not names and not first.scalars and MEAN_SQUARE not in first.vectors:
            return None
        vectors = {name: _joined(parts, name) for name in names}
        decays = self._method is not None and self._method.decay is not None
        mean_square = _joined(parts, MEAN_SQUARE) if decays else None
        return range_format.encode(RangeContent(values.numpy(), first.scalars, vectors, mean_square), self.specs[each.group])

    # -- what servers have kept ---------------------------------------------------------------------------------------

    def read(self, exported: Iterable[tuple[ParameterRange, bytes]]) -> dict[str, Kept]:
        """By parameter, of all ranges of these parameters."""
        lengths = {each.name: each.stop - each.start for each in self.entries}
        found: dict[str, Kept] = {}
        for each, data in exported:
            content = self._decoded(each, data)
            begin = 0
            for piece in each.slices:
                kept = found.setdefault(piece.name, Kept(scalars=dict(content.scalars)))
                end = begin + piece.stop - piece.start
                for name, array in arrays_of(content).items():
                    whole = kept.vectors.setdefault(name, torch.empty(lengths[piece.name], dtype=torch.float32, device="cpu"))
                    whole[piece.start : piece.stop].copy_(torch.from_numpy(array[begin:end].copy()))
                begin = end
        return found

    def beyond_torch(self, kept: Mapping[str, Kept]) -> dict[str, dict[str, Tensor]]:
        """What neither the model nor `optimizer.state_dict()` holds: float32 values of parameters that are not, or that get
        rounded ones, and means of squared gradients of delay compensation."""
        found: dict[str, dict[str, Tensor]] = {}
        for entry in self.entries:
            wanted = [MEAN_SQUARE] if self._method is not None and self._method.decay is not None else []
            wanted += [VALUES] if entry.parameter.dtype is not torch.float32 or self.travels_rounded(entry.group) else []
            vectors = {kind: kept[entry.name].vectors[kind] for kind in wanted if entry.name in kept}
            if vectors:
                found[entry.name] = vectors
        return found

    def fault_in(self, saved: Mapping[str, Mapping[str, Any]]) -> str | None:
        """What in the like of that, from a file, cannot belong to this model."""
        lengths = {entry.name: entry.stop - entry.start for entry in self.entries}
        for name, kinds in saved.items():
            for kind, value in kinds.items():
                if name not in lengths or not isinstance(value, Tensor) or value.numel() != lengths[name]:
                    return f"{kind} of {name!r} is not of a parameter that the servers keep"
        return None

    def _decoded(self, each: ParameterRange, data: bytes) -> RangeContent:
        decays = self._method is not None and self._method.decay is not None
        spec, has_backups = self.specs[each.group], self._method is not None
        return range_format.decode(memoryview(data), each.numel, spec, has_mean_square=decays, has_backups=has_backups)


def as_state(kept: Kept, parameter: Tensor) -> dict[str, Tensor]:
    """As torch has it in `optimizer.state`."""
    state = {name: torch.tensor(value, dtype=torch.float32, device="cpu") for name, value in kept.scalars.items()}
    for name, flat in kept.vectors.items():
        if name not in (VALUES, MEAN_SQUARE):
            like = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
            state[name] = like.copy_(flat.view(parameter.shape))
    return state


def _kept_of(spec: OptimizerSpec, state: Mapping[str, Any]) -> Kept:
    """What of a parameter's state a server can go on with: an entry may be None, of SGD without momentum."""
    kind = spec.kind
    scalars = {name: float(state[name]) for name in kind.scalars if state.get(name) is not None}
    vectors = {name: state[name] for name in kind.all_vectors if isinstance(state.get(name), Tensor)}
    return Kept({name: vector.detach().to("cpu", torch.float32).reshape(-1) for name, vector in vectors.items()}, scalars)


def _joined(parts: Sequence[tuple[Kept, ParameterSlice]], name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """One of the vectors, in a range. A mean of squares that nobody knows begins with zeros."""
    pieces = []
    for kept, piece in parts:
        vector = kept.vectors.get(name)
        if vector is None:
            vector = torch.zeros(piece.stop, dtype=torch.float32, device="cpu")
        pieces.append(vector.reshape(-1)[piece.start : piece.stop])
    joined: np.ndarray[Any, np.dtype[np.float32]] = torch.cat(pieces).to(torch.float32).numpy()
    return joined


def arrays_of(content: RangeContent) -> dict[str, Any]:
    arrays: dict[str, Any] = {VALUES: content.values, **content.vectors}
    return arrays if content.mean_square is None else arrays | {MEAN_SQUARE: content.mean_square}
