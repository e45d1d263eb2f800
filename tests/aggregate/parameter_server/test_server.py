"""A server: what it refuses, what it takes once, who enters, and which ranges move when servers come and go."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregate.parameter_server.one_server import LAYOUT, OneServer
from stretto.aggregate.parameter_server import server as server_module
from stretto.aggregate.parameter_server.chains import MAX_INSTALLING
from stretto.aggregate.parameter_server.hash_ring import HashRing
from stretto.aggregate.parameter_server.layout import RangeLayout, ServedParameter
from stretto.aggregate.parameter_server.messages import (
    EnterRange,
    EntryStored,
    ExportRange,
    FillValues,
    LeaveRange,
    LogEntry,
    PullValues,
    PushGradient,
    PushTaken,
    RangeEntered,
    RangeExported,
    RangeFilled,
    RangesPlaced,
    RequestRefused,
    Retired,
    ServerJoins,
    ValuesPulled,
)
from stretto.aggregate.parameter_server.round_sum import RoundSum
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.errors import ConfigurationError
from stretto.protocol.machine import HeaderReader, SendMessage
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.sync.synchronous import Synchronous
from stretto.testing.faults import Kill
from stretto.testing.network_model import ExponentialDelay, Link, NetworkModel
from stretto.testing.virtual_network import VirtualNetwork

RIGHT = PushGradient(LAYOUT.digest, 3, 1, 0, 1, 1, 1.0, {"lr": 0.1})
GRADIENT = np.ones(2, np.float32).tobytes()

# -- what is refused --------------------------------------------------------------------------------------------------


def server_in_use() -> OneServer:
    """Worker 0 is in its life 3, and has pushed once; worker 1 has not."""
    server = OneServer(StaleSynchronous(1), workers=2)
    server.machine.on_view(0.0, [], [0], 0)
    server.machine.on_view(0.0, [0], [], 3)
    server.tell(0, EnterRange(LAYOUT.digest, 3, 1, 0, 0))
    server.tell(0, msgspec.structs.replace(RIGHT, clock=0, version_read=0), GRADIENT)
    return server


def state_of(server: OneServer) -> Any:
    replica = server.machine.chains.holdings[0].replica
    return replica.header(), replica.values.export(), len(server.steps.made)


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"layout": 1}, 8, "another layout"),
    ({"range": 1}, 8, "no such range: the model has 1"),
    ({"range": -1}, 8, "no such range"),
    ({"life": 2}, 8, "life 3 has taken its place"),
    ({"life": 4}, 8, "has to enter first"),
    ({"clock": 2}, 8, "clock 2 is of the future: 1 pushes have come in"),
    ({"clock": -1}, 8, "clock -1 is of the past"),
    ({"version_read": 2}, 8, "version 2, and version 1 is the last"),
    ({"version_read": -1}, 8, "version -1"),
    ({"weight": 0.0}, 8, "must be positive"),
    ({"weight": math.nan}, 8, "must be positive"),
    ({"weight": math.inf}, 8, "must be positive"),
    ({"weight": 5e-324}, 8, "must be positive"),
    ({"options": {"lr": 7.0}}, 8, "such options do not exist"),
    ({"options": {f"o{number}": 0.1 for number in range(99)}}, 8, "99 options"),
    ({"options": {"x" * 99: 0.1}}, 8, "long names"),
    ({}, 0, "has 0 bytes, and needs 8"),
    ({}, 12, "has 12 bytes, and needs 8"),
    ({}, 7, "has 7 bytes, and needs 8"),
]


@pytest.mark.parametrize(("change", "num_bytes", "reason"), WRONG, ids=str)
def test_a_wrong_push_is_refused_by_the_name_of_its_sender_and_changes_nothing(
    change: dict[str, Any], num_bytes: int, reason: str
) -> None:
    server = server_in_use()
    before = state_of(server)
    (answer,) = server.tell(0, msgspec.structs.replace(RIGHT, **change), bytes(num_bytes))
    assert answer.to == 0 and isinstance(answer.header, RequestRefused)
    assert "of rank 0" in answer.header.reason and reason in answer.header.reason
    assert state_of(server) == before
    (answer,) = server.tell(0, RIGHT, GRADIENT)
    assert answer.header == PushTaken(0, 1, 2, True)


def test_a_worker_that_does_not_count_is_refused() -> None:
    server = server_in_use()
    for header, payload in ((RIGHT, GRADIENT), (PullValues(LAYOUT.digest, 3, 1, 0, 0, -1), b"")):
        (answer,) = server.tell(7, header, payload)
        assert "of rank 7" in answer.header.reason and "has to enter first" in answer.header.reason


def test_a_pull_of_the_future_is_refused_and_a_worker_that_speaks_as_a_server_too() -> None:
    server = server_in_use()
    before = state_of(server)
    for header, reason in (
        (PullValues(LAYOUT.digest, 3, 1, 0, 2, -1), "of the future"),
        (EnterRange(LAYOUT.digest, 3, 1, 0, 1 << 63), "none that a worker could have reached"),
        (LogEntry(0, 0, 5, Retired(1)), "for a server to say"),
        (EntryStored(0, 0, 5), "for a server to say"),
    ):
        (answer,) = server.tell(0, header)
        assert reason in answer.header.reason and state_of(server) == before


@given(st.binary(max_size=200))
def test_bytes_that_mean_nothing_are_ignored(body: bytes) -> None:
    server = OneServer(Asynchronous(), workers=1)
    header = HeaderReader(server.machine).read(0, body)
    assert header is None or server.tell(0, header) is not None


NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 3)


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.floats(), st.binary(max_size=12))
def test_whatever_numbers_come_the_server_answers_and_goes_on(
    life: int, attempt: int, index: int, clock: int, version: int, weight: float, payload: bytes
) -> None:
    server = OneServer(Asynchronous(), workers=1)
    layout = LAYOUT.digest
    for header in (
        PushGradient(layout, life, attempt, index, clock, version, weight, {"lr": 0.1}),
        PullValues(layout, life, attempt, index, clock, version),
        FillValues(layout, life, attempt, index),
        FillValues(layout, life, attempt, index, True),
        ExportRange(layout, life, attempt, index),
        EnterRange(layout, life, attempt, index, clock),
    ):
        server.tell(1, header, payload)
    right = msgspec.structs.replace(RIGHT, life=0, clock=0, version_read=0)
    assert [answer.header for answer in server.tell(0, right, GRADIENT)] == [PushTaken(0, 0, 1, True)]


def test_chains_are_told_of_in_messages_that_are_not_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CHAINS", 25)
    servers = Servers([1], 0)
    servers.run(0.1)
    told = servers.machines[1].on_message(0.2, 2, ServerJoins(MANY.digest), memoryview(b""))
    sent = [each for each in told if isinstance(each, SendMessage) and each.to == 2]
    chains = [each.header.chains for each in sent if isinstance(each.header, RangesPlaced)]
    assert [len(some) for some in chains] == [25, 25, 10]


def test_a_server_of_another_layout_is_no_server(caplog: pytest.LogCaptureFixture) -> None:
    server = server_in_use()
    assert server.tell(12, ServerJoins(7)) == [] and "rank 12 wants to serve a model of another layout" in caplog.text
    assert server.machine.chains.servers == {9}


def test_no_servers_and_negative_replicas_are_refused() -> None:
    for servers, replicas in (([], 0), ([1], -1)):
        with pytest.raises(ConfigurationError, match="at least one server"):
            ServerMachine(
                1, LAYOUT, servers=servers, workers=[0], sync=Asynchronous(), replicas=replicas,
                make_values=lambda index, values: RoundSum(2),
            )  # fmt: skip


# -- what is taken ----------------------------------------------------------------------------------------------------


def test_a_push_that_comes_again_is_acknowledged_and_not_applied() -> None:
    server = server_in_use()
    again = msgspec.structs.replace(RIGHT, clock=0, version_read=0)
    before = state_of(server)
    assert [answer.header for answer in server.tell(0, again, GRADIENT)] == [PushTaken(0, 0, 1, None)]
    assert state_of(server) == before


def test_a_push_that_comes_again_while_it_waits_is_acknowledged_once() -> None:
    server = OneServer(StaleSynchronous(0), workers=2)
    assert server.push(0, 0, 0) == server.push(0, 0, 0) == []
    answers = server.push(1, 0, 0)
    assert sorted(to for to, _ in answers) == [0, 1] and len(server.steps.made) == 2


def test_pulls_wait_until_a_range_is_filled_and_the_first_filling_counts() -> None:
    server = OneServer(Asynchronous(), workers=2, filled=False)
    assert server.pull(1, 0) == []
    ((_, refused),) = server.push(0, 0, 0)
    assert "no values yet" in refused.reason
    fill = FillValues(LAYOUT.digest, 0, 1, 0)
    first, second = (np.array(values, np.float32).tobytes() for values in ([1, 2], [3, 4]))
    sent = server.tell(0, fill, first)
    assert [type(each.header) for each in sent] == [RangeFilled, ValuesPulled] and bytes(sent[1].payload) == first
    assert [each.header for each in server.tell(1, fill, second)] == [RangeFilled(0)]
    (pulled,) = server.tell(0, PullValues(LAYOUT.digest, 0, 1, 0, 0, -1))
    assert bytes(pulled.payload) == first


def test_a_range_is_filled_with_what_was_exported_and_with_nothing_else() -> None:
    export, fill = ExportRange(LAYOUT.digest, 0, 1, 0), FillValues(LAYOUT.digest, 0, 1, 0, True)
    source, target = OneServer(Asynchronous(), workers=2), OneServer(Asynchronous(), workers=2, filled=False)
    source.push(0, 0, 0, (3, 4))
    before = state_of(source)
    (exported,) = source.tell(1, export)
    assert exported.header == RangeExported(0, 1, 0, 1) and state_of(source) == before
    (refused,) = target.tell(0, export)
    assert isinstance(refused.header, RequestRefused) and "nobody has filled the range" in refused.header.reason
    (refused,) = target.tell(0, fill, bytes(exported.payload) + b"more")
    assert isinstance(refused.header, RequestRefused) and "of rank 0" in refused.header.reason
    assert [each.header for each in target.tell(0, fill, bytes(exported.payload))] == [RangeFilled(0)]
    (again,) = target.tell(1, export)
    assert bytes(again.payload) == bytes(exported.payload)


def test_a_worker_enters_with_the_clock_of_the_slowest_and_is_waited_for() -> None:
    server = OneServer(StaleSynchronous(0), workers=2)
    for clock in range(3):
        server.push(0, clock, 0)
        server.push(1, clock, 0)
    assert server.pull(0, 3) == [0]
    entered = server.tell(5, EnterRange(LAYOUT.digest, 2, 1, 0, None))
    assert [each.header for each in entered] == [RangeEntered(0, 3)]
    server.push(0, 3, 0)
    server.push(1, 3, 0)
    assert server.pull(0, 4) == []
    assert [type(each.header) for each in server.tell(5, EnterRange(LAYOUT.digest, 2, 1, 0, 4))].count(ValuesPulled) == 1


def test_a_worker_that_has_quit_may_push_again_what_it_pushed_before_and_reads_no_more() -> None:
    """To a server that takes over. It enters again with no clock that it has used."""
    server = OneServer(Asynchronous(), workers=2)
    server.push(0, 0, 0)
    server.tell(0, LeaveRange(LAYOUT.digest, 0, 1, 0))
    assert server.push(0, 1, 0) == [(0, PushTaken(0, 1, 2, True))]
    (refused,) = server.tell(0, PullValues(LAYOUT.digest, 0, 1, 0, 1, -1))
    assert "has to enter first" in refused.header.reason
    assert [each.header for each in server.tell(0, EnterRange(LAYOUT.digest, 0, 1, 0, None))] == [RangeEntered(0, 2)]


def test_a_round_that_is_over_stays_as_it_is() -> None:
    """Somebody who has quit pushes again to a server that has taken over, and that has not waited for it."""
    server = OneServer(Synchronous(), workers=2)
    server.tell(0, LeaveRange(LAYOUT.digest, 0, 1, 0))
    server.push(1, 0, 0, (5, 5))
    assert server.push(0, 0, 0, (7, 7)) == [(0, PushTaken(0, 0, 1, False))]
    assert server.steps.made == [([5.0, 5.0], 1.0, 1)]


def test_a_worker_that_is_alone_goes_on_where_the_last_ones_were() -> None:
    server = OneServer(StaleSynchronous(0), workers=1)
    for clock in range(3):
        server.push(0, clock, clock)
    server.machine.on_view(0.0, [], [0], 0)
    server.machine.on_view(0.0, [0], [], 1)
    assert [each.header for each in server.tell(0, EnterRange(LAYOUT.digest, 1, 1, 0, None))] == [RangeEntered(0, 3)]


# -- which ranges move ------------------------------------------------------------------------------------------------

MANY = RangeLayout([ServedParameter(f"p{number}", 4) for number in range(60)], 16)


class Servers:
    """Servers without workers, in virtual time."""

    def __init__(self, ranks: list[int], replicas: int, *faults: Kill) -> None:
        link = Link(latency_s=1e-3, jitter=ExponentialDelay(2e-3))
        self.network = VirtualNetwork(seed=1, model=NetworkModel(link, detect_s=0.02), faults=faults, reliable=True)
        self.ranks, self.replicas = ranks, replicas
        self.machines: dict[int, ServerMachine] = {}
        self.most_at_a_time = 0
        for rank in ranks:
            self.add(rank, 0)

    def add(self, rank: int, life: int) -> None:
        machine = self.machines[rank] = ServerMachine(
            rank, MANY, servers=self.ranks, workers=[], sync=Asynchronous(), replicas=self.replicas, filled=True, life=life,
            make_values=lambda index, values: RoundSum(4),
        )  # fmt: skip
        self.network.add(rank, machine)

    def run(self, until_s: float) -> dict[int, list[int]]:
        """The members of all ranges then."""
        self.network.run_until(self._look, until_s)
        living = [machine for rank, machine in self.machines.items() if self.network.is_alive(rank)]
        heads = [holding for machine in living for holding in machine.chains.holdings.values() if holding.head is not None]
        assert all(holding.active for holding in heads) and len(heads) == len(MANY)
        return {holding.index: holding.members for holding in heads}

    def _look(self) -> bool:
        self.most_at_a_time = max(self.most_at_a_time, *(len(each.chains._installing) for each in self.machines.values()))
        return False


@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_when_a_server_joins_only_the_ranges_move_that_it_takes(replicas: int) -> None:
    servers = Servers([1, 2, 3], replicas)
    before = servers.run(1.0)
    servers.network.at(1.0, lambda: servers.add(4, 1))
    after = servers.run(5.0)
    placed = HashRing([1, 2, 3, 4]).place(MANY.ranges)
    taken = {index for index, rank in placed.items() if rank == 4}
    assert {index for index, members in after.items() if members[0] == 4} == taken and len(taken) == 15
    assert all(after[index] == before[index] for index in after.keys() - taken)
    assert all(len(members) == replicas + 1 for members in after.values())
    assert servers.most_at_a_time == MAX_INSTALLING


@pytest.mark.parametrize("replicas", [1, 2])
def test_when_a_server_dies_its_ranges_go_to_the_next_ones_and_come_back_with_it(replicas: int) -> None:
    servers = Servers([1, 2, 3, 4], replicas, Kill(2, at_s=1.0))
    before = servers.run(0.9)
    between = servers.run(4.0)
    for index, members in before.items():
        assert between[index][: len(members) - (2 in members)] == [rank for rank in members if rank != 2]
        assert len(set(between[index])) == replicas + 1 and 2 not in between[index]
    servers.network.at(4.0, lambda: servers.add(2, 1))
    after = servers.run(9.0)
    assert {index: members[0] for index, members in after.items()} == {index: members[0] for index, members in before.items()}


def test_a_worker_that_comes_back_hears_of_chains_that_have_changed_meanwhile() -> None:
    """It may know them as they were while a server was missing, and would not hear of copies that have been made since."""
    servers = Servers([1, 2, 3], 1, Kill(3, at_s=1.0))
    members = servers.run(until_s=2.0)
    first = servers.machines[1]
    changed = {each.index for each in first.chains.holdings.values() if each.head is not None and each.epoch}
    assert changed and all(len(members[index]) == 2 for index in changed)

    def news() -> dict[int, list[int]]:
        told = first.on_message(2.1, 7, EnterRange(MANY.digest, 1, 1, min(changed), None), memoryview(b""))
        placed = [each.header for each in told if isinstance(each, SendMessage) and isinstance(each.header, RangesPlaced)]
        return {chain.range: chain.members for each in placed for chain in each.chains}

    assert news() == {index: members[index] for index in changed}
    assert news() == {}
