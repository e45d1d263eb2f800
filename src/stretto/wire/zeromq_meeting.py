"""How workers of the encrypted wire find together, and how strangers are kept out.

Each worker has one ROUTER, to which all others connect by a DEALER each. A pair is complete when both connections are up and both
sides know that the other has read their greeting.

Security. CURVE: server and client keys by HKDF from the job's secret, so who lacks the secret cannot finish the handshake. Until
the workers know each other the port is in the hands of `door.py`, which lets nobody in. ZeroMQ listens there from then on until
all are connected, a fraction of a second as a rule; after that nobody can connect. In between the number of connections over
which nothing has come yet is bounded (`doorstep.py`), and so is the part of a message that each of them may announce and send.
ZeroMQ has one limit for the parts of strangers and of peers, so the product of the two is what strangers can cost: it is
`STRANGERS_BYTES` whatever the world size, and parts get shorter as the world grows. A peer whose connection was one too many
connects again while the job is still connecting. With `accept_later` the port stays open, within the same bounds, for workers
that are admitted later; a newcomer's greetings are not heard before it is, and are repeated when we greet it.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Sequence
from typing import Unpack

import zmq

from stretto.errors import PeerLost, UnreachableError
from stretto.launching.doorstep import Doorstep
from stretto.launching.hosts import join_address, split_address
from stretto.launching.monitor import open_monitor
from stretto.launching.peers import Peer
from stretto.launching.secret import job_secret
from stretto.launching.zap import ZapHandler, secure_client, secure_server
from stretto.wire import frames
from stretto.wire.base import Handle
from stretto.wire.door import HANDSHAKE_S, MAX_STRANGERS, hide
from stretto.wire.framed import NEWCOMERS_PATIENCE_S, TOPIC_HELLO, Connection, FramedWire, WireSettings
from stretto.wire.frames import FrameKind
from stretto.wire.zeromq_watch import EVENTS, LISTENER, LISTENER_EVENTS, Watcher

INLINE_BYTES = 32 << 10  # header and payload in one part
STRANGERS_BYTES = 40 << 20  # of memory, for all connections together over which nothing has come yet
ANSWER_BYTES = 1024  # more than ZeroMQ's handshake needs; nothing else ever comes back over a connection that we made
BEATS = 20  # heartbeats within `silence_s`
STRANGERS_LATER = 8  # connections that a running job bears with, where the kernel does not let us hide its port
WELCOME = b"welcome"  # in a greeting: yours has been read
IDENTITY = struct.Struct("<II8s")  # rank, generation, and something random


class DealerConnection(Connection):
    def __init__(self, peer: Peer, mine: Peer, dealer: zmq.Socket[bytes], *, shared_memory: bool) -> None:
        super().__init__(peer, mine, shared_memory=shared_memory)
        self.dealer = dealer
        self.number_watched = 0  # under which the watcher reports what it sees of this connection
        self.connected = False
        self.welcome = False  # it has read our greeting, so strangers cannot push our connection off its doorstep any more
        self.told = False  # that it is welcome here, on this connection
        self.heard_at = float("-inf")  # when its last message was read; heartbeats are for ZeroMQ alone
        self.hung_up = 0  # handshakes that it broke off
        self.unacknowledged: dict[int, Handle] = {}

    @property
    def complete(self) -> bool:
        """Nothing is missing in either direction, and the port may be hidden. `told` too: the peer waits for it."""
        return self.connected and self.greeted and self.welcome and self.told


class ZeroMQMeeting(FramedWire):
    """See the module's text: a wire that makes its connections, and does not use them yet."""

    def __init__(self, rank: int, world_size: int, **settings: Unpack[WireSettings]) -> None:
        super().__init__(rank, world_size, **settings)
        self._identity = IDENTITY.pack(rank, self.generation, secrets.token_bytes(8))
        self._job_secret = b""
        self._connections: dict[int, DealerConnection] = {}
        self._watched: dict[int, DealerConnection] = {}  # by their number
        self._num_watched = 0
        self._sources: dict[bytes, int] = {}
        self._incoming: dict[int, int] = {}  # number of a connection that we accepted -> the rank that made it
        self._suspects: dict[int, float] = {}  # rank -> when its silence becomes a loss
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=2 if (os.cpu_count() or 1) >= 8 else 1)
        self._zap = ZapHandler(self._context)
        # A part has room for what goes out with its header; beyond 1,200 workers they come to the door in waves.
        self._doorstep = Doorstep(min(MAX_STRANGERS + world_size, STRANGERS_BYTES // INLINE_BYTES))
        self._part_bytes = STRANGERS_BYTES // self._doorstep.limit
        self._forming = True
        self._watcher = Watcher(self._zap, self._doorstep, self.wake)
        self._router = self._context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._far.fileno(), zmq.POLLIN)
        self._close_in_forks()

    def connect(self, peers: Sequence[Peer], nonce: bytes) -> None:
        mine = self._meet_everybody(peers)
        self._job_secret = job_secret(self._secret, nonce)
        self._identity = IDENTITY.pack(self.rank, self._born, self._identity[-8:])
        patience_s = self.timeouts.connect_s
        deadline = self.now() + (min(patience_s, NEWCOMERS_PATIENCE_S) if self._is_newcomer else patience_s)
        listener = self._listen(self._job_secret)
        for peer in peers:
            if peer.rank != self.rank:
                self._connect_one(peer, mine)
        while missing := [each for each in self._connections.values() if not each.complete and each.rank not in self.lost]:
            self._raise_if_lost()
            # A peer hides its port when it has our connection, so only those may be tried that we are not connected to.
            apart = [peer for peer in peers if peer.rank != self.rank and not self._connections[peer.rank].connected]
            try:
                self._awaited.try_one([peer for peer in apart if peer.rank not in self.lost], self.now())
                if self.now() > deadline:
                    raise self._give_up_some(peers)
            except (PeerLost, UnreachableError) as problem:
                if not self._is_newcomer:
                    raise
                gone = [problem.rank] if isinstance(problem, PeerLost) else [each.rank for each in missing]
                for rank in gone:
                    self._lose(rank, str(problem).splitlines()[0])
            self.progress(0.2)
        self._forming = False
        self._check_not_alone()
        if not self._accept_later and not hide(listener):
            self._doorstep.limit = STRANGERS_LATER
        listener.close()
        self._announce_services()

    def _listen(self, secret: bytes) -> socket.socket:
        """Let ZeroMQ accept at the port that the door has kept so far. Returns the listening socket."""
        router = self._router
        router.setsockopt(zmq.RCVHWM, 0)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.IPV6, int(self.address.startswith("[")))
        router.setsockopt(zmq.MAXMSGSIZE, self._part_bytes + frames.HEADER_BYTES)  # the rest is for what encryption adds
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that was sent away comes again under its name
        self._set_times(router)
        self._zap.accept(secret)
        secure_server(router, secret)
        self._watcher.add(LISTENER, open_monitor(router, LISTENER_EVENTS))
        listener = self._door.take_over()
        router.setsockopt(zmq.USE_FD, os.dup(listener.fileno()))  # ZeroMQ closes what it was given
        router.bind(f"tcp://{self.address}")
        return listener

    def _set_times(self, zmq_socket: zmq.Socket[bytes]) -> None:
        """ZeroMQ closes a connection when so long after a heartbeat of ours nothing has come in. On the other connection of the
        pair something may have come in until the next heartbeat would have been due: nobody is lost before `silence_s`."""
        silence_ms = int(self.timeouts.silence_s * 1000)
        beat_ms = max(50, silence_ms // BEATS)
        zmq_socket.setsockopt(zmq.HEARTBEAT_IVL, beat_ms)
        zmq_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence_ms + beat_ms)
        zmq_socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))

    def _connect_one(self, peer: Peer, mine: Peer) -> None:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, self._identity)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.MAXMSGSIZE, ANSWER_BYTES)
        dealer.setsockopt(zmq.IPV6, int(peer.address.startswith("[")))
        dealer.setsockopt(zmq.RECONNECT_IVL, 10)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, int(self.timeouts.connect_s * 1000))
        self._set_times(dealer)
        secure_client(dealer, self._job_secret)
        connection = DealerConnection(peer, mine, dealer, shared_memory=self._sharing.wanted)
        self._num_watched += 1
        connection.number_watched = self._num_watched
        self._connections[peer.rank] = self._watched[self._num_watched] = connection
        self._watcher.add(self._num_watched, open_monitor(dealer, EVENTS))
        dealer.connect(f"tcp://{join_address(*split_address(peer.address))}")

    def _give_up_some(self, peers: Sequence[Peer]) -> UnreachableError:
        missing = {each.rank: each for each in self._connections.values() if not each.complete}
        hung_up = any(each.hung_up for each in missing.values())
        why = "somebody answers there, and does not know this job's secret" if hung_up else "no answer"
        return self._awaited.unreachable([peer for peer in peers if peer.rank in missing], why)

    def _on_hello(self, source: int, body: bytes) -> None:
        super()._on_hello(source, body)
        connection = self._connections[source]
        connection.welcome = connection.welcome or body == WELCOME
        if connection.connected and not connection.told:
            connection.told = True
            self._say_hello(source, WELCOME)
        if source in self._admitted and connection.complete:
            self._joined(source)

    def _say_hello(self, to: int, words: bytes) -> None:
        self._control(to, FrameKind.POST, words, TOPIC_HELLO)

    def _begin_admission(self, peer: Peer) -> None:
        if self._mine is not None:
            self._connect_one(peer, self._mine)
