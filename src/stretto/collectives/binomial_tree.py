"""All-reduce up and down a binomial tree.

h = ceil(log2 P). The vectors are added on the way up to rank 0, and the sum is copied on the way down:

    up,   round k = 0..h-1:  rank r with r mod 2^(k+1) = 2^k sends to r - 2^k, which adds
    down, round k = h-1..0:  the same pairs, the other way round, copying

Cost:      2h(alpha + m beta) + h m gamma. The root receives and sends h vectors.
Invariant: every element is added along one tree and then copied: same bits everywhere.
Reference: Thakur, Rabenseifner and Gropp, 2005 (reduce followed by broadcast).
"""

from __future__ import annotations

from stretto.collectives.binomial import broadcast_down, depth, reduce_up
from stretto.collectives.plan import Kind, Plan


def binomial_tree(rank: int, size: int) -> Plan:
    """All-reduce by a reduction to rank 0 and a broadcast from it."""
    members = range(size)
    operations = reduce_up(members, rank, 1, first_step=0) + broadcast_down(members, rank, 1, first_step=depth(size))
    return Plan(Kind.ALL_REDUCE, "binomial_tree", rank, size, 1, tuple(operations))
