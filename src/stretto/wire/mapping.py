"""Host memory that several processes of one machine see. Mostly each worker writes its own and reads the others'; the weights of
Hogwild are one worker's that all write.

A worker makes one anonymous file (`memfd_create`), allocated in full, and tells the others where it is: `/proc/PID/fd/N`, which
means the same process only within one PID namespace, its size, and a random cookie that lies at its beginning. They open it,
check owner, mode, size and cookie, and map it to read it. It has no name, so nothing is left on the machine whatever happens to
the processes, and it does not count against the size of /dev/shm, of which containers have little.

A mapping outlives the process that made the file: what a killed worker has written stays readable until the last mapping is
gone. Reading it never faults, since nobody can shorten a file that is sealed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

COOKIE_BYTES = 64  # also keeps what follows aligned to cache lines
MAX_BYTES = 1 << 40
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MappingOffer(msgspec.Struct, frozen=True):
    """What another process needs to map this worker's memory."""

    path: str
    cookie: bytes
    num_bytes: int


class OwnMapping:
    """Memory that this worker writes. Raises OSError where the system gives none.

    `of_all`: what the workers of this host make together, at this moment.
    """

    def __init__(self, num_bytes: int, of_all: int = 0) -> None:
        size = COOKIE_BYTES + num_bytes
        _refuse_too_much(max(size, of_all))
        self._descriptor = os.memfd_create("stretto", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self._descriptor, 0o600)
            os.posix_fallocate(self._descriptor, 0, size)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(self._descriptor, size)
        except BaseException:
            self.close_file()  # and not again by `__del__`: the number may be another file's by then
            raise
        cookie = secrets.token_bytes(COOKIE_BYTES)
        self._map[:COOKIE_BYTES] = cookie
        self.offer = MappingOffer(f"/proc/{os.getpid()}/fd/{self._descriptor}", cookie, num_bytes)
        self.bytes = _behind_cookie(self._map)

    def close_file(self) -> None:
        """All others have mapped it, or will not: nobody finds the file under that number any more. The memory stays, and with it
        the duplicate of the descriptor that Python's mmap keeps."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            with contextlib.suppress(OSError):
                self.close_file()


def map_offered(offer: MappingOffer, *, writable: bool = False) -> NDArray[np.uint8]:
    """Another worker's memory, as bytes. Raises OSError or ValueError with what is wrong.

    `writable`: for weights that all write. (Otherwise only because torch has no tensors that cannot be written.)
    """
    if not 0 <= offer.num_bytes <= MAX_BYTES:
        raise ValueError(f"a mapping of {offer.num_bytes} bytes")
    if not re.fullmatch(r"/proc/\d+/fd/\d+", offer.path):
        raise ValueError(f"a mapping at {offer.path!r}, which is no open file of a process")
    size = COOKIE_BYTES + offer.num_bytes
    descriptor = os.open(offer.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _check_file(os.fstat(descriptor), size)
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError("its file can still be shortened")
        mapped = mmap.mmap(descriptor, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    finally:
        os.close(descriptor)
    if mapped[:COOKIE_BYTES] != offer.cookie:
        raise ValueError("the file is not the one that was offered")
    return _behind_cookie(mapped)


def _refuse_too_much(size: int) -> None:
    """The system does not refuse memory that it has not got: it ends a process, perhaps this one, to get it."""
    if size > (free := _free_bytes()) // 2:
        raise OSError(errno.ENOMEM, f"{size} bytes, more than half of the {free} that are free")


def _free_bytes() -> int:
    """Bytes of memory that are free on this machine, or in this process's control group (version 2) if that allows less."""
    meminfo = Path("/proc/meminfo").read_text()
    free = [1024 * int(kilobytes) for kilobytes in re.findall(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)]
    with contextlib.suppress(OSError, ValueError):  # "max", or none of it is to be seen here
        group = Path("/sys/fs/cgroup")
        cache = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        used = int((group / "memory.current").read_text()) - (int(cache[1]) if cache else 0)  # that is given up when needed
        free.append(int((group / "memory.max").read_text()) - used)
    return max(0, min(free, default=0))


def _check_file(status: os.stat_result, size: int) -> None:
    """Raise ValueError unless it is a regular file of this user alone, of that size."""
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600:
        raise ValueError("owned by somebody else, or not mode 0600")
    if status.st_size != size:
        raise ValueError(f"{status.st_size} bytes long instead of {size}")


def _behind_cookie(mapped: mmap.mmap) -> NDArray[np.uint8]:
    """The array keeps the mapping alive: the memory goes with the last view of it."""
    return np.frombuffer(mapped, np.uint8, offset=COOKIE_BYTES)
