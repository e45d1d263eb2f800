"""Tensors between workers of one host, through a mapped file.

For each ordered pair of ranks that exchanges large messages the sender makes one file of `num_slots` slots and offers it
by a control message. The file never has a name (O_TMPFILE): the receiver opens it through the sender's /proc/PID/fd, and
after that it exists only as memory of the two processes and cannot outlive them, whatever happens to them. (Where the
file system cannot do that it gets a name, which is unlinked as soon as the receiver has answered.) It is 0600 and
allocated in full, so that a full file system is an error at creation (and a fallback to sockets) instead of a SIGBUS in
the middle of a step.

A message costs one copy into a slot and one read out of it (the read is the addition itself, where the receiver adds),
against two copies through the kernel for a socket. The slot comes back with the receiver's acknowledgement.

The rule for using it: both ranks report the same host identity (boot id and network namespace), and the receiver could open and
map the very file: its owner, mode, size and a random cookie in its first bytes are checked.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import stat
import tempfile
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

COOKIE_BYTES = 64  # also keeps slots aligned to cache lines


class Offer(msgspec.Struct, frozen=True):
    """What the receiver needs to map the sender's file."""

    path: str
    cookie: bytes
    num_slots: int
    slot_bytes: int


class Answer(msgspec.Struct, frozen=True):
    problem: str | None = None


def folder() -> Path:
    """Memory-backed where the system has it; any folder works (the page cache serves it)."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class Outbox:
    """Sender's side. Raises OSError (no space, no permission) where the file cannot be made."""

    def __init__(self, num_slots: int, slot_bytes: int, directory: Path | None = None) -> None:
        size = COOKIE_BYTES + num_slots * slot_bytes
        self._descriptor, self._path = _make_file(directory or folder())
        try:
            os.posix_fallocate(self._descriptor, 0, size)
            self._map = mmap.mmap(self._descriptor, size)
        except BaseException:
            self.unlink()
            raise
        cookie = secrets.token_bytes(COOKIE_BYTES)
        self._map[:COOKIE_BYTES] = cookie
        path = self._path or f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.offer = Offer(path, cookie, num_slots, slot_bytes)
        self.slot_bytes = slot_bytes
        self._slots = _slots(self._map, num_slots, slot_bytes)
        self._free = deque(range(num_slots))

    def put(self, data: memoryview) -> int | None:
        """Copy `data` into a free slot and return its number; None when all are in use."""
        if not self._free:
            return None
        slot = self._free.popleft()
        source = np.frombuffer(data, np.uint8)
        np.copyto(self._slots[slot][: source.size], source)
        return slot

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def unlink(self) -> None:
        """The receiver has the file, or will not have it: nobody else needs to find it any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._path is not None:
            path, self._path = self._path, None
            Path(path).unlink(missing_ok=True)

    def close(self) -> None:
        self.unlink()
        self._slots = []
        _close_map(self._map)


class Inbox:
    """Receiver's side. Raises OSError or ValueError, with what is wrong, where the offer cannot be used."""

    def __init__(self, offer: Offer) -> None:
        if not (0 < offer.num_slots <= 1024 and 0 < offer.slot_bytes <= 1 << 28):
            raise ValueError(f"an offer of {offer.num_slots} slots of {offer.slot_bytes} bytes")
        size = COOKIE_BYTES + offer.num_slots * offer.slot_bytes
        # /proc/PID/fd/N is a link by nature; any other path must be the file itself.
        follow = 0 if re.fullmatch(r"/proc/\d+/fd/\d+", offer.path) else os.O_NOFOLLOW
        descriptor = os.open(offer.path, os.O_RDWR | follow | os.O_CLOEXEC)
        try:
            _check_file(os.fstat(descriptor), size)
            self._map = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        if self._map[:COOKIE_BYTES] != offer.cookie:
            raise ValueError("the file is not the one that was offered")
        self._slots = _slots(self._map, offer.num_slots, offer.slot_bytes)

    def view(self, slot: int, num_bytes: int) -> memoryview:
        if slot >= len(self._slots) or num_bytes > self._slots[slot].size:
            raise ValueError(f"{num_bytes} bytes in slot {slot} of {len(self._slots)}")
        return self._slots[slot][:num_bytes].data

    def close(self) -> None:
        self._slots = []
        _close_map(self._map)


def _make_file(directory: Path) -> tuple[int, str | None]:
    """A new file, without a name where the file system can: (descriptor, path or None)."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), None
    except (AttributeError, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    return tempfile.mkstemp(prefix="stretto-", dir=directory)


def _check_file(status: os.stat_result, size: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600:
        raise ValueError("owned by somebody else, or not mode 0600")
    if status.st_size != size:
        raise ValueError(f"{status.st_size} bytes long instead of {size}")


def _slots(mapped: mmap.mmap, num_slots: int, slot_bytes: int) -> list[NDArray[np.uint8]]:
    whole = np.frombuffer(mapped, np.uint8)
    return [whole[COOKIE_BYTES + slot * slot_bytes : COOKIE_BYTES + (slot + 1) * slot_bytes] for slot in range(num_slots)]


def _close_map(mapped: mmap.mmap) -> None:
    try:
        mapped.close()
    except BufferError:
        pass  # a view of it is still alive somewhere; the memory goes with the last view
