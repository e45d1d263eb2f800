"""All-reduces whose messages are encoded: same bits on all ranks, as many bytes as promised, errors that name the sender."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from collectives.ranks import ALL_REDUCES, PATIENT, Rank, bits, floats, integers, run_ranks
from stretto.collectives import catalogue
from stretto.collectives.execute import Communicator
from stretto.collectives.message_codec import COMPLETED_ONCE, MessageCodec
from stretto.collectives.plan import Kind, chunk_start
from stretto.collectives.request import DEFAULT_SEGMENT_BYTES, Pending, Request
from stretto.collectives.run import EAGER_BYTES
from stretto.collectives.schedule import Action, Schedule, Task, compile_encoded, compile_plan
from stretto.errors import ConfigurationError, FrameError, MalformedPayload, RankMismatch
from stretto.job import Job
from stretto.observe.trace import Tracer
from stretto.testing import run_jobs, run_threads, run_virtual
from stretto.testing.network_model import Link, NetworkModel
from stretto.wire.base import Wire
from stretto.wire.frames import HEADER_BYTES
from wire.socket_world import Make, socket_world, tcp, zeromq

UNIT = 8
SEGMENT_BYTES = 30  # two units of 12 bytes, and some
SIZES = [1, 2, 3, 4, 5, 7, 8]
WORLDS = [(name, size) for name in COMPLETED_ONCE for size in (SIZES if name in ("ring", "halving_doubling") else (2, 3, 8))]
MODEL = NetworkModel(Link(latency_s=1e-4, bytes_per_s=1e8))


@dataclass(frozen=True, slots=True)
class Int8:
    """Each unit: a float32 scale, then a signed byte per element; x is sent as rint(x / scale).

    The scale is max|x| / 127 rounded up to 16 significant bits, so code * scale is exact in float32 and the largest code is 127:
    what is decoded has the scale it had.
    """

    unit: int = UNIT
    spoils: bool = field(default=False, repr=False)  # writes a code that no encoder writes

    def num_bytes(self, count: int) -> int:
        return count + 4 * math.ceil(count / self.unit)

    def encode(self, values: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
        assert out.size == self.num_bytes(values.size)
        for part, coded in self._rows(values, out):
            largest = np.abs(part).max(axis=1)
            raised = (largest / np.float32(127)).view(np.uint32) + np.uint32(0xFF) & np.uint32(0xFFFFFF00)
            scale = np.where(largest < 1e-30, 0, raised.view(np.float32)).astype(np.float32)
            codes = np.rint(part / np.where(scale == 0, np.inf, scale).astype(np.float32)[:, None]).astype(np.int8)
            coded[:, :4] = scale[:, None].view(np.uint8)
            coded[:, 4:] = 128 if self.spoils else codes.view(np.uint8)

    def add(self, payload: NDArray[np.uint8], values: NDArray[np.float32]) -> None:
        for part, coded in self._rows(values, payload):
            part += self._decode(coded)

    def copy(self, payload: NDArray[np.uint8], values: NDArray[np.float32]) -> None:
        for part, coded in self._rows(values, payload):
            part[:] = self._decode(coded)

    def settle(self, values: NDArray[np.float32]) -> None:
        values[:] = quantised(Int8(self.unit), values)  # a spoiler holds what it should have sent

    def _rows(self, values: NDArray[np.float32], coded: NDArray[np.uint8]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """All whole units as the rows of a matrix, and the shorter one as another."""
        whole, rest = divmod(values.size, self.unit)
        cut, coded_cut = whole * self.unit, whole * (self.unit + 4)
        parts = [(values[:cut].reshape(whole, self.unit), coded[:coded_cut].reshape(whole, self.unit + 4))] if whole else []
        return parts + ([(values[cut:].reshape(1, rest), coded[coded_cut:].reshape(1, rest + 4))] if rest else [])

    def _decode(self, coded: NDArray[np.uint8]) -> NDArray[np.float32]:
        scale, codes = np.ascontiguousarray(coded[:, :4]).view(np.float32), coded[:, 4:].view(np.int8)
        if not (np.isfinite(scale).all() and (scale >= 0).all() and (codes > -128).all()):
            raise MalformedPayload("a code of -128")
        decoded: NDArray[np.float32] = codes.astype(np.float32) * scale
        return decoded


def quantised(codec: MessageCodec, values: NDArray[np.float32]) -> NDArray[np.float32]:
    payload, decoded = np.empty(codec.num_bytes(values.size), np.uint8), np.empty_like(values)
    codec.encode(values, payload)
    codec.copy(payload, decoded)
    return decoded


def start(
    me: Rank, algorithm: str, tensor: torch.Tensor, codec: MessageCodec | None, op: str = "sum", segment_bytes: int = 1 << 20
) -> Pending:
    group = 2 if algorithm == "hierarchical" else 1
    plan = catalogue.plan(Kind.ALL_REDUCE, algorithm, me.rank, me.size, group=group)
    me.sequences[me.channel] += 1
    return me.communicator.start(
        Request(plan, tensor, op, me.channel, me.sequences[me.channel], segment_bytes, message_codec=codec)
    )


def reduce(
    me: Rank, algorithm: str, tensor: torch.Tensor, codec: MessageCodec | None, op: str = "sum", **options: int
) -> torch.Tensor:
    start(me, algorithm, tensor, codec, op, **options).wait()
    return tensor


def lengths(size: int) -> list[int]:
    """Nothing, one, fewer than ranks, less than a unit, fewer units than ranks, not divisible, several segments."""
    return sorted({0, 1, max(1, size - 1), UNIT - 1, UNIT + 1, 3 * UNIT * size, 5 * UNIT * size + 5})


def inputs(size: int, length: int) -> NDArray[np.float64]:
    return np.stack([floats(rank, length).numpy().astype(np.float64) for rank in range(size)])


def assert_near(result: torch.Tensor, size: int, op: str) -> None:
    """P - 1 additions, each of something rounded to half a scale, and the end rounded once more. A scale is 1/127 of the largest
    partial sum in the unit."""
    exact = inputs(size, result.numel())
    error = np.abs(result.numpy().astype(np.float64) * (size if op == "mean" else 1) - exact.sum(0))
    largest = np.abs(exact).sum(0)
    for first in range(0, result.numel(), UNIT):
        bound = size * largest[first : first + UNIT].max() / 254 * (1 + size / 254 + 1e-4)
        assert error[first : first + UNIT].max() <= bound


# The test's own codec ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1000])
def test_the_hop_of_these_tests_obeys_the_laws(length: int) -> None:
    codec = Int8()
    payload, again = np.empty(codec.num_bytes(length), np.uint8), np.empty(codec.num_bytes(length), np.uint8)
    values = floats(0, length).numpy()
    values[:1] = 0.0
    codec.encode(values, payload)
    codec.settle(values)
    codec.encode(values, again)
    assert bytes(payload) == bytes(again)
    assert length == 0 or not np.array_equal(values, floats(0, length).numpy())


# Which plans -------------------------------------------------------------------------------------------------------


class Symbols:
    """Expressions by number: x_r, Q(a) with Q(Q(a)) = Q(a), and a + b = b + a."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[Any, ...], int] = {}
        self.encoded: set[int] = set()

    def of(self, *key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def q(self, a: int) -> int:
        number = a if a in self.encoded else self.of("Q", a)
        self.encoded.add(number)
        return number


class SymbolicRank:
    """One rank's schedule, carried out on symbols as the executor does it with a codec."""

    def __init__(self, rank: int, schedule: Schedule, length: int, symbols: Symbols) -> None:
        self.rank, self.schedule, self.symbols = rank, schedule, symbols
        self.values = [[symbols.of("x", rank, i) for i in range(length)], [-1] * length]
        self.counts = list(schedule.num_dependencies)
        self.ready = deque(number for number, count in enumerate(self.counts) if count == 0)

    def go_on(self, travelling: dict[tuple[int, int, int], int]) -> bool:
        """Do what can be done; whether there was anything."""
        waiting: deque[int] = deque()
        moved = False
        while self.ready:
            number = self.ready.popleft()
            task = self.schedule.tasks[number]
            if task.action is Action.RECEIVE and (task.peer, self.rank, task.index) not in travelling:
                waiting.append(number)
                continue
            self.carry_out(task, travelling)
            moved = True
            for successor in self.schedule.successors[number]:
                self.counts[successor] -= 1
                if self.counts[successor] == 0:
                    self.ready.append(successor)
        self.ready = waiting
        return moved

    def carry_out(self, task: Task, travelling: dict[tuple[int, int, int], int]) -> None:
        symbols, target, place = self.symbols, self.values[task.buffer], task.start
        assert task.stop == place + 1
        if task.action is Action.SEND:
            travelling[self.rank, task.peer, task.index] = symbols.q(target[place])
            return
        received = task.action is Action.RECEIVE
        value = travelling.pop((task.peer, self.rank, task.index)) if received else self.values[task.source][place]
        if task.add:
            value = symbols.of("+", *sorted((target[place], value)))
        target[place] = symbols.q(value) if task.final else value


def all_end_alike(algorithm: str, size: int) -> bool:
    group = 2 if algorithm == "hierarchical" else 1
    plans = [catalogue.plan(Kind.ALL_REDUCE, algorithm, rank, size, group=group) for rank in range(size)]
    symbols, length = Symbols(), plans[0].num_chunks
    ranks = [SymbolicRank(plan.rank, compile_plan(plan, length, 1), length, symbols) for plan in plans]
    travelling: dict[tuple[int, int, int], int] = {}
    while any([rank.go_on(travelling) for rank in ranks]):
        pass
    assert not travelling and not any(rank.ready for rank in ranks)
    return all(rank.values[0] == ranks[0].values[0] for rank in ranks)


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_hops_are_allowed_exactly_where_all_ranks_end_with_one_expression(algorithm: str) -> None:
    alike = [all_end_alike(algorithm, size) for size in (2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16)]
    assert all(alike) if algorithm in COMPLETED_ONCE else not any(alike)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", COMPLETED_ONCE)
def test_one_rank_completes_each_element_and_no_plan_needs_a_second_buffer(algorithm: str, size: int) -> None:
    completed: Counter[int] = Counter()
    for rank in range(size):
        plan = catalogue.plan(Kind.ALL_REDUCE, algorithm, rank, size, group=2 if algorithm == "hierarchical" else 1)
        assert not plan.needs_work_buffer
        for task in compile_encoded(plan, 200, SEGMENT_BYTES, Int8()).tasks:
            completed.update(range(task.start, task.stop) if task.final else ())
    assert completed == ({} if size == 1 else dict.fromkeys(range(200), 1))


@pytest.mark.parametrize("algorithm", ["butterfly", "round_robin", "all_to_all"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_plans_that_complete_an_element_at_several_ranks_are_refused_on_every_rank(algorithm: str, rank: int) -> None:
    plan = catalogue.plan(Kind.ALL_REDUCE, algorithm, rank, 3)
    with pytest.raises(ConfigurationError, match=f"'{algorithm}' with message_codec=Int8.*different bits.\nWrite one of: ring, "):
        Request(plan, torch.zeros(4), message_codec=Int8())


@pytest.mark.parametrize("entry", [entry for entry in catalogue.CATALOGUE.values() if entry.kind is not Kind.ALL_REDUCE],
                         ids=lambda entry: f"{entry.kind.value}-{entry.name}")  # fmt: skip
def test_other_kinds_are_refused(entry: catalogue.Entry) -> None:
    with pytest.raises(ConfigurationError, match="Leave the codec out, or ask for an all_reduce"):
        Request(catalogue.plan(entry.kind, entry.name, 0, 2), torch.zeros(4), message_codec=Int8())


@pytest.mark.parametrize("op", ["min", "max", "product"])
def test_other_operations_are_refused(op: str) -> None:
    with pytest.raises(ConfigurationError, match=f"op='{op}': it adds .* Use op='sum' or 'mean'"):
        Request(catalogue.plan(Kind.ALL_REDUCE, "ring", 0, 2), torch.zeros(4), op, message_codec=Int8())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigurationError, match=f"of {dtype}: it encodes float32. Convert the tensor"):
        Request(catalogue.plan(Kind.ALL_REDUCE, "ring", 0, 2), torch.zeros(4, dtype=dtype), message_codec=Int8())


# How they are cut --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 64, 333])
@pytest.mark.parametrize("algorithm", COMPLETED_ONCE)
def test_no_message_cuts_a_unit_or_is_longer_than_a_segment(algorithm: str, length: int) -> None:
    codec = Int8()
    for rank in range(5):
        schedule = compile_encoded(catalogue.plan(Kind.ALL_REDUCE, algorithm, rank, 5), length, SEGMENT_BYTES, codec)
        for task in schedule.tasks:
            assert task.start % UNIT == 0 and (task.stop % UNIT == 0 or task.stop == length)
            assert codec.num_bytes(task.stop - task.start) <= SEGMENT_BYTES
        one_by_one = compile_encoded(catalogue.plan(Kind.ALL_REDUCE, algorithm, rank, 5), length, 1, codec)
        assert all(task.stop - task.start <= UNIT for task in one_by_one.tasks)


# What they leave ---------------------------------------------------------------------------------------------------


def every_length(me: Rank, algorithm: str) -> list[bytes]:
    seen = []
    for length in lengths(me.size):
        for op in ("sum", "mean"):
            result = reduce(me, algorithm, floats(me.rank, length), Int8(), op, segment_bytes=SEGMENT_BYTES)
            assert_near(result, me.size, op)
            seen.append(bits(result))
    return seen


@pytest.mark.parametrize(("algorithm", "size"), WORLDS)
def test_all_ranks_hold_the_same_bits_near_the_sum(algorithm: str, size: int) -> None:
    results = run_ranks(size, lambda me: every_length(me, algorithm), eager=size % 2 == 0)
    assert len(set(map(tuple, results))) == 1


@pytest.mark.parametrize("algorithm", COMPLETED_ONCE)
def test_in_virtual_time_too(algorithm: str) -> None:
    results = run_virtual(5, lambda wire: every_length(Rank(wire), algorithm), model=MODEL, check=True)
    assert len(set(map(tuple, results))) == 1


def plain_ring(size: int, length: int, op: str, codec: MessageCodec) -> NDArray[np.float32]:
    """Chunk c, of whole units, begins at rank c and goes round: quantised, added to the next rank's, and once more at the end."""
    result = np.empty(length, np.float32)
    vectors = [floats(rank, length).numpy() for rank in range(size)]
    num_units = math.ceil(length / codec.unit)
    for chunk in range(size):
        first, last = (min(length, codec.unit * chunk_start(c, num_units, size)) for c in (chunk, chunk + 1))
        travelling = vectors[chunk][first:last]
        for turn in range(1, size):
            travelling = vectors[(chunk + turn) % size][first:last] + quantised(codec, travelling)
        if op == "mean":
            travelling = travelling * np.float32(1 / size)
        result[first:last] = quantised(codec, travelling) if size > 1 else travelling
    return result


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_ring_does_what_a_plain_loop_does_to_the_bit(size: int, op: str) -> None:
    def program(me: Rank) -> None:
        for length in lengths(size):
            result = reduce(me, "ring", floats(me.rank, length), Int8(), op, segment_bytes=SEGMENT_BYTES)
            assert bits(result) == plain_ring(size, length, op, Int8()).tobytes()

    run_ranks(size, program)


@settings(max_examples=20, deadline=None)
@given(
    algorithm=st.sampled_from(COMPLETED_ONCE),
    size=st.integers(1, 8),
    length=st.integers(0, 300),
    unit=st.integers(1, 40),
    segment_bytes=st.sampled_from([1, 30, 100, DEFAULT_SEGMENT_BYTES]),
    op=st.sampled_from(["sum", "mean"]),
    eager=st.booleans(),
)
def test_any_of_them_leaves_the_same_bits_everywhere(
    algorithm: str, size: int, length: int, unit: int, segment_bytes: int, op: str, eager: bool
) -> None:
    results = run_ranks(
        size,
        lambda me: bits(reduce(me, algorithm, floats(me.rank, length), Int8(unit), op, segment_bytes=segment_bytes)),
        eager=eager,
    )
    assert len(set(results)) == 1


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling"])
def test_large_ones_that_wait_for_their_receivers_are_right_too(algorithm: str, eager: bool) -> None:
    codec, length = Int8(256), EAGER_BYTES + 1000

    def program(me: Rank) -> bytes:
        pending = start(me, algorithm, floats(me.rank, length), codec, "mean", segment_bytes=5000)
        pending.wait()
        return bits(pending.request.tensor)

    results = run_ranks(3, program, eager=eager)
    assert len(set(results)) == 1
    exact = inputs(3, length).mean(0)
    assert np.abs(np.frombuffer(results[0], np.float32) - exact).max() < np.abs(inputs(3, length)).max() / 50


def test_a_job_takes_a_hop() -> None:
    def program(job: Job) -> bytes:
        tensor = floats(job.rank, 100)
        job.start(Kind.ALL_REDUCE, tensor, "ring", op="mean", message_codec=Int8()).wait()
        assert job.ledger.bytes_sent < 100 * 4
        return bits(tensor)

    assert run_jobs(3, program) == [plain_ring(3, 100, "mean", Int8()).tobytes()] * 3


# Bytes and memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "size"), WORLDS)
def test_the_ledger_and_the_wire_count_encoded_bytes(algorithm: str, size: int) -> None:
    """Each element is added P - 1 times and copied P - 1 times, whoever does it."""
    codec, length = Int8(), 3 * UNIT * size + 3

    def program(me: Rank) -> tuple[dict[int, int], dict[int, int]]:
        pending = start(me, algorithm, floats(me.rank, length), codec, segment_bytes=SEGMENT_BYTES)
        pending.wait()
        schedule = compile_encoded(pending.request.plan, length, SEGMENT_BYTES, codec)
        num_sent = sum(task.action is Action.SEND for task in schedule.tasks)
        ledger = me.communicator.ledger
        assert me.wire.bytes_sent == ledger.bytes_sent + num_sent * HEADER_BYTES
        return {peer: ledger.sent_to(peer) for peer in range(size)}, {peer: ledger.received_from(peer) for peer in range(size)}

    results = run_ranks(size, program)
    assert sum(sum(sent.values()) for sent, _ in results) == 2 * (size - 1) * codec.num_bytes(length)
    assert all(results[a][0][b] == results[b][1][a] for a in range(size) for b in range(size))


def test_whether_it_is_small_is_decided_by_encoded_bytes() -> None:
    codec = Int8(256)
    fits = EAGER_BYTES // codec.num_bytes(256) * 256
    assert codec.num_bytes(fits) <= EAGER_BYTES < codec.num_bytes(fits + 256) < 4 * fits

    def program(me: Rank) -> list[bool]:
        unannounced = []
        for length in (fits, fits + 256):
            before = me.wire.bytes_sent, me.communicator.ledger.bytes_sent
            reduce(me, "ring", integers(me.rank, length), codec)
            sent = me.wire.bytes_sent - before[0] - (me.communicator.ledger.bytes_sent - before[1])
            unannounced.append(sent == 2 * HEADER_BYTES)
        return unannounced

    assert run_ranks(2, program) == [[True, False]] * 2


class Watched(Int8):
    """Remembers its payloads, weakly."""

    payloads: list[weakref.ref[NDArray[np.uint8]]]

    def encode(self, values: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
        Int8.encode(self, values, out)
        self.payloads.append(weakref.ref(out))


def test_a_payload_lives_until_it_is_sent_and_no_longer() -> None:
    """The wire checks that what it reads late is what it was given; afterwards nobody keeps it."""

    def program(me: Rank) -> int:
        codec = Watched()
        object.__setattr__(codec, "payloads", [])
        for algorithm in ("ring", "halving_doubling"):
            reduce(me, algorithm, floats(me.rank, 500), codec, segment_bytes=SEGMENT_BYTES)
        me.barrier()
        gc.collect()
        assert len(codec.payloads) > 40
        return sum(payload() is not None for payload in codec.payloads)

    for eager in (True, False):
        assert run_ranks(3, program, eager=eager) == [0, 0, 0]


@pytest.mark.parametrize(
    "make", [tcp(), tcp(shared_memory=False), tcp(shared_memory=False, write_in_thread=True), zeromq(shared_memory=False)],
    ids=["shared memory", "tcp", "tcp by a thread", "zeromq"],
)  # fmt: skip
def test_sockets_and_shared_memory_hold_payloads_as_long_as_they_need_them(make: Make) -> None:
    codec, length = Int8(256), 300_000  # two messages each way and phase

    def program(wire: Wire) -> bytes:
        return bits(reduce(Rank(wire), "ring", floats(wire.rank, length), codec, segment_bytes=80_000))

    with socket_world(2, make) as wires:
        assert run_threads(2, program, wires=wires) == [plain_ring(2, length, "sum", codec).tobytes()] * 2


def test_spans_tell_of_encoded_bytes() -> None:
    def program(wire: Wire) -> list[tuple[str, int]]:
        tracer, plan = Tracer(), catalogue.plan(Kind.ALL_REDUCE, "ring", wire.rank, 2)
        communicator = Communicator(wire, PATIENT, tracer=tracer)
        communicator.start(Request(plan, floats(wire.rank, 4 * UNIT), channel=1, message_codec=Int8())).wait()
        return sorted((span.category, span.num_bytes) for span in tracer.spans if span.category != "wait")

    payload = Int8().num_bytes(2 * UNIT)
    once_added_once_copied = sorted([(category, payload) for category in ("send", "receive", "reduce")] * 2)
    assert run_virtual(2, program, model=MODEL) == [once_added_once_copied] * 2


# What goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [100, 5 * EAGER_BYTES // 4], ids=["small", "large"])
@pytest.mark.parametrize("other", [None, Int8(16)], ids=["none", "another"])
def test_ranks_with_different_hops_find_out(other: Int8 | None, length: int) -> None:
    def program(wire: Wire) -> str:
        me = Rank(wire)
        with pytest.raises(RankMismatch) as caught:
            reduce(me, "ring", floats(me.rank, length), other if me.rank == 1 else Int8())
        assert bits(reduce(me, "ring", floats(me.rank, 50), Int8())) == plain_ring(3, 50, "sum", Int8()).tobytes()
        return str(caught.value)

    for text in run_virtual(3, program, model=MODEL):
        assert f"ranks 0, 2: all_reduce(float32[{length}], op=sum, message_codec=Int8(unit=8), algorithm=ring" in text
        odd = "" if other is None else ", message_codec=Int8(unit=16)"
        assert f"rank 1: all_reduce(float32[{length}], op=sum{odd}, algorithm=ring" in text


def spoiled(me: Rank, algorithm: str, spoiler: int, length: int) -> FrameError | None:
    """What comes of an all-reduce in which one rank sends nonsense; then that the next one is as it should be."""
    error = None
    try:
        reduce(me, algorithm, floats(me.rank, length), Int8(spoils=me.rank == spoiler), segment_bytes=4096)
    except FrameError as problem:
        error = problem
    assert bits(reduce(me, "ring", floats(me.rank, 50), Int8())) == plain_ring(me.size, 50, "sum", Int8()).tobytes()
    return error


@pytest.mark.parametrize("length", [100, 5 * EAGER_BYTES // 4], ids=["small", "large"])
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "direct"])
def test_a_payload_that_cannot_be_decoded_is_an_error_on_every_rank(algorithm: str, eager: bool, length: int) -> None:
    for error in run_ranks(4, lambda me: spoiled(me, algorithm, 1, length), eager=eager):
        assert error is not None and error.rank == 1
        assert f"of all_reduce(float32[{length}], op=sum, message_codec=Int8(unit=8), algorithm={algorithm}" in str(error)
        assert str(error).endswith("a code of -128")


def test_that_holds_for_what_is_copied_as_well() -> None:
    """Here rank 0 sends only results. It may have returned when others find out that they are nonsense."""
    results = run_virtual(4, lambda wire: spoiled(Rank(wire), "master_worker", 0, 100), model=MODEL)
    assert all(error is not None and error.rank == 0 for error in results[1:])
