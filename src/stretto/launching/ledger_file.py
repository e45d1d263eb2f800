"""The file in which a worker leaves, at its end, how many bytes its wire has sent (STRETTO_LEDGER names it).

Written by `Job.close`, read by the lab, which sets it beside what the network interfaces counted.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

MAX_BYTES = 4096


class WireCount(msgspec.Struct, frozen=True):
    """What one worker's wire counted."""

    bytes_sent: int


def write_ledger(path: str, bytes_sent: int) -> None:
    Path(path).write_bytes(msgspec.json.encode(WireCount(bytes_sent)))


def read_ledger(path: Path) -> WireCount | None:
    """None when the worker left no (valid) count: it was killed, or does not use stretto."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=WireCount)
    except (OSError, msgspec.DecodeError):
        return None
