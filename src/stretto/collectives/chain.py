"""All-reduce along a chain.

Rank r holds x_r. The sum grows from rank 0 to rank P-1, and goes back the same way:

    way there, step t:  rank t sends x_0 + ... + x_t to rank t+1, which adds it
    way back,  step t:  rank P-1-t sends the total to rank P-2-t, which keeps it

Cost:      2(P-1)(alpha + m beta) + (P-1) m gamma in one piece. Meant to be cut into k segments that follow each other:
           then a rank in the middle is the bottleneck with two messages per segment each way, about
           2(P-1+k-1)(alpha + (m/k) beta): as k grows, 2m per rank, the volume of a ring.
Invariant: added at one place per segment in rank order, then copied: all ranks return the same bits.
Reference: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.collectives.plan import Kind, Operation, Plan, Recv, Send


def chain(rank: int, size: int) -> Plan:
    """All-reduce by a sum that walks from rank 0 to the last rank and back."""
    return Plan(Kind.ALL_REDUCE, "chain", rank, size, 1, tuple(_operations(rank, size)))


def _operations(rank: int, size: int) -> Iterator[Operation]:
    last = size - 1
    if rank > 0:
        yield Recv(rank - 1, rank - 1, 0, 1, add=True)
    if rank < last:
        yield Send(rank, rank + 1, 0, 1)
        yield Recv(2 * last - 1 - rank, rank + 1, 0, 1)
    if rank > 0:
        yield Send(2 * last - rank, rank - 1, 0, 1)
