"""What each process of the tests with processes does. In a module of its own, so that a fresh process can import it."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW

import stretto
from stretto.aggregate.zero import bucket, slice_optimizer, training
from stretto.aggregate.zero.cut import training as cut_training
from stretto.engine.arena import MemoryKind, shrink_heap

WIDTH = 256


def bytes_resident() -> int:
    """Of memory that is not a file's, as it is: what the C library's heap could give back is not asked for."""
    gc.collect()
    line = next(line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Anonymous:"))
    return int(line.split()[1]) << 10


def bytes_of_tensors() -> int:
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and each.layout is torch.strided and type(each).__name__ != "GradientInSlices":
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


def each_alone(wanted: Iterable[tuple[MemoryKind, int]]) -> list[Tensor]:
    """In place of `laid_out`."""
    return [torch.empty(length, dtype=kind.dtype, device=kind.device) for kind, length in wanted]


def beside_tensors(stage: int, arenas: bool, blocks: int, steps: int) -> dict[str, float]:
    """Megabytes that a process has got since before it had a model: of its tensors, beside them, and beside them when the heap
    has given back what it can. Batches are of several lengths."""
    job = stretto.init()
    torch.set_num_threads(1)
    if not arenas:
        for module in (bucket, slice_optimizer, training, cut_training):
            setattr(module, "laid_out", each_alone)  # noqa: B010
    AdamW([nn.Parameter(torch.ones(1))])  # torch's first optimizer imports much
    before, tensors_before = bytes_resident(), bytes_of_tensors()
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(blocks)]
    )
    optimizer = AdamW(model.parameters(), lr=1e-3)
    schedule = stretto.Buckets(bytes=1 << 20, first_bytes=1 << 20)
    stretto.distribute(model, optimizer, stretto.Strategy(shard=stretto.Zero(stage), schedule=schedule))
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * job.world_size + job.rank)
        model(torch.randn(8 + 40 * (step % 3), WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    job.barrier()
    tensors = bytes_of_tensors() - tensors_before
    beside = bytes_resident() - before - tensors
    shrink_heap()
    trimmed = bytes_resident() - before - tensors
    stretto.shutdown()
    return {"tensors": tensors / 1e6, "beside": beside / 1e6, "beside, trimmed": trimmed / 1e6}
