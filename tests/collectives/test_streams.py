"""Ranks that wait in different streams of collectives: told at once if they can never meet, and left alone if they can."""

from __future__ import annotations

import _thread
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from collectives.ranks import Rank, integers
from stretto.collectives import catalogue, failures, inquiry
from stretto.collectives.plan import Kind
from stretto.collectives.request import Pending, Request
from stretto.collectives.whereabouts import Whereabouts
from stretto.errors import RankMismatch, WireError, WireTimeout
from stretto.job import Job
from stretto.launching.peers import ranks_text
from stretto.testing import run_jobs, run_virtual
from stretto.testing.network_model import Link, NetworkModel
from stretto.testing.virtual import VirtualWire
from stretto.timeouts import Timeouts

MODEL = NetworkModel(Link(latency_s=1e-4, bytes_per_s=1e8))
SOON_S = 3.0  # after the last rank has got stuck


def in_gradients(me: Rank) -> None:
    me.run(Kind.ALL_REDUCE, "ring", integers(me.rank, 10), channel=2)


def in_barrier(me: Rank) -> None:
    me.barrier()


def in_other_gradients(me: Rank) -> None:
    me.run(Kind.ALL_REDUCE, "butterfly", integers(me.rank, 20_000), channel=3)


def in_small_broadcast(me: Rank) -> None:
    me.run(Kind.BROADCAST, "binomial", integers(me.rank, 5), channel=4)


def compute(me: Rank, until_s: float) -> None:
    """As a rank does whose communication thread answers while it computes."""
    while me.wire.now() < until_s:
        me.communicator.step(0.1)


def mismatch(action: Callable[[], Any]) -> str:
    with pytest.raises(RankMismatch) as caught:
        action()
    return str(caught.value)


Call = Callable[[Rank], None]
A, B, C, D = in_gradients, in_barrier, in_other_gradients, in_small_broadcast
CALLS: dict[str, Call] = {"A": A, "B": B, "C": C, "D": D}
ROWS: dict[Call, str] = {A: "all_reduce(float32[10]", B: "barrier(", C: "all_reduce(float32[20000]", D: "broadcast(float32[5]"}


def get_stuck(wire: VirtualWire, calls: Sequence[Call], late: int) -> tuple[str, float]:
    me = Rank(wire)
    me.barrier()  # an ordinary one, so that there is a past
    compute(me, until_s=20.0 if me.rank == late else 0.0)
    text = mismatch(lambda: calls[me.rank](me))
    when = wire.now()
    compute(me, until_s=30.0)
    return text, when


def check_text(text: str, calls: Sequence[Call]) -> None:
    for call in set(calls):
        ranks = ranks_text(rank for rank, each in enumerate(calls) if each is call)
        (line,) = [line for line in text.splitlines() if line.startswith(f"  {ranks}: {ROWS[call]}")]
        assert ", called at " in line and "ranks.py:" in line


@pytest.mark.parametrize("calls", ["AB", "AC", "DB", "AAB", "BAA", "ABC", "DAA", "ABAB", "AACB", "BDCA", "AAAAAAB"])
def test_every_rank_names_all_places(calls: str) -> None:
    called = [CALLS[letter] for letter in calls]
    for text, when in run_virtual(len(calls), get_stuck, called, -1, model=MODEL):
        assert when < SOON_S
        check_text(text, called)


@pytest.mark.parametrize(("calls", "late"), [("AB", 1), ("BA", 1), ("AD", 0), ("DA", 0), ("AAB", 2), ("BAA", 0), ("CCDC", 2)])
def test_ranks_are_told_soon_after_the_last_one_has_got_stuck(calls: str, late: int) -> None:
    called = [CALLS[letter] for letter in calls]
    for text, when in run_virtual(len(calls), get_stuck, called, late, model=MODEL):
        assert 20.0 < when < 20.0 + SOON_S
        check_text(text, called)


def test_a_rank_in_neither_is_told_when_it_comes() -> None:
    def program(wire: VirtualWire) -> tuple[list[str], float]:
        me = Rank(wire)
        if me.rank < 2:
            text = mismatch(lambda: (A, B)[me.rank](me))
            when = wire.now()
            compute(me, until_s=50.0)
            return [text], when
        compute(me, until_s=40.0)
        before = wire.now()
        return [mismatch(lambda: A(me)), mismatch(lambda: B(me))], wire.now() - before

    results = run_virtual(3, program, model=MODEL)
    assert results[0][1] < SOON_S and results[1][1] < SOON_S
    (first, second), waited_s = results[2]
    assert waited_s < 0.01
    for text in (first, second, results[0][0][0]):
        assert "rank 2: in no collective, at " in text and "in compute" in text


@pytest.mark.parametrize("size", [2, 3, 7])
def test_after_it_every_stream_can_be_used_again(size: int) -> None:
    def program(wire: VirtualWire) -> None:
        me = Rank(wire)
        for order in ((A, B), (C, A)):
            first, second = (partial(call, me) for call in (reversed(order) if me.rank == 0 else order))
            assert mismatch(first) == mismatch(second)  # the other one was given up by all as well
            tensor = integers(me.rank, 10)
            me.run(Kind.ALL_REDUCE, "ring", tensor, channel=2)
            assert torch.equal(tensor, torch.stack([integers(rank, 10) for rank in range(size)]).sum(0))
            me.barrier()

    run_virtual(size, program, model=MODEL)


def test_what_else_is_under_way_in_the_stream_ends_with_it() -> None:
    """The buckets of a round leave together; whoever gets the error waits for all of them."""

    def program(wire: VirtualWire) -> tuple[int, float]:
        me = Rank(wire)
        if me.rank == 1:
            mismatch(me.barrier)
            compute(me, until_s=60.0)
            return 0, 0.0
        buckets = [me.start(Kind.ALL_REDUCE, "ring", integers(me.rank, 10), channel=2) for _ in range(5)]
        errors = [mismatch(bucket.wait) for bucket in buckets]
        return len(set(errors)), wire.now()

    for texts, when in run_virtual(3, program, model=MODEL)[::2]:
        assert texts == 1 and when < SOON_S


# No alarm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_that_is_in_nothing_is_waited_for(size: int) -> None:
    def program(wire: VirtualWire) -> float:
        me = Rank(wire)
        compute(me, until_s=25.0 if me.rank == 1 else 0.0)
        A(me)
        B(me)
        return wire.now()

    assert all(25.0 < when < 25.1 for when in run_virtual(size, program, model=MODEL))


def test_ranks_in_an_odd_order_that_comes_out_right_are_left_alone() -> None:
    """Rank 0 sends along a chain to 1 and 2, rank 2 along one to 0 and 1. Ranks 0 and 2 are in different streams, and neither has
    begun the other's; but rank 0 waits for rank 1 alone, which is only late."""

    def program(wire: VirtualWire) -> float:
        me = Rank(wire)
        compute(me, until_s=20.0 if me.rank == 1 else 0.0)
        streams = [(2, 0), (3, 2)]
        if me.rank == 2:
            streams.reverse()
        tensors = {}
        for channel, root in streams:
            tensors[channel] = integers(me.rank, 3)
            me.run(Kind.BROADCAST, "chain", tensors[channel], root=root, channel=channel)
        assert torch.equal(tensors[2], integers(0, 3)) and torch.equal(tensors[3], integers(2, 3))
        return wire.now()

    assert min(run_virtual(3, program, model=MODEL)) > 20.0


def test_what_a_rank_has_begun_and_not_waited_for_is_no_reason_for_alarm() -> None:
    """Rank 0 has begun what rank 1 waits in, and waits in the barrier; what is missing is rank 2, which is late."""

    def program(wire: VirtualWire) -> float:
        me = Rank(wire)
        compute(me, until_s=20.0 if me.rank == 2 else 0.0)
        pending = me.start(Kind.ALL_REDUCE, "ring", integers(me.rank, 10), channel=2)
        if me.rank == 0:
            me.barrier()
        pending.wait()
        if me.rank != 0:
            me.barrier()
        return wire.now()

    assert min(run_virtual(3, program, model=MODEL)) > 20.0


def test_ranks_that_have_done_their_part_of_a_broadcast_that_failed_for_others_go_on() -> None:
    """Rank 3 is elsewhere, and only the rank that sends to it gets stuck with it. All meet again in the next broadcast."""

    def program(wire: VirtualWire) -> list[str]:
        me = Rank(wire)
        failed = [mismatch(partial(A, me))] if me.rank == 3 else []
        try:
            D(me)
        except RankMismatch as error:
            failed.append(str(error))
        D(me)
        return failed

    assert [len(failed) for failed in run_virtual(4, program, model=MODEL)] in ([0, 0, 1, 2], [0, 1, 0, 2], [1, 0, 0, 2])


class Questions:
    """Counts the answers that a rank's communicator has judged, to wait for so many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._counts: dict[int, int] = {}
        self._changed = threading.Condition()
        judge = inquiry.Inquiry._conclude

        def counted(this: inquiry.Inquiry, *arguments: Any) -> None:
            judge(this, *arguments)
            with self._changed:
                self._counts[this._roster.rank] = self._counts.get(this._roster.rank, 0) + 1
                self._changed.notify_all()

        monkeypatch.setattr(inquiry.Inquiry, "_conclude", counted)

    def wait(self, rank: int, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._counts.get(rank, 0) >= count, 30)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask after a twentieth of a second. The rule has no clock in it, so this makes nothing less certain."""
    monkeypatch.setattr(inquiry, "ASK_S", 0.05)


def in_threads(*actions: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def guarded(action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def stream(job: Job, channel: int, number: int) -> None:
    job.whereabouts.claim(channel)
    tensor = torch.ones(10)
    job.run(Kind.ALL_REDUCE, tensor, "ring", name=(channel, number))
    assert tensor.tolist() == [float(job.world_size)] * 10


def test_two_threads_with_a_stream_each_may_be_at_different_places(monkeypatch: pytest.MonkeyPatch, soon: None) -> None:
    """On rank 0 the first thread waits while the second is busy; on rank 1 it is the other way round."""
    questions = Questions(monkeypatch)

    def program(job: Job) -> None:
        def first() -> None:
            stream(job, 2, 0)
            if job.rank == 1:
                questions.wait(0, 2)
            stream(job, 2, 1)

        def second() -> None:
            stream(job, 3, 0)
            if job.rank == 0:
                questions.wait(1, 2)
            stream(job, 3, 1)

        in_threads(first, second)

    run_jobs(2, program)


def test_streams_that_change_hands_among_threads_belong_to_all_of_them(monkeypatch: pytest.MonkeyPatch, soon: None) -> None:
    """As in a pool: the thread that had both streams last waits in one of them, and its neighbour comes with the other."""
    questions = Questions(monkeypatch)

    def program(job: Job) -> None:
        handed_over = threading.Event()
        order = (2, 3) if job.rank == 0 else (3, 2)

        def first() -> None:
            stream(job, 2, 0)
            stream(job, 3, 0)
            handed_over.set()
            questions.wait(0, 2)
            questions.wait(1, 2)
            stream(job, order[1], 2)

        def second() -> None:
            assert handed_over.wait(30)
            stream(job, 2, 1)
            stream(job, 3, 1)
            stream(job, order[0], 2)

        in_threads(first, second)

    run_jobs(2, program)


def test_a_thread_that_waits_for_two_on_another_rank_is_left_alone(monkeypatch: pytest.MonkeyPatch, soon: None) -> None:
    """Rank 0 has a thread for each stream, of which one is busy at first; rank 1 has one thread for both."""
    questions = Questions(monkeypatch)

    def program(job: Job) -> None:
        def second() -> None:
            stream(job, 3, 0)
            questions.wait(0, 2)
            questions.wait(1, 2)
            stream(job, 3, 1)

        def first() -> None:
            stream(job, 2, 0)
            stream(job, 2, 1)

        def both() -> None:
            for number in range(2):
                stream(job, 3, number)
                stream(job, 2, number)

        in_threads(*((first, second) if job.rank == 0 else (both,)))

    run_jobs(2, program)


def test_a_thread_that_waits_for_something_else_will_come(monkeypatch: pytest.MonkeyPatch, soon: None) -> None:
    """On rank 0 the thread that owes rank 1 its answer is blocked too, but in something that will end: rank 2 is only late."""
    questions = Questions(monkeypatch)

    def program(job: Job) -> None:
        def stay(number: int) -> None:
            stream(job, 3, 0)
            stream(job, 3, number)

        def one_thread() -> None:
            job.whereabouts.claim(3)
            job.whereabouts.claim(2)
            if job.rank == 2:
                questions.wait(0, 2)
                questions.wait(1, 2)
            flat = torch.ones(10)
            pending = job.start(Kind.ALL_REDUCE, flat, "ring", name=(3, 0))  # not waited for yet
            stream(job, 3, 1)
            pending.wait()
            stream(job, 2, 0)

        in_threads(*((lambda: stream(job, 2, 0), lambda: stay(1)) if job.rank == 0 else (one_thread,)))

    run_jobs(3, program)


def test_one_thread_that_is_stuck_is_enough_where_the_other_has_nothing_to_do_with_it(soon: None) -> None:
    def program(job: Job) -> str:
        over = threading.Event()
        texts = []

        def first() -> None:
            job.barrier()
            stream(job, 2, 0)
            texts.append(mismatch(lambda: job.barrier() if job.rank == 1 else stream(job, 2, 1)))
            over.set()

        def second() -> None:
            stream(job, 3, 0)
            assert over.wait(30)
            stream(job, 3, 1)

        in_threads(first, second)
        return texts[0]

    for text in run_jobs(2, program):
        assert "barrier(" in text and "all_reduce(" in text


# What a rank says of itself ----------------------------------------------------------------------------------------


def test_a_warning_and_the_deadline_say_what_the_missing_rank_does(caplog: pytest.LogCaptureFixture) -> None:
    impatient = Timeouts(warn_s=2.0, arrive_s=10.0)

    def program(wire: VirtualWire) -> WireError | None:
        me = Rank(wire, impatient)
        if me.rank == 1:
            compute(me, until_s=30.0)
            return None
        with pytest.raises(WireTimeout) as caught:
            me.barrier()
        return caught.value

    with caplog.at_level(logging.WARNING, "stretto"):
        first, _, third = run_virtual(3, program, model=MODEL)
    assert "still waiting for rank 1 in barrier(" in caplog.text and "rank 1: in no collective, at " in caplog.text
    for error in (first, third):
        assert error.rank == 1
        assert "It is in no collective, at " in str(error) and "test_streams.py:" in str(error) and "in compute" in str(error)
        assert "allow more time" in str(error)


def test_a_rank_that_does_not_answer_is_said_not_to() -> None:
    def program(wire: VirtualWire) -> WireError | None:
        me = Rank(wire, Timeouts(warn_s=2.0, arrive_s=5.0))
        if me.rank == 1:
            wire.compute(20.0)
            return None
        with pytest.raises(WireTimeout, match="no questions: something holds its interpreter") as caught:
            me.barrier()
        return caught.value

    run_virtual(2, program, model=MODEL)


def test_what_was_begun_long_ago_still_counts_as_begun() -> None:
    def program(wire: VirtualWire) -> None:
        me = Rank(wire)
        for _ in range(failures.HISTORY + 50):
            me.barrier()
        communicator = me.communicator
        assert communicator.has_begun((1, 0)) and communicator.has_begun((1, failures.HISTORY + 49))
        assert not communicator.has_begun((1, failures.HISTORY + 50)) and not communicator.has_begun((2, 0))
        assert communicator.belief((1, 0)) == "" != communicator.belief((1, failures.HISTORY))

    run_virtual(2, program, model=MODEL)


def test_threads_that_have_ended_own_nothing() -> None:
    whereabouts = Whereabouts()
    in_threads(lambda: whereabouts.claim(2))
    assert whereabouts.blocking(2) == []
    whereabouts.claim(1)
    with whereabouts.waiting(1):
        assert [wait.channel for wait in whereabouts.blocking(2)] == [1]  # nobody else is left who could use it
        whereabouts.carrying(2, 1)
        assert whereabouts.blocking(2) == []


def in_autograds_thread(action: Callable[[], object]) -> None:
    """In a thread that the module `threading` does not know: as hooks run on a GPU."""
    errors: list[BaseException] = []
    done = threading.Event()

    def guarded() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)
        done.set()

    _thread.start_new_thread(guarded, ())
    assert done.wait(30)
    if errors:
        raise errors[0]


def test_a_thread_of_autograds_acts_for_the_thread_that_owns_the_stream() -> None:
    whereabouts = Whereabouts()
    me = threading.get_ident()

    def check() -> None:
        assert whereabouts.claim(2) == me
        with whereabouts.waiting(2):
            (wait,) = whereabouts.blocking(2)
            assert wait.thread == me and "test_streams.py" in whereabouts.place_of_thread(me)

    in_autograds_thread(lambda: whereabouts.claim(2) is None or pytest.fail("nobody has used any stream"))
    whereabouts.claim(2)
    in_autograds_thread(check)
    assert whereabouts.blocking(2) == []

    def second() -> None:
        whereabouts.claim(3)  # a stream of its own
        in_autograds_thread(check)

    in_threads(second)


def test_waits_may_end_in_any_order_and_leave_nothing() -> None:
    """Backward has a thread for each GPU, and both act for the one that called it; a signal handler may wait within a wait."""
    whereabouts = Whereabouts()
    plan = catalogue.plan(Kind.BARRIER, "dissemination", 0, 2)
    first, second = (Pending(Request(plan, torch.empty(0), channel=2, sequence=number)) for number in range(2))
    one, two = whereabouts.begin_wait(2, first), whereabouts.begin_wait(2, second)
    assert whereabouts.waits() == [two]
    first.finish(None)
    whereabouts.end_wait(one)
    whereabouts.end_wait(two)
    assert whereabouts.waits() == []
    with whereabouts.waiting(2):
        with whereabouts.waiting(3):
            assert [wait.channel for wait in whereabouts.waits()] == [3]
        assert [wait.channel for wait in whereabouts.waits()] == [2]
    assert whereabouts.waits() == []


def test_with_two_threads_in_doubt_a_wait_of_autograds_is_nobodys() -> None:
    whereabouts = Whereabouts()
    whereabouts.claim(2)

    def wait_for_somebody() -> None:
        with whereabouts.waiting(2):
            assert whereabouts.waits() == []

    def second() -> None:
        whereabouts.claim(2)
        in_autograds_thread(wait_for_somebody)

    in_threads(second)


def test_a_collective_whose_data_is_on_its_way_to_host_memory_has_begun() -> None:
    def program(job: Job) -> None:
        arrived = threading.Event()
        pending = job.start(Kind.ALL_REDUCE, torch.ones(4), "ring", name=(2, 0), ready=arrived.is_set)
        assert job._communication is not None
        communicator = job._communication.communicator
        assert communicator.has_begun((2, 0)) and not communicator.has_begun((2, 1))
        arrived.set()
        pending.wait()
        assert communicator.has_begun((2, 0))

    run_jobs(2, program)
