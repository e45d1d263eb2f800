"""What has no urgency: servers take turns, and what is under way to all of them together follows the link."""

from __future__ import annotations

import heapq
from collections import Counter
from random import Random

import pytest

from stretto.aggregate.parameter_server.request_order import Lane
from stretto.aggregate.parameter_server.send_window import SLACK_S, SendWindow
from stretto.collectives.urgency import Urgency

RANGE = 100_000
EPOCH = 100


class Pipe:
    """A link that carries one message after the other, each with a latency of its own, and receipts that come at once."""

    def __init__(self, bytes_per_s: float, latency_s: float, late_s: float = 0.0, seed: int = 0) -> None:
        self.window = SendWindow(4 * RANGE, EPOCH)
        self._rate, self._latency_s, self._late_s = bytes_per_s, latency_s, late_s
        self._chance = Random(seed)
        self.now, self._free_at, self._count = 0.0, 0.0, 0
        self.most = 0

    def step(self, num_messages: int) -> float:
        """Send so many at once, as a full backward would, and return the seconds until the last one has come."""
        begin, waiting, coming = self.now, num_messages, list[tuple[float, int]]()
        under_way = 0
        while waiting or coming:
            self.window.now = self.now
            while waiting and self.window.has_room(RANGE):
                waiting, self._count, under_way = waiting - 1, self._count + 1, under_way + RANGE
                self.window.left(self._count, RANGE)
                self._free_at = max(self._free_at, self.now) + RANGE / self._rate
                late_s = self._latency_s + self._late_s * self._chance.random()
                heapq.heappush(coming, (self._free_at + late_s, self._count))
            self.most = max(self.most, under_way)
            self.now, number = max(coming[0][0], self.now), heapq.heappop(coming)[1]
            self.window.now, under_way = self.now, under_way - RANGE
            self.window.came(number)
        return self.now - begin


@pytest.mark.parametrize(("bytes_per_s", "latency_s"), [(25e6, 0.0005), (25e6, 0.1), (125e6, 0.001), (1e9, 0.001), (3e9, 0.02)])
def test_the_window_is_what_the_link_carries_while_it_is_busy_and_never_holds_it_back(
    bytes_per_s: float, latency_s: float
) -> None:
    pipe = Pipe(bytes_per_s, latency_s)
    for _ in range(12):
        seconds = pipe.step(EPOCH)
    assert seconds <= 1.1 * (EPOCH * RANGE / bytes_per_s + latency_s)
    carried = bytes_per_s * (latency_s + RANGE / bytes_per_s + SLACK_S)
    assert pipe.window.size <= 1.01 * carried and pipe.window.size >= min(0.6 * carried, EPOCH * RANGE)


def test_a_fast_link_is_not_held_back_by_processes_that_get_their_turn_late() -> None:
    slow = Pipe(1e9, 0.001, late_s=0.02)
    for _ in range(5):
        seconds = slow.step(EPOCH)
    assert seconds < 1.5 * (EPOCH * RANGE / 1e9 + 0.021)


def test_the_least_may_be_under_way_on_any_link_and_a_large_message_alone() -> None:
    pipe = Pipe(1e5, 0.0)
    for _ in range(3):
        pipe.step(EPOCH)
    assert pipe.window.size == pipe.most == 4 * RANGE
    assert SendWindow(10, 1).has_room(11)


def test_a_link_that_becomes_slow_or_fast_is_followed_within_three_epochs() -> None:
    pipe = Pipe(1e9, 0.001)
    for _ in range(4):
        pipe.step(EPOCH)
    fast = pipe.window.size
    pipe._rate = 25e6
    for _ in range(4):
        pipe.step(EPOCH)
    slow = pipe.window.size
    assert fast > 5e6 and slow < 1.2 * (25e6 * SLACK_S + RANGE)
    pipe._rate = 1e9
    for _ in range(4):
        pipe.step(EPOCH)
    assert pipe.window.size > 0.8 * fast


def test_what_is_dropped_makes_room_and_says_nothing_about_the_link() -> None:
    window = SendWindow(2 * RANGE, EPOCH)
    for number in range(2):
        window.left(number, RANGE)
    assert not window.has_room(1)
    window.now = 1e-6
    window.drop(0)
    window.came(0)  # a late receipt
    assert window.has_room(RANGE) and window.size == 2 * RANGE
    window.now = 10.0
    window.came(1)
    assert window.has_room(2 * RANGE) and window.size == 2 * RANGE


@pytest.mark.parametrize("seed", range(20))
def test_servers_take_turns_by_bytes_within_one_window(seed: int) -> None:
    chance, lane = Random(seed), Lane(10_000, SendWindow(3000, 10_000))
    waiting: Counter[int] = Counter()
    for number in range(300):
        lane.wait((number, 0), number % 3, chance.randrange(100, 1000), None)
        waiting[number % 3] += 1
    sent: Counter[int] = Counter()
    under_way: dict[int, int] = {}
    while any(waiting.values()):
        for turn in lane.leave():
            under_way[turn.number] = turn.num_bytes
            sent[turn.to] += turn.num_bytes
            waiting[turn.to] -= 1
        assert sum(under_way.values()) <= 3000
        assert not all(waiting.values()) or max(sent.values()) - min(sent[to] for to in range(3)) <= 1000
        number = chance.choice(sorted(under_way))
        del under_way[number]
        lane.sent(number)
    assert sum(sent.values()) > 3000


def test_a_server_that_is_sent_nothing_for_long_has_its_turn_and_no_more_than_that() -> None:
    lane = Lane(1000, SendWindow(10, 1000))
    order: list[int] = []

    def let_go(count: int) -> None:
        for _ in range(count):
            (turn,) = lane.leave()
            order.append(turn.to)
            lane.sent(turn.number)

    for number in range(40):
        lane.wait((number, 0), 8, 10, None)
    let_go(20)
    for number in range(40, 60):
        lane.wait((number, 0), 9, 10, None)
    let_go(20)
    assert Counter(order[20:]) == {8: 10, 9: 10}


def test_what_is_urgent_has_its_credit_and_does_not_wait_for_what_is_not() -> None:
    lane = Lane(1000, SendWindow(20, 1000))
    for number in range(4):
        lane.wait((number, 0), 8, 10, None)
    assert len(lane.leave()) == 2
    lane.wait((5, 0), 9, 10, Urgency(3, 10))
    assert [turn.key for turn in lane.leave()] == [(5, 0)]
    lane.lose(8)
    assert lane.leave() == [] and not lane.waits(2)
