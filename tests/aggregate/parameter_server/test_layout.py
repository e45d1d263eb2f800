"""A model as ranges: every element once, in order, within bounds; and the same for all who know the same parameters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.aggregate.parameter_server.layout import RangeLayout, ServedParameter
from stretto.errors import ConfigurationError

SIZES = st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["a", "b"])), max_size=20)


def of_sizes(sizes: list[tuple[int, str]], range_bytes: int) -> tuple[list[ServedParameter], RangeLayout]:
    parameters = [ServedParameter(f"p{number}", numel, group) for number, (numel, group) in enumerate(sizes)]
    return parameters, RangeLayout(parameters, range_bytes)


@given(SIZES, st.integers(4, 100))
def test_each_element_is_in_one_slice_in_the_models_order(sizes: list[tuple[int, str]], range_bytes: int) -> None:
    parameters, layout = of_sizes(sizes, range_bytes)
    elements = [(name, element) for name, numel, *_ in parameters for element in range(numel)]
    assert elements == [(name, i) for each in layout.ranges for name, start, stop in each.slices for i in range(start, stop)]
    assert [each.index for each in layout.ranges] == list(range(len(layout)))


@given(SIZES, st.integers(4, 100))
def test_no_range_is_too_large_empty_or_of_two_groups(sizes: list[tuple[int, str]], range_bytes: int) -> None:
    parameters, layout = of_sizes(sizes, range_bytes)
    group_of = {name: group for name, _, group, *_ in parameters}
    for each in layout.ranges:
        assert 0 < each.num_bytes <= range_bytes
        assert {group_of[name] for name in each.names} == {each.group}


@given(SIZES, st.integers(4, 100))
def test_pieces_of_a_parameter_are_equal_and_small_neighbours_share_a_range(
    sizes: list[tuple[int, str]], range_bytes: int
) -> None:
    parameters, layout = of_sizes(sizes, range_bytes)
    limit = range_bytes // 4
    for name, numel, *_ in parameters:
        pieces = [stop - start for each in layout.ranges for other, start, stop in each.slices if other == name]
        assert len(pieces) == -(-numel // limit) and max(pieces, default=0) - min(pieces, default=0) <= 1
    whole = {name for name, numel, *_ in parameters if numel <= limit}
    for one, other in zip(layout.ranges, layout.ranges[1:], strict=False):
        if one.group == other.group and whole >= {*one.names, *other.names}:
            first = other.slices[0]
            assert one.numel + first.stop - first.start > limit


def test_the_digest_is_that_of_names_sizes_groups_and_cuts() -> None:
    parameters = [ServedParameter("w", 10), ServedParameter("b", 3)]
    others = [
        RangeLayout([ServedParameter("v", 10), ServedParameter("b", 3)]),
        RangeLayout([ServedParameter("w", 11), ServedParameter("b", 3)]),
        RangeLayout([ServedParameter("w", 10, "other"), ServedParameter("b", 3)]),
        RangeLayout(parameters, range_bytes=20),
    ]
    digests = {layout.digest for layout in others}
    assert len(digests) == 4 and RangeLayout(parameters).digest not in digests
    assert RangeLayout(parameters).digest == RangeLayout(list(parameters)).digest < 1 << 63


def test_a_range_that_could_hold_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one value"):
        RangeLayout([], range_bytes=3)
