"""A server that was started apart finds out what its clock is to the workers'."""

from __future__ import annotations

import random
from collections import deque

import pytest

from stretto.aggregate.parameter_server.server_clock import ROUNDS, AskClock, ClockAsker, ClockIs, ClockTeller
from stretto.aggregate.parameter_server.server_trace import ServerTrace
from stretto.protocol.machine import SendMessage

NOTHING = memoryview(b"")
TRACE = ServerTrace(folder="traces", server=1, num_workers=2)


def compare(offset_ns: int, seed: int) -> ServerTrace:
    """Messages take 10 to 1000 ns, the first of each worker much longer; worker 1 is 70 ns (give or take 5) ahead of rank 0."""
    chance, true_ns, num_messages = random.Random(seed), 0, 0
    asker = ClockAsker([0, 1], lambda: true_ns + offset_ns)
    tellers = [ClockTeller(lambda: true_ns, (0, 0), "a run"), ClockTeller(lambda: true_ns + 70, (70, 5), "a run")]
    waiting = deque(asker.on_start(0.0))
    while waiting:
        asked = waiting.popleft()
        assert isinstance(asked, SendMessage) and isinstance(asked.header, AskClock) and isinstance(asked.to, int)
        true_ns += chance.randint(10, 1000) + (10**9 if num_messages < 2 else 0)
        (answer,) = tellers[asked.to].on_message(0.0, 9, asked.header, NOTHING)
        true_ns += chance.randint(10, 1000)
        assert isinstance(answer, SendMessage)
        waiting.extend(asker.on_message(0.0, asked.to, answer.header, NOTHING))
        num_messages += 1
    assert num_messages == 2 * ROUNDS
    compared = asker.compared(TRACE)
    assert compared is not None
    return compared


@pytest.mark.parametrize("offset_ns", [0, 123_456_789, -5_000])
def test_the_difference_of_two_clocks_is_known_as_well_as_is_said(offset_ns: int) -> None:
    for seed in range(50):
        found = compare(offset_ns, seed)
        assert abs(found.clock_offset_ns - offset_ns) <= found.clock_uncertainty_ns <= 1100
        assert found.run == "a run" and (found.server, found.folder) == (1, "traces")


def test_where_no_worker_is_traced_there_is_nothing_to_compare_and_a_stranger_says_nothing() -> None:
    asker = ClockAsker([0, 1])
    asker.on_start(0.0)
    assert asker.on_message(0.0, 7, ClockIs(0, 0, 0, 0, "x"), NOTHING) == ()
    assert asker.compared(TRACE) is None
