"""What training with servers that step refuses, and what it says then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from aggregate.parameter_server.stepping_worker import Scalar, mlp, sgd, start_scalar, step_by, strategy
from stretto import weight
from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.hierarchy import Hierarchy
from stretto.aggregate.parameter_server import ParameterServer
from stretto.compress.power_sgd import PowerSGD
from stretto.distributing import distribute, join
from stretto.errors import ConfigurationError, NonFiniteGradient
from stretto.job import Job
from stretto.strategy import Strategy
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.testing import run_jobs

SSP = strategy(StaleSynchronous(0))
Model = nn.Module
Optimizers = Any


class OwnSGD(torch.optim.SGD):
    """Somebody's."""


@pytest.mark.parametrize(
    ("aggregate", "sync"),
    [
        *((AllReduce(), sync) for sync in (Asynchronous(), SoftSync(1), BackupWorkers(1))),  # a late one is `pipelined.py`
        *((Hierarchy(), sync) for sync in (StaleSynchronous(1), Asynchronous(), SoftSync(1), BackupWorkers(1))),
    ],
    ids=repr,
)
def test_without_servers_there_is_no_such_way_of_training(aggregate: Any, sync: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=f"no way of training(.|\n)*aggregate=ParameterServer, sync={type(sync).__name__}"
    ):
        Strategy(aggregate=aggregate, sync=sync)


def test_codecs_are_refused_when_the_strategy_is_made() -> None:
    with pytest.raises(ConfigurationError, match="drives rounds of its own"):
        Strategy(aggregate=ParameterServer(), sync=Asynchronous(), compress=PowerSGD(2))


def _twice(model: Model) -> Optimizers:
    return sgd(model.parameters()), torch.optim.SGD(list(model.parameters())[:1], lr=0.1)


REFUSED: dict[str, tuple[Callable[[], Model], Callable[[Model], Optimizers], Any, str]] = {
    "LBFGS": (mlp, lambda m: torch.optim.LBFGS(m.parameters()), StaleSynchronous(1), "LBFGS on parameter servers"),
    "a subclass": (mlp, lambda m: OwnSGD(m.parameters(), lr=0.1), StaleSynchronous(1), "a subclass of SGD may compute"),
    "Rprop": (mlp, lambda m: torch.optim.Rprop(m.parameters()), SoftSync(1), "Rprop keeps a rate in its state"),
    "ASGD": (mlp, lambda m: torch.optim.ASGD(m.parameters()), Asynchronous(True), "divided by its staleness"),
    "an option": (mlp, lambda m: torch.optim.SGD(m.parameters(), lr=float("inf")), Asynchronous(), "lr=inf is not"),
    "float64": (lambda: mlp().double(), lambda m: sgd(m.parameters()), Asynchronous(), "parameter 0.weight is float64"),
    "a parameter apart": (mlp, lambda m: sgd(m[0].parameters()), Asynchronous(), "parameter 2.weight wants a gradient"),  # type: ignore[index]
    "in two optimizers": (mlp, _twice, Asynchronous(), "two optimizers, SGD and SGD, step the same parameter"),
    "too many spared": (mlp, lambda m: sgd(m.parameters()), BackupWorkers(2), "in a job of 2 workers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_servers_cannot_step_is_refused_on_all_workers_before_anything_is_sent(case: str) -> None:
    build, optimizers, sync, match = REFUSED[case]

    def program(job: Job) -> str:
        model = build()
        with pytest.raises(ConfigurationError, match=match) as refused:
            distribute(model, optimizers(model), strategy(sync), job=job)
        assert not job.server_networks
        return str(refused.value)

    first, second = run_jobs(2, program)
    assert first == second


def test_rates_that_are_not_scaled_are_fine_for_optimizers_that_keep_one() -> None:
    def program(job: Job) -> None:
        model = mlp()
        distribute(model, torch.optim.Rprop(model.parameters()), strategy(Asynchronous()), job=job)

    run_jobs(2, program)


def test_join_is_refused_with_the_reason() -> None:
    def program(job: Job) -> None:
        model, _ = start_scalar(job, Asynchronous())
        with pytest.raises(ConfigurationError, match="join with sync=Asynchronous.*no rounds(.|\n)*drop_last=True"), join(model):
            pass

    run_jobs(2, program)


def _freeze(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.requires_grad_(False)


def _unfreeze(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[3].weight.requires_grad_(True)


def _add(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.add_module("more", nn.Linear(1, 1))
    optimizer.add_param_group({"params": list(model[-1].parameters())})


def _replace(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0] = nn.Linear(4, 6)


def _move(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].remove(model[0].weight)
    optimizer.add_param_group({"params": [model[0].weight]})


def _convert(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize(
    "change", [_freeze, _unfreeze, _add, _replace, _move, _convert], ids=lambda each: each.__name__.strip("_")
)
def test_parameters_that_change_later_are_refused_and_distribute_takes_them(change: Any) -> None:
    def program(job: Job) -> None:
        model = nn.Sequential(*mlp(), nn.Linear(1, 1).requires_grad_(False))
        optimizer = sgd(model.parameters())
        distribute(model, optimizer, SSP, job=job)
        change(model, optimizer)
        with pytest.raises(ConfigurationError, match="since the model was distributed(.|\n)*distribute.* again on all workers"):
            torch.autograd.backward(model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).sum())
            optimizer.step()
        if change is _replace:
            optimizer = sgd(model.parameters())
        distribute(model, optimizer, SSP, job=job)
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).sum())
        optimizer.step()

    run_jobs(2, program)


def test_values_that_were_written_to_beside_the_servers_are_refused_and_distribute_takes_them() -> None:
    def program(job: Job) -> float:
        model, optimizer = start_scalar(job, StaleSynchronous(0))
        with torch.no_grad():
            model.w.fill_(5.0)
        with pytest.raises(ConfigurationError, match="parameter w was written to since the last step"):
            step_by(model, optimizer, 1.0)
        distribute(model, optimizer, SSP, job=job)
        return step_by(model, optimizer, 1.0)

    assert run_jobs(2, program) == [3.0, 3.0]


def test_an_optimizer_that_was_not_given_is_found_out_by_what_it_writes() -> None:
    def program(job: Job) -> None:
        model, optimizer = start_scalar(job, Asynchronous())
        other = torch.optim.SGD(model.parameters(), lr=1.0)
        step_by(model, other, 1.0)
        with pytest.raises(ConfigurationError, match="written to .*another optimizer"):
            step_by(model, optimizer, 1.0)

    run_jobs(2, program)


def test_a_state_that_is_loaded_beside_the_servers_is_refused_and_distribute_takes_it() -> None:
    def program(job: Job) -> float:
        model = Scalar()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        distribute(model, optimizer, SSP, job=job)
        state = optimizer.state_dict()
        state["state"] = {0: {"momentum_buffer": torch.tensor([4.0])}}
        optimizer.load_state_dict(state)
        with pytest.raises(ConfigurationError, match="SGD was given a state since the last step"):
            step_by(model, optimizer, 0.0)
        distribute(model, optimizer, SSP, job=job)
        return step_by(model, optimizer, 0.0)

    assert run_jobs(2, program) == [-3.0, -3.0]  # momentum 2, then 1


def test_a_grad_scaler_is_refused() -> None:
    def program(job: Job) -> None:
        model, optimizer = start_scalar(job, StaleSynchronous(0))
        scaler = torch.amp.GradScaler("cpu")
        torch.autograd.backward(scaler.scale(model(1.0)))
        with pytest.raises(ConfigurationError, match="a GradScaler steps SGD.*skips steps"):
            scaler.step(optimizer)

    run_jobs(2, program)


def test_a_weight_of_zero_is_refused() -> None:
    def program(job: Job) -> None:
        model, optimizer = start_scalar(job, SoftSync(1))
        weight(0.0, job=job)
        with pytest.raises(ConfigurationError, match=r"weight\(0\) before a step"):
            step_by(model, optimizer, 1.0)

    run_jobs(2, program)


def test_check_finite_names_this_workers_own_gradient_and_pushes_nothing() -> None:
    def program(job: Job) -> float:
        model, optimizer = start_scalar(job, Asynchronous(), check_finite=True)
        if job.rank == 1:
            with pytest.raises(NonFiniteGradient, match=r"rank 1"):
                step_by(model, optimizer, float("nan"))
        job.barrier()
        return step_by(model, optimizer, 0.0)

    assert run_jobs(2, program) == [0.0, 0.0]
