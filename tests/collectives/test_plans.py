"""Every plan of the catalogue, proved for 1 to 64 ranks, and the facts its docstring states.

Up to 17 ranks every size is proved always, and of the others those around powers of two and multiples; the rest is slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import pytest

from stretto.collectives.binomial import depth
from stretto.collectives.catalogue import CATALOGUE, Entry, find, names, plan
from stretto.collectives.double_binary_tree import parents
from stretto.collectives.hierarchical import hierarchical
from stretto.collectives.plan import Kind, PlanMaker, Recv, Send
from stretto.collectives.ring import ring
from stretto.collectives.round_robin import round_robin
from stretto.collectives.torus import nearly_square, torus
from stretto.errors import ConfigurationError
from stretto.plan.costs import count
from stretto.testing.verify import verify

ENTRIES = list(CATALOGUE.values())
SIZES = [*range(1, 13), 15, 16, 17, 31, 33, 48, 64]
GROUPS = (1, 2, 3, 4, 5, 8, 100)


def label(entry: Entry) -> str:
    return f"{entry.kind.value}-{entry.name}"


def makers(entry: Entry, size: int, *, few: bool = False) -> Iterator[PlanMaker]:
    """All forms of an entry: the roots of rooted plans, the group sizes of hierarchical ones."""
    if entry.with_root is not None:
        roots = {0, size // 2, size - 1} if few or size > 8 else set(range(size))
        yield from (entry.bind(root=root) for root in roots)
    elif entry.with_group is not None:
        yield from (entry.bind(group=group) for group in ((3, 8) if few else GROUPS))
    else:
        yield entry.bind()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("entry", ENTRIES, ids=label)
def test_every_plan_is_proved_at_the_usual_and_the_awkward_sizes(entry: Entry, size: int) -> None:
    for maker in makers(entry, size, few=size > 17):
        verify(maker, size)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=label)
def test_every_plan_is_proved_at_all_other_sizes_up_to_64(entry: Entry) -> None:
    for size in sorted(set(range(64)) - {0, *SIZES}):
        for maker in makers(entry, size, few=True):
            verify(maker, size)


@pytest.mark.parametrize("entry", ENTRIES, ids=label)
def test_a_job_of_one_sends_nothing(entry: Entry) -> None:
    assert entry.bind(group=4)(0, 1).operations == ()


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 12])
@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.symmetric], ids=label)
def test_plans_called_symmetric_load_all_ranks_alike(entry: Entry, size: int) -> None:
    assert count(entry.bind(), size) == count(entry.bind(), size, symmetric=True)


@pytest.mark.parametrize("entry", ENTRIES, ids=label)
def test_exactly_the_plans_called_least_volume_move_no_more_than_they_must(entry: Entry) -> None:
    def least(size: int) -> Fraction:
        one_way = Fraction(size - 1, size)
        by_kind = {Kind.ALL_REDUCE: 2 * one_way, Kind.BROADCAST: Fraction(1), Kind.REDUCE: Fraction(1)}
        return Fraction(0) if entry.kind is Kind.BARRIER else by_kind.get(entry.kind, one_way)

    def moves_least(size: int) -> bool:
        counted = count(entry.bind(group=4), size)
        return max(counted.sent, counted.received) <= least(size)

    assert all(moves_least(size) for size in range(2, 14)) == entry.least_volume


def test_every_step_of_round_robin_is_a_permutation() -> None:
    size = 7
    plans = [round_robin(rank, size) for rank in range(size)]
    for step in range(size - 1):
        targets = [o.peer for p in plans for o in p.operations if isinstance(o, Send) and o.step == step]
        assert sorted(targets) == list(range(size))


def test_round_robin_and_all_to_all_add_in_rank_order_on_every_rank() -> None:
    for algorithm in ("round_robin", "all_to_all"):
        for rank in range(5):
            operations = plan(Kind.ALL_REDUCE, algorithm, rank, 5).operations
            sources = [operation.peer for operation in operations if isinstance(operation, Recv)]
            assert sources == [source for source in range(5) if source != rank]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 16, 33, 64])
def test_a_rank_with_children_in_one_of_the_two_trees_is_a_leaf_of_the_other(size: int) -> None:
    inner = [{parent for parent in parents(size, tree) if parent is not None} for tree in (0, 1)]
    assert inner[0].isdisjoint(inner[1]) or size % 2 == 1
    assert all(rank % 2 == 0 for rank in inner[0])
    for tree in (0, 1):
        children = Counter(parent for parent in parents(size, tree) if parent is not None)
        assert max(children.values()) <= 2
        assert list(parents(size, tree)).count(None) == 1


@pytest.mark.parametrize("size", range(2, 65))
def test_the_double_tree_needs_at_most_four_rounds_per_level_and_two_vectors(size: int) -> None:
    counted = count(find(Kind.ALL_REDUCE, "double_binary_tree").bind(), size)
    assert counted.num_rounds <= 4 * depth(size)
    assert max(counted.sent, counted.received) <= 2


def test_a_torus_of_a_prime_number_of_ranks_is_a_ring() -> None:
    assert nearly_square(7) == (7, 1)
    counted, plain = count(torus, 7), count(ring, 7)
    assert (counted.rounds, counted.totals) == (plain.rounds, plain.totals)


def test_a_torus_is_as_square_as_can_be() -> None:
    assert [nearly_square(size) for size in (1, 4, 6, 12, 48)] == [(1, 1), (2, 2), (3, 2), (4, 3), (8, 6)]


def test_hierarchical_sends_only_a_share_of_the_vector_between_hosts() -> None:
    size, group = 12, 4
    for rank in range(size):
        made = hierarchical(group)(rank, size)
        between = [o for o in made.operations if isinstance(o, Send) and o.peer // group != rank // group]
        chunks = sum(operation.hi - operation.lo for operation in between)
        assert Fraction(chunks, made.num_chunks) == Fraction(2, group) * Fraction(2, 3)  # 2 (m/k) (G-1)/G


def test_only_leaders_speak_between_hosts_when_groups_are_uneven() -> None:
    for rank in range(7):
        operations = hierarchical(3)(rank, 7).operations
        abroad = [o for o in operations if isinstance(o, Send) and o.peer // 3 != rank // 3]
        assert bool(abroad) == (rank % 3 == 0)


def test_halving_doubling_cuts_as_many_chunks_as_its_core_has_ranks() -> None:
    assert [plan(Kind.ALL_REDUCE, "halving_doubling", 0, size).num_chunks for size in (1, 2, 3, 7, 8)] == [
        1,
        2,
        2,
        4,
        8,
    ]


# ---------------------------------------------------------------- the catalogue


def test_aliases_lead_to_the_same_plan() -> None:
    for entry in ENTRIES:
        for alias in entry.aliases:
            assert find(entry.kind, alias) is entry
    assert plan(Kind.ALL_REDUCE, "chunked_butterfly", 1, 4).algorithm == "direct"


def test_no_name_or_alias_of_a_kind_is_given_twice() -> None:
    known = Counter((entry.kind, name) for entry in ENTRIES for name in (entry.name, *entry.aliases))
    assert max(known.values()) == 1


def test_a_plan_carries_the_name_and_kind_of_its_entry() -> None:
    for entry in ENTRIES:
        made = plan(entry.kind, entry.name, 2, 3)
        assert (made.kind, made.algorithm, made.rank, made.size) == (entry.kind, entry.name, 2, 3)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        CATALOGUE[Kind.ALL_REDUCE, "mine"] = ENTRIES[0]  # type: ignore[index]


def test_asking_twice_gives_the_very_same_plan() -> None:
    assert plan(Kind.ALL_REDUCE, "ring", 0, 5) is plan(Kind.ALL_REDUCE, "ring", 0, 5)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="bogus") as caught:
        plan(Kind.ALL_REDUCE, "bogus", 0, 2)
    assert all(name in str(caught.value) for name in names(Kind.ALL_REDUCE))


def test_a_name_of_another_kind_is_an_error_that_says_whose_it_is() -> None:
    with pytest.raises(ConfigurationError, match="all_reduce"):
        plan(Kind.BROADCAST, "halving_doubling", 0, 2)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_world_is_an_error(rank: int, size: int) -> None:
    with pytest.raises(ConfigurationError, match="ranks are 0 to size-1"):
        plan(Kind.ALL_REDUCE, "ring", rank, size)


def test_a_root_outside_the_world_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="root=3 among 3 ranks"):
        plan(Kind.BROADCAST, "binomial", 0, 3, root=3)


def test_a_root_where_none_has_a_meaning_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="a root would have no meaning"):
        plan(Kind.ALL_REDUCE, "ring", 0, 3, root=1)


def test_a_group_of_nobody_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="group=0"):
        plan(Kind.ALL_REDUCE, "hierarchical", 0, 3, group=0)
