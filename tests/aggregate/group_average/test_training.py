"""Training in groups: who is slow, who finishes first, who dies and comes back; what is averaged; what is refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from aggregate.peers.returning_peers import come_back, kill, newcomer
from stretto.aggregate.group_average import GroupAverage
from stretto.compress.sign import Sign
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.strategy import Strategy
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.testing import run_jobs

PATIENCE_S = 30.0


def groups(size: int, bound: int, **options: Any) -> Strategy:
    return Strategy(aggregate=GroupAverage(size, **options), sync=StaleSynchronous(bound))


def started(strategy: Strategy, value: float = 0.0, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return stretto.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), strategy, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, by: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -by)
    optimizer.step()


def values(model: nn.Module) -> list[float]:
    return next(model.parameters()).flatten().tolist()


def test_nobody_waits_for_a_worker_that_computes() -> None:
    """Rank 3 is in one step while all others take eight."""
    done = threading.Barrier(4)

    def program(job: Job) -> int:
        model, optimizer = started(groups(2, 1000))
        step(model, optimizer, by=1.0)
        if job.rank == 3:
            done.wait(PATIENCE_S)
            step(model, optimizer, by=1.0)
        else:
            for _ in range(7):
                step(model, optimizer, by=1.0)
            done.wait(PATIENCE_S)
        missed = max(job.ledger.staleness)
        stretto.consensus(model)
        return missed

    missed = run_jobs(4, program)
    assert missed[3] >= 7


def test_those_that_finish_first_are_not_waited_for() -> None:
    def program(job: Job) -> int:
        model, optimizer = started(groups(4, 3))
        for _ in range(4 + 5 * job.rank):
            step(model, optimizer, by=1.0)
        stretto.release(model)
        return job.ledger.staleness.total()

    assert run_jobs(4, program) == [4, 9, 14, 19]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_when_a_worker_dies_the_others_go_on_and_have_the_same_bits_after_a_round_of_all(size: int) -> None:
    def program(job: Job) -> Any:
        model, optimizer = started(groups(2, 4, patience_s=PATIENCE_S))
        for number in range(8):
            if job.rank == 1 and number == 2:
                kill(job)
                return None
            step(model, optimizer, by=float(job.rank + 1))
        return next(model.parameters()).detach().numpy().tobytes()

    found = run_jobs(size, program)
    assert found.pop(1) is None and len(set(found)) == 1


def test_one_that_comes_back_takes_part_in_the_rounds_of_the_others() -> None:
    jobs: dict[int, Job] = {}
    back, entered, stepped = threading.Event(), threading.Event(), threading.Barrier(4)

    def second_life(job: Job) -> Any:
        model, optimizer = started(groups(2, 4))
        entered.set()
        for _ in range(12):
            step(model, optimizer, by=1.0)
        return job.ledger.sent_by("group average")

    def program(job: Job) -> Any:
        jobs[job.rank] = job
        model, optimizer = started(groups(2, 4))
        step(model, optimizer, by=1.0)
        stepped.wait(PATIENCE_S)
        if job.rank == 2:
            kill(job)
            assert back.wait(PATIENCE_S)
            return come_back(job, jobs[0], second_life)
        network: Any = job.peer_network
        while 2 in network.living:
            pass
        network.admit([newcomer(jobs[2])])
        back.set()
        while not entered.is_set():
            step(model, optimizer, by=1.0)
        for _ in range(12):
            step(model, optimizer, by=1.0)
        return job.ledger.sent_by("group average")

    assert all(run_jobs(4, program))


def test_consensus_is_the_mean_of_what_all_have_then() -> None:
    def program(job: Job) -> Any:
        model, optimizer = started(groups(2, 100))
        for _ in range(3):
            step(model, optimizer, by=float(job.rank))
        own = values(model)
        stretto.consensus(model)
        mean = values(model)
        step(model, optimizer, by=1.0)  # from there
        return own, mean

    found = run_jobs(4, program)
    mean = sum(own[0] for own, _ in found) / 4
    for _, then in found:
        assert then == found[0][1] == pytest.approx([mean] * 2)


@pytest.mark.parametrize("bound", [1, 3])
def test_those_that_wait_in_consensus_do_not_hold_up_one_that_has_more_steps_to_take(bound: int) -> None:
    """Rank 1 comes to several rounds of all when the others have ended their steps. Afterwards they wait for each other again."""

    def program(job: Job) -> Any:
        model, optimizer = started(groups(2, bound))
        for _ in range(5 * bound if job.rank != 1 else 10 * bound):
            step(model, optimizer, by=float(job.rank))
        with stretto.consensus(model):
            mean = values(model)
        stretto.consensus(model)
        for _ in range(3 * bound):
            step(model, optimizer, by=float(job.rank))
        return mean, values(model)

    found = run_jobs(4, program)
    assert len({str(mean) for mean, _ in found}) == 1
    if bound == 1:  # every round is of all, none without somebody's program
        assert [after for _, after in found] == [[pytest.approx(found[0][0][0] + 3 * 1.5)] * 2] * 4


@pytest.mark.parametrize("lent", [False, True], ids=["taken", "lent"])
def test_after_consensus_others_average_with_the_model_that_a_worker_has_then(lent: bool) -> None:
    """Rank 0 steps while rank 1 computes: with the mean of both, or, after a `with` block, with rank 1's own model again."""
    together, stepped = threading.Barrier(2), threading.Event()

    def program(job: Job) -> tuple[list[float], list[float], list[float]]:
        model, optimizer = started(groups(2, 100))
        for parameter in model.parameters():
            parameter.data.fill_(8.0 * job.rank)
        own = values(model)
        if lent:
            with stretto.consensus(model):
                pass
        else:
            stretto.consensus(model)
        then = values(model)
        together.wait(PATIENCE_S)
        if job.rank == 1:
            assert stepped.wait(PATIENCE_S)
        step(model, optimizer, by=2.0)
        stepped.set()
        return own, then, values(model)

    (own, then, after), (others_own, others_then, _) = run_jobs(2, program)
    assert (then, others_then) == ((own, others_own) if lent else ([4.0] * 2, [4.0] * 2)) and own != others_own
    assert after == [(then[0] + 2.0 + others_then[0]) / 2] * 2


@pytest.mark.parametrize("buffers", ["broadcast", "local"])
def test_statistics_of_a_batch_norm_are_averaged_with_the_weights_unless_they_are_local(buffers: str) -> None:
    def program(job: Job) -> float:
        model, optimizer = started(groups(4, 1), buffers=buffers)
        model[1].running_mean.fill_(float(job.rank))  # type: ignore[index]
        step(model, optimizer, by=0.0)
        return float(model[1].running_mean)  # type: ignore[index]

    assert run_jobs(4, program) == ([1.5] * 4 if buffers == "broadcast" else [0, 1, 2, 3])


def test_the_rule_of_the_code_counts_the_own_model_twice_and_adds_the_step_afterwards() -> None:
    def program(job: Job) -> list[float]:
        model, optimizer = started(groups(2, 100, rule="code", patience_s=PATIENCE_S))
        step(model, optimizer, by=3.0 * job.rank)  # all began with the same: the average changes nothing
        step(model, optimizer, by=1.0)  # (0 + 3 + own) / 3 + 1
        return values(model)

    assert run_jobs(2, program) == [[pytest.approx(2.0)] * 2, [pytest.approx(3.0)] * 2]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GroupAverage(1), r"GroupAverage\(size=1\).*at least 2"),
        (lambda: GroupAverage(4, rule="mine"), r'GroupAverage\(rule=\'mine\'\)(.|\n)*"paper" or "code"'),  # type: ignore[arg-type]
        (lambda: GroupAverage(4, patience_s=-1), r"GroupAverage\(patience_s=-1\)"),
        (lambda: groups(6, 10), r"power of two(.|\n)*GroupAverage\(4\) or GroupAverage\(8\)"),
        (lambda: groups(4, 0), r"bound is the number of rounds(.|\n)*StaleSynchronous\(1\)"),
        (lambda: Strategy(aggregate=GroupAverage(4), sync=StaleSynchronous(3), compress=Sign()), r"Leave compress= out"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write_instead(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_groups_larger_than_the_world_are_refused_on_all_workers_with_the_sizes_that_fit() -> None:
    def program(job: Job) -> None:
        with pytest.raises(ConfigurationError, match=r"job of 3 workers(.|\n)*GroupAverage\(4\), one group of all(.|\n)*2, 4"):
            started(groups(8, 10))

    run_jobs(3, program)
