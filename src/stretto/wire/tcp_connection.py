"""One TCP connection to a peer, and how far reading and writing have got on it.

Bytes are read ahead into a small buffer, from which headers are taken. A payload is read past it, straight to where it goes: the
tensor of its receive, or a buffer that is used again for every payload that is added from there.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
from collections import deque
from typing import Final

from stretto.launching.peers import Peer
from stretto.wire.base import Handle
from stretto.wire.framed import Connection
from stretto.wire.frames import HEADER_BYTES, Header
from stretto.wire.mailbox import PostedReceive

READ_AHEAD_BYTES: Final = 64 << 10
MAX_GATHER: Final = 16
UNSENT_BYTES: Final = 128 << 10  # in the kernel, where the order must not be settled long before something leaves


class FramePart(enum.Enum):
    WHOLE = enum.auto()  # a frame that is complete in itself
    HEAD = enum.auto()  # the header of a payload
    PAYLOAD = enum.auto()


class OutgoingBytes:
    """Bytes on their way: what is left of a frame, and whom to tell when the last has gone."""

    __slots__ = ("handle", "part", "view")

    def __init__(self, view: memoryview, handle: Handle | None, part: FramePart = FramePart.WHOLE) -> None:
        self.view = view
        self.handle = handle
        self.part = part

    def withdraw(self) -> None:
        """The owner takes its memory back: what is there now goes out, from a copy."""
        self.view = memoryview(bytes(self.view))
        self.handle = None


class TcpConnection(Connection):
    """One TCP connection and how far reading and writing have got on it."""

    def __init__(self, peer: Peer, mine: Peer, connection: socket.socket, now: float, *, shared_memory: bool) -> None:
        super().__init__(peer, mine, shared_memory=shared_memory)
        self.socket = connection
        self.descriptor = connection.fileno()
        self.outgoing: deque[OutgoingBytes] = deque()
        self.wants_to_write = False
        # Where there is a writing thread: `lock` is for the queue, and never held during a system call, which copies megabytes;
        # `writing` is held during one, by whoever needs the memory or the socket to stay. Taken in the order writing, lock.
        self.lock, self.writing = threading.Lock(), threading.Lock()
        self.handed_over = False
        self.closed = False
        self.spoke_at = now
        self.heard = False  # something, since the last look
        self.silent_s = 0.0  # counted only while we were listening
        self.warned = False
        # Reading: bytes taken from the kernel and not looked at yet are ahead[begin:end].
        self.ahead = memoryview(bytearray(READ_AHEAD_BYTES))
        self.begin = self.end = 0
        self.header: Header | None = None
        self.expected: PostedReceive | None = None  # the receive that the payload being read is for
        self.target = memoryview(b"")
        self.filled = 0
        self.staging = memoryview(bytearray(0))

    def keep_queue_short(self) -> None:
        """Have the kernel take no more than it can send soon. By itself it takes megabytes, which on a slow link is seconds in
        which nothing more urgent can overtake."""
        with contextlib.suppress(OSError):  # a connection that has just broken
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)

    def write_some(self) -> list[Handle]:
        """One system call; returns the transfers it ended. Raises BlockingIOError when the kernel takes no more."""
        outgoing, finished = self.outgoing, []
        with self.lock:
            views = [outgoing[i].view for i in range(min(len(outgoing), MAX_GATHER))]
        sent = self.socket.sendmsg(views)
        with self.lock:
            while outgoing and sent >= outgoing[0].view.nbytes:
                item = outgoing.popleft()
                sent -= item.view.nbytes
                if item.handle is not None:
                    finished.append(item.handle)
            if sent:
                outgoing[0].view = outgoing[0].view[sent:]
        return finished

    def keep_last_words(self) -> None:
        """Only what was begun still leaves, and frames that are complete in themselves, such as a goodbye."""
        outgoing, begun = self.outgoing, 0
        if outgoing and (outgoing[0].part is FramePart.PAYLOAD or outgoing[0].view.nbytes < HEADER_BYTES):
            begun = 1
            if outgoing[0].part is FramePart.HEAD and len(outgoing) > 1 and outgoing[1].part is FramePart.PAYLOAD:
                begun = 2
        self.outgoing = deque(item for at, item in enumerate(outgoing) if at < begun or item.part is FramePart.WHOLE)
        for item in self.outgoing:
            item.withdraw()

    def part(self) -> bool:
        """Send the last words, and wait for the peer's end; returns whether that is over.

        To close with something unread would reset the connection, and take back what the peer has not read yet.
        """
        with self.writing:
            try:
                for _ in range(MAX_GATHER):
                    if not self.socket.recv_into(self.ahead):
                        return True
            except BlockingIOError:
                pass
            except OSError:
                return True
            try:
                while self.outgoing and not self.handed_over:
                    self.write_some()
                if not self.outgoing:
                    self.socket.shutdown(socket.SHUT_WR)
            except BlockingIOError:
                pass
            except OSError:
                return True
        return False

    def receive(self) -> int:
        """One system call: read on where the frame goes, or ahead. Returns how many bytes came; 0 is the end of the stream."""
        if self.header is not None and self.begin == self.end:
            received = self.socket.recv_into(self.target[self.filled :])
            self.filled += received
        else:
            if self.begin == self.end:
                self.begin = self.end = 0
            elif self.end == READ_AHEAD_BYTES:
                self.make_room()
            received = self.socket.recv_into(self.ahead[self.end :])
            self.end += received
        return received

    def staging_of(self, num_bytes: int) -> memoryview:
        if self.staging.nbytes < num_bytes:
            self.staging = memoryview(bytearray(num_bytes))
        return self.staging[:num_bytes]

    def make_room(self) -> None:
        """Move what was read ahead to the front."""
        left = self.end - self.begin
        self.ahead[:left] = bytes(self.ahead[self.begin : self.end])
        self.begin, self.end = 0, left

    def take_ahead(self) -> None:
        """Move what was read ahead and belongs to the payload to where that goes."""
        count = min(self.target.nbytes - self.filled, self.end - self.begin)
        if count:
            self.target[self.filled : self.filled + count] = self.ahead[self.begin : self.begin + count]
            self.filled += count
            self.begin += count

    def private(self, payload: memoryview) -> memoryview:
        """What may be parked must not lie in the buffer that the next frame uses."""
        return memoryview(bytes(payload)) if payload.obj is self.staging.obj else payload
