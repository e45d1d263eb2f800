"""Where activations go in and out of the part of a model that is cut: four pairs of a forward and its backward.

Outside of such a part all members hold the same activation, and the same gradient of it, to the bit. Inside each has its own.

              forward                                 backward
    enter     the same tensor                         the sum over members of the gradients that come back
    leave     the sum over members of partial results the same gradient
    gather    all members' slices, put together       this member's slice of the gradient
    slice     this member's slice                     all members' slices of the gradient, put together

Each is the other's backward (enter and leave, gather and slice), and is written so: they can be differentiated any number of
times. `enter` and `leave` are called f and g in Megatron's paper.

Cost of enter and leave: one all-reduce of the activation, each, in one direction.
Reference: Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from stretto.mesh.mesh import Axis


def enter(x: Tensor, axis: Axis) -> Tensor:
    return x if axis.size == 1 else cast(Tensor, _Enter.apply(x, axis))  # type: ignore[no-untyped-call]


def leave(partial: Tensor, axis: Axis) -> Tensor:
    """`partial` must be nobody else's: the sum is made in its memory."""
    return partial if axis.size == 1 else cast(Tensor, _Leave.apply(partial, axis))  # type: ignore[no-untyped-call]


def gather(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    return x if axis.size == 1 else cast(Tensor, _Gather.apply(x, axis, dim))  # type: ignore[no-untyped-call]


def own_slice(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    return x if axis.size == 1 else cast(Tensor, _Slice.apply(x, axis, dim))  # type: ignore[no-untyped-call]


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Autograd may give the same memory to others: what is added up in place is a copy.
        return leave(gradient.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        ctx.mark_dirty(partial)
        return axis.sum_(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return enter(gradient, ctx.axis), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return torch.cat(axis.gather(x), dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return own_slice(gradient, ctx.axis, ctx.dim), None, None


class _Slice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return x.chunk(axis.size, dim)[axis.place].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gather(gradient, ctx.axis, ctx.dim), None, None
