"""Ways to train on peers: a mean without the dead, and one that comes back goes on with the model of one that lives."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import stretto
from aggregate.peers.returning_peers import come_back, kill, newcomer
from stretto import strategy as strategies
from stretto.aggregate.peers.training import OnPeers
from stretto.aggregate.shared_memory import SharedMemory
from stretto.job import Job
from stretto.shard.replicated import Replicated
from stretto.strategy import Strategy, Way
from stretto.sync.asynchronous import Asynchronous
from stretto.testing import run_jobs

PATIENCE_S = 20.0
SOLO = Strategy(aggregate=SharedMemory(), sync=Asynchronous())


class Solo(OnPeers):
    """Nothing is exchanged: each worker trains by itself."""

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        pass

    def stepped(self, step: int) -> None:
        pass


@pytest.fixture(autouse=True)
def solo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "WAYS", (Way(SharedMemory, Asynchronous, Replicated, Solo), *strategies.WAYS))


def started(value: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.BatchNorm1d(1, affine=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return stretto.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), SOLO)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, by: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -by)
    optimizer.step()


def values(model: torch.nn.Module) -> list[float]:
    return next(model.parameters()).flatten().tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_consensus_is_the_mean_of_those_that_live(size: int) -> None:
    stepped = threading.Barrier(size)  # not the job's: whoever is killed would be missed there by those that still wait

    def program(job: Job) -> Any:
        model, optimizer = started(0.0)
        step(model, optimizer, by=float(job.rank))
        stretto.consensus(model)
        first = values(model)
        step(model, optimizer, by=float(job.rank))
        stepped.wait(PATIENCE_S)
        if job.rank == 1:
            kill(job)
            return first, None
        stretto.consensus(model)  # also if nobody has heard of the death yet
        return first, values(model)

    everybody = list(range(size))
    living = [rank for rank in everybody if rank != 1]
    mean, second = sum(everybody) / size, sum(living) / len(living)
    for rank, (first, then) in enumerate(run_jobs(size, program)):
        assert first == pytest.approx([mean] * 2)
        assert then is None if rank == 1 else then == pytest.approx([mean + second] * 2)


def test_one_that_comes_back_has_the_weights_buffers_and_step_of_one_that_lives_and_meets_the_others_again() -> None:
    jobs: dict[int, Job] = {}
    back, entered = threading.Event(), threading.Event()

    def second_life(job: Job) -> Any:
        model, optimizer = started(-100.0)
        found = values(model), float(model[1].running_mean), job.first_step  # type: ignore[index]
        entered.set()
        step(model, optimizer, by=1.0)
        stretto.consensus(model)
        return found, values(model)

    together = threading.Barrier(3)  # not the job's: somebody may still wait there for whoever dies

    def program(job: Job) -> Any:
        jobs[job.rank] = job
        model, optimizer = started(0.0)
        step(model, optimizer, by=1.0)
        stretto.consensus(model)
        together.wait(PATIENCE_S)
        if job.rank == 2:
            kill(job)
            assert back.wait(PATIENCE_S)
            return come_back(job, jobs[0], second_life)
        network = job.peer_network
        while 2 in network.living:
            pass
        stretto.consensus(model)
        model[1].running_mean.fill_(7.0)  # type: ignore[index]
        network.admit([newcomer(jobs[2])])
        back.set()
        steps = 1
        while not entered.is_set():
            step(model, optimizer, by=1.0)
            steps += 1
        end = steps
        stretto.consensus(model)
        return end, values(model)

    first, second, (found, last) = run_jobs(3, program)
    weights, buffer, first_step = found
    assert weights == [first_step] * 2 and buffer == 7.0 and first_step > 1
    expected = (first[0] + second[0] + first_step + 1) / 3
    assert first[1] == second[1] == last == pytest.approx([expected] * 2)


def test_saving_without_some_is_refused_with_what_to_do_instead() -> None:
    together = threading.Barrier(3)  # not the job's: somebody may still wait there for whoever dies

    def program(job: Job) -> None:
        model, optimizer = started(0.0)
        step(model, optimizer, by=1.0)
        together.wait(PATIENCE_S)
        if job.rank == 0:
            kill(job)
            return
        while not job.missing:
            pass
        with pytest.raises(
            stretto.CheckpointError, match=r"rank 0 of this job died or left(.|\n)*stretto.consensus\(model\) first"
        ):
            stretto.save("x.pt", model, optimizer)
        stretto.consensus(model)

    run_jobs(3, program)
