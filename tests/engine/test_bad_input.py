"""What cannot work is refused where it is given, with what was asked, why, and what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stretto
from engine.worker import RING, mlp, start
from stretto.aggregate.all_reduce import AllReduce
from stretto.distributing import distribute, engine_of, join, no_sync
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.strategy import Strategy
from stretto.testing import run_jobs


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def refused(match: str, model: Any, optimizer: Any, strategy: Any = RING, *, size: int = 1, **options: Any) -> None:
    def program(job: Job) -> None:
        with pytest.raises(ConfigurationError, match=match):
            distribute(model, optimizer, strategy, job=job, **options)

    run_jobs(size, program)


@pytest.mark.parametrize("size", [1, 2])
def test_arguments_of_a_wrong_type(size: int) -> None:
    model = mlp()
    refused("the first argument is the nn.Module to train", [model], sgd(model), size=size)
    refused("the second argument is the torch optimizer", model, model.parameters(), size=size)
    refused("write a Strategy", model, sgd(model), 3, size=size)
    refused("write a Strategy", model, sgd(model), Strategy, size=size)
    refused("buffers='sometimes': write 'broadcast' or 'local'", model, sgd(model), buffers="sometimes", size=size)
    refused("check_finite='no': write True or False", model, sgd(model), check_finite="no", size=size)
    refused("cannot read the strategy 'ring'", model, sgd(model), "ring", size=size)


def test_an_unknown_option() -> None:
    model = mlp()
    with pytest.raises(TypeError, match="bucket_cap_mb"):
        distribute(model, sgd(model), bucket_cap_mb=25)  # type: ignore[call-arg]


def test_swapped_arguments() -> None:
    model = mlp()
    refused("the first argument is the nn.Module", sgd(model), model)


def test_a_model_with_nothing_to_train() -> None:
    frozen = mlp().requires_grad_(False)
    refused("no parameter that wants a gradient.*\n.*requires_grad_", frozen, sgd(frozen))
    refused("no parameter that wants a gradient", nn.Tanh(), sgd(mlp()))


def test_an_optimizer_over_other_parameters() -> None:
    model, other = mlp(), nn.Linear(3, 2)
    refused(r"shape \(2, 3\) that is not one of the model's.*\n.*the very model given here", model, sgd(other))
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    refused("not one of the model's", model, both)


def test_a_module_and_the_model_it_is_part_of() -> None:
    """Both engines would combine the shared gradients."""

    def program(job: Job) -> None:
        model = mlp()
        start(job, model)
        for other in (nn.Sequential(model, nn.Linear(1, 1)), model[0]):
            with pytest.raises(ConfigurationError, match="weight.*is part of a model that has been distributed before"):
                start(job, other)

    run_jobs(2, program)


@pytest.mark.parametrize("use", [no_sync, join])
def test_a_model_that_was_not_distributed(use: Any) -> None:
    with pytest.raises(ConfigurationError, match="this Sequential has not been distributed"), use(mlp()):
        pass
    with pytest.raises(ConfigurationError, match="has not been distributed"):
        engine_of(mlp())


def test_no_job() -> None:
    assert not stretto.is_initialized()
    with pytest.raises(ConfigurationError, match=r"Call stretto.init\(\) first"):
        distribute(mlp(), sgd(mlp()))


def test_the_backends_own_collective_on_another_wire() -> None:
    model = mlp()
    refused('wire="gloo"', model, sgd(model), Strategy(aggregate=AllReduce("native")), size=2)


def test_a_parameter_of_a_kind_that_cannot_travel() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("odd", torch.ones(3).to(torch.float8_e4m3fn))

    model = Odd()
    refused("odd.*float8_e4m3fn", model, sgd(model), size=2)


def test_torchs_sync_batch_norm_without_torch_distributed_is_refused() -> None:
    """It would quietly be a plain BatchNorm."""
    model = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
    refused("SyncBatchNorm '1'.*torch.distributed", model, sgd(model), size=2)
    run_jobs(1, lambda job: distribute(model, sgd(model), RING, job=job))  # alone it has nobody to synchronise with


def test_a_lazy_parameter_is_refused_until_it_has_a_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    refused("0.weight.*no shape yet.*\n.*forward", model, torch.optim.SGD(model.parameters(), lr=0.1), size=2)
