"""All-reduce around a ring.

Rank r holds x_r; the vector is cut into P chunks. In P-1 steps each chunk travels the ring and gathers its sum; in P-1
more the sums travel on:

    reduce-scatter, step t:  rank r sends chunk r-t   to r+1, adds  chunk r-t-1 from r-1   (mod P)
    all-gather,     step t:  rank r sends chunk r+1-t to r+1, keeps chunk r-t   from r-1   (mod P)

Cost:      2(P-1) alpha + 2 m(P-1)/P beta + m(P-1)/P gamma: the least possible volume, but a latency that grows with P.
Invariant: after reduce-scatter step t the chunk just received is a sum of t+2 contributions. Chunk c is added in one
           order only, x_c, x_(c+1), ... around the ring, and then copied: same bits everywhere.
Reference: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
"""

from __future__ import annotations

from stretto.collectives.plan import Kind, Plan
from stretto.collectives.ring_walks import gather_around, reduce_around


def ring(rank: int, size: int) -> Plan:
    """All-reduce by a ring reduce-scatter followed by a ring all-gather."""
    members, chunks, own = range(size), [(chunk, chunk + 1) for chunk in range(size)], rank + 1
    operations = reduce_around(members, rank, chunks, own, first_step=0)
    operations += gather_around(members, rank, chunks, own, first_step=size - 1)
    return Plan(Kind.ALL_REDUCE, "ring", rank, size, size, tuple(operations))
