"""Which send a receive means, over many seeds in virtual time: by source and tag in order; and what ends a receive in vain."""

from __future__ import annotations

import math
from collections import defaultdict
from concurrent.futures import Future
from random import Random
from typing import Any

import pytest

from stretto.errors import PeerLost, WireTimeout
from stretto.protocol.machine import Reply, SetTimer
from stretto.protocol.timers import Timers
from stretto.testing.faults import Kill
from stretto.testing.network_model import ExponentialDelay, Link, NetworkModel
from stretto.testing.virtual_network import VirtualNetwork
from stretto.torch_backend.matching import MOST_WAITING, Announce, PairMatching, Receive, SendAnnouncement

SLOW = [pytest.param(range(begin, begin + 2450), marks=pytest.mark.slow) for begin in range(200, 10_000, 2450)]
UNEVEN = NetworkModel(Link(latency_s=0.01, jitter=ExponentialDelay(0.05)), detect_s=0.3)


def machine() -> PairMatching:
    return PairMatching(lambda rank: PeerLost(rank, "its process died"), lambda rank: False)


def run(seed: int) -> int:
    """Three ranks send to rank 0 with a few tags; it receives in an order of its own, sometimes from anybody."""
    chance = Random(seed)
    network = VirtualNetwork(seed=seed, model=UNEVEN, reliable=True)
    for rank in range(4):
        network.add(rank, machine())
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)  # (source, tag) -> numbers, in order
    steps: list[tuple[int, int]] = []
    for source in (1, 2, 3):
        for number in range(chance.randint(0, 6)):
            tag = chance.randint(0, 2)
            sent[source, tag].append(number)
            steps.append((source, tag))
    numbers = {source: 0 for source in (1, 2, 3)}
    asked: list[tuple[int | None, int, Future[Any]]] = []
    wanted = [(source if chance.random() < 0.6 else None, tag) for source, tag in steps]
    chance.shuffle(wanted)
    for (sender, its_tag), (source_or_any, wanted_tag) in zip(steps, wanted, strict=True):
        network.request(sender, Announce(0, SendAnnouncement(100 + sender, numbers[sender], its_tag)))
        numbers[sender] += 1
        network.run(until_s=network.now + chance.expovariate(50))
        channels = {other: 100 + other for other in ((1, 2, 3) if source_or_any is None else (source_or_any,))}
        asked.append((source_or_any, wanted_tag, network.request(0, Receive(channels, wanted_tag, 100.0))))
        network.run(until_s=network.now + chance.expovariate(50))
    network.run(until_s=network.now + 5)
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for asked_for, tag, answer in asked:
        if answer.done():
            source, number = answer.result()
            assert asked_for in (None, source), f"seed {seed}"
            found[source, tag].append(number)
    for key, matched in found.items():
        assert len(set(matched)) == len(matched) and set(matched) <= set(sent[key]), f"seed {seed}: {key}"
        assert sorted(matched) == sent[key][: len(matched)], f"seed {seed}: {key} was not matched from its beginning"
    return sum(map(len, found.values()))


@pytest.mark.parametrize("seeds", [range(200), *SLOW], ids=str)
def test_every_send_is_received_once_and_in_order_of_its_source_and_tag(seeds: range) -> None:
    assert sum(run(seed) for seed in seeds) > 5 * len(seeds)


def test_any_source_takes_what_came_first() -> None:
    network = VirtualNetwork(seed=0, reliable=True)
    for rank in range(3):
        network.add(rank, machine())
    for source in (2, 1):
        network.request(source, Announce(0, SendAnnouncement(7, 0, 5)))
        network.run(until_s=network.now + 1)
    answers = [network.request(0, Receive({1: 7, 2: 7}, 5, 10.0)) for _ in range(2)]
    network.run(until_s=network.now + 1)
    assert [answer.result() for answer in answers] == [(2, 0), (1, 0)]


def test_a_receive_ends_when_its_source_dies_and_in_time() -> None:
    network = VirtualNetwork(seed=0, model=UNEVEN, reliable=True, faults=[Kill(1, at_s=1.0)])
    for rank in range(3):
        network.add(rank, machine())
    from_dead, from_living, from_anybody = (
        network.request(0, Receive(channels, 0, 20.0)) for channels in ({1: 7}, {2: 7}, {1: 7, 2: 7})
    )
    network.run(until_s=2)
    assert network.fired
    for answer in (from_dead, from_anybody):
        assert isinstance(answer.exception(), PeerLost)
    assert not from_living.done()
    later = network.request(0, Receive({1: 7}, 0, 20.0))
    network.run(until_s=30)
    assert isinstance(from_living.exception(), WireTimeout) and isinstance(later.exception(), PeerLost)


def test_who_left_in_order_ends_a_receive_from_anybody_only_when_nobody_is_left() -> None:
    matching = PairMatching(lambda rank: PeerLost(rank, "it has left"), lambda rank: True)
    assert list(matching.on_request(0.0, 1, Receive({1: 7, 2: 7}, 0, 20.0)))[0].name == "1"  # type: ignore[union-attr]
    assert list(matching.on_view(1.0, [], [1], 0)) == []
    _, reply = matching.on_view(2.0, [], [2], 0)
    assert isinstance(reply.error, PeerLost)  # type: ignore[union-attr]


def test_a_peer_cannot_announce_without_bound_and_ends_only_its_own_channel() -> None:
    matching = machine()
    matching.on_message(0.0, 1, SendAnnouncement(8, 0, 0), memoryview(b""))
    matching.on_request(0.0, 1, Receive({1: 7}, 5, 20.0))
    for number in range(MOST_WAITING - 1):
        assert not matching.on_message(0.0, 1, SendAnnouncement(7, number, 0), memoryview(b""))
    for channel in (7, 7):
        for action in matching.on_message(0.0, 1, SendAnnouncement(channel, MOST_WAITING, 0), memoryview(b"")):
            assert isinstance(action, SetTimer) or (isinstance(action, Reply) and "rank 1" in str(action.error))
    [refused] = matching.on_request(0.0, 2, Receive({1: 7, 2: 7}, 0, 20.0))
    [found] = matching.on_request(0.0, 3, Receive({1: 8}, 0, 20.0))
    assert isinstance(refused, Reply) and "send less ahead" in str(refused.error)
    assert isinstance(found, Reply) and found.value == (1, 0)
    assert not matching.on_message(0.0, 2, SendAnnouncement(7, 0, 0), memoryview(b""))
    [found] = matching.on_request(0.0, 4, Receive({2: 7}, 0, 20.0))
    assert isinstance(found, Reply) and found.value == (2, 0)


def test_a_receive_that_has_ended_leaves_no_timer() -> None:
    matching, timers = machine(), Timers[str]()
    for ticket in range(100):
        actions = [*matching.on_request(0.0, ticket, Receive({1 + ticket % 2: 7}, 0, 600.0))]
        if ticket % 2 == 0:
            actions += matching.on_message(0.0, 1, SendAnnouncement(7, ticket, 0), memoryview(b""))
        for action in actions:
            if isinstance(action, SetTimer):
                timers.set(action.name, action.after_s)
    assert timers.next_at() == 600.0
    for action in matching.on_view(1.0, [], [2], 0):
        if isinstance(action, SetTimer):
            timers.set(action.name, action.after_s)
    assert timers.next_at() == math.inf
