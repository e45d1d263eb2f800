"""A heartbeat that needs no interpreter lock, between workers of the plain wire that cannot look each other up in /proc.

The heartbeats of the plain wire are written by Python. While one C call holds the interpreter lock for half a minute no thread of
Python runs, and a worker that is merely busy looks like one that is stopped. So each pair of such workers has a second
connection, on which nothing is ever said: ZeroMQ's own thread keeps exchanging its heartbeats there. That thread runs without
the lock, and it stops when the process is stopped, dies, or loses its network, which is exactly what has to be told apart.

When bytes last came in is asked of the kernel (TCP_INFO), which knows it whether or not anybody has looked. It costs a system
call for a peer that has been silent on its main connection, and two packets a pair every few seconds otherwise.

The higher rank connects to a port that the lower one has named in its greeting; the connection is secured with the job's keys,
and the port is hidden when all have come (where the kernel cannot do that, before 5.7, there are no pulses). A pair that does
not manage to connect has no pulse, and the main connection's silence decides alone. ZeroMQ accepts connections only while the
workers meet, and keeps a bounded number of those that have said nothing yet (`doorstep.py`); before and afterwards the kernel's
queue holds `BACKLOG` of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

import zmq

from stretto.launching.doorstep import Doorstep
from stretto.launching.hosts import join_address, split_address
from stretto.launching.monitor import next_report, open_monitor
from stretto.launching.zap import ZapHandler, secure_client, secure_server
from stretto.wire.door import HANDSHAKE_S, MAX_STRANGERS, hide, listen

BEATS: Final = 10  # heartbeats within `silence_s`
MEET_S: Final = 5.0
BACKLOG: Final = 128  # connections that the kernel keeps for ZeroMQ; the others try again
MAX_MESSAGE_BYTES: Final = 1024  # ZeroMQ's own handshake; ours has 4
MAX_ZEROS: Final = 4
RANK: Final = struct.Struct("<I")
ESTABLISHED: Final = 1
TCP_INFO_BYTES: Final = 60
STATE: Final = struct.Struct("<B")  # at 0 in the kernel's struct tcp_info
LAST_DATA_RECV: Final = struct.Struct("<52xI")  # milliseconds since data last came in


log = logging.getLogger("stretto.wire")


class Acquaintance(NamedTuple):
    """What is known of a peer whose greeting has come."""

    address: str
    greeting: bytes  # of its own `Pulse`


class Pulse:
    """One end of these connections. Used by the thread that drives the wire."""

    def __init__(self, rank: int, host: str, secret: bytes, silence_s: float) -> None:
        self._rank = rank
        self._secret = secret
        self._silence_s = silence_s
        self._ends: dict[int, socket.socket] = {}  # rank -> its connection, to ask the kernel about
        self._zeros: Counter[int] = Counter()  # rank -> how often in a row bytes had come within the last millisecond
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap = ZapHandler(self._context, secret)
        self._listener = listen(rank, host, 0)
        self._listener.listen(BACKLOG)
        self._host, self._port = self._listener.getsockname()[:2]
        self.greeting = str(self._port).encode()
        self._router = self._socket(zmq.ROUTER)
        secure_server(self._router, secret)
        self._doorstep = Doorstep(MAX_STRANGERS)
        self._monitor = open_monitor(self._router, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._dealers: dict[int, zmq.Socket[bytes]] = {}

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.IPV6, int(":" in self._host))
        made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        made.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        made.setsockopt(zmq.HEARTBEAT_IVL, max(50, int(self._silence_s * 1000 / BEATS)))
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._silence_s * 10_000))  # the silence is for us to judge
        made.setsockopt(zmq.RECONNECT_IVL, -1)
        return made

    def meet(self, peers: Mapping[int, Acquaintance], deadline: float) -> None:
        """Connect to these peers, all of which do the same now."""
        awaited = set(peers)
        self._doorstep.limit = MAX_STRANGERS + len(peers)
        self._router.setsockopt(zmq.USE_FD, os.dup(self._listener.fileno()))  # ZeroMQ closes what it was given
        self._router.bind(f"tcp://{join_address(self._host, self._port)}")
        poller = zmq.Poller()
        for source in (self._zap.socket, self._router, self._monitor):
            poller.register(source, zmq.POLLIN)
        for rank, peer in peers.items():
            if rank < self._rank:
                poller.register(self._call(rank, peer), zmq.POLLIN)
        callers = {dealer: rank for rank, dealer in self._dealers.items()}
        deadline = min(deadline, time.monotonic() + MEET_S)
        while awaited and (remaining := deadline - time.monotonic()) > 0:
            for ready, _ in poller.poll(int(remaining * 1000) + 1):
                self._look_at_the_door()
                if ready is self._zap.socket:
                    self._zap.handle()
                elif ready is self._router:
                    awaited.discard(self._answer())
                elif ready in callers:
                    self._keep(callers[ready], ready.recv(copy=False))
                    awaited.discard(callers[ready])
        hide(self._listener)
        self._look_at_the_door()
        self._doorstep.close()
        if awaited:
            log.warning(
                "rank %d has no second connection to rank %d for heartbeats: either of them that holds the interpreter lock for "
                "longer than %g s will count as lost", self._rank, min(awaited), self._silence_s,
            )  # fmt: skip

    def _call(self, rank: int, peer: Acquaintance) -> zmq.Socket[bytes]:
        dealer = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, RANK.pack(self._rank))
        secure_client(dealer, self._secret)
        self._dealers[rank] = dealer
        port = peer.greeting.decode("ascii", "replace")
        if port.isdigit():
            dealer.connect(f"tcp://{join_address(split_address(peer.address)[0], int(port))}")
            dealer.send(b"here")
        return dealer

    def _look_at_the_door(self) -> None:
        while (report := next_report(self._monitor)) is not None:
            if report.event == zmq.EVENT_ACCEPTED:
                self._doorstep.came(report.value)
            elif report.event == zmq.EVENT_DISCONNECTED:
                self._doorstep.left(report.value)

    def _answer(self) -> int:
        identity, *parts = self._router.recv_multipart(copy=False)
        self._doorstep.admitted(int(identity.get(zmq.SRCFD)))
        if len(identity.bytes) != RANK.size or not parts:
            return -1
        (rank,) = RANK.unpack(identity.bytes)
        self._keep(rank, parts[0])
        self._router.send_multipart([identity.bytes, b"here"])
        return int(rank)

    def _keep(self, rank: int, message: zmq.Frame) -> None:
        """A descriptor of our own for the connection that the message came over."""
        with contextlib.suppress(OSError):  # it is gone again already
            self._ends[rank] = socket.socket(fileno=os.dup(int(message.get(zmq.SRCFD))))

    def silent_s(self, rank: int) -> float:
        """For how long nothing has come from a peer; infinity if it has no pulse (any more)."""
        end = self._ends.get(rank)
        if end is None:
            return float("inf")
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        if len(info) < TCP_INFO_BYTES or STATE.unpack_from(info)[0] != ESTABLISHED:
            return float("inf")
        milliseconds = LAST_DATA_RECV.unpack_from(info)[0]
        self._zeros[rank] = 0 if milliseconds else self._zeros[rank] + 1
        # A kernel that does not fill in this field says 0 every time; one that does, hardly ever twice.
        return float("inf") if self._zeros[rank] > MAX_ZEROS else milliseconds / 1000

    def forget(self, rank: int) -> None:
        """The peer is lost, or has left."""
        end = self._ends.pop(rank, None)
        if end is not None:
            end.close()
        dealer = self._dealers.pop(rank, None)
        if dealer is not None:
            dealer.close(0)

    def close(self) -> None:
        for rank in {*self._ends, *self._dealers}:
            self.forget(rank)
        self._router.disable_monitor()
        self._monitor.close(0)
        self._router.close(0)
        self._zap.close()
        self._context.term()
        self._listener.close()
