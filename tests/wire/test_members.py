"""Members that leave, die, come back and are new, on every wire that lets them; and what the doors that stay open let in."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from stretto.errors import ConfigurationError, PeerLost
from stretto.launching.peers import Peer
from stretto.testing import run_threads, wait_for
from stretto.testing.faults import Kill
from stretto.testing.in_process import WireKilled
from stretto.testing.network_model import Link, NetworkModel, Uniform
from stretto.testing.threads import ThreadsWire, threads_world
from stretto.testing.virtual import VirtualWire, virtual_world
from stretto.timeouts import Timeouts
from stretto.wire.base import Tag, Wire
from stretto.wire.door import MAX_STRANGERS
from stretto.wire.framed import FramedWire
from stretto.wire.frames import FrameKind
from stretto.wire.tcp import TcpWire
from stretto.wire.zeromq import ZeroMQWire
from wire.contract import progress_until, send
from wire.members import TAG, Member, MembersContract, View, exchange, in_turns
from wire.socket_world import NONCE, QUICK, SECRET, connect_all, frame, socket_world, wires_of

LATENCY_S = 1.0
SOCKET_WIRES: list[type[TcpWire] | type[ZeroMQWire]] = [TcpWire, ZeroMQWire]


class TestThreadsLetMembersComeAndGo(MembersContract):
    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        yield threads_world(size, check=True)

    def newcomer(self, wires: Sequence[Wire], rank: int, generation: int) -> Wire:
        assert isinstance(wires[0], ThreadsWire)
        return wires[0].newcomer(rank, generation)

    def peer(self, wire: Any) -> Peer:
        assert isinstance(wire, ThreadsWire)
        return wire.peer


def peer_of(wire: FramedWire) -> Peer:
    return Peer(wire.rank, wire.rank, "here", wire.address, os.getpid(), generation=wire._born)


class SocketMembers(MembersContract):
    kind: type[TcpWire] | type[ZeroMQWire]

    def make(self, rank: int, size: int, generation: int = 0) -> FramedWire:
        return self.kind(rank, size, secret=SECRET, timeouts=QUICK, generation=generation, accept_later=True)

    @contextmanager
    def make_world(self, size: int) -> Iterator[Sequence[Wire]]:
        self.came: list[FramedWire] = []
        try:
            with wires_of(size, self.make) as wires:
                connect_all(wires, [peer_of(wire) for wire in wires])
                yield wires
        finally:
            for wire in self.came:
                wire.abandon()

    def newcomer(self, wires: Sequence[Wire], rank: int, generation: int) -> Wire:
        self.came.append(self.make(rank, len(wires) + 1, generation))
        return self.came[-1]

    def peer(self, wire: Any) -> Peer:
        return peer_of(wire)

    def join(self, wire: Wire, members: Sequence[Wire]) -> None:
        assert isinstance(wire, FramedWire)
        wire.connect([peer_of(each) for each in (*members, wire) if isinstance(each, FramedWire)], NONCE)


class TestTcpLetsMembersComeAndGo(SocketMembers):
    kind = TcpWire


class TestZeroMQLetsMembersComeAndGo(SocketMembers):
    kind = ZeroMQWire


class OpenTcp(SocketMembers):
    kind = TcpWire


@pytest.mark.parametrize("kind", SOCKET_WIRES)
def test_a_wire_whose_port_is_closed_admits_nobody_and_says_what_to_write(kind: type[TcpWire] | type[ZeroMQWire]) -> None:
    refused = pytest.raises(ConfigurationError, match=r"closed its port .*\nMake it with accept_later=True")
    with socket_world(2, lambda rank, size: kind(rank, size, secret=SECRET)) as wires, refused:
        wires[0].admit(Peer(2, 2, "here", "127.0.0.1:1", 1, generation=1))


@pytest.mark.parametrize("kind", SOCKET_WIRES)
def test_who_is_admitted_and_does_not_come_is_lost_at_the_deadline(kind: type[TcpWire] | type[ZeroMQWire]) -> None:
    quick = Timeouts(connect_s=0.5, silence_s=2)

    def make(rank: int, size: int) -> FramedWire:
        return kind(rank, size, secret=SECRET, timeouts=quick, accept_later=True)

    with wires_of(2, make) as wires, socket.create_server(("127.0.0.1", 0)) as idle:
        connect_all(wires, [peer_of(wire) for wire in wires])
        lost: list[PeerLost] = []
        wires[0].on_lost(lost.append)
        wires[0].admit(Peer(5, 5, "here", "{}:{}".format(*idle.getsockname()), 1, generation=1))
        progress_until(wires[0], lambda: bool(lost), "the deadline")
        assert lost[0].rank == 5 and "did not connect within 0.5 s" in str(lost[0])
        assert wires[0].peers == [1, 5] and wires[0].lost[5] is lost[0]  # a lost member, as others
        views: list[View] = []
        wires[0].on_view(lambda *view: views.append(view))
        wires[0].cancel(1, 0)
        wires[0].retire(5, 2)
        assert wires[0].peers == [1] and views == [([], [5], 2)]


BUSY: list[tuple[type[TcpWire] | type[ZeroMQWire], dict[str, Any]]] = [
    (TcpWire, {}), (TcpWire, {"write_in_thread": True}), (ZeroMQWire, {}),
]  # fmt: skip


@contextmanager
def busy_pair(kind: type[TcpWire] | type[ZeroMQWire], settings: dict[str, Any]) -> Iterator[list[FramedWire]]:
    """Rank 0 has more to send than the kernel takes, in the middle of a payload; and another one behind it."""

    def make(rank: int, size: int) -> FramedWire:
        return kind(rank, size, secret=SECRET, timeouts=QUICK, accept_later=True, shared_memory=False, **settings)

    with wires_of(2, make) as wires:
        connect_all(wires, [peer_of(wire) for wire in wires])
        handles = [wires[0].send(memoryview(bytearray(16 << 20)), 1, Tag(1, 0, index), 0) for index in range(2)]
        assert not any(handle.done for handle in handles)
        yield wires
        assert all(handle.done for handle in handles)


@pytest.mark.parametrize(("kind", "settings"), BUSY)
def test_who_is_retired_learns_it_behind_what_is_queued(kind: type[TcpWire] | type[ZeroMQWire], settings: dict[str, Any]) -> None:
    with busy_pair(kind, settings) as wires:
        members = [Member(wire) for wire in wires]
        wires[0].retire(1, 1)
        in_turns(*members, until=lambda: 0 in wires[1].lost, what="the last word")
        assert wires[1].lost[0].reason == "it retired this worker in generation 1"
        if isinstance(leaver := wires[0], TcpWire):
            assert 1 not in {key[-1] for key in wires[1]._parked}  # at most the payload that had begun has left
            in_turns(members[0], until=lambda: not leaver._parting, what="the end of the connection")


@pytest.mark.parametrize(("kind", "settings"), BUSY)
def test_who_leaves_gets_its_farewell_behind_what_is_queued(
    kind: type[TcpWire] | type[ZeroMQWire], settings: dict[str, Any]
) -> None:
    with busy_pair(kind, settings) as wires:
        leaving = threading.Thread(target=wires[1].close, daemon=True)
        leaving.start()
        in_turns(Member(wires[0]), until=lambda: not leaving.is_alive(), what="the goodbye")
        assert wires[0].said_goodbye(1) and not wires[1]._waiting_for_farewell


@pytest.mark.parametrize("kind", SOCKET_WIRES)
def test_shared_memory_towards_members_that_are_gone_is_given_back(kind: type[TcpWire] | type[ZeroMQWire]) -> None:
    contract = OpenTcp() if kind is TcpWire else TestZeroMQLetsMembersComeAndGo()
    with contract.make_world(2) as wires:
        members = [Member(wire) for wire in wires]
        first = wires[0]
        assert isinstance(first, FramedWire)
        exchange(*members, number=0)
        outbox = first._connections[1].outbox
        assert outbox is not None
        memory = weakref.ref(outbox._mapping)
        del outbox
        members[1].wire.abandon()
        in_turns(members[0], until=lambda: 1 in first.lost, what="the loss")
        assert memory() is None


def test_the_open_door_bears_strangers_and_keeps_those_that_nobody_admits_in_bounds() -> None:
    """Strangers say nothing, or nonsense; impostors know the secret and come under a life that nobody has admitted."""
    contract = OpenTcp()
    with contract.make_world(2) as wires:
        members = [Member(wire) for wire in wires]
        target = wires[0]
        assert isinstance(target, TcpWire)
        crowd: list[socket.socket] = []
        impostors = [contract.make(1, 3, generation=9 + number) for number in range(3)]
        host, _, port = target.address.rpartition(":")
        try:
            for number in range(MAX_STRANGERS + 20):
                crowd.append(socket.create_connection((host, int(port)), timeout=30))
                crowd[-1].sendall(b"stretto2" * (number % 20))
            knocking = [threading.Thread(target=_knock, args=(impostor, peer_of(target)), daemon=True) for impostor in impostors]
            for thread in knocking:
                thread.start()
            in_turns(*members, until=lambda: len(target._newcomers) == 3, what="the impostors' knock")
            assert not target.lost and len(target._door._visitors) <= target._door._limit
            newcomer = contract.let_in(members, 2, 1)
            exchange(*members, newcomer, number=1)
            assert target.peers == [1, 2]
            contract.close_all([*members, newcomer])
            for thread in knocking:
                thread.join(30)
                assert not thread.is_alive()
        finally:
            for each in crowd:
                each.close()
            for impostor in impostors:
                impostor.abandon()


def _knock(impostor: FramedWire, target: Peer) -> None:
    with pytest.raises(PeerLost):  # nobody lets it in, and in the end the door is closed
        impostor.connect([target, peer_of(impostor)], NONCE)


def test_a_frame_that_says_another_generation_makes_its_sender_lost() -> None:
    contract = OpenTcp()
    with contract.make_world(2) as wires:
        members = [Member(wire) for wire in wires]
        newcomer = contract.let_in(members, 2, 4)
        rogue = newcomer.wire
        assert isinstance(rogue, TcpWire)
        rogue._connections[0].socket.sendall(frame(FrameKind.HEARTBEAT, 2, generation=4))
        rogue._connections[1].socket.sendall(frame(FrameKind.HEARTBEAT, 2, generation=3))
        progress_until(wires[1], lambda: 2 in wires[1].lost, "the loss")
        assert "joined in generation 3, and was admitted in 4" in wires[1].lost[2].reason
        exchange(members[0], newcomer, number=1)


def live_again(wire: VirtualWire) -> tuple[list[View], list[bytes], float]:
    """Rank 2 is killed while words of its are on their way, and comes back at once; the others let it in."""
    arrived: list[bytes] = []
    views: list[View] = []
    if wire.rank == 2:
        for peer in (0, 1):
            send(wire, peer, TAG, b"of old")
        with pytest.raises(WireKilled):
            progress_until(wire, lambda: False, "its death")
        successor = wire.newcomer(2, 2)
        wire.finish()
        handles = [send(successor, peer, TAG, b"fresh") for peer in (0, 1)]
        wait_for(successor, *handles)
        end = successor.now()
        successor.close()
        return views, arrived, end
    wire.on_view(lambda *view: views.append(view))
    progress_until(wire, lambda: 2 in wire.lost, "the loss")
    assert wire.now() < LATENCY_S  # what it sent has not arrived yet
    wire.retire(2, 1)
    wire.admit(Peer(2, 2, "here", "", 0, generation=2))
    progress_until(wire, lambda: 2 in wire.peers, "the newcomer")
    handle = wire.recv(2, TAG, 5, 0, lambda view: arrived.append(bytes(view)))
    wait_for(wire, handle)
    return views, arrived, wire.now()


@pytest.mark.parametrize("seed", range(5))
def test_in_virtual_time_a_rank_dies_and_comes_back_and_nothing_of_old_arrives(seed: int) -> None:
    def run() -> tuple[str, list[Any]]:
        model = NetworkModel(Link(latency_s=LATENCY_S, jitter=Uniform(0.0, 0.05)), detect_s=0.01)
        wires = virtual_world(3, model, seed, [Kill(2, at_s=0.1)])
        results = run_threads(3, live_again, wires=wires)
        wires[0].world.assert_all_fired()
        return wires[0].world.trace.hexdigest(), results

    digest, results = run()
    for views, arrived, _ in results[:2]:
        assert views == [([], [2], 1), ([2], [], 2)] and arrived == [b"fresh"]
    assert run() == (digest, results)


@pytest.mark.parametrize("contract", [OpenTcp(), TestZeroMQLetsMembersComeAndGo()], ids=["tcp", "zeromq"])
def test_a_newcomer_learns_its_life_when_it_connects_and_does_without_members_that_are_dead(contract: SocketMembers) -> None:
    with contract.make_world(3) as wires:
        members = [Member(wire) for wire in wires]
        dead, peers = peer_of(wires[2]), [peer_of(wire) for wire in wires if isinstance(wire, FramedWire)]  # type: ignore[arg-type]
        wires[2].abandon()
        in_turns(*members[:2], until=lambda: all(2 in wire.lost for wire in wires[:2]), what="the death")
        newcomer = contract.newcomer(wires, 3, 0)
        assert isinstance(newcomer, FramedWire)
        mine = Peer(3, 3, "here", newcomer.address, os.getpid(), generation=7)
        for wire in wires[:2]:
            wire.admit(mine)
        joining = threading.Thread(target=newcomer.connect, args=([*peers, mine], NONCE), daemon=True)
        joining.start()
        in_turns(*members[:2], until=lambda: not joining.is_alive(), what="the newcomer")
        assert newcomer.lost.keys() == {dead.rank} and newcomer.joined_in(3) == 7
        assert [wire.joined_in(3) for wire in wires[:2]] == [7, 7]
        exchange(*members[:2], Member(newcomer), number=1)
        contract.close_all([*members[:2], Member(newcomer)])
