"""One worker of `zero.py`: python benchmarks/zero_worker.py SETTINGS FILE, started once per rank and contender.

Every contender has processes of its own: resident memory belongs to a process. Bytes are those of the host's network interfaces,
so they are counted alike for all.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from step_models import Gpt, next_byte
from step_worker import take_part
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import stretto
from stretto.bench.machine import MachineInfo, describe
from stretto.bench.turns import now
from stretto.distributing import find_engine
from stretto.job import Job

DDP, REDUNDANCY, FSDP2, FSDP2_KEEPING = "DDP", "DDP and ZeroRedundancyOptimizer", "FSDP2", "FSDP2, resharding off"
FSDP2_PINNED = "FSDP2, malloc's mmap threshold pinned"
DEEPSPEED = {f"DeepSpeed ZeRO {stage}": stage for stage in (1, 2, 3)}
PEERS = (DDP, REDUNDANCY, FSDP2, FSDP2_KEEPING, FSDP2_PINNED, *DEEPSPEED)


class ZeroSettings(msgspec.Struct, frozen=True, kw_only=True):
    contender: str
    strategy: str | None = None  # of ours
    width: int = 512
    depth: int = 12
    steps: int = 2
    warm_up: int = 6  # more than a schedule watches before it makes its plan
    workers: int = 4
    rate: str = "1gbit"


class ZeroReport(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds`: per step, of the slowest rank; `sent_bytes`: per step, mean over workers. Resident memory, of the worker that
    held most: `beginning_bytes` while the model was made and distributed and took its first step, `resident_bytes` from then on,
    and `before_bytes` before the model was made."""

    machine: MachineInfo
    date: str
    num_parameters: int
    seconds: float
    sent_bytes: float
    resident_bytes: float
    beginning_bytes: float
    before_bytes: float


class Contender:
    """What it imports is imported when it is made, the model is made by `begin`."""

    def __init__(self, settings: ZeroSettings, job: Job) -> None:
        self.settings, self.job = settings, job
        self.engine: Any = None
        AdamW([nn.Parameter(torch.ones(1))])  # torch's first optimizer imports much
        if settings.contender in DEEPSPEED:
            os.environ["DS_ACCELERATOR"] = "cpu"
            import deepspeed

            self.deepspeed = deepspeed
        elif settings.contender == REDUNDANCY:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            self.sharded = ZeroRedundancyOptimizer
        elif settings.contender.startswith(FSDP2):
            from torch.distributed.fsdp import fully_shard

            self.fully_shard = fully_shard

    def begin(self) -> None:
        settings = self.settings
        torch.manual_seed(0)
        self.core = Gpt(settings.width, 8, settings.depth, 64)
        self.model: nn.Module = self.core
        if settings.contender.startswith(FSDP2):
            self._shard(settings.contender != FSDP2_KEEPING)
        self.optimizer: Optimizer
        if settings.contender == REDUNDANCY:
            self.optimizer = self.sharded(self.core.parameters(), AdamW, lr=1e-4)
        else:
            self.optimizer = AdamW(self.core.parameters(), lr=1e-4)
        if settings.contender in (DDP, REDUNDANCY):
            self.model = DistributedDataParallel(self.core, gradient_as_bucket_view=True)
        if settings.contender in DEEPSPEED:
            self._hand_to_deepspeed(DEEPSPEED[settings.contender])
        if settings.strategy is not None:
            stretto.distribute(self.core, self.optimizer, settings.strategy, job=self.job)

    def _shard(self, reshard: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.core.blocks:
            self.fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        self.fully_shard(self.core, mesh=mesh, reshard_after_forward=reshard)

    def _hand_to_deepspeed(self, stage: int) -> None:
        """Buckets as large as ours; otherwise as it comes."""
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 4 << 20, "allgather_bucket_size": 4 << 20},
        }
        self.engine = self.deepspeed.initialize(model=self.core, optimizer=self.optimizer, config=config)[0]

    def step(self, batch: torch.Tensor) -> None:
        if self.engine is not None:
            self.engine.backward(next_byte(self.engine, batch))
            self.engine.step()
            return
        next_byte(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        if (engine := find_engine(self.core)) is not None:
            engine.settle()


def measure(job: Job, settings: ZeroSettings) -> ZeroReport:
    torch.set_num_threads(1)
    contender = Contender(settings, job)
    before = resident("VmRSS")
    forget_peak()
    contender.begin()
    batch = torch.randint(256, (1, 64), generator=torch.Generator().manual_seed(job.rank))
    for number in range(settings.warm_up + settings.steps):
        if number == 1:  # the optimizer has its state
            contender.settle()
            beginning = resident("VmHWM")
            forget_peak()
        if number == settings.warm_up:
            contender.settle()
            job.barrier()
            sent, begin = _sent_bytes(), time.perf_counter()
        contender.step(batch)
    contender.settle()
    seconds = (time.perf_counter() - begin) / settings.steps
    mine = [seconds, (_sent_bytes() - sent) / settings.steps, resident("VmHWM"), beginning, before]
    everybody = job.gather_object(mine)
    fullest = max(everybody, key=lambda each: each[2])
    return ZeroReport(
        machine=describe(),
        date=now(),
        num_parameters=sum(parameter.numel() for parameter in Gpt(settings.width, 8, settings.depth, 64).parameters()),
        seconds=max(each[0] for each in everybody),
        sent_bytes=sum(each[1] for each in everybody) / len(everybody),
        resident_bytes=fullest[2],
        beginning_bytes=max(each[3] for each in everybody),
        before_bytes=fullest[4],
    )


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def resident(which: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) << 10


def _sent_bytes() -> int:
    """Of this host's interfaces, without the loopback."""
    lines = (line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    return sum(int(numbers.split()[8]) for name, numbers in lines if name.strip() != "lo")


if __name__ == "__main__":
    take_part(sys.argv[1:], ZeroSettings, measure)
