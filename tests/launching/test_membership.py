"""The state machine of the introduction, event by event; no socket, no clock."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.launching.introduction_messages import (
    CHECKER,
    DOOR,
    Ask,
    Check,
    Checked,
    Ended,
    FromWorker,
    Join,
    Leave,
    Refusal,
    Refused,
    Table,
    Waiting,
    Why,
)
from stretto.launching.membership import LINGER_S, Membership, Phase
from stretto.launching.peers import Peer, ranks_text
from stretto.protocol.machine import Actions, Machine, SendMessage, SetTimer
from stretto.protocol.timers import Timers
from stretto.testing.faults import Fault, Kill, Pause
from stretto.testing.network_model import ExponentialDelay, Link, NetworkModel
from stretto.testing.virtual_network import VirtualNetwork

HOST, ELSEWHERE = "alpha/11", "beta/22"
NONCE = b"drawn by the coordinator"


def join_of(
    rank: int, size: int, token: str = "", *, host: str = HOST, address: str = "", patience_s: float = 10,
    local_rank: int | None = None, restart: int = 0, encrypted: bool = True,
) -> Join:  # fmt: skip
    return Join(
        rank=rank, world_size=size, local_rank=rank if local_rank is None else local_rank, host=host, interface="eth1",
        pid=1000 + rank, address=address or f"10.0.0.{rank + 1}:4242", token=token or f"t{rank}",
        patience_s=patience_s, meet_s=patience_s + 1,
        pid_namespace="4026531836", encrypted=encrypted, restart=restart,
    )  # fmt: skip


def name(rank: int) -> bytes:
    return b"worker-%d" % rank


class Driven:
    """A membership and its clock: events by name, timers as they are due, and what is sent to workers or to be checked."""

    def __init__(self, size: int) -> None:
        self.membership = Membership(size, HOST, encrypted=True, nonce=NONCE)
        self.timers: Timers[str] = Timers()

    def hear(self, source: bytes | str, header: Any, now: float = 0.0) -> list[SendMessage]:
        return self._sent(self.membership.on_message(now, source, header, memoryview(b"")), now)

    def join(self, sender: bytes, message: Join, now: float) -> list[SendMessage]:
        return self.hear(sender, message, now)

    def ask(self, sender: bytes, message: Ask) -> list[SendMessage]:
        return self.hear(sender, message)

    def leave(self, message: Leave, now: float) -> list[SendMessage]:
        return self.hear(b"leaving", message, now)

    def ended(self, message: Ended, now: float) -> list[SendMessage]:
        return self.hear(b"launcher", message, now)

    def reachable(self, rank: int, token: str) -> list[SendMessage]:
        return self.hear(CHECKER, Checked(Check(rank, token, ""), None))

    def unreachable(self, rank: int, token: str, why: str, now: float) -> list[SendMessage]:
        return self.hear(CHECKER, Checked(Check(rank, token, ""), why), now)

    def tick(self, now: float) -> list[SendMessage]:
        sent: list[SendMessage] = []
        self.timers.fire(now, lambda name: sent.extend(self._sent(self.membership.on_timer(now, name), now)))
        return sent

    def finished(self, now: float) -> bool:
        self.tick(now)
        return self.membership.finished

    def _sent(self, actions: Actions, now: float) -> list[SendMessage]:
        sent = []
        for action in actions:
            if isinstance(action, SetTimer):
                self.timers.set(action.name, None if action.after_s is None else now + action.after_s)
            elif isinstance(action, SendMessage):
                sent.append(action)
        return sent

    @property
    def phase(self) -> Phase:
        return self.membership.phase

    @property
    def missing(self) -> list[int]:
        return self.membership.missing

    @property
    def failure(self) -> str | None:
        return self.membership.failure


def messages(actions: list[SendMessage]) -> dict[Any, object]:
    return {action.to: action.header for action in actions if isinstance(action.to, bytes)}


def joined(size: int, *ranks: int) -> Driven:
    membership = Driven(size)
    for rank in ranks:
        membership.join(name(rank), join_of(rank, size), now=0.0)
    return membership


def refusal(actions: list[SendMessage], to: bytes) -> Refused:
    message = messages(actions)[to]
    assert isinstance(message, Refused)
    return message


def test_a_first_worker_is_told_who_is_missing_and_its_address_is_checked() -> None:
    actions = Driven(3).join(name(1), join_of(1, 3), now=0.0)

    assert actions == [SendMessage(name(1), Waiting([0, 2])), SendMessage(CHECKER, Check(1, "t1", "10.0.0.2:4242"))]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_the_table_goes_to_all_when_all_have_joined_and_answer(size: int) -> None:
    membership = joined(size, *range(size))
    for rank in range(size - 1):
        assert membership.reachable(rank, f"t{rank}") == []

    sent = messages(membership.reachable(size - 1, f"t{size - 1}"))

    peers = [Peer(rank, rank, HOST, f"10.0.0.{rank + 1}:4242", 1000 + rank, "4026531836") for rank in range(size)]
    assert sent == {name(rank): Table(peers, NONCE) for rank in range(size)}
    assert membership.phase is Phase.FORMED


def test_a_second_worker_with_a_taken_rank_is_told_who_has_it_and_the_first_is_left_alone() -> None:
    membership = joined(2, 1)

    actions = membership.join(b"second", join_of(1, 2, token="other", host=ELSEWHERE), now=0.0)

    assert list(messages(actions)) == [b"second"]
    reason = refusal(actions, b"second").reason
    assert "rank 1 is taken: pid 1001 on host alpha" in reason and "pid 1001 on host beta" in reason
    assert membership.phase is Phase.FORMING


def test_while_the_job_forms_restarted_workers_replace_all_that_their_launcher_had_started_before() -> None:
    # Two nodes of two workers: rank 2 of the second one never came, and rank 3 was ended with it.
    membership = Driven(4)
    for rank in (0, 1, 3):
        membership.join(name(rank), join_of(rank, 4, local_rank=rank % 2), now=0.0)
        membership.reachable(rank, f"t{rank}")

    membership.join(b"again 2", join_of(2, 4, token="new2", local_rank=0, restart=1), now=1.0)
    assert membership.missing == [3]
    assert membership.reachable(2, "new2") == []  # no table with an address at which nobody listens any more
    membership.join(b"again 3", join_of(3, 4, token="new3", local_rank=1, restart=1), now=2.0)

    assert set(messages(membership.reachable(3, "new3"))) == {name(0), name(1), b"again 2", b"again 3"}


@pytest.mark.parametrize("ended", ["formed", "failed"])
def test_a_restarted_worker_that_comes_to_the_attempt_before_is_asked_to_wait_for_the_next_one(ended: str) -> None:
    membership = joined(3, 0, 1, 2) if ended == "formed" else joined(3, 0, 1)
    for rank in range(3):
        membership.reachable(rank, f"t{rank}")
    membership.tick(100.0)
    assert membership.phase.value == ended

    actions = membership.join(b"again", join_of(1, 3, token="new", restart=1), now=101.0)

    assert actions == [SendMessage(b"again", Waiting([0, 2]))]
    assert isinstance(messages(membership.join(b"other", join_of(1, 3, token="other"), now=101.0))[b"other"], Refused)


def test_a_repeated_join_changes_nothing_but_where_the_answer_goes() -> None:
    membership = joined(2, 0, 1)

    assert membership.join(b"reconnected", join_of(0, 2), now=1.0) == [SendMessage(b"reconnected", Waiting([]))]
    membership.reachable(0, "t0")

    assert set(messages(membership.reachable(1, "t1"))) == {b"reconnected", name(1)}


def test_a_worker_that_lost_the_table_gets_it_by_asking_or_joining_again() -> None:
    membership = joined(1, 0)
    table = messages(membership.reachable(0, "t0"))[name(0)]

    assert messages(membership.ask(b"again", Ask(0, "t0"))) == {b"again": table}
    assert messages(membership.join(b"more", join_of(0, 1), now=1.0)) == {b"more": table}


def test_a_question_from_somebody_unknown_gets_no_answer() -> None:
    assert joined(2, 0).ask(b"who", Ask(0, "wrong")) == []
    assert joined(2, 0).ask(b"who", Ask(1, "t1")) == []


@pytest.mark.parametrize(
    ("message", "kind", "says"),
    [
        (join_of(0, 5), "configuration", "told the job has 5 workers, but this rendezvous was opened for 3"),
        (join_of(3, 3), "configuration", "ranks 0 to 2"),
        (join_of(-1, 3), "configuration", "ranks 0 to 2"),
        (join_of(0, 3, address="nonsense"), "configuration", "'nonsense'"),
        (join_of(0, 3, address="10.0.0.1:0"), "configuration", "port 0"),
        (join_of(0, 3, encrypted=False), "configuration", "has encryption off, but this job was started with encryption on"),
        (join_of(0, 3, patience_s=-1), "configuration", "-1"),
        (join_of(0, 3, patience_s=float("nan")), "configuration", "nan"),
    ],
)
def test_a_worker_that_cannot_belong_is_refused_and_leaves_no_trace(message: Join, kind: str, says: str) -> None:
    membership = Driven(3)

    answer = refusal(membership.join(b"odd", message, now=0.0), b"odd")

    assert answer.kind == kind and says in answer.reason
    assert membership.missing == [0, 1, 2]


def test_at_the_deadline_every_waiting_worker_is_told_exactly_who_is_missing() -> None:
    membership = joined(4, 0, 2)
    assert membership.tick(9.9) == []

    actions = membership.tick(10.0)

    assert set(messages(actions)) == {name(0), name(2)}
    for rank in (0, 2):
        assert refusal(actions, name(rank)).reason.startswith("Ranks 1, 3 of 4 did not join within 11 s; ranks 0, 2 waited")
    assert membership.tick(11.0) == []


def test_who_comes_after_the_failure_is_told_the_same_and_the_coordinator_ends_when_all_know() -> None:
    membership = joined(3, 0, 1)
    first = refusal(membership.tick(10.0), name(0))

    assert not membership.finished(10.0)
    assert refusal(membership.join(name(2), join_of(2, 3), now=12.0), name(2)) == first
    assert membership.finished(12.0)


def test_a_failed_job_does_not_wait_for_ever_for_those_who_never_come() -> None:
    membership = joined(3, 0)
    membership.tick(10.0)

    assert not membership.finished(9.9 + LINGER_S)
    assert membership.finished(10.0 + LINGER_S)


def test_an_unreachable_address_fails_all_and_names_rank_interface_and_address() -> None:
    membership = joined(3, 0, 2)

    actions = membership.unreachable(2, "t2", "connection refused", now=1.0)

    assert set(messages(actions)) == {name(0), name(2)}
    answer = refusal(actions, name(0))
    assert answer.kind == "unreachable"
    for part in ("rank 2", "10.0.0.3:4242", "interface eth1", "host alpha", "connection refused", "STRETTO_INTERFACE"):
        assert part in answer.reason


def test_a_loopback_address_is_fine_on_one_host_and_refused_as_soon_as_there_are_two() -> None:
    membership = Driven(2)
    assert any(action.to == CHECKER for action in membership.join(name(0), join_of(0, 2, address="127.0.0.1:1"), now=0.0))

    actions = membership.join(name(1), join_of(1, 2, host=ELSEWHERE), now=0.0)

    assert refusal(actions, name(1)).reason.startswith("rank 0 on host alpha published 127.0.0.1:1")
    assert set(messages(actions)) == {name(0), name(1)}


def test_a_loopback_address_on_another_host_than_the_coordinators_is_refused_without_a_check() -> None:
    actions = Driven(1).join(name(0), join_of(0, 1, host=ELSEWHERE, address="127.0.0.1:1"), now=0.0)

    assert refusal(actions, name(0)).kind == "unreachable"
    assert len(actions) == 1


def test_all_addresses_pending_at_the_deadline_is_an_unreachable_error_that_names_them() -> None:
    membership = joined(2, 0, 1)
    membership.reachable(0, "t0")

    answer = refusal(membership.tick(10.0), name(0))

    assert answer.kind == "unreachable" and "address of rank 1 answers" in answer.reason


def test_a_worker_that_gives_up_early_ends_the_waiting_of_the_others() -> None:
    membership = joined(3, 0, 1)

    actions = membership.leave(Leave(1, HOST, 1001), now=1.0)

    assert set(messages(actions)) == {name(0)}
    assert "Rank 1 (pid 1001 on host alpha" in refusal(actions, name(0)).reason


def ended(rank: int, *, pid: int | None = None, local_rank: int | None = None, restart: int = 0) -> Ended:
    local_rank = rank if local_rank is None else local_rank
    return Ended(rank, local_rank, HOST, 1000 + rank if pid is None else pid, restart, "exited with code 0")


def test_a_worker_that_ended_without_joining_is_named_to_those_who_wait_and_to_those_who_come() -> None:
    membership = joined(4, 0, 1)

    actions = membership.ended(ended(2), now=1.0)

    assert set(messages(actions)) == {name(0), name(1)}
    reason = refusal(actions, name(0)).reason
    assert "Rank 2 of 4 (pid 1002 on host alpha) exited with code 0 without having called stretto.init()" in reason
    assert "so ranks 0, 1 would wait" in reason
    assert refusal(membership.join(name(3), join_of(3, 4), now=2.0), name(3)).reason == reason


@pytest.mark.parametrize("size", [2, 3, 7])
def test_workers_that_all_end_without_joining_are_no_failure_until_one_joins(size: int) -> None:
    membership = Driven(size)
    for rank in range(1, size):
        assert membership.ended(ended(rank), now=1.0) == []
    assert membership.failure is None

    assert "Rank 1 of" in refusal(membership.join(name(0), join_of(0, size), now=2.0), name(0)).reason


def test_a_worker_that_ended_after_joining_ends_the_waiting_and_another_process_with_its_rank_does_not() -> None:
    membership = joined(3, 0, 1)

    assert membership.ended(ended(1, pid=9999), now=1.0) == []
    assert membership.phase is Phase.FORMING
    actions = membership.ended(ended(1), now=1.0)
    assert set(messages(actions)) == {name(0)}
    assert "exited with code 0 before all workers had met, so rank 0 would" in refusal(actions, name(0)).reason


def test_an_end_that_a_restart_has_overtaken_is_forgotten() -> None:
    membership = Driven(4)
    membership.ended(ended(3, local_rank=1), now=1.0)

    again = membership.join(name(2), join_of(2, 4, local_rank=0, restart=1), now=2.0)
    assert isinstance(messages(again)[name(2)], Waiting)
    assert membership.ended(ended(3, local_rank=1), now=3.0) == []  # the same news, late
    assert membership.phase is Phase.FORMING
    assert membership.ended(ended(3, local_rank=1, restart=1), now=4.0) != []


def test_ends_after_the_job_has_formed_and_of_ranks_that_do_not_exist_change_nothing() -> None:
    membership = joined(2, 0)
    assert membership.ended(ended(7), now=1.0) == membership.ended(ended(-1), now=1.0) == []
    membership.join(name(1), join_of(1, 2), now=1.0)
    for rank in range(2):
        membership.reachable(rank, f"t{rank}")

    assert membership.ended(ended(1), now=2.0) == []
    assert membership.phase is Phase.FORMED


def test_the_coordinator_ends_when_all_have_left_and_not_before() -> None:
    membership = joined(2, 0, 1)
    for rank in range(2):
        membership.reachable(rank, f"t{rank}")

    assert membership.leave(Leave(0, HOST, 1000), now=1.0) == []
    assert membership.leave(Leave(0, HOST, 1000), now=1.0) == []  # twice is once
    assert membership.leave(Leave(1, HOST, 9999), now=1.0) == []  # somebody else's goodbye
    assert not membership.finished(1.0)
    membership.leave(Leave(1, HOST, 1001), now=2.0)
    assert membership.finished(2.0)


def test_a_late_worker_finds_its_rank_taken() -> None:
    membership = joined(1, 0)
    membership.reachable(0, "t0")
    membership.leave(Leave(0, HOST, 1000), now=1.0)

    assert "has already left the job" in refusal(membership.join(b"late", join_of(0, 1, token="x"), now=2.0), b"late").reason


def test_results_of_checks_that_nobody_waits_for_are_ignored() -> None:
    membership = joined(2, 0)

    assert membership.reachable(1, "t1") == []
    assert membership.reachable(0, "old") == []
    assert membership.unreachable(0, "old", "refused", now=0.0) == []
    assert membership.phase is Phase.FORMING


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([2], "rank 2"), ([3, 2], "ranks 2, 3"), ([1, 4, 5, 6, 7], "ranks 1, 4-7"), (range(1000), "ranks 0-999")],
)
def test_ranks_are_written_short(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


EVENTS = st.tuples(
    st.sampled_from(["join", "join", "impostor", "ask", "reachable", "reachable", "unreachable", "leave", "ended", "tick"]),
    st.integers(-1, 4),
)


def apply(membership: Driven, kind: str, rank: int, size: int, now: float) -> list[SendMessage]:
    match kind:
        case "join":
            return membership.join(name(rank), join_of(rank, size), now)
        case "impostor":
            return membership.join(b"impostor", join_of(rank, size, token="evil"), now)
        case "ask":
            return membership.ask(name(rank), Ask(rank, f"t{rank}"))
        case "reachable":
            return membership.reachable(rank, f"t{rank}")
        case "unreachable":
            return membership.unreachable(rank, f"t{rank}", "refused", now)
        case "leave":
            return membership.leave(Leave(rank, HOST, 1000 + rank), now)
        case "ended":
            return membership.ended(ended(rank), now)
        case _:
            return membership.tick(now)


@settings(max_examples=300, deadline=None)
@given(size=st.integers(1, 4), events=st.lists(EVENTS, max_size=40))
def test_in_any_order_of_events_tables_are_whole_equal_and_never_follow_a_failure(
    size: int, events: list[tuple[str, int]]
) -> None:
    membership = Driven(size)
    tables: list[Table] = []
    seen_join: set[int] = set()
    seen_reach: set[int] = set()
    failed = False
    for now, (kind, rank) in enumerate(events):
        if kind in ("join", "impostor") and 0 <= rank < size:
            seen_join.add(rank)
        if kind == "reachable" and rank in seen_join:
            seen_reach.add(rank)
        sent = messages(apply(membership, kind, rank, size, now / 4))
        new = [message for message in sent.values() if isinstance(message, Table)]
        assert not (failed and new)
        if new:
            assert seen_join == seen_reach == set(range(size))
        tables += new
        failed = failed or membership.phase is Phase.FAILED
    assert all(table == tables[0] and len(table.peers) == size for table in tables)
    assert (membership.failure is not None) == failed


@settings(max_examples=100, deadline=None)
@given(order=st.permutations(range(5)), checks=st.permutations(range(5)))
def test_the_order_of_arrival_does_not_matter(order: list[int], checks: list[int]) -> None:
    membership = joined(5, *order)
    sent: dict[bytes, object] = {}
    for rank in checks:
        sent |= messages(membership.reachable(rank, f"t{rank}"))

    assert set(sent) == {name(rank) for rank in range(5)}
    assert len({repr(message) for message in sent.values()}) == 1


def test_workers_that_wait_hear_who_was_turned_away_and_the_failure_says_what_to_do_about_it() -> None:
    membership = joined(3, 0)
    assert messages(membership.ask(name(0), Ask(0, "t0")))[name(0)] == Waiting([1, 2])
    membership.hear(DOOR, Refusal(Why.SECRET, "10.0.0.8"))
    one = "1 connection attempt was refused because it did not know the job secret (last from 10.0.0.8)"
    assert messages(membership.ask(name(0), Ask(0, "t0")))[name(0)] == Waiting([1, 2], one)

    membership.hear(DOOR, Refusal(Why.SECRET, "10.0.0.9"))
    membership.hear(DOOR, Refusal(Why.OTHERWISE, "10.0.0.7"))
    reason = refusal(membership.tick(now=11.0), name(0)).reason
    assert "2 connection attempts were refused because they did not know the job secret (last from 10.0.0.9)" in reason
    assert f"1 connection attempt was refused because it {Why.OTHERWISE.value} (last from 10.0.0.7)" in reason
    assert "the same secret" in reason and "Allow more time" not in reason


def test_a_worker_that_encrypts_otherwise_is_refused_and_those_who_wait_for_it_hear_of_it() -> None:
    membership = joined(2, 0)
    assert refusal(membership.join(b"other", join_of(1, 2, encrypted=False), now=0.0), b"other").kind == "configuration"

    assert membership.missing == [1]
    waiting = messages(membership.ask(name(0), Ask(0, "t0")))[name(0)]
    assert waiting == Waiting([1], f"1 connection attempt was refused because it {Why.ENCRYPTION.value} (last from alpha)")


# In virtual time: the coordinator, its checker and the workers as nodes of a network that loses, doubles and reorders


class Worker(Machine):
    """What `introduce` does, without a socket: joins until it has an answer, and asks again while it is told to wait."""

    header_type = Waiting | Table | Refused

    def __init__(self, rank: int, size: int, patience_s: float) -> None:
        self.message = join_of(rank, size, patience_s=patience_s)
        self.answer: Table | Refused | None = None

    def on_start(self, now: float) -> Actions:
        return [SendMessage("coordinator", self.message), SetTimer("again", 1.0)]

    def on_message(self, now: float, source: str, header: Waiting | Table | Refused, payload: memoryview) -> Actions:
        if not isinstance(header, Waiting) and self.answer is None:
            self.answer = header
        return ()

    def on_timer(self, now: float, name: str) -> Actions:
        return self.on_start(now) if self.answer is None else ()


class Checker(Machine):
    header_type = Check

    def on_message(self, now: float, source: str, header: Check, payload: memoryview) -> Actions:
        return [SendMessage(source, Checked(header, None))]


class WithChecker(Membership):
    header_type = FromWorker | Checked  # what the checker says travels like everything else here


RELIABLE = Link()  # between the parts of the coordinator's process
STORMY = Link(latency_s=0.05, jitter=ExponentialDelay(0.3), loss=0.2, duplicate=0.2, reorder=0.2, hold_s=1.0)


def form(seed: int) -> tuple[Counter[str], int]:
    """How many workers got the table; a worker may die, or come too late."""
    chance = Random(seed)
    size = chance.choice([1, 2, 3, 4, 7])
    model = NetworkModel(STORMY, {("coordinator", CHECKER): RELIABLE, (CHECKER, "coordinator"): RELIABLE})
    faults: list[Fault] = [Pause("coordinator", at_s=chance.uniform(0, 5), for_s=chance.uniform(0.1, 5))]
    if chance.random() < 0.3:
        faults.append(Kill(f"worker {chance.randrange(size)}", at_s=chance.uniform(0, 3)))
    network = VirtualNetwork(seed=seed, model=model, faults=faults)
    membership = WithChecker(size, HOST, encrypted=True, nonce=NONCE)
    network.add("coordinator", membership)
    network.add(CHECKER, Checker())
    workers = {f"worker {rank}": Worker(rank, size, patience_s=chance.choice([10, 20])) for rank in range(size)}
    for name, worker in workers.items():
        network.at(chance.uniform(0, 12), partial(network.add, name, worker))
    network.run(until_s=60)
    answers = [worker.answer for name, worker in workers.items() if network.is_alive(name)]
    assert None not in answers and len({repr(answer) for answer in answers}) <= 1, f"seed {seed}: {answers}"
    formed = membership.phase is Phase.FORMED
    assert formed or membership.finished or len(answers) < size  # it lingers for one that will not come
    fired = Counter(name.partition("(")[0] for name in network.fired)
    return fired, formed


@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 2_000), marks=pytest.mark.slow)], ids=len)
def test_on_a_bad_network_all_workers_get_the_same_table_or_the_same_refusal(seeds: range) -> None:
    fired: Counter[str] = Counter()
    num_formed = 0
    for seed in seeds:
        faults, formed = form(seed)
        fired += faults
        num_formed += formed
    assert fired.keys() == {"loss", "duplicate", "reorder", "Pause", "Kill"}
    assert len(seeds) / 4 < num_formed < len(seeds)
