"""A second thread that writes, where there are processors to spare.

Reading a segment, adding it and writing it on are three passes over the same bytes; one thread can do them at 2-3 GB/s.
With processors to spare the writing goes to this thread (system calls release the interpreter lock), and the
communication thread only reads and adds. Where processors are scarce the extra thread costs more than it gives, and the
wire writes by itself.

A connection is written to by one thread at a time: `connection.handed_over` says that it is this one's. `connection.lock` is for
the queue alone, so that the communication thread can always add to it; while it was also held during system calls, that thread
waited for it 30 % of its time at 10 Gbit/s. Whoever takes memory back or closes the socket waits for `connection.writing`, which
is held during a system call that does not block.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.wire.base import Handle
    from stretto.wire.tcp_connection import TcpConnection


class Writer:
    """Writes what is queued on the connections handed to it; reports back through `written` and `broken`, then calls `notify`."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self.written: deque[tuple[TcpConnection, Handle]] = deque()
        self.broken: deque[tuple[TcpConnection, str]] = deque()
        self._notify = notify
        self._incoming: deque[TcpConnection] = deque()
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="stretto-write", daemon=True)
        self._thread.start()

    def take(self, connection: TcpConnection) -> None:
        """From now on, until its queue is empty, this thread writes to the connection."""
        self._incoming.append(connection)
        self._wake()

    def stop(self, timeout_s: float) -> None:
        self._stopping = True
        self._wake()
        self._thread.join(timeout_s)
        self._near.close()
        self._far.close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._near.send(b"!")

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._far.fileno(), select.POLLIN)
        blocked: dict[int, TcpConnection] = {}
        while not self._stopping:
            for descriptor, _ in poller.poll(1000):
                if descriptor == self._far.fileno():
                    self._far.recv(4096)
                    continue
                poller.unregister(descriptor)
                self._incoming.append(blocked.pop(descriptor))
            while self._incoming:
                connection = self._incoming.popleft()
                if not self._write(connection):
                    blocked[connection.descriptor] = connection
                    poller.register(connection.descriptor, select.POLLOUT)

    def _write(self, connection: TcpConnection) -> bool:
        """Write until the queue is empty (True: the connection is the wire's again) or the kernel is full (False)."""
        while True:
            with connection.writing:
                with connection.lock:
                    if connection.closed or not connection.outgoing:
                        connection.handed_over = False
                        return True
                try:
                    finished = connection.write_some()
                except BlockingIOError:
                    return False
                except OSError as error:
                    with connection.lock:
                        connection.handed_over = False
                    self.broken.append((connection, error.strerror or str(error)))
                    self._notify()
                    return True
            if finished:
                self.written.extend((connection, handle) for handle in finished)
                self._notify()
