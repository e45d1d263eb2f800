"""Tensors between workers of one host, through a mapped file.

For each ordered pair of ranks that exchanges large messages the sender makes one file, when it sends the first, and offers it
by a control message. The file never has a name (O_TMPFILE): the receiver opens it through the sender's /proc/PID/fd, and
after that it exists only as memory of the two processes and cannot outlive them, whatever happens to them. (Where the
file system cannot do that it gets a name, which is unlinked as soon as the receiver has answered.) It is 0600 and
allocated in full, so that a full file system is an error at creation (and a fallback to sockets) instead of a SIGBUS in
the middle of a step.

A message costs one copy into the file and one read out of it (the read is the addition itself, where the receiver adds),
against two copies through the kernel for a socket. It lies in one piece, at the start of a grain of 64 KiB (`slot` in its
header), and its place comes back with the receiver's acknowledgement.

The rule for using it: both ranks report the same host identity (boot id and network namespace) and the same PID namespace, so
that /proc/PID means the same process to both; and the receiver could open and map the very file: its owner, mode, size and a
random cookie in its first bytes are checked.

How much there may be (`Allowance`): containers often have 64 MB of /dev/shm, and a data loader's workers need them as well. All
workers of a host together take at most a quarter of what was free when they began, each the same part, and the rest of
their messages travels over sockets.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import tempfile
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.wire.mapping import COOKIE_BYTES, check_file

GRAIN_BYTES = 64 << 10
OUTBOX_BYTES = 8 << 20  # four segments of 2 MiB
LEAST_BYTES = 1 << 20  # less would carry so few messages that it is not worth a file
MAX_BYTES = 1 << 30  # of an offer
PART = 4  # of what is free, one in so many


class Offer(msgspec.Struct, frozen=True):
    """What the receiver needs to map the sender's file."""

    path: str
    cookie: bytes
    num_bytes: int


class Answer(msgspec.Struct, frozen=True):
    problem: str | None = None


def folder() -> Path:
    """Memory-backed where the system has it; any folder works (the page cache serves it)."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class Allowance:
    """How much shared memory one worker may take."""

    def __init__(self, directory: Path | None = None) -> None:
        try:
            status = os.statvfs(directory or folder())
            self.free = status.f_bavail * status.f_frsize
        except OSError:
            self.free = 0
        self.left = 0

    def divide(self, workers: int) -> None:
        """So many workers of this host, this one included, share a quarter of what was free."""
        self.left = self.free // PART // workers

    def take(self) -> int:
        """Bytes for one more outbox: as many as are useful, or as are left; 0 if that is too little."""
        granted = min(OUTBOX_BYTES, self.left // GRAIN_BYTES * GRAIN_BYTES)
        if granted < LEAST_BYTES:
            return 0
        self.left -= granted
        return granted

    def give_back(self, num_bytes: int) -> None:
        """An outbox of that size is closed, or could not be made."""
        self.left += num_bytes


class Outbox:
    """Sender's side. Raises OSError (no space, no permission) where the file cannot be made."""

    def __init__(self, num_bytes: int, directory: Path | None = None) -> None:
        size = COOKIE_BYTES + num_bytes
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
        self.offer = Offer(path, cookie, num_bytes)
        self.num_bytes = num_bytes
        self._arena = _arena(self._map)
        self._used = bytearray(num_bytes // GRAIN_BYTES)  # 1 for each grain that a message lies in
        self._next = 0
        self._lengths: dict[int, int] = {}  # slot -> grains

    def put(self, data: memoryview) -> int | None:
        """Copy `data` into a free place and return where it begins; None when there is none that is large enough."""
        source = np.frombuffer(data, np.uint8)
        grains = max(1, -(-source.size // GRAIN_BYTES))
        slot = self._find(grains)
        if slot is None:
            return None
        begin = slot * GRAIN_BYTES
        np.copyto(self._arena[begin : begin + source.size], source)
        self._used[slot : slot + grains] = b"\1" * grains
        self._lengths[slot] = grains
        self._next = slot + grains
        return slot

    def _find(self, grains: int) -> int | None:
        """Where so many free grains follow each other: behind the last message if possible, for the oldest are read first."""
        free = bytes(grains)
        slot = self._used.find(free, self._next)
        if slot < 0:
            slot = self._used.find(free)
        return None if slot < 0 else slot

    def release(self, slot: int) -> None:
        grains = self._lengths.pop(slot)
        self._used[slot : slot + grains] = bytes(grains)

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
        self._arena = np.empty(0, np.uint8)
        _close_map(self._map)


class Inbox:
    """Receiver's side. Raises OSError or ValueError, with what is wrong, where the offer cannot be used."""

    def __init__(self, offer: Offer) -> None:
        if not 0 < offer.num_bytes <= MAX_BYTES:
            raise ValueError(f"an offer of {offer.num_bytes} bytes")
        size = COOKIE_BYTES + offer.num_bytes
        # /proc/PID/fd/N is a link by nature; any other path must be the file itself.
        follow = 0 if re.fullmatch(r"/proc/\d+/fd/\d+", offer.path) else os.O_NOFOLLOW
        descriptor = os.open(offer.path, os.O_RDWR | follow | os.O_CLOEXEC)
        try:
            check_file(os.fstat(descriptor), size)
            self._map = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        if self._map[:COOKIE_BYTES] != offer.cookie:
            raise ValueError("the file is not the one that was offered")
        self._arena = _arena(self._map)

    def view(self, slot: int, num_bytes: int) -> memoryview:
        begin = slot * GRAIN_BYTES
        if begin + num_bytes > self._arena.size:
            raise ValueError(f"{num_bytes} bytes at {begin} of {self._arena.size}")
        return self._arena[begin : begin + num_bytes].data

    def close(self) -> None:
        self._arena = np.empty(0, np.uint8)
        _close_map(self._map)


def _make_file(directory: Path) -> tuple[int, str | None]:
    """A new file, without a name where the file system can: (descriptor, path or None)."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), None
    except (AttributeError, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    return tempfile.mkstemp(prefix="stretto-", dir=directory)


def _arena(mapped: mmap.mmap) -> NDArray[np.uint8]:
    return np.frombuffer(mapped, np.uint8, offset=COOKIE_BYTES)


def _close_map(mapped: mmap.mmap) -> None:
    try:
        mapped.close()
    except BufferError:
        pass  # a view of it is still alive somewhere; the memory goes with the last view
