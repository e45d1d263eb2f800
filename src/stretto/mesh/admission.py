"""What `distribute` refuses for a model that is cut, before anything is sent."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.engine.postponed_step import copy_option, plain_step
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.mesh.cutting import cuts_of

STEPS = 3


def check_cut(model: nn.Module, optimizers: Sequence[Optimizer], job: Job) -> None:
    """Whether a model that may be cut can be trained by these optimizers, among these workers."""
    _check_workers(model, job)
    for optimizer in optimizers:
        if any(cuts_of(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            check_element_wise(optimizer)


def _check_workers(model: nn.Module, job: Job) -> None:
    """Those that train together must have the same slices."""
    ranks = set(job.world.ranks)
    for name, parameter in model.named_parameters():
        for axis in (cut.axis for cut in cuts_of(parameter)):
            others = [rank for rank in axis.group.ranks if rank in ranks and rank != axis.mesh.whole.rank]
            if others:
                raise ConfigurationError(
                    f"distribute() among ranks {sorted(ranks)} of a model that is cut over {axis.name!r}: of {name}, rank "
                    f"{others[0]} has another slice than rank {axis.mesh.whole.rank}, and their mean is nothing.\n"
                    f"Give distribute() the model that tensor_parallel returned, without job=: its layout says over what the "
                    f'batch is. For a part of it write job=mesh.job("data").'
                )


def check_element_wise(optimizer: Optimizer) -> None:
    """Find out, on a small matrix, whether stepping its halves is stepping the whole."""
    name = type(optimizer).__name__
    try:
        alike = all(_is_element_wise(optimizer, group) for group in optimizer.param_groups)
    except Exception as problem:
        raise ConfigurationError(
            f"{name} for a model that is cut: it could not be found out whether it treats each element by itself "
            f"({type(problem).__name__}: {problem}), and a worker has slices.\nWrite torch.optim.AdamW or SGD, for instance."
        ) from problem
    if not alike:
        raise ConfigurationError(
            f"{name} for a model that is cut: how it steps an element depends on others of the same tensor (a norm of "
            "it, a product "
            f"of matrices), and a worker has only a slice.\n"
            f"Write an optimizer that treats each element by itself, such as torch.optim.AdamW or SGD."
        )


def _is_element_wise(optimizer: Optimizer, group: dict[str, object]) -> bool:
    takes = inspect.signature(type(optimizer).__init__).parameters
    options = {key: copy_option(value) for key, value in group.items() if key != "params" and key in takes}
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(4, 4, generator=generator)
    gradients = [torch.randn(4, 4, generator=generator) * 10.0**number for number in range(STEPS)]
    whole = _stepped(type(optimizer), options, [start], [[each] for each in gradients])
    for dim in (0, 1):
        cut = [list(each.contiguous() for each in one.chunk(2, dim)) for one in (start, *gradients)]
        halves = _stepped(type(optimizer), options, cut[0], cut[1:])
        if not torch.allclose(torch.cat(halves, dim), whole[0], rtol=1e-4, atol=1e-6):
            return False
    return True


def _stepped(
    kind: type[Optimizer], options: dict[str, object], start: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    parameters = [nn.Parameter(each.clone()) for each in start]
    optimizer = kind(parameters, **options)  # type: ignore[arg-type]
    for each in gradients:
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient.clone()
        plain_step(optimizer)(optimizer)
    return [parameter.detach() for parameter in parameters]
