"""Which server has which range: evenly, the same for everybody, and with few moves when servers come and go."""

from __future__ import annotations

from collections import Counter

import pytest

from stretto.aggregate.parameter_server.hash_ring import HashRing
from stretto.aggregate.parameter_server.layout import RangeLayout, ServedParameter

MIB = 1 << 20


def resnet50() -> list[ServedParameter]:
    """Its convolutions and normalisations, and the classifier: 25.6 million elements in 161 parameters."""
    sizes = [64 * 3 * 49, 64, 64]
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for numel, out in ((width_in * width, width), (width * width * 9, width), (width * width * 4, width * 4)):
                sizes += [numel, out, out]
            if block == 0:
                sizes += [width_in * width * 4, width * 4, width * 4]
            width_in = width * 4
    sizes += [2048 * 1000, 1000]
    return [ServedParameter(f"p{number}", numel) for number, numel in enumerate(sizes)]


def gpt(layers: int, width: int, vocabulary: int) -> list[ServedParameter]:
    sizes = [vocabulary * width, 1024 * width]
    for _ in range(layers):
        sizes += [width, width, 3 * width * width, 3 * width, width * width, width, width, width]
        sizes += [4 * width * width, 4 * width, 4 * width * width, width]
    sizes += [width, width]
    groups = ["decay" if numel > 10 * width else "plain" for numel in sizes]
    return [ServedParameter(f"p{n}", numel, group) for n, (numel, group) in enumerate(zip(sizes, groups, strict=True))]


MODELS = {"resnet50": resnet50(), "gpt2": gpt(12, 768, 50257), "small gpt": gpt(4, 256, 256)}


def loads(layout: RangeLayout, placed: dict[int, int]) -> Counter[int]:
    found: Counter[int] = Counter()
    for index, rank in placed.items():
        found[rank] += layout.ranges[index].num_bytes
    return found


@pytest.mark.parametrize("num_servers", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("model", MODELS)
def test_loads_are_even(model: str, num_servers: int) -> None:
    """Where ranges are small enough for it: a model of a few MiB is cut smaller."""
    parameters = MODELS[model]
    num_bytes = 4 * sum(each.numel for each in parameters)
    layout = RangeLayout(parameters, min(MIB, num_bytes // num_servers // 40))
    found = loads(layout, HashRing(range(num_servers)).place(layout.ranges))
    assert len(found) == num_servers and max(found.values()) <= 1.05 * min(found.values())


def test_no_server_has_more_than_its_share_and_one_range() -> None:
    layout = RangeLayout([ServedParameter(f"p{n}", numel) for n, numel in enumerate([1000, 10, 700, 3, 3, 900, 40])], 4 * 1000)
    for num_servers in range(1, 6):
        found = loads(layout, HashRing(range(num_servers)).place(layout.ranges))
        share = sum(found.values()) / num_servers
        assert max(found.values()) <= share + max(each.num_bytes for each in layout.ranges)


def test_everybody_computes_the_same() -> None:
    """Whatever order they know the servers in; and in every process, unlike Python's own hash."""
    layout = RangeLayout(gpt(2, 64, 256), 4096)
    assert HashRing([5, 3, 9]).place(layout.ranges) == HashRing([9, 5, 3, 5]).place(layout.ranges)
    assert [HashRing([0, 1, 2, 3]).preferences(index) for index in range(3)] == [[3, 1, 2, 0], [3, 2, 1, 0], [1, 3, 2, 0]]


def test_a_chain_is_the_owner_and_the_next_servers_on_the_ring() -> None:
    ring = HashRing(range(5))
    for index in range(20):
        others = ring.preferences(index)
        assert sorted(others) == [0, 1, 2, 3, 4]
        others.remove(3)
        assert ring.chain(index, 3, 3) == [3, *others[:2]]
        assert ring.chain(index, 3, 9) == [3, *others]


def test_the_ranges_of_a_server_have_their_copies_on_many_others() -> None:
    ring = HashRing(range(8))
    seconds = Counter(ring.chain(index, 0, 2)[1] for index in range(200))
    assert len(seconds) == 7 and max(seconds.values()) < 100


def test_preferences_among_those_that_stay_do_not_change_when_a_server_comes_or_goes() -> None:
    for index in range(50):
        all_of_them = HashRing(range(6)).preferences(index)
        assert HashRing(set(range(6)) - {4}).preferences(index) == [rank for rank in all_of_them if rank != 4]
