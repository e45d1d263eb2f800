"""Sets of moments as lists of intervals (begin, end), sorted and disjoint. All functions are pure; times have any one unit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
Intervals = list[Interval]


def union(spans: Iterable[Interval]) -> Intervals:
    """All moments that at least one of them has; intervals that touch become one."""
    made: Intervals = []
    for begin, end in sorted(spans):
        if made and begin <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        elif end > begin:
            made.append((begin, end))
    return made


def difference(left: Sequence[Interval], right: Sequence[Interval]) -> Intervals:
    """The moments of `left` that `right` has not; both sorted and disjoint."""
    made: Intervals = []
    first = 0
    for begin, end in left:
        while first < len(right) and right[first][1] <= begin:
            first += 1
        at = first
        while at < len(right) and right[at][0] < end:
            if right[at][0] > begin:
                made.append((begin, right[at][0]))
            begin = max(begin, right[at][1])
            at += 1
        if begin < end:
            made.append((begin, end))
    return made


def covered(intervals: Sequence[Interval], begin: float, end: float) -> float:
    """How much of [begin, end] they take."""
    total = 0.0
    at = max(0, bisect_right(intervals, begin, key=lambda interval: interval[0]) - 1)
    while at < len(intervals) and intervals[at][0] < end:
        total += max(0.0, min(end, intervals[at][1]) - max(begin, intervals[at][0]))
        at += 1
    return total
