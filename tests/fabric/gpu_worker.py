"""What each process of `test_on_gpu.py` does. In a module of its own, so that a fresh process can import it."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from torch import nn

import stretto
from stretto.aggregate.all_reduce.compression_thread import CompressionThread
from stretto.fabric import mapped as mapped_module
from stretto.fabric.base import Area, Fabric, Steps
from stretto.fabric.choose import choose_fabric
from stretto.fabric.device_memory import DeviceOffer, OwnDeviceMemory
from stretto.fabric.mapped import MappedFabric
from stretto.fabric.native import NativeFabric
from stretto.job import Job

GPU = torch.device("cuda", 0)


def areas() -> list[Area]:
    return [
        Area(100_000, torch.float32, device=GPU),
        Area(1000, torch.float64, owner=0, device=GPU),
        Area(5, torch.bfloat16, device=GPU),
        Area(0, torch.float32, device=GPU),
        Area(1, torch.complex64, owner=0, device=GPU),
        Area(100, torch.float32),  # on the CPU: a model may have some there
    ]


class Lines(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger("stretto")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def sums() -> str:
    """Every area three times, with other areas in between; returns the fabric's name."""
    job = stretto.init()
    fabric, thread = choose_fabric(job.world, job.peers, areas()), CompressionThread()
    for turn in range(3):
        _use_all(job, fabric, thread, areas(), turn)
    other = [area for area in areas() if area.num_elements != 5]
    assert choose_fabric(job.world, job.peers, other, former=fabric) is fabric
    _use_all(job, fabric, thread, other, 3)
    thread.stop()
    stretto.shutdown()
    return fabric.name


def sums_of_one_worker(backend: str) -> str:
    """The same through torch's collectives, in a job of one."""
    job = stretto.init()
    fabric, thread = NativeFabric(job.world, GPU, backend), CompressionThread()
    on_gpu = [area for area in areas() if area.device == GPU]
    fabric.prepare(on_gpu)
    for turn in range(3):
        _use_all(job, fabric, thread, on_gpu, turn)
    thread.stop()
    fabric.stop()
    stretto.shutdown()
    return fabric.name


def _use_all(job: Job, fabric: Fabric, thread: CompressionThread, which: list[Area], turn: int) -> None:
    used = [thread.submit(_use(job, fabric, area, number, turn, which), area.device) for number, area in enumerate(which)]
    for exchange in used:
        exchange.wait()


def _use(job: Job, fabric: Fabric, area: Area, number: int, turn: int, which: list[Area]) -> Steps:
    flat = torch.full((area.num_elements,), float(job.rank + turn + number), device=area.device).to(area.dtype)
    total = sum(rank + turn + number for rank in range(job.world_size))
    start, stop = area.share(job.rank, job.world_size)
    yield from fabric.sum(number, flat, 0.5, len(which) * turn + number, "")
    assert torch.equal(2 * flat[start:stop], torch.full_like(flat[start:stop], total))
    flat[start:stop] *= 4
    yield from fabric.share(number, flat, len(which) * turn + number, "")
    assert torch.equal(flat, torch.full_like(flat, 2 * total))


def freed_by_its_owner() -> float:
    """What rank 0 still reads after rank 1 has freed its memory; the driver keeps it for those that map it."""
    job = stretto.init()
    area = Area(1 << 20, torch.float32, device=GPU)
    fabric = MappedFabric(job.world, GPU)
    fabric.prepare([area])
    fabric._given[job.rank][0].fill_(3.0)
    torch.cuda.synchronize()
    stretto.barrier()
    if job.rank == 1:
        fabric._given, fabric._made = [], []
        gc.collect()
        _again = [torch.full((1 << 20,), 7.0, device=GPU) for _ in range(64)]  # another user of memory that was free
        torch.cuda.synchronize()
    stretto.barrier()
    found = 0.0 if job.rank == 1 else float(fabric._given[1][0].double().mean())
    stretto.barrier()
    stretto.shutdown()
    return found


def refused(how: str) -> list[str]:
    """What is logged where rank 1 has no memory to offer, or offers what cannot be mapped; it must still train."""
    job, log = stretto.init(), Lines()
    if job.rank == 1:
        kinds: dict[str, Any] = {"no memory": _no_memory, "bad handle": _BadHandle, "short": _TooShort}
        setattr(mapped_module, "OwnDeviceMemory", kinds[how])  # noqa: B010
    _train(job, "Strategy()", steps=2)
    stretto.shutdown()
    return log.lines


def _no_memory(num_bytes: int, device: torch.device) -> OwnDeviceMemory:
    return OwnDeviceMemory(1 << 50, device)


class _BadHandle(OwnDeviceMemory):
    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__(num_bytes, device)
        self.offer = DeviceOffer(self.offer.gpu, bytes(64), num_bytes)


class _TooShort(OwnDeviceMemory):
    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__(1, device)
        self.offer = DeviceOffer(self.offer.gpu, self.offer.handle, num_bytes)


def train(texts: list[str]) -> dict[str, Any]:
    """The gradients of three steps with each strategy, and what was logged."""
    job, log = stretto.init(), Lines()
    found: dict[str, Any] = {text: _train(job, text, steps=3) for text in texts}
    stretto.shutdown()
    return found | {"log": log.lines}


def _train(job: Job, text: str, steps: int) -> list[list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 1000), nn.Tanh(), nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 1)).to(GPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stretto.distribute(model, optimizer, text)
    out = []
    for step in range(steps):
        x = torch.randn(4, 60, generator=torch.Generator().manual_seed(100 * step + job.rank)).to(GPU)
        torch.autograd.backward(model(x).pow(2).mean())
        out.append([float(value) for p in model.parameters() for value in p.grad.flatten()[:40].tolist()])  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return out
