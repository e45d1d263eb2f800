"""What a Training remembers, in the optimizer's `state_dict`: one more entry beside "state" and "param_groups".

    {"compress": text of what it belongs to, "rank", "world_size", "rounds", "own": {parameter: {kind: tensor}}, "shared": {...}}

A `state_dict` is one worker's. Loaded by another one, or by a job of another size, `own` is left out with a warning: the residual
of one worker given to all would be said P times. `stretto.save` and `load` keep everybody's. Where it depends on the placement of
workers which of them keeps what (`Training.placement`), nothing is put into the `state_dict`: only all of it together means
something.
"""

from __future__ import annotations

import logging
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stretto.engine.engine import Engine
from stretto.engine.training import TrainingState
from stretto.errors import ConfigurationError

ENTRY = "stretto"
log = logging.getLogger("stretto")


def keep_with(optimizer: Optimizer, engine: Engine) -> list[RemovableHandle]:
    """From now on `optimizer.state_dict()` holds what the engine's Training remembers, and loading one brings it back."""

    def add(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, ENTRY: _entry_of(engine, engine.training.state())}

    def take(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        entry = state_dict.get(ENTRY)
        if entry is not None:
            _check_form(entry)
            _take_entry(engine, entry)
        return {key: value for key, value in state_dict.items() if key != ENTRY}

    return [optimizer.register_state_dict_post_hook(add), optimizer.register_load_state_dict_pre_hook(take)]


def _check_form(entry: Any) -> None:
    kinds = {"compress": str, "rank": int, "world_size": int, "rounds": int, "own": dict, "shared": dict}
    wrong = kinds if not isinstance(entry, dict) else [key for key, kind in kinds.items() if not isinstance(entry.get(key), kind)]
    if wrong:
        raise ConfigurationError(
            f"the optimizer's state has a 'stretto' entry that stretto did not write: {', '.join(wrong)} missing or of another "
            f"type.\nLoad what optimizer.state_dict() gave, or remove that entry to begin with no residuals."
        )


def _entry_of(engine: Engine, state: TrainingState) -> dict[str, Any]:
    return {
        "compress": engine.training.state_text,
        "rank": engine.job.rank,
        "world_size": engine.job.world_size,
        "rounds": state.rounds,
        "own": state.own,
        "shared": state.shared,
    }


def _take_entry(engine: Engine, entry: dict[str, Any]) -> None:
    """Go on from what this worker remembered, as far as it fits."""
    training = engine.training
    if entry["compress"] != training.state_text:
        log.warning("the optimizer's state is of compress=%s: what that remembered is left out", entry["compress"])
        return
    problem = training.check_state(entry["own"]) or training.check_state(entry["shared"])
    if problem is not None:
        raise ConfigurationError(
            f"the optimizer's state is of another model: {problem}.\nLoad the one that belongs to this model."
        )
    own = entry["own"]
    if (entry["rank"], entry["world_size"]) != (engine.job.rank, engine.job.world_size):
        then, here = f"rank {entry['rank']} of {entry['world_size']}", f"rank {engine.job.rank} of {engine.job.world_size}"
        log.warning("residuals of %s are not taken by %s; stretto.save and load keep everybody's", then, here)
        own = {}
    training.load_state(TrainingState(entry["rounds"], own, entry["shared"]))
