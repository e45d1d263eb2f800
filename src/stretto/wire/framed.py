"""What the socket wires have in common: frames and their headers, shared memory, greetings and goodbyes.

A transport below (`tcp.py`, `zeromq.py`) moves frames between two ranks, in order, and tells when a peer is gone. What frames
carry is matched with receives in `mailbox.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Required, TypedDict

from stretto.errors import ConfigurationError, PeerLost
from stretto.launching.peers import Peer
from stretto.timeouts import Timeouts
from stretto.wire import frames
from stretto.wire.awaited import Awaited
from stretto.wire.base import Handle, Tag
from stretto.wire.door import MAX_STRANGERS, Door
from stretto.wire.frames import FrameKind, Header
from stretto.wire.handshake import Life
from stretto.wire.mailbox import MailboxWire, PostedReceive, retired_by_it
from stretto.wire.shared_memory import Inbox, Outbox
from stretto.wire.sharing import Sharing

RETIRED = 1  # `channel` of a goodbye to a member that is retired; `sequence` is the generation in which it is

TOPIC_HELLO = 0
TOPIC_FAREWELL = 3

NEWCOMERS_PATIENCE_S = 3.0  # for each peer to answer it: one that is stopped for longer is lost to it

log = logging.getLogger("stretto.wire")


class ArrivedFrame(NamedTuple):
    """A frame that carries a message, and its payload."""

    header: Header
    view: memoryview

    @property
    def digest(self) -> int:
        return self.header.digest

    @property
    def dtype(self) -> int:
        return self.header.dtype

    @property
    def num_bytes(self) -> int:
        return self.header.num_bytes


class Connection:
    """What this rank knows of one peer. Transports extend it."""

    def __init__(self, peer: Peer, mine: Peer, *, shared_memory: bool) -> None:
        self.rank = peer.rank
        self.generation = peer.generation
        self.address = peer.address
        self.pid = peer.pid
        self.near = mine.sees(peer)  # on this host, and its pid means the same process to both
        self.may_share = self.near and shared_memory  # and no shared memory has been offered to it yet
        self.greeted = False
        self.greeting = b""
        self.next_number = 0
        self.slots: dict[int, int] = {}  # message number -> slot of the outbox
        self.acks: list[int] = []
        self.outbox: Outbox | None = None
        self.outbox_open = False
        self.inbox: Inbox | None = None
        self.waiting: deque[tuple[Handle, memoryview, int]] = deque()  # for room in the outbox

    def close_boxes(self) -> None:
        self.outbox = self.inbox = None
        self.outbox_open = False

    def number(self) -> int:
        self.next_number = self.next_number % 0xFFFFFFFF + 1  # never 0
        return self.next_number


class WireSettings(TypedDict, total=False):
    """What the constructors of socket wires take beside rank and world size."""

    secret: Required[bytes]
    bind: str
    port: int
    timeouts: Timeouts | None
    generation: int
    shared_memory: bool
    accept_later: bool


class FramedWire(MailboxWire[ArrivedFrame]):
    """See the module's text."""

    _connections: Mapping[int, Connection]  # the transport's, by rank

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        secret: bytes,
        bind: str = "127.0.0.1",
        port: int = 0,
        timeouts: Timeouts | None = None,
        generation: int = 0,
        shared_memory: bool = True,
        accept_later: bool = False,
    ) -> None:
        super().__init__(rank, world_size, generation)
        self.timeouts = timeouts or Timeouts()
        self._door = Door(Life(rank, generation), bind, port, limit=MAX_STRANGERS + world_size, notify=self.wake)
        self.address = self._door.address
        self._secret = secret
        self._awaited = Awaited(rank, self.timeouts.connect_s)
        self._accept_later = accept_later
        self._mine: Peer | None = None
        self._admit_until: dict[int, float] = {}  # rank that was admitted -> when it must be here
        self._absent: set[int] = set()  # ranks that were admitted and did not come: lost, until they are retired
        self._sharing = Sharing(self, wanted=shared_memory)
        self._waiting_for_farewell: set[int] = set()
        self._unacked: set[int] = set()  # ranks to which acknowledgements are due
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        self.listen(TOPIC_HELLO, self._on_hello)
        self.listen(TOPIC_FAREWELL, lambda source, body: self._waiting_for_farewell.discard(source))

    def _close_in_forks(self) -> None:
        """A forked child (a DataLoader's worker) would keep the connections open after this process has died, and nobody would
        notice. To be called when the wire is made in full: another thread may fork at any moment."""
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(this))

    # -- what a transport provides ------------------------------------------------------------------------------------

    @abstractmethod
    def connect(self, peers: Sequence[Peer], nonce: bytes) -> None:
        """Connect to every peer and exchange greetings; returns when all have answered. The port is closed then, unless others
        may come later (`accept_later`). A worker that joins a running job calls it too, and waits until all have admitted it;
        those that do not answer are lost to it, and it is an error if nobody does.

        `nonce` is the same for all workers of one job, and of no other: with the secret it gives the job's keys.
        """

    @abstractmethod
    def _send_frame(self, to: int, frame: bytes) -> None:
        """Queue a frame that is complete in itself."""

    @abstractmethod
    def _send_payload(self, handle: Handle, data: memoryview, dtype: int) -> None:
        """Queue a message whose payload is the caller's memory; finish the handle when that memory is free again."""

    @abstractmethod
    def _orphans(self, rank: int) -> list[Handle]:
        """Forget what is on its way to or from one peer; returns the handles."""

    @abstractmethod
    def _drop(self, rank: int) -> None:
        """Close what belongs to one peer."""

    @abstractmethod
    def _release(self) -> None:
        """Close everything, at the end."""

    @abstractmethod
    def _close_in_child(self) -> None:
        """In a forked process: close the copies of the connections."""

    def _is_parting(self) -> bool:
        """Whether last words to peers that are gone are still to be sent."""
        return False

    @property
    def peers(self) -> list[int]:
        return [rank for rank in (*self._connections, *self._absent) if rank not in self._admitted]

    # -- the contract -------------------------------------------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic()

    def _send(self, handle: Handle, data: memoryview, dtype: int) -> None:
        if not self._sharing.takes(self._connections[handle.peer], handle, data, dtype):
            self._sent += frames.HEADER_BYTES + data.nbytes
            self._send_payload(handle, data, dtype)

    def _head(self, kind: FrameKind, tag: Tag, dtype: int, num_bytes: int, number: int = 0, slot: int = 0) -> bytes:
        channel, sequence, index, digest = tag
        return frames.encode(
            Header(kind, self._born, self.rank, channel, sequence, index, digest, dtype, slot, number, num_bytes)
        )

    def _post(self, to: int, topic: int, body: bytes) -> None:
        if to not in self.lost and not self._closed:
            self._control(to, FrameKind.POST, body, topic)

    def _control(self, to: int, kind: FrameKind, body: bytes = b"", topic: int = 0) -> None:
        self._sent += frames.HEADER_BYTES + len(body)
        self._send_frame(to, self._head(kind, Tag(topic, 0, 0), 0, len(body)) + body)

    def cancel(self, channel: int, sequence: int) -> None:
        super().cancel(channel, sequence)
        for connection in self._connections.values():
            kept = (item for item in connection.waiting if item[0].tag[:2] != (channel, sequence))
            connection.waiting = deque(kept)

    def wake(self) -> None:
        # A full pipe means that it is awake already; a closed one that there is nobody to wake.
        with contextlib.suppress(BlockingIOError, OSError):
            self._near.send(b"!")

    def _woken(self) -> None:
        """The descriptor behind `wake` is readable."""
        with contextlib.suppress(BlockingIOError):
            self._far.recv(4096)

    # -- frames that arrive -------------------------------------------------------------------------------------------

    def _checked(self, source: int, header: Header) -> Header:
        if header.source != source:
            raise ValueError(f"it calls itself rank {header.source}")
        if header.generation != (admitted := self._connections[source].generation):
            raise ValueError(f"it says that it joined in generation {header.generation}, and was admitted in {admitted}")
        return header

    def _dispatch(self, source: int, header: Header, payload: memoryview) -> None:
        """A whole frame is here. `payload` is valid only during the call, unless the kind is INLINE or BULK (it may be kept)."""
        kind = header.kind
        if kind == FrameKind.INLINE or kind == FrameKind.BULK:
            self._take_in(source, header, payload)
        elif kind == FrameKind.SHARED:
            self._sharing.deliver(source, header)
        elif kind == FrameKind.POST:
            self._hear(source, header.channel, bytes(payload))
        elif kind == FrameKind.ACK:
            connection = self._connections[source]
            for (number,) in struct.iter_unpack("<I", payload):
                self._acknowledged(connection, number)
            self._sharing.fill(connection)
        elif kind == FrameKind.GOODBYE:
            if header.channel == RETIRED:
                self._lose(source, retired_by_it(header.sequence))
                return
            self._left.add(source)
            self.post(source, TOPIC_FAREWELL, b"")
            self._lose(source, "it left the job (stretto.shutdown, or its program ended)")

    def _take_in(self, source: int, header: Header, view: memoryview) -> None:
        self._deliver((source, header.channel, header.sequence, header.index), ArrivedFrame(header, view))

    def _hand_over(self, receive: PostedReceive, message: ArrivedFrame) -> None:
        error = receive.problem(message.header)
        if error is None:
            receive.consume(message.view)
        receive.handle.finish(error)

    # -- acknowledgements ---------------------------------------------------------------------------------------------

    def _owe_ack(self, connection: Connection, number: int) -> None:
        connection.acks.append(number)
        self._unacked.add(connection.rank)

    def _flush_acks(self) -> None:
        while self._unacked:
            rank = self._unacked.pop()
            connection = self._connections.get(rank)
            if connection is None:
                continue
            if rank not in self.lost:
                body = struct.pack(f"<{len(connection.acks)}I", *connection.acks)
                self._control(rank, FrameKind.ACK, body)
            connection.acks.clear()

    def _acknowledged(self, connection: Connection, number: int) -> None:
        self._sharing.was_read(connection, number)

    # -- peers that come ----------------------------------------------------------------------------------------------

    def _on_hello(self, source: int, body: bytes) -> None:
        connection = self._connections[source]
        if connection.greeted:
            return  # twice: nothing new
        connection.greeted = True
        connection.greeting = body

    def _announce_services(self) -> None:
        for rank in self.peers:
            self._serving.greet(rank)

    def _meet_everybody(self, peers: Sequence[Peer]) -> Peer:
        """Note who is in the job; returns this worker's own entry."""
        mine = self._mine = next(peer for peer in peers if peer.rank == self.rank)
        self._lives = {peer.rank: peer.generation for peer in peers if peer is not mine}
        self._born, self.generation = mine.generation, max(peer.generation for peer in peers)
        self._door.ours = Life(self.rank, self._born)
        self._sharing.look_around(peers, mine)
        return mine

    def admit(self, peer: Peer) -> None:
        if not self._accept_later:
            raise ConfigurationError(
                f"admit(rank {peer.rank}) on rank {self.rank}: this wire closed its port when the job had formed, so nobody can "
                f"connect any more.\nMake it with accept_later=True."
            )
        self._admit_until[peer.rank] = self.now() + self.timeouts.connect_s
        super().admit(peer)

    def _look_for_absentees(self) -> None:
        for rank in list(self._admit_until):
            if rank not in self._admitted:
                del self._admit_until[rank]
            elif self.now() > self._admit_until[rank]:
                del self._admit_until[rank], self._admitted[rank]
                self._forget(rank)
                self._absent.add(rank)
                why = f"it was admitted, and did not connect within {self.timeouts.connect_s:g} s"
                self.lost[rank] = PeerLost(rank, why)
                self._tell_lost(self.lost[rank])

    def _part_from(self, rank: int, generation: int) -> None:
        self._sent += frames.HEADER_BYTES
        self._send_frame(rank, self._head(FrameKind.GOODBYE, Tag(RETIRED, generation, 0), 0, 0))
        self._left.add(rank)  # so that our last word gets out

    def _forget(self, rank: int) -> None:
        self._unacked.discard(rank)
        self._absent.discard(rank)
        self._waiting_for_farewell.discard(rank)

    @property
    def _is_newcomer(self) -> bool:
        """This worker joins a job that runs. Whom it cannot reach has most likely died, and the others know it."""
        return self._born > 0

    def _note_absence(self, rank: int, why: str) -> None:
        """To a newcomer, a peer that does not answer is lost."""
        log.info("rank %d joins without rank %d: %s", self.rank, rank, why)
        self._absent.add(rank)
        self.lost[rank] = PeerLost(rank, why)

    def _check_not_alone(self) -> None:
        """A newcomer whom nobody lets in has not joined."""
        if self._is_newcomer and self._lives and self.lost.keys() >= self._lives.keys():
            raise next(iter(self.lost.values()))

    # -- peers that go ------------------------------------------------------------------------------------------------

    def _raise_if_lost(self) -> None:
        """While the job is being formed. A peer that was here and has already left in order is no reason to fail."""
        if self._is_newcomer:
            return
        for rank, error in self.lost.items():
            if rank not in self._left:
                raise error

    def _stop_sending(self, rank: int) -> list[Handle]:
        connection = self._connections[rank]
        handles = self._orphans(rank) + [handle for handle, _, _ in connection.waiting]
        connection.waiting.clear()
        self._drop(rank)
        connection.close_boxes()
        return handles

    def close(self) -> None:
        self._end(goodbye=True)

    def abandon(self) -> None:
        self._end(goodbye=False)

    def _end(self, *, goodbye: bool) -> None:
        if self._closed:
            return
        if goodbye:
            self._say_goodbye()
        self._closed = True
        self._release()
        self._door.close()
        self._near.close()
        self._far.close()

    def _say_goodbye(self) -> None:
        """Tell every peer, and wait until each has seen it: whatever was sent before has then arrived as well."""
        self._waiting_for_farewell = {rank for rank in self.peers if rank not in self.lost}
        self._flush_acks()
        for rank in list(self._waiting_for_farewell):
            if rank not in self.lost:
                self._control(rank, FrameKind.GOODBYE)
        deadline = self.now() + self.timeouts.leave_s
        while (self._waiting_for_farewell - self.lost.keys() or self._is_parting()) and self.now() < deadline:
            self.progress(0.1)


def _close_in_child(reference: weakref.ref[FramedWire]) -> None:
    wire = reference()
    if wire is not None and not wire._closed:
        wire._close_in_child()
