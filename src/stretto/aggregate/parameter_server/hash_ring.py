"""Which server has which range: consistent hashing with bounded loads.

Each server has `POINTS` points on a ring of 64-bit numbers, each range has one. From its point a range goes round the ring, and
meets the servers in an order of its own: its *preferences*. It belongs to the first of them that has room for it, where all
have room for an equal share of the bytes; ranges that fit nowhere, the last and smallest, go to the server that has least.
Large ranges choose first. Its replicas are the next servers that it meets.

Cost:      computed by everybody for themselves, from the servers' ranks alone; O(ranges * servers).
Invariant: the largest load is at most the equal share and one range more. Loads are as even as ranges are small: with equal
ranges
           the largest and the smallest differ by one range at most. When a server dies, its ranges are those of their next
           replica, and no others move. When one joins, the only ranges that move are those that it has in the new placement.
Reference: Karger et al., "Consistent hashing and random trees", STOC 1997; Mirrokni, Thorup and Zadimoghaddam, "Consistent
hashing
           with bounded loads", SODA 2018.
Departs:   loads are bytes, not counts, and the bound is the equal share itself: what it moves more than the paper's 1 + epsilon
           when a server comes is not moved at all here, since ranges move to the newcomer only. So after a join loads are less
           even than a placement from scratch would be.
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Iterable, Sequence
from typing import Final

from stretto.aggregate.parameter_server.layout import ParameterRange

POINTS: Final = 64


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class HashRing:
    """The ring of some servers. See the module's text."""

    def __init__(self, servers: Iterable[int]) -> None:
        self.servers = sorted(set(servers))
        points = sorted((_point(f"server {rank} point {number}"), rank) for rank in self.servers for number in range(POINTS))
        self._points = [point for point, _ in points]
        self._ranks = [rank for _, rank in points]

    def preferences(self, index: int) -> list[int]:
        """All servers, in the order in which range `index` meets them."""
        found: dict[int, None] = {}
        begin = bisect(self._points, _point(f"range {index}"))
        for step in range(len(self._ranks)):
            found[self._ranks[(begin + step) % len(self._ranks)]] = None
            if len(found) == len(self.servers):
                break
        return list(found)

    def place(self, ranges: Sequence[ParameterRange]) -> dict[int, int]:
        """Range -> the server that it belongs to."""
        share = sum(each.num_bytes for each in ranges) / len(self.servers)
        loads = dict.fromkeys(self.servers, 0)
        placed: dict[int, int] = {}
        for each in sorted(ranges, key=lambda each: (-each.num_bytes, each.index)):
            with_room = (rank for rank in self.preferences(each.index) if loads[rank] + each.num_bytes <= share)
            rank = next(with_room, None)
            if rank is None:
                rank = min(self.preferences(each.index), key=loads.__getitem__)
            loads[rank] += each.num_bytes
            placed[each.index] = rank
        return placed

    def chain(self, index: int, first: int, length: int) -> list[int]:
        """The servers of a range that belongs to `first`: that one, then its replicas."""
        others = [rank for rank in self.preferences(index) if rank != first]
        return [first, *others][:length]
