"""Do all workers mean the same model and the same strategy? Asked once, before any gradient is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.errors import ConfigurationError, RankMismatch
from stretto.job import Job

if TYPE_CHECKING:
    from stretto.strategy import Strategy


def admit(job: Job, problem: ConfigurationError | None) -> None:
    """Raise on every worker if any has a problem with its own arguments: the others must hear of it rather than wait."""
    problems = [None if problem is None else str(problem)]
    if job.world_size > 1 and not job.life:
        problems = job.gather_object(problems[0])
    if problem is not None:
        raise problem
    for rank, theirs in enumerate(problems):
        if theirs is not None:
            raise ConfigurationError(f"distribute() was refused on rank {rank}, so nobody can begin. There it said:\n{theirs}")


def agree(job: Job, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, options: dict[str, Any]) -> None:
    """Raise `RankMismatch` on every worker, naming the first difference, unless all describe the same."""
    everybody = job.gather_object(describe(model, optimizers, strategy, options))
    for rank, theirs in enumerate(everybody):
        for expected, found in _side_by_side(everybody[0], theirs):
            if expected != found:
                raise RankMismatch(
                    f"distribute(): ranks 0 and {rank} differ, so no gradient was sent. The first difference:\n"
                    f"  rank 0: {expected or 'nothing there'}\n  rank {rank}: {found or 'nothing there'}\n"
                    f"Build the same model, optimizer and strategy on every rank: before distribute() nothing depends on it."
                )


def describe(model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, options: dict[str, Any]) -> list[list[str]]:
    """Everything that must be the same, one line each, in sections. Hyper-parameters are not in it: rank 0's are copied."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return [
        [f"strategy={strategy!r}"],
        [f"options: {', '.join(f'{name}={value!r}' for name, value in sorted(options.items()))}"],
        [f"parameter {name}: {_kind(parameter)}" for name, parameter in model.named_parameters()],
        [f"buffer {name}: {_kind(buffer)}" for name, buffer in model.named_buffers()],
        [line for optimizer in optimizers for line in _groups(optimizer, names)],
    ]


def _groups(optimizer: Optimizer, names: dict[Tensor, str]) -> Iterator[str]:
    for number, group in enumerate(optimizer.param_groups):
        yield f"{type(optimizer).__name__}, group {number}: {', '.join(names[parameter] for parameter in group['params'])}"


def _kind(tensor: Tensor) -> str:
    layout = "" if tensor.is_contiguous() else f", strides {tensor.stride()}"
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{layout}{frozen}"


def _side_by_side(ours: list[list[str]], theirs: list[list[str]]) -> Iterator[tuple[str, str]]:
    for section, other in zip(ours, theirs, strict=True):
        yield from zip_longest(section, other, fillvalue="")
