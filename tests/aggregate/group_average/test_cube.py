"""The cube on whose corners workers sit: groups, partners, and the tree along which news go."""

from __future__ import annotations

from collections import Counter

import pytest

from stretto.aggregate.group_average.cube import Cube, allowed_sizes, num_bits

WORLDS = [*range(2, 20), 31, 32, 33, 63, 64, 65]


@pytest.mark.parametrize("world", WORLDS)
def test_everybody_is_told_once_whoever_begins_and_whoever_is_gone(world: int) -> None:
    cube = Cube(world)
    for first in {0, 1, world // 2, world - 1}:
        for gone in (set(), {(first + 1) % world}, set(range(0, world, 3)) - {first}):
            living = set(range(world)) - gone
            told: Counter[int] = Counter()
            branches = [(first, 0)]
            while branches:
                rank, above = branches.pop()
                told[rank] += 1
                branches += cube.told_by(rank, above, cube.dimensions, living)
            assert told == Counter(living)


@pytest.mark.parametrize("world", WORLDS)
def test_groups_divide_the_workers_and_nobody_is_asked_by_many(world: int) -> None:
    cube, everybody = Cube(world), set(range(world))
    for size in allowed_sizes(world):
        for number in range(cube.dimensions):
            bits = cube.bits_of_round(number, size)
            groups = {
                rank: frozenset({rank, *(r for k in range(len(bits)) for r in cube.side(rank, bits, k))}) for rank in everybody
            }
            for group in groups.values():
                assert len(group) <= size and {groups[rank] for rank in group} == {group}
            for rank in everybody:
                asked = sum(len(cube.takers(rank, bits, stage, everybody)) for stage in range(len(bits)))
                assert asked <= (len(bits) if world & (world - 1) == 0 else 2 * len(bits) - 1)


@pytest.mark.parametrize(("world", "size"), [(8, 2), (8, 4), (64, 8), (32, 4), (12, 4), (33, 8)])
def test_after_so_many_rounds_everybody_has_something_of_everybody(world: int, size: int) -> None:
    cube = Cube(world)
    known = {rank: {rank} for rank in range(world)}
    rounds = -(-cube.dimensions // num_bits(size)) * (1 if world & (world - 1) == 0 else 2)
    for number in range(rounds):
        bits = cube.bits_of_round(number, size)
        mates = {rank: {rank, *(r for k in range(len(bits)) for r in cube.side(rank, bits, k))} for rank in range(world)}
        known = {rank: set().union(*(known[mate] for mate in mates[rank])) for rank in range(world)}
    assert all(seen == set(range(world)) for seen in known.values())
