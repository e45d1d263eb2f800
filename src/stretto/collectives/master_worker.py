"""All-reduce through a master.

Rank 0 receives every vector, adds it, and sends the sum back to everyone:

    step r-1   (r = 1..P-1):  rank r sends x_r to rank 0, which adds it
    step P-2+r (r = 1..P-1):  rank 0 sends the sum to rank r

Cost:      2(P-1)(alpha + m beta) + (P-1) m gamma, all of it at the master.
Invariant: added at rank 0 only, in rank order, then copied: same bits everywhere.
Reference: the centralised scheme of Ben-Nun and Hoefler, 2019, with one server that also is a worker.
"""

from __future__ import annotations

from stretto.collectives.plan import Kind, Operation, Plan, Recv, Send


def master_worker(rank: int, size: int) -> Plan:
    """All-reduce in which rank 0 does all the adding and all the sending."""
    operations: list[Operation]
    if rank == 0:
        operations = [Recv(worker - 1, worker, 0, 1, add=True) for worker in range(1, size)]
        operations += [Send(size - 2 + worker, worker, 0, 1) for worker in range(1, size)]
    else:
        operations = [Send(rank - 1, 0, 0, 1), Recv(size - 2 + rank, 0, 0, 1)]
    return Plan(Kind.ALL_REDUCE, "master_worker", rank, size, 1, tuple(operations))
