"""What goes wrong goes wrong everywhere, at once, and names the culprit. Nobody hangs."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives.ranks import ALL_REDUCES, Rank, integers, run_ranks
from stretto.collectives import catalogue
from stretto.collectives.communication import CommunicationThread
from stretto.collectives.execute import Communicator
from stretto.collectives.inquiry import ASK_S
from stretto.collectives.plan import Kind
from stretto.collectives.request import Request
from stretto.collectives.run import EAGER_BYTES
from stretto.errors import FrameError, PeerLost, RankMismatch, WireError, WireTimeout
from stretto.launching.peers import ranks_text
from stretto.testing import run_threads, run_virtual
from stretto.testing.faults import Cut, Kill, Pause
from stretto.testing.network_model import Link, NetworkModel
from stretto.testing.threads import threads_world
from stretto.testing.virtual import VirtualWire
from stretto.timeouts import Timeouts
from stretto.wire.base import Wire

MODEL = NetworkModel(Link(latency_s=1e-4, bytes_per_s=1e8))
IMPATIENT = Timeouts(warn_s=2.0, arrive_s=10.0)
LARGE = EAGER_BYTES // 4 + 1
Call = Callable[[Rank], Any]


def failure(action: Callable[[], Any]) -> WireError | None:
    try:
        action()
    except (PeerLost, WireTimeout, FrameError, RankMismatch) as error:
        return error
    return None


def total(size: int, length: int) -> torch.Tensor:
    return torch.stack([integers(rank, length) for rank in range(size)]).sum(0)


# A rank that dies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2000, 200_000], ids=["small", "large"])
@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_every_survivor_of_a_kill_names_the_dead_and_so_does_the_next_collective(algorithm: str, length: int) -> None:
    def program(wire: VirtualWire) -> tuple[WireError | None, WireError | None, float]:
        me = Rank(wire)
        first = failure(lambda: me.all_reduce(algorithm, integers(me.rank, length)))
        before = wire.now()
        return first, failure(lambda: me.all_reduce(algorithm, integers(me.rank, length))), wire.now() - before

    # Messages of up to 2000 floats take up to 0.08 ms, of 200000 up to 8 ms: the kill falls before rank 2's part is complete.
    results = run_virtual(4, program, model=MODEL, faults=[Kill(2, at_s=1e-5 if length == 2000 else 3e-3)])
    assert results.pop(2) is None
    for first, following, took in results:
        assert isinstance(first, PeerLost) and first.rank == 2
        assert isinstance(following, PeerLost) and following.rank == 2
        assert took < 0.1


@pytest.mark.parametrize("size", [4, 7])
def test_two_failures_at_the_same_time_are_one_error_at_all_survivors(size: int) -> None:
    """Rank 1 sends what rank 2 cannot use, and the last rank dies: each is found first by another survivor, or by all of them."""

    def program(wire: VirtualWire) -> WireError | None:
        me = Rank(wire)
        segment_bytes = 8 if me.rank == 1 else 1 << 20
        return failure(lambda: me.all_reduce("ring", integers(me.rank, 30), segment_bytes=segment_bytes))

    model, seen = NetworkModel(Link(latency_s=1e-4, bytes_per_s=1e8), detect_s=1e-4), set()
    for step in range(12):
        results = run_virtual(size, program, model=model, faults=[Kill(size - 1, at_s=2e-5 * step)])
        errors = {str(error) for error in results[: size - 1]}
        assert len(errors) == 1, f"step {step}"
        seen |= {type(error) for error in results[: size - 1]}
    assert seen == {FrameError, PeerLost}


@pytest.mark.parametrize("fault", [Pause(1, at_s=3e-3, for_s=100.0), Cut((1,), at_s=3e-3)], ids=["stopped", "cut off"])
def test_a_rank_that_falls_silent_is_lost_to_all_others(fault: Pause | Cut) -> None:
    def program(wire: VirtualWire) -> tuple[WireError | None, float]:
        me = Rank(wire)
        return failure(lambda: me.all_reduce("ring", integers(me.rank, 200_000))), wire.now()

    results = run_virtual(4, program, model=MODEL, faults=[fault])
    for rank in (0, 2, 3):
        error, when = results[rank]
        assert isinstance(error, PeerLost) and error.rank == 1
        assert MODEL.silence_s <= when < MODEL.silence_s + 0.1
    assert isinstance(results[1][0], PeerLost)


def test_when_one_link_is_cut_the_ranks_that_still_see_everybody_fail_too_and_again() -> None:
    """Ranks 0 and 1 lose each other, 2 and 3 lose nobody: neither this collective nor the next may wait for ever."""

    def program(wire: VirtualWire) -> tuple[WireError | None, WireError | None, float]:
        me = Rank(wire)
        first = failure(lambda: me.all_reduce("ring", integers(me.rank, 200_000)))
        before = wire.now()
        return first, failure(lambda: me.all_reduce("ring", integers(me.rank, 200_000))), wire.now() - before

    for first, second, took in run_virtual(4, program, model=MODEL, faults=[Cut((0,), at_s=3e-3, others=(1,))]):
        assert isinstance(first, PeerLost) and first.rank in (0, 1)
        assert isinstance(second, PeerLost) and second.rank in (0, 1)
        assert took < 1.0


@pytest.mark.parametrize("eager", [True, False])
def test_a_kill_on_threads_reaches_every_survivor(eager: bool) -> None:
    wires = threads_world(4, eager=eager)
    all_have_left_the_barrier = threading.Barrier(4)

    def program(wire: Wire) -> WireError | None:
        me = Rank(wire)
        me.barrier()
        all_have_left_the_barrier.wait(20)
        if wire.rank == 3:
            me.start(Kind.ALL_REDUCE, "ring", integers(3, 1000))
            wires[3].kill("on purpose")
            me.barrier()
        return failure(lambda: me.all_reduce("ring", integers(me.rank, 1000)))

    results = run_threads(4, program, wires=wires)
    assert wires[0].lost[3].reason == "on purpose"
    assert [error.rank for error in results[:3]] == [3, 3, 3]
    assert all(isinstance(error, PeerLost) for error in results[:3])


def test_with_a_communication_thread_a_kill_fails_everything_under_way() -> None:
    wires = threads_world(3)

    def program(wire: Wire) -> list[WireError | None]:
        thread = CommunicationThread(Communicator(wire))
        try:
            if wire.rank == 1:
                wires[1].kill("on purpose")
                return []
            plan = catalogue.plan(Kind.ALL_REDUCE, "ring", wire.rank, 3)
            pending = [thread.start(Request(plan, integers(wire.rank, 100), sequence=number)) for number in range(5)]
            return [failure(one.wait) for one in pending]
        finally:
            thread.stop(5.0)

    logging.getLogger("stretto.collectives").disabled = True  # the killed rank's own thread says so, at length
    try:
        results = run_threads(3, program, wires=wires)
    finally:
        logging.getLogger("stretto.collectives").disabled = False
    for errors in (results[0], results[2]):
        assert [error.rank for error in errors] == [1] * 5


# A rank that leaves ------------------------------------------------------------------------------------------------


def test_ranks_that_leave_after_their_part_fail_nobody() -> None:
    """Ranks 1 and 3 only send in a reduction to rank 0; they are gone when rank 2, a second late, has not even begun."""

    def program(wire: VirtualWire) -> tuple[float, WireError | None]:
        me = Rank(wire)
        if wire.rank == 2:
            wire.compute(1.0)
        tensor = integers(me.rank, 10)
        me.run(Kind.REDUCE, "binomial", tensor)
        left = wire.now()
        if wire.rank:
            return left, None
        assert torch.equal(tensor, total(4, 10))
        return left, failure(me.barrier)

    results = run_virtual(4, program, model=MODEL)
    assert results[1][0] < 0.01 < 1.0 < results[0][0]
    assert isinstance(results[0][1], PeerLost) and "left the job" in str(results[0][1])


def test_a_rank_that_has_left_is_not_blamed_for_one_that_is_late() -> None:
    """Rank 1 has left, having done its part; rank 2 never comes, and says nothing."""

    def program(wire: VirtualWire) -> WireError | None:
        me = Rank(wire, IMPATIENT)
        if wire.rank == 2:
            wire.compute(100.0)
            return None
        return failure(lambda: me.run(Kind.REDUCE, "binomial", integers(me.rank, 10)))

    results = run_virtual(3, program, model=MODEL)
    assert results[1] is None
    assert isinstance(results[0], WireTimeout) and results[0].rank == 2


# A rank that does not come -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [10, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("answers", [True, False], ids=["answers", "is busy"])
@pytest.mark.parametrize("algorithm", ["ring", "butterfly", "master_worker", "double_binary_tree"])
def test_a_rank_that_never_calls_is_named_by_all_others_at_the_deadline(
    algorithm: str, answers: bool, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    def program(wire: VirtualWire) -> tuple[WireError | None, float]:
        me = Rank(wire, IMPATIENT)
        while answers and wire.rank == 2 and wire.now() < 30.0:
            me.communicator.step(0.1)  # as its communication thread would
        if wire.rank == 2:
            wire.compute(30.0 - wire.now())
        error = failure(lambda: me.all_reduce(algorithm, integers(me.rank, length)))
        return error, wire.now()

    with caplog.at_level(logging.WARNING, "stretto"):
        results = run_virtual(4, program, model=MODEL)
    for rank, (error, when) in enumerate(results):
        assert isinstance(error, WireTimeout) and error.rank == 2
        assert "all_reduce(float32" in str(error)
        # The deadline, a turn of the clock to notice it, and the time that others have to answer.
        assert (30.0 if rank == 2 else 10.0) <= when <= (30.1 if rank == 2 else 10.0 + 0.5 + ASK_S + 0.25)
    assert results[0][1] == pytest.approx(results[1][1], abs=2e-3)
    waiting = [record.getMessage() for record in caplog.records if "still waiting for rank 2 in" in record.getMessage()]
    assert {message.split(":")[0] for message in waiting} >= {"rank 0", "rank 1", "rank 3"}
    assert re.search("after [234] s", waiting[0])


def test_a_rank_that_comes_late_but_in_time_is_only_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def program(wire: VirtualWire) -> float:
        me = Rank(wire, IMPATIENT)
        wire.compute(5.0 * (wire.rank == 1))
        tensor = me.all_reduce("ring", integers(me.rank, 10))
        assert torch.equal(tensor, total(3, 10))
        return wire.now()

    assert max(run_virtual(3, program, model=MODEL)) < 5.01
    assert "rank 0: still waiting for rank 1 in all_reduce(float32[10], op=sum" in caplog.text


# Ranks that disagree -----------------------------------------------------------------------------------------------


def reduce_all(length: int = 10, dtype: torch.dtype = torch.float32, op: str = "sum", algorithm: str = "ring") -> Call:
    return lambda me: me.all_reduce(algorithm, integers(me.rank, length).to(dtype), op)


def gather(length: int = 12) -> Call:
    return lambda me: me.run(Kind.ALL_GATHER, "ring", integers(me.rank, length))


def barrier(me: Rank) -> None:
    me.barrier()


DIFFERENCES: dict[str, tuple[Call, Call, str, str]] = {
    "sizes": (reduce_all(10), reduce_all(11), r"float32\[10\]", r"float32\[11\]"),
    "an empty one": (reduce_all(10), reduce_all(0), r"float32\[10\]", r"float32\[0\]"),
    "all empty but one": (reduce_all(0), reduce_all(10), r"float32\[0\]", r"float32\[10\]"),
    "large sizes": (reduce_all(LARGE), reduce_all(LARGE + 1), rf"float32\[{LARGE}\]", rf"float32\[{LARGE + 1}\]"),
    "small and large": (reduce_all(10), reduce_all(LARGE), r"float32\[10\]", rf"float32\[{LARGE}\]"),
    "large and small": (reduce_all(LARGE), reduce_all(10), rf"float32\[{LARGE}\]", r"float32\[10\]"),
    "dtypes": (reduce_all(), reduce_all(dtype=torch.int32), "float32", "int32"),
    "operations": (reduce_all(op="sum"), reduce_all(op="max"), "op=sum", "op=max"),
    "algorithms": (reduce_all(), reduce_all(algorithm="butterfly"), "algorithm=ring", "algorithm=butterfly"),
    "trees": (
        reduce_all(algorithm="binomial_tree"), reduce_all(algorithm="chain"), "algorithm=binomial_tree", "algorithm=chain",
    ),
    "kinds": (reduce_all(12), gather(12), r"all_reduce\(", r"all_gather\("),
    "a barrier": (reduce_all(), barrier, r"all_reduce\(", r"barrier\("),
    "all but one at the barrier": (barrier, gather(), r"barrier\(", r"all_gather\("),
}  # fmt: skip


def check_mismatch(errors: list[WireError | None], odd: int, usual_text: str, odd_text: str) -> None:
    others = ranks_text(rank for rank in range(len(errors)) if rank != odd)
    for error in errors:
        assert isinstance(error, RankMismatch)
        assert re.search(rf"\n  {others}: .*{usual_text}", str(error))
        assert re.search(rf"\n  rank {odd}: .*{odd_text}", str(error))


@pytest.mark.parametrize("odd", range(4))
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_that_disagree_all_say_who_called_what_and_go_on(difference: str, odd: int) -> None:
    usual, other, usual_text, odd_text = DIFFERENCES[difference]

    def program(wire: VirtualWire) -> tuple[WireError | None, float]:
        me = Rank(wire)
        error = failure(lambda: (other if me.rank == odd else usual)(me))
        when = wire.now()
        for algorithm in ("ring", "butterfly"):  # the job is not broken
            assert torch.equal(me.all_reduce(algorithm, integers(me.rank, 33)), total(4, 33))
        return error, when

    results = run_virtual(4, program, model=MODEL)
    check_mismatch([error for error, _ in results], odd, usual_text, odd_text)
    assert max(when for _, when in results) < 2.0


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("difference", ["sizes", "large sizes", "small and large", "kinds"])
def test_ranks_that_disagree_on_threads_find_out_too(difference: str, eager: bool) -> None:
    usual, other, usual_text, odd_text = DIFFERENCES[difference]

    def program(me: Rank) -> WireError | None:
        error = failure(lambda: (other if me.rank == 1 else usual)(me))
        assert torch.equal(me.all_reduce("ring", integers(me.rank, 33)), total(3, 33))
        me.barrier()
        return error

    check_mismatch(run_ranks(3, program, eager=eager), 1, usual_text, odd_text)


def test_every_rank_may_have_a_belief_of_its_own() -> None:
    def program(me: Rank) -> str:
        return str(failure(lambda: me.all_reduce("ring", integers(me.rank, 10 + me.rank))))

    for text in run_ranks(4, program):
        assert all(f"rank {rank}: all_reduce(float32[{10 + rank}], op=sum, algorithm=ring" in text for rank in range(4))


def test_a_rank_that_comes_to_a_dispute_late_is_told_all_about_it() -> None:
    def program(wire: VirtualWire) -> WireError | None:
        me = Rank(wire)
        while wire.rank == 3 and wire.now() < 20.0:
            me.communicator.step(0.1)
        error = failure(lambda: me.all_reduce("ring", integers(me.rank, 11 if me.rank == 1 else 10)))
        while wire.now() < 25.0:
            me.communicator.step(0.1)
        return error

    results = run_virtual(4, program, model=MODEL)
    for error in results:
        assert isinstance(error, RankMismatch)
        assert "rank 1: all_reduce(float32[11]" in str(error)
    assert f"{ranks_text([0, 2, 3])}: all_reduce(float32[10]" in str(results[3])
    assert re.search(r"\n    rank 3 at .*ranks.py:\d+ in start", str(results[3]))  # the others have begun to wait


# Rooted kinds: some ranks only send, and may have returned before anybody finds out


@pytest.mark.parametrize("roots", [(0, 0, 0, 1), (1, 0, 0, 0), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize(("kind", "length"), [(Kind.BROADCAST, 10), (Kind.BROADCAST, LARGE), (Kind.REDUCE, 10)])
def test_ranks_that_disagree_about_the_root_do_not_go_on_as_if_nothing_was(
    kind: Kind, length: int, roots: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    def program(wire: VirtualWire) -> WireError | None:
        me = Rank(wire)
        error = failure(lambda: me.run(kind, "binomial", integers(me.rank, length), root=roots[me.rank]))
        assert torch.equal(me.all_reduce("ring", integers(me.rank, 33)), total(4, 33))
        return error

    results = run_virtual(4, program, model=MODEL)
    for rank, error in enumerate(results):
        if error is None:  # it had done its part
            assert f"rank {rank} had done its part of a collective when rank" in caplog.text
        else:
            assert isinstance(error, RankMismatch)
            assert all(f"root={root}" in str(error) for root in set(roots))
    odd = [rank for rank in range(4) if roots.count(roots[rank]) == 1]
    assert all(isinstance(results[rank], RankMismatch) for rank in odd)


@pytest.mark.parametrize("odd", range(4))
def test_a_root_does_not_return_from_a_broadcast_that_its_receivers_see_differently(odd: int) -> None:
    def program(wire: VirtualWire) -> WireError | None:
        me = Rank(wire)
        error = failure(lambda: me.run(Kind.BROADCAST, "chain", integers(me.rank, 11 if me.rank == odd else 10)))
        me.barrier()
        return error

    results = run_virtual(4, program, model=MODEL)
    assert isinstance(results[odd], RankMismatch)
    assert any(isinstance(error, RankMismatch) for rank, error in enumerate(results) if rank != odd)


def test_ranks_that_wait_for_each_other_in_different_collectives_are_found_out() -> None:
    """Rank 0 waits for rank 3, 1 and 2 for rank 0, and 3 for rank 2, from which nothing will come: no digest meets another."""

    def program(wire: VirtualWire) -> tuple[WireError | None, float]:
        me = Rank(wire)
        call = reduce_all(1, algorithm="master_worker") if me.rank < 3 else gather(1)
        return failure(lambda: call(me)), wire.now()

    for error, when in run_virtual(4, program, model=MODEL):
        assert isinstance(error, RankMismatch)
        assert f"{ranks_text([0, 1, 2])}: all_reduce(" in str(error) and "rank 3: all_gather(" in str(error)
        assert ASK_S < when < ASK_S + 0.5


@pytest.mark.parametrize("length", [10, LARGE], ids=["small", "large"])
def test_a_rank_that_gathers_while_others_send_to_it_is_found_out_at_once(length: int) -> None:
    def program(wire: VirtualWire) -> tuple[WireError | None, float]:
        me = Rank(wire)
        kind = Kind.REDUCE if me.rank == 0 else Kind.BROADCAST
        return failure(lambda: me.run(kind, "binomial", integers(me.rank, length))), wire.now()

    for error, when in run_virtual(4, program, model=MODEL):
        assert isinstance(error, RankMismatch)
        assert "rank 0: reduce(" in str(error) and f"{ranks_text([1, 2, 3])}: broadcast(" in str(error)
        assert when < 0.1


# A rank that sends nonsense ----------------------------------------------------------------------------------------


def test_a_message_of_the_wrong_length_is_an_error_on_every_rank() -> None:
    """Cut differently, the same collective has other messages: no difference of opinion, but a broken peer."""

    def program(me: Rank) -> WireError | None:
        segment_bytes = 8 if me.rank == 1 else 1 << 20
        error = failure(lambda: me.all_reduce("ring", integers(me.rank, 30), segment_bytes=segment_bytes))
        assert torch.equal(me.all_reduce("ring", integers(me.rank, 33)), total(3, 33))
        return error

    for error in run_ranks(3, program):
        assert isinstance(error, FrameError)
        assert "bytes where" in str(error)


def test_control_messages_that_make_no_sense_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    def program(me: Rank) -> None:
        for peer in range(me.size):
            for topic in range(16, 22):
                if peer != me.rank:
                    me.wire.post(peer, topic, b"\xc1 nonsense")
        assert torch.equal(me.all_reduce("ring", integers(me.rank, 33)), total(3, 33))

    run_ranks(3, program)
    assert "ignored a malformed" in caplog.text
