"""All-reduce over two binary trees at once.

Each half of the vector is reduced up and broadcast down a binary tree of its own. A rank with children in one tree is a
leaf of the other, so nobody carries two inner loads. The first tree hangs rank r, whose lowest set bit is b, under

    parent(r) = (r - b) | 2b, or r - b where that is not below P;      rank 0 is the root

so odd ranks are its leaves. The second tree is the first with ranks renamed: r -> P-1-r for even P, r -> r-1 mod P for
odd P.

Cost:      a rank sends at most four halves, 2m, and receives as much. With h = ceil(log2 P) about 4h rounds; in k
           segments about 4(h+k)(alpha + (m/2k) beta), at best 2(2h alpha + m beta + 2 sqrt(2h alpha m beta)).
Invariant: each half is added along one tree and then copied: same bits everywhere.
Reference: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
           Computing 35(12), 2009; the shape of the trees is the one NCCL uses (2.4 and later).
Departure: rounds are not taken from the paper's edge colouring. All messages of all ranks are placed greedily, longest
           remaining way first, each in the first round in which its sender and its receiver are free. The result needs
           no proof of its own: `verify` checks it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from stretto.collectives.plan import Kind, Operation, Plan, Recv, Send


def double_binary_tree(rank: int, size: int) -> Plan:
    """All-reduce of chunk 0 over one binary tree and of chunk 1 over its mirror image."""
    return Plan(Kind.ALL_REDUCE, "double_binary_tree", rank, size, 2, _programs(size)[rank])


def parents(size: int, tree: int) -> tuple[int | None, ...]:
    """Each rank's parent in tree 0 or 1; None for the root."""
    first = [_parent(rank, size) for rank in range(size)]
    if tree == 0:
        return tuple(first)

    def rename(rank: int) -> int:  # its own inverse for even P; for odd P the tree's node i is rank i+1
        return size - 1 - rank if size % 2 == 0 else (rank + 1) % size

    second: list[int | None] = [None] * size
    for node, parent in enumerate(first):
        second[rename(node)] = None if parent is None else rename(parent)
    return tuple(second)


def _parent(rank: int, size: int) -> int | None:
    if rank == 0:
        return None
    bit = rank & -rank
    parent = (rank ^ bit) | (bit << 1)
    return parent if parent < size else rank ^ bit


@dataclass(slots=True, eq=False)  # messages are told apart by identity
class _TreeMessage:
    """One hop of one half. `remaining` is the number of hops from here to the farthest rank still to be told."""

    sender: int
    receiver: int
    tree: int
    up: bool
    remaining: int
    waits_for: int = 0
    releases: list[_TreeMessage] = field(default_factory=list)

    @property
    def urgency(self) -> tuple[int, int, int]:
        return -self.remaining, self.tree, self.sender


def _messages(size: int, tree: int) -> list[_TreeMessage]:
    """The hops of one tree, each knowing which others it releases."""
    parent_of = parents(size, tree)
    depths = [_depth(rank, parent_of) for rank in range(size)]
    heights = [0] * size
    for rank in sorted(range(size), key=lambda rank: -depths[rank]):
        parent = parent_of[rank]
        if parent is not None:
            heights[parent] = max(heights[parent], heights[rank] + 1)
    up: dict[int, _TreeMessage] = {}
    down: dict[int, _TreeMessage] = {}
    for rank, parent in enumerate(parent_of):
        if parent is not None:
            up[rank] = _TreeMessage(rank, parent, tree, True, depths[rank] + max(heights))
            down[rank] = _TreeMessage(parent, rank, tree, False, heights[rank] + 1)
    for rank in up:
        above = up[rank].receiver
        after_up = [up[above]] if above in up else [down[child] for child in down if parent_of[child] == above]
        up[rank].releases = after_up
        for message in after_up:
            message.waits_for += 1
        if above in down:
            down[above].releases.append(down[rank])
            down[rank].waits_for += 1
    return [*up.values(), *down.values()]


def _depth(rank: int, parent_of: tuple[int | None, ...]) -> int:
    depth, above = 0, parent_of[rank]
    while above is not None:
        depth, above = depth + 1, parent_of[above]
    return depth


@lru_cache(maxsize=64)
def _programs(size: int) -> tuple[tuple[Operation, ...], ...]:
    """Every rank's operations. One message out and one in per rank and round."""
    programs: list[list[Operation]] = [[] for _ in range(size)]
    messages = _messages(size, 0) + _messages(size, 1)
    ready = [message for message in messages if message.waits_for == 0]
    step = 0
    while ready:
        ready.sort(key=lambda message: message.urgency)
        travelling = _fill_round(ready)
        for message in travelling:
            lo, hi = message.tree, message.tree + 1
            programs[message.sender].append(Send(step, message.receiver, lo, hi))
            programs[message.receiver].append(Recv(step, message.sender, lo, hi, add=message.up))
        left = set(travelling)
        ready = [message for message in ready if message not in left] + _released(travelling)
        step += 1
    return tuple(tuple(program) for program in programs)


def _fill_round(ready: list[_TreeMessage]) -> list[_TreeMessage]:
    """The messages that may travel together, most urgent first."""
    sending: set[int] = set()
    receiving: set[int] = set()
    travelling = []
    for message in ready:
        if message.sender not in sending and message.receiver not in receiving:
            sending.add(message.sender)
            receiving.add(message.receiver)
            travelling.append(message)
    return travelling


def _released(travelling: list[_TreeMessage]) -> list[_TreeMessage]:
    released = []
    for message in travelling:
        for follower in message.releases:
            follower.waits_for -= 1
            if follower.waits_for == 0:
                released.append(follower)
    return released
