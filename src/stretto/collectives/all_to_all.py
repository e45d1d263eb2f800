"""All-reduce by sending everything to everyone.

Rank r holds x_r, sends it whole to each other rank, and adds all vectors up itself:

    one step:  rank r sends x_r to 0, 1, ..., P-1 (not r), and computes ((x_0 + x_1) + x_2) + ...

Cost:      (P-1)(alpha + m beta) + (P-1) m gamma: one step, whose P-1 messages share the rank's link one after the
           other. All ranks aim at rank 0 first, then at rank 1, ...: the endpoint contention that `round_robin` avoids
           and that the formula does not see.
Invariant: all ranks add in rank order (`rank_order.py`), so all return the same bits.
Reference: the naive scheme; Ben-Nun and Hoefler, "Demystifying parallel and distributed deep learning", ACM CSUR 52(4),
           2019.
"""

from __future__ import annotations

from stretto.collectives.plan import Kind, Operation, Plan, Send
from stretto.collectives.rank_order import add_in_rank_order


def all_to_all(rank: int, size: int) -> Plan:
    """All-reduce in one step of P-1 messages from every rank."""
    operations: list[Operation] = []
    if size > 1:
        operations += [Send(0, peer, 0, 1) for peer in range(size) if peer != rank]
        operations += add_in_rank_order(rank, size, lambda source: 0, last_step=0)
    return Plan(Kind.ALL_REDUCE, "all_to_all", rank, size, 1, tuple(operations), ports=max(1, size - 1))
