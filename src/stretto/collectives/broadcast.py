"""Broadcast down a binomial tree.

h = ceil(log2 P); v = (r - root) mod P is a rank's place counted from the root:

    round k = h-1..0:  every v with v mod 2^(k+1) = 0 sends the vector to v + 2^k

Cost:      h(alpha + m beta). The root sends h vectors.
Invariant: the vector is only copied.
Reference: Thakur, Rabenseifner and Gropp, 2005.
"""

from __future__ import annotations

from functools import lru_cache

from stretto.collectives.binomial import broadcast_down
from stretto.collectives.plan import Kind, Plan, PlanMaker
from stretto.collectives.rooted import from_root


@lru_cache(maxsize=1024)
def broadcast(root: int) -> PlanMaker:
    """The binomial broadcast from `root`."""

    def make(rank: int, size: int) -> Plan:
        members, position = from_root(root, rank, size)
        operations = broadcast_down(members, position, 1, first_step=0)
        return Plan(Kind.BROADCAST, "binomial", rank, size, 1, tuple(operations), root=root)

    return make
