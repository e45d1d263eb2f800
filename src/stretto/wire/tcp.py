"""The plain wire: one TCP connection per pair of workers, read straight into tensors. For one host, the lab and trusted networks.

ZeroMQ hands every message from thread to thread and receives into memory of its own; that cost 15-20 % of a 32 MB
all-reduce between four hosts on two cores (docs/design.md has the figures). Here the communication thread itself writes
from the caller's memory and reads into it, with nothing in between (where there are processors to spare, a second thread
does the writing: `tcp_writer.py`). What ZeroMQ gives beyond that, encryption, is why it stays the wire between hosts that do
not trust their network.

    send    header and payload leave in one system call where they fit; done when the kernel has the last byte
    recv    the header says which receive it is for; the payload is read into the tensor (copy) or into one
            reused buffer and added from there (add)

How connections are made is `tcp_meeting.py`'s part. A goodbye travels on the same connection before its end, so an end without
one is a loss, at once.

Silence. Heartbeats are frames sent when there is nothing else to say. A peer from which nothing has come for `silence_s` is
lost, unless it can be seen to be alive: heartbeats are sent by Python, and a worker that holds the interpreter lock for long is
busy, not lost. On this host its process is looked up in /proc; elsewhere it has a pulse (`pulse.py`), which needs no lock.
"""

from __future__ import annotations

import select
from pathlib import Path
from typing import Unpack

from stretto.wire import frames
from stretto.wire.base import Handle
from stretto.wire.framed import WireSettings, log
from stretto.wire.frames import FrameKind, Header
from stretto.wire.tcp_connection import FramePart, OutgoingBytes, TcpConnection
from stretto.wire.tcp_meeting import TcpMeeting
from stretto.wire.tcp_writer import Writer

READS_AT_ONCE = 8  # per connection and turn, so that one busy peer does not starve the others
HAND_OVER_BYTES = 256 << 10  # smaller payloads are written faster than handed to the writing thread
BEATS = 6  # heartbeats within `silence_s`: a short outage costs some of them, and TCP takes a while to catch up afterwards
LOOKS = 40  # at the time, within `silence_s`


class TcpWire(TcpMeeting):
    """See the module's text. The constructor listens; publish `address`, then `connect` to everybody."""

    def __init__(self, rank: int, world_size: int, *, write_in_thread: bool = False, **settings: Unpack[WireSettings]) -> None:
        super().__init__(rank, world_size, **settings)
        self._writer = Writer(self.wake) if write_in_thread else None
        self._poller.register(self._far.fileno(), select.POLLIN)
        self._parting: dict[TcpConnection, float] = {}  # to peers that are gone, and until when there may be last words
        self._unfinished: set[int] = set()  # ranks with bytes read ahead that wait for another turn
        self._looked_at = self.now()
        self._close_in_forks()

    # -- what every framed wire needs from its transport --------------------------------------------------------------

    def _send_frame(self, to: int, frame: bytes) -> None:
        self._enqueue(self._connections[to], [OutgoingBytes(memoryview(frame), None)])

    def _send_payload(self, handle: Handle, data: memoryview, dtype: int) -> None:
        head = OutgoingBytes(memoryview(self._head(FrameKind.INLINE, handle.tag, dtype, data.nbytes)), None, FramePart.HEAD)
        items = [head]
        if data.nbytes:
            items.append(OutgoingBytes(data, handle, FramePart.PAYLOAD))
        else:
            head.handle = handle
        self._enqueue(self._connections[handle.peer], items)

    def _enqueue(self, connection: TcpConnection, items: list[OutgoingBytes]) -> None:
        with connection.lock:
            connection.outgoing.extend(items)
            if connection.handed_over:
                return
            connection.handed_over = self._writer is not None and items[-1].view.nbytes >= HAND_OVER_BYTES
        if connection.handed_over and self._writer is not None:
            self._writer.take(connection)
        elif not connection.wants_to_write:
            self._write(connection)

    def _orphans(self, rank: int) -> list[Handle]:
        connection = self._connections[rank]
        with connection.writing, connection.lock:
            handles = [item.handle for item in connection.outgoing if item.handle is not None]
            if rank in self._left:
                connection.keep_last_words()
            else:
                connection.outgoing.clear()
        if connection.expected is not None:
            handles.append(connection.expected.handle)
            connection.expected = None
        return handles

    def _drop(self, rank: int) -> None:
        connection = self._connections[rank]
        if connection.closed:
            return
        connection.closed = True
        del self._by_descriptor[connection.descriptor]
        if self._pulse is not None:
            self._pulse.forget(rank)
        self._unfinished.discard(rank)
        self._parting[connection] = self.now() + (self.timeouts.leave_s if rank in self._left else 0.0)
        self._part()

    def _part(self) -> None:
        """Get the last words out, for which a peer that leaves or is retired may be waiting, and close its connection then."""
        for connection, until in list(self._parting.items()):
            if self.now() < until and not connection.part():
                mask = select.POLLIN | (select.POLLOUT if connection.outgoing else 0)
                self._poller.modify(connection.descriptor, mask)
                continue
            del self._parting[connection]
            self._poller.unregister(connection.descriptor)
            with connection.writing, connection.lock:
                connection.outgoing.clear()
                connection.socket.close()

    def _is_parting(self) -> bool:
        return any(connection.outgoing for connection in self._parting)

    def cancel(self, channel: int, sequence: int) -> None:
        super().cancel(channel, sequence)
        for connection in self._connections.values():
            expected = connection.expected
            if expected is not None and expected.handle.tag[:2] == (channel, sequence):
                # In the middle of a payload: let the rest of it go where it harms nobody.
                connection.expected = None
                connection.target = memoryview(bytearray(connection.target.nbytes))
            self._withdraw(connection, (channel, sequence))

    def _withdraw(self, connection: TcpConnection, name: tuple[int, int]) -> None:
        """What is queued from memory that its owner takes back goes out as it is now, from a copy: the frame was promised."""
        with connection.writing, connection.lock:
            for item in connection.outgoing:
                if item.handle is not None and item.handle.tag[:2] == name:
                    item.withdraw()

    # -- progress -----------------------------------------------------------------------------------------------------

    def progress(self, timeout_s: float) -> None:
        if self._unacked:
            self._flush_acks()
        timeout_s = 0.0 if self._unfinished else min(timeout_s, self.timeouts.silence_s / LOOKS)
        wake = self._far.fileno()
        for descriptor, event in self._poller.poll(timeout_s * 1000):
            if descriptor == wake:
                self._woken()
                if self._accept_later:
                    self._look_at_the_door()
                continue
            connection = self._by_descriptor.get(descriptor)
            if connection is not None and event & ~select.POLLOUT:
                self._read(connection)
            connection = self._by_descriptor.get(descriptor)
            if connection is not None and event & select.POLLOUT:
                self._write(connection)
        for rank in list(self._unfinished):
            if rank in self._unfinished:  # else a callback has retired it
                self._unfinished.discard(rank)
                self._read(self._connections[rank])
        if self._parting:
            self._part()
        if self._writer is not None and (self._writer.written or self._writer.broken):
            self._hear_from_writer(self._writer)
        self._look_after_silence()

    def _write(self, connection: TcpConnection) -> None:
        """Write what the kernel takes, and ask to be told when it takes more."""
        while connection.outgoing and not connection.closed:
            try:
                finished = connection.write_some()
            except BlockingIOError:
                break
            except OSError as error:
                self._lose(connection.rank, f"its connection broke: {error.strerror} (its process ended or was killed)")
                return
            connection.spoke_at = self.now()
            for handle in finished:
                handle.finish()
        if connection.closed:
            return
        outgoing = connection.outgoing
        if outgoing and self._writer is not None:
            connection.handed_over = True
            self._writer.take(connection)
        elif bool(outgoing) != connection.wants_to_write:
            connection.wants_to_write = bool(outgoing)
            mask = select.POLLIN | (select.POLLOUT if outgoing else 0)
            self._poller.modify(connection.descriptor, mask)

    def _hear_from_writer(self, writer: Writer) -> None:
        while writer.written:
            connection, handle = writer.written.popleft()
            connection.spoke_at = self.now()
            handle.finish()
        while writer.broken:
            connection, problem = writer.broken.popleft()
            if not connection.closed:
                self._lose(connection.rank, f"its connection broke: {problem} (its process ended or was killed)")

    def _read(self, connection: TcpConnection) -> None:
        for _ in range(READS_AT_ONCE):
            try:
                received = connection.receive()
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(connection.rank, f"its connection broke: {error.strerror} (its process ended or was killed)")
                return
            if not received:
                self._lose(connection.rank, "its connection closed without a goodbye (its process ended or was killed)")
                return
            connection.heard = True
            try:
                self._digest(connection)
            except BaseException:  # a callback's, not the peer's fault: what was read ahead is looked at in the next turn
                if not connection.closed:
                    self._unfinished.add(connection.rank)
                raise
            if connection.closed:
                return
        if connection.begin < connection.end:
            self._unfinished.add(connection.rank)

    def _digest(self, connection: TcpConnection) -> None:
        """Turn the bytes that are here into frames, as far as they go."""
        while not connection.closed:
            if connection.header is None:
                if connection.end - connection.begin < frames.HEADER_BYTES:
                    return
                try:
                    self._begin_frame(connection)
                except ValueError as problem:
                    self._lose(connection.rank, f"it sent a bad frame: {problem}")
                    return
            connection.take_ahead()
            if connection.filled < connection.target.nbytes:
                return
            self._end_frame(connection)

    def _begin_frame(self, connection: TcpConnection) -> None:
        head = connection.ahead[connection.begin : connection.begin + frames.HEADER_BYTES]
        connection.begin += frames.HEADER_BYTES
        header = self._checked(connection.rank, frames.decode_stream(head))
        if header.kind == FrameKind.BULK:
            raise ValueError("a payload in a part of its own, where there are no parts")
        connection.header = header
        connection.filled = 0
        connection.target = self._target(connection, header)

    def _target(self, connection: TcpConnection, header: Header) -> memoryview:
        if header.kind == FrameKind.SHARED:
            return memoryview(b"")
        if header.kind != FrameKind.INLINE:
            return connection.staging_of(header.num_bytes)
        key = (connection.rank, header.channel, header.sequence, header.index)
        expected = self._expected.get(key)
        if expected is None:
            self._check_room(connection.rank, header.num_bytes)
            return memoryview(bytearray(header.num_bytes))  # to be parked
        if expected.problem(header) is None:
            connection.expected = self._expected.pop(key)
            if expected.into is not None:
                return expected.into
        return connection.staging_of(header.num_bytes)

    def _end_frame(self, connection: TcpConnection) -> None:
        header, target, expected = connection.header, connection.target, connection.expected
        assert header is not None
        connection.header = connection.expected = None
        connection.target = memoryview(b"")
        if expected is not None:
            if expected.into is None:
                expected.consume(target)
            expected.handle.finish()
        elif header.kind == FrameKind.INLINE:
            self._take_in(connection.rank, header, connection.private(target))
        elif header.kind != FrameKind.HEARTBEAT:
            self._dispatch(connection.rank, header, target)

    # -- silence ------------------------------------------------------------------------------------------------------

    def _look_after_silence(self) -> None:
        now = self.now()
        since, silence_s = now - self._looked_at, self.timeouts.silence_s
        if since < silence_s / LOOKS:
            return
        self._looked_at = now
        self._look_for_absentees()
        for connection in list(self._by_descriptor.values()):
            if connection.closed:
                continue  # a callback has retired it
            # While this process was stopped, or its communication thread got no turn, nobody listened. Peers may have been
            # stopped at the same time (Ctrl-Z stops a whole job), so such a pause counts for no more than one heartbeat.
            # What was heard since the last look counts as heard now, so that nobody is lost too early.
            connection.silent_s = 0.0 if connection.heard else connection.silent_s + min(since, silence_s / BEATS)
            connection.heard = False
            if now - connection.spoke_at > silence_s / BEATS and not connection.outgoing:
                self._control(connection.rank, FrameKind.HEARTBEAT)
            if connection.silent_s > silence_s and not connection.closed:
                self._judge_silence(connection)

    def _judge_silence(self, connection: TcpConnection) -> None:
        if self._is_alive(connection):
            if not connection.warned:
                connection.warned = True
                # In another PID namespace or on another host, the pid would be that of some other process.
                process = f"its process {connection.pid}" if connection.near else "its process"
                log.warning(
                    "rank %d: rank %d has been silent for %.0f s, but %s is running: it seems to hold the interpreter lock",
                    self.rank, connection.rank, connection.silent_s, process,
                )  # fmt: skip
            return
        self._lose(
            connection.rank,
            f"silent for {connection.silent_s:.0f} s (its process is stopped, or its host or network is down)",
        )

    def _is_alive(self, connection: TcpConnection) -> bool:
        """Whether a silent worker can be seen to be alive in another way."""
        if connection.near:
            return _is_running(connection.pid)
        return self._pulse is not None and self._pulse.silent_s(connection.rank) <= self.timeouts.silence_s

    # -- the end ------------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        for rank in self._connections:
            if rank not in self.lost:
                self._drop(rank)
                self._connections[rank].close_boxes()
        self._parting = dict.fromkeys(self._parting, self.now())
        self._part()
        for newcomer in self._newcomers.values():
            newcomer.close()
        if self._pulse is not None:
            self._pulse.close()
        if self._writer is not None:
            self._writer.stop(1.0)

    def _close_in_child(self) -> None:
        self._door.close_in_child()
        connections = (*self._by_descriptor.values(), *self._parting)
        for held in (*self._newcomers.values(), *(connection.socket for connection in connections)):
            held.close()


def _is_running(pid: int) -> bool:
    """Whether a process of this host is neither stopped nor dead. (Where /proc is missing or another's, it counts as gone.)"""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in ("R", "S", "D", "I")
