"""One worker of `step.py`: python benchmarks/step_worker.py SETTINGS FILE, started once per rank.

All contenders live in the same processes, each with its own copy of the model, and take turns (`stretto.bench.turns`):

    a turn: barrier; a step that does not count; a few steps (so many that it takes about `TURN_S`, the same number for all); note
            the time per step; wait for what is under way

Across the iteration barrier a step leaves under way what the next one waits for, so the first one of a turn would be too short,
and the last one is in the way of whoever comes next. A turn's time is that of the slowest rank. Rounds before the first do not
count; after them all contenders must hold the same parameters, or their speed would mean nothing.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from step_models import Workload, workloads
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

import stretto
from stretto.bench.machine import MachineInfo, describe
from stretto.bench.turns import now, of_slowest_rank, take_turns, timed, wait_for
from stretto.distributing import find_engine
from stretto.errors import JobError
from stretto.job import Job

TURN_S = 0.05
MOST_STEPS = 20
WARM_UP = 6  # more than a schedule watches before it makes its plan
MEMORY_STEPS = 3
TOLERANCE = 1e-4


class StepSettings(msgspec.Struct, frozen=True, kw_only=True):
    models: list[str]
    workers: int = 4
    lab: bool = False
    rate: str | None = None
    device: str = "cpu"
    rounds: int = 21
    memory: bool = False


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds`: per step, of the slowest rank, one per round. `peak_bytes`: most that torch had allocated, from wrapping on."""

    model: str
    text: str
    contender: str
    steps_per_turn: int
    seconds: list[float]
    peak_bytes: int | None = None
    parameter_bytes: int = 0


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    settings: StepSettings
    machine: MachineInfo
    date: str
    rows: list[StepRow]


LIMIT, DDP, DDP_VIEWS, DDP_FP16 = "no communication", "DDP", "DDP, views", "DDP, fp16 hook"
BARRIER = "no gradients sent, a barrier"  # what synchronous training cannot be faster than: workers wait for the slowest
S = TypeVar("S", bound=msgspec.Struct)


class TrainedModel:
    """One way to train: the model as it is called, the parameters behind it, and its optimizer. By its name torch's DDP or no
    communication at all; or with a strategy."""

    def __init__(self, name: str, workload: Workload, job: Job, device: torch.device, strategy: str | None) -> None:
        torch.manual_seed(0)
        self.name = name
        self.job = job
        self.workload = workload
        self.core = workload.model().to(device)
        self.optimizer = torch.optim.SGD(self.core.parameters(), lr=1e-3)
        self.model: nn.Module = self.core
        if strategy is not None:
            stretto.distribute(self.core, self.optimizer, strategy, job=job)
        elif name.startswith(DDP):
            self.model = DistributedDataParallel(self.core, gradient_as_bucket_view=name == DDP_VIEWS)
            if name == DDP_FP16:
                self.model.register_comm_hook(None, fp16_compress_hook)  # type: ignore[operator]

    def step(self, batch: Tensor) -> None:
        self.workload.loss(self.model, batch).backward()
        if self.name == BARRIER:
            self.job.barrier()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        """Wait for what is under way."""
        if (engine := find_engine(self.core)) is not None:
            engine.settle()
            engine.training.finish()


def alternate(job: Job, contenders: Sequence[TrainedModel], batch: Tensor, rounds: int, steps: int) -> list[list[float]]:
    """Seconds per step of each, so many steps a turn."""

    def turn(contender: TrainedModel) -> float:
        job.barrier()
        contender.step(batch)
        wait_for(batch.device)  # a GPU has to be done with it before the clock starts
        seconds = timed(lambda: contender.step(batch), batch.device, steps)
        contender.settle()
        return seconds

    return of_slowest_rank(job, take_turns([partial(turn, each) for each in contenders], rounds))


def device_of(job: Job, kind: str) -> torch.device:
    return job.device if kind == "cuda" else torch.device("cpu")


def take_part(arguments: list[str], kind: type[S], measure: Callable[[Job, S], object]) -> None:
    """A worker's life: join the job, measure, and on rank 0 write the report to the file that is named last."""
    settings = msgspec.json.decode(arguments[0], type=kind)
    job = stretto.init()
    if job.world_size > 1:
        dist.init_process_group("gloo", rank=job.rank, world_size=job.world_size)
        job.choose(1)  # measures the links, once: no part of any step, nor of a model's memory
    report = measure(job, settings)
    if job.rank == 0:
        Path(arguments[1]).write_bytes(msgspec.json.encode(report))
    if job.world_size > 1:
        dist.destroy_process_group()
    stretto.shutdown()


STRATEGIES = {
    "stretto": "Strategy()",
    "stretto, buckets of 2 MiB": "Strategy(schedule=Buckets(bytes=2097152))",
    "stretto, across the barrier": "Strategy(schedule=Priority())",
}


def contender_names(settings: StepSettings) -> list[str]:
    """On one host what is overlapped takes the processors that compute; on a network transfers are hidden, also across the
    barrier."""
    if settings.workers == 1:
        return ["stretto", "plain loop"]
    default, small, crossing = STRATEGIES
    return [default, crossing if settings.lab else small, DDP, DDP_VIEWS, BARRIER]


def measure_model(job: Job, settings: StepSettings, name: str, device: torch.device) -> list[StepRow]:
    """All rows of one model. Every rank calls it and gets the same."""
    workload = workloads(large=device.type == "cuda")[name]
    torch.manual_seed(1 + job.rank)
    batch = workload.batch().to(device)
    if batch.is_cuda:  # cuBLAS takes its workspaces at the first step: they are no contender's
        workload.loss(workload.model().to(device), batch).backward()
    contenders, peaks = [], []
    for contender in contender_names(settings):
        made, peak = _made(contender, workload, job, batch, settings.memory)
        contenders.append(made)
        peaks.append(peak)
    steps = _warm_up(job, contenders, batch)
    _check_equal(job, contenders)
    times = alternate(job, contenders, batch, settings.rounds, steps)
    return [
        StepRow(
            model=name,
            text=workload.text,
            contender=each.name,
            steps_per_turn=steps,
            seconds=times[index],
            peak_bytes=peaks[index],
            parameter_bytes=sum(parameter.nbytes for parameter in each.core.parameters()),
        )
        for index, each in enumerate(contenders)
    ]


def _warm_up(job: Job, contenders: list[TrainedModel], batch: Tensor) -> int:
    """Some steps of each; returns how many make a turn, the same for all contenders and ranks."""
    for contender in contenders:
        for _ in range(WARM_UP):
            contender.step(batch)
        contender.settle()
    mean = sum(timed(partial(each.step, batch), batch.device) for each in contenders) / len(contenders)
    return int(job.gather_object(max(1, min(MOST_STEPS, math.ceil(TURN_S / mean))))[0])


def _check_equal(job: Job, contenders: list[TrainedModel]) -> None:
    for each in contenders:
        each.settle()
    first, *others = (each for each in contenders if each.name != BARRIER)
    for each in others:
        pairs = zip(first.core.parameters(), each.core.parameters(), strict=True)
        close = all(torch.allclose(a.detach(), b.detach(), rtol=TOLERANCE, atol=TOLERANCE) for a, b in pairs)
        if not all(job.gather_object(close)):
            raise JobError(f"after the same steps {first.name} and {each.name} hold different parameters: a bug.")


# -- memory -----------------------------------------------------------------------------------------------------------


def _made(name: str, workload: Workload, job: Job, batch: Tensor, memory: bool) -> tuple[TrainedModel, int | None]:
    """The contender; and the most that torch's allocator held at once in it, from its making to the end of a few steps."""
    strategy = STRATEGIES.get(name)
    if not memory:
        return TrainedModel(name, workload, job, batch.device, strategy), None
    with peak_of(batch.device) as peak:
        made = TrainedModel(name, workload, job, batch.device, strategy)
        for _ in range(MEMORY_STEPS):
            made.step(batch)
        wait_for(batch.device)
    return made, peak[0]


@contextmanager
def peak_of(device: torch.device) -> Iterator[list[int]]:
    """On the CPU, the running sum over all allocations and releases that torch's profiler saw."""
    peak: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.append(torch.cuda.max_memory_allocated(device) - before)
        return
    profiled = profile(profile_memory=True)
    with _silent():
        profiled.start()
    yield peak
    with _silent():
        profiled.stop()
    changes = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    total = highest = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        total += event.nbytes()
        highest = max(highest, total)
    peak.append(highest)


@contextmanager
def _silent() -> Iterator[None]:
    """The profiler announces its beginning and end on stderr, whatever its log level."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


# -- the worker -------------------------------------------------------------------------------------------------------


def measure(job: Job, settings: StepSettings) -> StepReport:
    rows: list[StepRow] = []
    for name in settings.models:
        rows += measure_model(job, settings, name, device_of(job, settings.device))
        if job.rank == 0:
            print(f"measured {name}", file=sys.stderr, flush=True)
    return StepReport(settings=settings, machine=describe(), date=now(), rows=rows)


if __name__ == "__main__":
    take_part(sys.argv[1:], StepSettings, measure)
