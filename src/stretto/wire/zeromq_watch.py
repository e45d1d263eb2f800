"""One quiet thread per process that sees connections come and go.

ZeroMQ's own input/output threads send and answer heartbeats without Python (a worker that holds the interpreter lock for
a minute is still alive to its peers) and report through monitor sockets when a connection is made, refused or lost. This thread
reads those reports, answers authentication requests, and hands what it saw to the wire as plain events.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from stretto.job.zap import ZapHandler

EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Seen(enum.Enum):
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    RETRIED = "retried"
    REFUSED = "refused"


class Event(NamedTuple):
    rank: int
    seen: Seen
    descriptor: int  # the connection it was seen on (CONNECTED, DISCONNECTED)


LISTENER: Final = -1  # in place of a rank: seen on the socket that peers connect to, which knows only descriptors


class Watcher:
    """Owns the monitor sockets and the authentication handler; `events` is filled, `notify` called, from its thread."""

    def __init__(self, zap: ZapHandler, notify: Callable[[], None]) -> None:
        self.events: deque[Event] = deque()
        self._zap = zap
        self._notify = notify
        self._incoming: deque[tuple[int, zmq.Socket[bytes]]] = deque()
        self._monitors: dict[zmq.Socket[bytes], int] = {}
        self._near, self._far = socket.socketpair()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="stretto-watch", daemon=True)
        self._thread.start()

    def add(self, rank: int, monitor: zmq.Socket[bytes]) -> None:
        """Hand over a monitor socket; from now on only the watcher's thread touches it."""
        self._incoming.append((rank, monitor))
        self._near.send(b"+")

    def stop(self, timeout_s: float) -> None:
        self._stopping = True
        with contextlib.suppress(OSError):
            self._near.send(b"x")
        self._thread.join(timeout_s)
        self._near.close()
        self._far.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._far.fileno(), zmq.POLLIN)
        poller.register(self._zap.socket, zmq.POLLIN)
        while not self._stopping:
            for ready, _ in poller.poll():
                if ready == self._far.fileno():
                    self._adopt(poller)
                elif ready is self._zap.socket:
                    self._zap.handle()
                else:
                    self._report(ready, poller)
        for monitor in [*self._monitors, *(monitor for _, monitor in self._incoming)]:
            monitor.close(0)
        self._zap.socket.close(0)

    def _adopt(self, poller: zmq.Poller) -> None:
        self._far.recv(4096)
        while self._incoming:
            rank, monitor = self._incoming.popleft()
            self._monitors[monitor] = rank
            poller.register(monitor, zmq.POLLIN)

    def _report(self, monitor: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        message = parse_monitor_message(monitor.recv_multipart())
        if message["event"] == zmq.EVENT_MONITOR_STOPPED:
            poller.unregister(monitor)
            del self._monitors[monitor]
            monitor.close(0)
            return
        meaning = _meaning(int(message["event"]))
        self.events.append(Event(self._monitors[monitor], meaning, int(message["value"])))
        self._notify()


def _meaning(event: int) -> Seen:
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return Seen.CONNECTED
    if event == zmq.EVENT_DISCONNECTED:
        return Seen.DISCONNECTED
    if event == zmq.EVENT_CONNECT_RETRIED:
        return Seen.RETRIED
    return Seen.REFUSED
