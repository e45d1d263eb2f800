"""Any world size for algorithms that need a power of two.

p is the largest power of two not above P, and e = P - p ranks are too many. Of the first 2e ranks each even one hands
its vector to the odd one after it and sits out; the p that remain are renumbered 0..p-1, run the algorithm, and the e
that sat out are given the result:

    core number of rank r:  (r-1)/2 for odd r < 2e,  none for even r < 2e,  r - e otherwise

Cost:      one round before and one after, of the whole vector: 2 alpha + 2 m beta + m gamma. None when P = p.
Invariant: the result is copied to those who sat out, so they hold the same bits.
Reference: MPICH, allreduce_intra_reduce_scatter_allgather.c (the rule; the code is our own).
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.collectives.plan import Operation, Recv, Send


@dataclass(frozen=True, slots=True)
class Fold:
    """Where one rank stands once the world is folded to a power of two."""

    rank: int
    size: int

    @property
    def core_size(self) -> int:
        return 1 << (self.size.bit_length() - 1)

    @property
    def num_extra(self) -> int:
        return self.size - self.core_size

    @property
    def first_core_step(self) -> int:
        return 1 if self.num_extra else 0

    @property
    def core_rank(self) -> int | None:
        """This rank's number among the p that run the algorithm; None if it sits out."""
        if self.rank >= 2 * self.num_extra:
            return self.rank - self.num_extra
        return self.rank // 2 if self.rank % 2 else None

    def world_rank(self, core_rank: int) -> int:
        return 2 * core_rank + 1 if core_rank < self.num_extra else core_rank + self.num_extra

    def before(self, num_chunks: int) -> list[Operation]:
        if self.rank >= 2 * self.num_extra:
            return []
        if self.rank % 2:
            return [Recv(0, self.rank - 1, 0, num_chunks, add=True)]
        return [Send(0, self.rank + 1, 0, num_chunks)]

    def after(self, num_chunks: int, step: int) -> list[Operation]:
        if self.rank >= 2 * self.num_extra:
            return []
        if self.rank % 2:
            return [Send(step, self.rank - 1, 0, num_chunks)]
        return [Recv(step, self.rank + 1, 0, num_chunks)]
