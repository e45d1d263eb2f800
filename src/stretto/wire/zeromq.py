"""The encrypted wire: ZeroMQ with CURVE, between hosts.

Each worker listens on one port (a ROUTER socket) and connects to each peer's (a DEALER each); every message travels on the
sender's own connection, so each side learns of the other's death from its own connection and knows the rank.

    up to 128 KiB   copied into the message: the handle is done when `send` returns
    larger          sent without a copy: done when the receiver has acknowledged it
    same host       copied once into a slot of shared memory, read there by the receiver

Failure. ZMTP heartbeats run in ZeroMQ's own threads, without the interpreter lock. A closed connection means a lost peer after
`GRACE_S` (in which a goodbye on the other connection may still come in), and ZeroMQ closes one on which nothing has come for
`silence_s`. Both connections of a pair count, so a peer that has given us up, or whose message was too large to be let in, is
lost here as well. A peer that is lost stays lost: ZeroMQ would reconnect and go on after losing messages, which no collective
survives.

How connections are made, and who may make one, is in `zeromq_meeting.py`.
"""

from __future__ import annotations

import contextlib
import os
import socket

import zmq

from stretto.launching.hosts import join_address
from stretto.wire import frames
from stretto.wire.base import Handle
from stretto.wire.framed import Connection
from stretto.wire.frames import FrameKind
from stretto.wire.zeromq_meeting import IDENTITY, INLINE_BYTES, WELCOME, DealerConnection, ZeroMQMeeting
from stretto.wire.zeromq_watch import LISTENER, ConnectionEvent, Seen

COPIED_BYTES = 128 << 10  # below this a copy is cheaper than tracking when the memory is free again
GRACE_S = 0.2
FAREWELL_MS = 200  # for our last word to a peer that leaves; it waits for it, so this is only used up if it dies meanwhile
DRAIN_AT_ONCE = 32


class ZeroMQWire(ZeroMQMeeting):
    """See the module's text. The constructor listens; publish `address`, then `connect` to everybody."""

    # A message is encrypted whole before its first byte leaves: shorter ones overlap better. And up to 16 workers one is a part.
    segment_bytes = 512 << 10

    def _forget(self, rank: int) -> None:
        super()._forget(rank)
        connection = self._connections.pop(rank, None)
        if connection is not None and connection.number_watched in self._watched:
            self._close(connection)
        self._sources = {identity: other for identity, other in self._sources.items() if other != rank}
        self._incoming = {number: other for number, other in self._incoming.items() if other != rank}

    # -- what every framed wire needs from its transport --------------------------------------------------------------

    def _send_frame(self, to: int, frame: bytes) -> None:
        dealer = self._connections[to].dealer
        if len(frame) < self._part_bytes:
            dealer.send(frame, zmq.NOBLOCK)
        else:  # a long control message: its header is in a part that is full, and `_take` joins it with the others
            self._send_parts(dealer, memoryview(frame))

    def _send_parts(self, dealer: zmq.Socket[bytes], data: memoryview, *, copy: bool = False) -> None:
        step = self._part_bytes
        last = (data.nbytes - 1) // step * step
        for begin in range(0, last, step):
            dealer.send(data[begin : begin + step], zmq.NOBLOCK | zmq.SNDMORE, copy=copy)
        dealer.send(data[last:], zmq.NOBLOCK, copy=copy)

    def _send_payload(self, handle: Handle, data: memoryview, dtype: int) -> None:
        connection, tag, num_bytes = self._connections[handle.peer], handle.tag, data.nbytes
        if num_bytes <= INLINE_BYTES:
            head = self._head(FrameKind.INLINE, tag, dtype, num_bytes)
            connection.dealer.send(b"".join((head, data)), zmq.NOBLOCK)
            handle.finish()
        elif num_bytes <= COPIED_BYTES:
            # Copied, so nobody waits for the acknowledgement that a bulk message asks for: number 0 means none.
            connection.dealer.send(self._head(FrameKind.BULK, tag, dtype, num_bytes), zmq.NOBLOCK | zmq.SNDMORE)
            self._send_parts(connection.dealer, data, copy=True)
            handle.finish()
        else:
            number = connection.number()
            connection.unacknowledged[number] = handle
            head = self._head(FrameKind.BULK, tag, dtype, num_bytes, number)
            connection.dealer.send(head, zmq.NOBLOCK | zmq.SNDMORE)
            self._send_parts(connection.dealer, data)

    def _acknowledged(self, connection: Connection, number: int) -> None:
        super()._acknowledged(connection, number)
        assert isinstance(connection, DealerConnection)
        handle = connection.unacknowledged.pop(number, None)
        if handle is not None:
            handle.finish()

    def _orphans(self, rank: int) -> list[Handle]:
        connection = self._connections[rank]
        handles = list(connection.unacknowledged.values())
        connection.unacknowledged.clear()
        return handles

    def _drop(self, rank: int) -> None:
        self._close(self._connections[rank])

    def _close(self, connection: DealerConnection) -> None:
        self._suspects.pop(connection.rank, None)
        del self._watched[connection.number_watched]
        connection.dealer.disable_monitor()
        connection.dealer.close(FAREWELL_MS if connection.rank in self._left else 0)

    # -- progress -----------------------------------------------------------------------------------------------------

    def progress(self, timeout_s: float) -> None:
        if not self._drain():
            self._flush_acks()
            self._block(timeout_s)
            self._drain()
        if self._watcher.events or self._suspects:
            self._weigh_events()
        if self._admit_until:
            self._look_for_absentees()

    def _block(self, timeout_s: float) -> None:
        if self._suspects:
            timeout_s = min(timeout_s, max(0.0, min(self._suspects.values()) - self.now()))
        elif self._watcher.events:
            return
        for ready, _ in self._poller.poll(max(0, int(timeout_s * 1000))):
            if ready == self._far.fileno():
                self._woken()

    def _drain(self) -> bool:
        """Take what has arrived, a bounded amount; say whether there was anything."""
        router = self._router
        for count in range(DRAIN_AT_ONCE):
            try:
                identity = router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return count > 0
            self._take(identity)
        return True

    def _take(self, identity: bytes) -> None:
        router = self._router
        head = self._head_from(identity)
        parts: list[zmq.Frame] = []
        while router.getsockopt(zmq.RCVMORE):
            parts.append(router.recv(copy=False))
        source = self._sources.get(identity)
        if source is None or (source in self.lost and source not in self._admitted):
            return
        if len(head) == self._part_bytes:
            head, parts = b"".join([head, *(part.buffer for part in parts)]), []
        try:
            header = self._checked(source, frames.decode(head))
            if len(parts) != (-(-header.num_bytes // self._part_bytes) if header.kind == FrameKind.BULK else 0):
                raise ValueError("parts missing or not called for")
            num_bytes = sum(len(part.buffer) for part in parts)
            if parts and num_bytes != header.num_bytes:
                raise ValueError(f"{num_bytes} bytes of payload, {header.num_bytes} declared")
        except ValueError as problem:
            self._lose(source, f"it sent a bad frame: {problem}")
            return
        self._connections[source].heard_at = self.now()
        if header.kind == FrameKind.BULK and header.number:
            self._owe_ack(self._connections[source], header.number)  # it is here: the sender's memory is free
        self._dispatch(source, header, _payload(head, parts))

    def _head_from(self, identity: bytes) -> bytes:
        router = self._router
        if not router.getsockopt(zmq.RCVMORE):
            return b""
        if identity in self._sources and not self._forming:
            return router.recv()
        first = router.recv(copy=False)
        self._meet(identity, int(first.get(zmq.SRCFD)))
        return first.bytes

    def _meet(self, identity: bytes, descriptor: int) -> None:
        if len(identity) != IDENTITY.size:
            return
        rank, generation, _ = IDENTITY.unpack(identity)
        known = self._connections.get(rank)
        if known is None or known.generation != generation:
            return  # nobody has admitted it (yet)
        if identity in self._sources or rank not in self._sources.values():
            connection = self._watcher.admit(descriptor)
            if connection is not None:  # else it has been sent away meanwhile, and will come again and say the same
                self._sources[identity] = rank
                self._incoming = {known: other for known, other in self._incoming.items() if other != rank}
                self._incoming[connection] = rank

    # -- peers come and go --------------------------------------------------------------------------------------------

    def _weigh_events(self) -> None:
        while self._watcher.events:
            self._weigh(self._watcher.events.popleft())
        for rank, due in list(self._suspects.items()):
            if self.now() >= due:
                if self._suspects.pop(rank, None) is None:
                    continue  # a callback has retired it
                self._lose(rank, self._why_disconnected(self._connections[rank]))

    def _why_disconnected(self, connection: DealerConnection) -> str:
        """ZeroMQ does not say who closed a connection. It does so itself only after `silence_s` without a byte, so if a message
        has come since, it was the other side. Of a peer that had nothing to say for that long we cannot tell."""
        if self.now() - connection.heard_at < self.timeouts.silence_s:
            return "its connection closed without a goodbye (its process ended or was killed)"
        return (
            f"its connection broke or was silent for {self.timeouts.silence_s:g} s "
            f"(process killed or stopped, host or network down)"
        )

    def _weigh(self, event: ConnectionEvent) -> None:
        if event.watched == LISTENER:
            rank = self._incoming.pop(event.accepted, None)
            if rank is not None and rank not in self.lost:
                self._suspect(rank)
            return
        connection = self._watched.get(event.watched)
        if connection is None:
            return
        if event.seen is Seen.CONNECTED and not connection.connected:
            connection.connected = True
            connection.told = connection.greeted
            self._say_hello(connection.rank, WELCOME if connection.greeted else b"")
            if connection.rank in self._admitted and connection.complete:
                self._joined(connection.rank)
        elif event.seen is Seen.HUNG_UP and not connection.connected:
            # It may not have been told about everybody yet, or be crowded by strangers: ZeroMQ tries again.
            connection.hung_up += 1
        elif event.seen is Seen.DISCONNECTED and connection.connected:
            if self._forming or connection.rank in self._admitted:
                # One too many among strangers: ZeroMQ tries again, and we look whether the peer is still there.
                connection.connected = False
            else:
                self._suspect(connection.rank)

    def _suspect(self, rank: int) -> None:
        self._suspects.setdefault(rank, self.now() + min(GRACE_S, self.timeouts.silence_s / 10))

    # -- the end ------------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        for connection in list(self._watched.values()):
            self._close(connection)
            connection.close_boxes()
        self._router.disable_monitor()
        self._router.close(0)
        self._watcher.stop(1.0)
        self._context.term()

    def _close_in_child(self) -> None:
        """ZeroMQ keeps its descriptors to itself, so find the ones that end at our port or at a peer's."""
        addresses = {self.address, *(connection.address for connection in self._connections.values())}
        names: list[str] = []
        with contextlib.suppress(OSError):  # a sandbox may have no /proc
            names = os.listdir("/proc/self/fd")
        for name in map(int, names):
            with contextlib.suppress(OSError):
                probe = socket.socket(fileno=os.dup(name))
                ends = [probe.getsockname()]
                with contextlib.suppress(OSError):
                    ends.append(probe.getpeername())
                probe.close()
                if any(isinstance(end, tuple) and join_address(*end[:2]) in addresses for end in ends):
                    os.close(name)


def _payload(head: bytes, parts: list[zmq.Frame]) -> memoryview:
    if not parts:
        return memoryview(head)[frames.HEADER_BYTES :]
    return parts[0].buffer if len(parts) == 1 else memoryview(b"".join(part.buffer for part in parts))
