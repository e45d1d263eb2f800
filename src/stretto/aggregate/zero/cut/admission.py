"""What training with parameters in slices refuses: before anything is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from stretto.errors import ConfigurationError
from stretto.schedule.orders import Buckets, WaitFree
from stretto.shard.zero import Zero

if TYPE_CHECKING:
    from stretto.strategy import Strategy


def check_strategy(strategy: Strategy) -> None:
    assert isinstance(strategy.shard, Zero)
    if not isinstance(strategy.schedule, (Buckets, WaitFree)):
        raise ConfigurationError(
            f"schedule={strategy.schedule!r} with shard={strategy.shard!r}: what is gathered and reduced together follows from "
            f"the modules, in the order in which they are called.\n"
            f"Write schedule=Buckets(bytes), which puts neighbours together up to that size, or WaitFree(), which does not; or "
            f"shard=Zero(2)."
        )


def check(model: nn.Module, strategy: Strategy) -> None:
    """Whether the parameters of this model can come and go."""
    for name, module in model.named_modules():
        where = f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise ConfigurationError(
                f"shard={strategy.shard!r}: {where} is compiled, and calls no modules, before each of which its parameters would "
                f"be gathered.\nLeave torch.compile out, or write shard=Zero(2)."
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigurationError(
                f"shard={strategy.shard!r}: the gradient of {where} is sparse, and its rows have no slices.\n"
                f"Write sparse=False, or shard=Zero(2)."
            )
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
            raise ConfigurationError(
                f"shard={strategy.shard!r}: {name} is a {type(parameter).__name__} of layout {parameter.layout}; what is cut "
                f"into slices are plain parameters.\nMake it an nn.Parameter, or write shard=Zero(2)."
            )


def check_called(model: nn.Module, called: nn.Module, strategy: Strategy) -> None:
    if called is not model:
        raise ConfigurationError(
            f"shard={strategy.shard!r}: the model is compiled, and calls no modules, before each of which its parameters would "
            f"be gathered.\nGive distribute() the model without torch.compile, or write shard=Zero(2)."
        )
