"""All-gather, each chunk sent straight to everyone.

P chunks; chunk i of rank i goes to all. Peers rotate, so that every step is a permutation:

    step k = 1..P-1:  rank r sends chunk r to r+k, keeps chunk r-k from r-k   (mod P)

Cost:      (P-1)(alpha + (m/P) beta). As a ring, but no message waits for another.
Invariant: chunks are only copied.
Reference: Thakur, Rabenseifner and Gropp, 2005 (there as a ring).
"""

from __future__ import annotations

from stretto.collectives.plan import Kind, Operation, Plan, Recv, Send


def all_gather_direct(rank: int, size: int) -> Plan:
    """Give chunk r of rank r to every rank."""
    return Plan(Kind.ALL_GATHER, "direct", rank, size, size, tuple(send_from_owner(rank, size, first_step=0)))


def send_from_owner(rank: int, size: int, first_step: int) -> list[Operation]:
    operations: list[Operation] = []
    for shift in range(1, size):
        target, source, step = (rank + shift) % size, (rank - shift) % size, first_step + shift - 1
        operations.append(Send(step, target, rank, rank + 1))
        operations.append(Recv(step, source, source, source + 1))
    return operations
