"""The binomial tree: the two sweeps from which every tree-like plan is made.

Members are numbered 0..K-1, 0 being the root; h = ceil(log2 K). In round k of the way up, member v with
v mod 2^(k+1) = 2^k sends to v - 2^k and is done; the way down is the same picture read backwards.

Cost:      h rounds each way. The root handles h messages, a leaf one.
Invariant: member v adds its children in the order v+1, v+2, v+4, ...: one place, one order.
Reference: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
Departure: none; any K works because a child that does not exist is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.collectives.plan import Operation, Recv, Send


def depth(count: int) -> int:
    """ceil(log2 count): the rounds of one sweep."""
    return (count - 1).bit_length()


def reduce_up(members: Sequence[int], position: int, num_chunks: int, first_step: int) -> list[Operation]:
    """Add all members' vectors into that of members[0]; the others keep partial sums."""
    operations: list[Operation] = []
    for level in range(depth(len(members))):
        distance = 1 << level
        if position & distance:
            operations.append(Send(first_step + level, members[position - distance], 0, num_chunks))
            break
        if position + distance < len(members):
            operations.append(Recv(first_step + level, members[position + distance], 0, num_chunks, add=True))
    return operations


def broadcast_down(members: Sequence[int], position: int, num_chunks: int, first_step: int) -> list[Operation]:
    """Copy the vector of members[0] to all members."""
    levels = depth(len(members))
    operations: list[Operation] = []
    for level in reversed(range(levels)):
        distance, step = 1 << level, first_step + levels - 1 - level
        remainder = position % (2 * distance)
        if remainder == distance:
            operations.append(Recv(step, members[position - distance], 0, num_chunks))
        elif remainder == 0 and position + distance < len(members):
            operations.append(Send(step, members[position + distance], 0, num_chunks))
    return operations
