"""Requests leave by urgency, with a window of bytes under way: the lane by itself, then with servers in virtual time."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from stretto.aggregate.parameter_server.client import ClientMachine, Enter, Pull, Push, Quit
from stretto.aggregate.parameter_server.layout import RangeLayout, ServedParameter
from stretto.aggregate.parameter_server.messages import PullValues, PushGradient, PushReceived, PushTaken
from stretto.aggregate.parameter_server.request_order import Key, RequestLane
from stretto.aggregate.parameter_server.round_sum import RoundSum
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.collectives.urgency import Urgency
from stretto.protocol.machine import SendMessage
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.synchronous import Synchronous
from stretto.testing.faults import Kill
from stretto.testing.network_model import Link, NetworkModel
from stretto.testing.virtual_network import VirtualNetwork

NUM_RANGES, NUM_BYTES = 8, 400
LAYOUT = RangeLayout([ServedParameter(f"p{number}", NUM_BYTES // 4) for number in range(NUM_RANGES)], NUM_BYTES)
ONE = NUM_BYTES  # a credit of one range


def leaving(lane: RequestLane) -> list[int]:
    return [index for (index, _), _ in lane.leave()]


# -- the lane ---------------------------------------------------------------------------------------------------------


def test_the_most_urgent_leaves_first_and_equals_in_the_order_in_which_they_came() -> None:
    lane = RequestLane(patience=100)
    for index, priority in enumerate([2, 1, 2, 0, 1]):
        lane.wait((index, 0), 9, 10, Urgency(priority, 10))
    order = []
    while (left := leaving(lane)) != []:
        order += left
        lane.end((left[0], 0))
    assert order == [3, 1, 4, 0, 2]


def test_what_comes_later_and_is_urgent_overtakes_what_has_not_left_and_nothing_else() -> None:
    lane = RequestLane(patience=100)
    for index in range(4):
        lane.wait((index, 0), 9, 10, Urgency(5, 20))
    assert leaving(lane) == [0, 1]
    lane.wait((7, 0), 9, 10, Urgency(0, 20))
    assert leaving(lane) == []  # the window is full
    lane.end((0, 0))
    assert leaving(lane) == [7]


def test_each_server_has_a_window_of_its_own() -> None:
    lane = RequestLane(patience=100)
    for index in range(4):
        lane.wait((index, 0), 8 + index % 2, 10, Urgency(index, 10))
    assert sorted(leaving(lane)) == [0, 1]
    lane.end((1, 0))
    assert leaving(lane) == [3]
    lane.lose(9)
    assert leaving(lane) == []
    lane.wait((3, 0), 8, 10, Urgency(0, 10))  # it goes to the other one now, and is more urgent there than range 2
    lane.end((0, 0))
    assert leaving(lane) == [3]


def test_pushes_of_one_range_keep_their_order_although_the_later_one_is_more_urgent() -> None:
    lane = RequestLane(patience=100)
    lane.wait((0, 0), 9, 10, Urgency(5, 10))
    lane.wait((0, 1), 9, 10, Urgency(0, 10))
    lane.wait((1, 0), 9, 10, Urgency(3, 10))
    order = []
    while left := lane.leave():
        order += [key for key, _ in left]
        lane.end(left[0][0])
    assert order == [(1, 0), (0, 0), (0, 1)]


def test_urgent_requests_without_end_starve_nobody() -> None:
    lane = RequestLane(patience=6)
    lane.wait((0, 0), 9, 10, Urgency(9, 10))
    order: list[Key] = []
    for number in range(20):
        lane.wait((1, number), 9, 10, Urgency(0, 10))
        ((key, _),) = lane.leave()
        order.append(key)
        lane.end(key)
    assert order.index((0, 0)) == 6


@pytest.mark.parametrize("seed", range(50))
def test_whatever_comes_and_goes_the_window_is_respected_and_everything_leaves(seed: int) -> None:
    chance, patience = Random(seed), 12
    lane, under_way, waiting = RequestLane(patience), dict[Key, tuple[int, int]](), dict[Key, tuple[int, int, int, int]]()
    came: dict[Key, int] = {}
    num_left: Counter[int] = Counter()

    def take_turns() -> None:
        for key, server in lane.leave():
            priority, num_bytes, credit, to = waiting.pop(key)
            others = sum(size for other, size in under_way.values() if other == server)
            assert to == server and (others == 0 or others + num_bytes <= credit)
            older = sum(each[3] == server and came[other] <= came[key] for other, each in waiting.items())
            overtaken = num_left[server] - came[key]
            assert overtaken <= patience + older + len(came)
            more_urgent = [other for other, each in waiting.items() if each[3] == server and each[0] < priority]
            assert not more_urgent or overtaken >= patience
            num_left[server] += 1
            under_way[key] = (server, num_bytes)

    for index in range(200):
        if chance.random() < 0.6:
            server, priority, size = chance.choice([8, 9]), chance.randrange(4), chance.randrange(1, 30)
            waiting[index, 0] = (priority, size, 25, server)
            came[index, 0] = num_left[server]
            lane.wait((index, 0), server, size, Urgency(priority, 25))
        elif under_way:
            key = chance.choice(sorted(under_way))
            del under_way[key]
            lane.end(key)
        take_turns()
    while under_way:
        key = chance.choice(sorted(under_way))
        del under_way[key]
        lane.end(key)
        take_turns()
    assert not waiting and not any(lane.has((index, 0)) for index in range(200))


# -- the machine ------------------------------------------------------------------------------------------------------


class OneClient:
    """A client machine whose server, 8, is the test."""

    def __init__(self) -> None:
        self.machine = ClientMachine(0, LAYOUT, servers=(8,))
        self.tickets = 0

    def ask(self, request: Any) -> list[tuple[str, int]]:
        self.tickets += 1
        return self.sent(self.machine.on_request(0.0, self.tickets, request))

    def hear(self, header: Any, payload: bytes = b"") -> list[tuple[str, int]]:
        return self.sent(self.machine.on_message(0.0, 8, header, memoryview(payload)))

    def sent(self, actions: Any) -> list[tuple[str, int]]:
        return [(type(each.header).__name__, each.header.range) for each in actions if isinstance(each, SendMessage)]


def push(index: int, priority: int, clock: int = 0, credit: int = ONE) -> Push:
    return Push(index, clock, bytes(NUM_BYTES), {}, 0, urgency=Urgency(priority, credit))


def pull(index: int, priority: int, clock: int = 1, credit: int = ONE, after_push: bool = False) -> Pull:
    return Pull(index, clock, bytearray(NUM_BYTES), urgency=Urgency(priority, credit), after_push=after_push)


def test_a_pull_never_leaves_before_the_push_of_its_range() -> None:
    """The server would refuse it."""
    client = OneClient()
    assert client.ask(push(0, 1)) == [("PushGradient", 0)]
    assert client.ask(push(1, 2)) == []
    assert client.ask(pull(1, 0)) == []
    assert client.hear(PushReceived(0, 0, 1)) == [("PushGradient", 1), ("PullValues", 1)]


def test_a_pull_after_its_push_is_asked_for_when_that_is_acknowledged() -> None:
    client = OneClient()
    client.ask(push(0, 1))
    assert client.ask(pull(0, 1, after_push=True)) == []
    assert client.hear(PushReceived(0, 0, 1)) == []
    assert client.hear(PushTaken(0, 0, 1, True)) == [("PullValues", 0)]


def test_a_receipt_of_an_earlier_attempt_makes_no_room() -> None:
    client = OneClient()
    client.ask(push(0, 1))
    assert client.ask(push(1, 2)) == []
    assert client.hear(PushReceived(0, 0, 0)) == []
    assert client.hear(PushReceived(99, 0, 1)) == []  # nonsense
    assert client.hear(PushReceived(0, 0, 1)) == [("PushGradient", 1)]


def test_an_acknowledgement_makes_room_too_and_whoever_quits_lets_all_of_its_pushes_leave_first() -> None:
    client = OneClient()
    for index in range(4):
        client.ask(push(index, index))
    assert client.hear(PushTaken(0, 0, 1, True)) == [("PushGradient", 1)]
    kinds = client.ask(Quit())
    assert kinds[:2] == [("PushGradient", 2), ("PushGradient", 3)] and {kind for kind, _ in kinds[2:]} == {"LeaveRange"}


# -- with servers, in virtual time ------------------------------------------------------------------------------------

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


def in_order_of_completion(found: VirtualNetwork, requests: list[tuple[float, Any]], at_s: float, rank: int = 0) -> list[int]:
    order: list[int] = []

    def ask(request: Any) -> None:
        found.request(rank, request).add_done_callback(lambda _: order.append(request.range))

    for when, request in requests:
        found.at(at_s + when, lambda request=request: ask(request))  # type: ignore[misc]
    found.run(at_s + 10)
    return order


def test_an_urgent_push_that_comes_late_overtakes_what_has_not_left() -> None:
    def order(urgent: Push) -> list[int]:
        pushes = [(0.0, push(index, 5)) for index in range(1, 8)]
        return in_order_of_completion(network(Asynchronous()), [*pushes, (2.5 * SECONDS, urgent)], 1.0)

    assert order(push(0, 0)) in ([1, 2, 0, 3, 4, 5, 6, 7], [1, 2, 3, 0, 4, 5, 6, 7])
    without = Push(0, 0, bytes(NUM_BYTES), {}, 0, urgency=Urgency(5, ONE))
    assert order(without) == [1, 2, 3, 4, 5, 6, 7, 0]


def test_an_urgent_pull_that_comes_late_overtakes_what_has_not_left() -> None:
    def order(priority: int) -> list[int]:
        pulls = [(0.0, pull(index, 5, clock=0)) for index in range(1, 8)]
        return in_order_of_completion(network(Asynchronous()), [*pulls, (2.5 * SECONDS, pull(0, priority, clock=0))], 1.0)

    assert order(0).index(0) in (2, 3) and order(5) == [1, 2, 3, 4, 5, 6, 7, 0]


def test_what_still_waits_for_another_worker_does_not_hold_up_what_is_there() -> None:
    """Worker 1 pushes range 0 late. Without `after_push` its pull would fill the window of worker 0."""

    def order(after_push: bool) -> list[int]:
        found = network(Synchronous(), workers=2)
        for index in range(1, 4):
            found.request(1, push(index, index, credit=4 * ONE))
        found.at(1.0 + 40 * SECONDS, lambda: found.request(1, push(0, 0)))
        steps: list[tuple[float, Any]] = [(0.0, push(index, index, credit=4 * ONE)) for index in range(4)]
        steps += [(0.0, pull(index, index, after_push=after_push)) for index in range(4)]
        found.run(1.0)
        done: list[int] = []
        for _, request in steps:
            future = found.request(0, request)
            if isinstance(request, Pull):
                future.add_done_callback(lambda _, index=request.range: done.append(index))  # type: ignore[misc]
        found.run(1.0 + 100 * SECONDS)
        return done

    assert order(True) == [1, 2, 3, 0]
    assert order(False)[0] == 0


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
            into = values[rank][index]
            replies.append(found.request(rank, Pull(index, 1, into, urgency=Urgency(index, ONE), after_push=True)))
    found.run(60.0)
    assert all(reply.done() and reply.exception() is None for reply in replies)
    assert all((each == 3.0).all() for some in values.values() for each in some)
    found.assert_all_fired()


def test_bytes_under_way_to_a_server_never_exceed_the_window() -> None:
    found, most = network(Asynchronous()), Counter[str]()
    machine: Any = found._nodes[0].machine
    send, hear = machine._send, machine.on_message
    under_way: Counter[str] = Counter()

    def counted(to: int, header: Any, payload: Any = b"") -> None:
        if isinstance(header, (PushGradient, PullValues)):
            under_way[type(header).__name__] += 1
            most[type(header).__name__] = max(most[type(header).__name__], under_way[type(header).__name__])
        send(to, header, payload)

    def heard(now: float, source: int, header: Any, payload: memoryview) -> Any:
        under_way["PushGradient"] -= isinstance(header, PushReceived)
        under_way["PullValues"] -= type(header).__name__ == "ValuesPulled"
        return hear(now, source, header, payload)

    machine._send, machine.on_message = counted, heard
    requests: list[tuple[float, Any]] = [(0.0, push(index, index, credit=2 * ONE)) for index in range(8)]
    requests += [(0.0, pull(index, index, credit=3 * ONE)) for index in range(8)]
    assert len(in_order_of_completion(found, requests, 1.0)) == 16
    assert most == {"PushGradient": 2, "PullValues": 3}
