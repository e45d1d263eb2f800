"""Works and their futures: when they complete, who runs callbacks, what these may do, and what becomes of errors."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from stretto.errors import ConfigurationError, PeerLost
from stretto.torch_backend.completion import _Queue
from stretto.torch_backend.future import TransferFuture
from stretto.torch_backend.process_group import StrettoGroup
from torch_backend.groups import run_groups


def test_a_future_completes_when_the_transfer_does_and_not_before() -> None:
    def program(group: StrettoGroup) -> None:
        x = torch.ones(4)
        if group.rank() == 0:
            work = group.allreduce([x])
            future = work.get_future()
            assert not future.done() and not work.is_completed() and not work.is_success()
            assert future is work.get_future()
            group.send([torch.ones(1)], 1).wait()
        else:
            group.recv([torch.ones(1)], 0).wait()
            work = group.allreduce([x])
            future = work.get_future()
        assert future.wait()[0] is x and x.eq(2).all()
        assert future.done() and future.value()[0] is x and work.is_completed() and work.is_success()
        assert work.exception() is None and work.result()[0] is x

    run_groups(2, program)


def test_results_are_in_place_when_nobody_waits() -> None:
    """A work that was dropped still fills what has to be copied; and so does `is_completed`."""

    def program(group: StrettoGroup) -> None:
        into = [torch.empty(3), torch.empty(3)]  # not one vector, so there is something to copy at the end
        group.allgather([into], [torch.full((3,), float(group.rank()))])
        gc.collect()
        done = threading.Event()
        group._completion.run(lambda: None)
        group.barrier().wait()
        for _ in range(1000):
            group._completion.run(done.set)
            assert done.wait(10)
            if into[1].eq(1).all():
                break
            done.clear()
        assert into[0].eq(0).all() and into[1].eq(1).all()
        polled = [torch.empty(3), torch.empty(3)]
        work = group.allgather([polled], [torch.full((3,), float(group.rank()))])
        group.barrier().wait()
        deadline = time.monotonic() + 20
        while not work.is_completed() and time.monotonic() < deadline:
            threading.Event().wait(0.001)
        assert polled[1].eq(1).all()

    run_groups(2, program)


def _two_more(group: StrettoGroup, number: int, how: str) -> torch.futures.Future[Any]:
    """As PowerSGD's hook does: a callback starts a second all-reduce and waits for it, and the next one a third."""
    first = torch.full((40,), float(number))

    def second(done: torch.futures.Future[Any]) -> Any:
        x = done.value()[0] + 1000 * number
        future = group.allreduce([x]).get_future()
        return future.wait()[0] if how == "wait" else future.then(lambda later: later.value()[0]).wait()

    def third(done: torch.futures.Future[Any]) -> Any:
        x = done.value() + 7
        group.allreduce([x]).wait()
        return x

    return group.allreduce([first]).get_future().then(second).then(third)


@pytest.mark.parametrize("how", ["wait", "chain"])
@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)])
def test_callbacks_of_many_buckets_start_collectives_of_their_own(size: int, how: str) -> None:
    """On gloo they hang, or meet those of other buckets (116 of 153 results were wrong): the order in which transfers end is
    another on each worker, and so is that of the callbacks. Here each worker even waits for them in an order of its own."""

    def program(group: StrettoGroup) -> list[float]:
        futures = [_two_more(group, number, how) for number in range(12)]
        order = list(range(12))
        Random(group.rank()).shuffle(order)
        for number in order:
            futures[number].wait()
        group.barrier().wait()
        return [float(future.value()[0]) for future in futures]

    want = [size * (size * (size * n + 1000 * n) + 7) for n in range(12)]
    assert run_groups(size, program) == [want] * size


def test_several_callbacks_of_one_future_each_start_theirs() -> None:
    def program(group: StrettoGroup) -> list[float]:
        future = group.allreduce([torch.ones(1)]).get_future()

        def adding(amount: float) -> torch.futures.Future[Any]:
            def callback(done: torch.futures.Future[Any]) -> Any:
                x = done.value()[0] + amount
                group.allreduce([x]).wait()
                return x.item()

            return future.then(callback)

        following = [adding(amount) for amount in (1.0, 2.0, 3.0)]
        if group.rank() == 1:
            following.reverse()
        results = [one.wait() for one in following]
        return sorted(results)

    assert run_groups(2, program) == [[6, 8, 10]] * 2


def test_torchs_own_ways_to_combine_futures_work() -> None:
    def program(group: StrettoGroup) -> float:
        futures = [group.allreduce([torch.full((2,), float(n))]).get_future() for n in range(3)]
        together = torch.futures.collect_all(futures).then(lambda all: sum(one.value()[0][0].item() for one in all.value()))
        seen: list[bool] = []
        futures[0].add_done_callback(lambda done: seen.append(done.done()))
        total: float = together.wait()
        assert [one[0][0].item() for one in torch.futures.wait_all(futures)] == [0, 2, 4]
        drawn: Any = (future for future in futures)
        assert len(torch.futures.collect_all(drawn).wait()) == 3 and torch.futures.collect_all([]).done()
        return total

    assert run_groups(2, program) == [6.0, 6.0]


def test_a_collective_behind_combined_futures_has_a_name_of_its_own() -> None:
    """It would be counted where it happens to run: sums of 20 and 2 came out as 11 and 11. Here worker 0 starts those of the
    callbacks before its next one, and worker 1 after it; two combinations of the same futures are told apart."""

    def program(group: StrettoGroup) -> list[float]:
        def sums(amount: float) -> torch.futures.Future[Any]:
            def callback(done: torch.futures.Future[Any]) -> Any:
                x = sum(one.value()[0] for one in done.value()) + amount
                group.allreduce([x]).wait()
                return x.item()

            return torch.futures.collect_all(futures).then(callback)

        def first() -> None:
            futures.extend(group.allreduce([torch.full((1,), float(n))]).get_future() for n in range(3))
            together.extend([sums(10.0), sums(100.0)])

        futures: list[torch.futures.Future[Any]] = []
        together: list[torch.futures.Future[Any]] = []
        y, z = torch.ones(1), torch.full((1,), 3.0)
        if group.rank() == 0:
            group.recv([torch.empty(1)], 1).wait()
            first()
            results = [one.wait() for one in together]
            works = [group.allreduce([y])]
            late = sums(1000.0)  # of futures that are complete
            works.append(group.allreduce([z]))
        else:
            first()
            works = [group.allreduce([y])]
            group.send([torch.ones(1)], 0).wait()
            results = [one.wait() for one in together]
            works.append(group.allreduce([z]))
            late = sums(1000.0)
        for work in works:
            work.wait()
        return [*results, late.wait(), float(y), float(z)]

    assert run_groups(2, program) == [[32, 212, 2012, 2, 6]] * 2


@pytest.mark.parametrize("wait", [torch.futures.wait_all, lambda futures: torch.futures.collect_all(futures).wait()])
def test_a_callback_may_wait_for_later_futures_together(wait: Callable[[Any], Any]) -> None:
    """The thread that it runs in would have to complete them."""

    def program(group: StrettoGroup) -> float:
        group.barrier().wait()
        later: list[torch.futures.Future[Any]] = []
        done = threading.Event()
        total: list[float] = []

        def waits(_: object) -> None:
            try:
                wait(later)
                total.append(sum(float(future.value()[0]) for future in later))
            finally:
                done.set()

        if group.rank() == 0:
            group.recv([torch.empty(1)], 1).wait()
        first = group.allreduce([torch.ones(1)]).get_future()
        later += [group.allreduce([torch.full((1,), float(n))]).get_future() for n in range(4)]
        first.add_done_callback(waits)
        if group.rank() == 1:
            group.send([torch.empty(1)], 0).wait()
        assert done.wait(20)
        return total[0]

    assert run_groups(2, program) == [12.0, 12.0]


def test_a_callback_may_wait_for_what_a_later_one_does() -> None:
    """However many wait like that: each time the rest of the queue gets another thread."""

    def program(group: StrettoGroup) -> list[int]:
        done = [threading.Event() for _ in range(5)]
        in_turn: list[int] = []

        def waits(number: int) -> Callable[[object], None]:
            def callback(_: object) -> None:
                assert number == 4 or done[number + 1].wait(20)
                in_turn.append(number)
                done[number].set()

            return callback

        if group.rank() == 0:
            group.recv([torch.empty(1)], 1).wait()
        futures = [group.allreduce([torch.ones(1)]).get_future() for _ in done]
        if group.rank() == 1:
            for number, future in enumerate(futures):
                future.add_done_callback(waits(number))
            group.send([torch.empty(1)], 0).wait()
            assert done[0].wait(20)
        group.barrier().wait()
        return in_turn

    assert run_groups(2, program) == [[], [4, 3, 2, 1, 0]]


def test_combined_futures_fail_with_the_first_that_fails() -> None:
    class Mine(Exception):
        pass

    def program(group: StrettoGroup) -> None:
        def fails(_: object) -> None:
            raise Mine("on purpose")

        good = group.allreduce([torch.ones(1)]).get_future()
        both = torch.futures.collect_all([good, good.then(fails)])
        for use in (both.wait, both.value, both.then(lambda done: done.value()).wait):
            with pytest.raises(Mine, match="on purpose"):
                use()
        plain: torch.futures.Future[int] = torch.futures.Future()
        mixed = torch.futures.collect_all([good, plain])
        assert not mixed.done()
        plain.set_result(7)
        assert mixed.wait() == [good, plain] and torch.futures.wait_all([plain, plain]) == [7, 7]

    run_groups(2, program)


def test_a_collective_in_the_callback_of_a_group_of_one_is_refused_unless_it_is_that_groups() -> None:
    def program(group: StrettoGroup) -> float:
        alone = group.split_group([group.rank()])
        assert alone is not None

        def sums(of: StrettoGroup) -> Callable[[object], float]:
            def callback(_: object) -> float:
                x = torch.full((1,), 5.0)
                of.allreduce([x]).wait()
                return float(x)

            return callback

        future = alone.allreduce([torch.ones(1)]).get_future()
        with pytest.raises(ConfigurationError, match="in no common order"):
            future.then(sums(group)).wait()
        result: float = future.then(sums(alone)).wait()
        group.barrier().wait()
        return result

    assert run_groups(2, program) == [5, 5]


def test_a_collective_in_a_callback_that_torch_calls_in_cpp_is_refused() -> None:
    def program(group: StrettoGroup) -> float:
        refused = threading.Event()

        def sums(_: object) -> None:
            with pytest.raises(ConfigurationError, match="in no common order"):
                group.allreduce([torch.full((1,), 10.0)])
            refused.set()

        if group.rank() == 0:
            group.recv([torch.empty(1)], 1).wait()
        future: Any = group.allreduce([torch.ones(1)]).get_future()
        if group.rank() == 1:
            torch._C.Future.add_done_callback(future, sums)
            group.send([torch.empty(1)], 0).wait()
            assert refused.wait(20)
        x = torch.ones(1)
        group.allreduce([x]).wait()
        return float(x)

    assert run_groups(2, program) == [2, 2]


def test_what_a_callback_raises_keeps_its_type_through_the_chain() -> None:
    class Mine(Exception):
        pass

    def program(group: StrettoGroup) -> None:
        def fails(_: object) -> None:
            raise Mine("on purpose")

        chained = group.allreduce([torch.ones(1)]).get_future().then(fails).then(lambda done: done.value())
        with pytest.raises(Mine, match="on purpose"):
            chained.wait()
        group.barrier().wait()

    run_groups(2, program)


def test_a_lost_peer_ends_all_that_is_pending_with_its_rank() -> None:
    met = threading.Barrier(3)  # not the group's: somebody may still wait there for whoever dies

    def program(group: StrettoGroup) -> int:
        group.barrier().wait()
        met.wait(30)
        if group.rank() == 1:
            assert group.job.wire is not None
            group.job.wire.abandon()
            return 0
        works = [
            group.allreduce([torch.ones(100_000)]),
            group.reduce_scatter_single(torch.empty(2), torch.ones(6)),
            group.barrier(),
        ]
        chained = works[0].get_future().then(lambda done: done.value()[0] * 2)
        works.append(group.alltoall([torch.empty(1)] * 3, [torch.ones(1)] * 3))
        for work in works:
            with pytest.raises(PeerLost) as lost:
                work.wait()
            assert lost.value.rank == 1 and work.is_completed() and not work.is_success()
            assert isinstance(work.exception(), PeerLost)
        with pytest.raises(PeerLost):
            chained.wait()
        with pytest.raises(PeerLost):
            works[0].get_future().value()
        return 1

    assert run_groups(3, program) == [1, 0, 1]


def test_what_stands_for_a_missing_result_raises_on_every_use() -> None:
    """DDP's reducer gets it in C++, where no Python exception can be handed over."""
    from stretto.torch_backend.future import FailedTensor

    make: Any = FailedTensor
    failed = make(PeerLost(3, "gone"), torch.ones(4, dtype=torch.float16))
    assert failed.shape == (4,) and failed.dtype is torch.float16 and "rank 3" in repr(failed)
    uses: list[Any] = [lambda: failed + 1, lambda: torch.ones(4).copy_(failed), lambda: failed.view(2, 2), lambda: failed[:2]]
    for use in uses:
        with pytest.raises(PeerLost, match="gone"):
            use()


def test_a_collective_in_the_callback_of_a_send_or_a_receive_is_refused() -> None:
    """It would be counted among the others where it happens to run: two sums of 20 and 2 came out as 11 and 11."""

    def program(group: StrettoGroup) -> list[float]:
        other = 1 - group.rank()
        x, y, z = torch.ones(1), torch.ones(1), torch.empty(1)

        def sums(_: object) -> None:
            group.allreduce([x]).wait()

        def sends(_: object) -> torch.Tensor:
            work = group.recv([z], other, 1)
            group.send([y], other, 1).wait()
            work.wait()
            return z

        received, sent = group.recv([torch.empty(1)], other).get_future(), group.send([torch.ones(1)], other).get_future()
        for future in (received, sent, received.then(lambda done: done.value())):
            with pytest.raises(ConfigurationError, match="in the callback of a send or a receive"):
                future.then(sums).wait()
        assert received.then(sends).wait() is z
        group.allreduce([x]).wait()
        return [float(x), float(z)]

    assert run_groups(2, program) == [[2, 1]] * 2


def test_a_task_that_comes_while_somebody_waits_for_the_end_is_run() -> None:
    """Whoever waits for the end holds the leader's lock for a moment, and the task waited for a leader that was none."""
    queue, has_run = _Queue(), threading.Event()

    class PutsWhileHeld:
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.acquire, self.locked = self.lock.acquire, self.lock.locked
            self.puts = 0

        def release(self) -> None:
            if not self.puts:
                self.puts += 1
                queue.put(has_run.set)
            self.lock.release()

    lock: Any = PutsWhileHeld()
    queue._is_led = lock
    queue.wait_for_end()
    assert lock.puts == 1 and has_run.wait(10)
    queue.stop()
    queue.wait_for_end()


def test_combined_futures_of_which_one_has_failed_wait_for_no_other() -> None:
    driven: list[str] = []

    def fail() -> None:
        driven.append("failed")
        failed.fail(PeerLost(1, "it has died"), None)

    failed = TransferFuture(None, fail, [])
    slow = TransferFuture(None, lambda: driven.append("slow"), [])
    with pytest.raises(PeerLost, match="it has died"):
        torch.futures.collect_all([failed, slow]).wait()
    assert driven == ["failed"]
