"""Gradients that another system combines, and parameters that it shards, are refused at once: two systems never both average.

The process group here has one member. That is enough to make every wrapper there is, and needs no second process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from engine.worker import RING, data, mlp
from stretto.distributing import distribute
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.testing import run_jobs


@pytest.fixture
def process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def in_ddp() -> nn.Module:
    return DistributedDataParallel(mlp())


def a_part_in_ddp() -> nn.Module:
    return nn.Sequential(DistributedDataParallel(mlp()), nn.Linear(1, 1))


def replicated() -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(mlp())


def in_fsdp() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))


def fully_sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model[0], mesh=mesh())
    return model


def with_a_distributed_tensor() -> nn.Module:
    from torch.distributed.tensor import distribute_tensor

    model = mlp()
    first = model.get_submodule("0")
    first.weight = nn.Parameter(distribute_tensor(first.get_parameter("weight").detach(), mesh()))
    return model


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


COMBINED = "combines gradients itself, through torch.distributed.*\n.*plain model, without that wrapper.*docs/libraries.md"
SHARDED = "each worker holds another part of it.*\n.*the plain model"


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")  # in a group of one
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (in_ddp, f"the model is a DistributedDataParallel: it {COMBINED}"),
        (a_part_in_ddp, f"'0' in Sequential is a DistributedDataParallel: it {COMBINED}"),
        (replicated, COMBINED),
        (in_fsdp, f"the model is a FullyShardedDataParallel: {SHARDED}"),
        (fully_sharded, f"'0' in Sequential is a FSDPLinear: {SHARDED}"),
        (with_a_distributed_tensor, f"parameter 0.weight of Sequential is a DTensor: {SHARDED}"),
    ],
    ids=["DDP", "DDP inside", "replicate", "FSDP", "fully_shard", "DTensor"],
)
def test_a_model_that_something_else_combines_or_shards(make: Callable[[], nn.Module], match: str, process_group: None) -> None:
    model = make()

    def program(job: Job) -> None:
        with pytest.raises(ConfigurationError, match=match):
            distribute(model, sgd(model), RING, job=job)

    run_jobs(1, program)


def test_a_wrapper_that_is_put_around_later_is_refused_at_the_first_forward_on_every_worker(process_group: None) -> None:
    one_at_a_time = threading.Lock()  # torch notes in one place for all threads which wrapper's forward is running

    def program(job: Job) -> str:
        model = mlp()
        distribute(model, sgd(model), RING, job=job)
        wrapped = DistributedDataParallel(nn.Sequential(model))
        with one_at_a_time, pytest.raises(ConfigurationError, match="put around it") as refused:
            wrapped(data(0))
        with torch.no_grad():
            wrapped.eval()(data(0))  # nothing is combined in evaluation
        return str(refused.value)

    assert len(set(run_jobs(2, program))) == 1


class Guided(nn.Module):
    """Trained by DDP, with the help of a model that is not one of its parts."""

    def __init__(self, guide: nn.Module) -> None:
        super().__init__()
        self.own = mlp()
        self.guide = [guide]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.own(x) + self.guide[0](x)
        return y


def test_another_models_wrapper_is_no_obstacle(process_group: None) -> None:
    one_at_a_time = threading.Lock()

    def program(job: Job) -> None:
        model = mlp()
        distribute(model, sgd(model), RING, job=job)
        guided = DistributedDataParallel(Guided(model))
        with one_at_a_time:
            assert guided(data(0)).shape == (6, 1)

    run_jobs(2, program)


def test_a_model_that_is_sharded_after_it_was_distributed(process_group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    one_at_a_time = threading.Lock()
    shards = mesh()

    def program(job: Job) -> None:
        model = mlp()
        distribute(model, sgd(model), RING, job=job)
        with one_at_a_time:
            fully_shard(model, mesh=shards)
        with pytest.raises(ConfigurationError, match=SHARDED):
            model(data(0))

    run_jobs(2, program)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # from torch's own import
def test_an_optimizer_that_averages_parameters_itself(process_group: None) -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = mlp()
    optimizer = PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=2, warmup_steps=2))

    def program(job: Job) -> None:
        with pytest.raises(ConfigurationError, match="averages the parameters of all workers itself.*\n.*that it wraps"):
            distribute(model, optimizer, RING, job=job)

    run_jobs(1, program)
