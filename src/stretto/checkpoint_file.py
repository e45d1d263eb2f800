"""A checkpoint as a file: torch's own zip format, with a checksum, replaced as a whole or not at all.

    path        [ what torch.save writes ................................ | length of comment | "stretto sha256 <64 hex digits>" ]
                 `------------------ covered by the checksum ----------'   `----------- the zip archive's comment -----------'

A comment is part of the zip format, so `torch.load(path, weights_only=True)` reads the file as it is. It stands at
the end, so the checksum can be computed while the file is read front to back, and it is checked before a byte is
interpreted.

Writing: everything goes into `path.part`, is flushed to the disk, is read back, and takes the name `path` in one
step. Whatever happens before that step leaves the old checkpoint as it was; a `.part` that a killed worker left is
overwritten by the next save. A lock on it keeps two jobs from writing the same checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from stretto.errors import CheckpointError

LABEL = b"stretto sha256 "
COMMENT_BYTES = len(LABEL) + 64
TRAILER_BYTES = 2 + COMMENT_BYTES  # a zip archive ends with the length of its comment, in two bytes, and the comment
PIECE_BYTES = 16 << 20


def write(path: Path, content: dict[str, Any]) -> None:
    """Make `path` hold `content`, atomically. Raises what the system raises; the old file is untouched then."""
    part = path.with_name(path.name + ".part")
    with _exclusive(part) as file:
        try:
            torch.save(content, file)
            _seal(file)
            file.flush()
            os.fsync(file.fileno())
            _check_loadable(part)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    _sync_folder(path.parent)


@contextmanager
def _exclusive(part: Path) -> Iterator[IO[bytes]]:
    """`part`, empty, and nobody else's."""
    with open(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise CheckpointError(f"{part} is being written by another process. Give each job a path of its own.") from None
            # a file system without locks: there we do without
        if not _is_still(file, part):
            raise CheckpointError(f"{part} was finished by another process just now. Give each job a path of its own.")
        file.truncate()
        yield file


def _is_still(file: IO[bytes], path: Path) -> bool:
    """Whether `path` names this very file: the one who had the lock before us may have renamed it to its final name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _seal(file: IO[bytes]) -> None:
    """Write the checksum of the archive into its comment."""
    file.flush()
    end = file.seek(-2, os.SEEK_END)
    if file.read(2) != b"\0\0":
        raise CheckpointError(f"torch {torch.__version__} has written an archive that does not end as the zip format says.")
    file.seek(0)
    digest = hashlib.sha256()
    for piece in pieces(file, end):
        digest.update(piece)
    file.seek(end)
    file.write(COMMENT_BYTES.to_bytes(2, "little") + LABEL + digest.hexdigest().encode())


def _check_loadable(path: Path) -> None:
    """Nothing but tensors and plain values is inside; tensors are mapped, not read."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"something in this checkpoint is neither a tensor nor a plain value, so it could not be loaded safely: {error}\n"
            f"Look at `extra` and at the optimizer's state_dict: use numbers, text, None, lists, dicts and tensors."
        ) from None


def _sync_folder(folder: Path) -> None:
    """The new name too must survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def pieces(file: IO[bytes], num_bytes: int) -> Iterator[bytes]:
    """The next `num_bytes` of `file`, piece by piece; fewer if it ends before."""
    while num_bytes > 0 and (piece := file.read(min(PIECE_BYTES, num_bytes))):
        num_bytes -= len(piece)
        yield piece


def seal_of(file: IO[bytes], path: Path) -> tuple[int, str]:
    """(bytes covered, their sha256) as the end of the file says; the file is left at its beginning."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TRAILER_BYTES))
    trailer = file.read()
    file.seek(0)
    label, digest = trailer[2 : 2 + len(LABEL)], trailer[2 + len(LABEL) :]
    if len(trailer) != TRAILER_BYTES or label != LABEL:
        raise CheckpointError(
            f"{path} has no checksum at its end: it was cut short, or stretto.save did not write it.\n"
            f"Load an older checkpoint; a file of torch.save is read by torch.load(path, weights_only=True)."
        )
    return size - TRAILER_BYTES, digest.decode("ascii", "replace")


def check_digest(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise CheckpointError(
            f"{path} is damaged: the sha256 of its content is {found[:16]}..., and {expected[:16]}... was written with it.\n"
            f"Nothing was loaded. Load an older checkpoint, and look for a failing disk or an interrupted copy."
        )
