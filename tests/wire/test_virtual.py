from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from stretto.collectives.plan import chunk_start
from stretto.errors import ConfigurationError, PeerLost, WireError, WireTimeout
from stretto.testing import run_threads, run_virtual, wait_for
from stretto.testing.envelopes import BufferChanged
from stretto.testing.faults import Cut, Fault, Kill, Pause
from stretto.testing.network_model import Constant, ExponentialDelay, Link, NetworkModel, Uniform
from stretto.testing.virtual import VirtualDeadlock, VirtualWire, virtual_world
from stretto.testing.virtual_links import OutOfBudget
from stretto.wire.base import Tag, Wire
from wire.contract import Meeting, WireContract, receive, send

TAG = Tag(1, 0, 0)
ALPHA, RATE = 5e-5, 1.25e8
MODEL = NetworkModel(Link(latency_s=ALPHA, bytes_per_s=RATE))


class TestAVirtualWorldKeepsTheContract(WireContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        yield virtual_world(size, MODEL, seed=1, check=True)


class TestAVirtualWorldWithABadNetworkKeepsTheContract(WireContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        link = Link(latency_s=1e-3, bytes_per_s=1e8, jitter=ExponentialDelay(1e-3), loss=0.2, retransmit_s=0.01)
        yield virtual_world(size, NetworkModel(link), seed=2, check=True)


def ring_all_reduce(wire: Wire, num_bytes: int) -> float:
    """The ring of card 1.1 without arithmetic: 2(P-1) steps, one chunk to the right and one from the left in each."""
    size, rank = wire.world_size, wire.rank
    memory = memoryview(bytearray(num_bytes))
    bounds = [chunk_start(index, num_bytes, size) for index in range(size + 1)]
    for step in range(2 * (size - 1)):
        outgoing, incoming = (rank - step) % size, (rank - step - 1) % size
        sent = wire.send(memory[bounds[outgoing] : bounds[outgoing + 1]], (rank + 1) % size, Tag(1, 0, step), 0)
        length = bounds[incoming + 1] - bounds[incoming]
        got = wire.recv((rank - 1) % size, Tag(1, 0, step), length, 0, lambda view: None)
        wait_for(wire, sent, got)
    return wire.now()


def two_ranks(
    sender: Callable[[VirtualWire], Any],
    receiver: Callable[[VirtualWire], Any],
    model: NetworkModel = MODEL,
    faults: Sequence[Fault] = (),
) -> list[Any]:
    return run_virtual(2, lambda wire: (sender if wire.rank == 0 else receiver)(wire), model=model, faults=faults, timeout_s=20)


def get(wire: VirtualWire, num_bytes: int, tag: Tag = TAG, source: int = 0, timeout_s: float = 100.0) -> float:
    handle, _ = receive(wire, source, tag, num_bytes)
    wait_for(wire, handle, timeout_s=timeout_s)
    return wire.now()


def put(wire: VirtualWire, num_bytes: int, tag: Tag = TAG, to: int = 1) -> float:
    wait_for(wire, send(wire, to, tag, bytes(num_bytes)), timeout_s=100.0)
    return wire.now()


def compute(wire: VirtualWire, seconds: float) -> float:
    wire.compute(seconds)
    return wire.now()


# Time


@pytest.mark.parametrize("size", [2, 4, 7, 64])
def test_a_ring_all_reduce_takes_what_the_formula_says(size: int) -> None:
    num_bytes = size * 1000
    times = run_virtual(size, ring_all_reduce, num_bytes, model=MODEL, seed=size)

    assert times == pytest.approx([2 * (size - 1) * (ALPHA + num_bytes / size / RATE)] * size, rel=1e-9)


def test_a_message_leaves_after_its_bytes_and_arrives_a_latency_later() -> None:
    assert two_ranks(lambda wire: put(wire, 1_000_000), lambda wire: get(wire, 1_000_000)) == pytest.approx(
        [1e6 / RATE, ALPHA + 1e6 / RATE]
    )


def test_one_sender_sends_one_message_at_a_time() -> None:
    def program(wire: VirtualWire) -> float:
        if wire.rank > 0:
            return get(wire, 1_000_000)
        wait_for(wire, *(send(wire, peer, TAG, bytes(1_000_000)) for peer in (1, 2, 3)))
        return wire.now()

    one = 1e6 / RATE
    expected = [3 * one, ALPHA + one, ALPHA + 2 * one, ALPHA + 3 * one]
    assert run_virtual(4, program, model=MODEL) == pytest.approx(expected)


def test_one_receiver_receives_one_message_at_a_time() -> None:
    def program(wire: VirtualWire) -> float:
        if wire.rank > 0:
            return put(wire, 1_000_000, to=0)
        wait_for(wire, *(receive(wire, peer, TAG, 1_000_000)[0] for peer in (1, 2, 3)))
        return wire.now()

    assert run_virtual(4, program, model=MODEL)[0] == pytest.approx(ALPHA + 3e6 / RATE)


def test_sending_and_receiving_go_on_at_the_same_time() -> None:
    def program(wire: VirtualWire) -> float:
        sent = send(wire, 1 - wire.rank, TAG, bytes(1_000_000))
        wait_for(wire, sent, receive(wire, 1 - wire.rank, TAG, 1_000_000)[0])
        return wire.now()

    assert run_virtual(2, program, model=MODEL) == pytest.approx([ALPHA + 1e6 / RATE] * 2)


def test_every_link_may_be_different() -> None:
    model = NetworkModel(Link(latency_s=1.0), {(0, 1): Link(latency_s=2.0, bytes_per_s=10.0), (0, 2): Link(latency_s=3.0)})

    def program(wire: VirtualWire) -> float:
        if wire.rank == 0:
            wait_for(wire, send(wire, 1, TAG, bytes(10)), send(wire, 2, TAG, bytes(10)))
            return wire.now()
        return get(wire, 10)

    # The second message waits a second until the slow first one has left.
    assert run_virtual(3, program, model=model) == pytest.approx([1.0, 3.0, 4.0])


def test_a_message_over_a_long_link_does_not_keep_out_one_that_comes_before_it() -> None:
    model = NetworkModel(Link(bytes_per_s=10.0), {(0, 2): Link(latency_s=50.0, bytes_per_s=10.0)})

    def program(wire: VirtualWire) -> float:
        if wire.rank == 0:
            return put(wire, 10, to=2)
        if wire.rank == 1:
            wire.compute(1.0)
            return put(wire, 10, to=2)
        return get(wire, 10, source=1)

    assert run_virtual(3, program, model=model)[2] == pytest.approx(2.0)


def test_a_slow_rank_slows_every_chunk_that_passes_it() -> None:
    slow_link = replace(MODEL.default, bytes_per_s=MODEL.default.bytes_per_s / 10)
    slow = replace(MODEL, links={pair: slow_link for pair in permutations(range(4), 2) if 2 in pair})
    times = run_virtual(4, ring_all_reduce, 4000, model=slow)

    # Each chunk makes six hops around a ring of four, two links of which are slow: the worst crosses four slow ones.
    assert max(times) == pytest.approx(4 * (ALPHA + 10 * 1000 / RATE) + 2 * (ALPHA + 1000 / RATE))


def test_computation_passes_time_and_overlaps_with_messages() -> None:
    def receiver(wire: VirtualWire) -> float:
        handle, _ = receive(wire, 0, TAG, 1_000_000)
        wire.compute(1.0)
        assert not handle.done  # it has arrived, but nobody has looked
        wire.progress(0)
        assert handle.done
        return wire.now()

    assert two_ranks(lambda wire: put(wire, 1_000_000), receiver)[1] == 1.0


def test_a_rank_that_has_returned_does_not_hold_the_clock() -> None:
    assert two_ranks(lambda wire: wire.now(), lambda wire: compute(wire, 1e5)) == [0.0, 1e5]


def test_when_all_wait_time_jumps_to_the_first_timeout() -> None:
    def program(wire: VirtualWire) -> float:
        wire.progress(100.0 * (wire.rank + 1))
        return wire.now()

    assert run_threads(3, program, wires=virtual_world(3)) == [100.0, 200.0, 300.0]


def test_polling_does_not_stop_the_clock() -> None:
    def receiver(wire: VirtualWire) -> int:
        handle, _ = receive(wire, 0, TAG, 0)
        polls = 0
        while not handle.done:
            wire.progress(0)
            polls += 1
        return polls

    polls = two_ranks(lambda wire: put(wire, 0), receiver)[1]
    assert 40 <= polls <= 60  # 50 microseconds of latency, one microsecond for each poll


# Reproducibility


def busy_program(wire: VirtualWire) -> tuple[float, list[int]]:
    heard: list[int] = []
    wire.listen(20, lambda source, body: heard.append(source))
    for step in range(5):
        wire.compute(1e-3 * ((wire.rank * 7 + step) % 3))
        for peer in range(wire.world_size):
            if peer != wire.rank:
                wire.post(peer, 20, bytes([step]))
    while len(heard) < 5 * (wire.world_size - 1):
        wire.progress(1.0)
    return wire.now(), heard


def trace_of(seed: int) -> tuple[str, list[Any]]:
    link = Link(latency_s=1e-3, bytes_per_s=1e6, jitter=ExponentialDelay(1e-3), loss=0.1, retransmit_s=5e-3)
    wires = virtual_world(7, NetworkModel(link), seed)
    results = run_threads(7, busy_program, wires=wires)
    wires[0].world.assert_all_fired()
    return wires[0].world.trace.hexdigest(), results


def test_one_seed_gives_one_history_and_another_seed_another() -> None:
    first = trace_of(3)

    assert all(trace_of(3) == first for _ in range(3))
    assert trace_of(4)[0] != first[0]


def test_the_trace_of_a_known_run_is_known() -> None:
    """Same bits in every process and on every machine: no hash seed, no thread timing, no address is in it."""
    wires = virtual_world(2, MODEL, seed=0)
    run_threads(2, ring_all_reduce, 10, wires=wires)
    assert wires[0].world.trace.hexdigest() == "42fdfa79bdb5b5901b780b7f90227895"


# Faults


@pytest.mark.parametrize("jitter", [Constant(0.5), Uniform(0.1, 0.2), ExponentialDelay(0.1)])
def test_jitter_delays_but_keeps_the_order(jitter: Any) -> None:
    def sender(wire: VirtualWire) -> None:
        for number in range(100):
            wire.post(1, 20, bytes([number]))

    def receiver(wire: VirtualWire) -> list[int]:
        heard: list[int] = []
        wire.listen(20, lambda source, body: heard.append(body[0]))
        while len(heard) < 100:
            wire.progress(10.0)
        assert wire.now() > 0.1
        return heard

    assert two_ranks(sender, receiver, NetworkModel(Link(jitter=jitter)))[1] == list(range(100))


def test_a_lost_transmission_comes_again_later() -> None:
    link = Link(latency_s=1.0, loss=0.9, retransmit_s=1000.0)
    wires = virtual_world(2, NetworkModel(link), seed=0)
    arrival = run_threads(2, lambda wire: put(wire, 1) if wire.rank == 0 else get(wire, 1, timeout_s=1e5), wires=wires)[1]
    wires[0].world.assert_all_fired()
    assert arrival == 1.0 + 1000.0 * wires[0].world.fired["loss"]


def wait_for_the_end(wire: VirtualWire, source: int) -> tuple[float, str]:
    handle, _ = receive(wire, source, Tag(9, 9, 9), 1)
    try:
        wait_for(wire, handle, timeout_s=1000.0)
    except PeerLost as lost:
        return wire.now(), lost.reason
    raise AssertionError("nobody was lost")


@pytest.mark.parametrize("size", [2, 3, 7])
def test_a_killed_rank_is_found_lost_after_detect_s(size: int) -> None:
    model = NetworkModel(detect_s=0.25)
    fault = Kill(1, at_s=2.0)
    results = run_virtual(size, wait_for_the_end, 1, model=model, faults=[fault])

    assert results.pop(1) is None
    assert results == [(2.25, "its process died")] * (size - 1)


def test_a_rank_can_be_killed_at_the_nth_event_and_while_it_computes() -> None:
    def program(wire: VirtualWire) -> float:
        if wire.rank == 1:
            while True:
                wire.compute(1.0)
        return wait_for_the_end(wire, 1)[0]

    model = NetworkModel(detect_s=0.0)
    assert run_virtual(2, program, model=model, faults=[Kill(1, at_event=3)]) == [3.0, None]
    assert run_virtual(2, program, model=model, faults=[Kill(1, at_s=3.5)]) == [3.5, None]


def test_what_had_not_left_a_killed_rank_does_not_arrive() -> None:
    model = NetworkModel(Link(latency_s=1.0, bytes_per_s=10.0), detect_s=5.0)

    def sender(wire: VirtualWire) -> None:
        whole, part = send(wire, 1, Tag(1, 0, 0), bytes(10)), send(wire, 1, Tag(1, 0, 1), bytes(10))
        wait_for(wire, whole, part)

    def receiver(wire: VirtualWire) -> tuple[list[bytes], list[bytes], float]:
        first, arrived = receive(wire, 0, Tag(1, 0, 0), 10)
        second, cut_short = receive(wire, 0, Tag(1, 0, 1), 10)
        wait_for(wire, first)
        with pytest.raises(PeerLost):
            wait_for(wire, second)
        return arrived, cut_short, wire.now()

    result = two_ranks(sender, receiver, model, [Kill(0, at_s=1.5)])
    assert result == [None, ([bytes(10)], [], 6.5)]


def test_a_short_pause_only_delays() -> None:
    def receiver(wire: VirtualWire) -> float:
        return get(wire, 0)

    faults = [Pause(1, at_s=0.0, for_s=3.0)]
    assert two_ranks(lambda wire: put(wire, 0), receiver, faults=faults)[1] == pytest.approx(3.0)


def test_a_pause_lengthens_a_computation() -> None:
    faults = [Pause(1, at_s=0.5, for_s=3.0)]
    assert two_ranks(lambda wire: None, lambda wire: compute(wire, 1.0), faults=faults)[1] == 4.0


def test_a_rank_paused_longer_than_silence_s_is_lost_on_both_sides() -> None:
    model = NetworkModel(silence_s=2.0)
    faults = [Pause(1, at_s=1.0, for_s=50.0)]
    (found, reason), (resumed, other) = two_ranks(
        lambda wire: wait_for_the_end(wire, 1), lambda wire: wait_for_the_end(wire, 0), model, faults
    )
    assert (found, resumed) == (3.0, 51.0)
    assert "no heartbeat for 2 s" in reason and "no heartbeat" in other


def test_a_cut_that_heals_in_time_only_delays_and_keeps_the_order() -> None:
    def sender(wire: VirtualWire) -> None:
        for number in range(4):
            wire.post(1, 20, bytes([number]))
            wire.compute(1.0)

    def receiver(wire: VirtualWire) -> list[tuple[float, int]]:
        heard: list[tuple[float, int]] = []
        wire.listen(20, lambda source, body: heard.append((wire.now(), body[0])))
        while len(heard) < 4:
            wire.progress(10.0)
        return heard

    faults = [Cut((1,), at_s=0.5, for_s=2.0)]
    assert two_ranks(sender, receiver, NetworkModel(), faults)[1] == [(0.0, 0), (2.5, 1), (2.5, 2), (3.0, 3)]


def test_a_cut_that_lasts_is_a_lost_peer_on_both_sides_and_nothing_else() -> None:
    model = NetworkModel(silence_s=2.0)
    fault = Cut((0,), at_s=1.0, others=(2,))

    def program(wire: VirtualWire) -> tuple[float, dict[int, PeerLost]]:
        while wire.now() < 10.0:
            wire.progress(10.0 - wire.now())
        return wire.now(), wire.lost

    results = run_virtual(3, program, model=model, faults=[fault])
    assert [sorted(lost) for _, lost in results] == [[2], [], [0]]


def test_a_fault_that_comes_too_late_fails_the_test() -> None:
    with pytest.raises(AssertionError, match=r"no effect: Kill\(node=1, at_s=5.0"):
        run_virtual(2, lambda wire: wire.compute(1.0), faults=[Kill(1, at_s=5.0)])


def test_memory_changed_before_its_last_byte_has_left_arrives_changed() -> None:
    def program(wire: VirtualWire) -> bytes | None:
        if wire.rank == 1:
            handle, arrived = receive(wire, 0, TAG, 4)
            wait_for(wire, handle)
            return arrived[0]
        memory = bytearray(b"good")
        sent = wire.send(memoryview(memory), 1, TAG, 0)
        memory[:] = b"evil"
        wait_for(wire, sent)
        memory[:] = b"fine"
        return None

    assert run_virtual(2, program, model=MODEL)[1] == b"evil"
    with pytest.raises(BufferChanged, match="rank 0 changed the 4 bytes"):
        run_virtual(2, program, model=MODEL, check=True)


def test_goodbye_comes_after_everything_sent_before() -> None:
    def receiver(wire: VirtualWire) -> str:
        told: list[PeerLost] = []
        wire.on_lost(told.append)
        get(wire, 1000)
        wire.progress(1.0)
        assert told == [] and wire.said_goodbye(0)
        return wait_for_the_end(wire, 0)[1]

    def sender(wire: VirtualWire) -> None:
        send(wire, 1, TAG, bytes(1000))  # and returns at once, which closes the wire

    assert two_ranks(sender, receiver) == [None, "it left the job"]


# What ends a run


def test_all_waiting_for_ever_is_a_deadlock_and_said_so() -> None:
    def program(wire: VirtualWire) -> None:
        handle, _ = receive(wire, 1 - wire.rank, TAG, 1)
        while not handle.done:
            wire.progress(float("inf"))

    with pytest.raises(VirtualDeadlock, match="rank 0 is waiting in progress, rank 1 is waiting in progress"):
        run_virtual(2, program)


def test_virtual_time_has_a_deadline() -> None:
    wires = virtual_world(2, deadline_s=100.0)

    def program(wire: VirtualWire) -> None:
        while True:
            wire.progress(1.0)

    with pytest.raises(OutOfBudget, match="deadline of 100 s"):
        run_threads(2, program, wires=wires)


def test_a_rank_that_never_starts_is_named() -> None:
    wires = virtual_world(2, stall_s=0.1)
    with pytest.raises(WireError, match="rank 0 has run for 0.1 s"):
        wires[1].progress(1.0)


def test_another_thread_can_wake_a_rank_in_virtual_time() -> None:
    woken = threading.Event()

    def wake() -> None:
        wires[1].wake()
        woken.set()

    def program(wire: VirtualWire) -> float:
        if wire.rank == 0:
            thread = threading.Thread(target=wake)
            thread.start()
            assert woken.wait(10)
            thread.join(10)
            return wire.now()
        wire.progress(50.0)
        return wire.now()

    wires = virtual_world(2)
    assert run_threads(2, program, wires=wires)[1] == 0.0


def test_waiting_in_vain_names_the_peer() -> None:
    def program(wire: VirtualWire) -> None:
        Meeting(wire)()
        if wire.rank == 0:
            with pytest.raises(WireTimeout, match="rank 1 did not take part"):
                get(wire, 1, source=1, timeout_s=600.0)
            assert wire.now() == pytest.approx(600.0, abs=1e-3)
        else:
            wire.compute(700.0)

    run_virtual(2, program, model=MODEL)


@pytest.mark.parametrize(
    "make",
    [
        lambda: virtual_world(0),
        lambda: virtual_world(2, NetworkModel(Link(duplicate=0.1))),
        lambda: virtual_world(2, NetworkModel(Link(reorder=0.1, hold_s=1.0))),
        lambda: virtual_world(2, faults=[Kill(2, at_s=1.0)]),
        lambda: virtual_world(2, faults=[Cut(("a",), at_s=1.0)]),
        lambda: Kill(1),
        lambda: Kill(1, at_s=1.0, at_event=1),
        lambda: Pause(1, at_s=1.0, for_s=0.0),
        lambda: Link(latency_s=-1.0),
        lambda: Link(bytes_per_s=0.0),
        lambda: Link(loss=1.0),
        lambda: Link(reorder=0.5),
        lambda: NetworkModel(silence_s=0.0),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigurationError):
        make()
