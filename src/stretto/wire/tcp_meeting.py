"""How workers of the plain wire find together: one TCP connection for each pair.

Of two workers the junior connects: the one that joined later, or, of the same generation, the one of the higher rank. Both prove
that they know the job's secret (`handshake.py`) at the door of the senior (`door.py`). While a job forms, all wait for all.
Later, where the door stays open (`accept_later`), a newcomer connects to all that are there, and waits at their doors until each
has admitted it.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
from collections.abc import Sequence
from typing import Unpack

from stretto.errors import PeerLost, SecretError, UnreachableError
from stretto.launching.hosts import split_address
from stretto.launching.peers import Peer
from stretto.launching.secret import job_secret
from stretto.wire.awaited import TRY_EVERY_S
from stretto.wire.door import HANDSHAKE_S, MAX_STRANGERS, can_hide
from stretto.wire.framed import NEWCOMERS_PATIENCE_S, TOPIC_HELLO, FramedWire, WireSettings
from stretto.wire.handshake import Life, handshake_key, introduce_ourselves
from stretto.wire.pulse import Acquaintance, Pulse
from stretto.wire.tcp_connection import TcpConnection

RETRY_S = 0.05


class TcpMeeting(FramedWire):
    """See the module's text: a wire that makes its connections, and does not use them yet."""

    def __init__(self, rank: int, world_size: int, **settings: Unpack[WireSettings]) -> None:
        super().__init__(rank, world_size, **settings)
        self._pulse: Pulse | None = None
        self._connections: dict[int, TcpConnection] = {}
        self._by_descriptor: dict[int, TcpConnection] = {}
        self._poller = select.poll()
        self._queues_are_short = False
        self._newcomers: dict[Life, socket.socket] = {}  # who has proved to know the secret, and waits to be admitted

    def connect(self, peers: Sequence[Peer], nonce: bytes) -> None:
        mine = self._meet_everybody(peers)
        secret = job_secret(self._secret, nonce)
        deadline = self.now() + self.timeouts.connect_s
        self._door.open(handshake_key(secret))
        try:
            for peer in peers:
                if _seniority(peer) < _seniority(mine):
                    self._connect_one(peer, mine, handshake_key(secret), deadline)
            self._await_juniors(peers, mine, deadline)
            self._greet(peers, mine, secret, deadline)
        finally:
            if not self._accept_later:
                self._door.close()
        self._check_not_alone()
        self._announce_services()

    def _connect_one(self, peer: Peer, mine: Peer, key: bytes, deadline: float) -> None:
        if self._is_newcomer:
            deadline = min(deadline, self.now() + NEWCOMERS_PATIENCE_S)
        try:
            connection = self._dial(peer, key, deadline)
        except (PeerLost, UnreachableError) as problem:
            if not self._is_newcomer:
                raise
            self._note_absence(peer.rank, str(problem).splitlines()[0])
        else:
            self._adopt(peer, mine, connection)

    def _dial(self, peer: Peer, key: bytes, deadline: float) -> socket.socket:
        while True:
            try:
                patience_s = min(HANDSHAKE_S, max(RETRY_S, deadline - self.now()))
                connection = socket.create_connection(split_address(peer.address), timeout=patience_s)
                try:
                    introduce_ourselves(connection, key, Life(self.rank, self._born), Life(peer.rank, peer.generation))
                    return connection
                except (OSError, SecretError):
                    connection.close()
                    raise
            except ConnectionRefusedError:
                raise self._awaited.gone(peer) from None
            except OSError as error:
                if self.now() > deadline:
                    raise self._awaited.unreachable([peer], str(error)) from error
                threading.Event().wait(RETRY_S)  # strangers crowd its port, or a route is just coming up

    def _await_juniors(self, peers: Sequence[Peer], mine: Peer, deadline: float) -> None:
        missing = {Life(peer.rank, peer.generation): peer for peer in peers if _seniority(peer) > _seniority(mine)}
        while missing:
            try:
                life, connection = self._door.arrived.get(timeout=TRY_EVERY_S)
            except queue.Empty:
                self._awaited.try_one(list(missing.values()), self.now())
                if self.now() > deadline:
                    raise self._awaited.unreachable(list(missing.values()), "it did not connect") from None
                continue
            if life in missing:
                self._adopt(missing.pop(life), mine, connection)
            elif self._accept_later:
                self._let_wait(life, connection)
            else:
                connection.close()

    def _adopt(self, peer: Peer, mine: Peer, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        adopted = TcpConnection(peer, mine, connection, self.now(), shared_memory=self._sharing.wanted)
        if self._queues_are_short:
            adopted.keep_queue_short()
        self._connections[peer.rank] = adopted
        self._by_descriptor[adopted.descriptor] = adopted
        self._poller.register(adopted.descriptor, select.POLLIN)

    def keep_queues_short(self) -> None:
        if not self._queues_are_short:
            self._queues_are_short = True
            for connection in self._connections.values():
                if not connection.closed:
                    connection.keep_queue_short()

    def _greet(self, peers: Sequence[Peer], mine: Peer, secret: bytes, deadline: float) -> None:
        """Exchange greetings with everybody, and give a pulse to those that cannot be looked up in /proc."""
        if self._is_newcomer:
            deadline = min(deadline, self.now() + NEWCOMERS_PATIENCE_S)
        far = [connection.rank for connection in self._connections.values() if not connection.near]
        if far and can_hide():  # a second port that stays open would be one more for strangers to crowd
            host, _ = split_address(mine.address)
            self._pulse = Pulse(self.rank, host, secret, self.timeouts.silence_s)
        for rank in self._connections:
            self.post(rank, TOPIC_HELLO, self._pulse.greeting if self._pulse is not None and rank in far else b"")
        while not all(connection.greeted or connection.closed for connection in self._connections.values()):
            self._raise_if_lost()
            if self.now() > deadline:
                silent = [peer for peer in peers if peer.rank in self._connections and not self._connections[peer.rank].greeted]
                if not self._is_newcomer:
                    raise self._awaited.unreachable(silent, "no greeting came back")
                for peer in silent:
                    self._lose(peer.rank, "it did not admit this newcomer in time")
                break
            self.progress(0.2)
        if self._pulse is not None:
            known = [self._connections[rank] for rank in far if rank not in self.lost and self._connections[rank].greeting]
            self._pulse.meet({each.rank: Acquaintance(each.address, each.greeting) for each in known}, deadline)

    # -- newcomers ----------------------------------------------------------------------------------------------------

    def _let_wait(self, life: Life, connection: socket.socket) -> None:
        """A worker that knows the secret and has not been admitted (yet): one that is joining, or a former life of a member."""
        before = self._newcomers.pop(life, None)
        self._newcomers[life] = connection
        if before is None and len(self._newcomers) > MAX_STRANGERS:
            before = self._newcomers.pop(next(iter(self._newcomers)))
        if before is not None:
            before.close()

    def _look_at_the_door(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._let_wait(*self._door.arrived.get_nowait())
        for peer in list(self._admitted.values()):
            self._begin_admission(peer)

    def _begin_admission(self, peer: Peer) -> None:
        connection = self._newcomers.pop(Life(peer.rank, peer.generation), None)
        if connection is not None and self._mine is not None:
            self._adopt(peer, self._mine, connection)
            self._joined(peer.rank)
            self.post(peer.rank, TOPIC_HELLO, b"")  # without a pulse: its silence alone decides

    def _forget(self, rank: int) -> None:
        super()._forget(rank)
        self._connections.pop(rank, None)


def _seniority(peer: Peer) -> tuple[int, int]:
    """Seniors have smaller ones: those that joined earlier, and those of lower rank in the same generation."""
    return peer.generation, peer.rank
