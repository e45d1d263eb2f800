"""Which messages take the shorter way, through shared memory, and how two workers agree on that.

The first large message to a worker of this host travels over the socket, and beside it the offer of an outbox
(`shared_memory.py`). Once the other side has mapped it, later messages lie there, and frames only say where. One that finds no
room waits until the receiver has acknowledged others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from stretto.launching.peers import Peer
from stretto.wire import frames
from stretto.wire.base import Handle
from stretto.wire.frames import FrameKind, Header
from stretto.wire.mapping import MappingOffer
from stretto.wire.shared_memory import OUTBOX_BYTES, Inbox, Outbox

if TYPE_CHECKING:
    from stretto.wire.framed import Connection, FramedWire

SHARED_FROM_BYTES = 16 << 10
TOPIC_OFFER = 1
TOPIC_ANSWER = 2

log = logging.getLogger("stretto.wire")


class Answer(msgspec.Struct, frozen=True):
    problem: str | None = None


class Sharing:
    """One wire's shared memory. See the module's text."""

    def __init__(self, wire: FramedWire, *, wanted: bool) -> None:
        self.wanted = wanted
        self._wire = wire
        self._num_near = 1  # workers of this host
        self._warned = False
        wire.listen(TOPIC_OFFER, self._on_offer)
        wire.listen(TOPIC_ANSWER, self._on_answer)

    def look_around(self, peers: Sequence[Peer], mine: Peer) -> None:
        """Note who is on this host."""
        self._num_near = sum(peer.host == mine.host for peer in peers)
        apart = [peer.rank for peer in peers if peer.host == mine.host and not mine.sees(peer)]
        if apart and self.wanted:
            self._warn_once(
                f"rank {apart[0]} is on this host but in another PID namespace (a container of its own), so there is no shared "
                f"memory towards it; using sockets, which is slower. Let the containers share one (docker run --pid)"
            )

    def takes(self, connection: Connection, handle: Handle, data: memoryview, dtype: int) -> bool:
        """Whether the message goes through shared memory; then it is on its way."""
        if data.nbytes < SHARED_FROM_BYTES:
            return False
        if connection.outbox_open and connection.outbox is not None and data.nbytes <= connection.outbox.num_bytes:
            connection.waiting.append((handle, data, dtype))
            self.fill(connection)
            return True
        if connection.may_share:
            self._offer(connection)
        return False

    def fill(self, connection: Connection) -> None:
        """Put what waits into the outbox, as far as there is room."""
        while connection.waiting and connection.outbox is not None:
            handle, data, dtype = connection.waiting[0]
            slot = connection.outbox.put(data)
            if slot is None:
                return
            connection.waiting.popleft()
            number = connection.number()
            connection.slots[number] = slot
            self._wire._sent += frames.HEADER_BYTES
            frame = self._wire._head(FrameKind.SHARED, handle.tag, dtype, data.nbytes, number, slot)
            self._wire._send_frame(connection.rank, frame)
            handle.finish()

    def deliver(self, source: int, header: Header) -> None:
        connection = self._wire._connections[source]
        try:
            if connection.inbox is None:
                raise ValueError("shared memory before it was agreed on")
            view = connection.inbox.view(header.slot, header.num_bytes)
        except ValueError as problem:
            self._wire._lose(source, f"it sent a bad frame: {problem}")
            return
        if (source, header.channel, header.sequence, header.index) not in self._wire._expected:
            view = memoryview(bytes(view))  # too early: make room, so that parked messages never block the slots
        try:
            self._wire._take_in(source, header, view)
        finally:
            if self._wire._connections.get(source) is connection:  # a callback may have retired it
                self._wire._owe_ack(connection, header.number)

    def was_read(self, connection: Connection, number: int) -> None:
        """The receiver has acknowledged a message."""
        slot = connection.slots.pop(number, None)
        if slot is not None and connection.outbox is not None:
            connection.outbox.release(slot)

    def _offer(self, connection: Connection) -> None:
        """The first large message is on its way to this peer; later ones may take the shorter way."""
        connection.may_share = False
        try:
            connection.outbox = Outbox(OUTBOX_BYTES, of_all=OUTBOX_BYTES * self._num_near * (self._num_near - 1))
        except OSError as problem:
            self._warn_once(
                f"no shared memory towards rank {connection.rank} ({problem}); using sockets, which is slower. Free some memory "
                f"on this host, or start fewer workers there"
            )
            return
        self._wire.post(connection.rank, TOPIC_OFFER, msgspec.msgpack.encode(connection.outbox.offer))

    def _on_offer(self, source: int, body: bytes) -> None:
        problem = None
        connection = self._wire._connections[source]
        try:
            if not self.wanted:
                raise ValueError("switched off on this side")
            if connection.inbox is not None:
                raise ValueError("there is one already")
            connection.inbox = Inbox(msgspec.msgpack.decode(body, type=MappingOffer))
        except (OSError, ValueError, RecursionError) as error:
            problem = str(error)
        self._wire.post(source, TOPIC_ANSWER, msgspec.msgpack.encode(Answer(problem)))

    def _on_answer(self, source: int, body: bytes) -> None:
        connection = self._wire._connections[source]
        outbox = connection.outbox
        if outbox is None or connection.outbox_open:
            return
        outbox.settle()
        try:
            problem = msgspec.msgpack.decode(body, type=Answer).problem
        except (ValueError, RecursionError) as error:  # ValueError: msgspec's own, and text that is not UTF-8
            problem = str(error)
        if problem is None:
            connection.outbox_open = True
        else:
            self._warn_once(f"rank {source} cannot use shared memory ({problem}); using sockets, which is slower")
            connection.outbox = None

    def _warn_once(self, text: str) -> None:
        """What is wrong with shared memory is mostly wrong towards every peer: said once, not once for each."""
        log.log(logging.DEBUG if self._warned else logging.WARNING, "rank %d: %s", self._wire.rank, text)
        self._warned = True
