"""The mean over the living, over many seeds: whoever dies in the middle, all that live get the same bits or an error."""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import Future
from random import Random
from typing import Any

import numpy as np
import pytest

from stretto.aggregate.peers import attempt_sum
from stretto.aggregate.peers.meeting import CountMeetings, Meet, MeetingLapsed, MeetingMachine, Met, TakePart
from stretto.aggregate.peers.meeting_messages import Commit, MeetingRefused, Present
from stretto.aggregate.peers.until_quit import PeerSays, QuitPeers, UntilQuit
from stretto.errors import StrettoError
from stretto.protocol.machine import Reply
from stretto.testing.faults import Fault, Kill, Pause
from stretto.testing.network_model import ExponentialDelay, Link, NetworkModel
from stretto.testing.virtual_network import VirtualNetwork

LOSSY = NetworkModel(Link(latency_s=0.01, jitter=ExponentialDelay(0.01), loss=0.05), detect_s=0.2)
SLOW = [pytest.param(range(begin, begin + 1960), marks=pytest.mark.slow) for begin in range(200, 10_000, 1960)]
# A death is found out about as fast as messages travel: what a leader said last reaches some and not others.
FOUND_SOON = NetworkModel(Link(latency_s=0.01, jitter=ExponentialDelay(0.02), loss=0.05), detect_s=0.01)
PATIENCE_S = 100.0


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_sum, "PIECE_BYTES", 32)  # four numbers of eight bytes


def vector_of(rank: int, meeting: int, numel: int) -> Any:
    return np.random.default_rng([rank, meeting]).standard_normal(numel)


class Workers:
    """Each goes from one meeting to the next, after a while, and notes what it got."""

    def __init__(self, network: VirtualNetwork, size: int, meetings: int, numel: int, chance: Random) -> None:
        self.network, self.meetings, self.numel, self.chance = network, meetings, numel, chance
        self.replies: dict[tuple[int, int], Future[Any]] = {}
        for rank in range(size):
            network.add(rank, UntilQuit(MeetingMachine(rank, size), rank, size))
            self.later(rank, 1)

    def later(self, rank: int, meeting: int) -> None:
        self.network.at(self.network.now + self.chance.uniform(0, 0.3), lambda: self.meet(rank, meeting))

    def meet(self, rank: int, meeting: int) -> None:
        if not self.network.is_alive(rank):
            return
        if meeting > self.meetings:
            self.network.request(rank, QuitPeers())
            return
        vector = vector_of(rank, meeting, self.numel)
        reply = self.replies[rank, meeting] = self.network.request(rank, Meet(vector, PATIENCE_S))
        reply.add_done_callback(lambda reply: self.later(rank, meeting + 1))

    def check(self, size: int) -> None:
        """The invariant of the machine."""
        for meeting in range(1, self.meetings + 1):
            results: list[Met] = []
            for rank in range(size):
                reply = self.replies.get((rank, meeting))
                if reply is None or not reply.done():
                    assert not self.network.is_alive(rank), f"rank {rank} waits in meeting {meeting}"
                elif reply.exception() is None:
                    results.append(reply.result(0))
                    assert rank in results[-1].members
            for members, vector in results:
                assert members == results[0].members and np.array_equal(vector, results[0].vector)
                expected = sum(
                    (vector_of(rank, meeting, self.numel) for rank in members[1:]), vector_of(members[0], meeting, self.numel)
                )
                assert np.array_equal(vector, expected / len(members))


def run_meetings(seed: int) -> Counter[str]:
    chance = Random(seed)
    size = chance.choice([1, 2, 3, 4, 7])
    dying = chance.sample(range(size), chance.randint(0, size - 1))
    kills: list[Fault] = [Kill(rank, at_s=chance.uniform(0, 3)) for rank in dying]
    living = [rank for rank in range(size) if rank not in dying]
    pauses = [Pause(chance.choice(living), at_s=chance.uniform(0, 3), for_s=chance.uniform(0.1, 1))]
    model = chance.choice([LOSSY, FOUND_SOON])
    network = VirtualNetwork(seed=seed, model=model, faults=[*kills, *pauses], reliable=True)
    workers = Workers(network, size, meetings=4, numel=chance.choice([0, 1, 5, 100]), chance=chance)
    network.run(until_s=300)
    workers.check(size)
    for (rank, meeting), reply in workers.replies.items():
        assert rank in dying or reply.exception() is None, f"seed {seed}: {reply.exception()} in meeting {meeting}"
    assert all((rank, 4) in workers.replies for rank in living)
    fired = Counter({name.partition("(")[0] for name in network.fired})
    sizes = {len(reply.result(0).members) for reply in workers.replies.values() if reply.done()}
    return fired + Counter(["fewer"] if len(sizes) > 1 else [])


@pytest.mark.parametrize("seeds", [range(200), *SLOW], ids=str)
def test_all_that_live_get_the_same_mean_of_the_same_members(seeds: range) -> None:
    fired: Counter[str] = Counter()
    for seed in seeds:
        fired += run_meetings(seed)
    assert fired.keys() == {"loss", "Kill", "Pause", "fewer"} and min(fired.values()) > len(seeds) / 10, fired


def run_one(seed: int, kills: dict[int, int]) -> tuple[Workers, VirtualNetwork]:
    """One meeting of four; rank -> the number of the event after which it dies."""
    faults = [Kill(rank, at_event=number) for rank, number in kills.items()]
    network = VirtualNetwork(seed=seed, model=FOUND_SOON, faults=faults, reliable=True)
    workers = Workers(network, 4, meetings=1, numel=9, chance=Random(seed))
    network.run(until_s=300)
    workers.check(4)
    return workers, network


def test_whoever_leads_may_die_after_any_event_and_its_successor_too() -> None:
    count, shrunk = 0, 0
    for seed in range(3):
        num_events = run_one(seed, {})[1].num_events
        for number in range(5, num_events, 2):
            kills = {0: number} if number % 4 == 1 else {0: number, 1: number + seed}
            workers, network = run_one(seed, kills)
            count += network.fired.keys() == {"loss", *(str(Kill(rank, at_event=at)) for rank, at in kills.items())}
            shrunk += len(workers.replies[3, 1].result(0).members) < 4
            assert not workers.replies[3, 1].exception()
    assert count > 100 and 30 < shrunk < count


def start(size: int, **options: Any) -> VirtualNetwork:
    network = VirtualNetwork(seed=3, model=LOSSY, reliable=True, **options)
    for rank in range(size):
        network.add(rank, UntilQuit(MeetingMachine(rank, size), rank, size))
    network.run(0.01)
    return network


def meet(network: VirtualNetwork, rank: int, **options: Any) -> Future[Any]:
    vector = options.pop("vector", np.full(9, float(rank)))
    return network.request(rank, Meet(vector, options.pop("patience_s", PATIENCE_S), **options))


@pytest.mark.parametrize(("copy_of", "expected"), [(None, 1.5), (-1, 0.0), (2, 2.0)])
def test_the_mean_or_the_values_of_one(copy_of: int | None, expected: float) -> None:
    network = start(4)
    replies = [meet(network, rank, copy_of=copy_of) for rank in range(4)]
    network.run(5)
    assert all(reply.result(0).vector.tolist() == [expected] * 9 for reply in replies)


def test_values_of_one_that_has_died_are_an_error_for_all_and_the_next_meeting_is_held() -> None:
    network = start(3, faults=[Kill(2, at_s=0.05)])
    network.run(3)
    replies = [meet(network, rank, copy_of=2) for rank in range(2)]
    network.run(6)
    for reply in replies:
        with pytest.raises(StrettoError, match=r"rank 2, whose values were asked for \(copy of 2 of float64\[9\]\), has died"):
            reply.result(0)
        assert not isinstance(reply.exception(), MeetingLapsed)
    replies = [meet(network, rank) for rank in range(2)]
    network.run(9)
    assert all(reply.result(0).members == [0, 1] for reply in replies)
    network.assert_all_fired()


def test_who_comes_for_something_else_is_told_what_the_others_came_for() -> None:
    network = start(3)
    replies = [meet(network, rank, label=" of Net" if rank else " of Other") for rank in range(3)]
    network.run(5)
    for reply in replies:
        with pytest.raises(StrettoError, match=r"rank 0 has come for the .* of Other, and rank 1 for the .* of Net"):
            reply.result(0)


def test_who_does_not_come_is_named_to_all_that_have_waited_and_to_itself() -> None:
    network = start(3)
    replies = [meet(network, rank, patience_s=2.0) for rank in (0, 2)]
    network.run(10)
    late = meet(network, 1)
    network.run(11)
    for reply in (*replies, late):
        with pytest.raises(MeetingLapsed, match=r"has waited for 2 s for the mean of float64\[9\], and rank 1 did not come"):
            reply.result(0)
    replies = [meet(network, rank) for rank in range(3)]
    network.run(15)
    assert all(reply.result(0).members == [0, 1, 2] for reply in replies)


def test_one_that_comes_after_several_meetings_have_lapsed_is_told_of_each_and_held_the_next() -> None:
    network = start(2)
    replies = []
    for number in range(1, 4):
        replies.append(meet(network, 0, patience_s=2.0))
        network.run(3.0 * number)
    for _ in range(3):
        replies.append(meet(network, 1))
        network.run(network.now + 1)
    for reply in replies:
        with pytest.raises(MeetingLapsed, match="rank 1 did not come"):
            reply.result(0)
    replies = [meet(network, rank) for rank in range(2)]
    network.run(network.now + 2)
    assert all(reply.result(0).members == [0, 1] for reply in replies)


def test_messages_of_a_group_call_its_members_by_their_ranks_in_the_job() -> None:
    machine = MeetingMachine(0, 3, names=[1, 3, 5])
    machine.on_request(0.0, 1, Meet(np.zeros(2, np.float32), 2.0))
    refused = next(action for action in machine.on_timer(2.0, "patience") if isinstance(action, Reply))
    assert re.match(r"rank 1 has waited for 2 s for the mean of float32\[2\], and ranks 3, 5 did not come", str(refused.error))


def test_one_that_has_come_back_is_expected_from_the_meeting_on_that_it_names() -> None:
    network = start(3, faults=[Kill(0, at_s=0.05)])
    network.run(2)
    first = [meet(network, rank) for rank in (1, 2)]
    network.run(4)
    assert first[0].result(0).members == [1, 2] and network.request(1, CountMeetings())
    network.add(0, UntilQuit(MeetingMachine(0, 3, life=1), 0, 3))
    network.run(5)
    second = [meet(network, rank) for rank in (1, 2)]  # it has not said that it takes part
    network.run(7)
    assert second[1].result(0).members == [1, 2]
    network.request(0, TakePart(3))
    network.run(8)
    third = [meet(network, rank) for rank in (1, 2)]
    network.run(10)
    assert not third[0].done()
    third.append(meet(network, 0))
    network.run(12)
    assert all(reply.result(0).members == [0, 1, 2] and reply.result(0).vector.tolist() == [1.0] * 9 for reply in third)
    fourth = [meet(network, rank) for rank in (0, 1, 2)]
    network.run(14)
    assert all(reply.result(0).members == [0, 1, 2] for reply in fourth)
    network.assert_all_fired()


def test_one_that_comes_too_late_for_a_meeting_keeps_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    network = start(3, faults=[Kill(2, at_s=0.05)])
    network.run(2)
    network.add(2, UntilQuit(MeetingMachine(2, 3, life=1), 2, 3))
    network.run(3)
    replies = [meet(network, rank) for rank in (0, 1)]
    network.run(5)
    late = meet(network, 2)
    network.run(7)
    assert all(reply.result(0).members == [0, 1] for reply in replies)
    assert late.result(0).members == [2] and late.result(0).vector.tolist() == [2.0] * 9
    assert "rank 2 has come too late for the mean" in caplog.text


def test_what_nobody_can_have_sent_changes_nothing() -> None:
    network = start(2)
    first = meet(network, 0)

    for header in (Commit(1, 5), Commit(9, 1), MeetingRefused(7, "no"), Present(0, "x")):
        network.send(1, 0, PeerSays(header))
    network.run(1)
    assert not first.done()
    second = meet(network, 1)
    network.run(3)
    assert first.result(0).vector.tolist() == second.result(0).vector.tolist() == [0.5] * 9
