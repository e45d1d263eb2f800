"""`torch.distributed.pipelining` on our backend, in real workers: all schedules train to what one process does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from largest import largest
from torch_backend.training import Case, Difference, batch, difference, dist

Place = Callable[[int, int], int]  # (rank, size) -> a stage


def one_stage_each(case: Case) -> Difference:
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    return largest(_differs_by(kind, [lambda rank, size: rank], case) for kind in (ScheduleGPipe, Schedule1F1B))


def several_stages_each(case: Case) -> Difference:
    """Two on each worker: round and round, or, for the last one, there and back."""
    from torch.distributed.pipelining import ScheduleInterleaved1F1B
    from torch.distributed.pipelining import schedules as of_torch

    kinds: list[Any] = [ScheduleInterleaved1F1B]
    if case.is_long:
        kinds += [of_torch.ScheduleLoopedBFS, of_torch.ScheduleInterleavedZeroBubble, of_torch.ScheduleZBVZeroBubble]
    worst = 0.0
    for kind in kinds:
        turns = kind is of_torch.ScheduleZBVZeroBubble
        second: Place = (lambda rank, size: 2 * size - 1 - rank) if turns else (lambda rank, size: rank + size)
        worst = largest((worst, _differs_by(kind, [lambda rank, size: rank, second], case)))
    return worst


def _differs_by(kind: Any, places: list[Place], case: Case) -> Difference:
    size = dist.get_world_size()
    torch.manual_seed(0)
    reference = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(size * len(places))])
    mine = [place(dist.get_rank(), size) for place in places]
    parts = nn.ModuleList([copy.deepcopy(reference[number]) for number in mine])
    last = len(reference) - 1

    step_alone, step_together = _momentum(reference), _momentum(parts)
    pipeline = schedule(kind, mine, list(parts), len(reference))
    for step in range(case.steps):
        data, target = batch(2 * step, 4 * size), batch(2 * step + 1, 4 * size)
        with step_together():
            pipeline.step(*([data] if 0 in mine else []), **({"target": target} if last in mine else {}))
        with step_alone():
            loss(reference(data), target).backward()  # type: ignore[no-untyped-call]
    theirs = [parameter for number in mine for parameter in reference[number].parameters()]
    return difference(parts.parameters(), theirs)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def schedule(kind: Any, numbers: list[int], parts: list[nn.Module], num_stages: int) -> Any:
    """A schedule for the stages of these numbers."""
    from torch.distributed.pipelining import PipelineStage

    stages = [PipelineStage(part, number, num_stages, torch.device("cpu")) for number, part in zip(numbers, parts, strict=True)]
    return kind(stages[0] if len(stages) == 1 else stages, 2 * dist.get_world_size(), loss_fn=loss)


def _momentum(model: nn.Module) -> Callable[[], Any]:
    """What to compute gradients in, to step by them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @contextmanager
    def one_step() -> Iterator[None]:
        optimizer.zero_grad()
        yield
        optimizer.step()

    return one_step
