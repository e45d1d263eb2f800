"""All-reduce in two levels: inside each host, and between hosts.

Ranks g*k .. g*k+k-1 form group g (a host with k workers); there are G = ceil(P/k) groups. Where k divides P:

    1. ring reduce-scatter inside each group:  local rank i owns shard i, summed over its group
    2. ring all-reduce of shard i between the G ranks with local number i, all k shards at once
    3. ring all-gather inside each group

Where it does not, the last group is smaller and there is nobody to own some of its shards. Then, with the first rank of
each group as its leader:

    1. binomial reduction to the leader    2. ring all-reduce between the G leaders    3. binomial broadcast

Cost:      even:   2(k+G-2) alpha + 2 m(P-1)/P beta + m(P-1)/P gamma, of which only 2(G-1) rounds and 2 (m/k)(G-1)/G
                   bytes per rank cross between hosts;
           uneven: 2(h+G-1) alpha + (2h + 2(G-1)/G) m beta + (h + (G-1)/G) m gamma, h = ceil(log2 k); a leader sends
                   2m(G-1)/G between hosts and the other k-1 shares of the network stay idle.
Invariant: each chunk is added along one path and then copied: same bits everywhere.
Reference: Jia et al., "Highly scalable deep learning training system with mixed-precision: training ImageNet in four
           minutes", arXiv:1807.11205, for the uneven form; shards in parallel as in Horovod's hierarchical all-reduce.
Departure: k above P means one group. k = 1 or k >= P are plain rings.
"""

from __future__ import annotations

from functools import lru_cache

from stretto.collectives.binomial import broadcast_down, depth, reduce_up
from stretto.collectives.plan import Kind, Operation, Plan, PlanMaker
from stretto.collectives.ring_walks import gather_around, reduce_around
from stretto.collectives.torus import reduce_on_grid
from stretto.errors import ConfigurationError


@lru_cache(maxsize=64)
def hierarchical(group: int) -> PlanMaker:
    """The two-level all-reduce for hosts of `group` consecutive ranks."""
    if group < 1:
        raise ConfigurationError(
            f"hierarchical(group={group}): a group is a host's consecutive ranks, at least one. "
            f"Write the number of workers per host, for instance hierarchical(4)."
        )

    def make(rank: int, size: int) -> Plan:
        members = min(group, size)
        if size % members == 0:
            chunks, operations = size, reduce_on_grid(rank, columns=members, rows=size // members)
        else:
            chunks, operations = -(-size // members), _through_leaders(rank, size, members)
        return Plan(Kind.ALL_REDUCE, "hierarchical", rank, size, chunks, tuple(operations))

    return make


def _through_leaders(rank: int, size: int, group: int) -> list[Operation]:
    host, position = divmod(rank, group)
    members = range(host * group, min(size, (host + 1) * group))
    leaders = range(0, size, group)
    chunks = [(chunk, chunk + 1) for chunk in range(len(leaders))]
    levels = depth(group)
    between = levels + len(leaders) - 1
    operations = reduce_up(members, position, len(leaders), first_step=0)
    if position == 0:
        operations += reduce_around(leaders, host, chunks, host, first_step=levels)
        operations += gather_around(leaders, host, chunks, host, first_step=between)
    # A smaller group has a lower tree: its broadcast begins with the others' and ends earlier.
    return operations + broadcast_down(members, position, len(leaders), first_step=between + len(leaders) - 1)
