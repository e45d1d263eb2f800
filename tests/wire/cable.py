"""A cable between two wires that a test can cut: it passes on what comes, and notes when it last did."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time

from stretto.launching.peers import Peer


class Cable:
    """Connect to `peer` instead of to the wire behind it. Once cut, both sides stay connected, and nothing passes any more."""

    def __init__(self, to: Peer) -> None:
        host, _, port = to.address.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        own_address = "{}:{}".format(*self._listener.getsockname())
        self.peer = Peer(to.rank, to.local_rank, to.host, own_address, to.pid)
        self.last_passed: dict[str, float] = {}  # "to" the peer or "from" it -> when
        self._ends: dict[int, tuple[socket.socket, str]] = {}  # descriptor -> where to pass on what comes there, and which way
        self._held: list[socket.socket] = []
        self._cut = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="cable", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        self._cut.set()

    def close(self) -> None:
        self._closing = True
        self._thread.join(30)
        for each in [self._listener, *self._held]:
            each.close()

    def _run(self) -> None:
        while not self._closing:
            watched = [self._listener.fileno(), *self._ends]
            readable = select.select([] if self._cut.is_set() else watched, [], [], 0.01)[0]
            for descriptor in readable:
                if descriptor == self._listener.fileno():
                    self._join()
                elif descriptor in self._ends and not self._cut.is_set():
                    self._pass_on(descriptor)

    def _join(self) -> None:
        near, _ = self._listener.accept()
        self._held.append(near)
        with contextlib.suppress(OSError):  # nobody there (any more): the other side finds out by itself
            far = socket.create_connection(self._target, timeout=30)
            self._held.append(far)
            self._ends |= {near.fileno(): (far, "to"), far.fileno(): (near, "from")}

    def _pass_on(self, descriptor: int) -> None:
        other, way = self._ends[descriptor]
        with contextlib.suppress(OSError):
            data = os.read(descriptor, 1 << 16)
            if data:
                self.last_passed[way] = time.monotonic()
                other.sendall(data)
                return
            other.shutdown(socket.SHUT_WR)
        del self._ends[descriptor]
