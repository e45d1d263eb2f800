"""Members that leave, die, come back and are new: what every wire must do that lets them.

    class TestThreadsLetMembersComeAndGo(MembersContract):
        @contextmanager
        def make_world(self, size): ...          wires that admit others later
        def newcomer(self, wires, rank, generation): ...   the wire of one that comes, connected to nobody yet
        def peer(self, wire): ...                how the others know it
        def join(self, wire, members): ...       it connects; returns when all have admitted it

One thread drives the wires of all members in turns; a newcomer that has to wait until it is admitted has one of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest

from stretto.errors import ConfigurationError, PeerLost
from stretto.launching.peers import Peer
from stretto.wire.base import Handle, Tag, Wire
from wire.contract import receive, send

TAG = Tag(1, 0, 0)
TOPIC = 40
CHANNEL = 6
LONG = 5000  # times eight bytes
View = tuple[list[int], list[int], int]


class Member:
    """One life of a worker, and what it was told."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.views: list[View] = []
        self.heard: list[tuple[int, bytes]] = []
        self.served: list[tuple[int, bytes]] = []
        wire.on_view(lambda *view: self.views.append(view))
        wire.serve(CHANNEL, lambda source, header, payload: self.served.append((source, bytes(payload))), 1 << 20)


def in_turns(*members: Member, until: Callable[[], bool], what: str) -> None:
    """Drive several wires from this thread until something is true."""
    for _ in range(20_000):
        if until():
            return
        for member in members:
            member.wire.progress(0.002)
    raise AssertionError(f"{what} did not come about")


def turns(number: int, *members: Member) -> None:
    for _ in range(number):
        for member in members:
            member.wire.progress(0.002)


def exchange(*members: Member, number: int) -> None:
    """Everybody sends to everybody, posts and offers: it arrives, once, from the right one."""
    handles, arrived = [], {}
    before = {member.wire.rank: (len(member.heard), len(member.served)) for member in members}
    for member in members:
        member.wire.listen(TOPIC, lambda source, body, member=member: member.heard.append((source, body)))  # type: ignore[misc]
        for other in members:
            if other is not member:
                me, peer, words = member.wire, other.wire.rank, f"{number} from {member.wire.rank}".encode()
                long = words * LONG  # goes through shared memory from the second time on, where there is some
                handles += [send(me, peer, Tag(2, number, 0), long), me.offer(peer, CHANNEL, b"", memoryview(long))]
                me.post(peer, TOPIC, words)
                handle, arrived[me.rank, peer] = receive(me, peer, Tag(2, number, 0), len(long))
                handles.append(handle)
    others = len(members) - 1

    def all_here() -> bool:
        return all(handle.done for handle in handles) and all(
            (len(member.heard), len(member.served)) == tuple(count + others for count in before[member.wire.rank])
            for member in members
        )

    in_turns(*members, until=all_here, what=f"exchange {number}")
    assert [handle.error for handle in handles if handle.error] == []
    for (_, peer), got in arrived.items():
        assert got == [f"{number} from {peer}".encode() * LONG]
    for member in members:
        expected = sorted((each.wire.rank, f"{number} from {each.wire.rank}".encode()) for each in members if each is not member)
        assert sorted(member.heard[-others:]) == expected
        assert sorted(member.served[-others:]) == [(peer, words * LONG) for peer, words in expected]


class MembersContract:
    def make_world(self, size: int) -> AbstractContextManager[Sequence[Wire]]:
        raise NotImplementedError

    def newcomer(self, wires: Sequence[Wire], rank: int, generation: int) -> Wire:
        raise NotImplementedError

    def peer(self, wire: Any) -> Peer:
        raise NotImplementedError

    def join(self, wire: Wire, members: Sequence[Wire]) -> None:
        """Nothing to wait for, where a newcomer's first words are kept until it is admitted."""

    def let_in(self, members: Sequence[Member], rank: int, generation: int, *, admit_first: bool = False) -> Member:
        """A worker comes, and all members admit it, before or after it has knocked."""
        wires = [member.wire for member in members]
        wire = self.newcomer(wires, rank, generation)
        if admit_first:
            for member in members:
                member.wire.admit(self.peer(wire))
        problems: list[BaseException] = []

        def come() -> None:
            try:
                self.join(wire, wires)
            except BaseException as problem:
                problems.append(problem)

        coming = threading.Thread(target=come, name=f"newcomer {rank}", daemon=True)
        coming.start()
        if not admit_first:
            for member in members:
                member.wire.admit(self.peer(wire))
                assert rank in member.wire.lost and rank not in member.wire.peers
        in_turns(*members, until=lambda: not coming.is_alive(), what="the arrival")
        assert not problems, problems
        coming.join()
        made = Member(wire)
        in_turns(*members, made, until=lambda: all(rank in each.wire.peers for each in members), what="the view")
        for member in members:
            assert member.views[-1] == ([rank], [], generation) and member.wire.generation == generation
            assert rank not in member.wire.lost
        return made

    def test_somebody_new_is_let_in_and_takes_part(self) -> None:
        with self.make_world(3) as wires:
            members = [Member(wire) for wire in wires]
            exchange(*members, number=0)
            for generation, first in ((1, False), (2, True)):
                members.append(self.let_in(members, 2 + generation, generation, admit_first=first))
                exchange(*members, number=generation)
            for member in members:
                assert sorted([member.wire.rank, *member.wire.peers]) == [0, 1, 2, 3, 4]
            self.close_all(members)

    @pytest.mark.parametrize("how", ["dies", "leaves"])
    def test_a_rank_that_comes_back_is_another_peer(self, how: str) -> None:
        """It sends one message of each kind, which are not looked at, and goes. What comes later is from its new life alone."""
        with self.make_world(3) as wires:
            members = [Member(wire) for wire in wires]
            exchange(*members, number=0)
            former, stayers = members[2], members[:2]
            for rank in (0, 1):
                sent = send(former.wire, rank, TAG, b"of old")
                former.wire.post(rank, TOPIC + 1, b"of old")
                in_turns(*members, until=lambda sent=sent: sent.done, what="the last words")  # type: ignore[misc]
            if how == "dies":
                former.wire.abandon()
            else:
                leaving = threading.Thread(target=former.wire.close, daemon=True)
                leaving.start()
                in_turns(*stayers, until=lambda: not leaving.is_alive(), what="the goodbye")
            for member in stayers:  # they wait for it, and so learn that it has gone
                handle, _ = receive(member.wire, 2, Tag(3, 0, 0), 1)
                in_turns(*stayers, until=lambda handle=handle: handle.done, what="the loss")  # type: ignore[misc]
                assert isinstance(handle.error, PeerLost) and member.wire.said_goodbye(2) == (how == "leaves")
                member.wire.retire(2, 1)
                assert member.views == [([], [2], 1)] and member.wire.peers == [1 - member.wire.rank]
                assert 2 in member.wire.lost
            exchange(*stayers, number=1)
            successor = self.let_in(stayers, 2, 2)
            exchange(*stayers, successor, number=2)
            self.check_nothing_of_old(stayers, successor)
            self.close_all([*stayers, successor])

    def check_nothing_of_old(self, stayers: Sequence[Member], successor: Member) -> None:
        heard: list[bytes] = []
        for member in stayers:
            member.wire.listen(TOPIC + 1, lambda source, body: heard.append(body))
            handle, arrived = receive(member.wire, 2, TAG, 5)
            sent = send(successor.wire, member.wire.rank, TAG, b"fresh")
            successor.wire.post(member.wire.rank, TOPIC + 1, b"fresh")
            self._finish(handle, sent, *stayers, successor)
            assert arrived == [b"fresh"]
        in_turns(*stayers, successor, until=lambda: len(heard) == 2, what="the posts")
        assert heard == [b"fresh", b"fresh"]

    def _finish(self, received: Handle, sent: Handle, *members: Member) -> None:
        in_turns(*members, until=lambda: received.done and sent.done, what="the message")

    def test_a_member_that_is_retired_alive_is_out(self) -> None:
        with self.make_world(3) as wires:
            members = [Member(wire) for wire in wires]
            exchange(*members, number=0)
            waiting, _ = receive(members[0].wire, 2, TAG, 1)
            for member in members[:2]:
                member.wire.retire(2, 1)
            assert isinstance(waiting.error, PeerLost) and "retired in generation 1" in str(waiting.error)
            assert isinstance(send(members[1].wire, 2, TAG, b"x").error, PeerLost)
            exchange(*members[:2], number=1)
            handles = [receive(members[2].wire, rank, TAG, 1)[0] for rank in (0, 1)]
            in_turns(*members, until=lambda: all(handle.done for handle in handles), what="the end of the retired member's waits")
            assert all("it retired this worker in generation 1" in str(handle.error) for handle in handles)
            assert not any(members[2].wire.said_goodbye(rank) for rank in (0, 1))  # the job goes on, without it
            members[2].wire.abandon()
            successor = self.let_in(members[:2], 2, 5)
            exchange(*members[:2], successor, number=2)
            self.close_all([*members[:2], successor])

    @pytest.mark.parametrize("retired", [1, 2], ids=["the source", "another"])
    @pytest.mark.parametrize("where", ["on_message", "listener", "consume", "on_lost"])
    def test_a_callback_may_retire_any_member(self, where: str, retired: int) -> None:
        with self.make_world(3) as wires:
            members = [Member(wire) for wire in wires]
            for number in range(2):
                exchange(*members, number=number)  # from now on long messages go through shared memory, where there is some
            me, source, bystander = members
            left: View = ([], [retired], 1)

            def retire(*_: object) -> None:
                if retired in me.wire.peers:
                    me.wire.retire(retired, 1)

            long = memoryview(bytes(8 * LONG))
            if where == "on_message":
                me.wire.serve(CHANNEL + 1, retire, 1 << 20)
                source.wire.offer(0, CHANNEL + 1, b"", long)
            elif where == "listener":
                me.wire.listen(TOPIC + 2, retire)
                source.wire.post(0, TOPIC + 2, b"")
            elif where == "consume":
                me.wire.recv(1, TAG, long.nbytes, 0, retire)
                source.wire.send(long, 0, TAG, 0)
            else:
                me.wire.on_lost(retire)
                source.wire.abandon()
            driven = [me, bystander] if where == "on_lost" else members
            in_turns(*driven, until=lambda: left in me.views, what="the retirement")
            turns(10, *driven)
            assert me.views == [left] and retired not in me.wire.peers
            if where != "on_lost":
                exchange(me, members[3 - retired], number=2)

    def test_two_die_together_and_the_first_loss_retires_both(self) -> None:
        with self.make_world(3) as wires:
            members = [Member(wire) for wire in wires]
            exchange(*members, number=0)
            me = members[0]

            def retire_all(_: PeerLost) -> None:
                for rank in me.wire.peers:
                    if rank in me.wire.peers:  # still
                        me.wire.retire(rank, 1)

            me.wire.on_lost(retire_all)
            for member in members[1:]:
                member.wire.abandon()
            in_turns(me, until=lambda: not me.wire.peers, what="the losses")
            turns(10, me)
            assert sorted(me.views) == [([], [1], 1), ([], [2], 1)]

    def test_nothing_is_handed_over_of_a_member_after_a_message_of_its_has_retired_it(self) -> None:
        with self.make_world(2) as wires:
            members = [Member(wire) for wire in wires]
            for number in range(2):
                exchange(*members, number=number)
            me, source = members
            got: list[bytes] = []

            def on_message(rank: int, header: bytes, payload: memoryview) -> None:
                got.append(header)
                if rank in me.wire.peers:
                    me.wire.retire(rank, 1)

            me.wire.serve(CHANNEL + 1, on_message, 1 << 20)
            turns(5, *members)
            source.wire.offer(0, CHANNEL + 1, b"long", memoryview(bytes(8 * LONG)))
            for _ in range(3):
                source.wire.offer(0, CHANNEL + 1, b"short", memoryview(b""))
            in_turns(*members, until=lambda: bool(me.views), what="the retirement")
            turns(10, *members)
            assert got == [b"long"]

    def test_a_successor_takes_the_place_of_a_life_that_nobody_has_missed_yet(self) -> None:
        with self.make_world(2) as wires:
            members = [Member(wire) for wire in wires]
            exchange(*members, number=0)
            lost: list[PeerLost] = []
            members[0].wire.on_lost(lost.append)
            successor = self.let_in(members[:1], 1, 1)
            assert [error.rank for error in lost] == [1] and "took its place in generation 1" in str(lost[0])
            exchange(members[0], successor, number=1)
            send(members[1].wire, 0, TAG, b"of old")  # the former life has missed nothing either, and speaks on
            members[1].wire.post(0, TOPIC, b"of old")
            exchange(members[0], successor, number=2)
            members[1].wire.abandon()
            exchange(members[0], successor, number=3)
            handle, arrived = receive(members[0].wire, 1, TAG, 5)
            self._finish(handle, send(successor.wire, 0, TAG, b"fresh"), members[0], successor)
            assert arrived == [b"fresh"] and len(lost) == 1
            self.close_all([members[0], successor])

    def test_what_makes_no_sense_is_refused(self) -> None:
        with self.make_world(2) as wires:
            me = wires[0]
            with pytest.raises(ConfigurationError, match="a later generation"):
                me.admit(Peer(1, 1, "here", "127.0.0.1:1", 1, generation=0))
            with pytest.raises(ConfigurationError, match="does not admit itself"):
                me.admit(Peer(0, 0, "here", "127.0.0.1:1", 1, generation=9))
            with pytest.raises(ConfigurationError, match=r"not a member; they are \[0, 1\]"):
                me.retire(7, 1)
            me.retire(1, 1)
            with pytest.raises(ConfigurationError, match=r"they are \[0\]"):
                me.retire(1, 1)
            for wire in wires:
                wire.abandon()

    def close_all(self, members: Sequence[Member]) -> None:
        """Each closes in a thread of its own, for a goodbye is answered."""
        closing = [threading.Thread(target=member.wire.close, daemon=True) for member in members]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(30)
        assert not any(thread.is_alive() for thread in closing)
