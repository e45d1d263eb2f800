"""Gathering at a root, each chunk sent straight to it.

P chunks; chunk i of rank i goes to the root. v = (r - root) mod P is a rank's place counted from the root:

    step v-1 (v = 1..P-1):  place v sends its own chunk to the root

Cost:      (P-1)(alpha + (m/P) beta), all of it at the root, which must receive that much under any algorithm. A tree would save
           messages at the root, but its inner ranks would need room for the chunks of others.
Invariant: chunks are only copied.
Reference: Thakur, Rabenseifner and Gropp, 2005 (there as a binomial tree).
"""

from __future__ import annotations

from functools import lru_cache

from stretto.collectives.plan import Kind, Operation, Plan, PlanMaker, Recv, Send
from stretto.collectives.rooted import from_root


@lru_cache(maxsize=1024)
def gather(root: int) -> PlanMaker:
    """The direct gather at `root`."""

    def make(rank: int, size: int) -> Plan:
        members, position = from_root(root, rank, size)
        operations: list[Operation] = [Send(position - 1, root, rank, rank + 1)]
        if position == 0:
            operations = [Recv(place - 1, members[place], members[place], members[place] + 1) for place in range(1, size)]
        return Plan(Kind.GATHER, "direct", rank, size, size, tuple(operations), root=root)

    return make
