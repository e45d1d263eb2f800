"""One worker of `step.py`: python benchmarks/step_worker.py SETTINGS FILE, started once per rank.

All contenders live in the same processes, each with its own copy of the model, and take turns:

    round k: for each contender, in an order rotated by k:
        barrier; a few steps (so many that a turn takes about `TURN_S`, the same number for all); note the time per step

A round's time is that of the slowest rank. Rounds before the first do not count; after them all contenders must hold the same
parameters, or their speed would mean nothing.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from step_models import Workload, workloads
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

import stretto
from stretto.bench.machine import Machine, describe
from stretto.errors import JobError
from stretto.job import Job

TURN_S = 0.05
MOST_STEPS = 20
WARM_UP = 3
MEMORY_STEPS = 3
TOLERANCE = 1e-4


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    models: list[str]
    workers: int = 4
    lab: bool = False
    rate: str | None = None
    device: str = "cpu"
    rounds: int = 21
    memory: bool = False


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds`: per step, of the slowest rank, one per round. `peak_bytes`: most that torch had allocated, from wrapping on."""

    model: str
    text: str
    contender: str
    steps_per_turn: int
    seconds: list[float]
    peak_bytes: int | None = None
    parameter_bytes: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings
    machine: Machine
    date: str
    rows: list[Row]


class Contender:
    """One way to train: the model as it is called, the parameters behind it, and its optimizer."""

    def __init__(self, name: str, workload: Workload, job: Job, device: torch.device) -> None:
        torch.manual_seed(0)
        self.name = name
        self.workload = workload
        self.core = workload.model().to(device)
        self.optimizer = torch.optim.SGD(self.core.parameters(), lr=1e-3)
        self.model = self._wrap(job)

    def _wrap(self, job: Job) -> nn.Module:
        if self.name == "stretto":
            return stretto.distribute(self.core, self.optimizer, job=job)[0]
        if self.name == "plain loop":
            return self.core
        return DistributedDataParallel(self.core, gradient_as_bucket_view=self.name == "DDP, views")

    def step(self, batch: Tensor) -> None:
        self.workload.loss(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def contender_names(workers: int) -> list[str]:
    return ["stretto", "plain loop"] if workers == 1 else ["stretto", "DDP", "DDP, views"]


def measure(job: Job, settings: Settings, name: str, device: torch.device) -> list[Row]:
    """All rows of one model. Every rank calls it and gets the same."""
    workload = workloads(large=device.type == "cuda")[name]
    torch.manual_seed(1 + job.rank)
    batch = workload.batch().to(device)
    if batch.is_cuda:  # cuBLAS takes its workspaces at the first step: they are no contender's
        workload.loss(workload.model().to(device), batch).backward()
    contenders, peaks = [], []
    for contender in contender_names(job.world_size):
        made, peak = _made(contender, workload, job, batch, settings.memory)
        contenders.append(made)
        peaks.append(peak)
    settle = _settle(device)
    steps = _warm_up(job, contenders, batch, settle)
    _check_equal(job, contenders)
    times = _alternate(job, settings.rounds, contenders, batch, steps, settle)
    return [
        Row(
            model=name,
            text=workload.text,
            contender=each.name,
            steps_per_turn=steps,
            seconds=times[:, index].tolist(),
            peak_bytes=peaks[index],
            parameter_bytes=sum(parameter.nbytes for parameter in each.core.parameters()),
        )
        for index, each in enumerate(contenders)
    ]


def _settle(device: torch.device) -> Callable[[], None]:
    """Waiting for the GPU is part of a step's time."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def _warm_up(job: Job, contenders: list[Contender], batch: Tensor, settle: Callable[[], None]) -> int:
    """Some steps of each; returns how many make a turn, the same for all contenders and ranks."""
    for contender in contenders:
        for _ in range(WARM_UP):
            contender.step(batch)
    begin = time.perf_counter()
    for contender in contenders:
        contender.step(batch)
    settle()
    mean = (time.perf_counter() - begin) / len(contenders)
    return int(job.gather_object(max(1, min(MOST_STEPS, math.ceil(TURN_S / mean))))[0])


def _check_equal(job: Job, contenders: list[Contender]) -> None:
    first, *others = ([p.detach() for p in each.core.parameters()] for each in contenders)
    for each, parameters in zip(contenders[1:], others, strict=True):
        close = all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE) for a, b in zip(first, parameters, strict=True))
        if not all(job.gather_object(close)):
            raise JobError(f"after the same steps {contenders[0].name} and {each.name} hold different parameters: a bug.")


def _alternate(
    job: Job, rounds: int, contenders: list[Contender], batch: Tensor, steps: int, settle: Callable[[], None]
) -> Tensor:
    seconds = torch.zeros(rounds, len(contenders), dtype=torch.float64)
    for number in range(rounds):
        for offset in range(len(contenders)):
            index = (number + offset) % len(contenders)
            job.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                contenders[index].step(batch)
            settle()
            seconds[number, index] = (time.perf_counter() - begin) / steps
    return job.all_gather(seconds).amax(dim=0)


# -- memory -----------------------------------------------------------------------------------------------------------


def _made(name: str, workload: Workload, job: Job, batch: Tensor, memory: bool) -> tuple[Contender, int | None]:
    """The contender; and the most that torch's allocator held at once in it, from its making to the end of a few steps."""
    if not memory:
        return Contender(name, workload, job, batch.device), None
    with _peak(batch.device) as peak:
        made = Contender(name, workload, job, batch.device)
        for _ in range(MEMORY_STEPS):
            made.step(batch)
        if batch.is_cuda:
            torch.cuda.synchronize(batch.device)
    return made, peak[0]


@contextmanager
def _peak(device: torch.device) -> Iterator[list[int]]:
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


def main(arguments: list[str]) -> None:
    settings = msgspec.json.decode(arguments[0], type=Settings)
    job = stretto.init()
    device = job.device if settings.device == "cuda" else torch.device("cpu")
    if job.world_size > 1:
        dist.init_process_group("gloo", rank=job.rank, world_size=job.world_size)
        job.choose(1)  # measures the links, once: no part of any step, nor of a model's memory
    rows: list[Row] = []
    for name in settings.models:
        rows += measure(job, settings, name, device)
        if job.rank == 0:
            print(f"measured {name}", file=sys.stderr, flush=True)
    if job.rank == 0:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        report = Report(settings=settings, machine=describe(), date=date, rows=rows)
        Path(arguments[1]).write_bytes(msgspec.json.encode(report))
    if job.world_size > 1:
        dist.destroy_process_group()
    stretto.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
