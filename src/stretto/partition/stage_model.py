"""What one worker of a pipeline holds of the model: some of its layers, under the names that they have in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stretto.partition.layers import Layer
from stretto.partition.trees import changed, put_together, take_apart

RETURNED = "what a stage of the pipeline returns"


class StageModel(nn.Module):
    """The layers of one stage. Names of parameters and buffers are those of the plain model, so its `state_dict` is a part of
    that model's.

    Called as `module(value, part)`, it passes a micro-batch through one part of them. With `recompute` a part keeps its inputs
    alone, and computes the rest anew in backward, with the random numbers of the first time (`torch.utils.checkpoint`).
    """

    def __init__(self, parts: Sequence[Sequence[Layer]], *, recompute: bool = False) -> None:
        super().__init__()
        self._stretto_parts = [[layer.module for layer in part] for part in parts]
        self._stretto_recompute = recompute
        self._stretto_job: Any = None  # among whom this module is replicated: what `distribute` takes for its job
        for part in parts:
            for layer in part:
                place(self, layer.name, layer.module)

    def forward(self, value: Any, part: int = 0) -> Any:
        if self._stretto_recompute and torch.is_grad_enabled():
            return checkpoint(self._anew, value, part, use_reentrant=False)
        return self._through(value, part)

    def _anew(self, value: Any, part: int) -> Any:
        """On a copy: the first layer may change what it is given in place, and it will be given it again."""
        return self._through(changed(value, Tensor.clone, RETURNED), part)

    def _through(self, value: Any, part: int) -> Any:
        for layer in self._stretto_parts[part]:
            value = layer(value)
        return value

    def parameters_of(self, part: int) -> list[nn.Parameter]:
        """Those that this part trains, each once."""
        found = (each for layer in self._stretto_parts[part] for each in layer.parameters() if each.requires_grad)
        return list(dict.fromkeys(found))


def place(root: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module under its dotted name, in folders where the plain model has modules."""
    *folders, last = name.split(".")
    for folder in folders:
        if folder not in root._modules:
            root.add_module(folder, nn.Module())
        inner = root._modules[folder]
        assert inner is not None
        root = inner
    root.add_module(last, module)


class _Entry(torch.autograd.Function):
    """The same values at the same place, as a tensor that a layer may change in place: a leaf, or a view of one, may not be."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.new_empty(0).set_(tensor)  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def entered(leaf: Tensor) -> Tensor:
    """What a layer is given in the place of a leaf whose gradient is wanted."""
    return _Entry.apply(leaf) if leaf.requires_grad else leaf  # type: ignore[no-untyped-call]


def as_given(tree: Any, wants: Sequence[bool], device: torch.device) -> tuple[Any, list[Tensor]]:
    """What has come from the stage before, on this stage's device; and those of its tensors whose gradients go back."""
    shape, tensors = take_apart(tree, RETURNED)
    moved = [tensor.to(device) for tensor in tensors]
    leaves = [tensor.requires_grad_() for tensor, wanted in zip(moved, wants, strict=True) if wanted]
    return put_together(shape, [entered(tensor) for tensor in moved]), leaves


def plain(tree: Any) -> Any:
    """Without a graph."""
    return changed(tree, Tensor.detach, RETURNED)
