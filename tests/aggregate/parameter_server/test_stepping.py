"""Training with servers that step: what they compute, who waits for whom, and what is counted."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from aggregate.parameter_server.stepping_worker import (
    PATIENCE_S,
    MakeOptimizer,
    Scalar,
    Turns,
    adam,
    backward,
    learn_by_servers,
    mlp,
    one_after_the_other,
    sgd,
    start_scalar,
    step_by,
    strategy,
    train,
    values_of,
)
from engine.worker import seeded
from preloaded import Preloaded
from stretto.distributing import distribute, no_sync, release
from stretto.errors import PeerLost, WireError
from stretto.job import Job
from stretto.observe.trace import Tracer
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.delay_compensation import DelayCompensation
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.testing import run_jobs
from stretto.timeouts import Timeouts

SYNCS = [
    StaleSynchronous(0),
    StaleSynchronous(2),
    Asynchronous(),
    Asynchronous(staleness_aware=True),
    Asynchronous(delay_compensation=DelayCompensation(0.04)),
    Asynchronous(delay_compensation=DelayCompensation(2.0, decay=0.95)),
    SoftSync(1),
    SoftSync(2),
    BackupWorkers(1),
]
STEPS = 4
every_sync = pytest.mark.parametrize("sync", SYNCS, ids=repr)


def same_bits(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) for left, right in pairs for a, b in zip(left, right, strict=True))


# -- what they compute ------------------------------------------------------------------------------------------------


@every_sync
def test_law_1_a_world_of_one_is_the_plain_optimizer_bit_for_bit(sync: Any) -> None:
    def program(job: Job, chosen: Any) -> list[list[Tensor]]:
        model = mlp()
        optimizer = sgd(model.parameters())
        if chosen is not None:
            distribute(model, optimizer, strategy(chosen, shards=1), job=job)
        return train(job, model, optimizer, range(STEPS))

    (found,), (plain,) = run_jobs(1, program, sync), run_jobs(1, program, None)
    assert same_bits(found, plain)


@pytest.mark.parametrize(("size", "replicas", "make"), [(2, 0, sgd), (3, 1, adam), (4, 0, adam), (7, 1, sgd)])
def test_with_a_bound_of_0_all_gradients_of_a_step_are_applied_one_by_one_in_the_order_of_ranks(
    size: int, replicas: int, make: MakeOptimizer
) -> None:
    def program(job: Job) -> tuple[list[list[Tensor]], dict[int, int]]:
        model = mlp(job.rank)
        _, optimizer = distribute(model, make(model.parameters()), strategy(StaleSynchronous(0), 2, replicas), job=job)
        return train(job, model, optimizer, range(STEPS)), dict(job.ledger.staleness)

    for rank, (seen, staleness) in enumerate(run_jobs(size, program)):
        assert same_bits(seen, one_after_the_other(make, size, STEPS))
        assert staleness == {rank: STEPS}  # those of lower ranks were applied in between


@pytest.mark.parametrize("size", [2, 3, 7])
@every_sync
def test_every_answer_trains_and_the_staleness_of_each_step_is_counted(sync: Any, size: int) -> None:
    def program(job: Job) -> tuple[dict[int, int], float]:
        model = mlp(job.rank)
        _, optimizer = distribute(model, sgd(model.parameters()), strategy(sync), job=job)
        seen = train(job, model, optimizer, range(STEPS))
        assert not same_bits([seen[0]], [seen[-1]])
        return dict(job.ledger.staleness), float(sum(value.sum() for value in seen[-1]))

    for staleness, total in run_jobs(size, program):
        assert total == total and sum(staleness.values()) <= STEPS
        if isinstance(sync, StaleSynchronous):
            assert sum(staleness.values()) == STEPS
            assert max(staleness) <= (size - 1) * (2 * sync.bound + 1)
        if isinstance(sync, Asynchronous):
            assert sum(staleness.values()) == STEPS
        if isinstance(sync, BackupWorkers):
            assert set(staleness) <= {0}


def _in_turns(sync: Any, size: int = 2, steps: int = 3) -> list[list[float]]:
    """What each worker reads, with gradients 1 + rank, one worker after the other."""
    turns = Turns(size)

    def program(job: Job) -> list[float]:
        model, optimizer = start_scalar(job, sync, lr=0.25)
        seen = []
        for _ in range(steps):
            with turns(job.rank):
                seen.append(step_by(model, optimizer, 1.0 + job.rank))
        return seen

    return run_jobs(size, program)


def test_delay_compensation_of_strength_0_is_asynchronous_bit_for_bit() -> None:
    plain = _in_turns(Asynchronous())
    assert plain == [[-0.25, -1.0, -1.75], [-0.75, -1.5, -2.25]]
    assert _in_turns(Asynchronous(delay_compensation=DelayCompensation(0.0))) == plain
    assert _in_turns(Asynchronous(delay_compensation=DelayCompensation(0.0, decay=0.5))) == plain


def test_delay_compensation_corrects_by_what_the_worker_has_pulled_last() -> None:
    (first, _), (second, _) = _in_turns(Asynchronous(delay_compensation=DelayCompensation(0.5)), steps=2)
    assert first == -0.25
    corrected = 2.0 + 0.5 * 2.0 * 2.0 * (first - 0.0)
    assert second == first - 0.25 * corrected


def test_staleness_aware_workers_step_at_the_rate_over_their_staleness() -> None:
    size = 3
    found = _in_turns(Asynchronous(staleness_aware=True), size=size, steps=2)
    assert found[0][0] == -0.25 and found[1][0] == -0.25 - 0.25 * 2  # tau 0 and 1
    assert found[2][0] == found[1][0] - 0.25 * 3 / 2  # two updates since it read
    assert found[0][1] == found[2][0] - 0.25 * 1 / 2


def test_softsync_updates_by_means_weighted_by_stretto_weight() -> None:
    """Two gradients make an update: 1 with weight 3, and 2 with weight 1."""
    turns = Turns(2)

    def program(job: Job) -> list[float]:
        model, optimizer = start_scalar(job, SoftSync(1))
        stretto.weight(3.0 if job.rank == 0 else 1.0, job=job)
        seen = []
        for _ in range(2):
            with turns(job.rank):
                seen.append(step_by(model, optimizer, 1.0 + job.rank))
        return seen

    first, second = run_jobs(2, program)
    assert first == [0.0, -1.25]  # it reads before the second has come, then the mean (3 + 2) / 4
    assert second[0] == -1.25


def test_the_trace_shows_what_travelled_and_who_waited() -> None:
    def program(job: Job) -> list[tuple[str, int]]:
        job.tracer = Tracer()
        model, optimizer = start_scalar(job, StaleSynchronous(0))
        before = len(job.tracer.spans)
        step_by(model, optimizer, 1.0)
        spans = job.tracer.spans[before:]
        kinds = ("wait", "send", "receive", "transfer")
        return sorted((span.name.partition(",")[0], span.num_bytes) for span in spans if span.category in kinds)

    for found in run_jobs(2, program):
        kinds = [(re.sub(r"to server \d|from server \d", "N", name), size) for name, size in found]
        assert kinds == [("for the values after a step", 0), ("pull N", 4), ("push N", 4), ("servers 0", 8)]


def test_the_options_of_each_step_travel_with_its_gradients() -> None:
    def program(job: Job) -> list[float]:
        model, optimizer = start_scalar(job, StaleSynchronous(0), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        seen = []
        for _ in range(3):
            seen.append(step_by(model, optimizer, 1.0))
            scheduler.step()
        return seen

    assert run_jobs(2, program) == [[-2.0, -3.0, -3.5]] * 2


def test_gradients_are_the_workers_own_until_they_are_pushed_so_clipping_works() -> None:
    def program(job: Job) -> tuple[float, float]:
        model, optimizer = start_scalar(job, StaleSynchronous(0))
        torch.autograd.backward(model(10.0 + job.rank))
        assert model.w.grad is not None
        own = float(model.w.grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert abs(float(model.w.grad) - 1.0) < 1e-5  # it is still there, as after any step
        return own, float(model.w.detach())

    found = run_jobs(3, program)
    assert [own for own, _ in found] == [10.0, 11.0, 12.0]
    assert all(abs(value + 3.0) < 1e-5 for _, value in found)


def test_backwards_under_no_sync_accumulate() -> None:
    def program(job: Job) -> float:
        model, optimizer = start_scalar(job, StaleSynchronous(0))
        with no_sync(model):
            torch.autograd.backward(model(1.0))
        torch.autograd.backward(model(2.0))
        optimizer.step()
        return float(model.w.detach())

    assert run_jobs(2, program) == [-6.0, -6.0]


def test_a_parameter_without_a_gradient_counts_as_one_of_zeros() -> None:
    """Its momentum goes on."""

    def program(job: Job) -> list[float]:
        model = Scalar()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        distribute(model, optimizer, strategy(StaleSynchronous(0)), job=job)
        first = step_by(model, optimizer, 2.0 if job.rank == 0 else 0.0)
        optimizer.zero_grad()
        optimizer.step()
        return [first, float(model.w.detach())]

    # momentum: 2, 1 (first step of both workers); then 0.5, 0.25
    assert run_jobs(2, program) == [[-3.0, -3.75]] * 2


def test_half_precision_adds_up_small_updates_on_the_servers() -> None:
    """1 - 2^-10 is 1 in bfloat16, so a worker's own steps would never get anywhere."""

    def program(job: Job) -> tuple[float, torch.dtype]:
        model = Scalar(torch.bfloat16)
        nn.init.ones_(model.w)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
        distribute(model, optimizer, strategy(StaleSynchronous(0)), job=job)
        for _ in range(32):
            step_by(model, optimizer, 1.0)
        return float(model.w.detach()), model.w.dtype

    assert run_jobs(2, program) == [(1 - 2.0**-4, torch.bfloat16)] * 2


def channels_last() -> nn.Conv2d:
    module = nn.Conv2d(2, 3, 2)
    module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
    return module


def test_sparse_gradients_and_other_strides_are_taken_as_they_are() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(5, 2, sparse=True)
            self.image = channels_last()

        def forward(self, x: Tensor) -> Tensor:
            total: Tensor = self.rows(torch.tensor([1, 3])).sum() + self.image(x).pow(2).sum()
            return total

    def program(job: Job, on_servers: bool) -> tuple[list[Tensor], tuple[int, ...]]:
        model = seeded(Odd)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if on_servers:
            distribute(model, optimizer, strategy(StaleSynchronous(0)), job=job)
        for number in range(2):
            torch.autograd.backward(model(torch.arange(8.0).view(1, 2, 2, 2) + number))
            optimizer.step()
            if not on_servers:
                optimizer.step()  # the gradients of two workers, one after the other, on the same values
            optimizer.zero_grad()
        return values_of(model), model.image.weight.stride()

    for values, strides in run_jobs(2, program, True):
        ((expected, wanted),) = run_jobs(1, program, False)
        assert strides == wanted == channels_last().weight.stride()
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


def test_several_optimizers_and_groups_have_rates_and_clocks_of_their_own() -> None:
    def program(job: Job) -> list[float]:
        parts = [Scalar(), Scalar(), Scalar()]
        model, (a, b, c) = nn.ModuleList(parts), (each.w for each in parts)
        groups: list[dict[str, Any]] = [{"params": [a]}, {"params": [b], "lr": 0.5}]
        first = torch.optim.SGD(groups, lr=1.0)
        second = torch.optim.Adagrad([c], lr=1.0)
        distribute(model, (first, second), strategy(StaleSynchronous(0)), job=job)
        for number in range(2):
            model.zero_grad()
            torch.autograd.backward([each(1.0) for each in parts])
            first.step()
            if number:
                second.step()
        return [float(each.detach()) for each in (a, b, c)]

    for a, b, c in run_jobs(2, program):
        assert (a, b) == (-4.0, -2.0)
        assert abs(c + 1 + 2**-0.5) < 1e-6  # Adagrad: 1 / 1, then 1 / sqrt(2)


# -- who waits for whom -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [s for s in SYNCS if not isinstance(s, StaleSynchronous)], ids=repr)
def test_a_slow_worker_holds_up_nobody(sync: Any) -> None:
    """Rank 0 begins when the others have taken all their steps."""
    size, others_are_done, count = 3, threading.Event(), threading.Semaphore(0)

    def program(job: Job) -> int:
        model = mlp(job.rank)
        _, optimizer = distribute(model, sgd(model.parameters()), strategy(sync), job=job)
        if job.rank == 0:
            for _ in range(size - 1):
                assert count.acquire(timeout=PATIENCE_S), "the others wait"
            others_are_done.set()
        train(job, model, optimizer, range(STEPS))
        count.release()
        assert others_are_done.wait(PATIENCE_S)
        return sum(job.ledger.staleness.values())

    run_jobs(size, program)
    assert others_are_done.is_set()


def test_with_a_bound_a_worker_goes_as_far_ahead_and_waits_there() -> None:
    bound, ahead, pushed = 2, threading.Event(), threading.Event()

    def program(job: Job) -> None:
        model, optimizer = start_scalar(job, StaleSynchronous(bound))
        if job.rank == 0:
            assert ahead.wait(PATIENCE_S)
            pushed.set()
            step_by(model, optimizer, 1.0)
            return
        for _ in range(bound):
            step_by(model, optimizer, 1.0)
        assert not pushed.is_set()
        ahead.set()
        step_by(model, optimizer, 1.0)
        assert pushed.is_set()

    run_jobs(2, program)


def test_backup_workers_make_an_update_of_exactly_so_many_gradients_and_discard_late_ones() -> None:
    """Of three workers two are waited for: rank 2, whose gradient is 100, has not begun."""
    both, done = threading.Barrier(2, timeout=PATIENCE_S), threading.Event()

    def program(job: Job) -> tuple[list[float], dict[int, int]]:
        model, optimizer = start_scalar(job, BackupWorkers(1))
        if job.rank == 2:
            assert done.wait(PATIENCE_S)
            return [step_by(model, optimizer, 100.0)], dict(job.ledger.staleness)
        seen = [step_by(model, optimizer, 1.0 + 2 * job.rank) for _ in range(3)]
        both.wait()
        done.set()
        return seen, dict(job.ledger.staleness)

    found = run_jobs(3, program)
    assert found[0] == found[1] == ([-2.0, -4.0, -6.0], {0: 3})
    assert found[2] == ([-6.0], {})  # told to move on, from where the others are


@pytest.mark.parametrize("slowest", [0, 1, 2])
def test_backup_workers_that_fell_behind_take_all_their_steps(slowest: int) -> None:
    """Nobody is left to make an update with, and nobody is waited for."""
    count, size = threading.Semaphore(0), 3

    def program(job: Job) -> None:
        model, optimizer = start_scalar(job, BackupWorkers(1))
        if job.rank == slowest:
            for _ in range(size - 1):
                assert count.acquire(timeout=PATIENCE_S)
        for _ in range(5):
            step_by(model, optimizer, 1.0)
        count.release()
        job.barrier()

    run_jobs(size, program)


def test_nobody_waits_for_a_worker_that_has_released_the_model() -> None:
    gone = threading.Event()

    def program(job: Job) -> float:
        model, optimizer = start_scalar(job, StaleSynchronous(0))
        step_by(model, optimizer, 1.0)
        if job.rank == 1:
            release(model)
            gone.set()
        else:
            assert gone.wait(PATIENCE_S)
            for _ in range(3):
                step_by(model, optimizer, 1.0)
        job.barrier()
        return float(model.w.detach())

    assert run_jobs(2, program) == [-5.0, -2.0]


def test_nobody_waits_for_a_worker_that_has_left_the_job() -> None:
    def program(job: Job) -> float:
        model, optimizer = start_scalar(job, StaleSynchronous(0))
        for _ in range(2 if job.rank == 1 else 5):
            step_by(model, optimizer, 1.0)
        return float(model.w.detach())

    assert run_jobs(3, program) == [-12.0, -6.0, -12.0]


def test_a_worker_that_waits_for_too_long_says_for_what() -> None:
    told = threading.Event()

    def program(job: Job) -> None:
        model, optimizer = start_scalar(job, StaleSynchronous(0))
        if job.rank == 1:
            assert told.wait(PATIENCE_S)
            return
        with pytest.raises(WireError, match=r"rank 0 has waited .* for 0.3 s, after 1 steps(.|\n)*StaleSynchronous\(bound=0\)"):
            step_by(model, optimizer, 1.0)
        with pytest.raises(WireError, match="has waited"):
            step_by(model, optimizer, 1.0)
        told.set()

    run_jobs(2, program, timeouts=Timeouts(arrive_s=0.3))


# -- servers that die -------------------------------------------------------------------------------------------------


def _kill(job: Job, server: int, num_servers: int) -> None:
    assert job.more_wires is not None
    wire: Any = job.more_wires(f"servers {num_servers}", job.world_size + num_servers)[job.world_size + server]
    wire.kill("on purpose")


def test_a_server_that_dies_without_a_copy_ends_the_training_and_names_the_parameters() -> None:
    def program(job: Job) -> None:
        model, optimizer = start_scalar(job, Asynchronous())
        job.barrier()
        if job.rank == 0:
            for server in range(2):
                _kill(job, server, 2)
        with pytest.raises(PeerLost, match=r"it was a server, and the last with a copy of 'w'"):
            for _ in range(1000):
                step_by(model, optimizer, 1.0)

    run_jobs(2, program)


def test_a_server_that_dies_is_replaced_by_its_copy_and_no_step_is_lost() -> None:
    def program(job: Job) -> float:
        model = Scalar()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        distribute(model, optimizer, strategy(StaleSynchronous(0), shards=2, replicas=1), job=job)
        for number in range(6):
            if number == 3 and job.rank == 0:
                _kill(job, 0, 2)
            step_by(model, optimizer, 1.0)
        return float(model.w.detach())

    assert run_jobs(2, program) == [-12.0, -12.0]


# -- in processes -----------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_workers_and_servers_in_processes_of_their_own_compute_the_same(preloaded: Preloaded) -> None:
    text = repr(strategy(StaleSynchronous(0), shards=1))
    results = preloaded.launch(learn_by_servers, 2, text, 3, timeout_s=100)
    expected = [float(v) for parameter in one_after_the_other(sgd, 2, 3)[-1] for v in parameter.flatten()]
    assert results == [(expected, {0: 3}), (expected, {1: 3})]


def test_the_workers_gradients_differ() -> None:
    """Else the tests above would say little."""
    model = mlp()
    backward(model, 0, 0)
    first = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    backward(model, 1, 0)
    assert not any(torch.equal(a, p.grad) for a, p in zip(first, model.parameters(), strict=True) if p.grad is not None)
