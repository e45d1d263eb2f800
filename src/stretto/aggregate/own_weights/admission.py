"""What is refused where every worker steps its own copy: at `distribute`, before a step, and when parameters change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.engine.finite import is_finite
from stretto.engine.stepping import decides_by_loss
from stretto.engine.training import Named, Setting
from stretto.errors import ConfigurationError, NonFiniteGradient
from stretto.job import Job

if TYPE_CHECKING:
    from stretto.strategy import Strategy

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # what a float32 vector can hold


def check_model(model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy) -> None:
    """Before anything is sent."""
    for optimizer in optimizers:
        refuse_deciding_by_loss(optimizer, strategy)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (parameter.dtype not in DTYPES or parameter.layout is not torch.strided):
            kind = str(parameter.dtype if parameter.dtype not in DTYPES else parameter.layout).removeprefix("torch.")
            raise ConfigurationError(
                f"parameter {name} is {kind}: with {_asked(strategy)} weights travel as float32 values, which cannot hold it.\n"
                f"Convert the model (model.float()), or write sync=Synchronous(), where gradients travel as they are."
            )


def refuse_deciding_by_loss(optimizer: Optimizer, strategy: Strategy) -> None:
    if decides_by_loss(optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} with {_asked(strategy)}: it decides by the mean loss of all workers, several times in a "
            f"step, and here workers step by themselves.\nUse an optimizer that steps by one gradient, such as torch.optim.SGD."
        )


def check_scaler(setting: Setting, strategy: Strategy) -> None:
    scaler = setting.loop.scaler
    if scaler is not None and scaler.is_enabled():
        raise ConfigurationError(
            f"a GradScaler with {_asked(strategy)}, for {setting.name}: it skips steps on one worker and not on another, so they "
            f"would come to different exchanges.\nTrain in bfloat16, which needs no scaler; or write sync=Synchronous()."
        )


def check_step(optimizer: Optimizer, named: Sequence[Named], strategy: Strategy, job: Job, setting: Setting) -> None:
    """Before a step."""
    refuse_deciding_by_loss(optimizer, strategy)
    check_scaler(setting, strategy)
    if job.weight != 1.0:
        raise ConfigurationError(
            f"weight({job.weight:g}) before a step of {setting.name}: with {_asked(strategy)} every worker steps by its own "
            f"gradient, and there is no mean of gradients to weigh.\nMultiply the loss instead."
        )
    if setting.check_finite:
        mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in named:
            if parameter in mine and parameter.grad is not None and not is_finite(parameter.grad):
                raise NonFiniteGradient({job.rank: name}, "a gradient")


def refuse_change(model: str, before: Sequence[Named], kinds: Mapping[str, object], now: Sequence[Named]) -> None:
    """Raise unless `now` has the same parameters as `before`, unchanged. `kinds`: what `kind_of` gave for them then."""
    known, wanted = dict(before), dict(now)
    for name in sorted(known.keys() | wanted.keys()):
        if known.get(name) is not wanted.get(name) or kind_of(wanted[name]) != kinds[name]:
            raise ConfigurationError(
                f"{model}: parameter {name} was frozen, unfrozen, added, taken away, converted or replaced since the model was "
                f"distributed. Each worker trains a copy of its own, and what they exchange is made for these parameters as they "
                f"were.\nCall stretto.distribute(model, optimizer, strategy) again on all workers after such a change."
            )


def kind_of(parameter: Tensor) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def _asked(strategy: Strategy) -> str:
    return f"aggregate={strategy.aggregate!r}, sync={strategy.sync!r}"
