"""Two moments that random histories do not meet (1,500 of them did not): written down event by event, with each protocol as it is
and broken in the one place that counts then."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from aggregate.parameter_server.history import PLACES, Counts
from stretto.aggregate.parameter_server.chains import Chains, Holding
from stretto.aggregate.parameter_server.client import ClientMachine, Enter, Push
from stretto.aggregate.parameter_server.hash_ring import HashRing
from stretto.aggregate.parameter_server.layout import RangeLayout, ServedParameter
from stretto.aggregate.parameter_server.messages import PushTaken
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.sync.asynchronous import Asynchronous
from stretto.testing.faults import Kill
from stretto.testing.network_model import Link, NetworkModel, NodeName
from stretto.testing.virtual_network import VirtualNetwork

QUICK_S, SLOW_S = 1e-3, 1.0
DETECT_S = 0.02  # a death is known after this to twice as long: far less than a message takes on a slow link
WORKER = 0


class Stage:
    """Servers and a worker in virtual time, where messages take as long as the schedule wants. `slow`: from whom to whom."""

    def __init__(self, servers: list[int], num_ranges: int, replicas: int, slow: list[tuple[int, int]]) -> None:
        self.layout = RangeLayout([ServedParameter(f"p{i}", PLACES) for i in range(num_ranges)], 4 * PLACES)
        links: dict[tuple[NodeName, NodeName], Link] = {pair: Link(latency_s=SLOW_S) for pair in slow}
        self.network = VirtualNetwork(
            seed=1, model=NetworkModel(Link(latency_s=QUICK_S), links, detect_s=DETECT_S), reliable=True
        )
        self.servers, self.replicas, self.lives = servers, replicas, dict[int, int]()
        self.machines: dict[int, ServerMachine] = {}
        for rank in servers:
            self.add(rank)
        self.client = ClientMachine(WORKER, self.layout, servers=servers, replicas=replicas, life=0, lives=self.lives)
        self.network.add(WORKER, self.client)
        self.run(0.1)
        entered = self.network.request(WORKER, Enter())
        self.run(0.1)
        assert entered.result() == 0

    def add(self, rank: int) -> None:
        """For the first time, or again."""
        is_late = self.network.num_events > 0
        if is_late:
            self.lives[rank] = self.network.generation + 1
        self.machines[rank] = ServerMachine(
            rank,
            self.layout,
            servers=self.servers,
            workers=[WORKER],
            sync=Asynchronous(),
            make_values=lambda index, values: Counts(False),
            replicas=self.replicas,
            filled=True,
            life=self.lives.get(rank, 0),
            lives=self.lives,
            others=[other for other in self.machines if other != rank and self.network.is_alive(other)] if is_late else [],
        )
        self.network.add(rank, self.machines[rank])

    def kill(self, rank: int) -> None:
        self.network._inject(Kill(rank, at_s=self.network.now))
        assert not self.network.is_alive(rank)

    def push(self, index: int) -> Future[PushTaken]:
        """The worker's only one."""
        gradient = np.zeros(PLACES, np.float32)
        gradient[0] = 1
        return self.network.request(WORKER, Push(index, 0, gradient.tobytes(), {"lr": 0.1}, 0))

    def counted(self, rank: int, index: int) -> int:
        """How often that push is in what a server has."""
        values: Any = self.machines[rank].chains.holdings[index].replica.values
        return int(values.counts[0])

    def heads(self, index: int) -> list[int]:
        return [rank for rank, each in self.machines.items() if self.network.is_alive(rank) and index in each.served()]

    def run(self, for_s: float) -> None:
        """Of the servers that live at most one serves a range, after every event."""

        def is_served_twice() -> bool:
            return any(len(self.heads(index)) > 1 for index in range(len(self.layout)))

        assert not self.network.run_until(is_served_twice, self.network.now + for_s), "a range is served by two servers"

    def until(self, condition: Callable[[], bool]) -> None:
        assert self.network.run_until(condition, self.network.now + 10 * SLOW_S), "the schedule has taken another course"

    def chain(self, rank: int, index: int) -> tuple[list[int], bool]:
        """As a server knows it, and whether it is active."""
        holding = self.machines[rank].chains.holdings.get(index)
        return ([], False) if holding is None else (holding.members, holding.active)


def comes_back_while_it_is_told_of_a_chain() -> None:
    """The chain [a, b, c] has lost c. While word of [a, b, d] is on its way to b, d dies and comes back, with nothing, and c too.
    The d that is meant has ended, so b must not hand the range to the one that is there now: a, which knows, goes on with c
    instead, and would never tell d that it has no part in the chain. Then there is a push, and a and b die."""
    ranks = [100, 101, 102, 103]
    ring = HashRing(ranks)
    layout = RangeLayout([ServedParameter("p0", PLACES)], 4 * PLACES)
    a, b, c, d = ring.chain(0, ring.place(layout.ranges)[0], 4)
    stage = Stage(ranks, num_ranges=1, replicas=2, slow=[(a, b)])
    stage.kill(c)
    stage.until(lambda: stage.chain(a, 0) == ([a, b, d], False))
    assert stage.chain(b, 0)[0] == [a, b], "b has not heard of it"
    stage.kill(d)
    stage.add(d)
    stage.add(c)
    stage.until(lambda: stage.chain(a, 0) == ([a, b, c], True))
    push = stage.push(0)
    stage.until(push.done)
    stage.kill(a)
    stage.kill(b)
    stage.run(3.0)
    assert stage.heads(0) == [c] and push.result().applied and stage.counted(c, 0) == 1


def dies_before_a_server_has_heard_that_it_is_to_drop_a_range() -> None:
    """Without copies. A range is about to move from a to b and then, as another server has joined, to c: its chain is [a, b, c]
    when a dies. So b serves it, alone, and tells c to drop it. The worker pushes. Before c has heard of that, b dies too, and c,
    which has all that was acknowledged until then, serves the range: what b had acknowledged meanwhile would be gone."""
    a, b, c = 100, 101, 102
    num_ranges = 6
    layout = RangeLayout([ServedParameter(f"p{i}", PLACES) for i in range(num_ranges)], 4 * PLACES)
    to_b, to_c = HashRing([a, b]).place(layout.ranges), HashRing([a, b, c]).place(layout.ranges)
    index = next(i for i in range(num_ranges) if (to_b[i], to_c[i]) == (b, c))
    stage = Stage([a], num_ranges, replicas=0, slow=[(a, b), (b, c)])
    stage.add(b)
    stage.until(lambda: stage.chain(a, index) == ([a, b], False))
    stage.add(c)
    stage.until(lambda: stage.client.routes[index].members == [a, b, c])
    stage.kill(a)
    stage.until(lambda: stage.client.routes[index].members == [b, c] and stage.heads(index) == [b])
    push = stage.push(index)
    stage.run(5 * QUICK_S)
    assert stage.counted(b, index) == 1 and index in stage.machines[c].chains.holdings, "c has not heard that it is to drop it"
    stage.kill(b)
    stage.run(3.0)
    assert stage.heads(index) == [c] and push.result().applied
    assert stage.counted(c, index) == 1, "an update that was acknowledged is lost"


def ignores_lives(self: Chains, rank: int, life: int) -> bool:
    """Whoever is here now is taken for the one that was meant."""
    return rank != self.rank and not self._terms.lives.is_here(rank)


def answers_too_early(self: Chains, holding: Holding) -> None:
    """All members have it, and those that are to drop the range may not know of the chain yet."""
    if holding.head is not None:
        holding.head.stored = holding.tail_sequence
        holding.head.release()


SCHEDULES = [
    (comes_back_while_it_is_told_of_a_chain, "_has_ended", ignores_lives),
    (dies_before_a_server_has_heard_that_it_is_to_drop_a_range, "_release", answers_too_early),
]


@pytest.mark.parametrize("schedule", [schedule for schedule, _, _ in SCHEDULES], ids=lambda each: each.__name__)
def test_the_protocol_keeps_its_promises(schedule: Callable[[], None]) -> None:
    schedule()


@pytest.mark.parametrize(("schedule", "name", "broken"), SCHEDULES, ids=lambda each: getattr(each, "__name__", each))
def test_a_protocol_that_is_broken_there_is_found_out(
    schedule: Callable[[], None], name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chains, name, broken)
    with pytest.raises(AssertionError, match="served by two servers|acknowledged is lost"):
        schedule()
