"""torch's own collectives beside our wire: results, disagreement, refusals, deaths in the middle."""

from __future__ import annotations

import os
import re
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from preloaded import Preloaded
from stretto.errors import ConfigurationError, PeerLost, RankMismatch, WireError, WireTimeout
from stretto.job import Job
from stretto.launching.detect import Launch
from stretto.launching.peers import Peer
from stretto.timeouts import Timeouts
from stretto.wire.tcp import TcpWire
from stretto.wire.torch_group import torch_group
from stretto.wire.torch_native import NativeGroup

TIMEOUTS = Timeouts(silence_s=40, connect_s=60, arrive_s=60, leave_s=40)
LONG_S = 20.0  # more than anything needs that is told; less than what waits for a deadline takes


def make_job(wire: TcpWire, peers: list[Peer], store: Store, timeouts: Timeouts) -> Job:
    rank, size = wire.rank, wire.world_size
    wire.connect(peers, b"")
    group: Any = dist.ProcessGroupGloo(PrefixStore("test", store), rank, size, timeout=timedelta(seconds=60))
    launch = Launch(rank, size, rank, size, rendezvous=None, secret=None, encrypt=False, launcher="stretto")
    return Job(launch, peers, wire, timeouts, NativeGroup(group, wire, timeouts.arrive_s))


@contextmanager
def gloo_jobs(size: int, timeouts: Timeouts = TIMEOUTS) -> Iterator[list[Job]]:
    """Jobs of `size` ranks in this process, each with a wire and a gloo group object of its own, over loopback."""
    wires = [TcpWire(rank, size, secret=bytes(32), timeouts=timeouts) for rank in range(size)]
    peers = [Peer(rank, rank, "here", wire.address, os.getpid()) for rank, wire in enumerate(wires)]
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        jobs = list(pool.map(lambda wire: make_job(wire, peers, store, timeouts), wires))
    try:
        yield jobs
    finally:
        for job in jobs:
            job.close(goodbye=False)


def run(size: int, program: Callable[[Job], Any], timeouts: Timeouts = TIMEOUTS) -> list[Any]:
    """The results of all ranks. One that fails leaves the job, so that the others do not wait for it."""

    def of_one(job: Job) -> Any:
        try:
            return program(job)
        except BaseException:
            job.close(goodbye=False)
            raise

    with gloo_jobs(size, timeouts) as jobs, ThreadPoolExecutor(size) as pool:
        return [result.result(90) for result in [pool.submit(of_one, job) for job in jobs]]


def all_reduce(job: Job, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    return job.all_reduce(tensor, op, "native")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_native_all_reduce_equals_the_arithmetic(size: int) -> None:
    expected = {"sum": sum(range(1, size + 1)), "mean": (size + 1) / 2, "min": 1, "max": size}

    def program(job: Job) -> None:
        def reduce(tensor: torch.Tensor, op: str) -> None:
            assert job.native is not None
            job.native.all_reduce(tensor, op, "all_reduce", job.barrier)

        for op, value in expected.items():
            for length in (0, 1, 100_003):
                tensor = torch.full((length,), float(job.rank + 1), requires_grad=True)
                reduce(tensor, op)
                assert torch.equal(tensor, torch.full((length,), float(value)))
        columns = torch.full((6, 4), job.rank + 1, dtype=torch.int64).t()  # not contiguous
        reduce(columns, "product")
        assert columns.eq(torch.arange(1, size + 1).prod()).all()

    run(size, program)


@pytest.mark.parametrize(
    ("odd", "op", "words"),
    [
        (torch.ones(5), "sum", r"ranks 0, 2: .* before all_reduce\(float32\[4\].*\n  rank 1: .* before all_reduce\(float32\[5\]"),
        (torch.ones(4, dtype=torch.int32), "sum", r"rank 1: .*all_reduce\(int32\[4\], op=sum"),
        (torch.ones(4), "max", r"ranks 0, 2: .*op=sum.*\n  rank 1: .*op=max"),
    ],
    ids=["size", "dtype", "op"],
)
def test_different_native_calls_are_an_error_on_every_rank_and_no_abort(odd: torch.Tensor, op: str, words: str) -> None:
    def program(job: Job) -> None:
        mine = (odd.clone(), op) if job.rank == 1 else (torch.ones(4), "sum")
        with pytest.raises(RankMismatch, match=words):
            all_reduce(job, *mine)
        assert all_reduce(job, torch.ones(4)).eq(3).all()

    run(3, program)


@pytest.mark.parametrize(
    ("tensor", "op", "words"),
    [
        (torch.ones(3, dtype=torch.int16), "sum", "int16"),
        (torch.ones(3, dtype=torch.int64), "mean", "mean"),
        (torch.ones(3), "median", "median"),
        (torch.ones(3, dtype=torch.complex64), "max", "complex"),
    ],
)
def test_what_gloo_cannot_do_is_refused_before_anything_is_sent(tensor: torch.Tensor, op: str, words: str) -> None:
    def program(job: Job) -> None:
        assert job.native is not None
        with pytest.raises(ConfigurationError, match=words):
            job.native.all_reduce(tensor, op, "all_reduce", lambda: pytest.fail("it waits for the others"))
        assert all_reduce(job, torch.ones(3)).eq(2).all()

    run(2, program)


@pytest.mark.parametrize("odd_ranks", [(1,), (0, 1, 2)], ids=str)
def test_a_rank_whose_call_is_refused_is_not_waited_for(odd_ranks: tuple[int, ...]) -> None:
    def program(job: Job) -> None:
        start = time.monotonic()
        if job.rank in odd_ranks:
            with pytest.raises(ConfigurationError, match="gloo has no collective for torch.int16"):
                all_reduce(job, torch.ones(3, dtype=torch.int16))
        else:
            with pytest.raises(WireError, match=r"rank 1 does not take part in all_reduce\(int16.*gloo has no collective"):
                all_reduce(job, torch.ones(3))
        assert time.monotonic() - start < LONG_S
        assert all_reduce(job, torch.ones(3)).eq(3).all()

    run(3, program)


def test_a_rank_that_does_not_come_to_a_native_call_is_named() -> None:
    absent = threading.Barrier(3)

    def program(job: Job) -> None:
        if job.rank != 1:
            with pytest.raises(WireTimeout, match="rank 1"):
                all_reduce(job, torch.ones(3))
        absent.wait(60)

    run(3, program, Timeouts(silence_s=40, connect_s=60, arrive_s=1, leave_s=40))


@pytest.mark.parametrize("agreed", [False, True], ids=["before it began", "after all agreed"])
def test_a_rank_that_dies_in_a_native_call_is_named_in_time(agreed: bool) -> None:
    all_are_there = threading.Barrier(3)

    def program(job: Job) -> None:
        job.barrier()
        all_are_there.wait(LONG_S)
        if job.rank == 2:
            if agreed:
                dying = _Dies(job)
                with pytest.raises(ZeroDivisionError):
                    all_reduce(job, torch.ones(300_000))
                assert dying.fired
            else:
                job.close(goodbye=False)
            return
        start = time.monotonic()
        for _ in range(2):  # the second finds the group broken, and says whose fault it is
            with pytest.raises(PeerLost) as caught:
                all_reduce(job, torch.ones(300_000))
            assert caught.value.rank == 2 and time.monotonic() - start < LONG_S

    run(3, program)


class _Dies:
    """A group whose rank dies at the moment of its first collective."""

    def __init__(self, job: Job) -> None:
        assert job.native is not None
        self._job = job
        self._whole = job.native._group
        self.fired = False
        job.native._group = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        self.fired = True
        self._job.close(goodbye=False)
        raise ZeroDivisionError


def test_an_operation_that_does_not_end_ends_at_the_deadline_and_the_group_with_it() -> None:
    met = threading.Barrier(2)

    def program(job: Job) -> None:
        native = job.native
        assert native is not None
        if job.rank == 0:
            with pytest.raises(WireError, match="every rank had begun it, and gloo does not say"):
                native.all_reduce(torch.ones(3), "sum", "all_reduce", lambda: None)
            with pytest.raises(WireError, match="group is broken"):
                native.all_reduce(torch.ones(3), "sum", "all_reduce", lambda: None)
        met.wait(60)  # rank 1 lives, and has not begun it

    run(2, program, Timeouts(silence_s=40, connect_s=60, arrive_s=1, leave_s=40))


def test_closing_in_the_middle_of_a_native_collective_is_quick() -> None:
    before = threading.active_count()
    with gloo_jobs(2) as (job, _):
        native = job.native
        assert native is not None
        outcome: Future[None] = Future()
        native._outcome = outcome
        native._given.put((native._group.allreduce([torch.ones(1000)], dist.AllreduceOptions()), outcome))
        start = time.monotonic()
        job.close(goodbye=False)
        job.close(goodbye=False)
        assert time.monotonic() - start < LONG_S
        assert isinstance(outcome.exception(10), RuntimeError)
    assert threading.active_count() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_nccl_runs_native_all_reduces_and_refuses_host_memory() -> None:
    wire = TcpWire(0, 1, secret=bytes(32), timeouts=TIMEOUTS)
    wire.connect([Peer(0, 0, "here", wire.address, os.getpid())], b"")
    nccl: Any = dist.ProcessGroupNCCL
    native = NativeGroup(nccl(HashStore(), 0, 1, timedelta(seconds=60)), wire, 60)
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        tensor = torch.ones(1_000_000, device="cuda") * 3
        for op in ("sum", "mean", "min", "max", "product"):
            native.all_reduce(tensor, op, "all_reduce", lambda: None)
            assert tensor.eq(3).all()
    with pytest.raises(ConfigurationError, match="cannot go through NCCL"):
        native.all_reduce(tensor.cpu(), "sum", "all_reduce", lambda: None)
    native.stop()
    wire.close()


# -- making one -------------------------------------------------------------------------------------------------------


def test_a_group_of_other_ranks_is_refused() -> None:
    with gloo_jobs(1) as (job,):
        other = TcpWire(0, 2, secret=bytes(32))
        assert job.native is not None
        with pytest.raises(ConfigurationError, match="rank 0 of a group of 1 over a wire that is rank 0 of 2"):
            NativeGroup(job.native._group, other, 60)
        other.abandon()


def test_a_backend_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'carrier-pigeon' cannot be used.*'gloo'"):
        torch_group("carrier-pigeon", 0, 1)


WORKER = """
import torch, torch.distributed as dist
import stretto
from stretto.wire.torch_group import torch_group

job = stretto.init(wire="gloo")  # makes torch's default group as well
group = torch_group("gloo", job.rank, job.world_size, timeout_s=60)  # finds one
assert len({id(one) for one in (job.native._group, group, dist.group.WORLD)}) == 3
tensor = stretto.all_reduce(torch.full((100_000,), float(job.rank)), algorithm="native")
assert tensor.eq((job.world_size - 1) / 2).all()
stretto.shutdown()
dist.destroy_process_group()
print(f"rank {job.rank} has {tensor[0].item()}")
"""


@pytest.mark.processes
def test_native_all_reduce_between_processes_of_torchrun(tmp_path: Path, preloaded: Preloaded) -> None:
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER))
    done = preloaded.shell("torchrun --standalone --nproc-per-node=2 worker.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    # The workers share torchrun's output, where lines may run together.
    assert sorted(re.findall(r"rank \d has \d\.\d", done.stdout)) == ["rank 0 has 0.5", "rank 1 has 0.5"]
