"""How many connections ZeroMQ may have accepted that nobody has vouched for yet.

ZeroMQ accepts whatever connects, keeps it until its handshake has failed or timed out, and has no limit on how many there are: a
stranger who opens connections and says nothing uses up the descriptors of the process, and one who announces large messages
its memory. Here every accepted connection is noted, and one too many means that ZeroMQ loses the oldest: its socket is shut
down, which ZeroMQ takes for the other side hanging up.

A worker's handshake takes milliseconds, so it is over long before its connection is the oldest of many; and a worker that is hit
all the same connects again. A connection counts no longer once a message has come over it, for that means that the handshake
is over and the other side knows the secret.

Reports come late, and the kernel gives a closed descriptor's number to whatever is opened next. So a connection is known by both
its descriptor and its other end, and nothing is shut down that does not match in both.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import NamedTuple

UNKNOWN = "an unknown address"


class _Accepted(NamedTuple):
    remote: object  # as `getpeername` has it; None if the connection was gone before it could be asked
    address: str


class Doorstep:
    """The connections of one listening ZeroMQ socket that have said nothing yet. Use from one thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sent_away = 0
        self._waiting: dict[int, _Accepted] = {}  # descriptor -> connection, in the order in which they came
        self._leaving: set[int] = set()  # descriptors that were shut down, and that ZeroMQ has not closed yet

    def came(self, descriptor: int) -> None:
        """ZeroMQ has accepted a connection."""
        self._leaving.discard(descriptor)
        self._waiting.pop(descriptor, None)  # so that the order is that of the connections, not of the numbers
        self._waiting[descriptor] = _look_at(descriptor)
        self._keep(self.limit)

    def close(self) -> None:
        """Nobody is wanted any more: those that wait are sent away."""
        self.limit = 0
        self._keep(0)

    def _keep(self, most: int) -> None:
        while len(self._waiting) > most:
            oldest = next(iter(self._waiting))
            self._hang_up(oldest, self._waiting.pop(oldest))

    def admitted(self, descriptor: int) -> bool:
        """A message has come over it. False if it has been sent away meanwhile."""
        self._waiting.pop(descriptor, None)
        return descriptor not in self._leaving

    def left(self, descriptor: int) -> str:
        """ZeroMQ has closed it; from where it had come."""
        self._leaving.discard(descriptor)
        known = self._waiting.pop(descriptor, None)
        return UNKNOWN if known is None else known.address

    def _hang_up(self, descriptor: int, known: _Accepted) -> None:
        self.sent_away += 1
        with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
            if known.remote is not None and connection.getpeername() == known.remote:
                self._leaving.add(descriptor)
                connection.shutdown(socket.SHUT_RDWR)


def _look_at(descriptor: int) -> _Accepted:
    try:
        with _borrowed(descriptor) as connection:
            remote = connection.getpeername()
            return _Accepted(remote, str(remote[0]))
    except (OSError, IndexError):
        return _Accepted(None, UNKNOWN)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """ZeroMQ's own descriptor, for a moment: a copy of it could not be made when there are no descriptors left."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()
