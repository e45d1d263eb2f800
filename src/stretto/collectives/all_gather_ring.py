"""All-gather around a ring.

P chunks; chunk i of rank i goes to all:

    step t = 0..P-2:  rank r sends chunk r-t to r+1, keeps chunk r-t-1 from r-1   (mod P)

Cost:      (P-1)(alpha + (m/P) beta).
Invariant: chunks are only copied.
Reference: Patarasuk and Yuan, 2009, second phase.
"""

from __future__ import annotations

from stretto.collectives.plan import Kind, Plan
from stretto.collectives.ring_walks import gather_around


def all_gather_ring(rank: int, size: int) -> Plan:
    """Give chunk r of rank r to every rank."""
    chunks = [(chunk, chunk + 1) for chunk in range(size)]
    operations = gather_around(range(size), rank, chunks, rank, first_step=0)
    return Plan(Kind.ALL_GATHER, "ring", rank, size, size, tuple(operations))
