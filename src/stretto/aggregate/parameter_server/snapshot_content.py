"""What a snapshot of a model says: which model it is of, all ranges as a server had them, and what the servers do not keep.

    header             the parameters and optimizers, how they were cut into ranges, the options of that moment, which buffers
    range:0, ...       `RangeState.export`, range by range
    buffer:<name> ...  of the worker that has taken it
    end                version and clocks of each range; a file without it is none

Consistency. Ranges are exported one after the other while workers push. Each is at a version that it really had, after the
beginning of the snapshot and before its end, and no gradient is in it by half. With the clocks that are written beside it:

    every range has all gradients of clocks < `oldest`, of all workers that count, and none of a clock >= `newest`

so it is what a worker could have pulled that asked for its ranges at different times. newest - oldest is at most what `sync=`
allows (the bound of `StaleSynchronous`, plus one), plus the steps that workers took while the snapshot was taken. Where nobody
pushes meanwhile, it is the model as it was.

A snapshot knows no job: any number of workers and servers go on from it, and so does training without servers.

Reading believes nothing: sizes, names, kinds and lengths are compared with the model that is to be resumed before anything is
made, and a range is decoded by `range_format.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.aggregate.parameter_server import range_format
from stretto.aggregate.parameter_server.inventory import Kept, KeptParameter, arrays_of
from stretto.aggregate.parameter_server.layout import ParameterRange, ParameterSlice
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec, OptionValue, spec_of
from stretto.aggregate.parameter_server.snapshot import Snapshot, read_snapshot
from stretto.errors import CheckpointError, ConfigurationError, MalformedPayload

FORMAT: Final = 1
END: Final = "end"
Named = tuple[str, Tensor]


class SavedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter or a buffer, without its values."""

    name: str
    shape: list[int]
    dtype: str


class SavedParameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """And which group of which optimizer it is in, and its place there."""

    tensor: SavedTensor
    optimizer: int
    group: int
    place: int


class SavedRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    optimizer: int
    slices: list[ParameterSlice]


class SnapshotHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`options`: of each group of each optimizer. `steps_before`: of the training that this job has gone on from."""

    format: int = FORMAT
    stretto: str
    model: str
    strategy: str
    world_size: int
    taken_at: float
    steps_before: int
    decays: bool
    compensates: bool
    optimizers: list[str]
    options: list[list[dict[str, OptionValue]]]
    parameters: list[SavedParameter]
    ranges: list[SavedRange]
    buffers: list[SavedTensor]


class SavedClocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    version: int
    slowest: int
    fastest: int


class SnapshotEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ranges: list[SavedClocks]

    @property
    def oldest(self) -> int:
        """Steps that all workers had taken, in every range."""
        return min((each.slowest for each in self.ranges), default=0)

    @property
    def newest(self) -> int:
        return max((each.fastest for each in self.ranges), default=0)


@dataclass
class SnapshotContent:
    """All of it, in memory. `kept`: what servers had, by parameter."""

    header: SnapshotHeader
    kept: dict[str, Kept] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    end: SnapshotEnd = field(default_factory=lambda: SnapshotEnd([]))

    @property
    def steps(self) -> int:
        """The steps that every worker had taken since the training began, as far as this is known."""
        return self.header.steps_before + self.end.oldest


# -- writing ----------------------------------------------------------------------------------------------------------


def saved_parameters(entries: Iterable[KeptParameter], optimizers: Sequence[Optimizer]) -> list[SavedParameter]:
    """Where the servers' parameters are in a model and its optimizers."""
    places = {
        parameter: (number, position, place)
        for number, optimizer in enumerate(optimizers)
        for position, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    }
    return [SavedParameter(saved_tensor(each.name, each.parameter), *places[each.parameter]) for each in entries]


def saved_tensor(name: str, tensor: Tensor) -> SavedTensor:
    return SavedTensor(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def saved_ranges(ranges: Iterable[ParameterRange]) -> list[SavedRange]:
    return [SavedRange(int(each.group.partition(".")[0]), list(each.slices)) for each in ranges]


def range_name(index: int) -> str:
    return f"range:{index}"


def buffer_name(name: str) -> str:
    return f"buffer:{name}"


def buffer_bytes(buffer: Tensor) -> bytes:
    """Its elements, whatever their type."""
    flat = buffer.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


# -- reading ----------------------------------------------------------------------------------------------------------


def read_content(
    path: Path, named: Sequence[Named], optimizers: Sequence[Optimizer], buffers: Mapping[str, Tensor], *, shown: Path
) -> SnapshotContent:
    """The snapshot in this file, a copy of `shown`, for this model. Raises `CheckpointError` for anything else."""
    with read_snapshot(path) as snapshot:
        try:
            return _read(snapshot, dict(named), optimizers, buffers)
        except (msgspec.MsgspecError, MalformedPayload, ConfigurationError, RecursionError, _Unfit) as problem:
            raise CheckpointError(
                f"{shown} is a snapshot that this model cannot go on from: {problem}.\n"
                f"Build the model and its optimizers as they were when it was taken. Nothing was loaded."
            ) from problem


class _Unfit(Exception):
    """Why."""


def _read(
    snapshot: Snapshot, named: Mapping[str, Tensor], optimizers: Sequence[Optimizer], buffers: Mapping[str, Tensor]
) -> SnapshotContent:
    header = msgspec.msgpack.decode(snapshot.header, type=SnapshotHeader)
    if header.format != FORMAT:
        raise _Unfit(f"it has format {header.format}, of stretto {header.stretto}, and this one reads format {FORMAT}")
    _compare_tensors([each.tensor for each in header.parameters], named, "parameter")
    _compare_tensors(header.buffers, buffers, "buffer")
    _compare_optimizers(header, named, optimizers)
    _check_slices(header, named)
    specs = [spec_of(optimizer) for optimizer in optimizers]
    content, expected = SnapshotContent(header), _expected(header)
    for name, data in snapshot.ranges:
        if name != next(expected, None):
            raise _Unfit(f"{name[:100]!r} is not what comes next in it")
        kind, _, rest = name.partition(":")
        if kind == "range":
            _take_range(content, header.ranges[int(rest)], data, specs, named)
        elif kind == "buffer":
            content.buffers[rest] = _buffer_of(buffers[rest], data, rest)
        else:
            content.end = msgspec.msgpack.decode(data, type=SnapshotEnd)
    if (missing := next(expected, None)) is not None or len(content.end.ranges) != len(header.ranges):
        raise _Unfit(f"it has no {missing or 'clocks'}")
    return content


def _expected(header: SnapshotHeader) -> Any:
    yield from (range_name(index) for index in range(len(header.ranges)))
    yield from (buffer_name(each.name) for each in header.buffers)
    yield END


def _compare_tensors(saved: Sequence[SavedTensor], here: Mapping[str, Tensor], kind: str) -> None:
    there = {each.name: each for each in saved}
    if len(there) != len(saved):
        raise _Unfit(f"it has a {kind} twice")
    for name in dict.fromkeys((*here, *there)):
        if name not in there:
            raise _Unfit(f"{kind} {name!r} is in this model and not in the snapshot")
        if name not in here:
            raise _Unfit(f"{kind} {name[:200]!r} is in the snapshot and not in this model")
        ours, theirs = saved_tensor(name, here[name]), there[name]
        if ours != theirs:
            raise _Unfit(
                f"{kind} {name!r} is {theirs.dtype}{theirs.shape} in the snapshot and {ours.dtype}{ours.shape} in this model"
            )


def _compare_optimizers(header: SnapshotHeader, named: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> None:
    here = [type(optimizer).__name__ for optimizer in optimizers]
    if here != header.optimizers:
        raise _Unfit(f"its optimizers are {header.optimizers[:10]}, and here they are {here}")
    groups = [len(optimizer.param_groups) for optimizer in optimizers]
    if groups != [len(each) for each in header.options]:
        raise _Unfit(f"its optimizers have {[len(each) for each in header.options][:10]} groups, and {groups} here")
    for each in header.parameters:
        found = None
        if 0 <= each.optimizer < len(optimizers) and 0 <= each.group < groups[each.optimizer] and each.place >= 0:
            found = optimizers[each.optimizer].param_groups[each.group]["params"][each.place : each.place + 1]
        if not found or found[0] is not named[each.tensor.name]:
            raise _Unfit(f"parameter {each.tensor.name!r} was in another place of its optimizer")
    for spec, options in zip(map(spec_of, optimizers), header.options, strict=True):
        for group in options:
            if fault := spec.fault_in(group):
                raise _Unfit(f"its options do not fit: {fault}")


def _check_slices(header: SnapshotHeader, named: Mapping[str, Tensor]) -> None:
    """Each element once, in ranges of the optimizer that its parameter is in."""
    stops, owners = dict.fromkeys(named, 0), {each.tensor.name: each.optimizer for each in header.parameters}
    for number, each in enumerate(header.ranges):
        for name, start, stop in each.slices:
            if owners.get(name) != each.optimizer or start != stops[name] or not start < stop <= named[name].numel():
                raise _Unfit(f"range {number} has elements {start} to {stop} of {name[:200]!r}, which are not next")
            stops[name] = stop
    for name, stop in stops.items():
        if stop != named[name].numel():
            raise _Unfit(f"it has {stop} elements of {name!r}, and there are {named[name].numel()}")


def _take_range(
    content: SnapshotContent, saved: SavedRange, data: bytes, specs: Sequence[OptimizerSpec], named: Mapping[str, Tensor]
) -> None:
    """Copy what it has into the vectors of its parameters."""
    header, size = content.header, sum(each.stop - each.start for each in saved.slices)
    spec = specs[saved.optimizer]
    decoded = range_format.decode(memoryview(data), size, spec, has_mean_square=header.decays, has_backups=header.compensates)
    begin = 0
    for name, start, stop in saved.slices:
        end = begin + stop - start
        kept = content.kept.setdefault(name, Kept())
        kept.scalars = kept.scalars or dict(decoded.scalars)  # a range of it that was not updated yet has none
        for kind, array in arrays_of(decoded).items():
            whole = kept.vectors.get(kind)
            if whole is None:
                whole = kept.vectors[kind] = torch.zeros(named[name].numel(), dtype=torch.float32, device="cpu")
            whole[start:stop].copy_(torch.from_numpy(np.array(array[begin:end])))
        begin = end


def _buffer_of(like: Tensor, data: bytes, name: str) -> Tensor:
    if len(data) != like.numel() * like.element_size():
        raise _Unfit(f"buffer {name!r} has {len(data)} bytes, and needs {like.numel() * like.element_size()}")
    if not data:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(like.dtype).view(like.shape)
