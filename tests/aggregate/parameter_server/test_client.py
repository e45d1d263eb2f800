"""A worker's side: what it refuses to send, how much it pulls at a time, and what it says when ranges are lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stretto.aggregate.parameter_server.client import ClientMachine, Enter, Export, Fill, Pull, Push, Quit
from stretto.aggregate.parameter_server.hash_ring import HashRing
from stretto.aggregate.parameter_server.layout import RangeLayout, ServedParameter
from stretto.aggregate.parameter_server.messages import (
    ExportRange,
    NotHead,
    PullValues,
    PushGradient,
    PushReceived,
    RangeChain,
    RangeExported,
    RangeQuery,
    RangeReport,
    RangesPlaced,
    RequestRefused,
    ValuesPulled,
)
from stretto.aggregate.parameter_server.round_sum import RoundSum
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.errors import ConfigurationError, FrameError, PeerLost, WireError
from stretto.protocol.machine import Reply, SendMessage
from stretto.sync.asynchronous import Asynchronous
from stretto.testing.faults import Kill
from stretto.testing.virtual_network import VirtualNetwork

LAYOUT = RangeLayout([ServedParameter(f"p{number}", 2) for number in range(4)], 8)
ZEROS = bytes(8)


class OneClient:
    """A client machine whose servers are the test."""

    def __init__(self, servers: tuple[int, ...] = (8,), **settings: Any) -> None:
        self.machine = ClientMachine(0, LAYOUT, servers=servers, **settings)
        self.tickets = 0

    def ask(self, request: Any) -> list[Any]:
        self.tickets += 1
        return list(self.machine.on_request(0.0, self.tickets, request))

    def left(self, rank: int) -> list[Any]:
        return list(self.machine.on_view(0.0, [], [rank], 0))

    def hear(self, source: int, header: Any, payload: bytes = b"") -> list[Any]:
        return list(self.machine.on_message(0.0, source, header, memoryview(payload)))


def sent(actions: list[Any], kind: Any) -> list[tuple[Any, int]]:
    """To whom messages of that kind were sent, and for which range."""
    return [(each.to, each.header.range) for each in actions if isinstance(each, SendMessage) and type(each.header) is kind]


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Push(9, 0, ZEROS, {}, 0), "the model has 4 ranges"),
        (Pull(-1, 0, bytearray(8)), "the model has 4 ranges"),
        (Push(0, 0, bytes(4), {}, 0), "4 bytes: that range has 8"),
        (Pull(0, 0, bytearray(12)), "12 bytes: that range has 8"),
        (Pull(0, 0, bytes(8)), "which can be written"),
        (Fill(0, np.zeros((4, 2), np.float32)[:, 0].data), "16 bytes"),
        (Push(0, 0, ZEROS, {"lr": "fast"}, 0), "flags, numbers or pairs"),  # type: ignore[dict-item]
    ],
    ids=["range", "negative range", "short", "long", "read-only", "not contiguous", "options"],
)
def test_a_wrong_request_is_refused_before_it_is_sent(request_: Any, reason: str) -> None:
    (answer,) = OneClient().ask(request_)
    assert isinstance(answer.error, ConfigurationError) and reason in str(answer.error)


def test_a_request_that_is_under_way_is_not_made_again() -> None:
    client = OneClient()
    assert len(client.ask(Pull(0, 0, bytearray(8)))) == len(client.ask(Push(0, 0, ZEROS, {}, 0))) == 1
    (again,) = client.ask(Pull(0, 0, bytearray(8)))
    assert "under way" in str(again.error)
    assert sent(client.ask(Push(0, 1, ZEROS, {}, 0)), PushGradient) == [(8, 0)]


def test_what_a_server_refuses_is_raised_by_its_name() -> None:
    client = OneClient()
    client.ask(Push(0, 3, ZEROS, {}, 0))
    (answer,) = client.hear(8, RequestRefused(0, "PushGradient", 3, "a PushGradient of rank 0 ... was refused: no"))
    assert isinstance(answer.error, WireError) and "rank 8: a PushGradient of rank 0" in str(answer.error)


def test_pulls_wait_while_the_window_is_full_and_pushes_do_not() -> None:
    client = OneClient(window_bytes=20)
    pulls = [client.ask(Pull(index, 0, bytearray(8))) for index in range(4)]
    assert [len(actions) for actions in pulls] == [1, 1, 0, 0]
    assert sent(client.ask(Push(3, 0, ZEROS, {}, 0)), PushGradient) == [(8, 3)]
    actions = client.hear(8, ValuesPulled(1, 0, 1, 0, 1.0), ZEROS)
    assert isinstance(actions[0], Reply) and sent(actions, PullValues) == [(8, 2)]


def test_a_range_larger_than_the_window_is_pulled_alone() -> None:
    client = OneClient(window_bytes=1)
    assert [len(client.ask(Pull(index, 0, bytearray(8)))) for index in range(2)] == [1, 0]


def test_values_come_into_the_memory_that_was_given_and_an_answer_to_an_earlier_pull_does_not() -> None:
    client = OneClient()
    values = np.zeros(2, np.float32)
    client.ask(Pull(0, 4, values, newer_than=6))
    right = np.array([1, 2], np.float32).tobytes()
    for late in (ValuesPulled(0, 3, 7, 3, 1.0), ValuesPulled(0, 4, 6, 3, 1.0)):
        assert client.hear(8, late, right) == []
    (answer,) = client.hear(8, ValuesPulled(0, 4, 7, 3, 1.0), right)
    assert answer.value.version == 7 and values.tolist() == [1, 2]
    assert client.hear(8, ValuesPulled(0, 4, 7, 3, 1.0), right) == []


def test_values_of_a_wrong_length_are_an_error_that_names_the_server() -> None:
    client = OneClient()
    client.ask(Pull(0, 0, bytearray(8)))
    (answer,) = client.hear(8, ValuesPulled(0, 0, 1, 0, 1.0), bytes(4))
    assert isinstance(answer.error, FrameError) and answer.error.rank == 8


def test_all_requests_of_a_range_go_to_the_server_that_has_it_now_in_their_order() -> None:
    """To the next one when the first has died; and when that one does not know of it yet, again when it does."""
    client = OneClient(servers=(8, 9), replicas=1)
    first, second = HashRing([8, 9]).chain(0, HashRing([8, 9]).place(LAYOUT.ranges)[0], 2)
    client.ask(Push(0, 0, ZEROS, {}, 0))
    client.ask(Push(0, 1, ZEROS, {}, 0))
    again = client.left(first)
    assert [(each.to, each.header.clock, each.header.attempt) for each in again] == [(second, 0, 2), (second, 1, 2)]
    for each in again:
        assert client.hear(second, PushReceived(each.header.receipt)) == []
    assert client.hear(second, NotHead(RangeChain(0, 0, [first, second]), True, 1)) == []  # an answer to another attempt
    assert client.hear(second, NotHead(RangeChain(0, 0, [first, second]), True, 2)) == []
    assert client.ask(Push(0, 2, ZEROS, {}, 0)) == []
    again = client.hear(second, RangesPlaced([RangeChain(0, 1, [second])], [second]))
    assert [(each.to, each.header.clock, each.header.attempt) for each in again] == [(second, clock, 3) for clock in range(3)]
    assert client.hear(second, RangesPlaced([RangeChain(0, 2, [second, 7])], [second])) == []  # the same one has them already


def test_everybody_is_asked_before_a_range_is_given_up() -> None:
    client = OneClient(servers=(8, 9), lives={12: 3})
    ring = HashRing([8, 9])
    index = next(index for index, rank in ring.place(LAYOUT.ranges).items() if rank == 8)
    client.ask(Pull(index, 0, bytearray(8)))
    asked = client.left(8)
    assert sent(asked, RangeQuery) == [(9, index), (12, index)] and asked[0].header.ended == [(8, 0)]
    none = RangeReport(RangeChain(index, 0, [8]), False)
    assert client.hear(9, none) == []
    asked = client.left(12)  # it may have had a copy, and have passed it on
    assert sent(asked, RangeQuery) == [(9, index)] and asked[0].header.ended == [(8, 0), (12, 3)]
    (answer,) = client.hear(9, none)
    assert isinstance(answer.error, PeerLost) and answer.error.rank == 8 and f"'p{index}'" in str(answer.error)
    (answer,) = client.ask(Push(index, 0, ZEROS, {}, 0))
    assert isinstance(answer.error, PeerLost)


def test_a_range_that_somebody_holds_is_waited_for() -> None:
    client = OneClient(servers=(8, 9))
    ring = HashRing([8, 9])
    index = next(index for index, rank in ring.place(LAYOUT.ranges).items() if rank == 8)
    client.ask(Pull(index, 0, bytearray(8)))
    client.left(8)
    assert client.hear(9, RangeReport(RangeChain(index, 0, [8]), True)) == []
    again = client.hear(9, RangesPlaced([RangeChain(index, 2, [9])], [9]))
    assert sent(again, PullValues) == [(9, index)]


def test_a_worker_has_no_ranges_to_report() -> None:
    (answer,) = OneClient().hear(5, RangeQuery(2, []))
    assert answer.to == 5 and answer.header == RangeReport(RangeChain(2, -1, []), False)


# -- with servers -----------------------------------------------------------------------------------------------------


def job(*faults: Kill) -> VirtualNetwork:
    network = VirtualNetwork(seed=1, faults=faults, reliable=True)
    for rank in (8, 9):
        server = ServerMachine(
            rank, LAYOUT, servers=[8, 9], workers=[0], sync=Asynchronous(), filled=True,
            make_values=lambda index, values: RoundSum(2),
        )  # fmt: skip
        network.add(rank, server)
    network.add(0, ClientMachine(0, LAYOUT, servers=[8, 9]))
    return network


def test_a_worker_enters_pushes_pulls_and_quits() -> None:
    network = job()
    clock = network.request(0, Enter())
    network.run(1.0)
    assert clock.result(0) == 0
    gradient, values = np.array([1, 2], np.float32), np.zeros(2, np.float32)
    taken = network.request(0, Push(0, 0, gradient.tobytes(), {}, 0))
    pulled = network.request(0, Pull(0, 1, values))
    quits = network.request(0, Quit())
    network.run(2.0)
    assert taken.result(0).applied and pulled.result(0).version == 1 and values.tolist() == [1, 2] and quits.result(0) is None


def test_lost_ranges_fail_what_concerns_them_and_nothing_else() -> None:
    network = job(Kill(8, at_s=0.5))
    network.run(1.0)
    placed = HashRing([8, 9]).place(LAYOUT.ranges)
    replies = {index: network.request(0, Pull(index, 0, bytearray(8))) for index in placed}
    enters = network.request(0, Enter())
    network.run(2.0)
    for index, rank in placed.items():
        assert isinstance(replies[index].exception(0), PeerLost) == (rank == 8)
    assert isinstance(enters.exception(0), PeerLost)
    network.assert_all_fired()


def test_an_export_is_asked_for_once_and_its_answer_is_the_bytes() -> None:
    client = OneClient()
    assert sent(client.ask(Export(1)), ExportRange) == [(8, 1)]
    (again,) = client.ask(Export(1))
    assert isinstance(again.error, ConfigurationError) and "is under way" in str(again.error)
    assert client.hear(8, RangeExported(2), b"of another range") == []
    (answer,) = client.hear(8, RangeExported(1, 7, 2, 4), b"all of it")
    assert isinstance(answer, Reply) and answer.value == (b"all of it", 7, 2, 4)
    (wrong,) = client.ask(Export(9))
    assert isinstance(wrong.error, ConfigurationError) and "the model has 4 ranges" in str(wrong.error)


def test_a_fill_with_what_was_exported_may_have_any_length() -> None:
    (message,) = OneClient().ask(Fill(0, b"longer than the values of a range", exported=True))
    assert message.header.exported
