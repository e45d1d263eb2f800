"""A pipeline's checkpoint: the plain model's, whole, in one file, good for any other number of stages, or for none.

    {"model"}        the whole model's state_dict, under its own names
    {"optimizer"}    a state_dict as torch's optimizer over model.parameters() would write it
    {"extra"}        whatever was given
    {"stretto"}      the version, how many stages and replicas there were, the names of the parameters that the optimizer numbers

Every stage sends what it has to the first worker, which writes it (of replicas, the first). To load, the first worker's file
goes to all, in memory that they can map, and each takes its part. What a compression of gradients remembers is not in it, nor
are random generators: after a load residuals begin at zero.

Optimizers: the stages' are of one class, with as many parameter groups, and group i has the same options on every stage: they are
one optimizer whose parameters are in several places.

Invariant: as in `checkpoint.py`, a failure on any worker raises `CheckpointError` on all, and nothing is changed before all have
checked everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim import Optimizer

import stretto
from stretto import checkpoint_file, plain_values
from stretto.checkpoint import END_OF_ARCHIVE, StrPath
from stretto.distributing import find_engine
from stretto.engine.state import load_exactly
from stretto.errors import CheckpointError
from stretto.mesh.cutting import cuts_of
from stretto.partition.trees import take_apart
from stretto.shared_file import all_succeed, received

if TYPE_CHECKING:
    from stretto.partition.pipelining import Pipeline

OF_STAGES: Final = ("params", "param_names")  # of a group of parameters: other ones on each stage


def save(pipeline: Pipeline, path: StrPath, optimizer: Optimizer, extra: Any = None) -> None:
    """On all workers of the pipeline, after the step."""
    what, everybody = f"save({str(path)!r})", pipeline.everybody
    engine = find_engine(pipeline.module)
    all_succeed(everybody, what, lambda: _check_optimizer(pipeline, optimizer))
    if engine is not None:
        engine.settle()
        all_succeed(everybody, what, engine.training.before_save)
    with nullcontext() if engine is None else engine.training.result_shown():
        # Looked at on all workers before any of it is sent: nobody waits for what cannot travel.
        mine = all_succeed(everybody, what, lambda: _mine(pipeline, optimizer))
        parts = [] if mine is None else pipeline.gathered(mine)

    def write() -> None:
        if parts:
            content = {**_whole(pipeline, parts), "extra": extra}
            content["stretto"] |= {"version": stretto.__version__, "pipeline": [pipeline.stages, pipeline.replicas]}
            checkpoint_file.write(Path(path), content)

    all_succeed(everybody, what, write)


def load(pipeline: Pipeline, path: StrPath, optimizer: Optimizer) -> Any:
    """On all workers of the pipeline, between steps. Returns `extra`."""
    what, everybody = f"load({str(path)!r})", pipeline.everybody
    engine = find_engine(pipeline.module)
    if engine is not None:
        engine.flush()
        engine.settle_or_forget()
    with received(everybody, Path(path), what, checkpoint_file.seal_of, END_OF_ARCHIVE) as copy:
        content, state = all_succeed(everybody, what, lambda: _checked(pipeline, optimizer, copy))

        def apply() -> Any:
            pipeline.module.load_state_dict({name: content["model"][name] for name in pipeline.module.state_dict()})
            load_exactly(optimizer, state)
            return content["extra"]

        extra = all_succeed(everybody, what, apply)
    if engine is not None:
        engine.training.begin_anew()
    return extra


def _check_optimizer(pipeline: Pipeline, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters in each group."""
    if any(map(cuts_of, pipeline.parameters())):
        raise CheckpointError(
            "the layers of this pipeline are cut over a mesh: each of its workers has slices of the optimizer's state, and one "
            "file would hold a part of them.\nWrite torch.save(pipeline.module.state_dict(), path) for each stage: it is whole, "
            "and all workers call state_dict()."
        )
    names = {parameter: name for name, parameter in pipeline.module.named_parameters()}
    groups = [[names.get(parameter, "") for parameter in group["params"]] for group in optimizer.param_groups]
    if any("" in group for group in groups):
        raise CheckpointError(
            f"{type(optimizer).__name__} steps parameters that stage {pipeline.stage} of the pipeline does not have. "
            f"Give the optimizer that was made of pipeline.parameters()."
        )
    return groups


def _mine(pipeline: Pipeline, optimizer: Optimizer) -> dict[str, Any] | None:
    """This stage's part of the checkpoint; only the first of its replicas has one. Raises if it could not travel or load."""
    if pipeline.replica:
        return None
    names, state = _check_optimizer(pipeline, optimizer), optimizer.state_dict()
    flat = [name for group in names for name in group]
    plain_values.check(state["param_groups"], "optimizer.param_groups")
    plain_values.check(state["state"], "optimizer.state")
    mine = {
        "kind": type(optimizer).__name__,
        "model": dict(pipeline.module.state_dict()),
        "state": {flat[number]: dict(values) for number, values in state["state"].items()},
        "groups": [
            {"names": inside, "options": {key: value for key, value in group.items() if key not in OF_STAGES}}
            for inside, group in zip(names, state["param_groups"], strict=True)
        ],
    }
    take_apart(mine, "what is saved")
    return mine


def _whole(pipeline: Pipeline, parts: list[dict[str, Any]]) -> dict[str, Any]:
    kinds, counts = {part["kind"] for part in parts}, {len(part["groups"]) for part in parts}
    if len(kinds) > 1 or len(counts) > 1:
        raise CheckpointError(
            f"the stages step with {sorted(kinds)} of {sorted(counts)} parameter groups, which are no single optimizer.\n"
            f"Make the same optimizer, with the same groups, on every stage."
        )
    tensors = {name: value for part in parts for name, value in part["model"].items()}
    states = {name: value for part in parts for name, value in part["state"].items()}
    where = {name: number for part in parts for number, group in enumerate(part["groups"]) for name in group["names"]}
    order = [name for number in range(counts.pop()) for name in pipeline.whole.parameters if where.get(name) == number]
    groups = [
        {**options["options"], "params": [place for place, name in enumerate(order) if where[name] == number]}
        for number, options in enumerate(parts[0]["groups"])
    ]
    optimizer = {"state": {place: states[name] for place, name in enumerate(order) if name in states}, "param_groups": groups}
    model = {name: tensors[name] for name in pipeline.whole.tensors}
    return {"model": model, "optimizer": optimizer, "stretto": {"order": order}}


def _checked(pipeline: Pipeline, optimizer: Optimizer, copy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file's content, and this stage's part of the optimizer's state."""
    content = torch.load(copy, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(content, dict) or not {"model", "optimizer"} <= content.keys():
        raise CheckpointError('no checkpoint of a model and one optimizer: it lacks "model" or "optimizer".')
    content.setdefault("extra", None)
    for name, value in pipeline.module.state_dict().items():
        found = content["model"].get(name)
        if found is None or found.shape != value.shape:
            there = "nothing" if found is None else f"shape {list(found.shape)}"
            raise CheckpointError(
                f"it is of another model: {name} has shape {list(value.shape)} here, and there is {there} in it."
            )
    saved = content["optimizer"]
    groups = _check_optimizer(pipeline, optimizer)
    if not isinstance(saved, Mapping) or len(saved["param_groups"]) != len(groups):
        raise CheckpointError(f"its optimizer has another number of parameter groups than the {len(groups)} here.")
    place = {name: number for number, name in enumerate(_order_of(pipeline, content))}
    flat = [name for inside in groups for name in inside]
    bounds = [0, *accumulate(map(len, groups))]
    numbers = [list(range(*each)) for each in pairwise(bounds)]
    ours = [
        {**{key: value for key, value in group.items() if key not in OF_STAGES}, "params": mine}
        for group, mine in zip(saved["param_groups"], numbers, strict=True)
    ]
    others = [place.get(pipeline.whole.first_name[name], -1) for name in flat]
    state = {here: saved["state"][there] for here, there in enumerate(others) if there in saved["state"]}
    return content, {"state": state, "param_groups": ours}


def _order_of(pipeline: Pipeline, content: Mapping[str, Any]) -> list[str]:
    """The names of the parameters that the saved optimizer numbers. A file of others does not say."""
    order = content.get("stretto", {}).get("order")
    if order is not None:
        return [str(name) for name in order]
    groups = content["optimizer"]["param_groups"]
    if len(groups) != 1 or len(groups[0]["params"]) != len(pipeline.whole.parameters):
        raise CheckpointError(
            f"its optimizer steps {sum(len(group['params']) for group in groups)} parameters in {len(groups)} groups, and the "
            f"model has {len(pipeline.whole.parameters)}: which of them these are is not in the file."
        )
    return list(pipeline.whole.parameters)
