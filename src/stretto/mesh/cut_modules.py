"""What modules become when they are cut: the same objects, with the same parameters under the same names, of another class.

A cut module is still an instance of its former class, and references to it and to its parameters stay good. Its parameters hold
this member's slices. `state_dict` gives whole tensors, so all members call it; `load_state_dict` takes whole ones, and sends
nothing.

    UpProjection      the first linear map of a cut block: outputs are cut           x whole -> y cut
    DownProjection    the last: inputs are cut, partial results are added up         x cut -> y whole
    CutLinear         one by itself: outputs, inputs or both are cut                 x whole -> y whole
    CutEmbedding      rows, one for each word, are cut                               whole -> whole
    CutBlock          a module that has the first two inside (`region.py`)           whole -> whole

The bias of a map whose inputs are cut is added once, after the sum.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.mesh.crossings import enter, gather, leave, own_slice
from stretto.mesh.mesh import Axis
from stretto.mesh.region import Region
from stretto.mesh.tensor_cut import Cuts, gathered
from stretto.mesh.tensor_cut import own_slice as own_slice_of


class CutModule(nn.Module):
    """Has parameters that are cut."""

    _cuts: dict[str, Cuts]  # by the parameter's name in this module
    _described = False  # `state_dict` is to say what there is, without values and without sending anything

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, cuts in self._cuts.items():
            own = destination.get(prefix + name)
            if own is not None and self._described:
                destination[prefix + name] = torch.empty(whole_shape(own, cuts), dtype=own.dtype, device="meta")
            elif own is not None:
                destination[prefix + name] = gathered(own, cuts)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        _, _, missing, _, errors = arguments
        refused = []
        for name, cuts in self._cuts.items():
            saved, parameter = state_dict.get(prefix + name), getattr(self, name)
            if saved is None or parameter is None:
                continue
            shape = whole_shape(parameter, cuts)
            if tuple(saved.shape) == shape:
                state_dict[prefix + name] = own_slice_of(saved, cuts)
            else:
                errors.append(f"size mismatch for {prefix}{name}: {tuple(saved.shape)} in what is loaded, {shape} in the model.")
                refused.append(prefix + name)
                del state_dict[prefix + name]
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        missing[:] = [name for name in missing if name not in refused]


def whole_shape(own: Tensor, cuts: Cuts) -> tuple[int, ...]:
    shape = list(own.shape)
    for cut in cuts:
        shape[cut.dim] *= cut.axis.size
    return tuple(shape)


def become(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Give a module the behaviour of the mixin, in front of that of its own class."""
    if not isinstance(module, mixin):
        module.__class__ = _mixed(mixin, type(module))  # type: ignore[arg-type]


@cache  # a class is made once
def _mixed(mixin: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{mixin.__name__}Of{kind.__name__}", (mixin, kind), {"__module__": __name__})


def product(module: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x times this member's weight, for nn.Linear and for the Conv1D of GPT-2, whose weight is the other way round."""
    if isinstance(module, nn.Linear):
        return F.linear(x, module.weight, bias)
    return F.linear(x, module.weight.t(), bias)


class UpProjection(CutModule):
    _region: Region
    bias: nn.Parameter | None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled model breaks here, into graphs before and after
    def forward(self, x: Tensor) -> Tensor:
        out = product(self, self._region.enter(x), self.bias)
        self._region.begin(x.device, training=self.training)
        return out


class DownProjection(CutModule):
    _region: Region
    bias: nn.Parameter | None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        self._region.end()
        out = leave(product(self, x), self._region.axis)
        return out if self.bias is None else out + self.bias


class CutLinear(CutModule):
    _out: Axis | None = None
    _into: Axis | None = None
    bias: nn.Parameter | None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        if self._into is not None:
            x = own_slice(x, self._into)
        if self._out is not None:
            x = enter(x, self._out)
        if self._into is None:
            out = product(self, x, self.bias)
        else:
            out = leave(product(self, x), self._into)
            out = out if self.bias is None else out + self.bias
        return out if self._out is None else gather(out, self._out)


class CutEmbedding(CutModule):
    """Member i has the i-th slice of the rows, and gives zeros for words of others. The sum over members is the embedding."""

    _axis: Axis
    num_embeddings: int  # of all
    padding_idx: int | None
    weight: nn.Parameter

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, words: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        first = self._axis.place * rows
        ours = words - first
        foreign = (ours < 0) | (ours >= rows)
        padding = None if self.padding_idx is None else self.padding_idx - first  # its row gets no gradient
        padding = padding if padding is not None and 0 <= padding < rows else None
        found = F.embedding(ours.masked_fill(foreign, 0), self.weight, padding)
        return leave(found.masked_fill(foreign.unsqueeze(-1), 0.0), self._axis)


class CutBlock(nn.Module):
    _region: Region

    def forward(self, *arguments: Any, **options: Any) -> Any:
        with self._region.running():
            return super().forward(*arguments, **options)
