"""Which life of a rank is meant: a worker or server that dies may come back under the same rank.

A life is named by the generation in which it joined, 0 for those that were there from the beginning. All nodes know it by the
same number, though they may hear of its end at different times: so "rank 3 has left" ends what was agreed with the life that
this node knows, and not what another node has agreed with the next one meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Lives:
    """What one node knows of the lives of others. `known`: of those that are here when it begins, if they joined later than 0."""

    def __init__(self, known: Mapping[int, int]) -> None:
        self._current = dict(known)
        self._gone: set[int] = set()

    def end(self, ranks: Iterable[int]) -> None:
        self._gone.update(ranks)

    def begin(self, ranks: Iterable[int], generation: int) -> None:
        for rank in ranks:
            self._current[rank] = generation
            self._gone.discard(rank)

    def current(self, rank: int) -> int:
        """The last life of a rank that was heard of."""
        return self._current.get(rank, 0)

    def is_here(self, rank: int) -> bool:
        return rank not in self._gone

    def has_ended(self, rank: int, life: int) -> bool:
        """Nothing comes from that life any more."""
        return rank in self._gone or life < self.current(rank)

    def is_current(self, rank: int, life: int) -> bool:
        """Whether that life of a rank is the one that is here."""
        return rank not in self._gone and life == self.current(rank)
