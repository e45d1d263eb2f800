from __future__ import annotations

import os
import re
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from preloaded import Preloaded
from stretto.collectives import catalogue
from stretto.collectives.execute import Communicator
from stretto.collectives.plan import Kind
from stretto.collectives.request import Request
from stretto.errors import ConfigurationError, PeerLost, RankMismatch, WireError, WireTimeout
from stretto.launching.membership import Peer
from stretto.testing import run_threads, wait_for
from stretto.timeouts import Timeouts
from stretto.wire.base import Tag, Wire
from stretto.wire.tcp import TcpWire
from stretto.wire.torch_group import TorchGroupWire, torch_group
from wire.contract import Meeting, WireContract, progress_until, receive, send

TIMEOUTS = Timeouts(silence_s=40, connect_s=60, arrive_s=60, leave_s=40)
LONG_S = 20.0  # more than anything needs that is told; less than what waits for a deadline takes


def make_wire(rank: int, wires: Sequence[TcpWire], peers: list[Peer], store: Store) -> TorchGroupWire:
    wires[rank].connect(peers, b"")
    group: Any = dist.ProcessGroupGloo(PrefixStore("test", store), rank, len(wires), timeout=timedelta(seconds=60))
    return TorchGroupWire(wires[rank], group, timeouts=TIMEOUTS)


@contextmanager
def gloo_world(size: int) -> Iterator[list[TorchGroupWire]]:
    """The wires of `size` ranks of this process, each with a gloo group object of its own, over loopback."""
    inner = [TcpWire(rank, size, secret=bytes(32), timeouts=TIMEOUTS) for rank in range(size)]
    peers = [Peer(rank, rank, "here", wire.address, os.getpid()) for rank, wire in enumerate(inner)]
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        wires = list(pool.map(lambda rank: make_wire(rank, inner, peers, store), range(size)))
    try:
        yield wires
    finally:
        for wire in wires:
            wire.abandon()


def run(size: int, program: Callable[..., Any]) -> list[Any]:
    with gloo_world(size) as wires:
        return run_threads(size, program, wires=wires, timeout_s=90)


class TestTorchGroupKeepsTheContract(WireContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        with gloo_world(size) as wires:
            yield wires


# -- collectives of ours, which travel on the inner wire ------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("length", [7, 400_001])
def test_the_executor_runs_a_ring_on_it(size: int, length: int) -> None:
    def program(wire: TorchGroupWire) -> torch.Tensor:
        communicator = Communicator(wire, TIMEOUTS)
        meeting = Meeting(wire)
        tensor = torch.arange(length, dtype=torch.float32) * (wire.rank + 1)
        plan = catalogue.plan(Kind.ALL_REDUCE, "ring", wire.rank, size)
        communicator.start(Request(plan, tensor, "sum", 1, 0, 128 << 10)).wait()
        meeting()
        return tensor

    for tensor in run(size, program):
        expected = torch.arange(length, dtype=torch.float32) * sum(range(1, size + 1))
        torch.testing.assert_close(tensor, expected)


def test_a_collective_of_the_executor_names_the_rank_that_died() -> None:
    def program(wire: TorchGroupWire) -> None:
        communicator = Communicator(wire, TIMEOUTS)
        meeting = Meeting(wire)
        meeting()
        if wire.rank == 2:
            wire.abandon()
            return
        plan = catalogue.plan(Kind.ALL_REDUCE, "ring", wire.rank, 3)
        start = wire.now()
        with pytest.raises(PeerLost) as caught:
            communicator.start(Request(plan, torch.ones(1_000_000), "sum", 1, 0)).wait()
        assert caught.value.rank == 2 and wire.now() - start < LONG_S

    run(3, program)


def test_closing_in_the_middle_of_a_native_collective_is_quick() -> None:
    def program(wire: TorchGroupWire) -> float:
        meeting = Meeting(wire)
        meeting()
        if wire.rank == 1:
            progress_until(wire, lambda: 0 in wire.lost, "the goodbye")
            return 0.0
        outcome: list[str | None] = []
        wire._works.watch(wire._works.group.allreduce([torch.ones(1000)], dist.AllreduceOptions()), outcome.append)
        start = wire.now()
        wire.close()
        wire.close()
        assert not outcome
        return wire.now() - start

    before = threading.active_count()
    with gloo_world(2) as wires:
        assert run_threads(2, program, wires=wires)[0] < LONG_S
    assert threading.active_count() == before


# -- the backend's own collectives ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_native_all_reduce_equals_the_arithmetic(size: int) -> None:
    expected = {"sum": sum(range(1, size + 1)), "mean": (size + 1) / 2, "min": 1, "max": size}

    def program(wire: TorchGroupWire) -> None:
        sequence = 0
        for op, value in expected.items():
            for length in (0, 1, 100_003):
                tensor = torch.full((length,), float(wire.rank + 1), requires_grad=True)
                wire.native_all_reduce(tensor, op, sequence, 60)
                sequence += 1
                assert torch.equal(tensor, torch.full((length,), float(value)))
        columns = torch.full((6, 4), wire.rank + 1, dtype=torch.int64).t()  # not contiguous
        wire.native_all_reduce(columns, "product", sequence, 60)
        assert columns.eq(torch.arange(1, size + 1).prod()).all()

    run(size, program)


@pytest.mark.parametrize(
    ("odd", "op", "words"),
    [
        (torch.ones(5), "sum", r"ranks 0, 2: all_reduce\(float32\[4\].*\n  rank 1: all_reduce\(float32\[5\]"),
        (torch.ones(4, dtype=torch.int32), "sum", r"rank 1: all_reduce\(int32\[4\], op=sum"),
        (torch.ones(4), "max", r"ranks 0, 2: .*op=sum.*\n  rank 1: .*op=max"),
    ],
    ids=["size", "dtype", "op"],
)
def test_different_native_calls_are_an_error_on_every_rank_and_no_abort(odd: torch.Tensor, op: str, words: str) -> None:
    def program(wire: TorchGroupWire) -> None:
        mine = (odd, op) if wire.rank == 1 else (torch.ones(4), "sum")
        with pytest.raises(RankMismatch, match=words):
            wire.native_all_reduce(*mine, 0, 60)
        tensor = torch.ones(4)
        wire.native_all_reduce(tensor, "sum", 1, 60)
        assert tensor.eq(3).all()

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
def test_what_gloo_cannot_do_is_refused_and_the_others_are_told(tensor: torch.Tensor, op: str, words: str) -> None:
    def program(wire: TorchGroupWire) -> None:
        if wire.rank == 0:
            with pytest.raises(ConfigurationError, match=words):
                wire.native_all_reduce(tensor, op, 0, 60)
        else:
            with pytest.raises(WireError, match="rank 0 did not take part"):
                wire.native_all_reduce(torch.ones(3), "sum", 0, 60)
        ones = torch.ones(3)
        wire.native_all_reduce(ones, "sum", 1, 60)
        assert ones.eq(2).all()

    run(2, program)


def test_a_rank_that_does_not_come_to_a_native_call_is_named() -> None:
    def program(wire: TorchGroupWire) -> None:
        meeting = Meeting(wire)
        meeting()
        if wire.rank != 1:
            error = WireTimeout if wire.rank == 0 else WireError
            with pytest.raises(error, match="rank 1"):
                wire.native_all_reduce(torch.ones(3), "sum", 0, 3.0 if wire.rank == 0 else 60)
        meeting()

    run(3, program)


@pytest.mark.parametrize("agreed", [False, True], ids=["before it began", "after all agreed"])
def test_a_rank_that_dies_in_a_native_call_is_named_in_time(agreed: bool) -> None:
    def program(wire: TorchGroupWire) -> None:
        meeting = Meeting(wire)
        meeting()
        if wire.rank == 2:
            if agreed:
                wire._works.group = dying = _Dies(wire)
                with pytest.raises(ZeroDivisionError):
                    wire.native_all_reduce(torch.ones(300_000), "sum", 0, 60)
                assert dying.fired
            else:
                wire.abandon()
            return
        start = wire.now()
        with pytest.raises(PeerLost) as caught:
            wire.native_all_reduce(torch.ones(300_000), "sum", 0, 60)
        assert caught.value.rank == 2 and wire.now() - start < LONG_S
        if agreed:
            with pytest.raises(PeerLost, match="rank 2"):
                wire.native_all_reduce(torch.ones(3), "sum", 1, 60)

    run(3, program)


class _Dies:
    """A group whose rank dies at the moment of its first collective."""

    def __init__(self, wire: TorchGroupWire) -> None:
        self._wire = wire
        self._whole = wire._works.group
        self.fired = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        self.fired = True
        self._wire.abandon()
        raise ZeroDivisionError


def test_messages_move_on_during_a_native_call() -> None:
    def program(wire: TorchGroupWire) -> None:
        meeting = Meeting(wire)
        peer = 1 - wire.rank
        handle, arrived = receive(wire, peer, Tag(1, 0, 0), 1 << 20)
        sent = send(wire, peer, Tag(1, 0, 0), bytes(1 << 20))
        tensor = torch.ones(200_000)
        wire.native_all_reduce(tensor, "mean", 0, 60)
        assert tensor.eq(1).all()
        wait_for(wire, sent, handle)
        assert arrived == [bytes(1 << 20)]
        meeting()

    run(2, program)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_nccl_runs_native_all_reduces_and_refuses_host_memory() -> None:
    inner = TcpWire(0, 1, secret=bytes(32), timeouts=TIMEOUTS)
    inner.connect([Peer(0, 0, "here", inner.address, os.getpid())], b"")
    nccl: Any = dist.ProcessGroupNCCL
    group = nccl(HashStore(), 0, 1, timedelta(seconds=60))
    wire = TorchGroupWire(inner, group, timeouts=TIMEOUTS)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        tensor = torch.ones(1_000_000, device="cuda") * 3
    for sequence, op in enumerate(("sum", "mean", "min", "max", "product")):
        wire.native_all_reduce(tensor, op, sequence, 60, stream)
        assert tensor.eq(3).all()
    with pytest.raises(ConfigurationError, match="cannot go through NCCL"):
        wire.native_all_reduce(tensor.cpu(), "sum", 5, 20)
    wire.close()


# -- making one -------------------------------------------------------------------------------------------------------


def test_a_group_of_other_ranks_is_refused() -> None:
    with gloo_world(1) as wires:
        other = TcpWire(0, 2, secret=bytes(32))
        with pytest.raises(ConfigurationError, match="rank 0 of a group of 1 over a wire that is rank 0 of 2"):
            TorchGroupWire(other, wires[0]._works.group)
        other.abandon()


def test_a_backend_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'carrier-pigeon' cannot be used.*'gloo'"):
        torch_group("carrier-pigeon", 0, 1)


WORKER = """
import os, torch, torch.distributed as dist
from stretto.launching.membership import Peer
from stretto.wire.tcp import TcpWire
from stretto.wire.torch_group import TorchGroupWire, torch_group

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
first = torch_group("gloo", rank, size, timeout_s=60)  # makes torch's default group as well
group = torch_group("gloo", rank, size, timeout_s=60)  # finds one
assert len({id(one) for one in (first, group, dist.group.WORLD)}) == 3
inner = TcpWire(rank, size, secret=bytes(32))
addresses = [None] * size
dist.all_gather_object(addresses, inner.address)
inner.connect([Peer(r, r, "here", address, 0) for r, address in enumerate(addresses)], b"")
wire = TorchGroupWire(inner, group)
tensor = torch.full((100_000,), float(rank))
wire.native_all_reduce(tensor, "mean", 0, 60)
assert tensor.eq((size - 1) / 2).all()
wire.close()
dist.destroy_process_group()
print(f"rank {rank} has {tensor[0].item()}")
"""


@pytest.mark.processes
def test_native_all_reduce_between_processes_of_torchrun(tmp_path: Path, preloaded: Preloaded) -> None:
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER))
    done = preloaded.shell("torchrun --standalone --nproc-per-node=2 worker.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    # The workers share torchrun's output, where lines may run together.
    assert sorted(re.findall(r"rank \d has \d\.\d", done.stdout)) == ["rank 0 has 0.5", "rank 1 has 0.5"]
