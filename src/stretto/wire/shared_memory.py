"""Tensors between workers of one host, through mapped memory.

For each ordered pair of ranks that exchanges large messages the sender makes one mapping (`mapping.py`: a file without a name,
which cannot outlive the two processes), when it sends the first, and offers it by a control message.

A message costs one copy into the mapping and one read out of it (the read is the addition itself, where the receiver adds),
against two copies through the kernel for a socket. It lies in one piece, at the start of a grain of 64 KiB (`slot` in its
header), and its place comes back with the receiver's acknowledgement.

The rule for using it: both ranks report the same host identity (boot id and network namespace) and the same PID namespace, so
that /proc/PID means the same process to both; and the receiver could map the very file that was offered. Where there is not
enough memory (the mappings of all pairs of a host may take half of what is free), messages travel over sockets.
"""

from __future__ import annotations

import numpy as np

from stretto.wire.mapping import MappingOffer, OwnMapping, map_offered

GRAIN_BYTES = 64 << 10
OUTBOX_BYTES = 8 << 20  # four segments of 2 MiB
MAX_BYTES = 1 << 30  # of an offer


class Outbox:
    """Sender's side. Raises OSError where there is no memory for it. `of_all`: what all pairs of this host may come to take."""

    def __init__(self, num_bytes: int, of_all: int = 0) -> None:
        self._mapping = OwnMapping(num_bytes, of_all)
        self.offer = self._mapping.offer
        self.num_bytes = num_bytes
        self._arena = self._mapping.bytes
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

    def settle(self) -> None:
        """The receiver has mapped it, or will not: nobody else needs to find the file any more."""
        self._mapping.close_file()


class Inbox:
    """Receiver's side. Raises OSError or ValueError, with what is wrong, where the offer cannot be used."""

    def __init__(self, offer: MappingOffer) -> None:
        if not 0 < offer.num_bytes <= MAX_BYTES:
            raise ValueError(f"an offer of {offer.num_bytes} bytes")
        self._arena = map_offered(offer)

    def view(self, slot: int, num_bytes: int) -> memoryview:
        begin = slot * GRAIN_BYTES
        if begin + num_bytes > self._arena.size:
            raise ValueError(f"{num_bytes} bytes at {begin} of {self._arena.size}")
        return self._arena[begin : begin + num_bytes].data
