"""Workers at the corners of a cube of B = ceil(log2 P) dimensions: who is grouped with whom in which round, and who tells whom.

Two corners are neighbours in dimension b if their numbers differ in bit b alone. A group of S = 2^G workers are those at corners
that differ in G bits and agree on all others; in round t these are

    bits(t) = { (t G + r) mod B,  r = 0 .. G-1 }                 S = 4, P = 8:   {0,1}  {0,2}  {1,2}  {0,1} ...

so that after ceil(B / G) rounds on end everybody has, by way of others, something of everybody. Where P = 2^B and nothing else
happens in between, that something is the exact mean: round t averages over the bits of t, whatever the others were. Rank r is at
corner r then.

A world that is no power of two is a cube with empty corners: nobody is there, as if that worker had died before it began. Groups
then differ in size, by which nothing is lost but that exactness: each is averaged by itself, and so the mean over all is kept.
Empty corners are odd ones only, and bit 0 is the first that is summed over, so that who stands in for an empty corner does so for
one, and not for a whole side of the cube: the first 2^(B-1) ranks are at even corners, the others at odd ones.

Reference: Li et al., "Breaking (global) barriers in parallel stochastic optimization with wait-avoiding group averaging",
           IEEE TPDS 2021, arXiv:2005.00124. The code that was released for it does not wrap bits around, and needs G | B.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import product


def num_bits(world_size: int) -> int:
    """B: dimensions of the smallest cube that has a corner for everybody."""
    return (world_size - 1).bit_length()


def allowed_sizes(world_size: int) -> list[int]:
    """Of groups: powers of two, of which the last holds everybody."""
    return [2**power for power in range(1, num_bits(world_size) + 1)]


class Cube:
    """Who is where. Bits are given in the order in which they are summed over; a stage is a place in it."""

    def __init__(self, world_size: int) -> None:
        self.dimensions = num_bits(world_size)
        even = world_size if world_size == 1 << self.dimensions else 1 << (self.dimensions - 1)
        self._corners = [
            rank if even == world_size else 2 * rank if rank < even else 2 * (rank - even) + 1 for rank in range(world_size)
        ]
        self._ranks = {corner: rank for rank, corner in enumerate(self._corners)}

    def bits_of_round(self, number: int, group_size: int) -> tuple[int, ...]:
        """Over which groups of up to `group_size` are averaged in that round."""
        in_group = min(num_bits(group_size), self.dimensions)
        return tuple(sorted((number * in_group + r) % self.dimensions for r in range(in_group)))

    def all_bits(self) -> tuple[int, ...]:
        return tuple(range(self.dimensions))

    def side(self, rank: int, bits: Sequence[int], stage: int) -> list[int]:
        """Who can give `rank` what it lacks in a stage of a butterfly: its partner, or, if that is gone, somebody else who has
        the same sum by then. From the best to the last resort."""
        partner = self._corners[rank] ^ (1 << bits[stage])
        flips = product(*((0, 1 << bit) for bit in reversed(bits[:stage])))
        return [self._ranks[corner] for flip in flips if (corner := partner ^ sum(flip)) in self._ranks]

    def takers(self, rank: int, bits: Sequence[int], stage: int, living: Container[int]) -> list[int]:
        """Who asks `rank` for its sum in that stage, if all think that those in `living` live."""
        others = (other for other in self.side(rank, bits, stage) if other in living)
        return [other for other in others if next(each for each in self.side(other, bits, stage) if each in living) == rank]

    def told_by(self, rank: int, above: int, below: int, living: Container[int]) -> Iterator[tuple[int, int]]:
        """The branches of a binomial tree: whom `rank` tells in dimensions from `above` to `below` - 1, and from which dimension
        on each of them is to tell others in turn. Whom somebody should tell that is gone, `rank` tells in its place."""
        return self._told_from(self._corners[rank], above, below, living)

    def _told_from(self, corner: int, above: int, below: int, living: Container[int]) -> Iterator[tuple[int, int]]:
        for bit in range(above, below):
            branch = corner ^ (1 << bit)
            rank = self._ranks.get(branch)
            if rank is not None and rank in living:
                yield rank, bit + 1
            else:
                yield from self._told_from(branch, bit + 1, self.dimensions, living)
