"""A checkpoint as a file: torch's own zip format, with a checksum, replaced as a whole or not at all.

    path        [ what torch.save writes ................................ | length of comment | "stretto sha256 <64 hex digits>" ]
                 `------------------ covered by the checksum ----------'   `----------- the zip archive's comment -----------'

A comment is part of the zip format, so `torch.load(path, weights_only=True)` reads the file as it is. It stands at
the end, so the checksum can be computed while the file is read front to back, and it is checked before a byte is
interpreted.

Writing: everything goes into a new file beside it, `path.<16 random digits>.part`, is flushed to the disk, is read back, and
takes the name `path` in one step. Whatever happens before that step leaves the old checkpoint as it was. The part is always
a file that did not exist before: nobody who may write to the folder can plant a link there that we would follow. A lock on
it says that it is being written; the parts that killed workers have left have none, and the next save removes them.

If `path` is a link, what it points to is replaced and the link stays. Not if somebody else than this user, root or the
folder's owner has made it: it could lead to any file that this user may write.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import RawIOBase
from pathlib import Path
from typing import IO, Any

import torch

from stretto import plain_values
from stretto.errors import CheckpointError

LABEL = b"stretto sha256 "
COMMENT_BYTES = len(LABEL) + 64
TRAILER_BYTES = 2 + COMMENT_BYTES  # a zip archive ends with the length of its comment, in two bytes, and the comment
PIECE_BYTES = 16 << 20
MAX_LINKS = 40  # in a row, as in the kernel
PART = re.compile(r"\.[0-9a-f]{16}\.part")


def write(path: Path, content: dict[str, Any]) -> None:
    """Make `path` hold `content`, atomically. Raises what the system raises; the old file is untouched then."""
    for name, value in content.items():
        plain_values.check(value, name)
    with replacing(path) as (part, file):
        torch.save(content, file)
        _seal(file)
        file.flush()
        _check_loadable(part)


@contextmanager
def replacing(path: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """A new file, and its name until the block ends: then it is on the disk, and is what `path` names. If the block raises, the
    old file is untouched."""
    target = _target(path)
    remove_left(target)
    with _new_part(target) as (part, file):
        yield part, file
        file.flush()
        os.fsync(file.fileno())
        part.replace(target)
    _sync_folder(target.parent)


def _target(path: Path) -> Path:
    """Where the links that begin at `path` end."""
    for _ in range(MAX_LINKS):
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return path
        if not stat.S_ISLNK(found.st_mode):
            return path
        if found.st_uid not in (os.geteuid(), 0, path.parent.stat().st_uid):
            raise CheckpointError(
                f"{path} is a link that user {found.st_uid} has put there, to {os.readlink(path)}: whoever may write to this "
                f"folder could choose which of your files a checkpoint replaces.\n"
                f"Save to a path in a folder of your own, or to the file itself that you mean."
            )
        path = path.parent / os.readlink(path)
    raise CheckpointError(f"{path} is one of more than {MAX_LINKS} links in a row. Save to the file itself that you mean.")


@contextmanager
def _new_part(target: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """A file beside `target` that was not there before, locked; it is gone in the end unless it has got another name."""
    part = target.with_name(f"{target.name}.{secrets.token_hex(8)}.part")
    handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with open(handle, "r+b") as file:
        try:
            _lock(file)
            yield part, file
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _lock(file: IO[bytes] | RawIOBase) -> bool:
    """Whether the file is ours alone now. On a file system without locks nobody knows."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remove_left(target: Path) -> None:
    """Remove what workers that were killed while writing this checkpoint have left."""
    with suppress(OSError):  # a folder that may not be listed has to be looked after by others
        names = os.listdir(target.parent)
        for left in (target.with_name(name) for name in names if PART.fullmatch(name.removeprefix(target.name))):
            with suppress(OSError):  # it is not ours, or is gone: it is not in the way
                handle = os.open(left, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                with open(handle, "r+b", buffering=0) as file:
                    if _lock(file):
                        left.unlink()


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
    """What was written can be read; tensors are mapped, not read."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"what was written could not be loaded safely: {error}\n"
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
