"""What workers see when one of them is killed in the middle of a library of torch's, on our backend and on gloo."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stretto
from torch_backend import pipelines, sharding, training
from torch_backend.forks import LAUNCHER, forks

dist: Any = torch.distributed  # whose stubs leave out what its pages describe
LOST = 1
START_S = 100.0
Step = Callable[[int], object]


def lose_one_of(size: int, backend: str, what: str, folder: str, patience_s: float = 40.0) -> dict[int, tuple[str, float]]:
    """Rank 1 is killed in the middle of a backward; what each of the others raises, and how many seconds later. Those that have
    raised nothing after so many seconds are missing. Nobody ends the others when one dies, and nobody leaves before all have."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with forks(size, _worker, size, port, backend, what, folder, patience_s) as workers:
        workers[LOST].join(START_S)
        assert workers[LOST].exitcode == -signal.SIGKILL
        deadline = time.monotonic() + patience_s
        reports = {rank: Path(folder, str(rank)) for rank in range(size) if rank != LOST}
        while not all(report.exists() for report in reports.values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        texts = {rank: report.read_text().rsplit(" ", 1) for rank, report in reports.items() if report.exists()}
    return {rank: (text, float(seconds)) for rank, (text, seconds) in texts.items()}


def _worker(rank: int, size: int, port: int, backend: str, what: str, folder: str, patience_s: float) -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
        del os.environ[name]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    marker = Path(folder, "killed")

    def kill(gradient: torch.Tensor) -> None:
        if rank == LOST and is_time:
            marker.write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    is_time, raised = False, "nothing"
    step = STEPS[what](kill)
    try:
        for number in range(6):
            is_time = number == 3
            step(number)
    except stretto.PeerLost as lost:
        raised = f"PeerLost {lost.rank}"
    except BaseException as other:
        raised = repr(other)
    seconds = time.time() - float(marker.read_text())
    Path(folder, f"{rank}.partial").write_text(f"{raised} {seconds}")
    os.replace(Path(folder, f"{rank}.partial"), Path(folder, str(rank)))
    time.sleep(START_S + patience_s)  # until it is killed: the end of this process would be another loss


# -- what is trained: steps, with a hook for a gradient in the midst of the backward -----------------------------------------


def _by_model(make: Callable[[], nn.Module], kill: Callable[[torch.Tensor], None]) -> Step:
    model = make()
    optimizer = training.adamw(model)

    def step(number: int) -> None:
        optimizer.zero_grad()
        output = model(training.batch(number))
        output.register_hook(kill)
        output.square().mean().backward()
        optimizer.step()

    return step


def _ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(training.mlp(), bucket_cap_mb=0.005)


def _ddp_with_a_hook() -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model: Any = _ddp()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model  # type: ignore[no-any-return]


def _tensor_parallel() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    return sharding.cut_over(init_device_mesh("cpu", (dist.get_world_size(),)))


def _pipeline(kill: Callable[[torch.Tensor], None]) -> Step:
    from torch.distributed.pipelining import Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    part = nn.Linear(16, 16)
    part.weight.register_hook(kill)  # type: ignore[no-untyped-call]
    schedule = pipelines.schedule(Schedule1F1B, [rank], [part], size)

    def step(number: int) -> None:
        data, target = training.batch(number, 4 * size), training.batch(number + 1, 4 * size)
        schedule.step(*([data] if rank == 0 else []), **({"target": target} if rank == size - 1 else {}))

    return step


STEPS: dict[str, Callable[[Callable[[torch.Tensor], None]], Step]] = {
    "fsdp2": lambda kill: _by_model(sharding.sharded, kill),
    "ddp": lambda kill: _by_model(_ddp, kill),
    "ddp with a hook": lambda kill: _by_model(_ddp_with_a_hook, kill),
    "tensor parallel": lambda kill: _by_model(_tensor_parallel, kill),
    "pipeline": _pipeline,
}
