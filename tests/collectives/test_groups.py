"""Groups: any of them, disjoint or overlapping, each with collectives of its own, and what happens outside is not felt inside."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stretto
from collectives.ranks import PATIENT, integers
from stretto.collectives import calls, execute, failures, whereabouts
from stretto.collectives.endpoint import COUNT_BITS, GROUPS, MEETINGS, Endpoint, _meeting
from stretto.collectives.execute import Communicator
from stretto.collectives.group import Group
from stretto.collectives.plan import Kind, chunk_start
from stretto.collectives.request import Pending, Request
from stretto.collectives.started import Started
from stretto.errors import ConfigurationError, PeerLost, RankMismatch, StrettoError, WireTimeout
from stretto.job import Job
from stretto.launching.detect import Launch
from stretto.launching.peers import Peer
from stretto.testing import run_jobs, run_threads, run_virtual
from stretto.testing.faults import Cut, Kill
from stretto.testing.network_model import Link, NetworkModel
from stretto.testing.threads import ThreadsWire, threads_world
from stretto.testing.virtual import VirtualWire
from stretto.timeouts import Timeouts
from stretto.wire.base import Wire
from stretto.wire.framed import FramedWire
from wire.socket_world import Make, connect_all, peer_of, tcp, wires_of, zeromq

MODEL = NetworkModel(Link(latency_s=1e-4, bytes_per_s=1e8))
DETECTED_S = 1.0  # long after a kill was noticed


class CallerDriven:
    """Stands for the communication thread where the caller drives the communicator, as virtual time needs it."""

    def __init__(self, wire: Wire, timeouts: Timeouts = PATIENT) -> None:
        self.communicator = Communicator(wire, timeouts)

    def start(self, request: Request, ready: Callable[[], bool] | None = None) -> Pending:
        assert ready is None
        return self.communicator.start(request)


def world_of(wire: Wire, timeouts: Timeouts = PATIENT) -> Group:
    driven: Any = CallerDriven(wire, timeouts)
    endpoint = Endpoint(wire.rank, ["here"] * wire.world_size, driven, lambda: None)
    return Group(endpoint, tuple(range(wire.world_size)))


def communicator_of(world: Group) -> Communicator:
    assert isinstance(world.endpoint.communication, CallerDriven)
    return world.endpoint.communication.communicator


def pass_time(world: Group, until_s: float) -> None:
    communicator = communicator_of(world)
    while communicator.wire.now() < until_s:
        communicator.step(0.05)


# What each collective leaves, from what each member gives ----------------------------------------------------------------


def stacked(ranks: Sequence[int], length: int) -> torch.Tensor:
    return torch.stack([integers(rank, length) for rank in ranks])


def in_all_reduce(group: Group, length: int) -> tuple[Started[Any], Any]:
    mine = integers(group.ranks[group.rank], length)
    pending = group.begin(Kind.ALL_REDUCE, mine, ("ring", "halving_doubling", "chain")[length % 3], lambda: mine)
    return pending, stacked(group.ranks, length).sum(0)


def in_broadcast(group: Group, length: int) -> tuple[Started[Any], Any]:
    root = length % group.size
    return calls.start_broadcast(group, integers(group.ranks[group.rank], length), root), integers(group.ranks[root], length)


def in_reduce(group: Group, length: int) -> tuple[Started[Any], Any]:
    root, mine = length % group.size, integers(group.ranks[group.rank], length)
    return calls.start_reduce(group, mine, root, "sum"), (stacked(group.ranks, length).sum(0) if group.rank == root else mine)


def in_all_gather(group: Group, length: int) -> tuple[Started[Any], Any]:
    return calls.start_all_gather(group, integers(group.ranks[group.rank], length)), stacked(group.ranks, length)


def in_gather(group: Group, length: int) -> tuple[Started[Any], Any]:
    root = length % group.size
    expected = stacked(group.ranks, length) if group.rank == root else None
    return calls.start_gather(group, integers(group.ranks[group.rank], length), root), expected


def in_scatter(group: Group, length: int) -> tuple[Started[Any], Any]:
    root = length % group.size
    parts = stacked(group.ranks, length) if group.rank == root else None
    return calls.start_scatter(group, torch.zeros(length), parts, root), integers(group.ranks[group.rank], length)


def in_reduce_scatter(group: Group, length: int) -> tuple[Started[Any], Any]:
    total = stacked(group.ranks, length).sum(0)
    first, last = (chunk_start(place, length, group.size) for place in (group.rank, group.rank + 1))
    return calls.start_reduce_scatter(group, integers(group.ranks[group.rank], length), "sum"), total[first:last]


def in_all_to_all(group: Group, length: int) -> tuple[Started[Any], Any]:
    rows = torch.stack([integers(100 * group.ranks[group.rank] + to, length) for to in group.ranks])
    expected = torch.stack([integers(100 * source + group.ranks[group.rank], length) for source in group.ranks])
    return calls.start_all_to_all(group, rows), expected


def in_barrier(group: Group, length: int) -> tuple[Started[Any], Any]:
    return calls.start_barrier(group), None


COLLECTIVES = (
    in_all_reduce, in_broadcast, in_reduce, in_all_gather, in_gather, in_scatter, in_reduce_scatter, in_all_to_all, in_barrier,
)  # fmt: skip


def outcome(started: Started[Any], expected: Any) -> str | PeerLost:
    """ "right", or the error. A wrong value is an assertion error here."""
    try:
        result = started.wait()
    except PeerLost as lost:
        return lost
    assert (result is None) == (expected is None)
    if expected is not None:
        assert torch.equal(result, expected)
    return "right"


# Everything at once ------------------------------------------------------------------------------------------------------


World = tuple[int, list[tuple[int, ...]], list[int]]  # size, groups, and of each group the length of its tensors


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A number of workers; groups of some of them, a partition and others that overlap; and what each group does."""
    size = draw(st.integers(2, 7))
    order = draw(st.permutations(range(size)))
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3)))
    groups = [tuple(order[first:last]) for first, last in zip([0, *cuts], [*cuts, size], strict=True)]
    groups += draw(st.lists(st.lists(st.sampled_from(range(size)), min_size=1, unique=True).map(tuple), max_size=3))
    return size, groups, draw(st.lists(st.integers(0, 300), min_size=len(groups), max_size=len(groups)))


Told = dict[int, list[str | PeerLost]]  # number of the group -> outcomes


def exchange(wire: VirtualWire, members: list[tuple[int, ...]], lengths: list[int], quiet_until_s: float) -> tuple[Told, Told]:
    """All groups at once, one of each collective; then, when a loss would have been noticed by all, again."""
    world = world_of(wire)
    groups: dict[int, Group] = {}
    first: Told = {}
    for number, ranks in enumerate(members):
        if wire.rank in ranks:
            try:
                groups[number] = world.sub(ranks)
            except PeerLost as lost:
                first[number] = [lost]
    first |= begin_and_wait(groups, lengths)
    pass_time(world, quiet_until_s)
    return first, begin_and_wait(groups, lengths)


def begin_and_wait(groups: dict[int, Group], lengths: list[int]) -> Told:
    begun = [(number, *call(group, lengths[number])) for number, group in groups.items() for call in COLLECTIVES]
    told: Told = {}
    for number, started, expected in begun:
        told.setdefault(number, []).append(outcome(started, expected))
    return told


def check_exchange(world: World) -> None:
    size, members, lengths = world
    for told in run_virtual(size, exchange, members, lengths, 0.0, model=MODEL):
        for outcomes in (*told[0].values(), *told[1].values()):
            assert outcomes == ["right"] * len(COLLECTIVES)


def check_death(world: World, victim: int, at_s: float) -> None:
    """Some collectives have ended when it dies, some are under way, some have not begun; groups may not even exist yet."""
    size, members, lengths = world
    victim %= size
    results = run_virtual(size, exchange, members, lengths, DETECTED_S, model=MODEL, faults=[Kill(victim, at_s=at_s)])
    assert results.pop(victim) is None
    for first, second in results:
        for number, outcomes in (*first.items(), *second.items()):
            if victim in members[number] and len(members[number]) > 1:
                assert all(one == "right" if isinstance(one, str) else one.rank == victim for one in outcomes)
            else:
                assert outcomes == ["right"] * len(COLLECTIVES)
        for number, outcomes in second.items():
            if victim in members[number]:
                assert all(isinstance(one, PeerLost) and one.rank == victim for one in outcomes)


TIMES_S = (0.0, 1e-4, 3e-4, 1e-3, 2e-3, 5e-3)


@settings(max_examples=10, deadline=None)
@given(world=worlds())
def test_groups_that_work_at_the_same_time_do_not_meet(world: World) -> None:
    check_exchange(world)


@settings(max_examples=20, deadline=None)
@given(world=worlds(), victim=st.integers(0, 6), at_s=st.sampled_from(TIMES_S))
def test_a_death_is_felt_by_the_groups_of_the_dead_and_by_nobody_else(world: World, victim: int, at_s: float) -> None:
    check_death(world, victim, at_s)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(world=worlds())
def test_many_groups_that_work_at_the_same_time_do_not_meet(world: World) -> None:
    check_exchange(world)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(world=worlds(), victim=st.integers(0, 6), at_s=st.sampled_from(TIMES_S))
def test_many_deaths_are_felt_by_the_groups_of_the_dead_and_by_nobody_else(world: World, victim: int, at_s: float) -> None:
    check_death(world, victim, at_s)


def test_the_death_of_an_outsider_neither_fails_nor_delays_what_is_under_way() -> None:
    """Ranks 0 and 1 are in the middle of a long transfer; rank 2 dies. Rank 3, with which rank 2 had a group, is told."""

    def program(wire: VirtualWire, dies: bool) -> tuple[Any, float]:
        world = world_of(wire)
        group = world.sub([0, 1] if wire.rank < 2 else [2, 3])
        mine = integers(wire.rank, 1_000_000)
        begun = wire.now()
        try:
            group.run(Kind.ALL_REDUCE, mine, "ring")
        except PeerLost as lost:
            return lost.rank, wire.now() - begun
        return bool(torch.equal(mine, stacked(group.ranks, 1_000_000).sum(0))), wire.now() - begun

    undisturbed = run_virtual(4, program, False, model=MODEL)
    disturbed = run_virtual(4, program, True, model=MODEL, faults=[Kill(2, at_s=0.01)])
    assert disturbed[0] == undisturbed[0] and disturbed[1] == undisturbed[1] and undisturbed[0][0] is True
    assert undisturbed[0][1] > 0.03  # so rank 2 died in the middle of it
    assert disturbed[3][0] == 2


def test_members_that_still_see_everybody_are_told_of_a_loss_and_outsiders_are_not() -> None:
    """The link between 0 and 1 is cut. Rank 2, in one group with both, has lost nobody; neither has rank 3."""

    def program(wire: VirtualWire) -> tuple[int, bool]:
        world = world_of(wire)
        group = world.sub([0, 1, 2]) if wire.rank < 3 else None
        lost = -1
        if group is not None:
            with pytest.raises(PeerLost) as caught:
                group.run(Kind.ALL_REDUCE, integers(wire.rank, 1_000_000), "ring")
            lost = caught.value.rank
        pass_time(world, MODEL.silence_s + 1.0)
        return lost, bool(communicator_of(world).failures._doomed)

    results = run_virtual(4, program, model=MODEL, faults=[Cut((0,), at_s=0.01, others=(1,))])
    assert [results[0][0], results[1][0], results[3]] == [1, 0, (-1, False)] and results[2][0] in (0, 1)


def test_two_groups_at_once_are_as_fast_as_one_alone() -> None:
    def program(wire: VirtualWire) -> float:
        group = world_of(wire).sub([0, 1] if wire.rank < 2 else [2, 3])
        begun = wire.now()
        group.run(Kind.ALL_REDUCE, integers(wire.rank, 1_000_000), "ring")
        return wire.now() - begun

    alone = run_virtual(2, program, model=MODEL)
    assert run_virtual(4, program, model=MODEL) == pytest.approx(2 * alone, rel=0.01)


@pytest.mark.parametrize("make", [tcp, zeromq])
def test_groups_on_sockets_work_on_when_a_worker_outside_of_them_has_gone(make: Callable[[], Make]) -> None:
    """With communication threads, and the channels of groups on a real wire. Rank 2 goes without a goodbye."""
    made, noticed = threading.Barrier(4), threading.Barrier(3)

    def program(wire: FramedWire) -> list[Any]:
        launch = Launch(
            rank=wire.rank, world_size=4, local_rank=wire.rank, local_world_size=4, rendezvous=None, secret=None, encrypt=False,
            launcher="stretto",
        )  # fmt: skip
        job = Job(launch, [Peer(rank, rank, "here", "127.0.0.1:1", 1) for rank in range(4)], wire, PATIENT)
        pair, three = job.world.sub([1, 0] if wire.rank < 2 else [3, 2]), job.world.sub([0, 3, 2]) if wire.rank != 1 else None
        made.wait(30)
        if wire.rank == 2:
            job.close(goodbye=False)
            return []
        errors: list[Any] = []
        for group in [pair, three] if wire.rank == 3 else [three] if wire.rank == 0 else []:
            assert group is not None
            with pytest.raises(PeerLost) as caught:
                calls.start_barrier(group).wait()
            errors.append(caught.value.rank)
        noticed.wait(30)
        if wire.rank < 2:
            pair.run(Kind.ALL_REDUCE, mine := integers(wire.rank, 200_000), "ring")
            assert torch.equal(mine, stacked((0, 1), 200_000).sum(0))
            errors.append(calls.gather_object(pair, wire.rank))
        noticed.wait(30)
        job.close(goodbye=True)
        return errors

    with wires_of(4, make()) as wires:
        connect_all(wires, [peer_of(wire) for wire in wires])
        assert run_threads(4, program, wires=wires) == [[2, [1, 0]], [[1, 0]], [], [2, 2]]


def test_a_worker_that_comes_back_is_in_no_group_of_its_former_life() -> None:
    """Rank 2 dies and another worker comes in its place. The pair goes on, the old three refuse, a new group of three works."""
    wires = threads_world(3)
    made = threading.Barrier(3)
    came: Future[ThreadsWire] = Future()

    def refused(group: Group) -> str:
        with pytest.raises(PeerLost) as caught:
            calls.start_barrier(group).wait()
        assert caught.value.rank == 2
        return str(caught.value)

    def drive(world: Group, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not until() and time.monotonic() < deadline:
            communicator_of(world).step(0.01)
        assert until()

    def program(wire: ThreadsWire) -> list[Any]:
        world = world_of(wire)
        three, pair = world.sub([0, 1, 2]), world.sub([1, 0]) if wire.rank < 2 else None
        made.wait(20)
        if pair is None:
            wire.kill("on purpose")
            came.set_result(wires[0].newcomer(rank=2, generation=1))
            world = world_of(came.result())
            drive(world, lambda: not came.result().lost)
            return calls.gather_object(world.sub([0, 1, 2]), "new")
        drive(world, lambda: 2 in wire.lost)
        assert "on purpose" in refused(three)
        wire.admit(came.result(20).peer)
        drive(world, lambda: 2 not in wire.lost)
        for group in (three, world):
            assert "another worker has had its rank" in refused(group)
        assert calls.gather_object(pair, wire.rank) == [1, 0]
        return calls.gather_object(world.sub([0, 1, 2]), wire.rank)

    assert run_threads(3, program, wires=wires) == [[0, 1, "new"]] * 3


# Members that do not come, or mean something else --------------------------------------------------------------------------


def test_a_group_that_not_all_members_make_names_the_missing_and_no_outsider() -> None:
    def program(wire: VirtualWire) -> tuple[type[StrettoError], int, str] | None:
        world = world_of(wire, Timeouts(warn_s=2.0, arrive_s=10.0))
        if wire.rank in (1, 3):
            pass_time(world, 30.0)
            return None
        try:
            world.sub([0, 2, 3])
        except WireTimeout as late:
            return type(late), late.rank, str(late)
        return None

    results = run_virtual(4, program, model=MODEL)
    for rank in (0, 2):
        kind, blamed, text = results[rank]
        assert kind is WireTimeout and blamed == 3
        assert "to make a group" in text and "group of ranks 0, 2, 3" in text


def test_members_that_make_different_groups_are_told_soon() -> None:
    def program(wire: VirtualWire) -> tuple[str, float]:
        world = world_of(wire)
        with pytest.raises(RankMismatch) as caught:
            world.sub([0, 1] if wire.rank == 0 else [1, 0] if wire.rank == 1 else [1, 0, 2])
        told = str(caught.value), wire.now()
        pass_time(world, 10.0)
        return told

    (first, when), (second, _) = run_virtual(2, program, model=MODEL)
    assert first == second and when < 3.0
    assert "group of ranks 0, 1)" in first and "group of ranks [1, 0])" in first


def test_a_disagreement_in_a_group_names_its_members_alone() -> None:
    def program(wire: VirtualWire) -> str:
        world = world_of(wire)
        if wire.rank == 1:
            pass_time(world, 5.0)
            return ""
        group = world.sub([3, 0, 2])
        with pytest.raises(RankMismatch) as caught:
            group.run(Kind.ALL_REDUCE, integers(wire.rank, 11 if wire.rank == 0 else 10), "ring")
        assert wire.now() < 0.1  # nobody waits for the outsider to say something
        return str(caught.value)

    texts = run_virtual(4, program, model=MODEL)
    assert texts.pop(1) == "" and len(set(texts)) == 1
    assert "rank 0: all_reduce(float32[11]" in texts[0] and "ranks 2, 3: all_reduce(float32[10]" in texts[0]
    assert "rank 1" not in texts[0] and "ranks 0-3" not in texts[0]


def test_ranks_in_streams_of_different_groups_are_told_with_all_members_of_both() -> None:
    """0 waits for 1 in one group, 1 for 0 in another that has 2 as well: 2, which waits in neither of their threads, hears it."""

    def program(wire: VirtualWire) -> str | None:
        world = world_of(wire)
        if wire.rank == 3:
            pass_time(world, 5.0)
            assert not communicator_of(world).failures._doomed  # it is in neither, and is told nothing
            return None
        pair = world.sub([0, 1]) if wire.rank < 2 else None
        three = world.sub([0, 1, 2])
        with pytest.raises(RankMismatch, match="wait for each other") as caught:
            calls.start_barrier(pair if wire.rank == 0 and pair is not None else three).wait()
        pass_time(world, 5.0)
        return str(caught.value)

    texts = run_virtual(4, program, model=MODEL)[:3]
    assert all("rank 0: barrier(" in text and ("rank 1: barrier(" in text or "ranks 1, 2: barrier(" in text) for text in texts)


# Channels ------------------------------------------------------------------------------------------------------------------


def test_channels_of_groups_with_a_common_member_all_differ() -> None:
    """All subsets of five workers, each twice, with the channels of their pairs and of two models each."""

    def program(wire: VirtualWire) -> dict[tuple[tuple[int, ...], int], list[int]]:
        world = world_of(wire)
        found: dict[tuple[tuple[int, ...], int], list[int]] = {((), 0): [0, 1, world.new_channel(), *pairs(world)]}
        for size in (2, 3, 5):
            for ranks in combinations(range(5), size):
                for turn in range(2):
                    if wire.rank in ranks:
                        group = world.sub(ranks)
                        channels = [group.channel, group.to_choose().channel, group.new_channel(), group.new_channel()]
                        found[ranks, turn] = channels + pairs(group)
        return found

    def pairs(group: Group) -> list[int]:
        others = [place for place in range(group.size) if place != group.rank]
        return [group.pair_channel(*pair) for place in others for pair in ((group.rank, place), (place, group.rank))]

    results = run_virtual(5, program, model=MODEL)
    for found in results:
        channels = [channel for each in found.values() for channel in each]
        assert len(set(channels)) == len(channels) and all(0 <= channel < 1 << 32 for channel in channels)
    for key in results[0]:
        own = [found[key][: 3 if key[0] == () else 4] for found in results if key in found]
        assert all(each == own[0] for each in own)  # and members agree on them


def entries(part: Any, seen: set[int]) -> int:
    """How many entries all tables of ours have that can be reached from here."""
    if id(part) in seen or isinstance(part, (Wire, torch.Tensor, type)):
        return 0
    seen.add(id(part))
    within = (
        [*part.keys(), *part.values()] if isinstance(part, dict) else part if isinstance(part, (list, tuple, set, deque)) else []
    )
    ours = type(part).__module__.startswith("stretto.") and hasattr(part, "__dict__")
    return len(within) + sum(entries(each, seen) for each in within) + (entries(vars(part), seen) if ours else 0)


def test_a_group_every_step_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((failures, "HISTORY"), (failures, "CHANNELS"), (whereabouts, "CHANNELS"), (execute, "STREAMS")):
        monkeypatch.setattr(module, name, 8)  # else it would take thousands of steps to see that they are full

    def program(wire: VirtualWire) -> list[int]:
        world, sizes = world_of(wire), []
        for _ in range(3):
            for ranks in 5 * [(0, 1), (2, 0), (1, 2), (0, 1, 2)]:
                if wire.rank in ranks:
                    group = world.sub(ranks)
                    group.run(Kind.ALL_REDUCE, torch.ones(4), "ring")
                    if group.size == 2:
                        group.begin_pair(0, 1, torch.ones(4)).wait()
            del group
            sizes.append(entries([world.endpoint, communicator_of(world)], set()))
        return sizes

    for _, second, third in run_virtual(3, program, model=MODEL):
        assert second == third


def test_a_pair_has_one_channel_for_each_direction_at_both_ends() -> None:
    def program(wire: VirtualWire) -> list[list[int]]:
        group = world_of(wire)
        return [[group.pair_channel(a, b) for b in range(group.size) if b != a] for a in range(group.size)]

    assert len({str(table) for table in run_virtual(4, program)}) == 1


def test_meetings_are_named_by_members_order_and_turn() -> None:
    several = ((0, 1), (1, 0), (0, 1, 2))
    names = {_meeting(members, generation, turn) for members in several for generation in (0, 1) for turn in range(50)}
    assert len(names) == 300
    assert all(MEETINGS <= channel < GROUPS and 0 <= sequence < 1 << 32 for channel, sequence in names)


def test_all_members_are_told_when_the_first_has_no_channels_left() -> None:
    def program(wire: VirtualWire) -> str:
        world = world_of(wire)
        world.endpoint._group_channels = (1 << COUNT_BITS) - 6 if wire.rank == 1 else 0
        world.sub([1, 0])
        with pytest.raises(
            ConfigurationError, match=r"(?s)group of ranks \[1, 0\]: rank 1, .* has no 6 left.*Keep groups"
        ) as caught:
            world.sub([1, 0])
        world.sub([0, 1])
        return str(caught.value)

    assert len(set(run_virtual(2, program))) == 1


# The public functions ------------------------------------------------------------------------------------------------------


def test_every_public_collective_takes_a_group() -> None:
    def program(job: Job) -> None:
        ranks = [3, 1] if job.rank % 2 else [0, 2, 4]
        group = stretto.group(ranks)
        assert group.ranks == tuple(ranks) and group.size == len(ranks) and group.ranks[group.rank] == job.rank
        mine, place, size = torch.tensor([float(job.rank), 1.0]), group.rank, group.size
        mean = sum(ranks) / size
        for algorithm in ("ring", "auto"):
            assert stretto.all_reduce(mine.clone(), algorithm=algorithm, group=group).tolist() == pytest.approx([mean, 1.0])
        assert stretto.all_reduce(job.rank, "sum", "ring", group) == sum(ranks)
        assert stretto.broadcast(mine.clone(), root=1, group=group).tolist() == [ranks[1], 1.0]
        assert stretto.broadcast(job.rank, root=1, group=group) == ranks[1]
        reduced = stretto.reduce(mine.clone(), root=1, op="max", group=group)
        assert reduced.tolist() == [max(ranks) if place == 1 else job.rank, 1.0]
        assert stretto.all_gather(mine, group=group)[:, 0].tolist() == ranks
        gathered = stretto.gather(mine, root=1, group=group)
        assert gathered is None if place != 1 else gathered is not None and gathered[:, 0].tolist() == ranks
        parts = [torch.tensor([10 * rank, job.rank]) for rank in ranks] if place == 1 else None
        assert stretto.scatter(torch.zeros(2, dtype=torch.int64), parts, root=1, group=group).tolist() == [
            10 * job.rank,
            ranks[1],
        ]
        part = stretto.reduce_scatter(torch.arange(7.0).view(7, 1) + job.rank, op="sum", group=group)
        total = torch.arange(7.0) * size + sum(ranks)
        assert torch.equal(part, total.tensor_split(size)[place])
        sent = [torch.tensor([job.rank, rank]) for rank in ranks]
        assert [row.tolist() for row in stretto.all_to_all(sent, group=group)] == [[rank, job.rank] for rank in ranks]
        assert stretto.all_to_all(torch.stack(sent), group=group).tolist() == [[rank, job.rank] for rank in ranks]
        assert stretto.gather_object({"rank": job.rank}, group=group) == [{"rank": rank} for rank in ranks]
        stretto.barrier(group=group)
        right, left = (place + 1) % size, (place - 1) % size
        handle = stretto.start_send(mine, right, group=group)
        assert stretto.recv(torch.zeros(2), left, group=group).tolist() == [ranks[left], 1.0]
        assert handle.wait() is mine and handle.done

    run_jobs(5, program)


def test_handles_of_everything_give_the_results_in_any_order() -> None:
    def program(job: Job) -> None:
        size, mine = job.world_size, torch.tensor([float(job.rank), 2.0])
        parts = torch.arange(2.0 * size).view(size, 2) if job.rank == 0 else None
        handles: list[Started[Any]] = [
            stretto.start_all_reduce(mine.clone(), "sum", "ring"), stretto.start_broadcast(mine.clone()),
            stretto.start_reduce(mine.clone(), op="sum"), stretto.start_all_gather(mine), stretto.start_gather(mine),
            stretto.start_scatter(torch.zeros(2), parts), stretto.start_reduce_scatter(mine, "sum"),
            stretto.start_all_to_all(torch.full((size, 2), float(job.rank))), stretto.start_barrier(),
        ]  # fmt: skip
        values = [handle.wait() for handle in reversed(handles)][::-1]
        ranks = [float(rank) for rank in range(size)]
        assert all(handle.done for handle in handles)
        assert values[0].tolist() == [sum(ranks), 2.0 * size] and values[1].tolist() == [0.0, 2.0]
        assert values[2].tolist() == ([sum(ranks), 2.0 * size] if job.rank == 0 else [job.rank, 2.0])
        assert values[3][:, 0].tolist() == ranks and (values[4] is None) == (job.rank != 0)
        assert values[5].tolist() == [2.0 * job.rank, 2.0 * job.rank + 1]
        assert torch.equal(values[6], torch.tensor([sum(ranks), 2.0 * size]).tensor_split(size)[job.rank])
        assert values[7][:, 0].tolist() == ranks and values[8] is None
        assert handles[0].wait() is values[0]

    run_jobs(3, program)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_split_makes_a_group_of_each_color(size: int) -> None:
    def program(job: Job) -> Any:
        color = None if job.rank == 3 else ("a" if job.rank % 2 else 7)
        group = stretto.split(color)
        if group is None:
            return None
        assert stretto.all_reduce(1, "sum", "ring", group) == group.size
        inner = group.sub([group.rank])  # a group of one
        assert inner.ranks == (job.rank,) and stretto.all_reduce(5.0, group=inner) == 5.0
        return group.ranks

    odd = tuple(rank for rank in range(1, size, 2) if rank != 3)
    assert run_jobs(size, program) == [
        None if rank == 3 else odd if rank % 2 else tuple(range(0, size, 2)) for rank in range(size)
    ]


def test_a_group_of_a_group_counts_in_its_ranks() -> None:
    def program(job: Job) -> Any:
        group = stretto.group([4, 2, 0, 1]) if job.rank != 3 else None
        if group is None or group.rank == 1:
            return None
        inner = group.sub([3, 0, 2])
        return inner.ranks, inner.rank, stretto.broadcast(job.rank, root=2, group=inner)

    results = run_jobs(5, program)
    assert results == [((1, 4, 0), 2, 0), ((1, 4, 0), 0, 0), None, None, ((1, 4, 0), 1, 0)]


def test_a_group_of_one_sends_nothing() -> None:
    def program(job: Job) -> int:
        group = stretto.group([job.rank])
        x = torch.arange(3.0)
        assert stretto.all_reduce(x, group=group) is x and stretto.all_gather(x, group=group).shape == (1, 3)
        assert torch.equal(stretto.reduce_scatter(x, group=group), x) and stretto.gather(x, group=group) is not None
        assert torch.equal(stretto.scatter(torch.zeros(3), [x], group=group), x)
        assert torch.equal(stretto.all_to_all(x.view(1, 3), group=group), x.view(1, 3))
        stretto.barrier(group)
        assert job.wire is not None
        return job.ledger.bytes_sent

    assert run_jobs(2, program) == [0, 0]


def test_what_is_sent_is_in_order_between_two_and_in_no_order_with_others() -> None:
    def program(job: Job) -> list[float]:
        others = [rank for rank in range(job.world_size) if rank != job.rank]
        handles = [stretto.start_send(torch.tensor([100.0 * job.rank + n]), to) for n in range(3) for to in others]
        order = others if job.rank else others[::-1]
        received = [stretto.recv(torch.zeros(1), source).item() for source in order for _ in range(3)]
        for handle in handles:
            handle.wait()
        return sorted(received)

    for rank, received in enumerate(run_jobs(4, program)):
        assert received == [100.0 * source + n for source in range(4) if source != rank for n in range(3)]


def test_two_that_both_send_first_are_told() -> None:
    def program(job: Job) -> str:
        with pytest.raises(RankMismatch, match="wait for each other") as caught:
            stretto.send(torch.ones(3), to=1 - job.rank)
        return str(caught.value)

    first, second = run_jobs(2, program)
    assert first == second and "from rank 0 to rank 1" in first and "from rank 1 to rank 0" in first


def test_values_that_autograd_has_saved_are_not_replaced_unseen() -> None:
    def program(job: Job) -> None:
        x = torch.ones(2, requires_grad=True)
        parts = torch.ones(2, 2, requires_grad=True).t().exp()  # not contiguous: what is sent is a copy
        stretto.scatter(torch.zeros(2), parts.detach() if job.rank == 0 else None)
        torch.autograd.backward(parts.sum())  # they were read, not written
        writes: list[Callable[[torch.Tensor], object]] = [
            lambda y: stretto.reduce(y, root=0),
            lambda y: stretto.scatter(y, torch.zeros(2, 2) if job.rank == 0 else None),
            lambda y: stretto.recv(y, 1) if job.rank == 0 else stretto.start_send(y, 0).wait(),
        ]
        for write in writes:
            y = x.exp()
            write(y.detach())
            if job.rank == 0:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    torch.autograd.backward(y.sum())

    run_jobs(2, program)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: stretto.group([0, 0, 1]), r"group of ranks \[0, 0, 1\]: 0 occurs twice.*Name each once"),
        (lambda: stretto.group([0, 2]), r"\[0, 2\]: 2 is none. The ranks of a job of 2 are 0 to 1"),
        (lambda: stretto.group([-1, 0]), "-1 is none"),
        (lambda: stretto.group(["0"]), "'0' is none"),  # type: ignore[list-item]
        (lambda: stretto.group([]), "it would be empty"),
        (lambda: stretto.group([1 - stretto.rank()]), "(?s)which is not one of them.*split"),
        (lambda: stretto.split(1.5), "Write an int, a str, or None"),  # type: ignore[arg-type]
        (lambda: stretto.barrier(group=None), "(?s)group=None on rank .*if group is not None"),  # type: ignore[arg-type]
        (lambda: stretto.barrier(group=[0, 1]), r"this is no group.*stretto.group\(ranks\)"),  # type: ignore[arg-type]
        (lambda: stretto.broadcast(torch.ones(1), root=2), "root=2 in a job of 2: ranks are 0 to 1"),
        (lambda: stretto.gather(torch.ones(1), root=-1), "root=-1 in a job of 2"),
        (lambda: stretto.reduce(torch.ones(1), root=5), "root=5 in a job of 2"),
        (lambda: stretto.scatter(torch.ones(1), root=5), "root=5 in a job of 2"),
        (lambda: stretto.send(torch.ones(1), to=2), "to=2 in a job of 2"),
        (lambda: stretto.send(torch.ones(1), to=stretto.rank()), "that is this worker itself"),
        (lambda: stretto.recv(torch.ones(1), source=stretto.rank()), "that is this worker itself"),
        (lambda: stretto.scatter(torch.ones(1), torch.ones(2, 1), root=1 - stretto.rank()), "with parts: the root gives"),
        (lambda: stretto.scatter(torch.ones(1), root=stretto.rank()), "without parts: the root gives"),
        (lambda: stretto.scatter(torch.ones(1), torch.ones(2, 2), root=stretto.rank()), r"float32\[2\] into .*float32\[1\]"),
        (lambda: stretto.scatter(torch.ones(1), torch.ones(3, 1), root=stretto.rank()), r"a tensor float32\[3, 1\] among 2"),
        (lambda: stretto.all_to_all(torch.ones(3)), r"(?s)a tensor float32\[3\] among 2 members.*list of 2 tensors"),
        (lambda: stretto.all_to_all([torch.ones(3)]), "1 tensors among 2 members"),
        (lambda: stretto.all_to_all([torch.ones(3), torch.ones(2)]), "tensors that differ"),
        (lambda: stretto.reduce_scatter(torch.ones(2, dtype=torch.int64)), "the mean of"),
        (lambda: stretto.all_reduce(torch.ones(1), algorithm="native"), "runs on another wire"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_at_once(call: Callable[[], object], problem: str) -> None:
    def program(job: Job) -> int:
        with pytest.raises(ConfigurationError, match=problem):
            call()
        assert job.wire is not None
        return job.ledger.bytes_sent

    assert run_jobs(2, program) == [0, 0]


@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce", "broadcast"])
def test_members_that_name_different_roots_are_told_so(kind: str) -> None:
    """The root that only some of them mean may have done its part, and returned, before it hears of it."""

    def program(job: Job) -> bool:
        root = 1 if job.rank == 2 else 0
        call = getattr(stretto, kind)
        arguments = [torch.ones(3), torch.ones(3, 3) if job.rank == root else None] if kind == "scatter" else [torch.ones(3)]
        try:
            call(*arguments, root=root)
        except RankMismatch as told:
            assert "root=0" in str(told) and "root=1" in str(told)
            return True
        finally:
            all_know.wait()  # else who has returned leaves the job, and that is what the others are told
        return False

    all_know = threading.Barrier(3, timeout=30)
    assert sum(run_jobs(3, program)) >= 2


def test_ranks_of_numpy_are_ranks_and_truth_values_are_none() -> None:
    def program(job: Job) -> tuple[int, ...]:
        with pytest.raises(ConfigurationError, match="'True' is none"):
            stretto.group([True, False])
        return stretto.group(np.arange(2)).ranks

    assert run_jobs(2, program) == [(0, 1)] * 2


def test_a_group_of_a_job_that_was_left_is_refused() -> None:
    def program(job: Job) -> Group:
        return stretto.group([0, 1])

    old = run_jobs(2, program)

    def later(job: Job) -> None:
        with pytest.raises(ConfigurationError, match="made in another job"):
            stretto.barrier(group=old[job.rank])

    run_jobs(2, later)
