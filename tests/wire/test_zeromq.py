"""The encrypted wire: the contract, peers that send anything at all, strangers at the port."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import pytest
import zmq

from stretto.errors import ConfigurationError, FrameError, PeerLost, UnreachableError, WireError
from stretto.launching.peers import Peer
from stretto.launching.zap import secure_client
from stretto.testing import run_threads, wait_for
from stretto.timeouts import Timeouts
from stretto.wire import frames, zeromq_meeting
from stretto.wire.base import Tag, Wire
from stretto.wire.framed import FramedWire
from stretto.wire.frames import FrameKind
from stretto.wire.zeromq import ZeroMQWire
from stretto.wire.zeromq_meeting import STRANGERS_BYTES
from stretto.wire.zeromq_watch import ConnectionEvent, Seen
from wire.contract import Meeting, WireContract, body, exchange_once, progress_until, receive
from wire.socket_world import (
    BAD_FRAMES,
    DECODING_TOPIC,
    HARMLESS_FRAMES,
    NONCE,
    PATIENT,
    ROGUE,
    SECRET,
    TAG_INDEX,
    background,
    blamed,
    check_bad,
    check_gone_before_connecting,
    check_harmless,
    check_mutations,
    check_numbers,
    check_overdraft,
    check_unasked,
    connect_all,
    frame,
    good_frame,
    peak_memory_grows_by,
    peer_of,
    socket_world,
    wait_until,
    wires_of,
    world_with_a_rogue,
    zeromq,
)


class TestZeroMQKeepsTheContract(WireContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        with socket_world(size, zeromq(shared_memory=False)) as wires:
            yield wires


class TestZeroMQWithSharedMemoryKeepsTheContract(WireContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        with socket_world(size, zeromq()) as wires:
            yield wires


# A peer that misbehaves.


def say(rogue: FramedWire, to: int, *parts: bytes) -> None:
    assert isinstance(rogue, ZeroMQWire)
    rogue._connections[to].dealer.send_multipart(parts, zmq.NOBLOCK)


@pytest.mark.parametrize("what", BAD_FRAMES)
def test_a_bad_frame_ends_the_receive_with_the_rank_and_harms_nobody_else(what: str) -> None:
    check_bad(zeromq(), say, BAD_FRAMES[what], twice=what.endswith("twice"))


@pytest.mark.parametrize("what", HARMLESS_FRAMES)
def test_what_is_odd_but_harmless_changes_nothing(what: str) -> None:
    check_harmless(zeromq(), say, HARMLESS_FRAMES[what])


def test_a_peer_that_sends_more_than_its_credit_is_lost() -> None:
    check_overdraft(zeromq(), say)


def test_a_peer_that_announces_a_payload_twice_is_lost() -> None:
    check_numbers(zeromq(), say)


def test_a_peer_that_sends_too_much_that_nobody_asked_for_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    check_unasked(zeromq(), say, monkeypatch)


@pytest.mark.parametrize("seed", range(6))
def test_changed_frames_never_crash_a_wire(seed: int) -> None:
    check_mutations(zeromq(), say, seed)


BULK = frame(FrameKind.BULK, ROGUE, declared=16, index=TAG_INDEX, dtype=1, number=1)


@pytest.mark.parametrize(
    "parts",
    [
        (good_frame(), b"one part too many"),
        (good_frame()[:40], good_frame()[40:]),
        (b"",),
        (b"", b"", b"", b""),
        (BULK,),
        (BULK, bytes(15)),
        (BULK, bytes(17)),
        (BULK, bytes(16), bytes(16)),
        (good_frame()[:50],),
        (good_frame() + b"more",),
    ],
)
def test_a_message_of_the_wrong_parts_ends_the_receive_with_the_rank(parts: tuple[bytes, ...]) -> None:
    with world_with_a_rogue(zeromq()) as wires:
        handle, arrived = receive(wires[0], ROGUE, Tag(1, 0, TAG_INDEX), 16, 1)
        say(wires[ROGUE], 0, *parts)
        with pytest.raises((FrameError, PeerLost)) as caught:
            wait_for(wires[0], handle)
        assert blamed(caught.value) == ROGUE and arrived == []


def test_a_message_over_the_limit_is_not_let_in_and_its_sender_is_lost() -> None:
    with world_with_a_rogue(zeromq()) as wires:
        handle, _ = receive(wires[0], ROGUE, Tag(1, 0, TAG_INDEX), 16, 1)
        rogue = wires[ROGUE]
        assert isinstance(rogue, ZeroMQWire)
        too_much = bytes(rogue._part_bytes + frames.HEADER_BYTES + 1)

        def hear() -> None:
            rogue._connections[0].dealer.send(too_much, zmq.NOBLOCK, copy=False)
            with pytest.raises(PeerLost) as caught:
                wait_for(wires[0], handle)
            assert caught.value.rank == ROGUE

        assert peak_memory_grows_by(hear) < 64 << 20
        assert "its connection closed" in wires[0].lost[ROGUE].reason  # and nobody looked at what it had sent


def test_messages_longer_than_a_part_arrive_in_one_piece() -> None:
    with socket_world(2, zeromq(shared_memory=False)) as wires:
        part_bytes = wires[0]._part_bytes  # type: ignore[attr-defined]
        lengths = [part_bytes, part_bytes + 1, 3 * part_bytes + 5]
        controls = [part_bytes - frames.HEADER_BYTES + more for more in (-1, 0, 1)] + [frames.MAX_POST_BYTES]
        assert part_bytes < frames.MAX_POST_BYTES

        def program(wire: FramedWire) -> None:
            peer = 1 - wire.rank
            heard: list[bytes] = []
            wire.listen(DECODING_TOPIC, lambda source, text: heard.append(text))
            for number, num_bytes in enumerate(lengths):
                sent = wire.send(memoryview(body(wire.rank, peer, 0, num_bytes)), peer, Tag(1, number, 0), 0)
                handle, arrived = receive(wire, peer, Tag(1, number, 0), num_bytes)
                wait_for(wire, sent, handle)
                assert arrived == [body(peer, wire.rank, 0, num_bytes)]
            for num_bytes in controls:
                wire.post(peer, DECODING_TOPIC, body(wire.rank, peer, 0, num_bytes))
            progress_until(wire, lambda: len(heard) == len(controls), "the control messages")
            assert heard == [body(peer, wire.rank, 0, num_bytes) for num_bytes in controls]
            Meeting(wire)()

        run_threads(2, program, wires=wires)


def test_a_peer_that_gave_us_up_is_lost_to_us_too() -> None:
    with socket_world(2, zeromq()) as wires:

        def program(wire: FramedWire) -> None:
            handle, _ = receive(wire, 1 - wire.rank, Tag(1, 0, 0), 16, 1)
            if wire.rank == 0:
                wire._lose(1, "for a reason of its own")
            with pytest.raises(PeerLost):
                wait_for(wire, handle)

        run_threads(2, program, wires=wires)


# Strangers.


def dealer_of(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.ROUTING_ID, b"\1\0\0\0" + bytes(8))  # what rank 1 would use
    return dealer


def connection_to(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


@contextmanager
def strangers(address: str, kind: str) -> Iterator[None]:
    """Somebody at the port who lacks the secret, and who would be taken for rank 1 if he were let in."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    raw: list[socket.socket] = []
    try:
        if kind in ("silent", "200 silent", "garbage"):
            for _ in range(200 if kind.startswith("200") else 3):
                raw.append(connection_to(address))
                if kind == "garbage":
                    raw[-1].sendall(os.urandom(4096))
        else:
            dealer = dealer_of(context)  # which connects again and again
            if kind == "wrong secret":
                secure_client(dealer, bytes(32))
            elif kind == "secret of the file":
                secure_client(dealer, SECRET)
            dealer.connect(f"tcp://{address}")
            dealer.send(frame(FrameKind.INLINE, 1, bytes(16)))
        yield
    finally:
        for connection in raw:
            connection.close()
        context.destroy(0)


@pytest.mark.parametrize("kind", ["silent", "200 silent", "garbage", "no credentials", "wrong secret", "secret of the file"])
def test_strangers_at_the_port_are_turned_away_and_the_job_forms(kind: str) -> None:
    with wires_of(2, zeromq()) as wires, strangers(wires[0].address, kind):
        connect_all(wires, [peer_of(wire) for wire in wires])
        run_threads(2, exchange_once, wires=wires)
        assert not wires[0]._parked  # nothing of what the stranger sent came in
        run_threads(2, lambda wire: wire.close(), wires=wires)


def test_after_the_job_has_formed_nobody_can_connect() -> None:
    with socket_world(2, zeromq()) as wires:
        for wire in wires:
            with pytest.raises(ConnectionRefusedError):
                connection_to(wire.address)
        run_threads(2, exchange_once, wires=wires)


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def flood(wire: FramedWire, count: int, stack: ExitStack) -> None:
    """So many strangers, each of whom announces and sends the longest command that ZeroMQ's protocol lets them."""
    assert isinstance(wire, ZeroMQWire)
    before, limit = wire._doorstep.sent_away, wire._doorstep.limit
    num_bytes = wire._part_bytes
    words = GREETING + b"\x06" + num_bytes.to_bytes(8, "big") + bytes(num_bytes - 1)
    for _ in range(count):
        stranger = stack.enter_context(connection_to(wire.address))
        with suppress(OSError):  # sent away already
            stranger.sendall(words)
    wait_until(lambda: wire._doorstep.sent_away - before >= count - limit, "the end of the flood")


def test_where_a_port_cannot_be_hidden_strangers_of_a_running_job_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq_meeting, "hide", lambda listener: False)
    with socket_world(2, zeromq()) as wires, ExitStack() as stack:
        assert peak_memory_grows_by(lambda: flood(wires[0], 60, stack)) < 64 << 20
        run_threads(2, exchange_once, wires=wires)


def test_strangers_cost_a_worker_that_waits_for_a_peer_a_bounded_amount_of_memory() -> None:
    with wires_of(2, zeromq()) as wires, ExitStack() as stack:
        peers = [peer_of(wire) for wire in wires]
        with background(lambda: wires[0].connect(peers, NONCE)):  # ZeroMQ listens until the other one has come
            wait_until(lambda: bool(wires[0].peers), "ZeroMQ at the port")
            grown = peak_memory_grows_by(lambda: flood(wires[0], 100, stack))
            wires[1].connect(peers, NONCE)
        assert grown < 56 << 20  # 40 for strangers, some for those that leave while others come
        run_threads(2, exchange_once, wires=wires)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 256, 1024, 10_000])
def test_what_strangers_can_cost_does_not_depend_on_the_world_size(world_size: int) -> None:
    wire = ZeroMQWire(0, world_size, secret=SECRET)
    try:
        assert wire._doorstep.limit * wire._part_bytes <= STRANGERS_BYTES
        assert wire._part_bytes >= zeromq_meeting.INLINE_BYTES  # which shares a part with its header
    finally:
        wire.abandon()


def test_peers_that_are_sent_away_while_too_many_are_at_the_door_come_again() -> None:
    with wires_of(4, zeromq()) as wires:
        doorsteps = [wire._doorstep for wire in wires]  # type: ignore[attr-defined]
        limits = [doorstep.limit for doorstep in doorsteps]
        for doorstep in doorsteps:
            doorstep.limit = 0
        with background(lambda: connect_all(wires, [peer_of(wire) for wire in wires])):
            wait_until(lambda: all(doorstep.sent_away > 3 for doorstep in doorsteps), "peers that are sent away")
            for doorstep, limit in zip(doorsteps, limits, strict=True):
                doorstep.limit = limit
        run_threads(4, lambda wire: Meeting(wire)(), wires=wires)
        assert not any(wire.lost for wire in wires)


def test_a_peer_that_is_sent_away_after_its_handshake_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 does not look at what has come, and strangers push rank 1 off its doorstep."""
    with wires_of(2, zeromq()) as wires, ExitStack() as stack:
        first, second = wires
        assert isinstance(first, ZeroMQWire) and isinstance(second, ZeroMQWire)
        weigh, sent_away = second._weigh, []

        def look(event: ConnectionEvent) -> None:
            connection = second._connections[0]
            if event == ConnectionEvent(connection.number_watched, Seen.DISCONNECTED) and connection.connected:
                sent_away.append(event)
            weigh(event)

        monkeypatch.setattr(second, "_weigh", look)
        monkeypatch.setattr(first, "_drain", lambda: False)
        with background(lambda: connect_all(wires, [peer_of(wire) for wire in wires])):
            wait_until(lambda: 0 in second._connections and second._connections[0].connected, "the handshake")
            for _ in range(first._doorstep.limit):
                stack.enter_context(connection_to(first.address))
            wait_until(lambda: bool(sent_away), "the end of the connection")
            monkeypatch.undo()
        run_threads(2, exchange_once, wires=wires)
        assert not {**first.lost, **second.lost, **first._suspects, **second._suspects}


@pytest.mark.parametrize("differs", ["secret", "job"])
def test_a_wrong_secret_or_the_key_of_another_job_is_named_at_the_deadline(differs: str) -> None:
    def make(rank: int, size: int) -> FramedWire:
        return ZeroMQWire(rank, size, secret=bytes([rank * (differs == "secret")]) * 32, timeouts=Timeouts(connect_s=0.5))

    with wires_of(2, make) as wires:
        peers = [peer_of(wire) for wire in wires]

        def program(wire: FramedWire) -> str:
            with pytest.raises(UnreachableError) as caught:
                wire.connect(peers, bytes([wire.rank * (differs == "job")]) * 32)
            return str(caught.value)

        for text in run_threads(2, program, wires=wires):
            assert "somebody answers there, and does not know this job's secret" in text


@pytest.mark.parametrize("gone", [0, 2])
def test_a_worker_that_ends_between_meeting_and_connecting_is_named_at_once(gone: int) -> None:
    check_gone_before_connecting(zeromq(timeouts=PATIENT), gone)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"rank 0 cannot listen on 127.0.0.1:{port}"):
            ZeroMQWire(0, 2, secret=SECRET, port=port)


def test_a_peer_that_does_not_answer_is_named_at_the_deadline() -> None:
    quick = Timeouts(connect_s=0.5, silence_s=5)

    def make(rank: int, size: int) -> ZeroMQWire:
        return ZeroMQWire(rank, 2, secret=SECRET, timeouts=quick)

    with wires_of(1, make) as wires, socket.create_server(("127.0.0.1", 0)) as idle:
        absent = Peer(1, 1, "here", "{}:{}".format(*idle.getsockname()), os.getpid())
        with pytest.raises(UnreachableError, match=f"rank 0 could not reach rank 1 at {absent.address} within 0.5 s"):
            wires[0].connect([peer_of(wires[0]), absent], NONCE)


# Who goes.


def test_a_message_sent_without_a_copy_is_done_only_when_it_has_arrived() -> None:
    num_bytes = 1 << 20
    with socket_world(2, zeromq(shared_memory=False)) as wires:
        data = memoryview(bytearray(num_bytes))
        sent = wires[0].send(data, 1, Tag(1, 0, 0), 0)
        wires[0].progress(0)
        assert not sent.done
        handle, arrived = receive(wires[1], 0, Tag(1, 0, 0), num_bytes)
        wait_for(wires[1], handle)
        wires[1].progress(0)  # sends the acknowledgement
        wait_for(wires[0], sent)
        assert len(arrived[0]) == num_bytes


def test_sends_under_way_to_a_peer_that_dies_end_with_an_error() -> None:
    with socket_world(2, zeromq(shared_memory=False)) as wires:
        sent = wires[0].send(memoryview(bytearray(1 << 20)), 1, Tag(1, 0, 0), 0)
        wires[1].abandon()
        with pytest.raises(WireError) as caught:
            wait_for(wires[0], sent)
        assert isinstance(caught.value, PeerLost) and caught.value.rank == 1
        assert "its connection closed without a goodbye" in str(caught.value)  # a moment ago it spoke: it was not silent
        progress_until(wires[0], lambda: 1 in wires[0].lost, "the loss")


def test_a_stranger_that_left_does_not_take_the_peer_along_that_got_his_descriptor() -> None:
    """The coordinator's look at the port is such a stranger: descriptors are used again, news of their end comes late."""
    for _ in range(4):
        with wires_of(2, zeromq()) as wires:
            for wire in wires:
                host, _, port = wire.address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=30).close()
            connect_all(wires, [peer_of(wire) for wire in wires])

            def program(wire: FramedWire) -> None:
                end = wire.now() + 0.25  # longer than the grace in which a suspect is not yet lost
                while wire.now() < end:
                    wire.progress(0.05)
                assert not wire.lost

            run_threads(2, program, wires=wires)
            run_threads(2, lambda wire: wire.close(), wires=wires)
