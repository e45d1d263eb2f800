"""All-reduce around a ring in both directions.

The vector is cut into two halves of P chunks each. One half goes round as in `ring`, the other against it, at the same
time.

Cost:      2(P-1) alpha + m(P-1)/P beta + m(P-1)/P gamma where the two directions are separate links (two lanes); with
           one link per rank the two messages of a step follow each other: 4(P-1) alpha + 2 m(P-1)/P beta + m(P-1)/P
           gamma, which is a ring with twice the messages. Use it only on the former.
Invariant: each chunk is added along one path and then copied: same bits everywhere.
Reference: Patarasuk and Yuan, 2009, for the ring; both directions as on the torus networks of Blue Gene and TPUs.
"""

from __future__ import annotations

from stretto.collectives.plan import Kind, Operation, Plan
from stretto.collectives.ring_walks import gather_around, reduce_around


def bidirectional_ring(rank: int, size: int) -> Plan:
    """All-reduce by two opposite rings, each carrying half of the vector."""
    clockwise = _half(list(range(size)), rank, first_chunk=0)
    against = _half(list(range(size))[::-1], size - 1 - rank, first_chunk=size)
    operations = sorted(clockwise + against, key=lambda operation: operation.step)  # stable: program order is kept
    return Plan(Kind.ALL_REDUCE, "bidirectional_ring", rank, size, 2 * size, tuple(operations), ports=2)


def _half(members: list[int], position: int, first_chunk: int) -> list[Operation]:
    count = len(members)
    chunks = [(chunk, chunk + 1) for chunk in range(first_chunk, first_chunk + count)]
    operations = reduce_around(members, position, chunks, position + 1, first_step=0)
    return operations + gather_around(members, position, chunks, position + 1, first_step=count - 1)
