"""Which job a process group means, and which of its workers.

`torch.distributed.init_process_group("stretto", ...)` first meets by torch's own means (`env://`, a store, a file) and then calls
`create` with a rank, a size and a store. What that group's job is:

    the process is in a job already             that one; it must have this size, and this worker this rank
    a launcher has started the process, and     the launcher's job, as `stretto.init()` joins it; it stays when the group is
    says the same rank and size                 destroyed, until the process ends
    else (only rank, size and store are given,
    perhaps by RANK and WORLD_SIZE alone)       a job of its own, whose workers meet at the store; it is left with the group

Further groups (`new_group`, meshes) are groups of that job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from stretto import api
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.launching.detect import deadlines, detect_here, has_only_global_ranks, own_environment
from stretto.launching.through_store import launch_through
from stretto.timeouts import Timeouts
from stretto.torch_backend.deadline import own_deadline
from stretto.torch_backend.options import GroupOptions
from stretto.torch_backend.process_group import StrettoGroup

LEAST_MEET_S = 10.0


def create(opts: Any, options: object) -> StrettoGroup:
    """What torch calls, on the members of a new group, to have it made. `opts` are its `DistributedBackendOptions`."""
    if not isinstance(options, GroupOptions | None):
        raise ConfigurationError(
            f'a process group of the backend "stretto" with pg_options={options!r}: these are options of another backend.\n'
            f"Write pg_options=stretto.GroupOptions(...), or leave them out."
        )
    arrive_s = own_deadline(opts.timeout)
    if options is None and opts.global_ranks_in_group:
        options = _options_of_default_group()
    ranks = list(opts.global_ranks_in_group) or list(range(opts.group_size))
    job, leave = _job_of(opts, ranks, arrive_s)
    try:
        group = job.world.sub(ranks)
        return StrettoGroup(job, group, options, arrive_s, opts.store, leave)
    except BaseException:
        if leave is not None:
            leave()
        raise


def _options_of_default_group() -> GroupOptions | None:
    """Those hold for further groups too, the groups of a mesh for instance, that were given none of their own."""
    default = dist.group.WORLD
    return default.options if isinstance(default, StrettoGroup) else None


def _job_of(opts: Any, ranks: list[int], arrive_s: float | None) -> tuple[Job, Callable[[], None] | None]:
    """The job, and how to leave it when the group is destroyed; None: it stays."""
    is_first = not opts.global_ranks_in_group
    rank, size = (opts.group_rank, opts.group_size) if is_first else (dist.get_rank(), dist.get_world_size())
    job = api.job_here()
    if job is not None:
        _check_same_place(job, rank, size)
        return job, None
    if len(ranks) != size:
        raise ConfigurationError(
            f'new_group(ranks={ranks}, backend="stretto") of {size} workers, which are in no job of stretto\'s: to join one '
            f"takes all of them.\nCall stretto.init() on all workers first, or make a group of all of them."
        )
    timeouts = deadlines(own_environment())
    if arrive_s is not None:
        timeouts = _that_meet_within(timeouts, arrive_s)
    try:
        launch = detect_here()
    except ConfigurationError:
        if not has_only_global_ranks(own_environment()):
            raise
        return _joined_at(opts.store, rank, size, timeouts)  # torch has met already; who shares a host is found out at the store
    if (launch.rank, launch.world_size) == (rank, size) and (launch.launcher != "single" or size == 1):
        return api.init(), None
    return _joined_at(opts.store, rank, size, timeouts)


def _joined_at(store: Any, rank: int, size: int, timeouts: Timeouts) -> tuple[Job, Callable[[], None]]:
    job = api.init_as(launch_through(store, rank, size, timeouts), timeouts)
    return job, lambda: _leave(job)


def _that_meet_within(timeouts: Timeouts, seconds: float) -> Timeouts:
    return dataclasses.replace(timeouts, meet_s=min(timeouts.meet_s, max(LEAST_MEET_S, seconds)))


def _check_same_place(job: Job, rank: int, size: int) -> None:
    if (job.rank, job.world_size) != (rank, size):
        raise ConfigurationError(
            f"a process group in which this worker has rank {rank} of {size}, in a process that is rank {job.rank} of "
            f"{job.world_size} of its job: they would name workers differently.\n"
            f"Leave rank, world_size and store out (init_process_group takes them from the launcher), or give those of the job: "
            f"rank=stretto.rank(), world_size=stretto.world_size()."
        )


def _leave(job: Job) -> None:
    if api.job_here() is job:
        api.shutdown()
