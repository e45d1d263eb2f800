"""Process groups on jobs of threads: torch's default group is the process's, but the group itself is an object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stretto.job import Job
from stretto.testing import run_jobs
from stretto.torch_backend.options import GroupOptions
from stretto.torch_backend.process_group import StrettoGroup


def run_groups(
    size: int, program: Callable[..., Any], *args: Any, options: GroupOptions | None = None, **more: Any
) -> list[Any]:  # fmt: skip
    """`program(group, *args)` on each of so many workers; results by rank."""

    def on_job(job: Job) -> Any:
        group = StrettoGroup(job, job.world.sub(range(size)), options)
        try:
            return program(group, *args)
        finally:
            group.shutdown()

    return run_jobs(size, on_job, **more)


def rows(size: int, length: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What each of so many workers has: a row each, of small whole numbers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 3, (size, length), generator=generator).to(dtype)
