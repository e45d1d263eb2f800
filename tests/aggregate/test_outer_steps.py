"""Local steps with an outer optimizer on servers: `LocalSGD` with `ParameterServer()` or `Hierarchy(outer=ParameterServer())`."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aggregate.parameter_server.stepping_worker import (
    PATIENCE_S,
    Scalar,
    Turns,
    adam,
    backward,
    batch,
    mlp,
    sgd,
    step_by,
    values_of,
)
from aggregate.test_elastic import center_of
from aggregate.test_groups_and_servers import RING, close, kill_server, same
from preloaded import Preloaded
from stretto import (
    Average,
    HeavyBall,
    Hierarchy,
    Int8,
    LocalSGD,
    Nesterov,
    NoLoCo,
    ParameterServer,
    Priority,
    SlowMo,
    Strategy,
    load,
    parse,
    save,
)
from stretto.distributing import distribute, release, server_ledgers
from stretto.errors import ConfigurationError, NonFiniteGradient
from stretto.job import Job
from stretto.testing import run_jobs

OUTERS = [Average(), HeavyBall(0.5, 0.9), Nesterov(0.7, 0.9)]


def outer(sync: LocalSGD, size: int | None = None, replicas: int = 0, shards: int = 2) -> Strategy:
    servers = ParameterServer(shards, replicas)
    return Strategy(aggregate=servers if size is None else Hierarchy(RING, servers, size), sync=sync)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    backward(model, rank, number)
    optimizer.step()


def by_hand(size: int, group: int, rounds: int, sync: LocalSGD, make: Any) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Groups that take turns, in one process, with torch's SGD as the outer optimizer: what each holds at the end; the center."""
    models = [mlp() for _ in range(size)]
    optimizers = [make(model.parameters()) for model in models]
    center, options = mlp(), dict[str, Any](lr=1 / size)
    if isinstance(sync.outer, HeavyBall | Nesterov):
        options = {"lr": sync.outer.lr / size, "momentum": sync.outer.momentum}
    steps = torch.optim.SGD(center.parameters(), nesterov=isinstance(sync.outer, Nesterov), **options)
    pulled = [values_of(center) for _ in range(size)]
    for number in range(rounds * sync.every):
        for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.zero_grad()
            torch.autograd.backward(
                model(torch.cat([batch(place * group + each, number) for each in range(group)])).pow(2).mean()
            )
            optimizer.step()
            if (number + 1) % sync.every == 0:
                for mine, theirs, before in zip(model.parameters(), center.parameters(), pulled[place], strict=True):
                    theirs.grad = before - mine.detach()
                steps.step()
                pulled[place] = values_of(center)
                model.load_state_dict(center.state_dict())
                if sync.optimizer_state == "reset":
                    optimizer.state.clear()
    return [values_of(model) for model in models], values_of(center)


@pytest.mark.parametrize("groups", [(1, 2), (2, 1), (2, 2), (3, 1)], ids=lambda groups: f"{groups[0]} of {groups[1]}")
@pytest.mark.parametrize("how", OUTERS, ids=repr)
def test_groups_that_take_turns_are_torchs_sgd_over_what_each_has_gone(how: Any, groups: tuple[int, int]) -> None:
    (size, group), sync = groups, LocalSGD(2, outer=how, optimizer_state="reset" if groups == (2, 1) else "keep")
    turns = Turns(size)

    def program(job: Job) -> tuple[list[Tensor], Tensor]:
        model = mlp(job.rank)
        optimizer = distribute(model, adam(model.parameters()), outer(sync, None if group == 1 else group), job=job)[1]
        for number in range(6):
            with turns(job.rank // group) if job.rank % group == 0 else threading.Lock():
                take_step(model, optimizer, job.rank, number)
        job.barrier()
        middle = center_of(model)
        job.barrier()  # servers end when the first workers of all groups have left
        return values_of(model), middle

    expected, center = by_hand(size, group, 3, sync, adam)
    for rank, (values, middle) in enumerate(run_jobs(size * group, program)):
        assert close(values, expected[rank // group])
        assert torch.allclose(middle, torch.cat([part.flatten() for part in center]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_all_that_groups_have_gone_is_in_the_center_once(overlap: int) -> None:
    """Each step goes 4 down, and each exchange gives the center a quarter of that. Steps taken while one is under way are
    replaced by what has come of it."""
    workers, every, exchanges = 4, 4, 5

    def program(job: Job) -> tuple[float, int]:
        model = Scalar()
        how = outer(LocalSGD(every, overlap=overlap))
        optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), how, job=job)[1]
        for _ in range(every * exchanges):
            step_by(model, optimizer, 4.0)
        distribute(model, optimizer, how, job=job)  # waits for the exchange that is under way
        return float(model.w.detach()), job.ledger.staleness.total()

    gone = workers * (every + (exchanges - 1) * (every - overlap))
    assert run_jobs(workers, program) == [(-gone, exchanges)] * workers


def test_what_was_gone_while_an_exchange_was_under_way_stays_to_the_share_of_merge() -> None:
    def program(job: Job) -> list[float]:
        model = Scalar()
        how = outer(LocalSGD(2, overlap=1, merge=0.25), size=2)
        optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), how, job=job)[1]
        return [step_by(model, optimizer, 4.0) for _ in range(4)]

    # -4, -8 and the center gets that; then -12 here and -8 there; from there to -13, which the center hears of as -5
    assert run_jobs(2, program) == [[-4.0, -8.0, 0.25 * -12 + 0.75 * -8, -13.0]] * 2


def test_nobody_waits_for_a_slow_group_and_the_ledger_has_the_staleness() -> None:
    done = threading.Event()

    def program(job: Job) -> tuple[int, dict[int, int]]:
        model = mlp()
        optimizer = distribute(model, sgd(model.parameters()), outer(LocalSGD(2)), job=job)[1]
        if job.rank == 0:
            for number in range(20):
                take_step(model, optimizer, 0, number)
            done.set()
        assert done.wait(PATIENCE_S)
        if job.rank == 1:
            for number in range(2):
                take_step(model, optimizer, 1, number)
        job.barrier()
        counted = sum(each.updates for each in server_ledgers(model).values())
        job.barrier()
        return counted, dict(job.ledger.staleness)

    (counted, first), (_, second) = run_jobs(2, program)
    assert first == {0: 10} and second == {10: 1}
    assert counted % 11 == 0 and counted > 0


@pytest.mark.parametrize(("what", "group"), [("a gradient", 1), ("a weight", 2)])
def test_what_is_not_finite_is_an_error_of_its_group_and_never_comes_to_the_center(what: str, group: int) -> None:
    def program(job: Job) -> bool:
        model, strategy, is_bad = mlp(), outer(LocalSGD(2), size=group), job.rank >= group
        optimizer = distribute(model, sgd(model.parameters()), strategy, check_finite=True, job=job)[1]
        take_step(model, optimizer, job.rank, 0)
        weight = next(model.parameters())
        optimizer.zero_grad()
        if is_bad and what == "a weight":
            weight.data[0, 0] = torch.inf
        elif is_bad:
            weight.grad = torch.full_like(weight, torch.nan)
        if is_bad:
            with pytest.raises(NonFiniteGradient, match=f"{what} is not finite: rank {job.rank} in '0.weight'"):
                optimizer.step()
        else:
            optimizer.step()
        job.barrier()
        found = center_of(model).isfinite().all()
        job.barrier()
        return bool(found)

    assert run_jobs(2 * group, program) == [True] * 2 * group


@pytest.mark.parametrize("how", OUTERS[1:], ids=repr)
def test_a_checkpoint_has_the_center_and_the_outer_velocity(how: Any, tmp_path: Path) -> None:
    def program(job: Job) -> tuple[Tensor, list[Tensor], list[Tensor], list[str]]:
        model = mlp()
        strategy = outer(LocalSGD(2, outer=how, overlap=1), size=2)  # one group: what comes does not depend on who is first
        optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.05), strategy, job=job)[1]

        def go_on(numbers: range) -> list[Tensor]:
            for number in numbers:
                take_step(model, optimizer, job.rank, number)
            return values_of(model)

        go_on(range(6))  # an exchange is under way
        save(tmp_path / "saved", model, optimizer, job=job)
        saved = center_of(model)
        first = go_on(range(6, 12))
        lost = [str(each) for each in load(tmp_path / "saved", model, optimizer, job=job).lost]
        assert torch.equal(center_of(model), saved)
        return saved, first, go_on(range(6, 12)), lost

    for saved, first, again, lost in run_jobs(2, program):
        assert same(first, again) and not lost
        assert saved.abs().sum() > 0


def test_another_number_of_workers_goes_on_from_the_center(tmp_path: Path) -> None:
    def write(job: Job) -> Tensor:
        model = mlp()
        optimizer = distribute(model, sgd(model.parameters()), outer(LocalSGD(2, outer=Nesterov(0.7, 0.9))), job=job)[1]
        for number in range(4):
            take_step(model, optimizer, job.rank, number)
        save(tmp_path / "saved", model, optimizer, job=job)
        middle = center_of(model)
        job.barrier()
        return middle

    def read(job: Job) -> Tensor:
        model = mlp(7)
        optimizer = distribute(model, sgd(model.parameters()), outer(LocalSGD(2, outer=Nesterov(0.7, 0.9))), job=job)[1]
        load(tmp_path / "saved", model, optimizer, job=job)
        job.barrier()
        found = center_of(model)
        job.barrier()
        assert same(values_of(release(model)), [*_cut(found, model)])
        return found

    written = run_jobs(2, write)[0]
    assert all(torch.equal(found, written) for found in run_jobs(3, read))


def _cut(values: Tensor, model: nn.Module) -> list[Tensor]:
    parts = torch.split(values, [parameter.numel() for parameter in model.parameters()])
    return [part.view(parameter.shape) for part, parameter in zip(parts, model.parameters(), strict=True)]


def test_a_server_that_dies_takes_no_exchange_with_it() -> None:
    killed = threading.Event()

    def program(job: Job) -> float:
        model = Scalar()
        how = outer(LocalSGD(2), replicas=1)
        optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), how, job=job)[1]
        for number in range(20):
            if number == 7 and job.rank == 0:
                kill_server(job, 0, 2)
                killed.set()
            step_by(model, optimizer, 2.0)
        job.barrier()
        middle = float(center_of(model))
        job.barrier()
        return middle

    assert run_jobs(2, program) == [-2.0 * 20] * 2 and killed.is_set()


COMES_BACK = """
import os, signal, time
import torch, stretto
from stretto import LocalSGD, ParameterServer, Strategy

job = stretto.init(timeouts=stretto.Timeouts(arrive_s=60.0))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
stretto.distribute(model, optimizer, Strategy(aggregate=ParameterServer(shards=2, replicas=1), sync=LocalSGD(2)))
print("life", job.life, "begins at", job.first_step, flush=True)

def step():
    optimizer.zero_grad()
    model(torch.ones(3, 4)).pow(2).mean().mul(0.01).backward()
    optimizer.step()

if job.life:
    open("back", "w").close()
for number in range(10):
    step()
if job.rank == 0 and not job.life:
    os.kill(os.getpid(), signal.SIGKILL)
end = time.monotonic() + 60
while not os.path.exists("back"):  # nobody waits for rank 0 before it is back
    assert time.monotonic() < end
    step()
    time.sleep(0.05)
stretto.shutdown()
print("left", flush=True)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_worker_that_was_killed_comes_back_and_goes_on_from_the_center(tmp_path: Path, preloaded: Preloaded) -> None:
    (tmp_path / "comes.py").write_text(COMES_BACK)
    done = preloaded.shell("stretto run -n 2 --min-workers 1 --max-restarts 2 comes.py", folder=tmp_path, timeout_s=170)

    assert done.returncode == 0, done.stderr
    (first_step,) = re.findall(r"\[0\] life [1-9]\d* begins at (\d+)", done.stdout)
    assert int(first_step) >= 10 and int(first_step) % 2 == 0
    assert done.stdout.count("left") == 2


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        ({"sync": LocalSGD(4, outer=SlowMo(0.6))}, "HeavyBall"),
        ({"sync": LocalSGD(4, outer=NoLoCo(0.5, 0.7, 0.7))}, "aggregate=Gossip"),
        ({"sync": LocalSGD(4, grow_to=16)}, "Or leave grow_to= out"),
        ({"sync": LocalSGD(4), "aggregate": ParameterServer(answers=Int8())}, "Leave answers= out"),
        ({"sync": LocalSGD(4, start_after=10)}, "aggregate=AllReduce"),
        ({"sync": LocalSGD(4, optimizer_state="average")}, '"keep" or "reset"'),
        ({"sync": LocalSGD(4, fragments=2)}, "overlap= works"),
        ({"sync": LocalSGD(4), "compress": Int8()}, "Leave compress= out"),
        ({"sync": LocalSGD(4), "schedule": Priority()}, "Leave schedule= out"),
        ({"sync": LocalSGD(4), "aggregate": ParameterServer(snapshots="x")}, "stretto.save"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_answers_that_do_not_go_together_are_refused_with_what_to_write(answers: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(match)):
        Strategy(**{"aggregate": ParameterServer(), **answers})


def test_the_text_reads_back() -> None:
    for sync in (LocalSGD(20, outer=Nesterov(0.7, 0.9)), LocalSGD(20, overlap=5, merge=0.5)):
        for size in (None, 2):
            strategy = outer(sync, size)
            assert parse(repr(strategy)) == strategy
