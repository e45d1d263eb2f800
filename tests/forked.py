"""What real workers do about children that they fork: for tests that run it in processes (`preloaded.launch`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

import stretto
from stretto.errors import ConfigurationError


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigurationError as refused:
        return str(refused)
    return "not refused"


def in_a_fork(function: Callable[[], Any]) -> Any:
    """What `function` returns in a forked child, which ends without a word to anybody."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def collate(batch: list[int]) -> dict[str, Any]:
    """In a worker process of the DataLoader."""
    return {
        "pid": os.getpid(),
        "place": [stretto.rank(), stretto.world_size(), stretto.is_initialized()],
        "refusals": [refusal(call) for call in (stretto.barrier, lambda: stretto.all_reduce(torch.ones(2)))],
    }


def distribute() -> None:
    model = torch.nn.Linear(1, 1)
    stretto.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


def child() -> dict[str, Any]:
    """A child that is asked for everything, and then makes a job of its own."""
    calls: list[Callable[[], Any]] = [
        lambda: stretto.broadcast(torch.ones(2)),
        lambda: stretto.all_gather(torch.ones(2)),
        lambda: stretto.gather_object(1),
        distribute,
        lambda: stretto.main_first().__enter__(),
    ]
    refusals = [refusal(call) for call in calls]
    for name in list(os.environ):
        if name.startswith("STRETTO_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    stretto.init()
    mean = stretto.all_reduce(torch.tensor([3.0])).item()
    place = [stretto.rank(), stretto.world_size(), mean]
    stretto.shutdown()
    return {"refusals": refusals, "place": place, "left": stretto.is_initialized()}


def leaving() -> bool:
    stretto.shutdown()
    return stretto.is_initialized()


def worker(wire: Any) -> dict[str, Any]:
    job = stretto.init(wire=wire)
    stretto.barrier()
    numbers: Any = range(2)
    loader: Any = DataLoader(numbers, batch_size=2, num_workers=1, collate_fn=collate, multiprocessing_context="fork")
    report = {
        "pid": os.getpid(),
        "loader": next(iter(loader)) if wire == "tcp" else None,
        "child": in_a_fork(child),
        "left in a child": in_a_fork(leaving),
    }
    assert stretto.init() is job and stretto.world_size() == 2
    total = stretto.all_reduce(torch.full((100_000,), 1.0 + stretto.rank()), "sum", "ring")
    report["sums"] = sorted(set(total.tolist()))
    stretto.shutdown()
    return report
