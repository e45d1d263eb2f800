"""One worker of `compress_step.py`: python benchmarks/compress_worker.py SETTINGS FILE, started once per lab host.

As in `step_worker.py`, all contenders live in the same processes, each with its own copy of the model, and take turns in every
round; a round's time is that of the slowest rank. "no communication" is the same loop without any exchange: the limit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from step_models import Gpt, next_byte
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import stretto
from stretto.bench.machine import Machine, describe
from stretto.job import Job

WARM_UP = 2
LIMIT, DDP, DDP_FP16 = "no communication", "DDP", "DDP, fp16 hook"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`strategies`: name in the table -> text of a strategy."""

    strategies: dict[str, str]
    peers: tuple[str, ...] = (LIMIT, DDP, DDP_FP16)
    hosts: int = 4
    rate: str | None = None
    rounds: int = 9
    rows: int = 4  # of each worker's batch
    length: int = 64
    width: int = 192
    depth: int = 6
    device: str = "cpu"
    rho: float | None = None  # what the rate was chosen for


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds`: per step, of the slowest rank, one per round. `bytes_sent`: of rank 0 per step, where stretto counts it."""

    contender: str
    seconds: list[float]
    bytes_sent: int | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings
    machine: Machine
    date: str
    num_parameters: int
    rows: list[Row]


class Contender:
    def __init__(self, name: str, settings: Settings, job: Job) -> None:
        torch.manual_seed(0)
        self.name = name
        self.core = model_of(settings).to(_device(job, settings))
        self.optimizer = torch.optim.SGD(self.core.parameters(), lr=1e-3)
        self.model: nn.Module = self.core
        if name in settings.strategies:
            stretto.distribute(self.core, self.optimizer, settings.strategies[name], job=job)
        elif name != LIMIT:
            self.model = DistributedDataParallel(self.core)
            if name == DDP_FP16:
                self.model.register_comm_hook(None, fp16_compress_hook)  # type: ignore[operator]

    def step(self, batch: Tensor) -> None:
        next_byte(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def model_of(settings: Settings) -> Gpt:
    return Gpt(settings.width, 6, settings.depth, settings.length)


def _device(job: Job, settings: Settings) -> torch.device:
    return job.device if settings.device == "cuda" else torch.device("cpu")


def measure(job: Job, settings: Settings) -> list[Row]:
    torch.manual_seed(1 + job.rank)
    batch = torch.randint(256, (settings.rows, settings.length)).to(_device(job, settings))
    contenders = [Contender(name, settings, job) for name in (*settings.peers, *settings.strategies)]
    sent: list[int | None] = []
    for contender in contenders:
        for _ in range(WARM_UP):
            before = job.ledger.bytes_sent
            contender.step(batch)
        sent.append(job.ledger.bytes_sent - before if contender.name in settings.strategies else None)
        job.barrier()
    seconds = torch.zeros(settings.rounds, len(contenders), dtype=torch.float64)
    for number in range(settings.rounds):
        for offset in range(len(contenders)):
            index = (number + offset) % len(contenders)
            seconds[number, index] = _turn(job, lambda index=index: contenders[index].step(batch), batch.device)
    slowest = job.all_gather(seconds).amax(dim=0)
    return [
        Row(contender=each.name, seconds=slowest[:, index].tolist(), bytes_sent=sent[index])
        for index, each in enumerate(contenders)
    ]


def _turn(job: Job, step: Callable[[], None], device: torch.device) -> float:
    """Two steps: the second begins while the links' buckets are as the first has left them, as in training."""
    job.barrier()
    begin = time.perf_counter()
    step()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / 2


def main(arguments: list[str]) -> None:
    settings = msgspec.json.decode(arguments[0], type=Settings)
    torch.set_num_threads(1)
    job = stretto.init()
    dist.init_process_group("gloo", rank=job.rank, world_size=job.world_size)
    job.choose(1)
    rows = measure(job, settings)
    if job.rank == 0:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        count = sum(p.numel() for p in model_of(settings).parameters())
        report = Report(settings=settings, machine=describe(), date=date, num_parameters=count, rows=rows)
        Path(arguments[1]).write_bytes(msgspec.json.encode(report))
    dist.destroy_process_group()
    stretto.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
