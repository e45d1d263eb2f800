"""clip_grad_norm_(): clipping by the global norm of the gradients that a step is about to use, whatever the strategy.

    replicated, servers that sum     p.grad is the mean over all workers: its norm, the same on all
    across the barrier               gradients are waited for first: without them there is no global norm
    cut over a mesh                  each worker has slices of some: the norm of the whole model (`mesh/clipping.py`)
    stages of a pipeline             each has parameters of its own: the norm of those of all stages
    sharded                          each worker has a part of the mean: the norm of all parts, by one small all-reduce
    servers that step, local SGD,    p.grad is this worker's own until it is pushed or stepped, and is clipped by its own norm
    gossip, groups, Hogwild

torch's own function does the same everywhere but where a model is cut, into slices or stages, and across the barrier, where it
says what to write.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.engine.weak_hook import owners
from stretto.errors import ConfigurationError
from stretto.mesh.clipping import clip_slices
from stretto.mesh.cutting import cuts_of

ATTRIBUTE = "_stretto_clips_with"


class ClipsWithOthers(Protocol):
    """A holder of some of a model's parameters, which can ask the workers that hold the others for their norms."""

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor: ...


class _Whose:
    """Hangs on a parameter. Does not keep its owner alive; a parameter that was copied or pickled has none."""

    def __init__(self, owner: ClipsWithOthers) -> None:
        self.owner = weakref.ref(owner)

    def __reduce__(self) -> Any:
        return type(None), ()


def clip_with(owner: ClipsWithOthers, parameters: Iterable[Tensor]) -> None:
    """From now on `clip_grad_norm_` of these asks their owner."""
    whose = _Whose(owner)
    for parameter in parameters:
        parameter.__dict__[ATTRIBUTE] = whose


def _owner_of(parameter: Tensor) -> ClipsWithOthers | None:
    whose = parameter.__dict__.get(ATTRIBUTE)
    return whose.owner() if isinstance(whose, _Whose) else None


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of `parameters` such that their norm, taken together, is at most `max_norm`; returns what it was.

    As `torch.nn.utils.clip_grad_norm_`, for every strategy. With sharded state, and where a model is cut over a mesh or into the
    stages of a pipeline, all workers call it: it is a small collective, and each slice counts once.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for engine in dict.fromkeys(engine for parameter in parameters for engine in owners(parameter)):
        engine.settle()
    several = set(map(_owner_of, parameters))
    if len(several) > 1:
        raise ConfigurationError(
            "clip_grad_norm_ of parameters of a pipeline's stage together with others: the norm of a pipeline is that of all its "
            "stages.\nWrite pipeline.clip_grad_norm_(max_norm), and clip the others by themselves."
        )
    if several and (owner := several.pop()) is not None:
        return owner.clip(parameters, max_norm, norm_type, error_if_nonfinite)
    if any(map(cuts_of, parameters)):
        return clip_slices(parameters, max_norm, norm_type, error_if_nonfinite)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
