"""Scattering from a root, each chunk sent straight to its owner: a gather read backwards.

P chunks; chunk i of the root goes to rank i. v = (r - root) mod P is a rank's place counted from the root:

    step v-1 (v = 1..P-1):  the root sends to place v the chunk of that rank

Cost:      (P-1)(alpha + (m/P) beta), all of it at the root, which must send that much under any algorithm.
Invariant: chunks are only copied.
Reference: Thakur, Rabenseifner and Gropp, 2005 (there as a binomial tree; why not here, `gather.py` says).
"""

from __future__ import annotations

from functools import lru_cache

from stretto.collectives.plan import Kind, Operation, Plan, PlanMaker, Recv, Send
from stretto.collectives.rooted import from_root


@lru_cache(maxsize=1024)
def scatter(root: int) -> PlanMaker:
    """The direct scatter from `root`."""

    def make(rank: int, size: int) -> Plan:
        members, position = from_root(root, rank, size)
        operations: list[Operation] = [Recv(position - 1, root, rank, rank + 1)]
        if position == 0:
            operations = [Send(place - 1, members[place], members[place], members[place] + 1) for place in range(1, size)]
        return Plan(Kind.SCATTER, "direct", rank, size, size, tuple(operations), root=root)

    return make
