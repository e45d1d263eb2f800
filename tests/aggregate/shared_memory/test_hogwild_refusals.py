"""What shared weights refuse: before anything is shared, and at a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from aggregate.shared_memory.test_hogwild import HOGWILD, plain_sgd, start, step
from engine.worker import seeded
from stretto import (
    AfterBackward,
    Asynchronous,
    Buckets,
    DelayCompensation,
    Float16,
    NonFiniteGradient,
    Priority,
    SharedMemory,
    SoftSync,
    StaleSynchronous,
    Synchronous,
)
from stretto.distributing import distribute, join, weight
from stretto.errors import ConfigurationError, JobError
from stretto.job import Job
from stretto.strategy import Strategy
from stretto.testing import run_jobs
from stretto.wire import mapping


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        ({"sync": Synchronous()}, "no way of training"),
        ({"sync": StaleSynchronous(1)}, "no way of training"),
        ({"sync": SoftSync(1)}, "no way of training"),
        ({"sync": Asynchronous(staleness_aware=True)}, r"Write sync=Asynchronous\(\)"),
        ({"sync": Asynchronous(delay_compensation=DelayCompensation(0.04))}, "how stale a gradient is"),
        ({"compress": Float16()}, "Leave compress= out"),
        ({"schedule": Priority()}, "no transfers to put into an order"),
        ({"schedule": AfterBackward()}, "Leave schedule= out"),
        ({"schedule": Buckets(bytes=10)}, "Leave schedule= out"),
    ],
)
def test_combinations_without_a_meaning_are_refused_at_construction(answers: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Strategy(**{"aggregate": SharedMemory(), "sync": Asynchronous(), **answers})


def refused(size: int, match: str, build: Callable[[], nn.Module], make: Any = plain_sgd, **options: Any) -> None:
    def program(job: Job) -> None:
        model = build()
        with pytest.raises(ConfigurationError, match=match):
            distribute(model, make(model.parameters()), HOGWILD, job=job)

    run_jobs(size, program, **options)


def tied_by_data() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    return model


def with_gaps() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 4)[:, ::2])
    return model


def elsewhere() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (tied_by_data, "0.weight and 1.weight are different parameters in the same memory"),
        (with_gaps, r"weight has shape \(2, 2\) and strides \(4, 2\)"),
        (elsewhere, "weight is on meta, and what is shared is host memory"),
    ],
)
def test_parameters_that_cannot_be_shared_are_refused(build: Callable[[], nn.Module], match: str) -> None:
    refused(2, match, build)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_parameters_on_a_gpu_are_refused() -> None:
    refused(1, "weight is on cuda:0, and what is shared is host memory", lambda: nn.Linear(2, 2, device="cuda"))


def test_workers_of_several_hosts_are_refused() -> None:
    refused(3, "rank 2 is on another host than rank 0", lambda: nn.Linear(2, 2), hosts=["a", "a", "b"])


def test_an_optimizer_that_decides_by_the_loss_is_refused() -> None:
    refused(2, "LBFGS on shared weights", lambda: nn.Linear(2, 2), torch.optim.LBFGS)


def test_memory_that_there_is_not_is_said_on_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_free_bytes", lambda: 100)

    def program(job: Job) -> None:
        model = nn.Linear(4, 1)
        place = model.weight.data_ptr()
        with pytest.raises(JobError, match=r"rank 0 cannot make it: .*more than half of the 100 that are free"):
            start(job, model, plain_sgd)
        assert model.weight.data_ptr() == place and not model._forward_pre_hooks

    run_jobs(2, program)


class Replacing(torch.optim.SGD):
    """Gives its parameters new memory instead of writing into theirs."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


def make_double(model: nn.Module) -> None:
    model.double()


def replace_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def share_by_torch(model: nn.Module) -> None:
    model.share_memory()


@pytest.mark.parametrize("change", [make_double, replace_data, assign, share_by_torch])
def test_parameters_that_have_left_the_memory_are_noticed_at_the_next_step(change: Callable[[nn.Module], Any]) -> None:
    def program(job: Job) -> None:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 1)))
        optimizer = start(job, model, plain_sgd)
        step(model, optimizer, 0, 0)
        change(model)
        with pytest.raises(ConfigurationError, match="0.weight does not lie in the memory that the workers share"):
            step(model, optimizer, 0, 1)

    run_jobs(2, program)


def test_an_optimizer_that_replaces_its_parameters_is_found_out_at_its_first_step() -> None:
    def program(job: Job) -> None:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 1)))
        optimizer = start(job, model, lambda parameters: Replacing(parameters, lr=0.1))
        with pytest.raises(ConfigurationError, match=r"an optimizer \(p.data = ...\)"):
            step(model, optimizer, 0, 0)

    run_jobs(2, program)


def test_weights_of_means_and_join_are_refused_because_there_is_no_mean_and_no_round() -> None:
    def program(job: Job) -> None:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 1)))
        optimizer = start(job, model, plain_sgd)
        with pytest.raises(ConfigurationError, match="nobody waits for anybody"), join(model):
            pass
        weight(2.0)
        with pytest.raises(ConfigurationError, match="there is no mean to weigh"):
            step(model, optimizer, 0, 0)
        weight(1.0)

    run_jobs(2, program)


def test_a_gradient_that_is_not_finite_is_refused_where_it_was_made() -> None:
    def program(job: Job) -> None:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 1)))
        optimizer = start(job, model, plain_sgd, check_finite=True)
        torch.autograd.backward(model(torch.full((1, 4), torch.inf if job.rank == 1 else 1.0)).sum())
        if job.rank == 1:
            with pytest.raises(NonFiniteGradient, match=r"0\.weight"):
                optimizer.step()
        else:
            optimizer.step()

    run_jobs(2, program)
