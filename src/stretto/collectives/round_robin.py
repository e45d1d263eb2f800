"""All-reduce by rotating peers.

Rank r holds x_r and shows it to every other rank in turn, so that no two ranks aim at the same one:

    step k = 1..P-1:  rank r sends x_r to r+k, receives x_(r-k) from r-k   (mod P)

Cost:      (P-1)(alpha + m beta) + (P-1) m gamma, one message per rank, step and direction.
Invariant: every step is a permutation. All ranks return the same bits although x_(r-1), x_(r-2), ... arrive in another
           order at each rank: the receives stand in the program in rank order, not in the order of arrival, and
           operations on one chunk take effect in program order (`rank_order.py`). An early vector waits in the wire.
Reference: arXiv:1312.3020, for the name. There is no standard meaning: some texts call "round-robin" the scheme in
           which the master's role rotates from chunk to chunk; that one is `direct`.
Departure: adding on arrival would need no waiting vectors, but would leave each rank with other last bits.
"""

from __future__ import annotations

from stretto.collectives.plan import Kind, Operation, Plan, Send
from stretto.collectives.rank_order import add_in_rank_order


def round_robin(rank: int, size: int) -> Plan:
    """All-reduce in P-1 steps, each a rotation of the ranks by one more place."""
    operations: list[Operation] = [Send(shift - 1, (rank + shift) % size, 0, 1) for shift in range(1, size)]
    if size > 1:
        operations += add_in_rank_order(rank, size, lambda source: (rank - source) % size - 1, last_step=size - 2)
    return Plan(Kind.ALL_REDUCE, "round_robin", rank, size, 1, tuple(operations))
