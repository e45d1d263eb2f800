"""One TCP connection to a peer, and how far reading and writing have got on it.

Bytes are read ahead into a small buffer, from which headers are taken. A payload is read past it, straight to where it goes: the
tensor of its receive, or a buffer that is used again for every payload that is added from there.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from typing import Final

from stretto.launching.membership import Peer
from stretto.wire.base import Handle
from stretto.wire.framed import Connection
from stretto.wire.frames import Header
from stretto.wire.mailbox import PostedReceive

READ_AHEAD_BYTES: Final = 64 << 10
MAX_GATHER: Final = 16


class OutgoingBytes:
    """Bytes on their way: what is left of a frame, and whom to tell when the last has gone."""

    __slots__ = ("handle", "view")

    def __init__(self, view: memoryview, handle: Handle | None) -> None:
        self.view = view
        self.handle = handle


class TcpConnection(Connection):
    """One TCP connection and how far reading and writing have got on it."""

    def __init__(self, peer: Peer, mine: Peer, connection: socket.socket, now: float, *, shared_memory: bool) -> None:
        super().__init__(peer, mine, shared_memory=shared_memory)
        self.socket = connection
        self.descriptor = connection.fileno()
        self.outgoing: deque[OutgoingBytes] = deque()
        self.wants_to_write = False
        self.lock = threading.Lock()  # for what the writing thread touches too, where there is one
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

    def write_some(self) -> list[Handle]:
        """One system call; returns the transfers it ended. Raises BlockingIOError when the kernel takes no more."""
        outgoing, finished = self.outgoing, []
        sent = self.socket.sendmsg([outgoing[i].view for i in range(min(len(outgoing), MAX_GATHER))])
        while outgoing and sent >= outgoing[0].view.nbytes:
            item = outgoing.popleft()
            sent -= item.view.nbytes
            if item.handle is not None:
                finished.append(item.handle)
        if sent:
            outgoing[0].view = outgoing[0].view[sent:]
        return finished

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
