"""The layers of a model in the order in which a forward passes them: what a pipeline may cut between.

An `nn.Sequential` says so itself: its children, and theirs where they are plain `nn.Sequential`s too. Of any other model the
user says it, `layers=["embedding", "blocks", "head"]`: the forward of the model is then these one after the other, each called
with what the one before has returned, and an `nn.ModuleList` stands for its modules in order. What the model's own `forward`
does beside that would be lost, so it is compared once with the model on a sample.

Names stay those of the plain model, so that checkpoints do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.errors import ConfigurationError
from stretto.partition.trees import take_apart

TOLERANCE = 1e-5


class Layer(NamedTuple):
    """A module and its name in the model."""

    name: str
    module: nn.Module

    @property
    def has_parameters(self) -> bool:
        return any(parameter.requires_grad for parameter in self.module.parameters())


class WholeNames(NamedTuple):
    """What the plain model would save: `first_name` has each parameter's, where several names mean one."""

    parameters: list[str]
    tensors: list[str]
    first_name: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> WholeNames:
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        every = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
        return cls(list(first.values()), list(model.state_dict()), every)


def layers_of(model: nn.Module, named: Sequence[str] | None) -> list[Layer]:
    """In order. Everything that the model would save is in one of them."""
    if named is None:
        if not _is_plain_sequence(model):
            raise ConfigurationError(
                f"stretto.pipeline of a {type(model).__name__}: only an nn.Sequential says itself in which order its layers are "
                f"called, and a forward that was traced would be wrong wherever it depends on what it is given.\n"
                f'Write layers=["embedding", "blocks", "head"], whose composition is the forward (an nn.ModuleList stands for '
                f"its modules in order), and sample=a_batch, with which that is checked."
            )
        layers = _expand("", model)
    else:
        layers = [layer for name in named for layer in _expand(name, _submodule(model, name))]
    _check_all_is_there(model, layers)
    return layers


def _is_plain_sequence(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not any(hooks) and not own


def _expand(name: str, module: nn.Module) -> list[Layer]:
    if _is_plain_sequence(module) or isinstance(module, nn.ModuleList):
        prefix = f"{name}." if name else ""
        return [
            layer for child, inner in module._modules.items() if inner is not None for layer in _expand(prefix + child, inner)
        ]
    return [Layer(name, module)]


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name) if name else model
    except AttributeError:
        children = ", ".join(repr(child) for child, _ in model.named_children())
        raise ConfigurationError(
            f"layers: {name!r} is no module of this {type(model).__name__}, which has {children}. Write names of its modules."
        ) from None


def _check_all_is_there(model: nn.Module, layers: Sequence[Layer]) -> None:
    inside = {id(tensor) for layer in layers for tensor in (*layer.module.parameters(), *layer.module.buffers())}
    named = (*model.named_parameters(), *model.named_buffers())
    if outside := [name for name, tensor in named if id(tensor) not in inside]:
        raise ConfigurationError(
            f"stretto.pipeline of a {type(model).__name__}: {', '.join(outside[:4])} {'is' if len(outside) == 1 else 'are'} "
            f"in none of its layers ({', '.join(layer.name for layer in layers[:8])}), so no stage would hold it.\n"
            f"Name the modules that have them in layers=, in the order in which the forward calls them."
        )


def check_composition(model: nn.Module, layers: Sequence[Layer], sample: Any) -> None:
    """Refuse layers that, one after the other, do not give what the model gives."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            whole = model(sample)
            value = sample
            for layer in layers:
                value = layer.module(value)
    finally:
        for module, mode in training.items():
            module.training = mode
    shapes, tensors = zip(*(take_apart(each, "what the model returns") for each in (whole, value)), strict=True)
    if shapes[0] != shapes[1] or not all(_agree(a, b) for a, b in zip(*tensors, strict=True)):
        raise ConfigurationError(
            f"layers={[layer.name for layer in layers]}: one after the other they do not give what this {type(model).__name__} "
            f"gives for the sample, so its forward does more than calling them (a skip connection around several layers, say).\n"
            f"Put what it does into modules that take one value and return one, a tuple or a dict if there are several."
        )


def _agree(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE) if a.is_floating_point() else torch.equal(a, b)
