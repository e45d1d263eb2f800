"""Snapshots of what servers have, taken while training goes on: by a worker, range by range, into one file each time.

    folder/Sequential-1-00000012.snapshot        the model's name, and a number that grows

Who: one of the living workers, in a thread of its own, `every_s` seconds after the last one: the lowest rank of those that have
been there from the beginning, or of those that have come back (`returning.py`) when no other lives. If it dies, the next one goes
on. It asks the servers for their ranges as `stretto.save` does, and writes them one by one: so one file is one snapshot, whole or
not there (`snapshot.py`), no disk is needed where servers run, and nobody has to find out which of many servers' files belong
together. What it is of, when ranges are at different versions, is said in `snapshot_content.py`.

Cost:      the model and its optimizer's state once over that worker's network card, every `every_s` seconds; in memory a few
           ranges at that worker, and at a server those that it has not sent. A server answers between two pushes.
Trouble:   a full disk, a folder that is gone: a warning, and the next attempt after `every_s`; training goes on, and the old
           snapshots are there. The newest two are kept: one in reserve, should the disk damage the other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from stretto import checkpoint_file
from stretto.aggregate.parameter_server.client import Export, Exported
from stretto.aggregate.parameter_server.snapshot import Buffer, write_snapshot
from stretto.aggregate.parameter_server.snapshot_content import (
    END,
    SavedClocks,
    SnapshotEnd,
    SnapshotHeader,
    buffer_name,
    range_name,
)
from stretto.errors import CheckpointError, PeerLost, StrettoError

AT_ONCE: Final = 4  # ranges under way
KEPT: Final = 2
END_S: Final = 2.0  # for one that is under way when the job is left
SUFFIX: Final = ".snapshot"
NAME: Final = re.compile(r"(?P<model>[A-Za-z0-9_.]{1,120}-\d{1,9})-(?P<number>\d{8,12})\.snapshot")
LEFT: Final = re.compile(r"(?P<name>.*\.snapshot)\.[0-9a-f]{16}\.part")

log = logging.getLogger("stretto.parameter_server")


# -- a folder of snapshots --------------------------------------------------------------------------------------------


def file_stem(model: str) -> str:
    """A name for files, made of a model's: "Sequential (model 1)" becomes Sequential-1."""
    words = re.findall(r"[A-Za-z0-9_.]+", model)
    return f"{'_'.join(words[:-2])[:120] or 'model'}-{words[-1] if words and words[-1].isdigit() else 0}"


def snapshots_in(folder: Path, stem: str | None = None) -> list[Path]:
    """Those of a model, or of any if there is one only; the newest first. Names only: nothing is opened."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            match = NAME.fullmatch(name)
            if match is not None and stem in (None, match["model"]):
                found.append((match["model"], int(match["number"]), name))
    return [folder / name for _, _, name in sorted(found, reverse=True)]


def number_of(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    return -1 if match is None else int(match["number"])


def prepare_folder(folder: Path) -> None:
    """Find out now, and not after an hour, that it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as problem:
        raise _unusable(folder, problem.strerror) from problem
    if not writable:
        raise _unusable(folder, "this user may not write to it")


def _unusable(folder: Path, why: str | None) -> CheckpointError:
    return CheckpointError(
        f"ParameterServer(snapshots={str(folder)!r}): no snapshots can be written there ({why}).\n"
        f"Name a folder that the workers may write to."
    )


# -- taking them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """What is to be taken: from its own model and optimizer a worker adds what the servers do not have."""

    header: SnapshotHeader
    buffers: dict[str, bytes]


class SnapshotTaker:
    """Takes snapshots of one service until it is stopped. `subject()` gives what is not on the servers, or None when the model is
    gone; `is_mine()` whether it is for this worker to do; `request` hands a request to the servers."""

    def __init__(
        self,
        folder: Path,
        every_s: float,
        model: str,
        num_ranges: int,
        request: Callable[[Any], Future[Any]],
        subject: Callable[[], Subject | None],
        is_mine: Callable[[], bool],
        patience_s: float,
    ) -> None:
        self.folder, self._every_s, self._stem, self._num_ranges = folder, every_s, file_stem(model), num_ranges
        self._request, self._subject, self._is_mine, self._patience_s = request, subject, is_mine, patience_s
        self.exporting = threading.Lock()  # of two that ask for a range at once, the client would refuse one
        self._stopped = threading.Event()
        self._before = self._newest_number()
        self._thread = threading.Thread(target=self._run, name="stretto-snapshots", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Waits for nothing: a snapshot that is under way fails with its requests, and leaves no file."""
        self._stopped.set()

    def stop(self) -> None:
        """The job is left."""
        self.end()
        if self._thread is not threading.current_thread():
            self._thread.join(END_S)

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                if self._is_mine() and not self._take_if_there_is_a_model():
                    return
            except CheckpointError as problem:
                log.warning("no snapshot this time, the next try is in %g s: %s", self._every_s, problem)
            except PeerLost:  # of all servers of a range: whoever trains finds out too
                return
            except StrettoError as problem:
                if not self._stopped.is_set() and self._is_mine():  # else it is because the job, or the servers, are being left
                    log.warning("no snapshot this time: the servers did not give what they have (%s)", problem)

    def _take_if_there_is_a_model(self) -> bool:
        subject = self._subject()
        if subject is not None:
            self.take(subject)
        return subject is not None

    def take(self, subject: Subject) -> Path:
        """A snapshot, now."""
        begin = time.monotonic()
        prepare_folder(self.folder)
        path = self.folder / f"{self._stem}-{self._newest_number() + 1:08}{SUFFIX}"
        write_snapshot(path, msgspec.msgpack.encode(subject.header), self._records(subject))
        log.info("snapshot %s: %d ranges in %.1f s", path, self._num_ranges, time.monotonic() - begin)
        self._remove_old()
        return path

    def _records(self, subject: Subject) -> Iterator[tuple[str, Buffer]]:
        clocks: list[SavedClocks] = []
        for index, found in enumerate(self._exports()):
            clocks.append(SavedClocks(found.version, found.slowest, found.fastest))
            yield range_name(index), found.content
        for name, data in subject.buffers.items():
            yield buffer_name(name), data
        yield END, msgspec.msgpack.encode(SnapshotEnd(clocks))

    def _exports(self) -> Iterator[Exported]:
        """In order, a few under way. Between two lots others may ask."""
        for begin in range(0, self._num_ranges, AT_ONCE):
            with self.exporting:
                asked = deque(self._request(Export(i)) for i in range(begin, min(begin + AT_ONCE, self._num_ranges)))
                try:
                    found = [each.result(self._patience_s) for each in asked]
                except TimeoutError:  # which is an OSError, and no trouble of the disk
                    raise StrettoError(f"ranges from {begin} on have not come within {self._patience_s:g} s") from None
            yield from found

    def _newest_number(self) -> int:
        return max((number_of(path) for path in snapshots_in(self.folder, self._stem)), default=0)

    def _remove_old(self) -> None:
        """And what workers have left that were killed while writing one."""
        with contextlib.suppress(OSError):  # somebody has removed it already, or it is not ours to remove
            for path in snapshots_in(self.folder, self._stem)[KEPT:]:
                path.unlink()
        with contextlib.suppress(OSError):
            for name in os.listdir(self.folder):
                if (left := LEFT.fullmatch(name)) is not None and left["name"].startswith(f"{self._stem}-"):
                    checkpoint_file.remove_left(self.folder / left["name"])

    # -- when servers are lost ----------------------------------------------------------------------------------------

    def advice(self, now: float) -> str:
        """Where to go on from, for an error."""
        newest = next(iter(snapshots_in(self.folder, self._stem)), None)
        if newest is None:
            return (
                f"Snapshots are written to {self.folder} every {self._every_s:g} s, and there is none on this host: none has "
                f"been taken, or the worker that takes them is on another host."
            )
        with contextlib.suppress(OSError):
            age = f"taken {max(0.0, now - newest.stat().st_mtime):.0f} s ago"
            if number_of(newest) <= self._before:
                age += " and before this training began"
            return (
                f"Start the job again and go on from the newest snapshot, {age}:\nstretto.load({str(newest)!r}, model, optimizer)"
            )
        return f"Snapshots are in {self.folder}."
