"""Training goes on from a snapshot of servers: with any number of workers and servers, or without servers.

All of it is read and compared with the model on every rank before anything changes (`snapshot_content.py`). Then the model and
its optimizers hold what the servers had, as after `stretto.load` of a checkpoint, and training begins from there: servers are
filled with it. What parameters in half precision had in float32, and means of delay compensation, go to the new servers too.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.aggregate.parameter_server.inventory import MEAN_SQUARE, VALUES, Kept, as_state
from stretto.aggregate.parameter_server.snapshot import check_snapshot, is_snapshot, seal_of
from stretto.aggregate.parameter_server.snapshot_content import SnapshotContent, read_content
from stretto.aggregate.parameter_server.snapshot_subject import saved_buffers
from stretto.aggregate.parameter_server.snapshots import file_stem, snapshots_in
from stretto.aggregate.parameter_server.stepping import SteppingServers
from stretto.engine.engine import Engine
from stretto.engine.state import load_exactly
from stretto.engine.training import TrainingState
from stretto.errors import CheckpointError
from stretto.shared_file import all_succeed, received

log = logging.getLogger("stretto")


@dataclass(frozen=True, slots=True)
class FromSnapshot:
    """What was found: `steps` that all workers had taken, of `world_size` workers; what goes on as before and what does not."""

    steps: int
    world_size: int
    carried: list[str]
    lost: list[str]


def find(path: Path, engine: Engine) -> Path | None:
    """The snapshot that is meant, on rank 0: the file itself, or in a folder the newest that is whole; None if it is neither."""
    if not path.is_dir():
        return path if is_snapshot(path) else None
    damaged: list[str] = []
    for candidate in _of_model(path, engine):
        try:
            check_snapshot(candidate)
        except CheckpointError as problem:
            damaged.append(str(problem).splitlines()[0])
            log.warning("the snapshot %s is left out, and an older one looked for: %s", candidate, problem)
        else:
            return candidate
    raise CheckpointError(f"{path} has no snapshot that is whole: {'; '.join(damaged)}.\nLoad a checkpoint of stretto.save.")


def _of_model(folder: Path, engine: Engine) -> list[Path]:
    """The newest first. A folder with snapshots of one model only is meant for this one, whatever its name."""
    mine, everybody = snapshots_in(folder, file_stem(engine.name)), snapshots_in(folder)
    stems = sorted({each.name.rpartition("-")[0] for each in everybody})
    if not mine and len(stems) > 1:
        raise CheckpointError(
            f"{folder} has snapshots of {', '.join(stems[:10])}, and none is called {file_stem(engine.name)}, as this model is.\n"
            f"Name the file that you mean."
        )
    if not everybody:
        raise CheckpointError(
            f"{folder} is a folder without snapshots: ParameterServer(snapshots=...) writes files that end in .snapshot.\n"
            f"Name such a folder, a snapshot, or a file of stretto.save."
        )
    return mine or everybody


def load(engine: Engine, path: Path | None, what: str) -> FromSnapshot:
    """Rank 0 has the path. All workers call it; nothing has changed if it raises `CheckpointError`."""
    path = Path(engine.job.gather_object(None if path is None else str(path))[0])
    named = [(name, parameter) for name, parameter in engine.model.named_parameters() if parameter.requires_grad]
    buffers = saved_buffers(engine.model)
    with received(engine.job, path, what, seal_of) as copy:
        content = all_succeed(
            engine.job, what, lambda: read_content(Path(copy), named, engine.loop.optimizers, buffers, shown=path)
        )
    return all_succeed(engine.job, what, lambda: _apply(content, engine, dict(named), buffers))


def _apply(content: SnapshotContent, engine: Engine, named: dict[str, Tensor], buffers: dict[str, Tensor]) -> FromSnapshot:
    header, kept = content.header, content.kept
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(kept[name].vectors[VALUES].view(parameter.shape))
        for name, buffer in buffers.items():
            buffer.copy_(content.buffers[name])
    names = {parameter: name for name, parameter in named.items()}
    for optimizer, options in zip(engine.loop.optimizers, header.options, strict=True):
        load_exactly(optimizer, _state_dict(optimizer, options, names, kept))
    engine.loop.begin_anew()
    carried, lost = ["parameters, buffers and options as one worker had them", "the optimizer's state"], []
    has_servers = isinstance(engine.training, SteppingServers)
    if isinstance(engine.training, SteppingServers):
        engine.training.steps_before = content.steps
        beside = {name: _beside(each) for name, each in kept.items()}
        engine.training.load_state(TrainingState(content.steps, {}, beside))
    if engine.strategy.compress.remembers or (engine.training.state_text is not None and not has_servers):
        lost.append(f"what compress={engine.strategy.compress!r} remembers begins anew: no server has it")
    lost.append("each worker's weight, local buffers, random numbers and place in the data (they are not on the servers)")
    if any(not parameter.requires_grad for parameter in engine.model.parameters()):
        lost.append("frozen parameters, which the servers do not have: they stay as they are")
    if header.strategy != repr(engine.strategy):
        lost.append(f"the strategy (then {header.strategy}, now {engine.strategy!r})")
    if (apart := content.end.newest - content.end.oldest) > 1:
        carried.append(f"steps that workers had taken beyond that, up to {apart}, where their part of the model had come later")
    return FromSnapshot(content.steps, header.world_size, carried, lost)


def _beside(kept: Kept) -> dict[str, Tensor]:
    """What neither the parameter nor `optimizer.state` holds."""
    return {kind: kept.vectors[kind] for kind in (VALUES, MEAN_SQUARE) if kind in kept.vectors}


def _state_dict(
    optimizer: Optimizer, options: list[dict[str, Any]], names: dict[Tensor, str], kept: dict[str, Kept]
) -> dict[str, Any]:
    """In torch's form. What is in no snapshot, such as the state of a frozen parameter, is as it is here."""
    state, groups, number = {}, [], 0
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        numbers = list(range(number, number + len(group["params"])))
        number += len(numbers)
        for key, parameter in zip(numbers, group["params"], strict=True):
            name = names.get(parameter)
            found = optimizer.state.get(parameter, {}) if name is None else as_state(kept[name], parameter)
            if found:
                state[key] = found
        plain = {key: value for key, value in group.items() if key != "params"}
        groups.append(plain | {key: _like(plain.get(key), value) for key, value in saved.items()} | {"params": numbers})
    return {"state": state, "param_groups": groups}


def _like(here: Any, saved: Any) -> Any:
    """A rate may be a tensor."""
    return torch.full_like(here, saved) if isinstance(here, Tensor) else saved
