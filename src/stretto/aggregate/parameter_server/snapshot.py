"""A server's ranges on disk: one file with a checksum, replaced as a whole or not at all.

    | "stretto snapshot\\n" | version, 4 bytes | header record | record of a range | ... | sha256, 32 bytes |
                                              record: | bytes of the name, 2 | bytes of the data, 8 | name | data |

The header is whatever the server wants to find again (clocks, layout), the data of a range what `RangeState.export` gives. The
snapshot does not look into either: what it hands out are the bytes that were given, or an error.

Writing: `checkpoint_file.replacing`: a new file beside it, flushed to the disk, that takes the name in one step; ranges are taken
from an iterator, so that one at a time is in memory. Reading: the whole file is compared with its checksum before a byte of it is
interpreted, then ranges are handed out one by one. The checksum finds accidents. Against an attacker, who can compute one too,
each length is compared with what is left of the file before anything is allocated, and whoever takes the data checks it again.

Invariant: `path` holds the last snapshot that was written to its end, whatever happened since.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from stretto import checkpoint_file
from stretto.errors import CheckpointError, ConfigurationError

MAGIC: Final = b"stretto snapshot\n"
VERSION: Final = 1
START: Final = struct.Struct(f"<{len(MAGIC)}sI")
RECORD: Final = struct.Struct("<HQ")
DIGEST_BYTES: Final = hashlib.sha256().digest_size
MAX_HEADER_BYTES: Final = 64 << 20
MAX_RANGE_BYTES: Final = 64 << 30
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a snapshot holds. `ranges` can be gone through once, while the file is open."""

    header: bytes
    ranges: Iterator[tuple[str, bytes]]


# -- writing ----------------------------------------------------------------------------------------------------------


def write_snapshot(path: Path, header: Buffer, ranges: Iterable[tuple[str, Buffer]]) -> None:
    """Make `path` hold these ranges, by name. Raises `CheckpointError`; the old file is untouched then."""
    try:
        with checkpoint_file.replacing(path) as (_, file):
            _write(file, header, ranges)
    except OSError as problem:
        raise CheckpointError(
            f"the snapshot {path} cannot be written ({problem.strerror}). What was there before is still there.\n"
            f"Name a file in a folder that exists and that this user may write to, on a disk with room for the model."
        ) from problem


def _write(file: IO[bytes], header: Buffer, ranges: Iterable[tuple[str, Buffer]]) -> None:
    digest = hashlib.sha256()
    written = set()

    def put(data: Buffer) -> None:
        digest.update(data)
        file.write(data)

    put(START.pack(MAGIC, VERSION))
    _put_record(put, "", header, MAX_HEADER_BYTES)
    for name, data in ranges:
        if name in written:
            raise ConfigurationError(f"a snapshot with two ranges of the name {name!r}. Give each range a name of its own.")
        written.add(name)
        _put_record(put, name, data, MAX_RANGE_BYTES)
    file.write(digest.digest())


def _put_record(put: Callable[[Buffer], None], name: str, data: Buffer, most: int) -> None:
    encoded, length = name.encode(), memoryview(data).nbytes
    if len(encoded) > 0xFFFF or length > most:
        raise ConfigurationError(
            f"a snapshot with a name of {len(encoded)} bytes and {length} bytes of data: at most {0xFFFF} and {most} can be read "
            f"again.\nCut the range into several."
        )
    put(RECORD.pack(len(encoded), length))
    put(encoded)
    put(data)


# -- reading ----------------------------------------------------------------------------------------------------------


@contextmanager
def read_snapshot(path: Path) -> Iterator[Snapshot]:
    """The snapshot in this file, whose checksum is right. Raises `CheckpointError` for anything else."""
    with ExitStack() as stack:
        with _reading(path):
            file = stack.enter_context(_open(path))
            stop = _check(file, path)
            name, header = _next_record(file, stop, path, MAX_HEADER_BYTES)
            if name:
                raise _no_snapshot(path, f"a header is expected, and the range {name[:100]!r} is there")
        yield Snapshot(header, _ranges(file, stop, path))


def is_snapshot(path: Path) -> bool:
    """Whether it begins as one. What is no regular file is not opened."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def seal_of(file: IO[bytes], path: Path) -> tuple[int, str]:
    """(bytes covered, their sha256) as the end of the file says; the file is left at its beginning."""
    size = file.seek(0, os.SEEK_END)
    if size < START.size + DIGEST_BYTES:
        raise _no_snapshot(path, f"it has {size} bytes")
    file.seek(size - DIGEST_BYTES)
    digest = file.read(DIGEST_BYTES)
    file.seek(0)
    return size - DIGEST_BYTES, digest.hex()


def check_snapshot(path: Path) -> None:
    """Whether it is whole. Raises `CheckpointError` if it is not."""
    with read_snapshot(path):
        pass


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise CheckpointError(
            f"the snapshot {path} cannot be read ({problem.strerror}).\nName a file that a parameter server has written."
        ) from problem


def _open(path: Path) -> IO[bytes]:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer must not keep us
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _no_snapshot(path, "it is no regular file")
    return os.fdopen(handle, "rb")


def _check(file: IO[bytes], path: Path) -> int:
    """Where the records end; the file is left where they begin."""
    stop = os.fstat(file.fileno()).st_size - DIGEST_BYTES
    start = file.read(START.size)
    if len(start) < START.size or START.unpack(start)[0] != MAGIC or stop < START.size:
        raise _no_snapshot(path, "it does not begin as one")
    version = START.unpack(start)[1]
    if version != VERSION:
        raise _no_snapshot(path, f"it has version {version}, and this stretto reads version {VERSION}")
    digest = hashlib.sha256(start)
    for piece in checkpoint_file.pieces(file, stop - START.size):
        digest.update(piece)
    if digest.digest() != file.read(DIGEST_BYTES):
        raise _no_snapshot(path, "its checksum does not fit: it is damaged, or was cut short")
    file.seek(START.size)
    return stop


def _ranges(file: IO[bytes], stop: int, path: Path) -> Iterator[tuple[str, bytes]]:
    seen = set()
    while file.tell() < stop:
        with _reading(path):
            name, data = _next_record(file, stop, path, MAX_RANGE_BYTES)
        if name in seen:
            raise _no_snapshot(path, f"it has two ranges of the name {name[:100]!r}")
        seen.add(name)
        yield name, data


def _next_record(file: IO[bytes], stop: int, path: Path, most: int) -> tuple[str, bytes]:
    left = stop - file.tell()
    if left < RECORD.size:
        raise _no_snapshot(path, f"a record has {left} bytes")
    name_length, length = RECORD.unpack(file.read(RECORD.size))
    if name_length + length > left - RECORD.size or length > most:
        raise _no_snapshot(path, f"a record of {name_length} and {length} bytes is announced, and {left - RECORD.size} are left")
    try:
        name = file.read(name_length).decode()
    except UnicodeDecodeError as problem:
        raise _no_snapshot(path, "the name of a range is no text") from problem
    data = file.read(length)
    if len(data) != length:
        raise _no_snapshot(path, "it has become shorter while it was read")
    return name, data


def _no_snapshot(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a snapshot that can be resumed from: {why}. Nothing of it is used from here on.\n"
        f"Resume from an older snapshot, and look for a failing disk or an interrupted copy."
    )
