"""The encrypted wire: the contract, peers that send anything at all, strangers at the port."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import zmq

from stretto.errors import ConfigurationError, FrameError, PeerLost, SecretError, UnreachableError, WireError
from stretto.job.membership import Peer
from stretto.job.zap import secure_client
from stretto.testing import run_threads, wait_for
from stretto.timeouts import Timeouts
from stretto.wire.base import Tag, Wire
from stretto.wire.framed import FramedWire
from stretto.wire.frames import MAX_PAYLOAD_BYTES, FrameKind
from stretto.wire.zeromq import ZeroMQWire
from wire.contract import WireContract, exchange_once, progress_until, receive
from wire.socket_world import (
    BAD_FRAMES,
    HARMLESS_FRAMES,
    ROGUE,
    SECRET,
    TAG_INDEX,
    blamed,
    check_bad,
    check_harmless,
    check_mutations,
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


class TestEncryptedZeroMQKeepsTheContract(WireContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        with socket_world(size, zeromq(encrypt=True, shared_memory=False)) as wires:
            yield wires


class TestZeroMQWithSharedMemoryKeepsTheContract(WireContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        with socket_world(size, zeromq(encrypt=True)) as wires:
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


@pytest.mark.parametrize("seed", range(6))
def test_changed_frames_never_crash_a_wire(seed: int) -> None:
    check_mutations(zeromq(encrypt=seed % 2 == 0), say, seed)


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
        too_much = bytes(MAX_PAYLOAD_BYTES + 49)

        def hear() -> None:
            rogue = wires[ROGUE]
            assert isinstance(rogue, ZeroMQWire)
            rogue._connections[0].dealer.send(too_much, zmq.NOBLOCK, copy=False)
            with pytest.raises(PeerLost) as caught:
                wait_for(wires[0], handle)
            assert caught.value.rank == ROGUE

        assert peak_memory_grows_by(hear) < 64 << 20


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_peer_that_gave_us_up_is_lost_to_us_too(encrypt: bool) -> None:
    with socket_world(2, zeromq(encrypt=encrypt)) as wires:

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


@contextmanager
def strangers(address: str, kind: str) -> Iterator[None]:
    """Somebody at the port who lacks the secret, and who would be taken for rank 1 if he were let in."""
    host, _, port = address.rpartition(":")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    raw: list[socket.socket] = []
    try:
        if kind in ("silent", "200 silent", "garbage"):
            for _ in range(200 if kind.startswith("200") else 3):
                raw.append(socket.create_connection((host, int(port)), timeout=30))
                if kind == "garbage":
                    raw[-1].sendall(os.urandom(4096))
        else:
            dealer = dealer_of(context)
            if kind == "wrong secret":
                secure_client(dealer, bytes(32), encrypted=True)
            elif kind == "wrong password":
                secure_client(dealer, bytes(32), encrypted=False)
            elif kind == "right password in plain text":
                secure_client(dealer, SECRET, encrypted=False)
            dealer.connect(f"tcp://{address}")
            dealer.send(frame(FrameKind.INLINE, 1, bytes(16)))
        yield
    finally:
        for connection in raw:
            connection.close()
        context.destroy(0)


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("kind", ["silent", "200 silent", "garbage", "no credentials", "wrong secret", "wrong password"])
def test_strangers_at_the_port_are_turned_away_and_the_job_forms(kind: str, encrypt: bool) -> None:
    with wires_of(2, zeromq(encrypt=encrypt)) as wires, strangers(wires[0].address, kind):
        connect_all(wires, [peer_of(wire) for wire in wires])
        run_threads(2, exchange_once, wires=wires)
        assert not wires[0]._parked  # nothing of what the stranger sent came in
        run_threads(2, lambda wire: wire.close(), wires=wires)


def test_who_knows_the_password_but_does_not_encrypt_is_turned_away_from_an_encrypted_job() -> None:
    with wires_of(2, zeromq(encrypt=True)) as wires:
        with strangers(wires[0].address, "right password in plain text"):
            connect_all(wires, [peer_of(wire) for wire in wires])
            run_threads(2, exchange_once, wires=wires)
            assert not wires[0]._parked
        run_threads(2, lambda wire: wire.close(), wires=wires)


def test_strangers_are_refused_by_the_door_and_counted() -> None:
    with wires_of(1, zeromq()) as wires, strangers(wires[0].address, "wrong password"):
        wire = wires[0]
        assert isinstance(wire, ZeroMQWire)
        wait_until(lambda: wire._watcher._zap.refused > 0, "the refusal")
        assert wire._watcher._zap.accepted == 0


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
def test_a_wrong_secret_is_told_before_the_deadline(encrypt: bool) -> None:
    patient = Timeouts(connect_s=50, silence_s=5)

    def make(rank: int, size: int) -> FramedWire:
        return ZeroMQWire(rank, size, secret=bytes([rank]) * 32, encrypt=encrypt, timeouts=patient)

    with wires_of(2, make) as wires:
        peers = [peer_of(wire) for wire in wires]

        def program(wire: FramedWire) -> float:
            start = wire.now()
            with pytest.raises((SecretError, UnreachableError)) as caught:
                wire.connect(peers)
            assert isinstance(caught.value, SecretError), str(caught.value)
            assert "do not share the job's secret" in str(caught.value)
            return wire.now() - start

        assert max(run_threads(2, program, wires=wires)) < 40


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"rank 0 cannot listen on 127.0.0.1:{port}"):
            ZeroMQWire(0, 2, secret=SECRET, port=port)


def test_a_peer_that_does_not_answer_is_named_at_the_deadline() -> None:
    quick = Timeouts(connect_s=0.5, silence_s=5)
    with wires_of(1, lambda rank, size: ZeroMQWire(rank, 2, secret=SECRET, timeouts=quick)) as wires:
        absent = Peer(1, 1, "here", "127.0.0.1:1", os.getpid())
        with pytest.raises(UnreachableError, match="rank 0 could not reach rank 1 at 127.0.0.1:1 within 0.5 s"):
            wires[0].connect([peer_of(wires[0]), absent])


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
