"""Tensors between workers of one host, through a mapped file.

For each ordered pair of ranks that exchanges large messages the sender makes one file of `num_slots` slots, offers it by
a control message, and unlinks it once the receiver has it mapped (or has refused): after that it exists only as memory of
the two processes and cannot outlive them. The file is 0600 and allocated in full, so that a full file system is an error
at creation (and a fallback to sockets) instead of a SIGBUS in the middle of a step.

A message costs one copy into a slot and one read out of it (the read is the addition itself, where the receiver adds),
against two copies through the kernel for a socket. The slot comes back with the receiver's acknowledgement.

The rule for using it: both ranks report the same host identity (boot id and network namespace), and the receiver could open and
map the very file: its owner, mode, size and a random cookie in its first bytes are checked.
"""

from __future__ import annotations

import mmap
import os
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
        descriptor, path = tempfile.mkstemp(prefix="stretto-", dir=directory or folder())
        self._path: str | None = path
        try:
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        cookie = secrets.token_bytes(COOKIE_BYTES)
        self._map[:COOKIE_BYTES] = cookie
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
        descriptor = os.open(offer.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
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


def _check_file(status: os.stat_result, size: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600:
        raise ValueError("owned by somebody else, or not mode 0600")
    if status.st_size != size:
        raise ValueError(f"{status.st_size} bytes long instead of {size}")


def _slots(mapped: mmap.mmap, num_slots: int, slot_bytes: int) -> list[NDArray[np.uint8]]:
    whole = np.frombuffer(mapped, np.uint8)
    return [
        whole[COOKIE_BYTES + slot * slot_bytes : COOKIE_BYTES + (slot + 1) * slot_bytes] for slot in range(num_slots)
    ]


def _close_map(mapped: mmap.mmap) -> None:
    try:
        mapped.close()
    except BufferError:
        pass  # a view of it is still alive somewhere; the memory goes with the last view
