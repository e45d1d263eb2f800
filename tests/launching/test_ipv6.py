"""A job whose rendezvous and workers have IPv6 addresses, from the coordinator to a collective."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stretto.job import Job, join
from stretto.launching import coordinator_process
from stretto.launching.detect import Launch
from stretto.timeouts import Timeouts

SECRET = bytes(range(32))


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def sum_of_ranks(job: Job) -> float:
    total = job.all_reduce(torch.tensor([float(job.rank)]), op="sum", algorithm="ring").item()
    job.close(goodbye=True)
    return total


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(("bind", "encrypt"), [("[::1]:0", False), ("[::]:0", True)])
def test_workers_meet_and_compute_over_ipv6(bind: str, encrypt: bool) -> None:
    deadline = time.monotonic() + 60
    process, address = coordinator_process.start(bind, 3, SECRET, os.environ, encrypted=encrypt, deadline=deadline)
    meeting = address.replace("[::]", "[::1]")
    # One worker per host, as far as they know: that is when they publish an address of their own.
    launches = [Launch(rank, 3, 0, 1, meeting, SECRET, encrypt, "stretto", interface="::1") for rank in range(3)]
    try:
        with ThreadPoolExecutor(3) as pool:
            jobs = [future.result(60) for future in [pool.submit(join, each, Timeouts.of(30)) for each in launches]]
            assert {peer.address.rpartition(":")[0] for peer in jobs[0].peers} == {"[::1]"}
            assert [future.result(60) for future in [pool.submit(sum_of_ranks, job) for job in jobs]] == [3.0] * 3
    finally:
        process.kill()
        process.wait()
