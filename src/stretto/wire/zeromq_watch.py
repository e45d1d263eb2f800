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

from stretto.launching.doorstep import Doorstep
from stretto.launching.monitor import next_report
from stretto.launching.zap import ZapHandler

EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


ANSWER_S: Final = 10.0  # it takes a moment; without an answer a peer would not be let in


class Seen(enum.Enum):
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    HUNG_UP = "hung up"  # in the middle of the handshake


class ConnectionEvent(NamedTuple):
    watched: int  # the number under which the connection is watched, or LISTENER
    seen: Seen
    accepted: int = 0  # which accepted connection was lost (LISTENER)


LISTENER: Final = -1  # seen on the socket that peers connect to, which does not know who they are
LISTENER_EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class _Question:
    """Which connection does this descriptor stand for?"""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.number: int | None = None
        self.answered = threading.Event()


class Watcher:
    """Owns the monitor sockets and the authentication handler; `events` is filled, `notify` called, from its thread."""

    def __init__(self, zap: ZapHandler, doorstep: Doorstep, notify: Callable[[], None]) -> None:
        self.events: deque[ConnectionEvent] = deque()
        self._zap = zap
        self._doorstep = doorstep
        self._notify = notify
        self._incoming: deque[tuple[int, zmq.Socket[bytes]]] = deque()
        self._monitors: dict[zmq.Socket[bytes], int] = {}
        self._accepted: dict[int, int] = {}  # descriptor -> number of the connection it stands for
        self._num_accepted = 0
        self._questions: deque[_Question] = deque()
        self._near, self._far = socket.socketpair()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="stretto-watch", daemon=True)
        self._thread.start()

    def add(self, number: int, monitor: zmq.Socket[bytes]) -> None:
        """Hand over a monitor socket; from now on only the watcher's thread touches it. Numbers are never used again."""
        self._incoming.append((number, monitor))
        self._near.send(b"+")

    def admit(self, descriptor: int) -> int | None:
        """A peer's message has come over this descriptor: the number of the connection that it stands for, or None if that has
        been sent away. (Descriptors are used again, by strangers too, numbers never.)"""
        question = _Question(descriptor)
        self._questions.append(question)
        self._near.send(b"?")
        question.answered.wait(ANSWER_S)
        return question.number

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
            number, monitor = self._incoming.popleft()
            self._monitors[monitor] = number
            poller.register(monitor, zmq.POLLIN)
        while self._questions:
            for monitor in [monitor for monitor, number in self._monitors.items() if number == LISTENER]:
                while self._report(monitor, poller):
                    pass
            question = self._questions.popleft()
            if self._doorstep.admitted(question.descriptor):
                question.number = self._accepted.get(question.descriptor)
            question.answered.set()

    def _report(self, monitor: zmq.Socket[bytes], poller: zmq.Poller) -> bool:
        """Pass on the next thing it has seen; False when there is none (any more)."""
        if monitor not in self._monitors:
            return False
        report = next_report(monitor)
        if report is None:
            return False
        if report.event == zmq.EVENT_MONITOR_STOPPED:
            poller.unregister(monitor)
            del self._monitors[monitor]
            monitor.close(0)
            return False
        number = self._monitors[monitor]
        if number == LISTENER:
            self._report_accepted(*report)
        else:
            self.events.append(ConnectionEvent(number, _meaning(report.event)))
            self._notify()
        return True

    def _report_accepted(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._num_accepted += 1
            self._accepted[descriptor] = self._num_accepted
            self._doorstep.came(descriptor)
        elif descriptor in self._accepted:
            self._doorstep.left(descriptor)
            self.events.append(ConnectionEvent(LISTENER, Seen.DISCONNECTED, self._accepted.pop(descriptor)))
            self._notify()


def _meaning(event: int) -> Seen:
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        return Seen.CONNECTED
    if event == zmq.EVENT_DISCONNECTED:
        return Seen.DISCONNECTED
    return Seen.HUNG_UP
