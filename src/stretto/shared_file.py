"""One file on rank 0's host, which all workers read: its bytes are broadcast, and what fails on one rank fails on all.

`all_succeed` is how: everybody does a part that does not communicate, with its errors caught, then all exchange how it went.
`received` gives every rank a copy of rank 0's file, in memory that it can map: no other host needs to see the file, and the
checksum is verified by everybody, on what has arrived.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TypeVar

import torch

from stretto import checkpoint_file
from stretto.errors import CheckpointError, StrettoError
from stretto.job import Job

T = TypeVar("T")

log = logging.getLogger("stretto")


def all_succeed(job: Job, what: str, action: Callable[[], T]) -> T:
    """Do `action`, which must not communicate, on every rank; return its result if nobody failed, else raise on all ranks."""
    result, error = None, None
    try:
        result = action()
    except Exception as caught:
        error = caught
    failures = job.gather_object(None if error is None else _told(error))
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise CheckpointError(f"{what} failed on rank {rank} of {job.world_size}: {failure}") from error
    return result  # type: ignore[return-value]


def _told(error: Exception) -> str:
    if isinstance(error, StrettoError):
        return str(error)
    hint = "\nOnly rank 0 touches the file: look on its machine." if isinstance(error, OSError) else ""
    return f"{type(error).__name__}: {error}{hint}"


@contextmanager
def received(
    job: Job, path: Path, what: str, seal_of: Callable[[IO[bytes], Path], tuple[int, str]], end: bytes | None = None
) -> Iterator[str]:
    """The path of a copy of rank 0's file, on every rank, in memory. Its checksum has been verified everywhere.

    `seal_of` says how many bytes are covered by which sha256, and leaves the file at its beginning. `end`: what follows them in
    the copy; None: that checksum."""
    with ExitStack() as opened:
        source = all_succeed(job, what, lambda: opened.enter_context(path.open("rb")) if job.rank == 0 else None)
        header = all_succeed(job, what, lambda: seal_of(source, path) if source is not None else None)
        copy = all_succeed(job, what, lambda: opened.enter_context(open(os.memfd_create("stretto checkpoint"), "wb")))
        num_bytes, expected = job.gather_object(header)[0]
        digest, problem = hashlib.sha256(), None
        for start in range(0, num_bytes, checkpoint_file.PIECE_BYTES):
            piece = _next_piece(job, source, min(checkpoint_file.PIECE_BYTES, num_bytes - start))
            digest.update(piece)
            problem = problem or _stored(copy, piece)  # after an error too all pieces are taken: others wait for us
        problem = problem or _stored(copy, bytes.fromhex(expected) if end is None else end)

        def check() -> None:
            if problem is not None:
                raise problem
            checkpoint_file.check_digest(path, digest.hexdigest(), expected)

        all_succeed(job, what, check)
        yield f"/proc/self/fd/{copy.fileno()}"


def _stored(copy: IO[bytes], piece: bytes | memoryview) -> OSError | None:
    try:
        copy.write(piece)
        copy.flush()
    except OSError as error:
        return error
    return None


def _next_piece(job: Job, source: IO[bytes] | None, num_bytes: int) -> memoryview:
    """Broadcast the next bytes. If rank 0 cannot read them it sends zeros, for the others wait, and the checksum will not fit."""
    piece = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    if source is not None:
        try:
            source.readinto(piece.numpy())  # type: ignore[attr-defined]
        except OSError as error:
            log.error("reading %s: %s", source.name, error)
    return job.broadcast(piece).numpy().data
