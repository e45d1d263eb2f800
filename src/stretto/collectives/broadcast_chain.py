"""Broadcast along a chain.

v = (r - root) mod P is a rank's place counted from the root; in step t place t sends the vector to place t+1.

Cost:      (P-1)(alpha + m beta) in one piece; in k segments that follow each other (P-1+k-1)(alpha + (m/k) beta), which
           for large m is close to m beta, whatever P.
Invariant: the vector is only copied.
Reference: Sanders, Speck and Träff, 2009 (the pipelined chain).
"""

from __future__ import annotations

from functools import lru_cache

from stretto.collectives.plan import Kind, Operation, Plan, PlanMaker, Recv, Send
from stretto.collectives.rooted import from_root


@lru_cache(maxsize=1024)
def broadcast_chain(root: int) -> PlanMaker:
    """The chain broadcast from `root`; meant for segment pipelining."""

    def make(rank: int, size: int) -> Plan:
        members, position = from_root(root, rank, size)
        operations: list[Operation] = []
        if position > 0:
            operations.append(Recv(position - 1, members[position - 1], 0, 1))
        if position < size - 1:
            operations.append(Send(position, members[position + 1], 0, 1))
        return Plan(Kind.BROADCAST, "chain", rank, size, 1, tuple(operations), root=root)

    return make
