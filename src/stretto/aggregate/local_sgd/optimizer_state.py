"""What `optimizer_state="average"` and "reset" do to each worker's optimizer at an exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from stretto.errors import ConfigurationError

Average = Callable[[Tensor], Tensor]
Gather = Callable[[Any], list[Any]]


def check_reset(optimizer: Optimizer) -> None:
    """Before anything is sent."""
    if isinstance(optimizer, Adagrad):
        raise ConfigurationError(
            f'LocalSGD(optimizer_state="reset") with {type(optimizer).__name__}: it makes its state when it is made itself, and '
            f'cannot step without.\nWrite optimizer_state="average" or "keep".'
        )


def reset(optimizers: Sequence[Optimizer]) -> None:
    """Every optimizer begins anew with its next step."""
    for optimizer in optimizers:
        for parameter in _parameters(optimizer):
            optimizer.state.pop(parameter, None)


def average(optimizers: Sequence[Optimizer], mean: Average, gather: Gather) -> None:
    """Every floating tensor that has the shape of its parameter becomes the mean over all workers. On all workers.

    Where a worker has none, because it had no gradient yet, that of all others stays as it is. So each worker says first what it
    has: a bit for each tensor."""
    for optimizer in optimizers:
        kinds = sorted({kind for state in gather(_kinds(optimizer)) for kind in state})
        mine = [_has(optimizer, parameter, kind) for kind in kinds for parameter in _parameters(optimizer)]
        everybody = gather(bytes(mine))
        both = iter([all(flags) for flags in zip(*everybody, strict=True)])
        for kind in kinds:
            tensors = [optimizer.state[parameter][kind] for parameter in _parameters(optimizer) if next(both)]
            if tensors:
                _average(tensors, mean)


def _average(tensors: Sequence[Tensor], mean: Average) -> None:
    device = tensors[0].device
    flat = mean(torch.cat([tensor.detach().reshape(-1).to(device=device, dtype=torch.float32) for tensor in tensors]))
    start = 0
    with torch.no_grad():
        for tensor in tensors:
            stop = start + tensor.numel()
            tensor.copy_(flat[start:stop].view(tensor.shape))
            start = stop


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _kinds(optimizer: Optimizer) -> list[str]:
    """The names of what it keeps for parameters, and averages."""
    kinds = {kind for parameter in _parameters(optimizer) for kind in optimizer.state.get(parameter, {})}
    return sorted(kind for kind in kinds if any(_has(optimizer, parameter, kind) for parameter in _parameters(optimizer)))


def _has(optimizer: Optimizer, parameter: Tensor, kind: str) -> bool:
    value = optimizer.state.get(parameter, {}).get(kind)
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape and value.numel() > 0
