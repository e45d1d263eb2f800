"""The plain wire: the contract, peers that send anything at all, strangers at the port."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from stretto.errors import ConfigurationError, PeerLost, SecretError, UnreachableError
from stretto.launching.peers import Peer
from stretto.testing import run_threads, wait_for
from stretto.timeouts import Timeouts
from stretto.wire.base import Tag, Wire
from stretto.wire.door import HANDSHAKE_S
from stretto.wire.framed import FramedWire
from stretto.wire.tcp import TcpWire
from wire.contract import Meeting, WireContract, exchange_once, progress_until, receive
from wire.socket_world import (
    BAD_FRAMES,
    HARMLESS_FRAMES,
    NONCE,
    PATIENT,
    ROGUE,
    SECRET,
    TAG_INDEX,
    check_bad,
    check_gone_before_connecting,
    check_harmless,
    check_mutations,
    check_numbers,
    check_overdraft,
    check_unasked,
    connect_all,
    good_frame,
    peak_memory_grows_by,
    peer_of,
    socket_world,
    tcp,
    wires_of,
    world_with_a_rogue,
)


class TestTcpKeepsTheContract(WireContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        with socket_world(size, tcp(shared_memory=False)) as wires:
            yield wires


class TestTcpWithSharedMemoryKeepsTheContract(WireContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        with socket_world(size, tcp()) as wires:
            yield wires


class TestTcpWithAWritingThreadKeepsTheContract(WireContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        with socket_world(size, tcp(shared_memory=False, write_in_thread=True)) as wires:
            yield wires


# A peer that misbehaves.


def say(rogue: FramedWire, to: int, frame: bytes) -> None:
    assert isinstance(rogue, TcpWire)
    rogue._connections[to].socket.sendall(frame)


@pytest.mark.parametrize("what", BAD_FRAMES)
def test_a_bad_frame_ends_the_receive_with_the_rank_and_harms_nobody_else(what: str) -> None:
    check_bad(tcp(), say, BAD_FRAMES[what], twice=what.endswith("twice"))


@pytest.mark.parametrize("what", HARMLESS_FRAMES)
def test_what_is_odd_but_harmless_changes_nothing(what: str) -> None:
    check_harmless(tcp(), say, HARMLESS_FRAMES[what])


def test_a_peer_that_sends_more_than_its_credit_is_lost() -> None:
    check_overdraft(tcp(), say)


def test_a_peer_that_announces_a_payload_twice_is_lost() -> None:
    check_numbers(tcp(), say)


def test_a_peer_that_sends_too_much_that_nobody_asked_for_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    check_unasked(tcp(), say, monkeypatch)


class DeafPoller:
    """A poller that sees nothing, so that only what was read ahead is looked at."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        return []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_what_was_read_ahead_of_a_member_that_a_callback_retires_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with wires_of(3, tcp(shared_memory=False)) as wires:
        connect_all(wires, [peer_of(wire) for wire in wires])
        wire, retired = wires[0], list[int]()
        assert isinstance(wire, TcpWire)

        def retire_the_other(source: int, body: bytes) -> None:
            if not retired:
                retired.append(3 - source)
                wire.retire(3 - source, 1)

        wire.listen(900, retire_the_other)
        monkeypatch.setattr(wire, "_poller", DeafPoller(wire._poller))
        for rank in (1, 2):
            wires[rank].post(0, 900, b"")
        wire._unfinished = {1, 2}
        wire.progress(0)
        assert retired and wire.peers == [3 - retired[0]]


@pytest.mark.parametrize("seed", range(10))
def test_changed_frames_never_crash_a_wire(seed: int) -> None:
    check_mutations(tcp(), say, seed)


@pytest.mark.parametrize("length", [1, 47, 48, 63])
def test_a_frame_that_breaks_off_is_a_lost_peer(length: int) -> None:
    with world_with_a_rogue(tcp()) as wires:
        handle, arrived = receive(wires[0], ROGUE, Tag(1, 0, TAG_INDEX), 16, 1)
        say(wires[ROGUE], 0, good_frame()[:length])
        wires[ROGUE].abandon()
        with pytest.raises(PeerLost, match="without a goodbye") as caught:
            wait_for(wires[0], handle)
        assert caught.value.rank == ROGUE and arrived == []


def test_a_frame_may_come_byte_by_byte() -> None:
    with world_with_a_rogue(tcp()) as wires:
        handle, arrived = receive(wires[0], ROGUE, Tag(1, 0, TAG_INDEX), 16, 1)
        for byte in good_frame():
            say(wires[ROGUE], 0, bytes([byte]))
            wires[0].progress(0)
        wait_for(wires[0], handle)
        assert arrived == [bytes(16)]


@pytest.mark.parametrize("what", ["declared over the limit", "declared without end", "declared post over the limit"])
def test_what_is_declared_over_the_limit_is_not_allocated(what: str) -> None:
    with world_with_a_rogue(tcp()) as wires:

        def hear() -> None:
            say(wires[ROGUE], 0, BAD_FRAMES[what])
            progress_until(wires[0], lambda: ROGUE in wires[0].lost, "the loss of the rogue")

        assert peak_memory_grows_by(hear) < 16 << 20
        assert "the limit is" in wires[0].lost[ROGUE].reason


def test_a_peer_of_another_host_is_lost_when_it_is_silent_and_has_no_pulse_either(caplog: pytest.LogCaptureFixture) -> None:
    """The rogue runs no Python any more, as a worker that holds the interpreter lock; then its pulse stops as well."""
    quick = Timeouts(connect_s=40, silence_s=0.5, leave_s=1)
    with caplog.at_level(logging.WARNING, "stretto.wire"), world_with_a_rogue(tcp(timeouts=quick)) as wires:
        rogue = wires[ROGUE]
        assert isinstance(rogue, TcpWire) and rogue._pulse is not None
        pulse = rogue._pulse

        def program(wire: FramedWire) -> None:
            meeting = Meeting(wire)
            handle, _ = receive(wire, ROGUE, Tag(1, 0, 0), 16, 1)
            assert isinstance(wire, TcpWire)
            progress_until(wire, lambda: wire._connections[ROGUE].silent_s > 3 * quick.silence_s, "the silence")
            assert not wire.lost and not handle.done
            meeting(ROGUE)
            if wire.rank == 0:
                pulse.close()
            with pytest.raises(PeerLost, match="silent") as caught:
                wait_for(wire, handle)
            assert caught.value.rank == ROGUE
            assert list(wire.lost) == [ROGUE]
            exchange_once(wire)

        run_threads(2, program, wires=wires[:2])
        rogue._pulse = None
    # No pid: on another host, or in another container, it is that of some other process.
    assert caplog.text.count("but its process is running: it seems to hold the interpreter lock") == 2


# Strangers.


@contextmanager
def strangers(address: str, number: int, words: bytes) -> Iterator[None]:
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        for _ in range(number):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            connection.sendall(words)
        yield


@pytest.mark.parametrize(
    ("number", "words"),
    [(1, b""), (200, b""), (3, b"GET / HTTP/1.0\r\n\r\n" * 9), (3, bytes(10)), (3, b"stretto2" + bytes(32)), (1, bytes(65536))],
    ids=["silent", "200 silent ones", "another protocol", "half a greeting", "a made up greeting", "a flood"],
)  # fmt: skip
def test_strangers_at_the_port_do_not_keep_the_job_from_forming(number: int, words: bytes) -> None:
    with wires_of(3, tcp()) as wires, strangers(wires[0].address, number, words), strangers(wires[1].address, 1, words):
        connect_all(wires, [peer_of(wire) for wire in wires])
        run_threads(3, lambda wire: exchange_once(wire) if wire.rank < 2 else None, wires=wires)
        run_threads(3, lambda wire: wire.close(), wires=wires)
        assert all(wire.said_goodbye(rank) for wire in wires for rank in wire.lost)


def test_strangers_are_logged_unless_they_said_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.DEBUG, "stretto.wire"),
        wires_of(2, tcp()) as wires,
        strangers(wires[0].address, 1, bytes(100)),
        strangers(wires[0].address, 1, b""),
    ):
        connect_all(wires, [peer_of(wire) for wire in wires])
    turned_away = {record.getMessage().rpartition(": ")[2]: record.levelno for record in caplog.records}
    assert turned_away["not a worker of this job"] == logging.WARNING
    assert turned_away["all workers are here"] == logging.DEBUG


def test_after_the_job_has_formed_the_port_is_closed() -> None:
    with socket_world(2, tcp()) as wires:
        host, _, port = wires[0].address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=30)


@pytest.mark.parametrize("differs", ["secret", "job"])
def test_a_wrong_secret_or_the_key_of_another_job_is_told_to_the_one_who_connects_at_once(differs: str) -> None:
    def make(rank: int, size: int) -> TcpWire:
        return TcpWire(rank, size, secret=bytes([rank * (differs == "secret")]) * 32, timeouts=PATIENT)

    with wires_of(2, make) as wires:
        peers = [peer_of(wire) for wire in wires]

        def program(wire: FramedWire) -> str:
            nonce = bytes([wire.rank * (differs == "job")]) * 32
            with pytest.raises(SecretError if wire.rank == 1 else PeerLost) as caught:
                wire.connect(peers, nonce)
            return str(caught.value)

        start = wires[0].now()
        acceptor, connector = run_threads(2, program, wires=wires)
        assert wires[0].now() - start < PATIENT.connect_s / 2
    assert "does not know this job's secret" in connector
    assert acceptor.startswith("rank 1 is lost: nobody listens at")


@pytest.mark.parametrize("gone", range(3))
def test_a_worker_that_ends_between_meeting_and_connecting_is_named_at_once(gone: int) -> None:
    check_gone_before_connecting(tcp(timeouts=PATIENT), gone)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"rank 0 cannot listen on 127.0.0.1:{port}"):
            TcpWire(0, 2, secret=SECRET, port=port)


def test_a_peer_that_does_not_connect_is_named_at_the_deadline() -> None:
    quick = Timeouts(connect_s=0.5, silence_s=5)

    def make(rank: int, size: int) -> TcpWire:
        return TcpWire(rank, 2, secret=SECRET, timeouts=quick)

    with wires_of(1, make) as wires, socket.create_server(("127.0.0.1", 0)) as idle:
        absent = Peer(1, 1, "here", "{}:{}".format(*idle.getsockname()), os.getpid())
        with pytest.raises(UnreachableError, match=f"rank 0 could not reach rank 1 at {absent.address} within 0.5 s"):
            wires[0].connect([peer_of(wires[0]), absent], NONCE)


def test_a_peer_that_does_not_answer_is_named_at_the_deadline() -> None:
    """Not only when the handshake with it has taken all the time that a handshake may take."""
    quick = Timeouts(connect_s=0.3, silence_s=5)

    def make(rank: int, size: int) -> TcpWire:
        return TcpWire(1, 2, secret=SECRET, timeouts=quick)

    with wires_of(1, make) as wires, socket.create_server(("127.0.0.1", 0)) as idle:
        mute = Peer(0, 0, "here", "{}:{}".format(*idle.getsockname()), os.getpid())
        started = time.monotonic()
        with pytest.raises(UnreachableError, match=f"rank 1 could not reach rank 0 at {mute.address} within 0.3 s"):
            wires[0].connect([mute, peer_of(wires[0])], NONCE)
        assert time.monotonic() - started < HANDSHAKE_S - 1


def test_a_peer_that_has_already_left_does_not_keep_others_from_forming_the_job() -> None:
    """Rank 0 may be done, and gone, before rank 2 has heard rank 1's greeting."""
    with wires_of(3, tcp()) as wires:
        wires[2]._left.add(0)
        wires[2].lost[0] = PeerLost(0, "it left the job")
        wires[2]._raise_if_lost()
        wires[2].lost[1] = PeerLost(1, "its connection broke")
        with pytest.raises(PeerLost, match="rank 1"):
            wires[2]._raise_if_lost()
