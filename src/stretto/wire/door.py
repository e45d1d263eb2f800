"""The port at which the other workers of a job arrive, and where strangers are kept from doing harm.

A worker listens from its first moment, long before it knows the others: the coordinator tries the port, and a peer that has
been told about everybody a little earlier connects at once. Whoever else can reach the machine may connect too. One thread
answers all of them, so that a stranger costs one descriptor and a few hundred bytes, for a few seconds:

    at most `limit` at a time      one more, and the oldest is sent away; a worker that is hit by this connects again
    at most HANDSHAKE_S for each   to prove that it knows the job's secret (`handshake.py`)
    at most one line in the log    every LOG_EVERY_S, which counts the others

Running out of descriptors is no reason to stop listening: the oldest goes, or the listener is left alone for a moment.

When all workers are here nobody else has any business, and the port is closed, unless others may be admitted later: then all of
this goes on for as long as the job. Where ZeroMQ listens (`take_over`) a port cannot be closed: it closes a listener together
with all connections that came in by it (libzmq 4.3.5). There the listening socket is moved instead to a network interface that
does not exist, after which the kernel refuses connections, while those that there are stay as they were (`hide`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from stretto.errors import ConfigurationError
from stretto.launching.hosts import join_address
from stretto.wire.handshake import Acceptor, Life, Probe, Stranger

HANDSHAKE_S: Final = 5.0
MAX_STRANGERS: Final = 64  # beyond one connection for each worker
ACCEPTED_AT_ONCE: Final = 64
REST_S: Final = 0.1
LOG_EVERY_S: Final = 5.0
OUT_OF_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SO_BINDTOIFINDEX: Final = 62  # asm-generic/socket.h; Python has no name for it
NO_INTERFACE: Final = 0x7FFFFFFF

log = logging.getLogger("stretto.wire")


class _Visitor:
    """A connection that has proved nothing yet."""

    __slots__ = ("acceptor", "address", "arrived_at", "connection")

    def __init__(self, connection: socket.socket, address: object, acceptor: Acceptor, now: float) -> None:
        self.connection = connection
        self.address = address
        self.acceptor = acceptor
        self.arrived_at = now


class Door:
    """Listens at once. `arrived` gets every worker with its connection, once `open` has said what they must know; `notify` is
    called then, by the door's own thread."""

    def __init__(self, ours: Life, host: str, port: int, *, limit: int, notify: Callable[[], None] = lambda: None) -> None:
        self.arrived: queue.SimpleQueue[tuple[Life, socket.socket]] = queue.SimpleQueue()
        self.ours = ours  # which life of this rank is wanted here; until `open`, it may turn out to be another one
        self._rank = ours.rank
        self._notify = notify
        self._limit = limit
        self._key: bytes | None = None
        self._visitors: dict[int, _Visitor] = {}  # by descriptor, in the order in which they came
        self._turned_away = 0
        self._next_log = float("-inf")
        self._listener = listen(ours.rank, host, port)
        self.address = join_address(*self._listener.getsockname()[:2])
        self._rests_until: float | None = None
        self._near, self._far = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._far, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="stretto-door", daemon=True)
        self._thread.start()

    def open(self, key: bytes) -> None:
        """From now on workers that know the key are let in; those that came before have waited."""
        self._key = key
        self._wake()

    def take_over(self) -> socket.socket:
        """The listening socket, for somebody else to accept from: the thread ends, and whoever waits is sent away."""
        self._stop()
        return self._listener

    def close(self) -> None:
        """Everybody is here, or nobody is wanted any more. Idempotent."""
        self._stop()
        self._listener.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self.arrived.get_nowait()[1].close()

    def close_in_child(self) -> None:
        """In a forked process, where the thread does not run: let go of what was inherited."""
        for held in (self._listener, *(visitor.connection for visitor in self._visitors.values())):
            held.close()

    def _stop(self) -> None:
        self._closing = True
        self._wake()
        self._thread.join(HANDSHAKE_S)
        self._near.close()
        self._far.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # closed: there is nobody to wake
            self._near.send(b"!")

    # -- everything below runs in the door's own thread ---------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(self._patience_s()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._far:
                    self._take_note()
                elif key.fd in self._visitors:
                    self._hear(self._visitors[key.fd])
            self._look_at_the_clock()
        for visitor in list(self._visitors.values()):
            self._send_away(visitor, Probe("all workers are here"))
        self._selector.close()

    def _patience_s(self) -> float | None:
        due = [visitor.arrived_at + HANDSHAKE_S for visitor in list(self._visitors.values())[:1]]
        if self._rests_until is not None:
            due.append(self._rests_until)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        while self._visitors and (oldest := self._oldest()).arrived_at + HANDSHAKE_S <= now:
            self._send_away(oldest, Stranger(f"it did not say who it is within {HANDSHAKE_S:g} s"))
        if self._rests_until is not None and self._rests_until <= now:
            self._rests_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _oldest(self) -> _Visitor:
        return next(iter(self._visitors.values()))

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as problem:
                if problem.errno in OUT_OF_DESCRIPTORS:
                    self._make_room()
                return  # whoever it was has gone, or there is no room: go on with the others
            self._admit(connection, address)

    def _make_room(self) -> None:
        if self._visitors:
            self._send_away(self._oldest(), Stranger("there were no descriptors left"))
        else:
            self._rests_until = time.monotonic() + REST_S
            self._selector.unregister(self._listener)

    def _admit(self, connection: socket.socket, address: object) -> None:
        connection.setblocking(False)
        visitor = _Visitor(connection, address, Acceptor(self.ours), time.monotonic())
        self._visitors[connection.fileno()] = visitor
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._visitors) > self._limit:
            self._send_away(self._oldest(), Stranger(f"more than {self._limit} connections were waiting"))

    def _hear(self, visitor: _Visitor) -> None:
        try:
            visitor.acceptor.hear(visitor.connection.recv(visitor.acceptor.wanted))
            self._answer(visitor)
        except BlockingIOError:
            pass
        except (OSError, Stranger) as problem:
            self._send_away(visitor, problem)

    def _take_note(self) -> None:
        """The key has come: answer those that have greeted. (Or the door is to be closed, which the loop sees.)"""
        self._far.recv(4096)
        for visitor in list(self._visitors.values()):
            try:
                self._answer(visitor)
            except (OSError, Stranger) as problem:
                self._send_away(visitor, problem)

    def _answer(self, visitor: _Visitor) -> None:
        acceptor = visitor.acceptor
        if acceptor.wanted:
            return
        if self._key is None:
            self._look_away_from(visitor)
            return
        answer = acceptor.answer(self._key)
        if answer:
            visitor.connection.sendall(answer)  # short: it fits into the buffer of a connection that has sent nothing yet
            self._look_at(visitor)
        if acceptor.peer is not None:
            self._look_away_from(visitor)
            del self._visitors[visitor.connection.fileno()]
            self.arrived.put((acceptor.peer, visitor.connection))
            self._notify()

    def _look_at(self, visitor: _Visitor) -> None:
        with contextlib.suppress(KeyError):  # it is looked at already
            self._selector.register(visitor.connection, selectors.EVENT_READ)

    def _look_away_from(self, visitor: _Visitor) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(visitor.connection)

    def _send_away(self, visitor: _Visitor, why: Exception) -> None:
        self._look_away_from(visitor)
        del self._visitors[visitor.connection.fileno()]
        visitor.connection.close()
        self._note(visitor.address, why)

    def _note(self, address: object, why: Exception) -> None:
        if isinstance(why, Probe):
            log.debug("rank %d turned away a stranger from %s: %s", self._rank, address, why)
            return
        self._turned_away += 1
        if time.monotonic() < self._next_log:
            return
        self._next_log = time.monotonic() + LOG_EVERY_S
        so_far = f" ({self._turned_away} so far)" if self._turned_away > 1 else ""
        log.warning("rank %d turned away a stranger from %s: %s%s", self._rank, address, why, so_far)


def listen(rank: int, host: str, port: int) -> socket.socket:
    """A listening socket that does not block."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigurationError(
            f"rank {rank} cannot listen on {join_address(host, port) if port else f'{host}, any port'}: {error.strerror}.\n"
            f"Choose another address or port, or none to let the system pick a free port."
        ) from error
    listener.setblocking(False)
    return listener


def can_hide() -> bool:
    """Whether this kernel lets this user `hide` a port."""
    with socket.socket() as probe:
        return hide(probe)


def hide(listener: socket.socket) -> bool:
    """Let nobody connect to `listener` any more, without closing it. False where the kernel does not allow that (before 5.7)."""
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_BINDTOIFINDEX, NO_INTERFACE)
    except OSError:
        return False
    return True
