"""What lies in the inbox of a wire of one process: messages by reference, and news about their senders.

Delivery is late and by reference: an `Envelope` carries a view of the sender's own memory, which is read as late as the
contract allows. A sender that writes to it before `handle.done` therefore corrupts what arrives, as it would on a real
network, only more surely. With `check` the envelope also carries a checksum, compared when the bytes are read and again
when the sender is told that it may reuse them; and what `consume` was given is scribbled over afterwards, so that
keeping the view shows as well.
"""

from __future__ import annotations

import threading
import zlib
from dataclasses import dataclass

from stretto.wire.base import Handle, Tag
from stretto.wire.handshake import Life
from stretto.wire.mailbox import Key


class BufferChanged(AssertionError):
    """A buffer was written to while it was being sent: a bug in the sending program."""

    def __init__(self, envelope: Envelope) -> None:
        super().__init__(
            f"rank {envelope.source} changed the {envelope.num_bytes} bytes it was sending to rank {envelope.target} "
            f"({envelope.tag}) before the send was done, so what arrived is not what was sent.\n"
            f"Keep the memory as it is until handle.done, or send a copy."
        )


class Envelope:
    """One message under way, with the sender's memory in it until it has been read."""

    def __init__(self, origin: Life, target: int, tag: Tag, dtype: int, view: memoryview, handle: Handle, check: bool):
        self.source, self.target, self.tag, self.dtype = origin.rank, target, tag, dtype
        self.origin = origin
        self.num_bytes = view.nbytes
        self.handle = handle
        self.copy: bytearray | None = None
        self.acknowledged = False
        self.changed = False
        self._view: memoryview | None = view
        self._lock = threading.Lock()  # a sender that cancels must not return while its memory is being read
        self._check: int | None = zlib.crc32(view) if check else None

    def read(self) -> bytearray | None:
        """The bytes, read from the sender's memory now unless they were before. None: the sender has cancelled."""
        with self._lock:
            if self.copy is None and self._view is not None:
                self.verify()
                self.copy = bytearray(self._view)
            return self.copy

    def revoke(self) -> None:
        """The sender's memory must not be read any more."""
        with self._lock:
            self._view = None

    def verify(self) -> None:
        """Note whether the sender's memory still holds what it held at the send."""
        if self._check is not None and self._view is not None and zlib.crc32(self._view) != self._check:
            self.changed = True

    @property
    def checked(self) -> bool:
        return self._check is not None

    @property
    def digest(self) -> int:
        return self.tag.digest

    @property
    def key(self) -> Key:
        return self.source, self.tag.channel, self.tag.sequence, self.tag.index


# What may lie in an inbox ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrival:
    envelope: Envelope

    @property
    def origin(self) -> Life:
        return self.envelope.origin


@dataclass(frozen=True, slots=True)
class Sent:
    """To the sender itself: the envelope has been read."""

    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Posted:
    origin: Life
    topic: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Knock:
    """A newcomer wants to come in."""

    origin: Life


@dataclass(frozen=True, slots=True)
class Gone:
    origin: Life
    reason: str


@dataclass(frozen=True, slots=True)
class Goodbye:
    origin: Life
    retired_in: int | None = None  # the generation in which the sender has retired the receiver; None: the sender leaves


Item = Arrival | Sent | Posted | Knock | Gone | Goodbye
