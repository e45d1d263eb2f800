"""What training with servers that step refuses: before anything is sent, and before a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.parameter_server.consistency import rule_for
from stretto.aggregate.parameter_server.inventory import KeptParameter
from stretto.aggregate.parameter_server.shard_optimizer import spec_of
from stretto.aggregate.parameter_server.training import SERVED_DTYPES
from stretto.engine.training import Named, Setting
from stretto.errors import ConfigurationError
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.soft_sync import SoftSync

if TYPE_CHECKING:
    from stretto.strategy import Strategy


def check(model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, world_size: int) -> None:
    """Whether servers can step this model."""
    sync: Any = strategy.sync
    if world_size > 1:
        rule_for(sync, world_size)
    for optimizer in optimizers:
        spec = spec_of(optimizer)
        for group in optimizer.param_groups:
            spec.options_of(group)
        if not spec.obeys_rate and _scales_rates(sync):
            raise ConfigurationError(
                f"{spec.name} with sync={sync!r}: there the learning rate of a gradient is divided by its staleness, and "
                f"{spec.name} keeps a rate in its state.\nUse an optimizer like torch.optim.SGD, or sync=Asynchronous()."
            )
    _check_parameters(model, optimizers, sync)


def check_answers(strategy: Strategy) -> None:
    """What servers cannot do with `answers=`."""
    sync: Any = strategy.sync
    if getattr(strategy.aggregate, "answers", None) is not None and getattr(sync, "delay_compensation", None) is not None:
        raise ConfigurationError(
            f"aggregate={strategy.aggregate!r} with sync={sync!r}: gradients are corrected by what has changed since a worker "
            f"read the values, and with answers= it has read something else.\nLeave one of the two out."
        )


def _scales_rates(sync: object) -> bool:
    return isinstance(sync, SoftSync) or (isinstance(sync, Asynchronous) and sync.staleness_aware)


def _check_parameters(model: nn.Module, optimizers: Sequence[Optimizer], sync: object) -> None:
    owners: dict[Tensor, int] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if owners.setdefault(parameter, number) != number:
                    raise ConfigurationError(
                        f"two optimizers, {type(optimizers[owners[parameter]]).__name__} and {type(optimizer).__name__}, step "
                        f"the same parameter of shape {tuple(parameter.shape)}: on servers each parameter has one.\n"
                        f"Give every parameter to one of them, or write sync=Synchronous()."
                    )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in owners:
            raise ConfigurationError(
                f"parameter {name} wants a gradient and is in none of the optimizers: with sync={sync!r} the servers step, "
                f"and would never update it.\nGive its optimizer to distribute() too, or freeze it: requires_grad_(False)."
            )
        if parameter.requires_grad and parameter.dtype not in SERVED_DTYPES:
            raise ConfigurationError(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}: servers that step keep values in float32, "
                f"which cannot hold it.\nConvert the model (model.float()), or write sync=Synchronous()."
            )


def refuse_change(model: str, before: Sequence[Named], dtypes: Mapping[str, torch.dtype], now: Sequence[Named]) -> None:
    """Raise unless the servers keep just these parameters, of these dtypes."""
    kept, wanted = dict(before), dict(now)
    for name in sorted(kept.keys() | wanted.keys()):
        if kept.get(name) is not wanted.get(name) or wanted[name].dtype is not dtypes[name]:
            raise _changed(model, name)


def _changed(model: str, name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{model}: parameter {name} was frozen, unfrozen, added, taken away, converted or replaced since the model was "
        f"distributed. The servers keep the model as it was, and workers that meet nowhere cannot agree on another "
        f"one in the middle of training.\n"
        f"Call stretto.distribute(model, optimizer, strategy) again on all workers after such a change."
    )


def number_of(optimizer: Optimizer, given: Sequence[Optimizer], model: str) -> int:
    for number, each in enumerate(given):
        if each is optimizer:
            return number
    raise ConfigurationError(
        f"{type(optimizer).__name__} steps parameters of {model} and was not given to distribute(): the servers, which step, do "
        f"not know of it.\nGive all optimizers to distribute(): distribute(model, (optimizer, other), strategy)."
    )


def check_step(
    optimizer: Optimizer, entries: Sequence[KeptParameter], written: Mapping[Tensor, int], setting: Setting, weight: float
) -> None:
    """What cannot be pushed: `written` has autograd's count of writes to each parameter, as it was after the last pull."""
    places = {parameter: position for position, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    for each in entries:
        if places.get(each.parameter) != int(each.group.split(".")[1]) or not each.parameter.requires_grad:
            raise _changed(setting.name, each.name)
        if written[each.parameter] != each.parameter._version:
            raise _written(setting.name, f"parameter {each.name} was written to")
    served = {each.parameter for each in entries}
    for name, parameter in setting.model.named_parameters():
        if parameter in places and parameter.requires_grad and parameter not in served:
            raise _changed(setting.name, name)
    if any(optimizer.state.get(each.parameter) for each in entries):
        raise _written(setting.name, f"{type(optimizer).__name__} was given a state")
    scaler = setting.loop.scaler
    if scaler is not None and scaler.is_enabled():
        raise ConfigurationError(
            f"a GradScaler steps {type(optimizer).__name__} of {setting.name}: it skips steps on one worker and not on another, "
            f"and others would wait for what is never pushed.\nTrain in bfloat16, which needs no scaler; or write "
            f"sync=Synchronous()."
        )
    if weight == 0:
        raise ConfigurationError(
            f"weight(0) before a step of {setting.name}: what counts nothing cannot be part of a mean on the servers.\n"
            f"Leave this step out, or write a positive weight."
        )


def _written(model: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{model}: {what} since the last step (by load_state_dict, another optimizer or the program). The servers keep values "
        f"and optimizer state, and the next pull would undo it.\n"
        f"Call stretto.distribute(model, optimizer, strategy) again on all workers after that, or use stretto.load."
    )
