"""Large messages of a step wait until their target is done with the step before: two would share its link."""

from __future__ import annotations

from stretto.aggregate.gossip.exchange import (
    UNASKED_BYTES,
    MessageNote,
    MessagePiece,
    NeighbourExchange,
    Outgoing,
    Post,
    StepReady,
    StepTaken,
    Take,
)
from stretto.aggregate.gossip.graphs import OnePeerExponential
from stretto.protocol.machine import Actions, Reply, SendMessage

SIZE, NOTE, LARGE = 4, MessageNote(0.5, 1.0, whole=True), UNASKED_BYTES + 4


def exchange(late: int = 0, num_bytes: int = LARGE) -> NeighbourExchange:
    """Rank 0 of four: it sends to rank 1 in odd steps and to rank 2 in even ones, and hears from rank 3 and rank 2."""
    return NeighbourExchange(0, SIZE, OnePeerExponential(), whole_bytes=num_bytes, most_bytes=num_bytes, late=late)


def steps_that_left(actions: Actions) -> list[tuple[object, int]]:
    sent = [each for each in actions if isinstance(each, SendMessage)]
    return [(each.to, each.header.step) for each in sent if isinstance(each.header, MessagePiece)]


def post(machine: NeighbourExchange, step: int) -> list[tuple[object, int]]:
    message = Outgoing(1 + (step + 1) % 2, bytes(machine.whole_bytes), NOTE)
    return steps_that_left(machine.on_request(0.0, step, Post(step, [message])))


def end(machine: NeighbourExchange, step: int) -> list[object]:
    """Everything of this step arrives; returns to whom the machine says that it is ready."""
    source = 3 if step % 2 else 2
    whole = memoryview(bytes(machine.whole_bytes))
    machine.on_message(0.0, source, MessagePiece(step, NOTE, 0, whole.nbytes), whole)
    actions = list(machine.on_request(0.0, 100 + step, Take(step)))
    assert any(isinstance(each, Reply) for each in actions)
    return [each.to for each in actions if isinstance(each, SendMessage) and isinstance(each.header, StepReady)]


def test_the_next_message_waits_for_the_word_of_its_target() -> None:
    machine = exchange()

    assert post(machine, 1) == [(1, 1)], "nobody is behind when all begin"
    assert end(machine, 1) == [2], "whom it hears from in the next step"
    assert post(machine, 2) == []
    assert steps_that_left(machine.on_message(0.0, 2, StepReady(2), memoryview(b""))) == [(2, 2)]


def test_a_word_that_is_there_already_lets_a_message_leave_at_once() -> None:
    machine = exchange()
    post(machine, 1)
    end(machine, 1)
    assert steps_that_left(machine.on_message(0.0, 2, StepReady(2), memoryview(b""))) == []

    assert post(machine, 2) == [(2, 2)]


def test_messages_that_may_be_late_leave_so_many_steps_earlier() -> None:
    machine = exchange(late=1)

    assert post(machine, 1) == [(1, 1)]
    machine.on_message(0.0, 1, StepTaken(1), memoryview(b""))
    assert end(machine, 1) == [3], "whom it hears from in the step after the next"
    assert post(machine, 2) == [(2, 2)]


def test_a_small_message_waits_for_nothing() -> None:
    machine = exchange(num_bytes=UNASKED_BYTES)
    post(machine, 1)
    end(machine, 1)

    assert post(machine, 2) == [(2, 2)]


def test_nobody_waits_for_the_word_of_a_target_that_has_left() -> None:
    machine = exchange()
    post(machine, 1)
    end(machine, 1)
    assert post(machine, 2) == []
    machine.on_view(0.0, [], [2], 1)

    assert steps_that_left(machine.on_message(0.0, 2, StepReady(2), memoryview(b""))) == []
    assert any(isinstance(each, Reply) for each in machine.on_request(0.0, 102, Take(2)))
