"""Barrier by dissemination.

h = ceil(log2 P); messages carry nothing:

    round k = 0..h-1:  rank r tells r + 2^k and hears from r - 2^k   (mod P)

A rank speaks in round k only when it has heard in all rounds before. So after round k it knows that the 2^(k+1) ranks
up to itself have entered, and after the last that all have.

Cost:      h alpha, the least possible.
Invariant: nobody returns before everybody has entered. Empty operations are ordered among themselves by program order
           (`plan.py`), which is what makes a rank speak only after it has heard.
Reference: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", IJPP 17(1), 1988.
"""

from __future__ import annotations

from stretto.collectives.binomial import depth
from stretto.collectives.plan import Kind, Operation, Plan, Recv, Send


def barrier(rank: int, size: int) -> Plan:
    """Return when all ranks have called; zero-length messages only."""
    operations: list[Operation] = []
    for step in range(depth(size)):
        distance = 1 << step
        operations.append(Send(step, (rank + distance) % size, 0, 0))
        operations.append(Recv(step, (rank - distance) % size, 0, 0))
    return Plan(Kind.BARRIER, "dissemination", rank, size, 1, tuple(operations))
