"""Reduce-scatter around a ring.

P chunks; rank r ends with chunk r of sum_q x_q:

    step t = 0..P-2:  rank r sends chunk r-t-1 to r+1, adds chunk r-t-2 from r-1   (mod P)

Cost:      (P-1)(alpha + (m/P) beta) + m(P-1)/P gamma.
Invariant: chunk r is added in the order x_(r+1), x_(r+2), ..., x_r around the ring.
Reference: Patarasuk and Yuan, 2009, first phase.
Departure: shifted by one place, so that the chunk that ends at rank r is chunk r and not chunk r+1.
"""

from __future__ import annotations

from stretto.collectives.plan import Kind, Plan
from stretto.collectives.ring_walks import reduce_around


def reduce_scatter(rank: int, size: int) -> Plan:
    """Leave at rank r the sum of chunk r; the other chunks hold partial sums."""
    chunks = [(chunk, chunk + 1) for chunk in range(size)]
    operations = reduce_around(range(size), rank, chunks, rank, first_step=0)
    return Plan(Kind.REDUCE_SCATTER, "ring", rank, size, size, tuple(operations))
