"""Every collective, run for real: on threads (messages parked or left with the sender) and in virtual time."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.ranks import ALL_REDUCES, PATIENT, Rank, bits, floats, integers, run_ranks
from stretto.collectives import catalogue
from stretto.collectives.catalogue import CATALOGUE
from stretto.collectives.communication import CommunicationThread
from stretto.collectives.execute import EAGER_AHEAD, Communicator
from stretto.collectives.messages import Begun
from stretto.collectives.plan import Kind, Recv, Send, chunk_start
from stretto.collectives.request import Request
from stretto.collectives.run import EAGER_BYTES, compiled
from stretto.errors import ConfigurationError, StrettoError
from stretto.plan.costs import plan_cost
from stretto.testing import run_threads, run_virtual
from stretto.testing.network_model import Link, NetworkModel
from stretto.testing.threads import threads_world
from stretto.testing.virtual import VirtualWire
from stretto.wire.base import Wire
from stretto.wire.frames import HEADER_BYTES

SEGMENT_BYTES = 32  # eight floats: a few dozen elements make several segments
KINDS = [entry for entry in CATALOGUE.values() if entry.kind not in (Kind.ALL_REDUCE, Kind.BARRIER)]


def lengths(size: int) -> list[int]:
    """Nothing, one, fewer than ranks, not divisible, several segments."""
    return sorted({0, 1, max(1, size - 1), 3 * size + 1, 16 * size + 5})


def total(size: int, length: int) -> torch.Tensor:
    return torch.stack([integers(rank, length) for rank in range(size)]).sum(0)


def all_reduce_every_way(me: Rank, algorithm: str) -> list[bytes]:
    """Whole numbers are checked here; the bits of random floats are returned, to be compared between ranks."""
    seen = []
    group = 2 if algorithm == "hierarchical" else 1
    for length in lengths(me.size):
        for op in ("sum", "mean"):
            tensor = integers(me.rank, length)
            me.all_reduce(algorithm, tensor, op, group=group, segment_bytes=SEGMENT_BYTES)
            whole = total(me.size, length)
            if op == "sum":
                assert torch.equal(tensor, whole)
            else:
                torch.testing.assert_close(tensor, whole / me.size, rtol=1e-6, atol=1e-6)
        tensor = floats(me.rank, length)
        seen.append(bits(me.all_reduce(algorithm, tensor, "mean", group=group, segment_bytes=SEGMENT_BYTES)))
    return seen


@pytest.mark.parametrize(
    ("size", "eager"),  # messages are taken in early, or stay with their sender
    [
        *((size, True) for size in (1, 2, 3, 4, 7, 8)),
        *(pytest.param(size, True, marks=pytest.mark.slow) for size in (5, 6)),
        *((size, False) for size in (2, 3)),
        *(pytest.param(size, False, marks=pytest.mark.slow) for size in (5, 8)),
    ],
)
@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_an_all_reduce_is_right_and_the_same_bits_everywhere(algorithm: str, size: int, eager: bool) -> None:
    results = run_ranks(size, lambda me: all_reduce_every_way(me, algorithm), eager=eager)
    assert len(set(map(tuple, results))) == 1


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_large_all_reduces_that_wait_for_their_receivers_are_right_too(algorithm: str, eager: bool) -> None:
    length = EAGER_BYTES // 4 + 17

    def program(me: Rank) -> bytes:
        tensor = integers(me.rank, length)
        me.all_reduce(algorithm, tensor, segment_bytes=8192)
        assert torch.equal(tensor, total(me.size, length))
        return bits(me.all_reduce(algorithm, floats(me.rank, length), segment_bytes=8192))

    assert len(set(run_ranks(4, program, eager=eager))) == 1


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_an_all_reduce_in_virtual_time_is_right(algorithm: str) -> None:
    model = NetworkModel(Link(latency_s=1e-4, bytes_per_s=1e8))
    results = run_virtual(5, lambda wire: all_reduce_every_way(Rank(wire), algorithm), model=model, check=True)
    assert len(set(map(tuple, results))) == 1


@settings(max_examples=40, deadline=None)
@given(
    algorithm=st.sampled_from(ALL_REDUCES),
    size=st.integers(1, 7),
    length=st.integers(0, 200),
    segment_bytes=st.sampled_from([1, 4, 20, 64, 1 << 20]),
    op=st.sampled_from(["sum", "mean", "min", "max"]),
    eager=st.booleans(),
)
def test_any_all_reduce_equals_the_plain_one(
    algorithm: str, size: int, length: int, segment_bytes: int, op: str, eager: bool
) -> None:
    inputs = torch.stack([integers(rank, length) for rank in range(size)])
    plain = {"sum": inputs.sum(0), "mean": inputs.mean(0), "min": inputs.amin(0), "max": inputs.amax(0)}[op]
    results = run_ranks(
        size, lambda me: me.all_reduce(algorithm, integers(me.rank, length), op, segment_bytes=segment_bytes), eager=eager
    )
    for result in results:
        torch.testing.assert_close(result, plain, rtol=1e-6, atol=1e-5)


# The other kinds ---------------------------------------------------------------------------------------------------


def expected(kind: Kind, size: int, length: int, rank: int, root: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(start, stop, what is there) for whatever the kind promises to this rank."""
    own = chunk_start(rank, length, size), chunk_start(rank + 1, length, size)
    if kind is Kind.BROADCAST:
        yield 0, length, integers(root, length)
    elif kind is Kind.REDUCE and rank == root:
        yield 0, length, total(size, length)
    elif kind is Kind.REDUCE_SCATTER:
        yield *own, total(size, length)[own[0] : own[1]]
    elif kind is Kind.SCATTER:
        yield *own, integers(root, length)[own[0] : own[1]]
    elif kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL) or (kind is Kind.GATHER and rank == root):
        for peer in range(size):
            start, stop = chunk_start(peer, length, size), chunk_start(peer + 1, length, size)
            there = own if kind is Kind.ALL_TO_ALL else (start, stop)
            yield start, stop, integers(peer, length)[there[0] : there[1]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("entry", KINDS, ids=lambda entry: f"{entry.kind.value}-{entry.name}")
def test_every_other_kind_leaves_what_it_promises(entry: catalogue.Entry, size: int) -> None:
    def program(me: Rank) -> None:
        for root in range(size) if entry.with_root is not None else (0,):
            for length in (0, size, 17 * size) if entry.kind is Kind.ALL_TO_ALL else lengths(size):
                tensor = integers(me.rank, length)
                me.run(entry.kind, entry.name, tensor, root=root, segment_bytes=SEGMENT_BYTES)
                for start, stop, values in expected(entry.kind, size, length, me.rank, root):
                    assert torch.equal(tensor[start:stop], values)

    run_ranks(size, program, eager=size % 2 == 1)


@pytest.mark.parametrize("entry", [entry for entry in KINDS if entry.kind in (Kind.REDUCE, Kind.REDUCE_SCATTER)],
                         ids=lambda entry: f"{entry.kind.value}-{entry.name}")  # fmt: skip
def test_a_mean_is_taken_where_the_result_is(entry: catalogue.Entry) -> None:
    def program(me: Rank) -> None:
        root = 1 if entry.with_root is not None else 0
        tensor = integers(me.rank, 23)
        me.run(entry.kind, entry.name, tensor, "mean", root=root, segment_bytes=SEGMENT_BYTES)
        for start, stop, values in expected(entry.kind, 4, 23, me.rank, root):
            torch.testing.assert_close(tensor[start:stop], values / 4)

    run_ranks(4, program)


def test_a_transposition_that_does_not_divide_is_refused_before_anything_is_sent() -> None:
    def program(me: Rank) -> int:
        with pytest.raises(ConfigurationError, match="10 is not a multiple of 3.\nPad the tensor to 12 elements."):
            me.run(Kind.ALL_TO_ALL, "transpose", torch.zeros(10))
        return me.wire.bytes_sent

    assert run_ranks(3, program) == [0, 0, 0]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_nobody_leaves_a_barrier_before_all_have_entered(size: int) -> None:
    def program(wire: VirtualWire) -> tuple[float, float]:
        me = Rank(wire)
        wire.compute(float(wire.rank == size - 1))
        entered = wire.now()
        me.barrier()
        return entered, wire.now()

    entered, left = zip(*run_virtual(size, program, model=NetworkModel(Link(latency_s=1e-3))), strict=True)
    assert max(entered) == 1.0 or size == 1
    assert min(left) >= max(entered)
    assert max(left) <= max(entered) + 1e-3 * math.ceil(math.log2(size)) + 1e-9


# Many at once ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eager", [True, False])
def test_collectives_may_begin_in_another_order_on_every_rank(eager: bool) -> None:
    def program(me: Rank) -> None:
        order = list(range(24))
        shift = 5 * me.rank
        order = order[shift:] + order[:shift] if me.rank % 2 else order[::-1]
        tensors = {number: integers(me.rank + number, 10 + number * (997 if number % 5 == 0 else 1)) for number in order}
        pending = {
            number: me.start(
                Kind.ALL_REDUCE, ALL_REDUCES[number % len(ALL_REDUCES)], tensors[number], sequence=number, segment_bytes=4096
            )
            for number in order
        }
        for number in reversed(order):
            pending[number].wait()
            parts = [integers(rank + number, tensors[number].numel()) for rank in range(me.size)]
            assert torch.equal(tensors[number], torch.stack(parts).sum(0))

    run_ranks(4, program, eager=eager)


def test_channels_do_not_meet() -> None:
    def program(me: Rank) -> None:
        other = Rank.__new__(Rank)
        other.__dict__.update(me.__dict__, channel=2)
        tensors = [integers(me.rank, 20), integers(me.rank + 7, 20)]
        pair = [me, other] if me.rank == 0 else [other, me]
        pending = [rank.start(Kind.ALL_REDUCE, "ring", tensors[rank.channel - 1], sequence=0) for rank in pair]
        for one in pending:
            one.wait()
        assert torch.equal(tensors[0], total(3, 20))
        assert torch.equal(tensors[1], torch.stack([integers(rank + 7, 20) for rank in range(3)]).sum(0))

    run_ranks(3, program)


def test_a_late_collective_blocks_nothing_but_itself() -> None:
    """Rank 2 begins number 0 only after five seconds; the others finish 1 to 9 long before."""

    def program(wire: VirtualWire) -> list[float]:
        me = Rank(wire)
        tensors = [integers(me.rank, 30_000) for _ in range(10)]
        finished = [math.inf] * 10
        numbers = list(range(10)) if wire.rank != 2 else list(range(1, 10))
        pending = {number: me.start(Kind.ALL_REDUCE, "ring", tensors[number], sequence=number) for number in numbers}
        for number in range(1, 10):
            pending[number].wait()
            finished[number] = wire.now()
        if wire.rank == 2:
            wire.compute(5.0 - wire.now())
            pending[0] = me.start(Kind.ALL_REDUCE, "ring", tensors[0], sequence=0)
        pending[0].wait()
        finished[0] = wire.now()
        assert all(torch.equal(tensor, total(3, 30_000)) for tensor in tensors)
        return finished

    for finished in run_virtual(3, program, model=NetworkModel(Link(latency_s=1e-3, bytes_per_s=1e8))):
        assert max(finished[1:]) < 0.1
        assert 5.0 < finished[0] < 5.1


def test_segments_overlap_the_rounds_of_a_chain() -> None:
    """A chain of depth h in k segments takes about (h + k) messages' time, not h * k."""

    def program(wire: VirtualWire, segment_bytes: int) -> float:
        Rank(wire).run(Kind.BROADCAST, "chain", torch.ones(250_000), segment_bytes=segment_bytes)
        return wire.now()

    model = NetworkModel(Link(latency_s=1e-4, bytes_per_s=1e8))
    whole = max(run_virtual(8, program, 10**9, model=model))
    cut = max(run_virtual(8, program, 20_000, model=model))
    assert whole == pytest.approx(7 * (0.01 + 1e-4), rel=0.05)
    assert cut == pytest.approx(0.01 + 6 * 2e-4 + 7 * 1e-4, rel=0.1)


# Bytes, memory and run-ahead ---------------------------------------------------------------------------------------


def told(me: Rank, entry: catalogue.Entry, length: int) -> int:
    """Bytes with which a receiver tells its senders that it is there: in rooted kinds, where they hear nothing else."""
    plan = catalogue.plan(entry.kind, entry.name, me.rank, me.size)
    if entry.with_root is None:
        return 0
    sources = {op.peer for op in plan.operations if isinstance(op, Recv)}
    begun = msgspec.msgpack.encode(Begun(me.channel, 0, Request(plan, integers(me.rank, length)).belief))
    return len(sources) * (HEADER_BYTES + len(begun))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: f"{entry.kind.value}-{entry.name}")
def test_the_wire_carries_the_bytes_of_the_plan_and_one_header_for_each_message(entry: catalogue.Entry, size: int) -> None:
    num_chunks = catalogue.plan(entry.kind, entry.name, 0, size).num_chunks
    length = 0 if entry.kind is Kind.BARRIER else 12 * num_chunks

    def program(me: Rank) -> int:
        me.run(entry.kind, entry.name, integers(me.rank, length))
        sends = [op for op in catalogue.plan(entry.kind, entry.name, me.rank, size).operations if isinstance(op, Send)]
        payload = sum(op.hi - op.lo for op in sends) * 12 * 4 if length else 0
        assert me.wire.bytes_sent == payload + len(sends) * HEADER_BYTES + told(me, entry, length)
        return payload

    results = run_ranks(size, program)
    assert max(results) == plan_cost(entry.kind, entry.name, size).sent * length * 4


def test_a_large_collective_costs_one_more_small_message_for_each_source() -> None:
    length = EAGER_BYTES  # four times too large to be sent unasked

    def program(me: Rank) -> int:
        me.all_reduce("ring", integers(me.rank, length))
        return me.wire.bytes_sent

    request = Request(catalogue.plan(Kind.ALL_REDUCE, "ring", 0, 4), torch.zeros(length), channel=1)
    begun = msgspec.msgpack.encode(Begun(*request.name, request.belief))
    assert run_ranks(4, program) == [2 * 3 * length + 6 * HEADER_BYTES + HEADER_BYTES + len(begun)] * 4


def test_work_buffers_are_reused() -> None:
    def program(me: Rank) -> int:
        places = set()
        for _ in range(5):
            pending = me.start(Kind.ALL_REDUCE, "round_robin", integers(me.rank, 50))
            run = me.communicator.runs.get(pending.request.name)
            if run is not None:
                places.add(run.accumulators[1].flat.data_ptr())
            pending.wait()
        return len(places)

    assert max(run_ranks(3, program)) == 1


def test_repeated_collectives_use_the_same_schedule() -> None:
    def program(me: Rank) -> int:
        me.barrier()
        for _ in range(10):
            me.all_reduce("ring", integers(me.rank, 123))
        return 0

    compiled.cache_clear()
    run_ranks(3, program)
    assert compiled.cache_info().misses <= 3 * 2 * 3  # racing threads may each miss once; never once per call
    before = compiled.cache_info().misses
    run_ranks(3, program)
    assert compiled.cache_info().misses == before


def test_a_root_runs_at_most_so_far_ahead_of_a_receiver_that_has_not_begun() -> None:
    count = 3 * EAGER_AHEAD

    def program(wire: VirtualWire) -> int:
        me = Rank(wire)
        tensors = [integers(me.rank, 4) + number for number in range(count)]
        begin = 0
        if wire.rank == 1:
            wire.compute(1.0)  # everything that was sent ahead has arrived by now, and lies in the inbox
            begin = sum(type(item).__name__ == "Arrival" for item in wire._inbox)
        pending = [me.start(Kind.BROADCAST, "binomial", tensor) for tensor in tensors]
        for one in pending:
            one.wait()
        assert all(torch.equal(tensor, integers(0, 4) + number) for number, tensor in enumerate(tensors))
        return begin

    assert run_virtual(2, program, model=NetworkModel(Link(latency_s=1e-5))) == [0, EAGER_AHEAD]


def test_a_root_that_runs_ahead_on_threads_is_followed_by_all() -> None:
    entered = threading.Event()

    def program(me: Rank) -> None:
        tensors = [integers(me.rank, 4) + number for number in range(700)]
        if me.rank:
            assert entered.wait(20)
        pending = [me.start(Kind.BROADCAST, "binomial", tensor) for tensor in tensors]
        entered.set()
        for one in pending:
            one.wait()
        assert all(torch.equal(tensor, integers(0, 4) + number) for number, tensor in enumerate(tensors))

    run_ranks(3, program)


# With a thread of its own ------------------------------------------------------------------------------------------


def on_thread(wire: Wire, body: object) -> object:
    thread = CommunicationThread(Communicator(wire, PATIENT))
    try:
        return body(thread)  # type: ignore[operator]
    finally:
        thread.stop(5.0)
        wire.close()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_communication_thread_works_while_the_caller_does_something_else(size: int) -> None:
    def program(wire: Wire) -> None:
        def body(thread: CommunicationThread) -> None:
            tensors = [integers(wire.rank, 100 + 3000 * number) for number in range(12)]
            pending = [
                thread.start(Request(catalogue.plan(Kind.ALL_REDUCE, name, wire.rank, size), tensor, sequence=number))
                for number, (name, tensor) in enumerate(zip(ALL_REDUCES, tensors, strict=False))
            ]
            for one in pending:
                one.wait()
            assert all(torch.equal(tensor, total(size, tensor.numel())) for tensor in tensors)

        on_thread(wire, body)

    run_threads(size, program, wires=threads_world(size, check=True))


def test_what_is_under_way_when_the_thread_stops_fails_and_what_comes_later_too() -> None:
    wires = threads_world(2)
    thread = CommunicationThread(Communicator(wires[0], PATIENT))
    plan = catalogue.plan(Kind.ALL_REDUCE, "ring", 0, 2)
    before = thread.start(Request(plan, torch.zeros(3)))
    thread.stop(5.0)
    after = thread.start(Request(plan, torch.zeros(3), sequence=1))
    for pending in (before, after):
        with pytest.raises(StrettoError, match="the job was shut down"):
            pending.wait()


def test_a_bug_in_the_loop_reaches_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    wires = threads_world(2)
    thread = CommunicationThread(Communicator(wires[0], PATIENT))

    def burst(source: int, body: bytes) -> None:
        raise ZeroDivisionError("a bug")

    thread.loop.call(lambda: wires[0].listen(40, burst)).result(10)
    pending = thread.start(Request(catalogue.plan(Kind.ALL_REDUCE, "ring", 0, 2), torch.zeros(3)))
    wires[1].post(0, 40, b"")
    with pytest.raises(StrettoError, match="the communication thread failed: ZeroDivisionError") as caught:
        pending.wait()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "the communication thread failed" in caplog.text
    thread.stop(5.0)


def test_a_bug_at_the_beginning_of_a_collective_reaches_the_caller_too(caplog: pytest.LogCaptureFixture) -> None:
    wires = threads_world(2)
    thread = CommunicationThread(Communicator(wires[0], PATIENT))
    scattered = torch.zeros(4, 4).t()  # a request promises contiguous memory
    pending = thread.start(Request(catalogue.plan(Kind.ALL_REDUCE, "ring", 0, 2), scattered))
    with pytest.raises(StrettoError, match="rank 0 could not carry out all_reduce") as caught:
        pending.wait()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "Traceback" in caplog.text and "the communication thread failed" not in caplog.text
    thread.stop(5.0)
