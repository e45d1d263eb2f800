"""Sends and receives: tags, any source, order, deadlines, and what a lost member does to them."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.errors import ConfigurationError, PeerLost, WireTimeout
from stretto.timeouts import Timeouts
from stretto.torch_backend.process_group import StrettoGroup
from torch_backend.groups import run_groups


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("length", [3, 100_000])
def test_round_the_ring_both_ways_at_once(size: int, length: int) -> None:
    def program(group: StrettoGroup) -> None:
        rank = group.rank()
        right, left = (rank + 1) % size, (rank - 1) % size
        got = {neighbour: torch.empty(length) for neighbour in ("left", "right")}
        works = [
            group.send([torch.full((length,), float(rank))], right, 0),
            group.recv([got["left"]], left, 0),
            group.send([torch.full((length,), rank + 0.5)], left, 1),
            group.recv([got["right"]], right, 1),
        ]
        for work in works:
            work.wait()
        assert got["left"].eq(left).all() and got["right"].eq(right + 0.5).all()

    run_groups(size, program)


def test_tags_are_received_in_any_order_and_each_in_its_own() -> None:
    def program(group: StrettoGroup) -> list[float]:
        if group.rank() == 0:
            works = [group.send([torch.tensor([10.0 * tag + number])], 1, tag) for number in range(3) for tag in (4, 5)]
            for work in works:
                work.wait()
            return []
        got = [torch.empty(1) for _ in range(6)]
        for place, tag in enumerate([5, 5, 4, 5, 4, 4]):
            group.recv([got[place]], 0, tag).wait()
        return [float(value) for value in got]

    assert run_groups(2, program)[1] == [50, 51, 40, 52, 41, 42]


def test_from_anybody_says_from_whom_and_misses_nobody() -> None:
    def program(group: StrettoGroup) -> list[int]:
        if group.rank():
            group.send([torch.tensor([float(group.rank())])], 0, 9).wait()
            return []
        sources = []
        for _ in range(3):
            got = torch.empty(1)
            work = group.recv_anysource([got], 9)
            work.wait()
            assert work._source_rank() == got.item()
            sources.append(work._source_rank())
        return sorted(sources)

    assert run_groups(4, program)[0] == [1, 2, 3]


def test_they_are_in_no_order_with_collectives_and_other_groups() -> None:
    def program(group: StrettoGroup) -> None:
        other = group.split_group([0, 1])
        assert other is not None
        got = torch.empty(2)
        if group.rank() == 0:
            first = group.send([torch.ones(2)], 1)
            group.barrier().wait()
            other.send([torch.full((2,), 2.0)], 1).wait()
            first.wait()
        else:
            late = other.recv([got], 0)
            group.barrier().wait()
            mine = torch.empty(2)
            group.recv([mine], 0).wait()
            late.wait()
            assert mine.eq(1).all() and got.eq(2).all()
        other.shutdown()

    run_groups(2, program)


def test_a_send_that_nobody_waits_for_arrives() -> None:
    def program(group: StrettoGroup) -> Tensor | None:
        if group.rank() == 0:
            for number in range(20):
                group.send([torch.full((50_000,), float(number))], 1)  # and forgotten: gloo loses such messages
            group.barrier().wait()
            group.barrier().wait()
            return None
        group.barrier().wait()
        total = torch.zeros(50_000)
        for _ in range(20):
            got = torch.empty(50_000)
            group.recv([got], 0).wait()
            total += got
        group.barrier().wait()
        return total

    total = run_groups(2, program)[1]
    assert total.eq(190).all()


def test_waiting_for_a_while_ends_nothing() -> None:
    def program(group: StrettoGroup) -> None:
        got = torch.empty(1)
        if group.rank() == 1:
            work = group.recv([got], 0)
            with pytest.raises(RuntimeError, match="Operation timed out"):
                work.wait(timedelta(milliseconds=20))
            assert not work.is_completed() and work.exception() is None
            group.barrier().wait()
            work.wait(timedelta(seconds=30))
            assert got.item() == 3 and work.is_completed() and work.is_success()
        else:
            group.barrier().wait()
            group.send([torch.tensor([3.0])], 1).wait()

    run_groups(2, program)


def test_a_receive_has_the_groups_deadline() -> None:
    def program(group: StrettoGroup) -> None:
        for give in (group.set_timeout, lambda timeout: group.split_group([0, 1], timeout)):
            with pytest.raises(ConfigurationError, match="no worker could come in time"):
                give(timedelta(0))
        if group.rank() == 1:
            group.set_timeout(timedelta(seconds=0.05))
            with pytest.raises(WireTimeout, match="tag 3") as late:
                group.recv([torch.empty(1)], 0, 3).wait()
            assert late.value.rank == 0
            group.set_timeout(timedelta(seconds=60))
        group.barrier().wait()

    run_groups(2, program)


def test_a_send_and_an_all_to_all_have_the_groups_deadline_too() -> None:
    """They had the job's, here 60 s. A monitored barrier has its own, also where that is longer than the group's."""
    given_up = threading.Event()

    def program(group: StrettoGroup) -> None:
        group.set_timeout(timedelta(seconds=0.1))
        if group.rank() == 0:
            assert given_up.wait(40)
        else:
            large = torch.ones(1_000_000)
            with pytest.raises(WireTimeout):
                group.send([large], 0).wait(timedelta(seconds=20))
            with pytest.raises(WireTimeout):
                group.all_to_all_single(torch.empty_like(large), large, [], []).wait(timedelta(seconds=20))
            threading.Timer(0.5, given_up.set).start()
        group.monitored_barrier(timedelta(seconds=20))

    run_groups(2, program, timeouts=Timeouts(arrive_s=60))


def test_a_length_that_does_not_fit_is_an_error_for_both_and_no_more() -> None:
    def program(group: StrettoGroup) -> str:
        with pytest.raises(RuntimeError) as told:
            if group.rank() == 0:
                group.send([torch.ones(3)], 1).wait()
            else:
                group.recv([torch.empty(4)], 0).wait()
        group.barrier().wait()  # the group still works
        return str(told.value)

    texts = run_groups(2, program)
    assert texts[0] == texts[1] and "float32[3]" in texts[0] and "float32[4]" in texts[0]


def test_a_lost_member_ends_what_waits_for_it() -> None:
    begun = threading.Barrier(3)

    def program(group: StrettoGroup) -> list[int]:
        if group.rank() == 1:
            begun.wait(20)
            assert group.job.wire is not None
            group.job.wire.abandon()
            return []
        works = [
            group.recv([torch.empty(1)], 1),
            group.recv_anysource([torch.empty(1)], 7),
            group.send([torch.ones(1)], 1),
            group.send([torch.ones(1_000_000)], 1),
        ]
        future = group.recv([torch.empty(1)], 1).get_future()
        begun.wait(20)
        ranks = []
        for work in works:
            with pytest.raises(PeerLost) as lost:
                work.wait()
            ranks.append(lost.value.rank)
        with pytest.raises(PeerLost):
            future.wait()
        with pytest.raises(PeerLost):
            group.allreduce([torch.ones(1)]).wait()
        return ranks

    results = run_groups(3, program)
    assert results[0] == results[2] == [1, 1, 1, 1]


def test_a_lost_member_ends_what_others_send_each_other_in_its_group_and_only_there() -> None:
    """In a pipeline only its neighbours would learn of it, and the others wait for each other until their deadline."""
    begun = threading.Barrier(4)

    def program(group: StrettoGroup) -> list[int]:
        rank = group.rank()
        without = group.split_group([0, 2, 3])
        if rank == 1:
            begun.wait(20)
            assert group.job.wire is not None
            group.job.wire.abandon()
            return []
        assert without is not None
        to, source = {0: (2, 3), 2: (3, 0), 3: (0, 2)}[rank]
        elsewhere, got = without.send([torch.full((1,), float(rank))], [0, 2, 3].index(to), 9), torch.empty(1)
        works = [
            group.send([torch.ones(1_000_000)], to, 1),  # which nobody receives
            group.recv([torch.empty(1)], source, 2),  # which nobody sends
            group.recv_anysource([torch.empty(1)], 3),
        ]
        begun.wait(20)
        ranks = []
        for number in range(5):
            if number == 3:
                works += [group.send([torch.ones(1_000_000)], to, 4), group.recv([torch.empty(1)], source, 5)]
            with pytest.raises(PeerLost) as lost:
                works[number].wait()
            ranks.append(lost.value.rank)
        without.recv([got], [0, 2, 3].index(source), 9).wait()
        elsewhere.wait()
        assert got.item() == source
        return ranks

    results = run_groups(4, program)
    assert results == [[1] * 5, [], [1] * 5, [1] * 5]


def test_to_and_from_oneself_is_refused() -> None:
    def program(group: StrettoGroup) -> None:
        with pytest.raises(ConfigurationError, match="this worker itself"):
            group.send([torch.ones(1)], group.rank())
        with pytest.raises(ConfigurationError, match="ranks are 0 to"):
            group.recv([torch.ones(1)], group.size())

    run_groups(1, program)
    run_groups(2, program)


def test_a_monitored_barrier_names_everybody_who_is_missing() -> None:
    def program(group: StrettoGroup) -> list[str]:
        texts = []
        group.monitored_barrier()
        for all_ranks in (True, False):
            if group.rank() in (0, 3):
                with pytest.raises(WireTimeout) as missing:
                    group.monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=all_ranks)
                texts.append(str(missing.value))
            group.barrier().wait()
            if group.rank() in (1, 2):
                group._num_monitored += 1
        group.monitored_barrier()
        return texts

    results = run_groups(4, program)
    assert "Ranks 1, 2 failed to pass monitoredBarrier" in results[0][0]
    assert results[0][0] == results[3][0] and "Rank 1 failed to pass monitoredBarrier" in results[0][1]


@pytest.mark.parametrize("dead", [1, 2])
def test_a_monitored_barrier_with_a_dead_member_names_it_and_nobody_else(dead: int) -> None:
    """Those whom rank 0 had told nothing waited for twice the timeout and 5 s, and then blamed rank 0."""
    all_here, living_done = threading.Barrier(4), threading.Barrier(3)

    def program(group: StrettoGroup) -> int:
        all_here.wait(30)
        if group.rank() == dead:
            assert group.job.wire is not None
            group.job.wire.abandon()
            return -1
        with pytest.raises(PeerLost) as lost:
            group.monitored_barrier(timedelta(seconds=60))
        living_done.wait(30)  # who has left by now is lost too
        return lost.value.rank

    assert run_groups(4, program) == [-1 if rank == dead else dead for rank in range(4)]


def test_who_comes_after_a_monitored_barrier_has_given_up_is_told_at_once() -> None:
    given_up, told = threading.Event(), threading.Barrier(3)

    def program(group: StrettoGroup) -> str:
        text = ""
        if group.rank() == 2:
            assert given_up.wait(30)
        if group.rank() != 1:
            with pytest.raises(WireTimeout) as missing:
                group.monitored_barrier(timedelta(seconds=0.2 if group.rank() == 0 else 60))
            text = str(missing.value)
        if group.rank() == 0:
            given_up.set()
        told.wait(30)
        return text

    results = run_groups(3, program)
    assert "Rank 1 failed to pass monitoredBarrier" in results[0] and "Rank 1 failed" in results[2]


def test_a_member_that_is_lost_while_the_job_is_left_does_not_end_the_communication_thread() -> None:
    """Its listener asked whether the job was still in use, and raised in that thread."""
    all_begun, is_leaving, is_told = threading.Barrier(3), threading.Event(), threading.Event()

    def program(group: StrettoGroup) -> None:
        work = group.send([torch.ones(1_000_000)], 2) if group.rank() == 0 else None
        all_begun.wait(20)
        if group.rank() == 1:
            assert is_leaving.wait(20) and group.job.wire is not None
            group.job.wire.abandon()
        elif work is None:
            assert is_told.wait(20)
        else:
            group.job.closed = True
            is_leaving.set()
            try:
                with pytest.raises(PeerLost) as lost:
                    work.wait()
                assert lost.value.rank == 1
            finally:
                group.job.closed = False
                is_told.set()

    run_groups(3, program)


def test_groups_that_are_gone_leave_nothing_at_the_wire() -> None:
    def program(group: StrettoGroup) -> int:
        wire: Any = group.job.wire
        before = len(wire._lost_listeners)
        for _ in range(5):
            other = group.split_group([0, 1])
            assert other is not None
            other.shutdown()
        return len(wire._lost_listeners) - before

    assert run_groups(2, program) == [0, 0]
