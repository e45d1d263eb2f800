"""What `p.grad` is where every worker has a part of it only: a tensor without values of its own.

The mean over all workers is there, in slices. What programs usually do with gradients between backward and step does not need all
of it in one place, and works as ever, if all workers do it (norms and checks for infinities are agreed on by a small collective):

    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), p.grad.norm()      the norm of the whole gradient
    p.grad.mul_(number), p.grad /= number, and what clipping does               of every part
    scaler.unscale_(optimizer), scaler.step(optimizer)                          all workers skip, or none
    zero_grad(), another backward before the step, p.grad is None, p.grad.shape

Everything else says what to write instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.aggregate.zero.joining import Coming
from stretto.engine.bucket import refuse_graph
from stretto.engine.gradient_under_way import StandIn, still_on_its_way
from stretto.errors import ConfigurationError

if TYPE_CHECKING:
    from stretto.aggregate.zero.bucket import SlicedBucket

aten = torch.ops.aten
NORMS = (aten.linalg_vector_norm.default, aten.norm.Scalar)
SCALINGS = (aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar)
LIST_SCALINGS = (aten._foreach_mul_.Scalar, aten._foreach_mul_.Tensor, aten._foreach_div_.Scalar, aten._foreach_div_.Tensor)
DIVISIONS = (aten.div_.Tensor, aten.div_.Scalar, aten._foreach_div_.Scalar, aten._foreach_div_.Tensor)


class GradientInSlices(StandIn):
    """Stands in for one parameter's gradient. Refers to its bucket weakly: autograd holds it where no collector sees it."""

    place: tuple[weakref.ref[SlicedBucket], int]  # the bucket, and its slot there

    @property
    def bucket(self) -> SlicedBucket:
        bucket = self.place[0]()
        if bucket is None:
            raise ConfigurationError(
                "this gradient was in slices on the workers of a model that is not distributed any more: its values are gone.\n"
                "Call optimizer.zero_grad() and backward() again."
            )
        return bucket

    @property
    def slot(self) -> int:
        return self.place[1]

    @property
    def has_values(self) -> bool:
        """Whether there is something in the slices that it stands for."""
        return not self.is_zeroed

    def make_zero(self) -> None:
        self.is_zeroed, self.added = True, None
        if (bucket := self.place[0]()) is not None:
            bucket.forget_norms()

    def take_added(self) -> Tensor | None:
        """What autograd has added to it since the round."""
        added, self.added = self.added, None
        return added

    def add_on_top(self, gradient: Tensor) -> None:
        """Add a gradient of a further backward before the step. The next round combines it."""
        refuse_graph(gradient)
        self.added = gradient.detach().clone() if self.added is None else self.added.add_(gradient.detach())

    @classmethod
    def compute(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        first = args[0] if args else None
        if function is aten.add_.Tensor and isinstance(first, GradientInSlices) and not kwargs and len(args) == 2:
            first.add_on_top(args[1])
            return first
        gradients = first if isinstance(first, (list, tuple)) else [first]
        mine = [each for each in gradients if isinstance(each, GradientInSlices)]
        unscales = function is aten._amp_foreach_non_finite_check_and_unscale_.default
        if not mine or (len(mine) < len(gradients) and not unscales):
            raise _needs_values(function)
        for each in mine:
            if each.bucket.is_under_way:
                raise still_on_its_way(function)
            if each.added is not None:
                raise _needs_a_round(function)
        if function in NORMS and _is_plain_norm(args, kwargs):
            return mine[0].bucket.norms.of(mine[0], *args[1:2])
        if function is aten._foreach_norm.Scalar and _is_plain_norm(args, kwargs):
            return [each.bucket.norms.of(each, *args[1:2]) for each in mine]
        if function in SCALINGS or function in LIST_SCALINGS:
            _scale(mine, args[1], divide=function in DIVISIONS)
            return first if function in SCALINGS else None
        if unscales:
            rest = [each for each in gradients if not isinstance(each, GradientInSlices)]
            if rest:  # the values of sparse gradients, and what is not distributed
                function(rest, *args[1:])
            mine[0].bucket.norms.unscale(mine, args[1], args[2])
            return None
        raise _needs_values(function)


def _is_plain_norm(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Over all elements, in the dtype of the gradient, and of an order that adds up."""
    order = args[1] if len(args) > 1 and args[1] is not None else 2
    return len(args) <= 2 and order > 0 and not any(value is not None and value is not False for value in kwargs.values())


def _scale(gradients: list[GradientInSlices], factor: Any, *, divide: bool) -> None:
    if isinstance(factor, Tensor) and factor.numel() != 1:
        raise _needs_values(aten.mul_.Tensor)
    for each in gradients:
        announced = each.bucket.norms.announced
        if announced.is_needed:
            announced.say(Coming.SCALE, each.bucket.number, each.slot, 1.0 / float(factor) if divide else float(factor))
        each.bucket.scale(each.slot, factor, divide=divide)


def _needs_values(function: Callable[..., Any]) -> ConfigurationError:
    return ConfigurationError(
        f"{function} of a gradient that is in slices: with shard=Zero(...) each worker has a part of the mean over all workers, "
        f"so p.grad has no values that this could work on.\n"
        f"What works: norms (on all workers), clip_grad_norm_, p.grad.mul_(number), a GradScaler, zero_grad(). For anything else "
        f"do it to the loss, or train with shard=Replicated()."
    )


def _needs_a_round(function: Callable[..., Any]) -> ConfigurationError:
    return ConfigurationError(
        f"{function} of a gradient to which a backward under no_sync has added since: a part of it is this worker's own.\n"
        f"Call it after the backward that synchronises, or after stretto.synchronize(model)."
    )
