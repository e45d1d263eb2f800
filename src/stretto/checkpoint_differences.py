"""In what a checkpoint is of another model or optimizer than those that it is loaded into, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def difference(here: dict[str, Any], saved: dict[str, Any]) -> str | None:
    """The first entry in which two state_dicts of models differ in more than values."""
    for name in dict.fromkeys((*here, *saved)):
        if name not in saved:
            return f"{name!r} is in this model and not in the checkpoint"
        if name not in here:
            return f"{name!r} is in the checkpoint and not in this model"
        if _kind(here[name]) != _kind(saved[name]):
            return f"{name!r} is {_kind(here[name])} in this model and {_kind(saved[name])} in the checkpoint"
    return None


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__


def saved_optimizers(content: dict[str, Any]) -> list[dict[str, Any]]:
    saved = content["optimizer"]
    return saved if isinstance(saved, list) else [saved]


def optimizer_difference(optimizers: Sequence[Optimizer], content: dict[str, Any]) -> str | None:
    here, saved = names_of(optimizers), content["stretto"]["optimizer"]
    if here != saved:
        return f"the optimizer is {here} here and {saved} in the checkpoint"
    sizes = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
    saved_sizes = [[len(group["params"]) for group in state["param_groups"]] for state in saved_optimizers(content)]
    if sizes != saved_sizes:
        return f"the optimizer's groups have {sizes} parameters here and {saved_sizes} in the checkpoint"
    return None


def names_of(optimizers: Sequence[Any]) -> str:
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers)
