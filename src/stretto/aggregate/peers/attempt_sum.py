"""One attempt to add up the vectors of the members of a meeting: what one member has of it.

Each member adds up one range of the vector, in the order of ranks, a piece at a time: when all have sent theirs. What it has
added up goes to all. With `copy_of` there is one contributor, and ranges are only handed on.

Memory: the vector, the result, and at most a range from each contributor: up to three times the vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

PIECE_BYTES: Final = 1 << 20
Vector = NDArray[Any]


class AttemptSum:
    """What a member has of one attempt: values that it is to add up, and the result."""

    def __init__(self, vector: Vector, members: Sequence[int], rank: int, copy_of: int | None) -> None:
        self.vector, self.members, self._rank = vector, list(members), rank
        self.contributors = self.members if copy_of is None else [members[0] if copy_of == -1 else copy_of]
        self._is_mean = copy_of is None
        self._piece = max(1, PIECE_BYTES // vector.itemsize)
        self.result = np.empty_like(vector)
        self.missing = vector.size
        self._parts: dict[int, dict[int, Vector]] = {}  # start -> contributor -> its values
        self._filled: set[int] = set()

    def range_of(self, member: int) -> tuple[int, int]:
        place, number = self.members.index(member), len(self.members)
        return place * self.vector.size // number, (place + 1) * self.vector.size // number

    def pieces_of(self, member: int) -> Iterator[tuple[int, int]]:
        start, stop = self.range_of(member)
        for begin in range(start, stop, self._piece):
            yield begin, min(begin + self._piece, stop)

    def stop_of(self, owner: int, start: int) -> int | None:
        """Where the piece ends that begins there; None: none does."""
        first, stop = self.range_of(owner)
        fits = first <= start < stop and (start - first) % self._piece == 0
        return min(start + self._piece, stop) if fits else None

    def take_part(self, source: int, start: int, values: Vector) -> bool:
        """Whether a piece of this worker's range is complete now."""
        if source in self.contributors and self.stop_of(self._rank, start) == start + values.size:
            self._parts.setdefault(start, {})[source] = values
            return len(self._parts[start]) == len(self.contributors)
        return False

    def add_up(self, start: int) -> Vector:
        parts = self._parts.pop(start)
        total = parts[self.contributors[0]].copy()
        for rank in self.contributors[1:]:
            total += parts[rank]
        if self._is_mean:
            total /= len(self.contributors)
        self.fill(start, total)
        return self.result[start : start + total.size]

    def fill(self, start: int, values: Vector) -> None:
        if start not in self._filled:
            self._filled.add(start)
            self.result[start : start + values.size] = values
            self.missing -= values.size
