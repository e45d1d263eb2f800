"""What workers and servers count of each other."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import stretto
from aggregate.parameter_server.stepping_worker import Turns, mlp, sgd, start_scalar, step_by, strategy, train
from stretto.aggregate.parameter_server import server_record
from stretto.aggregate.parameter_server.head import RangeQueue, UpdateRecord
from stretto.aggregate.parameter_server.messages import NotHead, Part, PullValues, RangeChain, ValuesPulled
from stretto.aggregate.parameter_server.server_record import RecordedServer, ServerLedger, total_staleness
from stretto.aggregate.parameter_server.value import ParameterServer
from stretto.distributing import distribute, server_ledgers
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.protocol.machine import SendMessage
from stretto.strategy import Strategy
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.testing import run_jobs

PATIENCE_S = 20.0


def until(model: nn.Module, condition: Any) -> None:
    """What the servers have counted together fulfils the condition."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition(list(server_ledgers(model).values())):
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("steps", "replicas"),
    [(True, 1), (False, 0), *(pytest.param(*other, marks=pytest.mark.slow) for other in ((True, 0), (False, 1)))],
)
def test_bytes_to_and_from_each_server_are_those_of_the_model_in_every_step(steps: bool, replicas: int) -> None:
    def program(job: Job) -> tuple[Any, dict[int, ServerLedger]]:
        model = mlp()
        chosen = strategy(StaleSynchronous(0), 2, replicas) if steps else Strategy(aggregate=ParameterServer(2, replicas))
        _, optimizer = distribute(model, sgd(model.parameters()), chosen, job=job)
        train(job, model, optimizer, range(3))
        job.barrier()
        return job.ledger, server_ledgers(model)

    size = 4 * sum(parameter.numel() for parameter in mlp().parameters())
    for rank, (ledger, servers) in enumerate(run_jobs(3, program)):
        assert ledger.sent_by("push") == 3 * size
        assert sum(n for (kind, _), n in ledger.received.items() if kind == "pull") == (4 if steps else 3) * size
        assert sorted(servers) == [3, 4]
        to = {number: server.workers[rank].bytes_in for number, server in servers.items() if server.workers}
        assert to == {number: sent for (kind, number), sent in ledger.sent.items() if kind == "push"}
        assert ledger.under_way == 0 and ledger.most_under_way > 0


def test_a_worker_knows_for_whom_it_waited_and_how_long() -> None:
    def program(job: Job) -> dict[int, int]:
        model, optimizer = start_scalar(job, StaleSynchronous(0))
        if job.rank == 1:
            until(model, lambda ledgers: sum(each.parked for each in ledgers) == 1)
            time.sleep(0.05)  # what is measured
        step_by(model, optimizer, 1.0)
        assert job.ledger.held_s == pytest.approx(sum(job.ledger.held_ns.values()) / 1e9)
        job.barrier()
        (account,) = [each.workers[0] for each in server_ledgers(model).values() if 0 in each.workers]
        assert account.held_s >= 0.05 and max(each.longest_queue for each in server_ledgers(model).values()) >= 1
        return dict(job.ledger.held_ns)

    waited, late = run_jobs(2, program)
    assert list(waited) == [1] and 50_000_000 <= waited[1] < PATIENCE_S * 1e9
    assert not late


def test_servers_count_the_staleness_of_each_workers_gradients() -> None:
    def program(job: Job, turns: Turns) -> dict[int, ServerLedger]:
        model, optimizer = start_scalar(job, Asynchronous())
        for _ in range(3):
            with turns(job.rank):
                step_by(model, optimizer, 1.0)
        job.barrier()
        return server_ledgers(model)

    found = run_jobs(3, program, Turns(3))[0]
    (server,) = [each for each in found.values() if each.updates]
    assert server.updates == 9 and total_staleness(found.values()) == Counter({2: 7, 0: 1, 1: 1})
    assert [server.workers[rank].staleness for rank in range(3)] == [{0: 1, 2: 2}, {1: 1, 2: 2}, {2: 3}]
    assert [server.workers[rank].applied for rank in range(3)] == [3, 3, 3]
    assert (server.held, server.gathered, server.parked) == (0, 0, 0) and server.longest_queue == 0
    assert set(server.busy_s) >= {"push", "pull"} and 0 < server.busy <= 1 and server.since_s > 0


def test_gradients_that_came_too_late_are_counted_as_discarded() -> None:
    def program(job: Job, turns: Turns) -> dict[int, ServerLedger]:
        model, optimizer = start_scalar(job, BackupWorkers(1))
        with turns(job.rank):
            step_by(model, optimizer, 1.0)
        job.barrier()
        return server_ledgers(model)

    accounts: dict[int, Any] = {}
    for server in run_jobs(2, program, Turns(2))[0].values():
        accounts |= server.workers
    assert (accounts[0].applied, accounts[0].discarded) == (1, 0)
    assert (accounts[1].applied, accounts[1].discarded) == (0, 1)


def test_a_server_that_died_is_not_in_the_answer() -> None:
    def program(job: Job) -> list[int]:
        model = mlp()
        _, optimizer = distribute(model, sgd(model.parameters()), strategy(StaleSynchronous(0), 3, 1), job=job)
        train(job, model, optimizer, range(1))
        job.barrier()
        if job.rank == 0:
            assert job.more_wires is not None
            wire: Any = job.more_wires("servers 3", 5)[3]
            wire.kill("on purpose")
        train(job, model, optimizer, range(3))
        deadline = time.monotonic() + PATIENCE_S
        while len(found := list(server_ledgers(model))) > 2 and time.monotonic() < deadline:
            pass
        return found

    assert run_jobs(2, program) == [[2, 4], [2, 4]]


def test_what_is_counted_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_record, "MOST_KEPT", 2)
    record = RecordedServer()
    for version in range(1000):
        record.on_update(UpdateRecord(0, version, [Part(0, 0, version, 0)]))
    assert len(record.ledger().workers[0].staleness) == server_record.MOST_STALE + 1
    assert record.ledger().workers[0].staleness[server_record.MOST_STALE] == 1000 - server_record.MOST_STALE
    for clock in range(5):
        record._came(0, (0, "push", 0, clock))
    assert len(record._came_ns) == 2


def test_a_model_without_servers_has_no_such_ledgers() -> None:
    def program(job: Job) -> None:
        model = mlp()
        distribute(model, sgd(model.parameters()), Strategy(), job=job)
        with pytest.raises(ConfigurationError, match="without servers"):
            server_ledgers(model)

    run_jobs(2, program)
    assert stretto.server_ledgers is server_ledgers


def test_a_pull_that_was_turned_away_does_not_count_when_the_server_serves_the_range_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither as one that waits here, nor for what the next answer says of how long it was kept, and for whom."""
    clock_ns = 0
    monkeypatch.setattr(server_record, "time", SimpleNamespace(perf_counter_ns=lambda: clock_ns))
    head = SimpleNamespace(queue=lambda: RangeQueue(0, 0, 1), holds_back=lambda worker: 1)
    holding, answers = SimpleNamespace(head=head), list[Any]()
    inside: Any = SimpleNamespace(
        chains=SimpleNamespace(holdings={0: holding}),
        on_message=lambda *event: answers,
        on_view=lambda *event: [SendMessage(0, NotHead(RangeChain(0, 2, [4, 3]), True, 0))],
    )
    record = RecordedServer()
    record.machine = inside
    pull = PullValues(0, 0, 0, 0, 0, 0)
    record.on_message(0.0, 0, pull, memoryview(b""))
    assert record.ledger().parked == 1

    holding.head = None
    record.on_view(0.0, [4], [], 1)
    assert record.ledger().parked == 0

    clock_ns = 3_600_000_000_000
    holding.head = SimpleNamespace(queue=lambda: RangeQueue(0, 0, 0), holds_back=lambda worker: None)
    answers.append(SendMessage(0, ValuesPulled(0, 0, 0, 0, 1.0)))
    (answer,) = record.on_message(0.0, 0, pull, memoryview(b""))
    assert isinstance(answer, SendMessage)
    assert (answer.header.kept_us, answer.header.waited_for) == (0, -1)
    assert record.ledger().workers[0].held_s == 0.0
