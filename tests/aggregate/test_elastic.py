"""Elastic averaging among groups: `Hierarchy(outer=ParameterServer(), elastic=Elastic(...))`."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aggregate.parameter_server.stepping_worker import PATIENCE_S, Scalar, adam, backward, batch, mlp, sgd, step_by, values_of
from aggregate.test_groups_and_servers import RING, SERVERS, close, kill_server, same
from stretto import (
    AllReduce,
    Asynchronous,
    Elastic,
    Float16,
    Hierarchy,
    ParameterServer,
    Priority,
    SoftSync,
    StaleSynchronous,
    Strategy,
    Synchronous,
    load,
    parse,
    save,
)
from stretto.distributing import distribute, engine_of, join, release, server_ledgers
from stretto.errors import ConfigurationError, PeerLost, StrettoError
from stretto.job import Job
from stretto.testing import run_jobs


def elastic(
    every: int, rate: float | None = None, sync: Any = None, size: int | None = 1, servers: ParameterServer = SERVERS
) -> Strategy:
    groups = Hierarchy(RING, servers, size, Elastic(every, rate))
    return Strategy(aggregate=groups, sync=Synchronous() if sync is None else sync)


def center_of(model: nn.Module) -> Tensor:
    training: Any = engine_of(model).training
    found: Tensor = training._center.read()
    return found


def by_hand(
    num_groups: int, group: int, steps: int, every: int, rate: float, make: Any = sgd
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The formula of the paper in one process: the parameters of every group, and the center."""
    models = [mlp() for _ in range(num_groups)]
    optimizers = [make(model.parameters()) for model in models]
    center = values_of(mlp())
    for number in range(steps):
        differences = []
        for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.zero_grad()
            data = torch.cat([batch(rank, number) for rank in range(place * group, (place + 1) * group)])
            torch.autograd.backward(model(data).pow(2).mean())
            mine = [rate * (value - middle) for value, middle in zip(values_of(model), center, strict=True)]
            optimizer.step()
            if (number + 1) % every == 0:
                differences.append(mine)
                with torch.no_grad():
                    for parameter, difference in zip(model.parameters(), mine, strict=True):
                        parameter.sub_(difference)
        for each in differences:
            center = [middle + difference for middle, difference in zip(center, each, strict=True)]
    return [values_of(model) for model in models], center


def train(job: Job, how: Strategy, steps: int, make: Any = sgd) -> tuple[list[list[Tensor]], Tensor]:
    """The parameters after every step, and the center at the end."""
    model = mlp(job.rank)
    optimizer = distribute(model, make(model.parameters()), how, job=job)[1]
    seen = []
    for number in range(steps):
        optimizer.zero_grad()
        backward(model, job.rank, number)
        optimizer.step()
        seen.append(values_of(model))
    job.barrier()
    center = center_of(model)
    job.barrier()
    return seen, center


IN_STEP = [(2, 1, sgd, 1), (3, 1, adam, 2), (2, 2, sgd, 2)]
MORE_IN_STEP = [
    pytest.param(*each, marks=pytest.mark.slow)
    for groups in ((2, 1), (3, 1), (2, 2), (3, 2))
    for make in (sgd, adam)
    for every in (1, 2)
    if (each := (*groups, make, every)) not in IN_STEP
]


@pytest.mark.parametrize(("num_groups", "group", "make", "every"), [*IN_STEP, *MORE_IN_STEP])
def test_in_step_it_is_the_formula_of_the_paper(num_groups: int, group: int, make: Any, every: int) -> None:
    results = run_jobs(num_groups * group, train, elastic(every, 0.25, size=group), 6, make)
    expected, middle = by_hand(num_groups, group, 6, every, 0.25, make)
    flat = torch.cat([part.flatten() for part in middle])
    for rank, (seen, center) in enumerate(results):
        assert close(seen[-1], expected[rank // group])
        assert torch.allclose(center, flat, rtol=1e-5, atol=1e-6)
        assert all(same(mine, first) for mine, first in zip(seen, results[rank - rank % group][0], strict=True))
    assert not close(results[0][0][-1], results[-1][0][-1])  # groups differ


@pytest.mark.parametrize(
    ("sync", "size"),
    [
        (Synchronous(), 1), (StaleSynchronous(1), 1), (Asynchronous(), 2),
        *(pytest.param(sync, size, marks=pytest.mark.slow) for sync, size in [
            (Synchronous(), 3), (StaleSynchronous(1), 3), (Asynchronous(), 3), (Asynchronous(), 1),
        ]),
    ],
    ids=repr,
)  # fmt: skip
def test_what_a_group_loses_the_center_gains(sync: Any, size: int) -> None:
    """In numbers that float32 has exactly: all that changes the sum of groups and center are gradients. (Each exchange takes two
    bits more, and of three groups all six may come one after the other: 64 / 4**6 beside 2304 are 18 bits.)"""
    workers, steps = 3 * size, 6

    def program(job: Job) -> tuple[float, float]:
        model = Scalar()
        how = elastic(3, 0.25, sync, size)
        optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), how, job=job)[1]
        for number in range(steps):
            step_by(model, optimizer, 64.0 * (job.rank // size) * (1 + number % 3))
        job.barrier()
        center = float(center_of(model))
        mine = float(model.w.detach())
        job.barrier()
        return mine, center

    results = run_jobs(workers, program)
    gradients = sum(64.0 * group * (1 + number % 3) for group in range(3) for number in range(steps))
    assert all(center == results[0][1] and center != 0 for _, center in results)
    assert sum(mine for mine, _ in results[::size]) + results[0][1] == -gradients


def test_groups_and_center_come_together_where_gradients_end() -> None:
    def program(job: Job) -> tuple[float, float]:
        model = Scalar()
        optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), elastic(1, sync=Asynchronous()), job=job)[1]
        step_by(model, optimizer, -6.0 * job.rank)
        for _ in range(60):
            step_by(model, optimizer, 0.0)
            job.barrier()
        return float(model.w.detach()), float(center_of(model))

    for mine, center in run_jobs(3, program):
        assert mine == pytest.approx(center, abs=1e-4) and 4.0 < center < 5.0  # (0 + 6 + 12 + 0) / 4


def test_the_staleness_of_an_exchange_is_in_the_ledger_of_a_groups_first_worker() -> None:
    def program(job: Job) -> dict[int, int]:
        train(job, elastic(2, size=2), 6)
        return dict(job.ledger.staleness)

    counts: list[Counter[int]] = [Counter(each) for each in run_jobs(4, program)]
    first, member, other, _ = counts
    assert not member and first.total() == other.total() == 3  # exchanges
    assert {*first, *other} <= {0, 1}


def test_the_servers_count_what_groups_add() -> None:
    def program(job: Job) -> int:
        model = mlp()
        optimizer = distribute(model, sgd(model.parameters()), elastic(2, size=2), job=job)[1]
        for number in range(4):
            backward(model, job.rank, number)
            optimizer.step()
        job.barrier()
        ledgers = server_ledgers(model).values()
        assert {rank for each in ledgers for rank in each.workers} == {0, 2}
        job.barrier()
        return sum(each.updates for each in ledgers)

    counts = run_jobs(4, program)
    assert counts[0] > 0 and len(set(counts)) == 1 and counts[0] % 4 == 0  # two groups, two exchanges


def test_any_optimizer_may_train_a_group_and_several_may() -> None:
    class Own(torch.optim.SGD):
        """One that servers know nothing of."""

    def program(job: Job) -> list[Tensor]:
        model = mlp()
        optimizers = Own(model[0].parameters(), lr=0.05), torch.optim.Adafactor(model[2].parameters(), lr=0.01)
        distribute(model, optimizers, elastic(2), job=job)
        for number in range(4):
            model.zero_grad()
            backward(model, job.rank, number)
            for each in optimizers:
                each.step()
        job.barrier()
        flat = center_of(model)
        job.barrier()
        return [*values_of(model), flat]

    first, second = run_jobs(2, program)
    assert torch.equal(first[-1], second[-1]) and not same(first[:-1], second[:-1])


# -- the result -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_is_the_center_and_all_go_on_from_it_with_the_same_bits(size: int, tmp_path: Any) -> None:
    def program(job: Job) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        model = mlp()
        optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.05), elastic(2, size=size), job=job)[1]

        def go_on(numbers: range) -> list[Tensor]:
            for number in numbers:
                optimizer.zero_grad()
                backward(model, job.rank, number)
                optimizer.step()
            job.barrier()
            return values_of(model)

        go_on(range(3))  # in the middle between two exchanges
        before = center_of(model)
        save(tmp_path / "saved", model, optimizer, job=job)
        saved = values_of(model)
        assert torch.equal(torch.cat([value.flatten() for value in saved]), before)
        load(tmp_path / "saved", model, optimizer, job=job)
        first = go_on(range(3, 7))
        load(tmp_path / "saved", model, optimizer, job=job)
        return saved, first, go_on(range(3, 7)), before_release(job, model, optimizer)

    def before_release(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        distribute(model, optimizer, elastic(2, size=size), job=job)
        return values_of(model)

    results = run_jobs(2 * size, program)
    for saved, first, again, anew in results:
        assert same(saved, results[0][0]) and same(first, again) and same(anew, results[0][3])
    assert not same(results[0][1], results[-1][1])


def test_release_leaves_the_center_in_the_model() -> None:
    def program(job: Job) -> tuple[list[Tensor], Tensor]:
        model = mlp()
        optimizer = distribute(model, sgd(model.parameters()), elastic(2), job=job)[1]
        for number in range(3):
            backward(model, job.rank, number)
            optimizer.step()
        job.barrier()
        center = center_of(model)
        job.barrier()
        release(model)
        return values_of(model), center

    for values, center in run_jobs(2, program):
        assert torch.equal(torch.cat([value.flatten() for value in values]), center)


def test_what_the_program_has_written_is_not_replaced_by_the_center() -> None:
    def program(job: Job) -> list[Tensor]:
        model = mlp()
        optimizer = distribute(model, sgd(model.parameters()), elastic(2), job=job)[1]
        backward(model, job.rank, 0)
        optimizer.step()
        model.load_state_dict(mlp(5).state_dict())
        distribute(model, optimizer, elastic(2), job=job)
        return values_of(model)

    assert all(same(values, values_of(mlp(5))) for values in run_jobs(2, program))


# -- when somebody dies -----------------------------------------------------------------------------------------------


def test_a_worker_that_dies_takes_its_group_with_it_and_other_groups_go_on() -> None:
    alone, together = threading.Event(), threading.Barrier(4)

    def program(job: Job) -> str:
        model = mlp()
        optimizer = distribute(model, sgd(model.parameters()), elastic(1, sync=StaleSynchronous(1), size=2), job=job)[1]

        def take_step(number: int) -> None:
            optimizer.zero_grad()
            backward(model, job.rank, number)
            optimizer.step()

        take_step(0)
        together.wait(PATIENCE_S)
        if job.rank == 3:
            wire: Any = job.wire
            wire.kill("killed by the test")
            return "died"
        if job.rank == 2:
            with pytest.raises(PeerLost, match="rank 3"):
                take_step(1)
            alone.wait(PATIENCE_S)  # it lives on, and nobody waits for it
            return "lost its group"
        for number in range(1, 8):  # beyond the bound, which counts groups that are there
            take_step(number)
        alone.set()
        return "went on"

    assert run_jobs(4, program) == ["went on", "went on", "lost its group", "died"]


def test_when_the_center_is_lost_all_workers_of_a_group_hear_it() -> None:
    told = threading.Barrier(4)  # nobody leaves before all have heard

    def program(job: Job) -> str:
        model = mlp()
        how = elastic(1, sync=Asynchronous(), size=2, servers=ParameterServer(1))
        optimizer = distribute(model, sgd(model.parameters()), how, job=job)[1]
        job.barrier()
        if job.rank == 0:
            kill_server(job, 0, 1)
        with pytest.raises(StrettoError) as caught:
            for number in range(50):
                backward(model, job.rank, number)
                optimizer.step()
        told.wait(PATIENCE_S)
        return str(caught.value)

    texts = run_jobs(4, program)
    assert "rank 4" in texts[0] and "rank 4" in texts[2]
    assert "rank 0 did not get the center of" in texts[1] and "rank 2 did not get the center of" in texts[3]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "rate", "match"), [
    (0, None, "every=0"), (True, None, "every=True"), (2.0, None, "every=2.0"),
    (1, 0, "rate=0"), (1, 1.5, "rate=1.5"), (1, float("nan"), "rate=nan"), (1, "a", "rate='a'"),
])  # fmt: skip
def test_values_without_a_meaning_are_refused(every: Any, rate: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Elastic(every, rate)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Hierarchy(outer=RING, elastic=Elastic(2)), "the center lies on servers"),
        (lambda: Hierarchy(outer=SERVERS, elastic=2), "that is not an Elastic"),  # type: ignore[arg-type]
        (lambda: Hierarchy(outer=ParameterServer(snapshots="here"), elastic=Elastic(2)), "Leave snapshots= out"),
        (lambda: elastic(2, sync=SoftSync(1)), "no way of training"),
        (lambda: elastic(2, sync=Asynchronous(staleness_aware=True)), r"Write sync=Asynchronous\(\)"),
        (lambda: Strategy(aggregate=elastic(2).aggregate, compress=Float16()), "Leave compress= out"),
        (lambda: Strategy(aggregate=elastic(2).aggregate, schedule=Priority()), "one pushes for a group"),
    ],
)
def test_combinations_without_a_meaning_are_refused_at_construction(make: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        make()


@pytest.mark.parametrize(
    ("build", "make", "rate", "match"),
    [
        (mlp, sgd, 0.5, r"Elastic\(rate=0.5\) with 3 groups: together they would draw the center 1.5 times"),
        (lambda: mlp().double(), sgd, None, "parameter 0.weight is float64"),
        (mlp, torch.optim.LBFGS, None, "LBFGS where groups train"),
    ],
)
def test_models_that_cannot_be_trained_so_are_refused(build: Any, make: Any, rate: float | None, match: str) -> None:
    def program(job: Job) -> None:
        model = build()
        with pytest.raises(ConfigurationError, match=match):
            distribute(model, make(model.parameters()), elastic(2, rate), job=job)

    run_jobs(3, program)


def test_parameters_without_an_optimizer_changed_models_and_join_are_refused() -> None:
    def program(job: Job) -> None:
        model = mlp()
        with pytest.raises(ConfigurationError, match="parameter 2.weight wants a gradient and is in none of the optimizers"):
            distribute(model, sgd(model[0].parameters()), elastic(2), job=job)
        distribute(model, sgd(model.parameters()), elastic(2), job=job)
        with pytest.raises(ConfigurationError, match="its own, and no other group takes part"), join(model):
            pass
        model.add_module("more", nn.Linear(1, 1))
        with pytest.raises(ConfigurationError, match="more.bias was frozen, unfrozen, added"):
            model(batch(0, 0))

    run_jobs(2, program)


def test_the_text_reads_back() -> None:
    how = Strategy(aggregate=Hierarchy(AllReduce(), SERVERS, 4, Elastic(8, 0.1)), sync=Asynchronous())
    assert parse(repr(how)) == how
