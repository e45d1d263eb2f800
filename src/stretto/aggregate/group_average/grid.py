"""Workers on a grid of M x M x ... places, and the groups in which Moshpit SGD averages them.

Rank r has the coordinates c_0, c_1, ..., the digits of r to base M; there are d of them, as few as have a place for everybody. In
round t = 0, 1, ... the groups are those who agree on all coordinates but c_(t mod d): rows, then columns, and so on.

Invariant: if P = M^d, the average of all is exact after d rounds in which everybody takes part. Where there are fewer workers,
           the last rows are shorter: each group is averaged by itself, which keeps the mean, and further rounds do the rest.
Reference: Ryabinin, Gorbunov, Plokhotnyuk and Pekhimenko, "Moshpit SGD: communication-efficient decentralized training on
           heterogeneous unreliable devices", NeurIPS 2021, arXiv:2103.03239.
Departs:   coordinates stay what they are, so groups come again every d rounds, and nobody has to look for them. The paper's are
           new after each round (the number of the part that a member has added up), and are matched by a distributed hash table,
           for peers that do not know each other.
"""

from __future__ import annotations


def num_axes(side: int, world_size: int) -> int:
    """d, at least 1."""
    axes = 1
    while side**axes < world_size:
        axes += 1
    return axes


def group_of(rank: int, axis: int, side: int, world_size: int) -> list[int]:
    """All that differ from `rank` in this coordinate alone, and `rank` itself, in the order of ranks."""
    stride = side**axis
    first = rank - rank // stride % side * stride
    return [other for other in range(first, first + side * stride, stride) if other < world_size]


def rounds_on(axis: int, axes: int, rounds: int) -> int:
    """How many of the first `rounds` rounds were on that axis."""
    return (rounds - axis + axes - 1) // axes
