"""Members that come back, event by event; then with a real coordinator and a real roster."""

from __future__ import annotations

import dataclasses
import queue
import threading
from typing import Any

import msgspec
import pytest

from launching.test_membership import HOST, NONCE, join_of, name
from stretto.launching.coordinator import Lasting, make_membership, open_coordinator
from stretto.launching.detect import Launch
from stretto.launching.introduce import introduce
from stretto.launching.introduction_messages import (
    CHECKER,
    Check,
    Checked,
    Ended,
    Leave,
    News,
    Note,
    Refused,
    Table,
    Waiting,
    WatchReturns,
)
from stretto.launching.lasting_membership import DEAD_S, LONELY_S, LastingMembership
from stretto.launching.membership import Phase
from stretto.launching.peers import Peer
from stretto.launching.return_watch import ReturnWatch
from stretto.protocol.machine import SendMessage
from stretto.timeouts import Timeouts

PATIENCE_S = 20.0


def hear(membership: LastingMembership, source: Any, message: Any, now: float = 0.0) -> dict[Any, Any]:
    actions = membership.on_message(now, source, message, memoryview(b""))
    return {action.to: action.header for action in actions if isinstance(action, SendMessage)}


def formed(size: int = 3, lonely_s: float | None = LONELY_S) -> LastingMembership:
    membership = LastingMembership(size, HOST, encrypted=True, nonce=NONCE, lonely_s=lonely_s)
    for rank in range(size):
        hear(membership, name(rank), join_of(rank, size))
    for rank in range(size):
        join = join_of(rank, size)
        hear(membership, CHECKER, Checked(Check(rank, join.token, join.address), None))
    assert membership.phase is Phase.FORMED
    return membership


def another(rank: int, size: int = 3, life: int = 1) -> Any:
    return join_of(rank, size, f"again{life}", restart=life, address=f"10.0.0.{rank + 1}:{5000 + life}")


def test_who_comes_back_is_told_of_all_and_those_who_watch_of_it() -> None:
    membership = formed()
    assert hear(membership, name(0), WatchReturns(0, 0)) == {}
    told = hear(membership, b"new", another(1))

    assert isinstance(told[b"new"], Table) and [peer.generation for peer in told[b"new"].peers] == [0, 1, 0]
    assert told[b"new"].nonce == NONCE and told[b"new"].peers[1].address == "10.0.0.2:5001"
    assert told == {b"new": told[b"new"], name(0): News([told[b"new"].peers[1]])}


def test_generations_are_counted_over_all_ranks_and_who_asks_later_hears_of_all_of_them() -> None:
    membership = formed()
    hear(membership, b"a", another(1))
    hear(membership, b"b", another(2))
    hear(membership, b"c", another(1, life=2))

    assert [(peer.rank, peer.generation) for peer in hear(membership, name(0), WatchReturns(0, 0))[name(0)].peers] == [
        (1, 3),
        (2, 2),
    ]
    assert [peer.rank for peer in hear(membership, name(0), WatchReturns(0, 2))[name(0)].peers] == [1]
    assert hear(membership, b"c", WatchReturns(1, 3)) == {}
    assert isinstance(hear(membership, b"c", another(1, life=2))[b"c"], Table), "said twice"


def test_a_rank_that_lives_is_taken_until_its_process_is_known_to_have_ended() -> None:
    membership = formed()
    again = msgspec.structs.replace(join_of(1, 3, "by hand"), pid=77)
    refused = hear(membership, b"new", again)[b"new"]
    assert isinstance(refused, Refused) and "rank 1 is taken" in refused.reason

    hear(membership, b"launcher", Ended(1, 1, HOST, 1001, 0, "was killed by SIGKILL"))
    assert hear(membership, b"new", again)[b"new"].peers[1].generation == 1


def test_nobody_comes_back_to_a_job_that_has_not_formed_or_does_not_last() -> None:
    forming = LastingMembership(3, HOST, encrypted=True, nonce=NONCE)
    hear(forming, name(0), join_of(0, 3))
    assert isinstance(hear(forming, b"new", another(0))[b"new"], Waiting)
    assert type(make_membership(3, True, Lasting.NO)) is not LastingMembership


def growing(size: int = 2, room: int = 2) -> LastingMembership:
    return LastingMembership(size, HOST, encrypted=True, nonce=NONCE, lonely_s=LONELY_S, room=room)


def form(membership: LastingMembership, size: int = 2) -> dict[Any, Any]:
    told: dict[Any, Any] = {}
    for rank in range(size):
        told |= hear(membership, name(rank), join_of(rank, size))
    for rank in range(size):
        join = join_of(rank, size)
        told |= hear(membership, CHECKER, Checked(Check(rank, join.token, join.address), None))
    return told


def test_where_there_is_room_others_join_later_and_come_back_like_those_from_the_beginning() -> None:
    membership = growing()
    form(membership)
    hear(membership, name(0), WatchReturns(0, 0))
    told = hear(membership, b"new", join_of(3, 2))
    assert [(peer.rank, peer.generation) for peer in told[b"new"].peers] == [(0, 0), (1, 0), (3, 1)]
    assert told[name(0)] == News([told[b"new"].peers[2]])
    assert [peer.rank for peer in hear(membership, b"another", join_of(2, 2))[b"another"].peers] == [0, 1, 2, 3]
    assert hear(membership, b"new", WatchReturns(3, 1))[b"new"].peers[0].rank == 2

    stranger = hear(membership, b"x", msgspec.structs.replace(join_of(3, 2, "else"), pid=77))[b"x"]
    assert isinstance(stranger, Refused) and "rank 3 is taken" in stranger.reason
    again = hear(membership, b"again", another(3, 2))[b"again"]
    assert [(peer.rank, peer.generation) for peer in again.peers] == [(0, 0), (1, 0), (2, 2), (3, 3)]
    beyond = hear(membership, b"x", join_of(4, 2))[b"x"]
    assert isinstance(beyond, Refused) and "has ranks 0 to 3" in beyond.reason


def test_who_comes_before_the_job_has_formed_does_not_count_and_is_let_in_when_it_has() -> None:
    membership = growing()
    waiting = hear(membership, b"early", join_of(2, 2))
    assert waiting == {b"early": Waiting([0, 1])} and membership.phase is Phase.FORMING
    taken = hear(membership, b"x", msgspec.structs.replace(join_of(2, 2, "else"), pid=77))[b"x"]
    assert isinstance(taken, Refused) and "rank 2 is taken" in taken.reason
    hear(membership, b"gone", join_of(3, 2))
    hear(membership, b"gone", Leave(3, HOST, 1003))
    told = form(membership)
    assert [peer.rank for peer in told[b"early"].peers] == [0, 1, 2] and told[b"early"].peers[2].generation == 1
    assert b"gone" not in told and [peer.rank for peer in told[name(0)].peers] == [0, 1]


def test_who_comes_too_early_to_a_job_that_fails_to_form_is_told_why() -> None:
    membership = growing()
    hear(membership, b"early", join_of(2, 2))
    hear(membership, name(0), join_of(0, 2))
    told = hear(membership, name(0), Leave(0, HOST, 1000))
    assert isinstance(told[b"early"], Refused) and "gave up before all 2 workers had met" in told[b"early"].reason
    late = hear(membership, b"late", join_of(3, 2))[b"late"]
    assert isinstance(late, Refused) and late == told[b"early"]


def test_it_ends_when_the_last_that_lives_has_left_or_nobody_has_watched_for_long() -> None:
    membership = formed()
    assert not membership.needs_parent
    for rank in range(3):
        hear(membership, name(rank), WatchReturns(rank, 0), now=1.0)
    hear(membership, name(0), Leave(0, HOST, 1000), now=2.0)
    hear(membership, name(1), WatchReturns(1, 0), now=1.5 + DEAD_S)
    assert not membership.finished
    hear(membership, name(1), Leave(1, HOST, 1001), now=2.0 + DEAD_S)  # rank 2 has been killed
    assert membership.finished

    membership = formed()
    membership.on_timer(LONELY_S, "lonely")
    assert membership.finished


def test_an_earlier_life_that_leaves_late_does_not_end_what_the_later_one_watches() -> None:
    membership = formed(2)
    hear(membership, b"again", msgspec.structs.replace(another(1, 2), pid=2001))
    hear(membership, b"again", WatchReturns(1, 1), now=1.0)
    hear(membership, name(1), Leave(1, HOST, 1001), now=1.5)
    assert not membership.finished
    hear(membership, b"again", Leave(1, HOST, 2001), now=2.0)
    assert membership.finished


def test_who_asks_again_for_its_table_has_the_notes_too() -> None:
    """The first answer is lost when the connection breaks, and the worker says the same on the next one."""
    membership = formed()
    hear(membership, name(0), Note("servers 2", "10.0.0.1:7000"))
    first = hear(membership, b"one", another(1))[b"one"]
    assert hear(membership, b"two", another(1)) == {b"two": first} and first.notes == {"servers 2": "10.0.0.1:7000"}


@pytest.mark.parametrize(
    "message", [WatchReturns(-1, 0), WatchReturns(3, 0), WatchReturns(9, -5), Leave(9, HOST, 1), Ended(9, 0, HOST, 1, 0, "")]
)
def test_nonsense_changes_nothing(message: Any) -> None:
    membership = formed()
    assert hear(membership, b"x", message) == {} and not membership.finished


def test_a_roster_hears_of_everybody_who_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = bytes(range(32))
    membership = make_membership(2, False, Lasting.YES)
    coordinator = open_coordinator("127.0.0.1:0", 2, secret, False, membership)
    ended = threading.Event()
    serving = threading.Thread(target=coordinator.serve, args=(ended.is_set,), daemon=True)
    serving.start()
    launches = [Launch(rank, 2, rank, 2, coordinator.address, secret, False, "stretto") for rank in range(2)]
    tables: list[Any] = [None, None]
    timeouts = Timeouts(meet_s=PATIENCE_S)

    def join(rank: int) -> None:
        tables[rank] = introduce(launches[rank], coordinator.address, timeouts)  # an address that answers

    try:
        threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        news: queue.Queue[list[Peer]] = queue.Queue()
        roster = ReturnWatch(launches[0], 0, lambda peers: news.put(list(peers)))
        for life in (1, 2):
            table = introduce(dataclasses.replace(launches[1], restart=life), coordinator.address, timeouts)
            assert table.peers[1].generation == life and table.nonce == tables[0].nonce
            assert news.get(timeout=PATIENCE_S) == [table.peers[1]]
        roster.stop()
        roster.stop()
        assert news.empty()
    finally:
        ended.set()
        serving.join(PATIENCE_S)
        coordinator.close()
