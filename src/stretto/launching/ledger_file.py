"""The file in which a worker leaves, at its end, how many bytes its wire has sent (STRETTO_LEDGER names it).

Written by `Job.close`, read by the lab, which sets it beside what the network interfaces counted. Parameter servers that a worker
has started write files of their own, with its name and a suffix; they count as that worker's.
"""

from __future__ import annotations

import glob
from pathlib import Path

import msgspec

MAX_BYTES = 4096


class WireCount(msgspec.Struct, frozen=True):
    """What one worker's wire counted."""

    bytes_sent: int


def write_ledger(path: str, bytes_sent: int) -> None:
    Path(path).write_bytes(msgspec.json.encode(WireCount(bytes_sent)))


def of_server(path: str, server: int, life: int) -> str:
    """The file of a server that the worker with the file `path` has started."""
    return f"{path}.server-{server}-{life}"


def read_ledger(path: Path) -> WireCount | None:
    """None when the worker left no (valid) count: it was killed, or does not use stretto."""
    own = _read(path)
    if own is None:
        return None
    servers = [_read(each) for each in sorted(path.parent.glob(f"{glob.escape(path.name)}.server-*"))]
    return WireCount(own.bytes_sent + sum(each.bytes_sent for each in servers if each is not None))


def _read(path: Path) -> WireCount | None:
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=WireCount)
    except (OSError, msgspec.DecodeError):
        return None
