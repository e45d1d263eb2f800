"""The loop over a wire: timers, calls from other threads, machines that fail, memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from stretto.collectives.communication import CommunicationThread
from stretto.collectives.execute import Communicator
from stretto.errors import ConfigurationError, StrettoError
from stretto.protocol.loop import Loop
from stretto.protocol.machine import MAX_COMPLAINTS, Actions, Machine, Reply, SendMessage, SetTimer
from stretto.testing.threads import ThreadsWire, threads_world
from stretto.testing.virtual import virtual_world
from stretto.wire.base import Wire

CHANNEL = 100
DEADLINE_S = 30.0


class Recorder(Machine):
    """Notes every event; does what it is asked to do, and replies with what it has noted."""

    header_type = str

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_start(self, now: float) -> Actions:
        self.events.append("start")
        return ()

    def on_message(self, now: float, source: int, header: str, payload: memoryview) -> Actions:
        self.events.append((source, header, bytes(payload)))
        return ()

    def on_timer(self, now: float, name: str) -> Actions:
        self.events.append((round(now, 6), name))
        return ()

    def on_sent(self, now: float, token: int) -> Actions:
        self.events.append(("sent", token))
        return ()

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        self.events.append(("view", list(joined), list(left)))
        return ()

    def on_request(self, now: float, ticket: int, request: Any) -> Actions:
        if callable(request):
            return request(ticket)  # type: ignore[no-any-return]
        return [*request, Reply(ticket, list(self.events))]


def drive(wire: Wire, loop: Loop, until: Callable[[], bool]) -> None:
    """What the communication thread does, in this one."""
    deadline = wire.now() + DEADLINE_S
    while not until():
        assert wire.now() < deadline
        wire.progress(min(loop.turn(), 1.0))


@contextmanager
def threads(size: int) -> Iterator[tuple[list[ThreadsWire], list[CommunicationThread]]]:
    wires = threads_world(size)
    communications = [CommunicationThread(Communicator(wire)) for wire in wires]
    try:
        yield wires, communications
    finally:
        for communication in communications:
            communication.stop(DEADLINE_S)


def heard(machine: Recorder, loop: Loop, count: int) -> list[Any]:
    """All events, once there are that many. Asking is what wakes the loop; nothing here is about how long it takes."""
    running = next(running for running in loop._running.values() if running.machine is machine)
    for _ in range(100_000):
        events: list[Any] = running.request([]).result(DEADLINE_S)
        if len(events) >= count:
            return events
    raise AssertionError(f"{count} events did not come: {events}")


def test_timers_fire_in_the_order_of_their_times_and_are_replaced_and_taken_back() -> None:
    (wire,) = virtual_world(1)
    loop, machine = Loop(wire), Recorder()
    running = loop.start(machine, CHANNEL)
    actions = [SetTimer("c", 0.3), SetTimer("a", 0.1), SetTimer("b", 0.2), SetTimer("b2", 0.2), SetTimer("never", 0.15)]
    running.request([*actions, SetTimer("c", 0.05), SetTimer("never", None), SetTimer("a", 0.25)])
    drive(wire, loop, lambda: len(machine.events) == 5)

    assert machine.events == ["start", (0.05, "c"), (0.2, "b"), (0.2, "b2"), (0.25, "a")]
    assert loop.turn() == float("inf")


def test_a_machine_is_told_when_what_it_has_marked_has_left() -> None:
    """Short ones, long ones, and those to itself; and nothing of what it has not marked."""
    with threads(2) as (_, (mine, other)):
        sender, receiver = Recorder(), Recorder()
        other.loop.start(receiver, CHANNEL)
        running = mine.loop.start(sender, CHANNEL)
        payloads = {1: b"short", 2: bytes(1 << 20), 3: b""}
        running.request([SendMessage(0 if token == 3 else 1, "x", payload, token) for token, payload in payloads.items()])
        running.request([SendMessage(1, "unmarked", b"y")])
        events = heard(sender, mine.loop, 5)
        assert {event for event in events if event[0] == "sent"} == {("sent", 1), ("sent", 2), ("sent", 3)}
        heard(receiver, other.loop, 4)


def test_what_goes_to_a_lost_peer_is_never_said_to_have_left() -> None:
    with threads(2) as (wires, (mine, _)):
        sender = Recorder()
        running = mine.loop.start(sender, CHANNEL)
        running.request([SendMessage(1, "nobody serves that channel", bytes(1 << 20), 7)])
        wires[1].kill("killed by the test")
        events = heard(sender, mine.loop, 2)
        assert events == ["start", ("view", [], [1])]


def test_a_timer_of_no_time_that_sets_itself_again_leaves_the_loop_its_turns() -> None:
    class Restless(Recorder):
        def on_timer(self, now: float, name: str) -> Actions:
            self.events.append(name)
            return [SetTimer(name, 0.0), SendMessage(0, "to myself")]

    (wire,) = virtual_world(1)
    loop, machine = Loop(wire), Restless()
    loop.start(machine, CHANNEL).request([SetTimer("again", 0.0)])
    for _ in range(5):
        assert loop.turn() == 0.0

    assert machine.events[:4] == ["start", "again", (0, "to myself", b""), "again"]


def test_messages_pass_between_machines_of_one_channel_and_to_oneself() -> None:
    with threads(3) as (_, communications):
        machines = [Recorder() for _ in range(3)]
        running = [each.loop.start(machine, CHANNEL) for each, machine in zip(communications, machines, strict=True)]
        large = bytes(range(256)) * 400
        running[1].request([SendMessage(to, f"for {to}", large) for to in range(3)])
        for rank in range(3):
            assert heard(machines[rank], communications[rank].loop, 2)[1:] == [(1, f"for {rank}", large)]


def test_a_machine_that_raises_ends_alone_and_its_callers_get_the_error(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Recorder):
        def on_message(self, now: float, source: int, header: str, payload: memoryview) -> Actions:
            raise ZeroDivisionError("a bug")

    with threads(2) as (_, communications):
        mine, theirs = (communication.loop for communication in communications)
        broken, sender, other = mine.start(Broken(), CHANNEL), theirs.start(Recorder(), CHANNEL), Recorder()
        mine.start(other, CHANNEL + 1), theirs.start(Recorder(), CHANNEL + 1).request([SendMessage(0, "fine")])
        waiting = broken.request(lambda ticket: ())
        sender.request([SendMessage(0, "boom")] * 3)
        with pytest.raises(StrettoError, match="Broken on channel 100 has failed: ZeroDivisionError") as caught:
            waiting.result(DEADLINE_S)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(StrettoError, match="has failed"):
            broken.request([]).result(DEADLINE_S)
        assert heard(other, mine, 2) == ["start", (1, "fine", b"")]
    assert caplog.text.count("has failed") == 1 and "Traceback" in caplog.text


IMPOSSIBLE = {
    "a rank that does not exist": SendMessage(7, "x"),
    "no rank": SendMessage("b", "x"),
    "no header": SendMessage(1, object()),
    "a reply that nobody waits for": Reply(99),
    "no time": SetTimer("a", float("nan")),
}


@pytest.mark.parametrize("action", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_action_that_cannot_be_carried_out_ends_the_machine(action: Any) -> None:
    with threads(2) as (_, communications):
        with pytest.raises(StrettoError, match="Recorder on channel 100"):
            communications[0].loop.start(Recorder(), CHANNEL).request(lambda ticket: [action]).result(DEADLINE_S)
        assert communications[0].loop.call(lambda: 7).result(DEADLINE_S) == 7


def test_an_error_of_our_own_reaches_the_caller_as_it_is() -> None:
    with threads(1) as (_, communications):
        machine = communications[0].loop.start(Recorder(), CHANNEL)
        with pytest.raises(ConfigurationError, match="refused"):
            machine.request(lambda ticket: [Reply(ticket, error=ConfigurationError("refused"))]).result(DEADLINE_S)
        assert machine.request([]).result(DEADLINE_S) == ["start"]


def test_whoever_waits_when_the_thread_stops_gets_an_error_and_so_does_who_comes_later() -> None:
    with threads(1) as (_, communications):
        loop = communications[0].loop
        machine = loop.start(Recorder(), CHANNEL)
        waiting = machine.request(lambda ticket: ())
        stopped = loop.start(Recorder(), CHANNEL + 1)
        stopped_waiting = stopped.request(lambda ticket: ())
        stopped.stop()
        with pytest.raises(StrettoError, match="was stopped"):
            stopped_waiting.result(DEADLINE_S)
        entered, leave = threading.Event(), threading.Event()

        def block() -> None:
            entered.set()
            leave.wait(DEADLINE_S)

        loop.call(block)
        assert entered.wait(DEADLINE_S)
        queued = loop.call(lambda: None)  # not begun when the thread is told to stop; it may or may not still be run
        communications[0]._stopping = True
        leave.set()
        communications[0].stop(DEADLINE_S)
        for future in (waiting, machine.request([]), loop.call(lambda: None), loop.start(Recorder(), CHANNEL + 2).request([])):
            with pytest.raises(StrettoError, match="the job was shut down"):
                future.result(DEADLINE_S)
        assert queued.done()
        too_late = loop.start(Recorder(), CHANNEL + 3)
        assert "the job was shut down" in str(too_late.error)


def test_a_call_runs_in_the_loops_thread_and_its_exception_is_the_callers() -> None:
    with threads(1) as (_, communications):
        loop = communications[0].loop
        assert loop.call(threading.current_thread).result(DEADLINE_S).name == "stretto-communication"
        with pytest.raises(ZeroDivisionError):
            loop.call(lambda: 1 // 0).result(DEADLINE_S)


def test_a_channel_belongs_to_one_machine() -> None:
    with threads(1) as (_, communications):
        communications[0].loop.start(Recorder(), CHANNEL)
        with pytest.raises(ConfigurationError, match="Recorder on channel 100: that channel belongs to Recorder"):
            communications[0].loop.start(Recorder(), CHANNEL)


def test_who_is_lost_is_told_as_a_view_also_if_it_was_lost_before_the_machine_started() -> None:
    with threads(3) as (wires, communications):
        before, after = Recorder(), Recorder()
        loop = communications[0].loop
        loop.start(before, CHANNEL)
        assert heard(before, loop, 1) == ["start"]
        wires[2].kill()
        assert heard(before, loop, 2)[1:] == [("view", [], [2])]
        running = loop.start(after, CHANNEL + 1)
        assert heard(after, loop, 2) == ["start", ("view", [], [2])]
        running.request([SendMessage(2, "dropped")])
        assert running.request([]).result(DEADLINE_S) and running.error is None


def test_a_rank_that_comes_back_has_joined_and_one_that_is_new_too_and_a_retired_one_has_left() -> None:
    wires = threads_world(3)
    loop, machine = Loop(wires[0]), Recorder()
    running = loop.start(machine, CHANNEL)
    wires[2].kill()
    drive(wires[0], loop, lambda: len(machine.events) == 2)
    wires[0].retire(2, 1)  # of which the machine knows that it is gone
    wires[0].retire(1, 2)
    newcomers = [wires[0].newcomer(rank, generation) for rank, generation in ((2, 3), (5, 4))]
    for newcomer in newcomers:
        wires[0].admit(newcomer.peer)
    drive(wires[0], loop, lambda: len(machine.events) == 5)
    assert machine.events[1:] == [("view", [], [2]), ("view", [], [1]), ("view", [2], []), ("view", [5], [])]
    others = [Loop(newcomer) for newcomer in newcomers]
    machines = [Recorder(), Recorder()]
    for other, its in zip(others, machines, strict=True):
        other.start(its, CHANNEL)
        other.turn()
    reply = running.request([SendMessage(to, "hello") for to in (1, 2, 5)])  # to 1, which has left: dropped
    drive(wires[0], loop, reply.done)
    for newcomer, other, its in zip(newcomers, others, machines, strict=True):
        for _ in range(100):
            wires[0].progress(0.0)
            newcomer.progress(0.0)
            other.turn()
        assert its.events[-1] == (0, "hello", b"")
    assert running.error is None


def test_a_loss_that_is_found_while_an_event_is_carried_out_is_told_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a socket does it whose other end is gone: the loss is told inside `offer`."""
    wires = threads_world(3)
    loop, machine = Loop(wires[0]), Recorder()
    running = loop.start(machine, CHANNEL)
    loop.turn()
    offer = wires[0].offer

    def finds_it_lost(to: int, *message: Any) -> Any:
        if to == 1 and 1 not in wires[0].lost:
            wires[1].kill()
            wires[0].progress(0.0)
        return offer(to, *message)

    monkeypatch.setattr(wires[0], "offer", finds_it_lost)

    def send_and_note(ticket: int) -> Iterator[Any]:
        yield SendMessage(1, "x")
        assert 1 in wires[0].lost
        machine.events.append("sent")
        yield Reply(ticket, True)

    reply = running.request(send_and_note)
    drive(wires[0], loop, reply.done)
    assert machine.events == ["start", "sent", ("view", [], [1])] and running.error is None


def test_a_credit_that_is_too_small_ends_the_machine_with_the_reason() -> None:
    with threads(1) as (_, communications):
        running = communications[0].loop.start(Recorder(), CHANNEL, credit_bytes=1)
        with pytest.raises(ConfigurationError, match="credit_bytes=1"):
            running.request([]).result(DEADLINE_S)


def test_what_cannot_be_read_is_ignored_and_complained_of_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    with threads(2) as (wires, communications), caplog.at_level(logging.WARNING):
        machine = Recorder()
        communications[0].loop.start(machine, CHANNEL)
        good, bad = msgspec.msgpack.encode("good"), [b"", b"\xc1", b"\x91" * 5000, msgspec.msgpack.encode(7), b"\xa2\xff\xff"]

        def send_garbage() -> None:
            for header in [*bad * 5, good]:
                wires[1].offer(0, CHANNEL, header, memoryview(b""))

        communications[1].loop.call(send_garbage)
        assert heard(machine, communications[0].loop, 2)[1:] == [(1, "good", b"")]
        assert not wires[0].lost
    assert caplog.text.count("cannot be read") == MAX_COMPLAINTS


def test_a_peer_that_takes_nothing_bounds_what_is_sent_and_the_machine_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """At the receiver no more than its credit; at the sender no more than `unsent_bytes`, over which the machine ends."""
    wires = threads_world(2)
    loops = [Loop(wire) for wire in wires]
    sender, receiver = Recorder(), Recorder()
    running = loops[0].start(sender, CHANNEL, unsent_bytes=100_000)
    loops[1].start(receiver, CHANNEL, credit_bytes=30_000)
    loops[1].turn()
    reply = running.request([SendMessage(1, "x", bytes(10_000))] * 9)  # and no more progress at rank 1
    drive(wires[0], loops[0], reply.done)
    assert running.error is None and 60_000 < running.unsent[1] <= 90_100
    too_much = running.request([SendMessage(1, "x", bytes(10_000))] * 9)
    drive(wires[0], loops[0], too_much.done)
    with pytest.raises(StrettoError, match="to rank 1, which has not taken") as caught:
        too_much.result(0)
    assert "unsent_bytes=100000" in str(caught.value) and running.unsent[1] <= 100_000


def test_a_message_that_no_credit_suffices_for_ends_the_machine_with_the_reason() -> None:
    with threads(2) as (_, communications):
        communications[1].loop.start(Recorder(), CHANNEL, credit_bytes=1000)
        running = communications[0].loop.start(Recorder(), CHANNEL)
        waiting = running.request(lambda ticket: [SendMessage(1, "x", bytes(2000))])
        with pytest.raises(StrettoError, match="could never be sent"):
            waiting.result(DEADLINE_S)
