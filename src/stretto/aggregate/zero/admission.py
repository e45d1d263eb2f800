"""What training with sharded state refuses: before anything is sent, and before a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.all_reduce.value import AllReduce
from stretto.aggregate.parameter_server.shard_optimizer import ELEMENTWISE
from stretto.aggregate.zero.compressed import fault_of_gradients, fault_of_weights
from stretto.aggregate.zero.slice_optimizer import LAYERWISE
from stretto.engine.bucket import gradient_dtype
from stretto.engine.training import Setting
from stretto.errors import ConfigurationError
from stretto.schedule.orders import AfterBackward
from stretto.shard.zero import Zero

if TYPE_CHECKING:
    from stretto.strategy import Strategy

ROUNDED = (torch.float32, torch.float16, torch.bfloat16)
ALGORITHMS = ("auto", "ring", "direct")


def check_strategy(strategy: Strategy) -> None:
    aggregate = strategy.aggregate
    assert isinstance(aggregate, AllReduce) and isinstance(strategy.shard, Zero)
    if aggregate.algorithm not in ALGORITHMS:
        raise ConfigurationError(
            f"aggregate={aggregate!r} with shard={strategy.shard!r}: gradients are combined by a reduce-scatter, and of these "
            f"there is a ring and a direct one.\nWrite aggregate=AllReduce(), AllReduce('ring') or AllReduce('direct')."
        )
    if strategy.shard.stage >= 2 and isinstance(strategy.schedule, AfterBackward):
        raise ConfigurationError(
            f"schedule={strategy.schedule!r} with shard={strategy.shard!r}: all gradients are whole until backward has ended and "
            f"leave in one piece, so gradients in slices would save no memory.\n"
            f"Write schedule=Buckets() or schedule=WaitFree(); or Zero(1)."
        )
    if (reason := fault_of_gradients(strategy.compress)) is not None:
        raise ConfigurationError(
            f"compress={strategy.compress!r} with shard={strategy.shard!r}: {reason}.\n"
            f"Write a codec of blocks, such as Int8(), ErrorFeedback(Sign()) or BFloat16(); or shard=Replicated()."
        )
    weights = strategy.shard.weights
    if weights is not None and (reason := fault_of_weights(weights)) is not None:
        raise ConfigurationError(
            f"shard={strategy.shard!r}: weights={weights!r}: {reason}.\n"
            f"Write weights=Int8(), Dynamic8(), BFloat16() or Float16(), or leave it out."
        )


def check(model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy) -> None:
    """Whether this model can be stepped in slices."""
    assert isinstance(strategy.shard, Zero)
    sparse = _with_sparse_gradients(model)
    owners: dict[Tensor, Optimizer] = {}
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(parameter.requires_grad and parameter not in sparse for parameter in parameters):
            _check_class(optimizer, strategy)
        for parameter in parameters:
            if owners.setdefault(parameter, optimizer) is not optimizer:
                raise ConfigurationError(
                    f"shard={strategy.shard!r}: two optimizers, {type(owners[parameter]).__name__} and "
                    f"{type(optimizer).__name__}, step the same parameter of shape {tuple(parameter.shape)}, and its slices are "
                    f"kept with one.\nGive every parameter to one of them, or write shard=Replicated()."
                )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and strategy.shard.weights is not None and parameter.dtype not in ROUNDED:
            raise ConfigurationError(
                f"shard={strategy.shard!r}: {name} is of {parameter.dtype}, and codecs work on float32 and half precision.\n"
                f"Leave weights= out."
            )
        if parameter.requires_grad and gradient_dtype(parameter) != parameter.dtype:
            raise ConfigurationError(
                f"shard={strategy.shard!r}: {name} is of {parameter.dtype} and its gradient of {gradient_dtype(parameter)}; "
                f"slices are stepped with gradients of their own dtype.\nLeave grad_dtype as it is, or write shard=Replicated()."
            )


def _check_class(optimizer: Optimizer, strategy: Strategy) -> None:
    name = type(optimizer).__name__
    if name in ELEMENTWISE and type(optimizer) is getattr(torch.optim, name):
        return
    if type(optimizer) in LAYERWISE:
        _check_real(optimizer, strategy)
        return
    why = next((f" (a subclass of {known} may compute something else)" for known in ELEMENTWISE if _is_a(optimizer, known)), "")
    raise ConfigurationError(
        f"shard={strategy.shard!r} with {type(optimizer).__module__}.{name}: each worker steps a slice, which is cut through "
        f"tensors, so the optimizer has to treat each element by itself, and of this one it is not known{why}.\n"
        f"Write torch.optim.{', '.join(ELEMENTWISE)}, stretto.LARS or stretto.LAMB; or shard=Replicated(), with which each "
        f"worker steps everything."
    )


def _check_real(optimizer: Optimizer, strategy: Strategy) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.is_complex():
                raise ConfigurationError(
                    f"shard={strategy.shard!r} with {type(optimizer).__name__}: its rule is for real numbers, and a parameter of "
                    f"shape {tuple(parameter.shape)} is complex.\nUse torch.view_as_complex in forward()."
                )


def _is_a(optimizer: Optimizer, known: str) -> bool:
    return isinstance(optimizer, getattr(torch.optim, known))


def check_known(optimizer: Optimizer, setting: Setting) -> None:
    """Only optimizers that were given to `distribute` have slices."""
    if not any(optimizer is given for given in setting.loop.optimizers):
        raise ConfigurationError(
            f"{type(optimizer).__name__}.step() on parameters of {setting.name}: with shard=Zero(...) the state of optimizers is "
            f"in slices, and this one was not given to distribute().\n"
            f"Write distribute(model, (optimizer, other)) with all that step this model."
        )


def _with_sparse_gradients(model: nn.Module) -> set[Tensor]:
    embeddings = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    return {module.weight for module in embeddings if module.sparse}
