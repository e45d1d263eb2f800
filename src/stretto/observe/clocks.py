"""How far this worker's clock is from rank 0's, bounded by barriers.

Nobody leaves a barrier before everybody has entered it. With b = own clock at entry and a = own clock at exit, for every barrier

    b_r - a_0  <=  clock_r - clock_0  <=  a_r - b_0

whatever the network does in between. The best bounds over several barriers enclose the offset; the middle is the estimate, half
the width its uncertainty (about one trip through the barrier). If 0 is possible it is taken: workers of a machine share a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

ROUNDS = 8
Moments = list[tuple[int, int]]  # (entry, exit) of each barrier, in nanoseconds of one worker's clock


def clock_offset(
    rank: int, barrier: Callable[[], None], gather: Callable[[Any], list[Any]], now: Callable[[], int]
) -> tuple[int, int]:
    """(offset, uncertainty) of this clock against rank 0's, in nanoseconds. All ranks call it together."""
    mine: Moments = []
    for _ in range(ROUNDS):
        entry = now()
        barrier()
        mine.append((entry, now()))
    everybody = gather(mine)
    return enclose(everybody[rank], everybody[0])


def enclose(mine: Sequence[Sequence[int]], rank_0: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The offset that both workers' moments allow, and by how much it may be wrong."""
    pairs = list(zip(mine, rank_0, strict=True))
    low = max(entry - exit_0 for (entry, _), (_, exit_0) in pairs)
    high = min(exit_ - entry_0 for (_, exit_), (entry_0, _) in pairs)
    return middle_of(low, high)


def middle_of(low: int, high: int) -> tuple[int, int]:
    """The offset between these bounds, and by how much it may be wrong."""
    middle = 0 if low <= 0 <= high else (low + high) // 2
    return middle, (high - low + 1) // 2
