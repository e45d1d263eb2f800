"""Reduce-scatter, each contribution sent straight to its owner.

P chunks; rank r ends with chunk r of sum_q x_q. Peers rotate, so that every step is a permutation:

    step k = 1..P-1:  rank r sends chunk r+k to r+k, adds chunk r from r-k   (mod P)

Cost:      (P-1)(alpha + (m/P) beta) + m(P-1)/P gamma: as a ring, but no message waits for another.
Invariant: chunk r is added at rank r only, in the order x_r, x_(r-1), x_(r-2), ...
Reference: Thakur, Rabenseifner and Gropp, 2005 ("pairwise exchange").
"""

from __future__ import annotations

from stretto.collectives.plan import Kind, Operation, Plan, Recv, Send


def reduce_scatter_direct(rank: int, size: int) -> Plan:
    """Leave at rank r the sum of chunk r; the other chunks keep this rank's own values."""
    return Plan(Kind.REDUCE_SCATTER, "direct", rank, size, size, tuple(send_to_owners(rank, size, first_step=0)))


def send_to_owners(rank: int, size: int, first_step: int) -> list[Operation]:
    operations: list[Operation] = []
    for shift in range(1, size):
        owner, source, step = (rank + shift) % size, (rank - shift) % size, first_step + shift - 1
        operations.append(Send(step, owner, owner, owner + 1))
        operations.append(Recv(step, source, rank, rank + 1, add=True))
    return operations
