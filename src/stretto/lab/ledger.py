"""Two counts of the same bytes: what the interfaces saw, and what the workers' wires say they sent.

Every stretto worker in a lab is told a file (STRETTO_LEDGER) and writes there, when it leaves, the bytes its wire
handed to the network. The interface counts more: packet headers (66 bytes for each packet of up to 64 KB),
acknowledgements, heartbeats, the introduction by the coordinator. Those are a few per cent of a training job, so

    interface / ledger - 1

beyond 5 % says that one of the two counts is wrong, or that the job sent next to nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

_MAX_BYTES = 4096


class Traffic(NamedTuple):
    """Bytes through one host's interface."""

    sent: int
    received: int

    def since(self, before: Traffic) -> Traffic:
        return Traffic(self.sent - before.sent, self.received - before.received)


class Ledger(msgspec.Struct, frozen=True):
    """What one worker's wire counted."""

    bytes_sent: int


def write_ledger(path: str, bytes_sent: int) -> None:
    """For the worker's side: leave the count where STRETTO_LEDGER says."""
    Path(path).write_bytes(msgspec.json.encode(Ledger(bytes_sent)))


def read_ledger(path: Path) -> Ledger | None:
    """None when the worker left no (valid) count: it was killed, or does not use stretto."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_BYTES), type=Ledger)
    except (OSError, msgspec.DecodeError):
        return None


def excess(traffic: Traffic, ledger: Ledger) -> float:
    """By which share the interface sent more than the ledger says (negative: less)."""
    return traffic.sent / ledger.bytes_sent - 1 if ledger.bytes_sent else float("inf")
