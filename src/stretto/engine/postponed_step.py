"""A step of the user's optimizer that is taken later, some parameters at a time, as if it had been taken when it was called.

When `optimizer.step()` is called its options are noted (learning rates, betas, weight decay of every group, as they are at that
moment: a scheduler may change them a line later). When gradients have come, the optimizer's own step runs over just these
parameters: for its length `param_groups` has only them, with the noted options. What it keeps by parameter (`optimizer.state`)
is its own, in its usual place.

    theta_p(t+1), s_p(t+1) = U(theta_p(t), s_p(t), g_p(t), options(t))        for each parameter p by itself

So this is right for an optimizer whose update of a parameter reads no other parameter, and for no other (`per_parameter.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.engine import misuse

TAKING: Final = "_stretto_taking_step"


class PostponedStep:
    """One call of `optimizer.step()`. Holds the parameters that have not stepped yet."""

    def __init__(self, optimizer: Optimizer, parameters: set[Tensor]) -> None:
        self._optimizer = optimizer
        self._options = [
            {key: copy_option(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self.waiting = {  # parameter -> the number of its group
            parameter: number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter in parameters
        }
        self._versions = {parameter: parameter._version for parameter in self.waiting}
        self._streams = {device: torch.cuda.current_stream(device) for device in {p.device for p in self.waiting if p.is_cuda}}

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Refuse parameters that the program has changed since: the step should have come before that."""
        for parameter in parameters:
            if parameter in self.waiting and parameter._version != self._versions[parameter]:
                raise misuse.changed_before_update(tuple(parameter.shape))

    def take(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Update those of these parameters that wait for it."""
        ready: dict[int, list[Tensor]] = {}
        for parameter in gradients:
            number = self.waiting.get(parameter)
            if number is not None:
                ready.setdefault(number, []).append(parameter)
        if ready:
            groups = [{**self._options[number], "params": ready[number]} for number in sorted(ready)]
            with self._on_its_stream(groups[0]["params"][0].device):
                with_gradients(self._optimizer, groups, gradients)
        for parameters in ready.values():
            for parameter in parameters:
                del self.waiting[parameter]

    @contextmanager
    def _on_its_stream(self, device: torch.device) -> Iterator[None]:
        """On a GPU the update belongs to the stream of `optimizer.step()`, whichever one the forward runs on."""
        stream = self._streams.get(device)
        if stream is None or stream == (current := torch.cuda.current_stream(device)):
            yield
            return
        stream.wait_stream(current)  # on which the gradients have arrived
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)


def with_gradients(optimizer: Optimizer, groups: list[dict[str, Any]], gradients: Mapping[Tensor, Tensor]) -> None:
    """Run the optimizer's own step, without its hooks, over these groups and gradients, and leave everything else as it was."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    before, shown = optimizer.param_groups, [parameter.grad for parameter in parameters]
    device = parameters[0].device.type
    optimizer.param_groups = groups
    optimizer.__dict__[TAKING] = True
    try:
        for parameter in parameters:
            parameter.grad = gradients[parameter]
        # A forward may be running around this: under autocast, without gradients, or in inference mode.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
            plain_step(optimizer)(optimizer)
    finally:
        optimizer.__dict__.pop(TAKING, None)
        optimizer.param_groups = before
        for parameter, gradient in zip(parameters, shown, strict=True):
            parameter.grad = gradient


def is_taking_step(optimizer: Optimizer) -> bool:
    """Whether a step of it that was postponed is being taken: its hooks have run when it was called."""
    return TAKING in optimizer.__dict__


def plain_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The `step` that its class defines. torch wraps it once for each class, to call hooks and to be seen by its profiler."""
    step: Callable[[Optimizer], Any] = type(optimizer).step
    wrapped: Callable[[Optimizer], Any] = getattr(step, "__wrapped__", step)
    return wrapped if getattr(step, "hooked", False) else step


def copy_option(value: Any) -> Any:
    """As it is now: a learning rate that is a tensor changes in place."""
    return value.detach().clone() if isinstance(value, Tensor) else value
