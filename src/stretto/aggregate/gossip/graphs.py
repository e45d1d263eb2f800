"""The graphs of the field as values, each for any number of workers that it suits.

P workers, d neighbours. Gaps are those of Metropolis weights, or of equal shares where a graph is directed.

    Ring                  d = 2                        gap about 4 pi^2 / (3 P^2)
    Torus                 d = 4                        gap about 4 pi^2 / (5 P) for a square
    Star                  d = P - 1 for rank 0, else 1 gap 1 / P
    Complete              d = P - 1                    gap 1: the average, in one step
    Exponential           d = 1 + floor(log2(P - 1))   gap about 2 / (1 + log2 P), hardly less for large P
    OnePeerExponential    d = 1 in each step           all equal after log2 P steps if P is a power of two, and only then
    RandomMatching        d = 1 in each step           (P - 2) / (2 (P - 1)) of the squared distance stays in a step, in the mean

References: Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NIPS 2017 (ring); Assran et al.,
            "Stochastic gradient push for distributed deep learning", ICML 2019, and Ying et al., "Exponential graph is provably
            efficient for decentralized deep training", NeurIPS 2021 (both exponential ones); Boyd et al., "Randomized gossip
            algorithms", IEEE Transactions on Information Theory 52(6), 2006 (matchings).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from random import Random
from typing import ClassVar

from stretto.aggregate.gossip.graph import Graph, MixingGraph
from stretto.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Ring(MixingGraph):
    """Each worker's neighbours are the one before and the one after it. Few neighbours, and for many workers a small gap:
    1 - (1/3 + 2/3 cos(2 pi / P)), which is 0.67 for 4 workers, 0.2 for 8 and 0.003 for 64."""

    def targets(self, rank: int, size: int, step: int = 0) -> Sequence[int]:
        return sorted({(rank - 1) % size, (rank + 1) % size} - {rank})


@dataclass(frozen=True, slots=True)
class Torus(MixingGraph):
    """A grid with `rows` of equal length. A worker's neighbours are the four around it, and the two ends of a row or column are
    neighbours too. Without `rows` it is as square as the number of workers allows; for a prime number it is a ring."""

    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and (isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 1):
            raise ConfigurationError(
                f"Torus(rows={self.rows!r}): that is a number of rows of workers, 1 or more.\n"
                f"Write for instance Torus(rows=4), or Torus() for one as square as possible."
            )

    def targets(self, rank: int, size: int, step: int = 0) -> Sequence[int]:
        rows = self.rows_for(size)
        columns = size // rows
        row, column = divmod(rank, columns)
        around = {((row + one) % rows) * columns + column for one in (-1, 1)}
        around |= {row * columns + (column + one) % columns for one in (-1, 1)}
        return sorted(around - {rank})

    def rows_for(self, size: int) -> int:
        if self.rows is not None:
            return self.rows
        return next(rows for rows in range(isqrt(size), 0, -1) if size % rows == 0)

    def fault_for(self, size: int) -> str | None:
        if self.rows is None or size % self.rows == 0:
            return None
        possible = [rows for rows in range(1, size + 1) if size % rows == 0]
        nearest = min(possible, key=lambda rows: abs(rows - (self.rows or 0)))
        return (
            f"{size} workers do not make {self.rows} rows of equal length.\nWrite Torus(rows={nearest}), or Torus() for "
            f"{Torus().rows_for(size)} rows."
        )


@dataclass(frozen=True, slots=True)
class Star(MixingGraph):
    """Rank 0 is the neighbour of all others, and their only one. Its link carries everything: for few workers, or comparisons."""

    def targets(self, rank: int, size: int, step: int = 0) -> Sequence[int]:
        return range(1, size) if rank == 0 else (0,)


@dataclass(frozen=True, slots=True)
class Complete(MixingGraph):
    """All are neighbours, with weights 1 / P: the exact average in one step, at the cost of P - 1 models sent by each worker."""

    def targets(self, rank: int, size: int, step: int = 0) -> Sequence[int]:
        return [other for other in range(size) if other != rank]


@dataclass(frozen=True, slots=True)
class Exponential(MixingGraph):
    """Worker i sends to i + 1, i + 2, i + 4, ... (mod P): few neighbours, and a large gap for any number of workers.
    The edges are one-way; as all workers have equally many, equal shares keep the mean even without push-sum."""

    directed: ClassVar[bool] = True

    def targets(self, rank: int, size: int, step: int = 0) -> Sequence[int]:
        return sorted({(rank + hop) % size for hop in hops(size)} - {rank})


@dataclass(frozen=True, slots=True)
class OnePeerExponential(MixingGraph):
    """In step t worker i sends half of what it has to i + 2^(t mod (1 + floor(log2(P - 1)))) (mod P): one message a step. If P is
    a power of two, log2 P steps of mixing give the exact average; for 6 or 12 workers, say, a spread remains, which further
    periods reduce."""

    directed: ClassVar[bool] = True

    def targets(self, rank: int, size: int, step: int = 0) -> Sequence[int]:
        if size == 1:
            return ()
        every = hops(size)
        return ((rank + every[step % len(every)]) % size,)

    def period(self, size: int) -> int | None:
        return max(1, len(hops(size)))


@dataclass(frozen=True, slots=True)
class RandomMatching(MixingGraph):
    """In every step workers are paired at random, and the two of a pair become their mean; with an odd number of workers one sits
    out. The pairs follow from `seed` and the step alone, so workers need not communicate to know them."""

    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigurationError(
                f"RandomMatching(seed={self.seed!r}): a seed is a whole number. Write RandomMatching(seed=1)."
            )

    def targets(self, rank: int, size: int, step: int = 0) -> Sequence[int]:
        order = self._order(size, step)
        partner = order.index(rank) ^ 1
        return (order[partner],) if partner < size else ()

    def arcs(self, size: int, step: int = 0) -> list[tuple[int, int]]:
        order = self._order(size, step)
        return [(order[place], order[place ^ 1]) for place in range(size) if place ^ 1 < size]

    def period(self, size: int) -> int | None:
        return None

    def spectral_gap(self, size: int) -> float:
        """Exactly, in the mean over matchings: W is a projection, so E|Wx|^2 = x^T E[W] x, of which the second eigenvalue is
        1/2 - 1 / (2 (P - 1)) for an even number of workers and 1/2 for an odd one; its root is what stays of a distance."""
        self.check_size(size)
        if size < 3:
            return 1.0
        stays = 0.5 if size % 2 else (size - 2) / (2 * (size - 1))
        return float(1.0 - stays**0.5)

    def _order(self, size: int, step: int) -> list[int]:
        """Places 0 and 1 are a pair, 2 and 3, and so on."""
        random = Random(f"{self.seed} {step} {size}")  # a text is hashed the same everywhere
        return sorted(range(size), key=lambda _: random.random())


def hops(size: int) -> list[int]:
    """1, 2, 4, ... up to the last one below `size`."""
    return [1 << power for power in range((size - 1).bit_length())]


GRAPHS = (Ring, Torus, Star, Complete, Exponential, OnePeerExponential, RandomMatching, Graph)  # what a text may name
