"""The door of a worker: however many strangers come, they cost little, and workers get in."""

from __future__ import annotations

import errno
import logging
import os
import queue
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from stretto.testing import run_threads
from stretto.wire import door as door_module
from stretto.wire.door import Door, hide, listen
from stretto.wire.handshake import Life, handshake_key, introduce_ourselves
from stretto.wire.tcp import TcpWire
from stretto.wire.zeromq import ZeroMQWire
from wire.contract import exchange_once
from wire.socket_world import background, socket_world, wait_until

KEY = handshake_key(bytes(32))


@contextmanager
def door_of(limit: int = 3) -> Iterator[Door]:
    door = Door(Life(0, 0), "127.0.0.1", 0, limit=limit)
    try:
        yield door
    finally:
        door.close()


def knock(door: Door) -> socket.socket:
    host, _, port = door.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def is_open(connection: socket.socket) -> bool:
    """Whether the other side has not hung up (yet)."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def come_in(door: Door) -> int:
    """A worker comes; the rank that the door believes it is."""
    with knock(door) as connection, background(lambda: introduce_ourselves(connection, KEY, Life(5, 0), Life(0, 0))):
        life, accepted = door.arrived.get(timeout=30)
        accepted.close()
    return life.rank


def test_one_too_many_and_the_oldest_is_sent_away() -> None:
    with door_of(limit=3) as door, ExitStack() as stack:
        door.open(KEY)
        waiting = [stack.enter_context(knock(door)) for _ in range(8)]
        wait_until(lambda: not any(map(is_open, waiting[:5])), "the end of the oldest")
        assert all(map(is_open, waiting[5:]))
        assert come_in(door) == 5


def test_a_worker_that_comes_before_the_key_is_known_waits_for_it() -> None:
    with door_of() as door, knock(door) as early, knock(door) as silent:
        with background(lambda: introduce_ourselves(early, KEY, Life(7, 0), Life(0, 0))):
            with pytest.raises(queue.Empty):
                door.arrived.get(timeout=0.05)
            door.open(KEY)
            life, accepted = door.arrived.get(timeout=30)
        with accepted:
            assert life == (7, 0) and is_open(early) and is_open(silent)


def test_who_says_nothing_has_to_go_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "HANDSHAKE_S", 0.05)
    with door_of() as door, knock(door) as silent:
        wait_until(lambda: not is_open(silent), "the end of its time")


class Stingy(socket.socket):
    """A listening socket that gives nothing away at first."""

    def accept(self) -> tuple[socket.socket, object]:
        if self.answers:
            raise OSError(self.answers.pop(), "by request of the test")
        return super().accept()

    answers: list[int]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOBUFS, errno.ECONNABORTED, errno.EPROTO, errno.EIO])
def test_a_door_that_could_not_accept_for_a_while_does_so_again(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[int] = []

    def stingy(rank: int, host: str, port: int) -> socket.socket:
        made = Stingy(fileno=listen(rank, host, port).detach())
        made.setblocking(False)
        made.answers = answers
        return made

    monkeypatch.setattr(door_module, "listen", stingy)
    with door_of(limit=100) as door, knock(door) as first:
        door.open(KEY)
        wait_until(lambda: len(door._visitors) == 1, "the first visitor")
        answers += [number] * 3
        assert come_in(door) == 5
        assert answers == []  # it had to be asked again each time
        out_of_descriptors = number in (errno.EMFILE, errno.ENOBUFS)
        assert is_open(first) != out_of_descriptors  # whose descriptor was needed


def test_a_flood_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "stretto.wire"), door_of() as door:
        for _ in range(50):
            with knock(door) as stranger:
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * 9)
        wait_until(lambda: door._turned_away == 50, "the end of the flood")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("user", ["the same user", "nobody"])
def test_a_hidden_port_refuses_whoever_comes_and_keeps_whoever_is_there(user: str) -> None:
    if user == "nobody" and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with listen(0, "127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), timeout=30) as early:
        assert _as(user, lambda: hide(listener))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(listener.getsockname(), timeout=30)
        accepted, _ = listener.accept()
        with accepted:
            early.sendall(b"still here")
            assert accepted.recv(100) == b"still here"


def _as(user: str, action: Callable[[], bool]) -> bool:
    """Run in a child, which may become another user without a way back; the descriptors are the same."""
    child = os.fork()
    if child == 0:
        if user == "nobody":
            os.setresuid(65534, 65534, 65534)
        os._exit(0 if action() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("kind", [TcpWire, ZeroMQWire])
def test_workers_connect_over_ipv6_as_well(kind: type[TcpWire] | type[ZeroMQWire]) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with socket_world(2, lambda rank, size: kind(rank, size, secret=bytes(32), bind="::1"), hosts=["here", "there"]) as wires:
        assert wires[0].address.startswith("[::1]:")
        run_threads(2, exchange_once, wires=wires)


def test_who_takes_over_gets_a_port_that_listens_and_nobody_waits_at_it() -> None:
    with door_of() as door, knock(door) as early:
        wait_until(lambda: len(door._visitors) == 1, "the visitor")
        listener = door.take_over()
        assert not is_open(early)
        with knock(door) as late:
            listener.setblocking(True)
            accepted, address = listener.accept()
            with accepted:
                assert address == late.getsockname()
