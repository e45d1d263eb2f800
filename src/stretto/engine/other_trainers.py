"""Refuses models that something else already combines or shards, so that two systems never both average the same gradients.

DistributedDataParallel, FSDP and tensor parallelism communicate through torch.distributed. With them around or inside a model
that `distribute` has hooked, every gradient would be combined twice, or this worker's shard would be averaged with another
worker's different shard; neither ends in an error by itself.

torch.distributed as such is no obstacle: libraries may gather metrics and share out data through it. Only what touches the
gradients or the parameters is refused.

A class that nobody has imported cannot have instances. So it is looked up among the modules that are loaded, and training without
torch.distributed does not pay for importing it.
"""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stretto.errors import ConfigurationError

RECIPES = "Hugging Face's Trainer, accelerate and Lightning do this by themselves: docs/libraries.md has a recipe for each."
REPLICATING = (("torch.nn.parallel", "DistributedDataParallel"), ("torch.distributed._composable.replicate", "DDP"))
SHARDING = (("torch.distributed.fsdp", "FullyShardedDataParallel"), ("torch.distributed.fsdp", "FSDPModule"))
SHARDED_TENSOR = (("torch.distributed.tensor", "DTensor"),)
AVERAGING_OPTIMIZER = (("torch.distributed.optim", "PostLocalSGDOptimizer"),)


def refuse_other_trainers(model: nn.Module) -> None:
    """Raise if the model, or a part of it, belongs to a wrapper that combines gradients or holds only a shard."""
    replicating, sharding, sharded = _loaded(REPLICATING), _loaded(SHARDING), _loaded(SHARDED_TENSOR)
    for name, module in model.named_modules():
        if isinstance(module, replicating):
            raise ConfigurationError(
                f"{_part(model, name)} is a {type(module).__name__}: it combines gradients itself, through torch.distributed, "
                f"and here they would be combined a second time.\n"
                f"Give distribute() the plain model, without that wrapper. {RECIPES}"
            )
        if isinstance(module, sharding):
            raise ConfigurationError(f"{_part(model, name)} is a {type(module).__name__}: {_SHARDED}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, sharded):
            raise ConfigurationError(f"parameter {name} of {type(model).__name__} is a {type(parameter).__name__}: {_SHARDED}")


_SHARDED = (
    "each worker holds another part of it, and distribute() makes the parameters of all workers equal.\n"
    "Give distribute() the plain model, before it is sharded; a model that must be sharded trains without stretto."
)


def refuse_wrapper_around(model: nn.Module) -> None:
    """Raise if this forward of `model` runs inside a DistributedDataParallel that was put around it later."""
    wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is not None and any(module is model for module in wrapper.modules()):
        raise ConfigurationError(
            f"{type(model).__name__} was given to distribute(), and its forward runs inside a DistributedDataParallel that was "
            f"put around it: both would combine the gradients, each on top of the other's result.\n"
            f"Call the plain model, without that wrapper. {RECIPES}"
        )


def refuse_averaging_optimizer(optimizer: Optimizer) -> None:
    """Raise if the optimizer averages parameters between workers itself."""
    if isinstance(optimizer, _loaded(AVERAGING_OPTIMIZER)):
        raise ConfigurationError(
            f"distribute(model, {type(optimizer).__name__}, ...): this optimizer averages the parameters of all workers itself, "
            f"through torch.distributed, in steps of its own.\nGive distribute() the optimizer that it wraps."
        )


def _loaded(names: tuple[tuple[str, str], ...]) -> tuple[type, ...]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in names)
    return tuple(kind for kind in found if isinstance(kind, type))


def _part(model: nn.Module, name: str) -> str:
    return f"{name!r} in {type(model).__name__}" if name else "the model"
