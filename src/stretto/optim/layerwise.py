"""What LARS and LAMB share: a loop over parameters in which each has a step of its own length.

A layer whose gradient is large next to its weights diverges first, and it alone forces the rate of the whole network down when
the batch, and with it the rate, grows. Layerwise methods divide by the size of the gradient and multiply by that of the weights:

    w <- w - rate * ratio(w, g) * direction(w, g),        ratio ~ |w| / |direction|

so every layer moves by about the same part of itself. Norms are taken over one parameter tensor each: that is a "layer" here.

Which parameters: `adapt` names those that have a ratio (others: ratio 1), `decay` those that have weight decay. "matrices" are
tensors of two or more dimensions; by default biases and the scales and shifts of norm layers have neither, as in both papers.

Cost:      two norms, two reads of the parameter's size; a ratio is a 0-d tensor on the parameter's device and is never read by
           the host, so a GPU is not waited for.
Slices:    where a worker has a part of a parameter only, its norms are those of all parts: `steps` asks for them, and whoever
           drives it says what they are (`aggregate/zero/slice_optimizer.py`).
Invariant: the ratio is 1 where a norm is zero: weights that start at zero do move.
Departs:   arithmetic and norms are in float32 for parameters in half precision; state has the parameter's dtype, as in torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import suppress
from numbers import Real
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from stretto.errors import ConfigurationError

Norms = tuple[Tensor, Tensor]
Steps = Generator[tuple[Tensor, Tensor], Norms, None]
Adapt = Literal["matrices", "all", "none"]
Decay = Literal["matrices", "all"]


class Layerwise(Optimizer, ABC):
    """Abstract. A subclass checks the options of a group and updates one parameter."""

    @abstractmethod
    def check(self, options: dict[str, Any]) -> None:
        """Raise ConfigurationError for the first option of a group that cannot work."""

    @abstractmethod
    def steps(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any], whole: Tensor) -> Steps:
        """Change `weight` and `state` in place; `gradient` is dense, at least float32, and must stay as it is. Yields the two
        tensors whose norms it needs, if any, and is sent these. `whole`: the parameter, of which `weight` may be a part."""

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One step of one parameter, in place."""
        steps = self.steps(weight, gradient, state, group, weight)
        if (asked := next(steps, None)) is not None:
            answer(steps, torch.linalg.vector_norm(asked[0]), torch.linalg.vector_norm(asked[1]))

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        self.check(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; options it does not have are those given to the constructor."""
        options = {**self.defaults, **param_group}
        self.check(options)
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step along the gradients that are there. Returns what `closure`, which computes them anew, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    if weight.grad is not None:
                        self.update(weight, self._gradient(weight), self.state[weight], group)
        return loss

    def _gradient(self, weight: Tensor) -> Tensor:
        gradient, name, shape = weight.grad, type(self).__name__, tuple(weight.shape)
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise ConfigurationError(
                f"{name} got a sparse gradient for a parameter of shape {shape}: the rows that are not in it would have to move "
                f"too, by momentum and weight decay.\nUse Embedding(sparse=False), or torch.optim.SparseAdam for this parameter."
            )
        if gradient.is_complex():
            raise ConfigurationError(
                f"{name} got a complex gradient for a parameter of shape {shape}; its rule is for real numbers.\n"
                f"Keep the parameter as real numbers and use torch.view_as_complex in forward()."
            )
        return gradient.to(_working_dtype(weight))


def answer(steps: Steps, one: Tensor, other: Tensor) -> None:
    """Give the norms that were asked for; the step is taken then."""
    with suppress(StopIteration):
        steps.send((one, other))
        raise AssertionError("norms are asked for once")


def in_working_dtype(weight: Tensor) -> Tensor:
    """The weight itself, or a float32 copy of one in half precision."""
    return weight.to(_working_dtype(weight))


def _working_dtype(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


def is_adapted(weight: Tensor, group: dict[str, Any]) -> bool:
    return group["adapt"] == "all" or (group["adapt"] == "matrices" and weight.ndim >= 2)


def decay_of(weight: Tensor, group: dict[str, Any]) -> float:
    """The weight decay of this parameter: the group's, or zero."""
    decays = group["decay"] == "all" or weight.ndim >= 2
    return float(group["weight_decay"]) if decays else 0.0


def ratio_or_one(above: Tensor, below: Tensor, *norms: Tensor) -> Tensor:
    """above / below, and 1 where one of `norms` is zero: a 0-d tensor, without asking the device which it is."""
    positive = norms[0] > 0
    for norm in norms[1:]:
        positive = positive & (norm > 0)
    return torch.where(positive, above / below, 1.0)


def check_number(what: str, value: object, *, below: float = math.inf, positive: bool = False) -> None:
    """Raise unless `value` is a number in [0, below), or in (0, below) if it must be positive."""
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
        if (number > 0 if positive else number >= 0) and number < below:
            return
    least = "above 0" if positive else "0 or more"
    most = "finite" if below == math.inf else f"below {below:g}"
    raise ConfigurationError(f"{what}={value!r}: it must be a number, {least} and {most}.")


def check_which(what: str, options: dict[str, Any]) -> None:
    """Raise unless `adapt`, `decay` and `weight_decay` are known and make sense together."""
    for option, known in (("adapt", ("matrices", "all", "none")), ("decay", ("matrices", "all"))):
        if options[option] not in known:
            raise ConfigurationError(
                f"{what}({option}={options[option]!r}): it names the parameters that are meant.\n"
                f"Write one of {', '.join(map(repr, known))}" + ("; for none, weight_decay=0." if option == "decay" else ".")
            )
    check_number(f"{what}: weight_decay", options["weight_decay"])
