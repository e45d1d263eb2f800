"""A store for torch, where no launcher has prepared one: rank 0 of the job serves it, and says where over the job's own wire."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from stretto import api
from stretto.launching.hosts import join_address, split_address
from stretto.launching.introduce import local_address
from stretto.torch_backend.deadline import refuse_no_time


def meet(timeout: timedelta | None) -> tuple[Store, int, int]:
    """(store, rank, world size) in the job of this process, which joins it if it has not. All workers call it.

    Nobody returns before all have connected: if rank 0 failed right afterwards, its store would be gone, and torch would try to
    connect to it until the group's timeout.
    """
    if timeout is None:
        timeout = dist.distributed_c10d.default_pg_timeout
    refuse_no_time(timeout)
    job = api.init()
    if job.world_size == 1:
        return HashStore(), 0, 1
    served = None
    if job.rank == 0:
        host, _ = local_address(job.launch)
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listener.getsockname()[1]
        served = TCPStore(
            host_name=host, port=port, world_size=None, is_master=True, timeout=timeout, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        address = join_address(host, port)
    else:
        address = ""
    host, port = split_address(job.gather_object(address)[0])
    store = served or TCPStore(
        host_name=host, port=port, world_size=None, is_master=False, timeout=timeout, wait_for_workers=False
    )  # fmt: skip
    job.barrier("everybody is connected to the store of torch.distributed")
    return store, job.rank, job.world_size
