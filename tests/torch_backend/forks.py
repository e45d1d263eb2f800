"""Workers that no launcher has started: forks of this process, none of which outlives its test."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LAUNCHER = ("STRETTO_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")
END_S = 10.0


@contextmanager
def forks(size: int, program: Callable[..., None], *args: Any) -> Iterator[list[Any]]:
    """`program(rank, *args)` in so many processes. Those that have not ended when the block does are killed."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=program, args=(rank, *args)) for rank in range(size)]
    try:
        for worker in workers:
            worker.start()
        yield workers
    finally:
        for worker in workers:
            if worker.pid is not None and worker.is_alive():
                worker.kill()
            if worker.pid is not None:
                worker.join(END_S)
