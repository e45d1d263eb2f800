"""All-to-all exchange, in place: a transposition of chunks.

P equal chunks; chunk i of rank r goes to rank i and becomes its chunk r. Peers rotate, so that every step is a
permutation:

    step k = 1..P-1:  rank r sends chunk r+k to r+k, keeps as chunk r-k what comes from r-k   (mod P)

Cost:      (P-1)(alpha + (m/P) beta).
Invariant: chunks are only moved. Chunk r+k is overwritten in step P-k by what comes from r+k; where that is not after
           step k, in which it leaves, it is put aside in WORK first (in the same step, because partners that each
           wait for their send to be received would wait for ever). So at most half of the vector is copied.
Reference: Thakur, Rabenseifner and Gropp, 2005 (the long-message all-to-all).
"""

from __future__ import annotations

from stretto.collectives.plan import Buffer, Kind, Local, Operation, Plan, Recv, Send


def transpose(rank: int, size: int) -> Plan:
    """Exchange chunk i of rank r with chunk r of rank i, for all pairs."""
    operations: list[Operation] = []
    for shift in range(1, size):
        target = (rank + shift) % size
        if _leaves_late(shift, size):
            operations.append(Local(0, Buffer.DATA, Buffer.WORK, target, target + 1))
    for shift in range(1, size):
        target, source = (rank + shift) % size, (rank - shift) % size
        buffer = Buffer.WORK if _leaves_late(shift, size) else Buffer.DATA
        operations.append(Send(shift - 1, target, target, target + 1, buffer))
        operations.append(Recv(shift - 1, source, source, source + 1))
    return Plan(Kind.ALL_TO_ALL, "transpose", rank, size, size, tuple(operations))


def _leaves_late(shift: int, size: int) -> bool:
    """Whether the chunk for rank r+shift leaves when its place is being taken, or later."""
    return shift >= size - shift
