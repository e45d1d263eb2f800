"""One worker of `pipeline.py`: python benchmarks/pipeline_worker.py SETTINGS FILE, started once per rank.

The accelerator is emulated: a layer sleeps in forward, as long again before the gradients of its inputs, and as long again
before those of its weights, and computes real values and gradients of a small batch beside it. So computation takes a set time
and leaves the processors to communication, as a GPU does.

All contenders, torch's schedules on gloo among them, live in the same processes, train equal models and take turns. A turn:
barrier, one step that is timed. Its time is that of the slowest rank. Afterwards all must hold the same parameters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from step_worker import take_part
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import stretto
from stretto.bench.machine import MachineInfo, describe
from stretto.bench.turns import now, of_slowest_rank, take_turns
from stretto.errors import JobError
from stretto.job import Job
from stretto.partition.walk import peak_of

WIDTH = 64  # of a layer
OURS = {
    "GPipe": stretto.GPipe(),
    "1F1B": stretto.OneForwardOneBackward(),
    "1F1B, eager": stretto.OneForwardOneBackward(eager=1),
    "interleaved, 2 parts": stretto.Interleaved(2),
    "zero-bubble": stretto.ZeroBubble(),
}
THEIRS: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "interleaved, 2 parts": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
PEER_OF = {"1F1B, eager": "1F1B"}  # torch has none that is eager
CHUNKS = {name: 2 if name in ("interleaved, 2 parts", "zero-bubble") else 1 for name in OURS}
TOLERANCE = 1e-5
LIMIT = "computation alone"


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True):
    stages: int
    microbatches: list[int]
    rounds: int = 7
    unit_s: float = 0.010  # a stage's forward; its backward takes twice as long
    samples: int = 4  # in a micro-batch
    rate: str | None = None  # of the links between lab hosts; None: one host

    @property
    def letter_bytes(self) -> int:
        """Of what goes from stage to stage for a micro-batch."""
        return 4 * WIDTH * self.samples


class PipelineRow(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds`: of the slowest rank, one per round. `peaks`: by stage, of micro-batches in each part (ours)."""

    microbatches: int
    schedule: str
    ours: bool
    seconds: list[float]
    peaks: list[int] = []
    planned_peaks: list[int] = []


class PipelineReport(msgspec.Struct, frozen=True, kw_only=True):
    settings: PipelineSettings
    machine: MachineInfo
    date: str
    rows: list[PipelineRow]


class _Output(torch.autograd.Function):
    """Takes the time of a forward, and before gradients of inputs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class _Weight(torch.autograd.Function):
    """Takes the time of a weight's gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class SlowLinear(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: Tensor) -> Tensor:
        weight = _Weight.apply(self.linear.weight, self.seconds)  # type: ignore[no-untyped-call]
        result: Tensor = _Output.apply(nn.functional.linear(x, weight, self.linear.bias), self.seconds)  # type: ignore[no-untyped-call]
        return result


def model_of(settings: PipelineSettings) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(SlowLinear(settings.unit_s / 2) for _ in range(2 * settings.stages)))


Step = Callable[[Tensor, Tensor], object]


def ours(settings: PipelineSettings, schedule: str, microbatches: int) -> tuple[Step, nn.Module, stretto.Pipeline]:
    pieces = 2 if CHUNKS[schedule] == 2 and schedule != "zero-bubble" else 1
    every = 2 // pieces
    cut = [str(number) for number in range(every, 2 * settings.stages, every)]
    pipeline = stretto.pipeline(model_of(settings), settings.stages, microbatches, OURS[schedule], cut=cut)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        pipeline.forward_backward(x, y, nn.functional.mse_loss)
        optimizer.step()

    return step, pipeline.module, pipeline


def theirs(job: Job, settings: PipelineSettings, schedule: str, microbatches: int) -> tuple[Step, nn.Module]:
    stages, chunks = settings.stages, CHUNKS[schedule]
    model = model_of(settings)
    per_piece = 2 // chunks
    numbers = [job.rank + chunk * stages for chunk in range(chunks)]
    pieces = {number: model[number * per_piece : (number + 1) * per_piece] for number in numbers}
    parts = [PipelineStage(piece, number, stages * chunks, torch.device("cpu")) for number, piece in pieces.items()]
    given: Any = parts if chunks > 1 else parts[0]
    runner = THEIRS[schedule](given, microbatches, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD([p for piece in pieces.values() for p in piece.parameters()], lr=0.01)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        runner.step(*([x] if job.rank == 0 else []), **({"target": y} if job.rank == stages - 1 else {}))
        optimizer.step()

    held = nn.Module()
    for number, piece in pieces.items():
        for inner, layer in enumerate(piece):
            held.add_module(str(number * per_piece + inner), layer)
    return step, held


def alone(job: Job, settings: PipelineSettings, microbatches: int) -> Step:
    """This stage's forwards and backwards, and no other stage."""
    module = model_of(settings)[2 * job.rank : 2 * job.rank + 2]

    def step(x: Tensor, y: Tensor) -> None:
        for part in x.chunk(microbatches):
            module(part.clone().requires_grad_()).sum().backward()
        module.zero_grad()

    return step


def measure(job: Job, settings: PipelineSettings) -> PipelineReport:
    torch.set_num_threads(1)
    rows = [row for microbatches in settings.microbatches for row in cell(job, settings, microbatches)]
    return PipelineReport(settings=settings, machine=describe(), date=now(), rows=rows)


def cell(job: Job, settings: PipelineSettings, microbatches: int) -> list[PipelineRow]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(settings.samples * microbatches, WIDTH, generator=generator) for _ in range(2))
    made = {name: ours(settings, name, microbatches) for name in OURS}
    contenders: list[tuple[str, bool, Step, nn.Module | None]] = [(LIMIT, False, alone(job, settings, microbatches), None)]
    contenders += [(name, True, step, module) for name, (step, module, _) in made.items()]
    contenders += [(name, False, *theirs(job, settings, name, microbatches)) for name in THEIRS]
    for _, _, step, _ in contenders:
        job.barrier()
        step(x, y)

    def turn(step: Step) -> float:
        job.barrier()
        began = time.perf_counter()
        step(x, y)
        return time.perf_counter() - began

    seconds = of_slowest_rank(job, take_turns([lambda step=step: turn(step) for _, _, step, _ in contenders], settings.rounds))  # type: ignore[misc]
    check_equal(job, [module for _, _, _, module in contenders if module is not None])
    rows = []
    for (name, is_ours, _, _), mine in zip(contenders, seconds, strict=True):
        peaks, planned = [], []
        if is_ours:
            pipeline = made[name][2]
            peaks, planned = job.gather_object(pipeline.last_peak), [peak_of(order) for order in pipeline.plan().orders]
        rows.append(
            PipelineRow(microbatches=microbatches, schedule=name, ours=is_ours, seconds=mine, peaks=peaks, planned_peaks=planned)
        )
    return rows


def check_equal(job: Job, modules: list[nn.Module]) -> None:
    """Each layer, wherever it is held: rank by rank they hold different ones, so all are brought together."""
    states = [job.gather_object({name: float(value.sum()) for name, value in module.state_dict().items()}) for module in modules]
    merged = [{name: value for part in state for name, value in part.items()} for state in states]
    for other in merged[1:]:
        if any(abs(other[name] - value) > TOLERANCE * max(1.0, abs(value)) for name, value in merged[0].items()):
            raise JobError("after the same steps two contenders hold different parameters: a bug.")


if __name__ == "__main__":
    dist.distributed_c10d.logger.setLevel("ERROR")
    take_part(sys.argv[1:], PipelineSettings, measure)
