"""Reduction up a binomial tree.

h = ceil(log2 P); v = (r - root) mod P is a rank's place counted from the root:

    round k = 0..h-1:  every v with v mod 2^(k+1) = 2^k sends its partial sum to v - 2^k, which adds it

Cost:      h(alpha + m beta + m gamma). The root receives h vectors.
Invariant: the root holds the sum. The other ranks' vectors are overwritten by partial sums.
Reference: Thakur, Rabenseifner and Gropp, 2005.
"""

from __future__ import annotations

from functools import lru_cache

from stretto.collectives.binomial import reduce_up
from stretto.collectives.plan import Kind, Plan, PlanMaker
from stretto.collectives.rooted import from_root


@lru_cache(maxsize=1024)
def reduce(root: int) -> PlanMaker:
    """The binomial reduction to `root`."""

    def make(rank: int, size: int) -> Plan:
        members, position = from_root(root, rank, size)
        operations = reduce_up(members, position, 1, first_step=0)
        return Plan(Kind.REDUCE, "binomial", rank, size, 1, tuple(operations), root=root)

    return make
