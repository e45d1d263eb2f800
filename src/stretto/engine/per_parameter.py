"""Does an optimizer update each parameter by itself? Found out by trying, on a few small parameters of its own.

Two optimizers of the class and the options in question step the same small parameters a few times, with gradients of very
different sizes: one all of them together, as torch does, the other one parameter after the other. If both end with the same
values the update of a parameter reads no other one; a global norm, an average over parameters or a line search would show.

Limit: what depends on the *number* of parameters beyond a few, or on data, is not seen. Optimizers that cannot be made from a
list of parameters and their `defaults` cannot be tried and are refused.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.engine.postponed_step import copy_option, plain_step
from stretto.errors import ConfigurationError

STEPS = 3
PER_GROUP = 2
MOST_GROUPS = 4  # of different options; more would not say more


def check_per_parameter(optimizer: Optimizer, why: str) -> None:
    """Raise `ConfigurationError` unless each parameter's update is its own affair. `why` says what asks for that."""
    name = type(optimizer).__name__
    try:
        together, apart = _Trial(optimizer), _Trial(optimizer)
        for number in range(STEPS):
            together.step_all(number)
            apart.step_one_by_one(number)
        alike = all(map(_is_close, together.parameters, apart.parameters))
        writes = together.has_changed_options() or apart.has_changed_options()
    except Exception as problem:
        raise ConfigurationError(
            f"{why} with {name}: it could not be found out whether it updates each parameter by itself "
            f"({type(problem).__name__}: {problem}).\n"
            f"Every update runs when its own gradient is in, so an optimizer that needs all of them at once, or a closure, "
            f"cannot be used: choose another schedule, such as schedule=Buckets(), or an optimizer like torch.optim.AdamW."
        ) from problem
    if not alike or writes:
        what = "keeps what it computes in param_groups" if alike else "updates a parameter differently if others step with it"
        raise ConfigurationError(
            f"{why} with {name}: it {what}, so it needs all gradients at once (a global norm, say), and here each parameter is "
            f"updated when its own gradient is in.\n"
            f"Write schedule=Buckets(), or use an optimizer that treats each parameter by itself, such as torch.optim.AdamW."
        )


class _Trial:
    """An optimizer like the given one, on small parameters like the first ones of each of its groups."""

    def __init__(self, like: Optimizer) -> None:
        takes = inspect.signature(type(like).__init__).parameters
        defaults = {key: value for key, value in like.defaults.items() if key in takes}
        groups = [group for group in like.param_groups if group["params"]][:MOST_GROUPS]
        small = [[_small(group["params"][0], 10 * place + n) for n in range(PER_GROUP)] for place, group in enumerate(groups)]
        self.parameters = [parameter for each in small for parameter in each]
        self._optimizer = type(like)([{"params": each} for each in small], **defaults)
        for mine, theirs in zip(self._optimizer.param_groups, groups, strict=True):
            mine.update({key: copy_option(value) for key, value in theirs.items() if key != "params"})
        self._options = self._options_now()

    def step_all(self, number: int) -> None:
        self._step(number, range(len(self.parameters)))

    def step_one_by_one(self, number: int) -> None:
        for place in range(len(self.parameters)):
            self._step(number, [place])

    def _step(self, number: int, places: Any) -> None:
        for place, parameter in enumerate(self.parameters):
            parameter.grad = _gradient(parameter, number, place) if place in places else None
        plain_step(self._optimizer)(self._optimizer)

    def has_changed_options(self) -> bool:
        return self._options_now() != self._options

    def _options_now(self) -> list[str]:
        return [repr({key: value for key, value in group.items() if key != "params"}) for group in self._optimizer.param_groups]


def _small(parameter: Tensor, seed: int) -> Tensor:
    shape = [min(3, size) for size in parameter.shape]
    count = 1
    for size in shape:
        count *= size
    values = (
        torch.arange(1 + seed, 1 + seed + count, dtype=torch.float32, device=parameter.device).view(shape).to(parameter.dtype) / 7
    )
    return torch.nn.Parameter(values)


def _gradient(parameter: Tensor, number: int, place: int) -> Tensor:
    """Some hundred times larger for every further parameter, and different in every step."""
    with torch.no_grad():
        wide = parameter if parameter.is_complex() else parameter.float()
        return (torch.sin(wide * 3 + number) * 100.0 ** (place % 3)).to(parameter.dtype)


def _is_close(one: Tensor, other: Tensor) -> bool:
    wide = torch.complex128 if one.is_complex() else torch.float64
    return torch.allclose(one.detach().to(wide), other.detach().to(wide), rtol=1e-5, atol=1e-7)
