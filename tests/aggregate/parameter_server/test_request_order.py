"""Pushes and answers leave by urgency, with a window of bytes under way: the lane, the machines, and both in virtual time."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from stretto.aggregate.parameter_server.client import ClientMachine, Enter, Pull, Push, Quit
from stretto.aggregate.parameter_server.layout import RangeLayout, ServedParameter
from stretto.aggregate.parameter_server.messages import (
    NotHead,
    PullValues,
    PushGradient,
    PushReceived,
    RangeChain,
    RangeReport,
    RangesPlaced,
    ValuesPulled,
)
from stretto.aggregate.parameter_server.request_order import Key, Lane
from stretto.aggregate.parameter_server.round_sum import RoundSum
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.collectives.urgency import Urgency
from stretto.protocol.machine import SendMessage
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.sync.synchronous import Synchronous
from stretto.testing.faults import Kill
from stretto.testing.network_model import Link, NetworkModel
from stretto.testing.virtual_network import VirtualNetwork

NUM_RANGES, NUM_BYTES = 8, 40_000
LAYOUT = RangeLayout([ServedParameter(f"p{number}", NUM_BYTES // 4) for number in range(NUM_RANGES)], NUM_BYTES)
ONE = NUM_BYTES  # a credit of one range


class NotedLane(Lane):
    """Knows by range what has left."""

    def __init__(self, patience: int = 100) -> None:
        super().__init__(patience)
        self.numbers: dict[int, int] = {}

    def leaving(self) -> list[int]:
        left = self.leave()
        self.numbers |= {each.key[0]: each.number for each in left}
        return [each.key[0] for each in left]

    def has_come(self, index: int) -> None:
        self.sent(self.numbers[index])


# -- the lane ---------------------------------------------------------------------------------------------------------


def test_the_most_urgent_leaves_first_and_equals_in_the_order_in_which_they_came() -> None:
    lane = NotedLane()
    for index, priority in enumerate([2, 1, 2, 0, 1]):
        lane.wait((index, 0), 9, 10, Urgency(priority, 10))
    order = []
    while left := lane.leaving():
        order += left
        lane.has_come(left[0])
    assert order == [3, 1, 4, 0, 2]


def test_what_comes_later_and_is_urgent_overtakes_what_has_not_left_and_nothing_else() -> None:
    lane = NotedLane()
    for index in range(4):
        lane.wait((index, 0), 9, 10, Urgency(5, 20))
    assert lane.leaving() == [0, 1]
    lane.wait((7, 0), 9, 10, Urgency(0, 20))
    assert lane.leaving() == []  # the window is full
    lane.has_come(0)
    assert lane.leaving() == [7]


def test_each_receiver_has_a_window_of_its_own() -> None:
    lane = NotedLane()
    for index in range(4):
        lane.wait((index, 0), 8 + index % 2, 10, Urgency(index, 10))
    assert sorted(lane.leaving()) == [0, 1]
    lane.has_come(1)
    assert lane.leaving() == [3]
    lane.wait((5, 0), 9, 10, Urgency(0, 10))
    lane.lose(9)
    assert lane.leaving() == [] and not lane.waits(5)
    lane.wait((3, 0), 8, 10, Urgency(0, 10))  # it goes to the other one now, and is more urgent there than range 2
    lane.has_come(3)  # an old receipt makes no room there
    assert lane.leaving() == []
    lane.has_come(0)
    assert lane.leaving() == [3]
    lane.cancel((2, 0))
    lane.has_come(3)
    assert lane.leaving() == []


def test_pushes_of_one_range_keep_their_order_although_the_later_one_is_more_urgent() -> None:
    lane = Lane(100)
    lane.wait((0, 0), 9, 10, Urgency(5, 10))
    lane.wait((0, 1), 9, 10, Urgency(0, 10))
    lane.wait((1, 0), 9, 10, Urgency(3, 10))
    order = []
    while left := lane.leave():
        order += [each.key for each in left]
        lane.sent(left[0].number)
    assert order == [(1, 0), (0, 0), (0, 1)]


def test_urgent_ones_without_end_starve_nobody() -> None:
    lane = Lane(6)
    lane.wait((0, 0), 9, 10, Urgency(9, 10))
    order: list[Key] = []
    for number in range(20):
        lane.wait((1, number), 9, 10, Urgency(0, 10))
        (turn,) = lane.leave()
        order.append(turn.key)
        lane.sent(turn.number)
    assert order.index((0, 0)) == 6


@pytest.mark.parametrize("seed", range(50))
def test_whatever_comes_and_goes_the_window_is_respected_and_everything_leaves(seed: int) -> None:
    chance, patience = Random(seed), 12
    lane, under_way, waiting = Lane(patience), dict[int, tuple[int, int]](), dict[Key, tuple[int, int, int]]()
    came: dict[Key, int] = {}
    num_left: Counter[int] = Counter()

    def take_turns() -> None:
        for turn in lane.leave():
            priority, num_bytes, to = waiting.pop(turn.key)
            others = sum(size for size, other in under_way.values() if other == to)
            assert to == turn.to and (others == 0 or others + num_bytes <= 25)
            overtaken = num_left[to] - came[turn.key]
            assert (
                overtaken <= patience + sum(each[2] == to and came[key] <= came[turn.key] for key, each in waiting.items()) + 200
            )
            assert overtaken >= patience or all(each[0] >= priority for each in waiting.values() if each[2] == to)
            num_left[to] += 1
            under_way[turn.number] = (num_bytes, to)

    for index in range(200):
        if chance.random() < 0.6:
            to, priority, size = chance.choice([8, 9]), chance.randrange(4), chance.randrange(1, 30)
            waiting[index, 0] = (priority, size, to)
            came[index, 0] = num_left[to]
            lane.wait((index, 0), to, size, Urgency(priority, 25))
        elif under_way:
            number = chance.choice(sorted(under_way))
            del under_way[number]
            lane.sent(number)
        take_turns()
    while under_way:
        number = chance.choice(sorted(under_way))
        del under_way[number]
        lane.sent(number)
        take_turns()
    assert not waiting and not any(lane.waits(index) for index in range(200))


# -- the machines -----------------------------------------------------------------------------------------------------


def sent(actions: Any) -> list[tuple[str, int]]:
    return [(type(each.header).__name__, getattr(each.header, "range", -1)) for each in actions if isinstance(each, SendMessage)]


class OneClient:
    """A client machine whose server, 8, is the test."""

    def __init__(self) -> None:
        self.machine = ClientMachine(0, LAYOUT, servers=(8,))
        self.tickets = 0
        self.receipts: dict[int, int] = {}

    def ask(self, request: Any) -> list[tuple[str, int]]:
        self.tickets += 1
        return self._sent(self.machine.on_request(0.0, self.tickets, request))

    def hear(self, header: Any, payload: bytes = b"") -> list[tuple[str, int]]:
        return self._sent(self.machine.on_message(0.0, 8, header, memoryview(payload)))

    def has_come(self, index: int) -> list[tuple[str, int]]:
        return self.hear(PushReceived(self.receipts[index]))

    def _sent(self, actions: Any) -> list[tuple[str, int]]:
        for each in actions:
            if isinstance(each, SendMessage) and isinstance(each.header, PushGradient) and each.header.receipt is not None:
                self.receipts[each.header.range] = each.header.receipt
        return sent(actions)


def push(index: int, priority: int, clock: int = 0, credit: int = ONE) -> Push:
    return Push(index, clock, bytes(NUM_BYTES), {}, 0, urgency=Urgency(priority, credit))


def pull(index: int, priority: int, clock: int = 1, credit: int = ONE) -> Pull:
    return Pull(index, clock, bytearray(NUM_BYTES), urgency=Urgency(priority, credit))


def test_a_pull_leaves_right_after_the_push_of_its_range_and_never_before() -> None:
    """The server would refuse it."""
    client = OneClient()
    assert client.ask(push(0, 1)) == [("PushGradient", 0)]
    assert client.ask(push(1, 2)) == [] and client.ask(pull(1, 0)) == []
    assert client.ask(pull(0, 5)) == [("PullValues", 0)]
    assert client.has_come(0) == [("PushGradient", 1), ("PullValues", 1)]
    assert client.has_come(0) == []  # a second time it makes no room
    assert client.hear(PushReceived(99)) == []  # nonsense


def test_a_pull_leaves_after_all_pushes_of_its_range_when_several_leave_at_once() -> None:
    """Pushes that are not acknowledged yet, as with `SoftSync`, wait together when their range has gone to another server."""
    client = OneClient()
    for clock in range(2):
        client.ask(push(1, 1, clock=clock, credit=8 * ONE))
    client.ask(pull(1, 1, clock=2))
    assert client.hear(NotHead(RangeChain(1, 0, [8]), True, 1)) == []
    again = client.hear(RangesPlaced([RangeChain(1, 1, [8])], [8]))
    assert again == [("PushGradient", 1), ("PushGradient", 1), ("PullValues", 1)]


def test_a_push_without_urgency_does_not_overtake_those_of_its_range_that_wait() -> None:
    """The server would refuse it: its clock is of the future."""
    client = OneClient()
    client.ask(push(0, 1))
    assert client.ask(push(1, 2)) == []
    assert client.ask(Push(1, 1, bytes(NUM_BYTES), {}, 0)) == []
    assert client.ask(Push(2, 0, bytes(NUM_BYTES), {}, 0)) == [("PushGradient", 2)]
    assert client.has_come(0) == []
    assert client.has_come(2) == [("PushGradient", 1), ("PushGradient", 1)]


def test_what_is_sent_again_to_the_next_server_counts_there_and_the_pull_is_asked_for_again() -> None:
    client = OneClient()
    client.ask(push(0, 1))
    client.ask(pull(0, 1))
    assert client.hear(NotHead(RangeChain(0, 0, [8]), True, 1)) == []
    client.hear(PushReceived(client.receipts[0]))
    placed = NotHead(RangeChain(0, 3, [8]), True, 1)
    assert client.hear(placed) == [("PushGradient", 0), ("PullValues", 0)]
    assert client.ask(push(1, 2)) == []
    assert client.has_come(0) == [("PushGradient", 1)]


def test_a_pull_of_a_range_that_is_lost_takes_no_room_from_others() -> None:
    client = OneClient()
    client.machine = ClientMachine(0, LAYOUT, servers=(8,), window_bytes=ONE)
    assert client.ask(Pull(0, 0, bytearray(NUM_BYTES))) == [("PullValues", 0)]
    assert client.ask(Pull(1, 0, bytearray(NUM_BYTES))) == []
    client.hear(NotHead(RangeChain(0, 0, [8]), False, 1))  # it has no copy
    assert client.hear(RangeReport(RangeChain(0, 0, []), False)) == [("PullValues", 1)]


def test_whoever_quits_lets_all_of_its_pushes_leave_first() -> None:
    client = OneClient()
    for index in range(4):
        client.ask(push(index, index))
    assert client.has_come(0) == [("PushGradient", 1)]
    kinds = client.ask(Quit())
    assert kinds[:2] == [("PushGradient", 2), ("PushGradient", 3)] and {kind for kind, _ in kinds[2:]} == {"LeaveRange"}


class OneServer:
    """A server machine, 8, whose two workers are the test."""

    def __init__(self, sync: Any) -> None:
        self.machine = ServerMachine(
            8, LAYOUT, servers=[8], workers=[0, 1], sync=sync, filled=True,
            make_values=lambda index, values: RoundSum(NUM_BYTES // 4),
        )  # fmt: skip
        list(self.machine.on_start(0.0))
        self.tokens: dict[int, int] = {}

    def take(self, actions: Any) -> list[int]:
        """The ranges of which values are sent to worker 0."""
        found = [
            each for each in actions if isinstance(each, SendMessage) and isinstance(each.header, ValuesPulled) and each.to == 0
        ]
        self.tokens |= {each.header.range: each.token for each in found if each.token is not None}
        return [each.header.range for each in found]

    def push(self, worker: int, index: int, clock: int = 0) -> list[int]:
        header = PushGradient(LAYOUT.digest, 0, 1, index, clock, 0, 1.0, {})
        return self.take(self.machine.on_message(0.0, worker, header, memoryview(bytes(NUM_BYTES))))

    def pull(self, index: int, urgency: Urgency | None) -> list[int]:
        header = PullValues(LAYOUT.digest, 0, 1, index, 1, -1, urgency)
        return self.take(self.machine.on_message(0.0, 0, header, memoryview(b"")))

    def has_left(self, index: int) -> list[int]:
        return self.take(self.machine.on_sent(0.0, self.tokens[index]))


def test_an_answer_that_is_complete_late_and_urgent_overtakes_those_that_have_not_left() -> None:
    server = OneServer(Synchronous())
    for index in range(5):
        server.push(0, index)
        assert server.pull(index, Urgency(index, ONE)) == []
    assert [server.push(1, index) for index in (4, 3, 2)] == [[4], [], []]
    assert server.push(1, 0) == []
    assert server.has_left(4) == [0] and server.has_left(0) == [2] and server.push(1, 1) == []
    assert server.has_left(2) == [1] and server.has_left(1) == [3] and server.has_left(3) == []


def test_an_answer_without_urgency_does_not_wait_and_one_to_a_dead_worker_is_dropped() -> None:
    server = OneServer(Synchronous())
    for index in range(3):
        server.push(0, index)
        server.push(1, index)
    assert server.pull(0, Urgency(1, ONE)) == [0]
    assert server.pull(1, Urgency(1, ONE)) == []
    assert server.pull(2, None) == [2]
    assert server.take(server.machine.on_view(0.0, [], [0], 0)) == [] and server.has_left(0) == []
    assert not server.machine._waiting_values


def test_a_receipt_is_given_whatever_becomes_of_a_push() -> None:
    server = OneServer(StaleSynchronous(1)).machine
    for index, layout in ((0, LAYOUT.digest), (99, LAYOUT.digest), (0, 7)):
        header = PushGradient(layout, 0, 1, index, 5, 0, 1.0, {}, receipt=3)
        actions = list(server.on_message(0.0, 0, header, memoryview(bytes(NUM_BYTES))))
        assert [type(each.header).__name__ for each in actions] == ["PushReceived", "RequestRefused"]  # type: ignore[union-attr]


# -- in virtual time --------------------------------------------------------------------------------------------------

SECONDS = 0.1  # that a range takes on a link


def network(sync: Any, workers: int = 1, servers: tuple[int, ...] = (8,), replicas: int = 0, *faults: Kill) -> VirtualNetwork:
    model = NetworkModel(Link(latency_s=0.01, bytes_per_s=NUM_BYTES / SECONDS), detect_s=0.05)
    found = VirtualNetwork(seed=1, model=model, faults=faults, reliable=True)
    for rank in servers:
        server = ServerMachine(
            rank, LAYOUT, servers=servers, workers=range(workers), sync=sync, filled=True, replicas=replicas,
            make_values=lambda index, values: RoundSum(NUM_BYTES // 4),
        )  # fmt: skip
        found.add(rank, server)
    for rank in range(workers):
        found.add(rank, ClientMachine(rank, LAYOUT, servers=servers, replicas=replicas))
        found.request(rank, Enter())
    found.run(1.0)
    return found


def in_order_of_completion(found: VirtualNetwork, requests: list[tuple[float, Any]], at_s: float) -> list[int]:
    order: list[int] = []

    def ask(request: Any) -> None:
        found.request(0, request).add_done_callback(lambda _: order.append(request.range))

    for when, request in requests:
        found.at(at_s + when, lambda request=request: ask(request))  # type: ignore[misc]
    found.run(at_s + 10)
    return order


@pytest.mark.parametrize("make", [push, lambda index, priority: pull(index, priority, clock=0)], ids=["push", "pull"])
def test_what_is_urgent_and_comes_late_overtakes_what_has_not_left(make: Any) -> None:
    def order(priority: int) -> list[int]:
        requests = [(0.0, make(index, 5)) for index in range(1, 8)]
        return in_order_of_completion(network(Asynchronous()), [*requests, (2.5 * SECONDS, make(0, priority))], 1.0)

    urgent = order(0)
    assert urgent.index(0) in (2, 3, 4) and sorted(urgent) == list(range(8))
    assert order(5) == [1, 2, 3, 4, 5, 6, 7, 0]


@pytest.mark.parametrize("killed_at", [1.05, 1.3, 1.55, 1.9])
def test_a_server_that_dies_while_requests_wait_loses_none_of_them(killed_at: float) -> None:
    kill = Kill(8, at_s=killed_at)
    found = network(Synchronous(), 2, (8, 9), 1, kill)
    values = {rank: [np.zeros(NUM_BYTES // 4, np.float32) for _ in range(NUM_RANGES)] for rank in range(2)}
    replies = []
    for rank in range(2):
        for index in reversed(range(NUM_RANGES)):
            gradient = np.full(NUM_BYTES // 4, 1.0 + rank, np.float32)
            replies.append(found.request(rank, Push(index, 0, gradient.tobytes(), {}, 0, urgency=Urgency(index, ONE))))
            replies.append(found.request(rank, Pull(index, 1, values[rank][index], urgency=Urgency(index, ONE))))
    found.run(60.0)
    assert all(reply.done() and reply.exception() is None for reply in replies)
    assert all((each == 3.0).all() for some in values.values() for each in some)
    found.assert_all_fired()


class Watched:
    """How many ranges are under way: pushes from worker 0 that have not come, and answers that have not left their server."""

    def __init__(self, found: VirtualNetwork) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        client, server = (found._nodes[name].machine for name in (0, 8))
        self._watch(client, PushGradient)
        self._watch(server, ValuesPulled)
        hear, has_left = client.on_message, server.on_sent

        def heard(now: float, source: int, header: Any, payload: memoryview) -> Any:
            self.now["PushGradient"] -= isinstance(header, PushReceived)
            return hear(now, source, header, payload)

        def left(now: float, token: int) -> Any:
            self.now["ValuesPulled"] -= 1
            return has_left(now, token)

        client.on_message, server.on_sent = heard, left  # type: ignore[method-assign]

    def _watch(self, machine: Any, kind: type) -> None:
        take = machine._take_actions

        def taken() -> Any:
            actions = take()
            for each in actions:
                if isinstance(each, SendMessage) and isinstance(each.header, kind):
                    self.now[kind.__name__] += 1
                    self.most[kind.__name__] = max(self.most[kind.__name__], self.now[kind.__name__])
            return actions

        machine._take_actions = taken


def test_bytes_under_way_never_exceed_the_window_either_way() -> None:
    found = network(Asynchronous())
    watched = Watched(found)
    requests: list[tuple[float, Any]] = [(0.0, push(index, index, credit=2 * ONE)) for index in range(8)]
    assert len(in_order_of_completion(found, requests, 1.0)) == 8
    requests = [(0.0, pull(index, index, credit=3 * ONE)) for index in range(8)]
    assert len(in_order_of_completion(found, requests, 20.0)) == 8
    assert watched.most == {"PushGradient": 2, "ValuesPulled": 3}
