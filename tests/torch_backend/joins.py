"""How a process group finds its job: what real workers do, each in a way of its own, and what they report."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import stretto
from stretto.errors import ConfigurationError
from torch_backend.forks import LAUNCHER, forks

dist: Any = torch.distributed  # whose stubs leave out what its pages describe


def summed(group: Any = None) -> float:
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    return float(x.sum())


def by_launcher() -> dict[str, Any]:
    """Under `stretto.launch`, which says all that `env://` wants."""
    dist.init_process_group("stretto", timeout=timedelta(seconds=50))
    report: dict[str, Any] = {"first": summed(), "rank": stretto.rank() == dist.get_rank()}
    report["patience"] = dist.group.WORLD.group.arrive_s
    sub = dist.new_group([0, 1], timeout=timedelta(seconds=7), pg_options=stretto.GroupOptions(algorithm="ring"))
    if dist.get_rank() < 2:
        report["sub"] = summed(sub)
        report["options"] = (sub.options.algorithm, sub.group.arrive_s)
    split = dist.group.WORLD.split_group([1, 2], group_desc="two")
    report["split"] = None if split is None else (split.size(), split.group_desc, split.group.arrive_s, summed(split))
    dist.destroy_process_group()
    report["still in the job"] = stretto.is_initialized()
    dist.init_process_group("stretto", pg_options=stretto.GroupOptions(algorithm="auto"))
    report["again"] = summed()
    dist.barrier()
    dist.destroy_process_group()
    return report


def after_init() -> dict[str, Any]:
    """In a job that was joined before, by its own meeting place; and with ranks that contradict it."""
    job = stretto.init()
    report: dict[str, Any] = {}
    other = (job.rank + 1) % job.world_size
    try:
        store = dist.FileStore(f"/tmp/stretto-test-{os.getpid()}", 1)
        dist.init_process_group("stretto", store=store, rank=other, world_size=job.world_size)
    except ConfigurationError as refused:
        report["refusal"] = str(refused)
    for name in [name for name in os.environ if name.startswith(("RANK", "WORLD_SIZE", "MASTER_"))]:
        del os.environ[name]  # as under Slurm, where torch alone would not know what to do
    dist.init_process_group("stretto")
    report["sum"] = summed() + float(stretto.all_reduce(torch.ones(1), op="sum"))
    dist.destroy_process_group()
    try:
        dist.init_process_group("stretto", timeout=timedelta(0))
    except ConfigurationError as refused:
        report["no time"] = str(refused)
    dist.init_process_group("stretto", init_method="stretto://", pg_options=stretto.GroupOptions("ring"))
    report["by its own method"] = summed()
    report["inherited"] = [dist.new_group(pg_options=given).options.algorithm for given in (None, stretto.GroupOptions())]
    gloo = dist.new_group(backend="gloo")  # the store that was made for it serves other backends too
    report["gloo beside it"] = summed(gloo)
    for group in (gloo, None):  # torch's own function, which takes ours too
        dist.monitored_barrier(group, timeout=timedelta(seconds=50))
    dist.barrier()
    dist.destroy_process_group()
    return report


def _by_store(rank: int, size: int, path: str, queue: Any) -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
        del os.environ[name]
    torch.set_num_threads(1)
    report: list[Any] = []
    for _ in range(2):  # the same store serves one job after the other
        dist.init_process_group("stretto", store=dist.FileStore(path, size), rank=rank, world_size=size)
        report.append((summed(), stretto.world_size(), stretto.local_rank()))
        dist.barrier()
        dist.destroy_process_group()
        report.append(stretto.is_initialized())
    dist.init_process_group("stretto", init_method=f"file://{path}.again", rank=rank, world_size=size)
    report.append(summed())
    dist.barrier()
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}  # and no LOCAL_RANK: gloo needs none
    dist.init_process_group("stretto", init_method=f"file://{path}.third", rank=rank, world_size=size)
    report.append((summed(), stretto.local_rank()))
    queue.put((rank, report))
    dist.barrier()
    dist.destroy_process_group()


def by_store(size: int, folder: str) -> list[Any]:
    """In forks of this process, which no launcher has started: they have a rank, a size and a store."""
    queue = multiprocessing.get_context("fork").SimpleQueue()
    path = str(Path(folder) / "store")
    with forks(size, _by_store, size, path, queue) as workers:
        for worker in workers:
            worker.join(60)
            assert worker.exitcode == 0
    results = dict(queue.get() for _ in workers)
    return [results[rank] for rank in range(size)]


def single() -> list[Any]:
    """A process that nobody has launched: a job of one."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
        del os.environ[name]
    report: list[Any] = []
    try:
        dist.init_process_group("stretto")  # torch's own error: nothing says that this is meant to be a job of one
    except ValueError as error:
        report.append(str(error))
    dist.init_process_group("stretto", init_method="stretto://")
    report += [summed(), dist.get_world_size()]
    dist.destroy_process_group()
    dist.init_process_group("cpu:stretto,cuda:gloo", init_method="stretto://")
    try:
        summed()
    except ConfigurationError as refused:
        report.append(str(refused))
    dist.destroy_process_group()
    return report
