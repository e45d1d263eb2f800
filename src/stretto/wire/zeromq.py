"""The encrypted wire: ZeroMQ with CURVE, between hosts.

Each worker listens on one port (a ROUTER socket) and connects to each peer's (a DEALER each); every message travels on the
sender's own connection, so each side learns of the other's death from its own connection and knows the rank.

    up to 128 KiB   copied into the message: the handle is done when `send` returns
    larger          sent without a copy: done when the receiver has acknowledged it
    same host       copied once into a slot of shared memory, read there by the receiver

Failure. ZMTP heartbeats run in ZeroMQ's own threads. A closed connection means a lost peer after `GRACE_S` (in which a goodbye on
the other connection may still come in); a silent one after at most `silence_s`. Both connections of a pair count, so a peer that
has given us up, or whose message was too large to be let in, is lost here as well. A peer that is lost stays lost: ZeroMQ would
reconnect and go on after losing messages, which no collective survives.

Security. CURVE: server and client keys by HKDF from the job's secret, so who lacks the secret cannot finish the handshake. With
`encrypt=False` PLAIN with a password derived from the secret: no encryption, but strangers are still turned away. (Where no
encryption is wanted `tcp.py` is the faster wire; see there.)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Sequence

import zmq

from stretto.errors import ConfigurationError, SecretError, UnreachableError
from stretto.job.hosts import join_address
from stretto.job.membership import Peer
from stretto.job.zap import ZapHandler, secure_client, secure_server
from stretto.timeouts import Timeouts
from stretto.wire import frames
from stretto.wire.base import Handle
from stretto.wire.framed import TOPIC_HELLO, Connection, FramedWire
from stretto.wire.frames import FrameKind
from stretto.wire.zeromq_watch import EVENTS, LISTENER, LISTENER_EVENTS, Event, Seen, Watcher

INLINE_BYTES = 32 << 10  # header and payload in one part
COPIED_BYTES = 128 << 10  # below this a copy is cheaper than tracking when the memory is free again
GRACE_S = 0.2
FAREWELL_MS = 200  # for our last word to a peer that leaves; it waits for it, so this is only used up if it dies meanwhile
DRAIN_AT_ONCE = 32
IDENTITY = struct.Struct("<I8s")


class _Connection(Connection):
    def __init__(self, peer: Peer, same_host: bool, dealer: zmq.Socket[bytes]) -> None:
        super().__init__(peer.rank, peer.address, same_host, peer.pid)
        self.dealer = dealer
        self.connected = False
        self.unacknowledged: dict[int, Handle] = {}


class ZeroMQWire(FramedWire):
    """See the module's text. `bind` in the constructor, then publish `address`, then `connect` to everybody."""

    segment_bytes = 1 << 20  # a message is encrypted whole before its first byte leaves: shorter ones overlap better

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        secret: bytes,
        encrypt: bool = True,
        bind: str = "127.0.0.1",
        port: int = 0,
        timeouts: Timeouts | None = None,
        generation: int = 0,
        shared_memory: bool = True,
    ) -> None:
        super().__init__(rank, world_size, timeouts=timeouts, generation=generation, shared_memory=shared_memory)
        self._secret = secret
        self._encrypt = encrypt
        self._identity = IDENTITY.pack(rank, secrets.token_bytes(8))
        self._connections: dict[int, _Connection] = {}
        self._sources: dict[bytes, int] = {}
        self._incoming: dict[int, int] = {}  # number of a connection that we accepted -> the rank that made it
        self._suspects: dict[int, float] = {}  # rank -> when its silence becomes a loss
        self._refused: set[int] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=2 if (os.cpu_count() or 1) >= 8 else 1)
        self._watcher = Watcher(ZapHandler(self._context, encrypted=encrypt, secret=secret), self.wake)
        self._router = self._listen_on(bind, port)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._far.fileno(), zmq.POLLIN)
        # A forked child (a DataLoader's worker) would keep the connections open after this process has died.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(this))

    # -- making connections -------------------------------------------------------------------------------------------

    def _listen_on(self, host: str, port: int) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.RCVHWM, 0)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.MAXMSGSIZE, frames.MAX_PAYLOAD_BYTES + frames.HEADER_BYTES)
        self._set_heartbeat(router)
        secure_server(router, self._secret, encrypted=self._encrypt)
        try:
            router.setsockopt(zmq.IPV6, int(":" in host))
            router.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}")
        except zmq.ZMQError as error:
            router.close(0)
            self._release()
            raise ConfigurationError(
                f"rank {self.rank} cannot listen on {host}:{port or 'any port'}: {error}.\n"
                f"Choose another address or port, or none to let the system pick a free port."
            ) from error
        self._watcher.add(LISTENER, router.get_monitor_socket(LISTENER_EVENTS))
        endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = endpoint.rstrip(b"\0").decode().removeprefix("tcp://")
        return router

    def _set_heartbeat(self, zmq_socket: zmq.Socket[bytes]) -> None:
        silence_ms = self.timeouts.silence_s * 1000
        zmq_socket.setsockopt(zmq.HEARTBEAT_IVL, max(50, int(silence_ms / 5)))
        zmq_socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(100, int(silence_ms * 0.65)))

    def connect(self, peers: Sequence[Peer]) -> None:
        """Connect to every peer and exchange greetings; returns when all have answered."""
        mine = next(peer for peer in peers if peer.rank == self.rank)
        for peer in peers:
            if peer.rank != self.rank:
                self._connect_one(peer, same_host=peer.host == mine.host)
        deadline = self.now() + self.timeouts.connect_s
        # `connected` too: our greeting goes out when the connection is made, and a peer may wait for it when we have theirs.
        while not all(connection.greeted and connection.connected for connection in self._connections.values()):
            if self._refused:
                self._give_up_refused()
            self._raise_if_lost()
            if self.now() > deadline:
                self._give_up_unreachable()
            self.progress(0.2)

    def _connect_one(self, peer: Peer, *, same_host: bool) -> None:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, self._identity)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, int(self.timeouts.connect_s * 1000))
        self._set_heartbeat(dealer)
        secure_client(dealer, self._secret, encrypted=self._encrypt)
        monitor = dealer.get_monitor_socket(EVENTS)
        self._connections[peer.rank] = _Connection(peer, same_host, dealer)
        self._watcher.add(peer.rank, monitor)
        dealer.setsockopt(zmq.IPV6, int(peer.address.startswith("[")))
        dealer.connect(f"tcp://{peer.address}")

    def _give_up_refused(self) -> None:
        rank = min(self._refused)
        raise SecretError(
            f"rank {rank} at {self._connections[rank].address} refused rank {self.rank}: the two do not share the "
            f"job's secret.\nGive every node the same --secret-file, and start all of them for the same job."
        )

    def _give_up_unreachable(self) -> None:
        missing = [each for each in self._connections.values() if not (each.greeted and each.connected)]
        listing = ", ".join(f"rank {connection.rank} at {connection.address}" for connection in missing)
        raise UnreachableError(
            f"rank {self.rank} could not reach {listing} within {self.timeouts.connect_s:g} s.\n"
            f"A firewall may block the port, or the worker publishes an interface that is not routed here: "
            f"set STRETTO_INTERFACE on that host to the interface (or address) the others can reach."
        )

    # -- what every framed wire needs from its transport --------------------------------------------------------------

    def _connection(self, rank: int) -> _Connection:
        return self._connections[rank]

    def _peers(self) -> list[int]:
        return list(self._connections)

    def _send_frame(self, to: int, frame: bytes) -> None:
        self._connections[to].dealer.send(frame, zmq.NOBLOCK)

    def _send_payload(self, handle: Handle, data: memoryview, dtype: int) -> None:
        connection, tag, num_bytes = self._connections[handle.peer], handle.tag, data.nbytes
        if num_bytes <= INLINE_BYTES:
            head = self._head(FrameKind.INLINE, tag, dtype, num_bytes)
            connection.dealer.send(b"".join((head, data)), zmq.NOBLOCK)
            handle.finish()
        elif num_bytes <= COPIED_BYTES:
            # Copied, so nobody waits for the acknowledgement that a bulk message asks for: number 0 means none.
            connection.dealer.send(self._head(FrameKind.BULK, tag, dtype, num_bytes), zmq.NOBLOCK | zmq.SNDMORE)
            connection.dealer.send(data, zmq.NOBLOCK)
            handle.finish()
        else:
            number = connection.number()
            connection.unacknowledged[number] = handle
            head = self._head(FrameKind.BULK, tag, dtype, num_bytes, number)
            connection.dealer.send(head, zmq.NOBLOCK | zmq.SNDMORE)
            connection.dealer.send(data, zmq.NOBLOCK, copy=False)

    def _acknowledged(self, connection: Connection, number: int) -> None:
        super()._acknowledged(connection, number)
        handle = self._connections[connection.rank].unacknowledged.pop(number, None)
        if handle is not None:
            handle.finish()

    def _orphans(self, rank: int) -> list[Handle]:
        connection = self._connections[rank]
        handles = list(connection.unacknowledged.values())
        connection.unacknowledged.clear()
        return handles + super()._orphans(rank)

    def _drop(self, rank: int) -> None:
        self._suspects.pop(rank, None)
        connection = self._connections[rank]
        connection.dealer.disable_monitor()
        connection.dealer.close(FAREWELL_MS if rank in self._left else 0)

    # -- progress -----------------------------------------------------------------------------------------------------

    def progress(self, timeout_s: float) -> None:
        if not self._drain():
            self._flush_acks()
            self._block(timeout_s)
            self._drain()
        if self._watcher.events or self._suspects:
            self._weigh_events()

    def _block(self, timeout_s: float) -> None:
        if self._suspects:
            timeout_s = min(timeout_s, max(0.0, min(self._suspects.values()) - self.now()))
        elif self._watcher.events:
            return
        for ready, _ in self._poller.poll(max(0, int(timeout_s * 1000))):
            if ready == self._far.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._far.recv(4096)

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
        body = router.recv(copy=False) if router.getsockopt(zmq.RCVMORE) else None
        extra = 0
        while router.getsockopt(zmq.RCVMORE):
            router.recv()
            extra += 1
        source = self._sources.get(identity)
        if source is None or source in self.lost:
            return
        try:
            header = self._checked(source, head)
            if extra or (header.kind == FrameKind.BULK) != (body is not None):
                raise ValueError("parts missing or not called for")
            if body is not None and len(body.buffer) != header.num_bytes:
                raise ValueError(f"{len(body.buffer)} bytes of payload, {header.num_bytes} declared")
        except ValueError as problem:
            self._lose(source, f"it sent a bad frame: {problem}")
            return
        if header.kind == FrameKind.BULK and header.number:
            self._owe_ack(self._connections[source], header.number)  # it is here: the sender's memory is free
        self._dispatch(source, header, memoryview(head)[frames.HEADER_BYTES :] if body is None else body.buffer)

    def _head_from(self, identity: bytes) -> bytes:
        router = self._router
        if not router.getsockopt(zmq.RCVMORE):
            return b""
        if identity in self._sources:
            return router.recv()
        first = router.recv(copy=False)
        self._meet(identity, int(first.get(zmq.SRCFD)))
        return first.bytes

    def _meet(self, identity: bytes, descriptor: int) -> None:
        if len(identity) != IDENTITY.size:
            return
        rank = int(IDENTITY.unpack(identity)[0])
        if rank in self._connections and rank not in self._sources.values():
            self._sources[identity] = rank
            connection = self._watcher.connection_on(descriptor)
            if connection is not None:
                self._incoming[connection] = rank

    # -- peers come and go --------------------------------------------------------------------------------------------

    def _weigh_events(self) -> None:
        while self._watcher.events:
            self._weigh(self._watcher.events.popleft())
        for rank, due in list(self._suspects.items()):
            if self.now() >= due:
                del self._suspects[rank]
                self._lose(
                    rank,
                    f"its connection broke or fell silent for {self.timeouts.silence_s:g} s "
                    f"(process killed or stopped, host or network down)",
                )

    def _weigh(self, event: Event) -> None:
        if event.rank == LISTENER:
            rank = self._incoming.pop(event.connection, None)
            if rank is not None and rank not in self.lost:
                self._suspect(rank)
            return
        connection = self._connections.get(event.rank)
        if connection is None or event.rank in self.lost:
            return
        if event.seen is Seen.CONNECTED and not connection.connected:
            connection.connected = True
            self.post(event.rank, TOPIC_HELLO, b"")
        elif event.seen is Seen.REFUSED and not connection.connected:
            self._refused.add(event.rank)
        elif event.seen is Seen.DISCONNECTED and connection.connected:
            self._suspect(event.rank)

    def _suspect(self, rank: int) -> None:
        self._suspects.setdefault(rank, self.now() + min(GRACE_S, self.timeouts.silence_s / 10))

    # -- the end ------------------------------------------------------------------------------------------------------

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
        for rank in self._connections:
            if rank not in self.lost:
                self._drop(rank)
                self._close_boxes(self._connections[rank])
        self._router.disable_monitor()
        self._router.close(0)
        self._release()

    def _release(self) -> None:
        self._watcher.stop(1.0)
        self._context.term()
        self._near.close()
        self._far.close()


def _close_in_child(reference: weakref.ref[ZeroMQWire]) -> None:
    """ZeroMQ keeps its descriptors to itself, so find the ones that end at our port or at a peer's."""
    wire = reference()
    if wire is None or wire._closed:
        return
    addresses = {wire.address, *(connection.address for connection in wire._connections.values())}
    for name in _open_descriptors():
        with contextlib.suppress(OSError):
            probe = socket.socket(fileno=os.dup(name))
            ends = [probe.getsockname()]
            with contextlib.suppress(OSError):
                ends.append(probe.getpeername())
            probe.close()
            if any(isinstance(end, tuple) and join_address(str(end[0]), end[1]) in addresses for end in ends):
                os.close(name)


def _open_descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return []
