"""Training on shared weights: what is shared, what is not, and what becomes of races."""

from __future__ import annotations

import copy
import gc
import io
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from aggregate.parameter_server.stepping_worker import Turns, backward, mlp, values_of
from aggregate.shared_memory.sparse_problem import FEATURES, Sparse, collide, learn, learn_together, whole_loss
from preloaded import Preloaded
from stretto import recipes
from stretto.distributing import distribute, release
from stretto.job import Job
from stretto.testing import run_jobs

HOGWILD = recipes.hogwild()
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False),
    "foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


def start(job: Job, model: nn.Module, make: MakeOptimizer = OPTIMIZERS["momentum"], **options: Any) -> torch.optim.Optimizer:
    return distribute(model, make(model.parameters()), HOGWILD, job=job, **options)[1]


def plain_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    backward(model, rank, number)
    optimizer.step()


def plain(make: MakeOptimizer, batches: Iterable[tuple[int, int]]) -> list[Tensor]:
    model = mlp()
    optimizer = make(model.parameters())
    for rank, number in batches:
        step(model, optimizer, rank, number)
    return values_of(model)


def same(values: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(values, others, strict=True))


# -- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 3])
def test_where_one_worker_steps_all_see_the_plain_loop_bit_for_bit(size: int, name: str) -> None:
    def program(job: Job) -> list[Tensor]:
        model = mlp(job.rank)
        optimizer = start(job, model, OPTIMIZERS[name])
        if job.rank == 0:
            for number in range(5):
                step(model, optimizer, 0, number)
        job.barrier()
        return values_of(model)

    expected = plain(OPTIMIZERS[name], [(0, number) for number in range(5)])
    assert all(same(values, expected) for values in run_jobs(size, program))


@pytest.mark.parametrize("size", [3, 7, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
def test_each_worker_goes_on_from_what_the_others_have_written(size: int) -> None:
    """Taking turns, they do what one does with all their batches."""
    turns = Turns(size)

    def program(job: Job) -> tuple[list[Tensor], dict[int, int]]:
        model = mlp(job.rank)
        optimizer = start(job, model, plain_sgd)
        for number in range(3):
            with turns(job.rank):
                step(model, optimizer, job.rank, number)
        job.barrier()
        return values_of(model), dict(job.ledger.staleness)

    expected = plain(plain_sgd, [(rank, number) for number in range(3) for rank in range(size)])
    for values, staleness in run_jobs(size, program):
        assert same(values, expected)
        assert staleness == {0: 3}


def test_momentum_is_each_workers_own() -> None:
    turns = Turns(2)

    def program(job: Job) -> tuple[list[Tensor], list[Tensor]]:
        model = mlp()
        optimizer = start(job, model)
        with turns(job.rank):
            step(model, optimizer, job.rank, 0)
        job.barrier()
        return values_of(model), [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]

    (values, first), (_, second) = run_jobs(2, program)
    assert same(values, plain(plain_sgd, [(0, 0), (1, 0)]))  # a first step has no momentum
    assert not same(first, second)


@pytest.mark.parametrize("size", [2, 4])
def test_the_ledger_has_the_steps_that_others_have_ended_since_the_forward(size: int) -> None:
    turns = Turns(size)

    def program(job: Job) -> dict[int, int]:
        model = mlp()
        optimizer = start(job, model, plain_sgd)
        backward(model, job.rank, 0)
        with torch.no_grad():
            model(torch.zeros(1, 4))  # looking at it is no new reading
        job.barrier()
        with turns(job.rank):
            optimizer.step()
        return dict(job.ledger.staleness)

    assert run_jobs(size, program) == [{rank: 1} for rank in range(size)]


def test_a_sparse_step_writes_the_rows_of_its_batch_and_no_others() -> None:
    def program(job: Job) -> Tensor:
        model = Sparse()
        optimizer = start(job, model, lambda parameters: torch.optim.SGD(parameters, lr=1.0))
        features = torch.tensor([[10 * job.rank, 10 * job.rank + 1]])
        torch.autograd.backward(model(features).sum())
        grad = model.weight.weight.grad
        assert grad is not None and grad.is_sparse
        job.barrier()  # both have computed their gradients before either has stepped
        if job.rank == 1:
            with torch.no_grad():
                model.weight.weight[0] = 5.0  # also where rank 0 is about to add
        job.barrier()
        optimizer.step()
        job.barrier()
        return model.weight.weight.detach()[:, 0].clone()

    expected = torch.zeros(FEATURES)
    expected[[0, 1, 10, 11]] = torch.tensor([4.0, -1.0, -1.0, -1.0])
    assert all(torch.equal(values, expected) for values in run_jobs(2, program))


def test_gradients_and_buffers_are_each_workers_own() -> None:
    def program(job: Job) -> tuple[Tensor, Tensor]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        optimizer = start(job, model, plain_sgd)
        torch.autograd.backward(model(torch.full((3, 2), float(job.rank + 1)) * torch.arange(3.0)[:, None]).sum())
        job.barrier()
        gradient, mean = model[2].bias.grad, model[1].running_mean
        assert isinstance(gradient, Tensor) and isinstance(mean, Tensor)
        optimizer.step()
        return gradient, mean.clone()

    (gradient, mean), (other_gradient, other_mean) = run_jobs(2, program)
    assert gradient.data_ptr() != other_gradient.data_ptr()
    assert not torch.equal(mean, other_mean)


# -- real processes ---------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_processes_that_race_reach_the_sequential_loss_of_a_sparse_problem(preloaded: Preloaded) -> None:
    epochs = 4
    alone = Sparse()
    learn(alone, torch.optim.SGD(alone.parameters(), lr=0.5), 0, 1, epochs)
    begin, expected = whole_loss(Sparse()), whole_loss(alone)
    assert expected < 0.8 * begin

    results = preloaded.launch(learn_together, 3, epochs)
    losses, weights, staleness, anonymous = zip(*results, strict=True)
    assert all(anonymous)
    assert losses[0] == losses[1] == losses[2] and weights[0] == weights[1] == weights[2]  # it is the same memory
    assert abs(losses[0] - expected) < 0.05 * begin
    assert all(sum(each.values()) == epochs * 50 for each in staleness)  # a step each


@pytest.mark.processes
def test_dense_updates_that_race_may_be_lost_and_are_never_torn(preloaded: Preloaded) -> None:
    steps = 2000
    results = preloaded.launch(collide, 2, steps)
    weights, others = results
    assert weights == others
    assert all(value == int(value) and steps / 2 < value <= 2 * steps for value in weights)


DIES = """
import json, os, signal, sys
from pathlib import Path
import torch
import stretto

job = stretto.init()
model = torch.nn.Linear(100, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
stretto.distribute(model, optimizer, "hogwild")
step = torch.optim.SGD.step
for number in range(50 if job.rank == 1 else 10**9):
    torch.autograd.backward(model(torch.ones(2, 100)).mean())
    optimizer.step()
    if 1 in job.wire.lost:
        break
if job.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
for number in range(20):
    torch.autograd.backward(model(torch.ones(2, 100)).mean())
    optimizer.step()
assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
Path(f"survived{job.rank}").write_text(str(sum(job.ledger.staleness.values())))
"""


@pytest.mark.processes
def test_a_killed_worker_holds_up_nobody_and_leaves_no_file(preloaded: Preloaded, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    named = {path.name for path in Path("/dev/shm").iterdir()}
    each = "RANK=$r LOCAL_RANK=$r WORLD_SIZE=3 LOCAL_WORLD_SIZE=3 python dies.py & pids[$r]=$!"
    command = (
        f"export MASTER_ADDR=127.0.0.1 MASTER_PORT={port}; for r in 0 1 2; do {each}; done; "
        "for r in 0 1 2; do wait ${pids[$r]}; echo $r $?; done"
    )
    done = preloaded.shell(command, folder=tmp_path)
    assert "0 0\n" in done.stdout and "2 0\n" in done.stdout, done.stderr
    assert "1 0\n" not in done.stdout  # it was killed
    assert all(int((tmp_path / f"survived{rank}").read_text()) > 20 for rank in (0, 2))
    assert {path.name for path in Path("/dev/shm").iterdir()} <= named


# -- copies -----------------------------------------------------------------------------------------------------------


def test_a_released_model_is_a_copy_of_its_own() -> None:
    def program(job: Job) -> tuple[list[Tensor], list[Tensor]]:
        model = mlp()
        optimizer = start(job, model, plain_sgd)
        before = values_of(model)
        if job.rank == 1:
            release(model)
        job.barrier()
        step(model, optimizer, 0, 0)  # rank 0 in the memory that was shared, rank 1 in its own
        step(model, optimizer, job.rank, 1)
        job.barrier()
        return before, values_of(model)

    (before, first), (_, second) = run_jobs(2, program)
    assert same(first, plain(plain_sgd, [(0, 0), (0, 1)])) and same(second, plain(plain_sgd, [(0, 0), (1, 1)]))
    assert same(before, mlp().parameters())


def test_copies_and_saved_states_hold_a_models_own_bytes_and_no_memory_of_others() -> None:
    def program(job: Job) -> tuple[int, bool]:
        model = mlp()
        optimizer = start(job, model)
        twin = copy.deepcopy(model)
        file, small = io.BytesIO(), io.BytesIO()
        torch.save(model.state_dict(), file)
        torch.save({"bias": model.state_dict()["2.bias"]}, small)
        job.barrier()
        step(model, optimizer, 0, job.rank)
        job.barrier()
        file.seek(0)
        unchanged = same(torch.load(file, weights_only=True).values(), mlp().parameters())
        return len(small.getvalue()), unchanged and same(twin.parameters(), mlp().parameters())

    for num_bytes, unchanged in run_jobs(2, program):
        assert unchanged and num_bytes < 2000


def test_distributing_again_goes_on_from_the_same_values() -> None:
    def program(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = start(job, model, plain_sgd)
        if job.rank == 1:
            step(model, optimizer, 0, 0)
        job.barrier()
        optimizer = start(job, model, plain_sgd)
        if job.rank == 0:
            step(model, optimizer, 0, 1)
        job.barrier()
        distribute(model, optimizer, stretto.Strategy(), job=job)
        step(model, optimizer, 0, 2)  # the same gradient on both: synchronous now
        return values_of(model)

    first, second = run_jobs(2, program)
    assert same(first, second) and same(first, plain(plain_sgd, [(0, 0), (0, 1), (0, 2)]))


def test_a_checkpoint_holds_the_shared_weights_and_loads_into_them(tmp_path: Path) -> None:
    turns = Turns(2)

    def program(job: Job) -> tuple[list[Tensor], list[Tensor]]:
        model = mlp()
        optimizer = start(job, model, plain_sgd)
        with turns(job.rank):
            step(model, optimizer, job.rank, 0)
        stretto.save(tmp_path / "saved", model, optimizer, job=job)
        saved = values_of(model)
        with turns(job.rank):
            step(model, optimizer, job.rank, 1)
        job.barrier()
        stretto.load(tmp_path / "saved", model, optimizer, job=job)
        loaded = values_of(model)
        job.barrier()
        if job.rank == 1:
            step(model, optimizer, 1, 1)
        job.barrier()
        assert not same(values_of(model), loaded)  # still one memory: rank 1's step is seen by both
        return saved, loaded

    (saved, loaded), (_, other) = run_jobs(2, program)
    assert same(saved, plain(plain_sgd, [(0, 0), (1, 0)])) and same(loaded, saved) and same(other, saved)


def test_frozen_parameters_may_be_unfrozen_and_are_shared_then() -> None:
    turns = Turns(2)

    def program(job: Job) -> list[Tensor]:
        model = mlp()
        model[0].requires_grad_(False)
        optimizer = start(job, model, plain_sgd)
        with turns(job.rank):
            step(model, optimizer, job.rank, 0)
        model[0].requires_grad_(True)
        with turns(job.rank):
            step(model, optimizer, job.rank, 1)
        job.barrier()
        return values_of(model)

    first, second = run_jobs(2, program)
    assert same(first, second) and not same(first[:1], values_of(mlp())[:1])


def test_every_kind_of_number_and_layout_lies_in_the_memory_as_it_was() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Parameter(torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last))
            self.small = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
            self.waves = nn.Parameter(torch.randn(2, dtype=torch.complex128))
            self.turned = nn.Parameter(torch.randn(3, 2).t())
            self.nothing = nn.Parameter(torch.empty(0, 3))
            self.single = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def program(job: Job) -> None:
        model = Mixed()
        kept = [(p.stride(), p.dtype, p) for p in model.parameters()]
        start(job, model, plain_sgd)
        mine = values_of(model)
        assert [(p.stride(), p.dtype) for p in model.parameters()] == [(strides, dtype) for strides, dtype, _ in kept]
        assert all(p is now for (_, _, p), now in zip(kept, model.parameters(), strict=True))
        job.barrier()
        if job.rank == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
        job.barrier()
        assert same(values_of(model), [value + 1 for value in mine])
        job.barrier()

    run_jobs(3, program)


def test_nothing_of_it_is_left_in_this_process_once_models_are_gone() -> None:
    def mapped() -> int:
        return sum("memfd:stretto (deleted)" in line for line in Path("/proc/self/maps").read_text().splitlines())

    gc.collect()  # what other tests have left
    before = mapped()

    def program(job: Job) -> int:
        model = mlp()
        start(job, model)
        job.barrier()
        count = mapped()
        job.barrier()
        release(model)
        return count

    assert all(count >= before + 2 for count in run_jobs(2, program))
    gc.collect()
    assert mapped() <= before
