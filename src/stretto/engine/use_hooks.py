"""Telling a Training before parameters are read, so that a forward waits for those of its module and no others."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from stretto.engine.only_traced import is_only_traced
from stretto.engine.training import Training
from stretto.plain_state import ForwardHook


def before_each_use(model: nn.Module, training: Training[Any]) -> list[RemovableHandle]:
    """Have `training.before_use` called before every forward of a module with parameters of its own, and before `state_dict`.

    Sets nothing for a Training that never waits there."""
    if not training.waits_before_use:
        return []

    def before_forward(module: nn.Module, arguments: Any) -> None:
        if not is_only_traced():
            training.before_use([p for p in module._parameters.values() if p is not None])

    def before_state_dict(*_: Any) -> None:
        training.before_use(model.parameters())

    users = [module for module in model.modules() if module._parameters]
    hooks = [module.register_forward_pre_hook(ForwardHook(before_forward)) for module in users]
    return [*hooks, model.register_state_dict_pre_hook(ForwardHook(before_state_dict))]  # type: ignore[no-untyped-call]
