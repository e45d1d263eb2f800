"""What ZeroMQ accepts is bounded, and its reports about that do not hold it up."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import zmq

from stretto.launching.doorstep import UNKNOWN, Doorstep
from stretto.launching.monitor import next_report, open_monitor


@contextmanager
def router() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes], int]]:
    """A listening socket, the reports about it, and its port."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        listening = context.socket(zmq.ROUTER)
        listening.setsockopt(zmq.BACKLOG, 4096)
        monitor = open_monitor(listening, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        yield listening, monitor, listening.bind_to_random_port("tcp://127.0.0.1")
        listening.disable_monitor()
    finally:
        context.destroy(0)


def note(doorstep: Doorstep, monitor: zmq.Socket[bytes], number: int) -> list[str]:
    """Read so many reports; from where those came that left."""
    left = []
    for _ in range(number):
        assert monitor.poll(30_000), "no report"
        report = next_report(monitor)
        assert report is not None
        if report.event == zmq.EVENT_ACCEPTED:
            doorstep.came(report.value)
        else:
            left.append(doorstep.left(report.value))
    return left


def has_ended(connection: socket.socket) -> bool:
    connection.settimeout(30)
    while True:
        try:
            if not connection.recv(100):
                return True
        except ConnectionResetError:
            return True


def test_one_too_many_and_zeromq_loses_the_oldest_that_has_said_nothing() -> None:
    doorstep = Doorstep(limit=3)
    with router() as (listening, monitor, port), ExitStack() as stack:
        worker = listening.context.socket(zmq.DEALER)
        worker.connect(f"tcp://127.0.0.1:{port}")
        worker.send(b"I am one of you")
        _, message = listening.recv_multipart(copy=False)
        note(doorstep, monitor, 1)
        doorstep.admitted(int(message.get(zmq.SRCFD)))
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(5)
        ]  # fmt: skip
        assert note(doorstep, monitor, 7) == [UNKNOWN] * 2  # five came, and two of them had to go
        assert doorstep.sent_away == 2 and all(map(has_ended, strangers[:2]))
        strangers[4].close()
        assert note(doorstep, monitor, 1) == ["127.0.0.1"]
        worker.send(b"still here")
        assert listening.recv_multipart()[1] == b"still here"


def test_a_descriptor_that_stands_for_something_else_by_now_is_left_alone() -> None:
    """Reports come late: the connection is gone, and the kernel has given its number to another one."""
    doorstep = Doorstep(limit=1)
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:

        def connection() -> tuple[socket.socket, socket.socket]:
            near = stack.enter_context(socket.create_connection(server.getsockname(), timeout=30))
            return near, stack.enter_context(server.accept()[0])

        (_, accepted), (friend, ours), (_, last) = connection(), connection(), connection()
        doorstep.came(accepted.fileno())
        os.dup2(ours.fileno(), accepted.fileno())
        doorstep.came(last.fileno())  # one too many
        assert doorstep.sent_away == 1
        friend.sendall(b"hello")
        assert ours.recv(100) == b"hello"  # it has not been shut down


def test_reports_that_nobody_reads_do_not_keep_zeromq_from_its_work() -> None:
    """As when another thread holds the interpreter lock while somebody scans the port."""
    with router() as (listening, monitor, port):
        # More than twice as many reports as fit into a queue of the usual length, of which each end has one.
        worker = listening.context.socket(zmq.DEALER)
        worker.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(2200):
            socket.create_connection(("127.0.0.1", port), timeout=30).close()
        worker.send(b"here")
        assert listening.poll(30_000), "ZeroMQ's thread stands still"
        assert listening.recv_multipart()[1] == b"here"
        assert monitor.poll(0)


@pytest.mark.parametrize("descriptor", [0, 9_999])
def test_what_is_no_connection_is_noted_and_left_alone(descriptor: int) -> None:
    doorstep = Doorstep(limit=1)
    doorstep.came(descriptor)
    doorstep.came(10_000)
    assert doorstep.left(10_000) == UNKNOWN and doorstep.left(7) == UNKNOWN
