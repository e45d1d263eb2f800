"""Urgent collectives overtake others, few bytes are on their way, and credit comes back however a collective ends."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.collectives.execute import Communicator
from stretto.collectives.plan import Kind
from stretto.collectives.urgency import SendQueue, Urgency
from stretto.errors import WireError
from stretto.job import Job
from stretto.testing import run_jobs, run_virtual
from stretto.testing.network_model import Link, NetworkModel
from stretto.wire.base import Handle, Tag, Wire

FAST = NetworkModel(Link(latency_s=1e-4, bytes_per_s=1e6))


class Sent:
    """A wire that sends when it is told to, and the order in which it was given things."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.on_their_way: list[tuple[int, Any]] = []

    def take(self, name: str, num_bytes: int) -> Any:
        def hand_over(on_done: Any) -> None:
            self.order.append(name)
            self.on_their_way.append((num_bytes, on_done))

        return hand_over

    def deliver(self) -> None:
        _, on_done = self.on_their_way.pop(0)
        on_done(Handle(1, Tag(0, 0, 0)))


def run_of() -> Any:
    return SimpleNamespace(failing=False, pending=SimpleNamespace(done=False), credit_taken=Counter())


def submit(queue: SendQueue, wire: Sent, name: str, priority: int, num_bytes: int = 10, credit: int = 10, run: Any = None) -> Any:
    run = run or run_of()
    queue.submit(run, 1, Urgency(priority, credit), num_bytes, wire.take(name, num_bytes), lambda handle: None)
    return run


def test_the_most_urgent_of_those_that_wait_goes_first_and_equals_in_their_order() -> None:
    queue, wire = SendQueue(), Sent()
    for name, priority in (("first", 5), ("low", 9), ("urgent", 0), ("middle", 3), ("middle too", 3)):
        submit(queue, wire, name, priority)
    while wire.on_their_way:
        assert len(wire.on_their_way) == 1  # one message is all the credit
        wire.deliver()
    assert wire.order == ["first", "urgent", "middle", "middle too", "low"]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=30), st.integers(1, 60))
def test_all_is_sent_once_within_the_credit_and_one_message(messages: list[tuple[int, int]], credit: int) -> None:
    queue, wire = SendQueue(), Sent()
    for number, (priority, num_bytes) in enumerate(messages):
        submit(queue, wire, str(number), priority, num_bytes, credit)
        assert sum(size for size, _ in wire.on_their_way) < credit + 31
    while wire.on_their_way:
        waiting = set(map(str, range(len(messages)))) - set(wire.order)
        before = len(wire.order)
        wire.deliver()
        for name in wire.order[before:]:
            assert all(messages[int(name)][0] <= messages[int(other)][0] for other in waiting)
            waiting.discard(name)
    assert sorted(wire.order, key=int) == list(map(str, range(len(messages))))


def test_what_leaves_at_once_makes_no_deep_recursion() -> None:
    queue, done = SendQueue(), []
    run = run_of()

    def send(on_done: Any) -> None:
        on_done(Handle(1, Tag(0, 0, 0)))

    for number in range(5000):
        queue.submit(run, 1, Urgency(0, 1), 10, send, lambda handle, number=number: done.append(number))  # type: ignore[misc]
    assert done == list(range(5000))


def test_credit_of_a_collective_that_has_ended_comes_back_once() -> None:
    queue, wire = SendQueue(), Sent()
    ended = submit(queue, wire, "of one that fails", 0)
    submit(queue, wire, "waits", 1)
    ended.failing = True
    queue.forget(ended)
    assert wire.order == ["of one that fails", "waits"]
    wire.deliver()  # the wire says late that the first one has gone: nothing is given back a second time
    submit(queue, wire, "third", 2)
    assert wire.order[-1] == "waits"
    wire.deliver()
    assert wire.order[-1] == "third"


def test_messages_of_a_collective_that_fails_while_they_wait_are_not_sent() -> None:
    queue, wire = SendQueue(), Sent()
    submit(queue, wire, "first", 0)
    failing = submit(queue, wire, "never", 1)
    submit(queue, wire, "last", 2)
    failing.failing = True
    wire.deliver()
    assert wire.order == ["first", "last"]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_an_urgent_collective_overtakes_a_long_one_on_the_same_links(size: int) -> None:
    def ends(wire: Wire, priority: int | None) -> tuple[float, float]:
        from stretto.collectives import catalogue
        from stretto.collectives.request import Request

        communicator = Communicator(wire)

        def start(number: int, length: int, of: int | None) -> Any:
            plan = catalogue.plan(Kind.ALL_REDUCE, "ring", wire.rank, wire.world_size)
            urgency = None if of is None else Urgency(of, 4096)
            tensor = torch.full((length,), float(wire.rank))
            return communicator.start(Request(plan, tensor, sequence=number, segment_bytes=4096, urgency=urgency))

        long = start(0, 100_000, None if priority is None else 5)
        short = start(1, 2_000, priority)
        short.wait()
        at = wire.now()
        long.wait()
        assert torch.equal(long.request.tensor, torch.full((100_000,), float(sum(range(wire.world_size)))))
        return at, wire.now()

    in_order = run_virtual(size, ends, None, model=FAST)
    urgent = run_virtual(size, ends, 0, model=FAST)
    assert all(mine[0] < 0.5 * before[0] for mine, before in zip(urgent, in_order, strict=True))
    assert all(mine[1] < 1.1 * before[1] for mine, before in zip(urgent, in_order, strict=True))  # and the long one hardly later


def test_a_collective_that_fails_leaves_credit_for_the_next() -> None:
    everybody = threading.Barrier(2, timeout=60)

    def program(job: Job) -> None:
        urgency = Urgency(0, 1)
        tensor = torch.ones(300_000)
        ready = (lambda: False) if job.rank == 0 else None  # so the other's messages wait for nothing
        pending = job.world.start(Kind.ALL_REDUCE, tensor, "ring", urgency=urgency, segment_bytes=4096, ready=ready)
        if job.rank == 0:
            job.world.fail(pending, WireError("as the test has it"))
        with pytest.raises(WireError, match="as the test has it"):
            pending.wait()
        everybody.wait()
        again = torch.ones(300_000)
        job.world.start(Kind.ALL_REDUCE, again, "ring", urgency=urgency, segment_bytes=4096).wait()
        assert again.eq(2).all()

    run_jobs(2, program)
