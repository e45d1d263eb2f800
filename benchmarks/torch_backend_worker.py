"""One worker of `torch_backend.py`: python benchmarks/torch_backend_worker.py SETTINGS FILE, started once per rank.

The same libraries of torch's, unchanged, over two process groups of the same workers: one of gloo's and one of ours. All
contenders live in the same processes and take turns, as in `step_worker.py`; bytes are those that the host's network has sent
during a turn, so they are known on lab hosts only, where every worker has a network of its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from step_models import Gpt
from step_worker import MOST_STEPS, TOLERANCE, TURN_S, peak_of, take_part
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from stretto.bench.machine import MachineInfo, describe
from stretto.bench.turns import now, of_slowest_rank, take_turns, timed
from stretto.errors import JobError
from stretto.job import Job

WARM_UP = 2
MEMORY_STEPS = 2
FSDP, DDP = "FSDP2", "DDP"
BACKENDS = ("gloo", "stretto")
SIZES = {"38 M": (512, 8, 12), "1 M": (128, 4, 4)}  # width, heads, depth
LENGTH = 32


class BackendSettings(msgspec.Struct, frozen=True, kw_only=True):
    model: str = "38 M"
    workers: int = 4
    lab: bool = False
    rate: str | None = None
    rounds: int = 9


class BackendRow(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds`: per step, of the slowest rank, one per round. `sent`: bytes per step, of the rank that sends most, one per
    round. `peak_bytes`: most that torch had allocated, from wrapping on."""

    library: str
    backend: str
    steps_per_turn: int
    seconds: list[float]
    sent: list[float]
    peak_bytes: int


class BackendReport(msgspec.Struct, frozen=True, kw_only=True):
    settings: BackendSettings
    machine: MachineInfo
    date: str
    parameters: int
    rows: list[BackendRow]


class Trained:
    """One model, trained by a library over a group."""

    def __init__(self, library: str, backend: str, model: str, group: dist.ProcessGroup) -> None:
        torch.manual_seed(0)
        self.library, self.backend = library, backend
        width, heads, depth = SIZES[model]
        core = Gpt(width, heads, depth, LENGTH)
        self.model: nn.Module = core
        if library == FSDP:
            mesh = DeviceMesh.from_group(group, "cpu")
            for block in core.blocks:
                fully_shard(block, mesh=mesh)
            self.model = fully_shard(core, mesh=mesh)
        else:
            self.model = DistributedDataParallel(core, process_group=group, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self, tokens: Tensor) -> None:
        logits = self.model(tokens[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[Tensor]:
        return [
            parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
            for parameter in self.model.parameters()
        ]  # fmt: skip


def bytes_sent_here() -> int:
    """By all networks of this host but the one to itself."""
    lines = [line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines() if ":" in line]
    return sum(int(fields.split()[8]) for name, fields in lines if name.strip() != "lo")


def measure(job: Job, settings: BackendSettings) -> BackendReport:
    groups = {"gloo": dist.group.WORLD, "stretto": dist.new_group(backend="stretto")}
    torch.manual_seed(1 + job.rank)
    tokens = torch.randint(0, 256, (2, LENGTH + 1))
    contenders, peaks = [], []
    for library in (FSDP, DDP):
        for backend in BACKENDS:
            with peak_of(tokens.device) as peak:
                made = Trained(library, backend, settings.model, groups[backend])
                for _ in range(MEMORY_STEPS):
                    made.step(tokens)
            contenders.append(made)
            peaks.append(peak[0])
            if job.rank == 0:
                print(f"made {library} on {backend}", file=sys.stderr, flush=True)
    _check_equal(job, contenders)
    mean = sum(timed(partial(each.step, tokens), tokens.device) for each in contenders) / len(contenders)
    steps = int(job.gather_object(max(1, min(MOST_STEPS, math.ceil(TURN_S / mean))))[0])
    sent: dict[str, list[float]] = {f"{each.library} {each.backend}": [] for each in contenders}

    def turn(each: Trained) -> float:
        job.barrier()
        before = bytes_sent_here()
        seconds = timed(lambda: each.step(tokens), tokens.device, steps)
        job.barrier()
        sent[f"{each.library} {each.backend}"].append((bytes_sent_here() - before) / steps)
        return seconds

    turns: list[Callable[[], float]] = [partial(turn, each) for each in contenders]
    times = of_slowest_rank(job, take_turns(turns, settings.rounds))
    rows = []
    for index, each in enumerate(contenders):
        of_all = job.gather_object(sent[f"{each.library} {each.backend}"][-settings.rounds :])
        rows.append(
            BackendRow(
                library=each.library, backend=each.backend, steps_per_turn=steps, seconds=times[index],
                sent=[max(values) for values in zip(*of_all, strict=True)], peak_bytes=peaks[index],
            )
        )  # fmt: skip
    number = sum(parameter.numel() for parameter in contenders[-1].model.parameters())
    return BackendReport(settings=settings, machine=describe(), date=now(), parameters=number, rows=rows)


def _check_equal(job: Job, contenders: list[Trained]) -> None:
    first = contenders[0].parameters()
    for each in contenders[1:]:
        pairs = zip(first, each.parameters(), strict=True)
        close = all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE) for a, b in pairs)
        if not all(job.gather_object(close)):
            raise JobError(f"after the same steps {each.library} on {each.backend} holds other parameters: a bug.")


if __name__ == "__main__":
    take_part(sys.argv[1:], BackendSettings, measure)
