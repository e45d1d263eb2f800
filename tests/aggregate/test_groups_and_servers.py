"""Groups of workers that combine inside and have servers outside: `Hierarchy(outer=ParameterServer())`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aggregate.parameter_server.stepping_worker import (
    PATIENCE_S,
    Scalar,
    adam,
    backward,
    batch,
    mlp,
    one_after_the_other,
    sgd,
    values_of,
)
from stretto import (
    AllReduce,
    Asynchronous,
    BackupWorkers,
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
from stretto.aggregate.hierarchy.hosts import groups_of
from stretto.aggregate.parameter_server.client import ClientMachine, Push
from stretto.distributing import distribute, release, weight
from stretto.errors import ConfigurationError, PeerLost, StrettoError, WireError
from stretto.job import Job
from stretto.launching.peers import Peer
from stretto.protocol.machine import Actions
from stretto.testing import run_jobs

RING = AllReduce("ring")
SERVERS = ParameterServer(shards=2)


def strategy(sync: Any = None, size: int | None = None, servers: ParameterServer = SERVERS) -> Strategy:
    return Strategy(aggregate=Hierarchy(RING, servers, size), sync=Synchronous() if sync is None else sync)


def same(values: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(values, others, strict=True))


def close(values: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(values, others, strict=True))


def train(job: Job, how: Strategy, steps: int = 4, make: Any = sgd) -> list[list[Tensor]]:
    """The parameters after every step."""
    model = mlp(job.rank)
    optimizer = distribute(model, make(model.parameters()), how, job=job)[1]
    seen = []
    for number in range(steps):
        optimizer.zero_grad()
        backward(model, job.rank, number)
        optimizer.step()
        seen.append(values_of(model))
    job.barrier()
    return seen


def large_batch(size: int, steps: int = 4, make: Any = sgd) -> list[Tensor]:
    """One process on what all workers have together."""
    model = mlp()
    optimizer = make(model.parameters())
    for number in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.cat([batch(rank, number) for rank in range(size)])).pow(2).mean())
        optimizer.step()
    return values_of(model)


@pytest.fixture
def pushes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[int]]:
    """How many ranges each rank has pushed."""
    count: Counter[int] = Counter()
    plain = ClientMachine.on_request

    def counting(self: ClientMachine, now: float, ticket: int, request: Any) -> Actions:
        count[self.rank] += isinstance(request, Push)
        return plain(self, now, ticket, request)

    monkeypatch.setattr(ClientMachine, "on_request", counting)
    yield count


# -- who is in a group ------------------------------------------------------------------------------------------------


def test_groups_are_the_workers_of_a_host_or_so_many_that_follow_each_other() -> None:
    peers = [Peer(rank, 0, host, "", 1) for rank, host in enumerate("abaab")]
    assert groups_of(peers, None) == [[0, 2, 3], [1, 4]]
    assert groups_of(peers, 2) == [[0, 1], [2, 3], [4]]
    assert groups_of(peers, 9) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "2"])
def test_a_group_has_one_or_more_workers(size: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"group_size=.*a group has one or more workers"):
        Hierarchy(group_size=size)


def test_groups_of_a_size_combine_as_hosts_do() -> None:
    def program(job: Job, size: int | None) -> list[Tensor]:
        return train(job, Strategy(aggregate=Hierarchy(outer=RING, group_size=size)))[-1]

    groups = run_jobs(4, program, 2)
    hosts = run_jobs(4, program, None, hosts=["a", "a", "b", "b"])
    assert all(same(values, hosts[0]) for values in (*groups, *hosts))


# -- servers that sum -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "group"), [(2, 2), (7, 3), *(pytest.param(size, 2, marks=pytest.mark.slow) for size in (3, 4))])
def test_groups_with_servers_that_sum_are_one_process_on_the_whole_batch(size: int, group: int, pushes: Counter[int]) -> None:
    results = run_jobs(size, train, strategy(size=group))
    assert all(same(values, results[0][-1]) for *_, values in results)
    assert close(results[0][-1], large_batch(size))
    assert {rank for rank, count in pushes.items() if count} == set(range(0, size, group))  # their first workers


def test_groups_of_one_are_servers_without_groups_bit_for_bit() -> None:
    plain = Strategy(aggregate=SERVERS)
    assert same(run_jobs(3, train, strategy(size=1))[1][-1], run_jobs(3, train, plain)[1][-1])


@pytest.mark.parametrize("inner", ["native", "ring"])
def test_groups_are_hosts_where_no_size_is_given(inner: str, pushes: Counter[int]) -> None:
    how = Strategy(aggregate=Hierarchy(AllReduce(inner), SERVERS))
    results = run_jobs(4, train, how, hosts=["a", "b", "b", "a"])
    assert all(same(values, results[0][-1]) for *_, values in results) and close(results[0][-1], large_batch(4))
    assert {rank for rank, count in pushes.items() if count} == {0, 1}


def kill_server(job: Job, number: int, of: int) -> None:
    assert job.more_wires is not None
    wire: Any = job.more_wires(f"servers {of}", job.world_size + of)[job.world_size + number]
    wire.kill("killed by the test")


def test_when_servers_are_lost_all_workers_of_all_groups_hear_why() -> None:
    told = threading.Barrier(4)  # nobody leaves before all have heard

    def program(job: Job) -> str:
        model = mlp()
        optimizer = distribute(model, sgd(model.parameters()), strategy(size=2, servers=ParameterServer(1)), job=job)[1]
        backward(model, job.rank, 0)
        optimizer.step()
        job.barrier()
        if job.rank == 0:
            kill_server(job, 0, 1)
        with pytest.raises(WireError) as caught:
            for number in range(1, 50):
                backward(model, job.rank, number)
        told.wait(PATIENCE_S)
        return str(caught.value)

    texts = run_jobs(4, program)
    assert all("rank 4" in text or "could not combine the gradients of its group" in text for text in texts)


@pytest.mark.parametrize("dead", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_that_dies_in_a_round_is_named_on_all_others(dead: int) -> None:
    together = threading.Barrier(4)  # not a collective, which some would still be in when the worker dies

    def program(job: Job) -> int | None:
        model = mlp()
        optimizer = distribute(model, sgd(model.parameters()), strategy(size=2), job=job)[1]
        backward(model, job.rank, 0)
        optimizer.step()
        together.wait(PATIENCE_S)
        if job.rank == dead:
            wire: Any = job.wire
            wire.kill("killed by the test")
            return None
        with pytest.raises(PeerLost) as caught:
            backward(model, job.rank, 1)
        return caught.value.rank

    assert run_jobs(4, program) == [None if rank == dead else dead for rank in range(4)]


# -- servers that step ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sync", "make"),
    [
        (StaleSynchronous(0), sgd), (Asynchronous(True), adam),
        *(pytest.param(sync, make, marks=pytest.mark.slow) for sync, make in [
            (StaleSynchronous(0), adam), (Asynchronous(True), sgd), (Asynchronous(), sgd), (Asynchronous(), adam),
        ]),
    ],
)  # fmt: skip
def test_one_group_is_one_process_on_the_whole_batch(sync: Any, make: Any) -> None:
    results = run_jobs(3, train, strategy(sync, 3), 4, make)
    assert all(same(mine, first) for seen in results for mine, first in zip(seen, results[0], strict=True))
    assert close(results[0][-1], large_batch(3, make=make))


def test_groups_of_one_are_servers_that_step_without_groups() -> None:
    results = run_jobs(3, train, strategy(StaleSynchronous(0), 1))
    expected = one_after_the_other(sgd, 3, 4)
    assert all(same(mine, values) for seen in results for mine, values in zip(seen, expected, strict=True))


@pytest.mark.parametrize(("size", "group"), [(3, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 2), (7, 3)))])
@pytest.mark.parametrize("sync", [StaleSynchronous(1), Asynchronous(True), SoftSync(2), BackupWorkers(1)], ids=repr)
def test_all_workers_of_a_group_hold_the_same_bits_after_each_step(
    sync: Any, size: int, group: int, pushes: Counter[int]
) -> None:
    results = run_jobs(size, train, strategy(sync, group))
    for rank, seen in enumerate(results):
        first = results[rank - rank % group]
        assert all(same(mine, theirs) for mine, theirs in zip(seen, first, strict=True))
        assert not same(seen[0], seen[-1])
    assert {rank for rank, count in pushes.items() if count} == set(range(0, size, group))


def test_with_a_bound_of_0_groups_step_one_after_the_other_by_the_means_of_their_workers() -> None:
    results = run_jobs(4, train, strategy(StaleSynchronous(0), 2))
    model = mlp()
    optimizer = sgd(model.parameters())
    for number in range(4):
        gradients = []
        for group in (0, 2):
            model.zero_grad()
            torch.autograd.backward(model(torch.cat([batch(group, number), batch(group + 1, number)])).pow(2).mean())
            gradients.append([parameter.grad for parameter in model.parameters()])
        for each in gradients:
            for parameter, gradient in zip(model.parameters(), each, strict=True):
                parameter.grad = gradient
            optimizer.step()
    assert all(close(seen[-1], values_of(model)) for seen in results)


def test_what_is_pushed_is_the_groups_gradient_as_the_loop_has_left_it() -> None:
    def program(job: Job) -> tuple[float, float]:
        model = Scalar()
        optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), strategy(Asynchronous(), 2), job=job)[1]
        torch.autograd.backward(model(4.0 * job.rank + 2.0))
        assert model.w.grad is not None
        mean = float(model.w.grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return mean, float(model.w.detach())

    assert run_jobs(2, program) == [(4.0, pytest.approx(-1.0))] * 2


def test_a_group_counts_in_a_mean_as_much_as_its_workers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workers of weights 1, 2 and 6, in groups of two and one: the mean over all of them."""
    weights: dict[int, float] = {}
    plain = ClientMachine.on_request

    def looking(self: ClientMachine, now: float, ticket: int, request: Any) -> Actions:
        if isinstance(request, Push):
            weights[self.rank] = request.weight
        return plain(self, now, ticket, request)

    monkeypatch.setattr(ClientMachine, "on_request", looking)

    def program(job: Job) -> float:
        model = Scalar()
        optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), strategy(SoftSync(1), 2), job=job)[1]
        weight((1.0, 2.0, 6.0)[job.rank])
        torch.autograd.backward(model((3.0, 6.0, 15.0)[job.rank]))
        optimizer.step()
        weight(1.0)
        assert model.w.grad is not None
        return float(model.w.grad)

    assert run_jobs(3, program) == [pytest.approx((3.0 + 2 * 6.0) / 3)] * 2 + [15.0]
    assert set(weights) == {0, 2} and weights[2] == pytest.approx(2 * weights[0])  # 6 to 3


def test_the_ledger_of_a_groups_first_worker_has_the_groups_staleness() -> None:
    def program(job: Job) -> dict[int, int]:
        train(job, strategy(StaleSynchronous(0), 2), steps=3)
        return dict(job.ledger.staleness)

    staleness = run_jobs(4, program)
    assert staleness[1] == staleness[3] == {}
    assert sum(staleness[0].values()) <= 3 and sum(staleness[2].values()) <= 3 and staleness[0]
    assert {*staleness[0], *staleness[2]} <= {0, 1}  # two groups, one after the other


def test_a_worker_that_dies_takes_its_group_with_it_and_other_groups_go_on() -> None:
    alone, together = threading.Event(), threading.Barrier(4)

    def program(job: Job) -> str:
        model = mlp()
        optimizer = distribute(model, sgd(model.parameters()), strategy(StaleSynchronous(1), 2), job=job)[1]
        for number in range(2):
            optimizer.zero_grad()
            backward(model, job.rank, number)
            optimizer.step()
        together.wait(PATIENCE_S)
        if job.rank == 3:
            wire: Any = job.wire
            wire.kill("killed by the test")
            return "died"
        if job.rank == 2:
            with pytest.raises(PeerLost, match="rank 3"):
                backward(model, job.rank, 2)
            alone.wait(PATIENCE_S)  # it lives on, and nobody waits for it
            with pytest.raises(StrettoError):
                optimizer.step()
            return "lost its group"
        for number in range(2, 8):  # beyond the bound, which counts groups that are there
            optimizer.zero_grad()
            backward(model, job.rank, number)
            optimizer.step()
        alone.set()
        return "went on"

    assert run_jobs(4, program) == ["went on", "went on", "lost its group", "died"]


def test_when_servers_are_lost_a_group_hears_it_from_its_first_worker() -> None:
    told = threading.Barrier(4)  # nobody leaves before all have heard

    def program(job: Job) -> str:
        model = mlp()
        how = strategy(Asynchronous(), 2, ParameterServer(1))
        optimizer = distribute(model, sgd(model.parameters()), how, job=job)[1]
        job.barrier()
        if job.rank == 0:
            kill_server(job, 0, 1)
        with pytest.raises(WireError) as caught:
            for number in range(50):
                backward(model, job.rank, number)
                optimizer.step()
        told.wait(PATIENCE_S)
        with pytest.raises(StrettoError):
            optimizer.step()
        return str(caught.value)

    texts = run_jobs(4, program)
    assert "rank 4" in texts[0] and "rank 4" in texts[2]
    assert "rank 0 did not get the values of" in texts[1] and "rank 2 did not get" in texts[3]


def test_buffers_are_those_of_the_groups_first_worker() -> None:
    def program(job: Job) -> Tensor:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = distribute(model, sgd(model.parameters()), strategy(Asynchronous(), 2), job=job)[1]
        backward(model, job.rank, 0)
        optimizer.step()
        model(batch(job.rank, 1))
        backward(model, 0, 0)
        mean = model[1].running_mean
        assert isinstance(mean, Tensor)
        return mean.clone()

    means = run_jobs(4, program)
    assert torch.equal(means[0], means[1]) and torch.equal(means[2], means[3]) and not torch.equal(means[0], means[2])


def test_saving_loading_releasing_and_distributing_again(tmp_path: Any) -> None:
    """A checkpoint of groups resumes with the same bits where they step one after the other."""
    how = strategy(StaleSynchronous(0), 2)

    def program(job: Job) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        model = mlp()
        optimizer = distribute(model, adam(model.parameters()), how, job=job)[1]

        def go_on(numbers: range) -> list[Tensor]:
            for number in numbers:
                optimizer.zero_grad()
                backward(model, job.rank, number)
                optimizer.step()
            job.barrier()
            return values_of(model)

        go_on(range(2))
        save(tmp_path / "saved", model, optimizer, job=job)
        first = go_on(range(2, 4))
        load(tmp_path / "saved", model, optimizer, job=job)
        again = go_on(range(2, 4))
        load(tmp_path / "saved", model, optimizer, job=job)
        distribute(model, optimizer, how, job=job)
        anew = go_on(range(2, 4))
        release(model)
        return first, again, anew, values_of(model)

    for first, again, anew, released in run_jobs(4, program):
        assert same(first, again) and same(first, anew) and same(first, released)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [Synchronous(), Asynchronous()], ids=repr)
@pytest.mark.parametrize(
    ("answers", "match"),
    [({"compress": Float16()}, "inside a group sums are exact"), ({"schedule": Priority()}, "one pushes for a group")],
)
def test_codecs_and_planned_orders_are_refused(sync: Any, answers: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Strategy(aggregate=Hierarchy(outer=SERVERS), sync=sync, **answers)


def test_backup_workers_are_counted_in_groups() -> None:
    def program(job: Job) -> None:
        model = mlp()
        with pytest.raises(ConfigurationError, match=r"BackupWorkers\(spare=2\) in a job of 2 workers"):
            distribute(model, sgd(model.parameters()), strategy(BackupWorkers(2), 2), job=job)

    run_jobs(4, program)


def test_what_is_neither_an_all_reduce_nor_servers_is_refused_outside() -> None:
    with pytest.raises(ConfigurationError, match="groups combine by an all-reduce, or by servers"):
        Hierarchy(outer=Hierarchy())  # type: ignore[arg-type]


@pytest.mark.parametrize("sync", [Synchronous(), StaleSynchronous(2), SoftSync(1)], ids=repr)
def test_the_text_of_such_a_strategy_reads_back(sync: Any) -> None:
    how = strategy(sync, 4, ParameterServer(3, 1))
    assert parse(repr(how)) == how
