"""Chunks travelling around a ring of ranks: the two walks from which every ring-like plan is made.

K members stand in a circle; member j sends only to member j+1 and receives only from member j-1. The vector (or a part
of it) is cut into K ranges. In K-1 rounds

    reduce_around   range i leaves the member after its owner-to-be, gathers one contribution per hop, and is finished
                    at its owner: round t, member j sends range own-t-1 and adds range own-t-2   (mod K)
    gather_around   each finished range leaves its owner and is copied at every hop:
                    round t, member j sends range own-t and keeps range own-t-1                  (mod K)

where `own` is the range member j owns. Owners must follow the circle (member j+1 owns the range after that of j).

Cost:      K-1 rounds each; every member sends K-1 of the K ranges.
Invariant: a range is added up along one path and nowhere else, so its bits do not depend on who looks.
Reference: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.collectives.plan import Operation, Recv, Send

Range = tuple[int, int]  # chunks lo..hi-1


def reduce_around(members: Sequence[int], position: int, ranges: Sequence[Range], own: int, first_step: int) -> list[Operation]:
    """Reduce-scatter among `members`: the one at `position` ends with the sum of range `own`."""
    return _walk(members, position, ranges, own - 1, first_step, add=True)


def gather_around(members: Sequence[int], position: int, ranges: Sequence[Range], own: int, first_step: int) -> list[Operation]:
    """All-gather among `members`: the one at `position` gives range `own` and ends with all of them."""
    return _walk(members, position, ranges, own, first_step, add=False)


def _walk(
    members: Sequence[int], position: int, ranges: Sequence[Range], first: int, first_step: int, add: bool
) -> list[Operation]:
    """Send ranges first, first-1, ... to the right while ranges first-1, first-2, ... come from the left."""
    count = len(members)
    right, left = members[(position + 1) % count], members[(position - 1) % count]
    operations: list[Operation] = []
    for turn in range(count - 1):
        out_lo, out_hi = ranges[(first - turn) % count]
        in_lo, in_hi = ranges[(first - turn - 1) % count]
        operations.append(Send(first_step + turn, right, out_lo, out_hi))
        operations.append(Recv(first_step + turn, left, in_lo, in_hi, add=add))
    return operations
