"""Checkpoints of ways to train in which each worker has a model of its own: that model, and its optimizer's state, by worker.

The "model" of such a checkpoint is the mean of all. The same number of workers resumes with each its own; any other number begins
from the mean, with the optimizer state of rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch.optim import Optimizer

from stretto.engine.engine import Engine
from stretto.engine.optimizer_state_entry import ENTRY
from stretto.engine.state import load_exactly, unsendable
from stretto.errors import CheckpointError


def check(optimizers: Sequence[Optimizer]) -> None:
    """Each worker's state will be sent to rank 0."""
    for optimizer in optimizers:
        if problem := unsendable(optimizer):
            raise CheckpointError(
                f"the state of {type(optimizer).__name__} is this worker's own and cannot be sent to rank 0: {problem}.\n"
                f"Keep tensors, numbers, strings, lists and dicts in it."
            )


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    """What `torch` saves of it, without what stretto adds."""
    return {key: value for key, value in optimizer.state_dict().items() if key != ENTRY}


def of_this_worker(engine: Engine) -> dict[str, Any]:
    """While the mean is in the model (`Training.result_shown`)."""
    return {**engine.training.own_model(), "optimizer": [state_of(each)["state"] for each in engine.loop.optimizers]}


def apply(saved: Mapping[str, Any], engine: Engine) -> None:
    engine.training.load_own_model({kind: saved[kind] for kind in ("parameters", "buffers")})
    for optimizer, state in zip(engine.loop.optimizers, saved["optimizer"], strict=True):
        load_exactly(optimizer, {"state": deepcopy(state), "param_groups": optimizer.state_dict()["param_groups"]})


def lost(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """What cannot be taken up by another number of workers, or in another way of training."""
    if not any("model" in worker for worker in workers):
        return []
    return ["each worker's own model and optimizer (all begin from the mean of the models, with rank 0's optimizer state)"]
