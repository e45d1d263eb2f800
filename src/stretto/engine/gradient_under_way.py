"""What `p.grad` is between backward and step where gradients are still on their way: a tensor without values.

A program may look at it (`p.grad is not None`, its shape), drop it (`zero_grad`), or hand it to `optimizer.step()`, which the
engine has arranged. Whoever wants its values (a clip by the global norm, a GradScaler, a log of norms) gets an error that says
what to write, instead of numbers that are about to change.

torch calls `__torch_dispatch__` for every operation on it, also from C++: that is how adding a second backward to it is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.errors import ConfigurationError

ZEROING = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)  # of zero_grad(set_to_none=False)


class StandIn(Tensor):
    """Abstract: stands in for one parameter's gradient. Made once for each parameter, and used again in every round. `is_zeroed`:
    the program has set it to zero, so that what the round gives is not what it wants to see."""

    is_zeroed: bool
    added: Tensor | None  # what autograd has added to it since the round, where it lets it

    @staticmethod
    def __new__(cls, parameter: Tensor, dtype: torch.dtype) -> StandIn:
        made: StandIn = Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=dtype, device=parameter.device
        )
        return made

    def __init__(self, parameter: Tensor, dtype: torch.dtype) -> None:
        self.is_zeroed = False
        self.added = None

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in ZEROING:
            for gradient in [args[0]] if isinstance(args[0], Tensor) else args[0]:
                if isinstance(gradient, StandIn):
                    gradient.make_zero()
                else:
                    gradient.zero_()
            return args[0] if function is torch.ops.aten.zero_.default else None
        if function is torch.ops.aten.detach.default:
            return args[0]
        if function is torch.ops.aten.zeros_like.default:
            return torch.zeros(args[0].shape, dtype=args[0].dtype, device=args[0].device)
        return cls.compute(function, args, kwargs or {})

    def make_zero(self) -> None:
        """The program sets it to zero."""
        self.is_zeroed = True

    @classmethod
    def compute(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Any other operation that has a stand-in among its arguments."""
        raise NotImplementedError


class GradientUnderWay(StandIn):
    """Its values are on their way, and nobody may wait for them unasked."""

    @classmethod
    def compute(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        raise still_on_its_way(function)


def still_on_its_way(function: Callable[..., Any]) -> ConfigurationError:
    return ConfigurationError(
        f"{function} of a gradient that is still on its way: with cross_barrier=True the mean over all workers arrives "
        f"during the next forward, and each parameter is updated then.\n"
        f"Call optimizer.synchronize() after backward() and before clipping, unscaling or reading gradients: this step then "
        f"waits for all of them. A second backward() before the step belongs into `with stretto.no_sync(model):` (all but "
        f"the last), and optimizer.zero_grad() comes before the next one."
    )
