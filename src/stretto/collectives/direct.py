"""All-reduce in which each rank is the master of one chunk.

The vector is cut into P chunks. All contributions to chunk r go straight to rank r, which adds them and gives the sum
to all:

    steps k = 1..P-1:  rank r sends chunk r+k to r+k, adds  chunk r   from r-k   (mod P)
    then, likewise:    rank r sends chunk r   to r+k, keeps chunk r-k from r-k   (mod P)

Cost:      2(P-1) alpha + 2 m(P-1)/P beta + m(P-1)/P gamma: what a ring costs, but the P-1 messages of a phase do not
           wait for one another, so only two of them are on the critical path when the network can take all at once.
Invariant: chunk r is added at rank r only, in the order x_r, x_(r-1), ..., and then copied: same bits everywhere.
Reference: Thakur, Rabenseifner and Gropp, 2005. Also called chunked butterfly, and by some round-robin (the
           master's role rotates); it is a parameter server with P co-located shards.
"""

from __future__ import annotations

from stretto.collectives.all_gather_direct import send_from_owner
from stretto.collectives.plan import Kind, Plan
from stretto.collectives.reduce_scatter_direct import send_to_owners


def direct(rank: int, size: int) -> Plan:
    """All-reduce by a direct reduce-scatter followed by a direct all-gather."""
    operations = send_to_owners(rank, size, first_step=0) + send_from_owner(rank, size, first_step=size - 1)
    return Plan(Kind.ALL_REDUCE, "direct", rank, size, size, tuple(operations))
