"""All-reduce by recursive doubling.

Rank r holds x_r; P = 2^h. In each round partners show each other what they have summed so far:

    round k = 0..h-1:  rank r and rank r xor 2^k exchange their whole accumulators and add

After round k each rank holds the sum over the 2^(k+1) ranks that differ from it in bits 0..k only. Other P are folded
first.

Cost:      h(alpha + m beta + m gamma), the least possible number of rounds; with a fold, 2 alpha + 2 m beta + m gamma
           more. A local copy per round.
Invariant: partners compute a+b and b+a, which are the same bits, so after round k all 2^(k+1) ranks agree; after the
           last, all. Sitting-out ranks are sent a copy.
Reference: Thakur, Rabenseifner and Gropp, 2005 (recursive doubling).
"""

from __future__ import annotations

from stretto.collectives.fold import Fold
from stretto.collectives.plan import Buffer, Kind, Local, Operation, Plan, Recv, Send


def butterfly(rank: int, size: int) -> Plan:
    """All-reduce in log2 P exchanges of the whole vector."""
    fold = Fold(rank, size)
    rounds = fold.core_size.bit_length() - 1
    operations = fold.before(1) + _exchanges(fold, rounds) + fold.after(1, fold.first_core_step + rounds)
    return Plan(Kind.ALL_REDUCE, "butterfly", rank, size, 1, tuple(operations))


def _exchanges(fold: Fold, rounds: int) -> list[Operation]:
    operations: list[Operation] = []
    if fold.core_rank is not None:
        for level in range(rounds):
            partner = fold.world_rank(fold.core_rank ^ (1 << level))
            step = fold.first_core_step + level
            # What is sent is set aside first, so that the receive need not wait for the send to be done: on a wire where a
            # send is done only when it is received, partners would wait for each other.
            operations.append(Local(step, Buffer.DATA, Buffer.WORK, 0, 1))
            operations += [Send(step, partner, 0, 1, Buffer.WORK), Recv(step, partner, 0, 1, add=True)]
    return operations
