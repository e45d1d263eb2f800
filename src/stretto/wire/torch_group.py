"""Process groups of torch.distributed, for the backend's own collectives (`torch_native.py`)."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from stretto.errors import ConfigurationError, JobError

BACKENDS: Final = ("gloo", "nccl")


def torch_group(backend: str, rank: int, world_size: int, timeout_s: float = 60.0) -> dist.ProcessGroup:
    """A new group of all ranks for one job. All ranks call it together.

    It is never torch's default group: a group that two threads use mixes up their data without an error. Where there is no
    default group yet, one is made, as torch does it, from MASTER_ADDR and MASTER_PORT.
    """
    if backend not in BACKENDS or not dist.is_backend_available(backend):
        has = " and ".join(repr(name) for name in BACKENDS if dist.is_backend_available(name))
        raise ConfigurationError(
            f"the torch backend {backend!r} cannot be used: of those that stretto drives, torch {torch.__version__} here "
            f"has {has or 'none'}.\nWrite one that it has, or use stretto's own wire (wire='auto')."
        )
    limit = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        _make_default_group(backend, rank, world_size, limit)
    elif (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise ConfigurationError(
            f"torch.distributed was initialised as rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"but this is rank {rank} of {world_size} of the job.\n"
            f"Start both from the same launcher, or leave init_process_group to stretto."
        )
    group = dist.new_group(list(range(world_size)), backend=backend, timeout=limit)
    assert isinstance(group, dist.ProcessGroup)  # torch returns an int to ranks outside of the group
    return group


def _make_default_group(backend: str, rank: int, world_size: int, limit: timedelta) -> None:
    try:
        dist.init_process_group(backend, init_method="env://", rank=rank, world_size=world_size, timeout=limit)
    except (ValueError, RuntimeError) as error:
        raise JobError(
            f"torch.distributed.init_process_group({backend!r}, rank={rank}, world_size={world_size}) failed: {error}\n"
            f"Every rank must reach MASTER_ADDR:MASTER_PORT, which is not stretto's port; `stretto run` and torchrun set both."
        ) from error
