"""What servers remember is not lost: checkpoints, `state_dict`, and giving the plain model back."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aggregate.parameter_server.stepping_worker import (
    MakeOptimizer,
    adam,
    backward,
    mlp,
    one_after_the_other,
    sgd,
    strategy,
    train,
    values_of,
)
from stretto.checkpoint import load, save
from stretto.distributing import distribute, engine_of, release
from stretto.errors import CheckpointError
from stretto.job import Job
from stretto.strategy import Strategy
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.delay_compensation import DelayCompensation
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.testing import run_jobs

ADAPTIVE = Asynchronous(delay_compensation=DelayCompensation(2.0, decay=0.95))


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("sync", "make", "dtype"),
    [
        (StaleSynchronous(0), adam, torch.float32),
        (StaleSynchronous(0), sgd, torch.bfloat16),
        (StaleSynchronous(0), adagrad, torch.float32),
        (ADAPTIVE, sgd, torch.float32),
        (ADAPTIVE, adam, torch.bfloat16),
    ],
    ids=["adam", "sgd in bfloat16", "adagrad", "compensated sgd", "compensated adam in bfloat16"],
)
def test_law_9_save_kill_resume_gives_the_same_bits(sync: Any, make: MakeOptimizer, dtype: torch.dtype, tmp_path: Path) -> None:
    """One worker pushes alone, unless the order of pushes is fixed."""
    path, alone = tmp_path / "checkpoint", sync is ADAPTIVE

    def program(job: Job, resumes: bool) -> list[Tensor]:
        model = mlp(job.rank + 10 * resumes).to(dtype)
        _, optimizer = distribute(model, make(model.parameters()), strategy(sync), job=job)
        if resumes:
            load(path, model, optimizer, job=job)
        else:
            train(job, model, optimizer, range(3) if job.rank == 0 or not alone else ())
            engine_of(model).loop.begin_anew()  # one worker may have taken steps and the other none, on purpose
            save(path, model, optimizer, job=job)
        train(job, model, optimizer, range(3, 6) if job.rank == 0 or not alone else ())
        return values_of(model)

    without, resumed = run_jobs(2, program, False), run_jobs(2, program, True)
    assert same(without[0], resumed[0])
    if not alone:
        assert same(without[1], resumed[1])


def test_a_checkpoint_is_torchs_own_and_all_reduce_goes_on_from_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def program(job: Job, chosen: Strategy) -> list[Tensor]:
        model = mlp(job.rank)
        _, optimizer = distribute(model, adam(model.parameters()), chosen, job=job)
        if path.exists():
            load(path, model, optimizer, job=job)
            assert all(float(state["step"]) == 6 for state in optimizer.state.values())
        else:
            train(job, model, optimizer, range(3))
            save(path, model, optimizer, job=job)
        return values_of(model)

    trained = run_jobs(2, program, strategy(StaleSynchronous(0)))
    saved = torch.load(path, weights_only=True)
    plain = mlp()
    optimizer = adam(plain.parameters())
    plain.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert same(values_of(plain), trained[0])
    backward(plain, 0, 3)
    optimizer.step()
    assert float(next(iter(optimizer.state.values()))["step"]) == 7
    assert same(run_jobs(3, program, Strategy())[2], trained[0])


def test_servers_go_on_from_what_all_reduce_has_saved(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def before(job: Job) -> None:
        model = mlp()
        _, optimizer = distribute(model, adam(model.parameters()), Strategy(), job=job)
        train(job, model, optimizer, range(2))
        save(path, model, optimizer, job=job)

    def after(job: Job) -> list[Tensor]:
        model = mlp(5)
        _, optimizer = distribute(model, adam(model.parameters()), strategy(StaleSynchronous(0)), job=job)
        load(path, model, optimizer, job=job)
        train(job, model, optimizer, range(2, 3))
        return values_of(model)

    run_jobs(1, before)
    plain = mlp()
    optimizer = adam(plain.parameters())
    for number in range(2):
        plain.zero_grad()
        backward(plain, 0, number)
        optimizer.step()
    gradients = []
    for rank in range(2):
        plain.zero_grad()
        backward(plain, rank, 2)
        gradients.append([parameter.grad for parameter in plain.parameters()])
    for each in gradients:
        for parameter, gradient in zip(plain.parameters(), each, strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert all(same(values, values_of(plain)) for values in run_jobs(2, after))


@pytest.mark.parametrize("sync", [StaleSynchronous(2), Asynchronous(), SoftSync(1), BackupWorkers(1)], ids=repr)
def test_a_save_has_what_the_servers_have_and_all_go_on_from_there(sync: Any, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def program(job: Job) -> list[Tensor]:
        model = mlp(job.rank)
        _, optimizer = distribute(model, sgd(model.parameters()), strategy(sync), job=job)
        train(job, model, optimizer, range(4))
        save(path, model, optimizer, job=job)
        values = values_of(model)
        assert not optimizer.state  # it is on the servers
        train(job, model, optimizer, range(2))
        return values

    found = run_jobs(3, program)
    saved = list(torch.load(path, weights_only=True)["model"].values())
    assert all(same(values, saved) for values in found)


def test_the_state_dict_of_one_worker_is_what_the_servers_have_now() -> None:
    def program(job: Job) -> dict[str, Any]:
        model = mlp(job.rank)
        _, optimizer = distribute(model, adam(model.parameters()), strategy(StaleSynchronous(0)), job=job)
        train(job, model, optimizer, range(2))
        job.barrier()
        return optimizer.state_dict()

    one, other = run_jobs(2, program)
    assert one["state"].keys() == other["state"].keys() == {0, 1, 2, 3}
    assert all(float(state["step"]) == 4 and state["exp_avg"].abs().sum() > 0 for state in one["state"].values())
    assert one["state"][0]["exp_avg"].shape == (6, 4)
    assert all(torch.equal(one["state"][n]["exp_avg_sq"], other["state"][n]["exp_avg_sq"]) for n in range(4))


@pytest.mark.parametrize("make", [sgd, adam, adagrad])
def test_a_model_that_is_released_has_its_optimizers_state_again(make: MakeOptimizer) -> None:
    def program(job: Job) -> list[Tensor]:
        model = mlp(job.rank)
        _, optimizer = distribute(model, make(model.parameters()), strategy(StaleSynchronous(0)), job=job)
        train(job, model, optimizer, range(3))
        release(model)
        if job.rank == 0:
            for each in range(2):
                optimizer.zero_grad()
                backward(model, 0, 3 + each)
                optimizer.step()
        return values_of(model)

    expected = mlp()
    optimizer = make(expected.parameters())
    for number in range(3):
        gradients = []
        for rank in range(2):
            expected.zero_grad()
            backward(expected, rank, number)
            gradients.append([parameter.grad for parameter in expected.parameters()])
        for each in gradients:
            for parameter, gradient in zip(expected.parameters(), each, strict=True):
                parameter.grad = gradient
            optimizer.step()
    assert same(values_of(expected), one_after_the_other(make, 2, 3)[-1])
    for number in range(2):
        expected.zero_grad()
        backward(expected, 0, 3 + number)
        optimizer.step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(run_jobs(2, program)[0], values_of(expected), strict=True))


def test_workers_that_are_not_at_the_same_step_cannot_save(tmp_path: Path) -> None:
    def program(job: Job) -> None:
        model = mlp()
        _, optimizer = distribute(model, sgd(model.parameters()), strategy(Asynchronous()), job=job)
        train(job, model, optimizer, range(1 + job.rank))
        with pytest.raises(CheckpointError, match="not at the same point of training"):
            save(tmp_path / "checkpoint", model, optimizer, job=job)

    run_jobs(2, program)


@pytest.mark.parametrize(("sync", "dtype"), [(Asynchronous(), torch.float32), (StaleSynchronous(3), torch.bfloat16)], ids=str)
def test_distributing_anew_in_mid_training_changes_nothing(sync: Any, dtype: torch.dtype) -> None:
    """Rank 1 is the last to push, and what it has pushed is not lost, nor are float32 values of less precise parameters."""

    def program(job: Job, anew: bool) -> list[Tensor]:
        model = mlp().to(dtype)
        optimizer = sgd(model.parameters())
        distribute(model, optimizer, strategy(sync), job=job)
        for number in range(4):
            for turn in range(job.world_size):
                train(job, model, optimizer, [number] if job.rank == turn else ())
                job.barrier()
                if turn == 0:  # what rank 1 pushes after it, rank 0 has not seen when it distributes the model anew
                    engine_of(model).training.before_save()
                job.barrier()
            if anew:
                distribute(model, optimizer, strategy(sync), job=job)
            else:
                engine_of(model).training.before_save()
                job.barrier()
        return values_of(model)

    plain, again = run_jobs(2, program, False), run_jobs(2, program, True)
    assert all(same(run, plain[0]) for run in (*plain, *again))


def test_state_of_a_frozen_parameter_stays_in_the_optimizer() -> None:
    def program(job: Job) -> tuple[int, int]:
        model = mlp()
        optimizer = adam(model.parameters())
        distribute(model, optimizer, strategy(Asynchronous()), job=job)
        train(job, model, optimizer, [0])
        model[0].weight.requires_grad_(False)
        distribute(model, optimizer, strategy(Asynchronous()), job=job)
        train(job, model, optimizer, [1])
        return len(optimizer.state_dict()["state"]), len(optimizer.state)

    assert run_jobs(2, program) == [(4, 1)] * 2


def test_a_model_that_is_dropped_is_served_no_longer() -> None:
    def program(job: Job) -> int:
        for _ in range(3):
            model = mlp()
            optimizer = sgd(model.parameters())
            distribute(model, optimizer, strategy(Asynchronous()), job=job)
            train(job, model, optimizer, [0])
            job.barrier()
            del model, optimizer
        deadline = time.monotonic() + 10  # of several threads that collect at once only one does
        while job.server_networks[2]._served and time.monotonic() < deadline:
            gc.collect()
        return len(job.server_networks[2]._served)

    assert max(run_jobs(2, program)) == 0
