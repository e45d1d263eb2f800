"""Adding whole vectors in rank order, for plans in which every rank does the whole sum itself.

Float addition is commutative but not associative: if each rank added what arrives as it arrives, the last bits would
differ from rank to rank. So every rank computes ((x_0 + x_1) + x_2) + ... in WORK, its own vector taking its turn,
while DATA keeps x_r for the messages still to leave. Program order on WORK is the order of addition; a vector that
comes before its turn waits in the wire.

Cost:      (P-1) m gamma and two local copies; at worst P-2 vectors wait in the wire.
Invariant: all ranks evaluate the same expression, hence hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

from stretto.collectives.plan import Buffer, Local, Operation, Recv


def add_in_rank_order(rank: int, size: int, arrives: Callable[[int], int], last_step: int) -> list[Operation]:
    """Sum all vectors into WORK by rank, then copy the sum to DATA. `arrives(source)` is the round of that message.

    The vector of rank 0 is copied, not added; the round in which it comes is the one in which a rank adds its own.
    """
    operations: list[Operation] = []
    for source in range(size):
        add = source > 0
        if source == rank:
            step = arrives(0) if add else 0
            operations.append(Local(step, Buffer.DATA, Buffer.WORK, 0, 1, add=add))
        else:
            operations.append(Recv(arrives(source), source, 0, 1, Buffer.WORK, add=add))
    operations.append(Local(last_step, Buffer.WORK, Buffer.DATA, 0, 1))
    return operations
