"""The rules, by themselves and at one server: when gradients are applied, with how much weight, and when a worker may read."""

from __future__ import annotations

from typing import Any

import pytest

from aggregate.parameter_server.one_server import LAYOUT, OneServer
from stretto.aggregate.parameter_server.consistency import PullState, rule_for
from stretto.aggregate.parameter_server.messages import LeaveRange, PushTaken, ValuesPulled
from stretto.errors import ConfigurationError, MalformedPayload
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.delay_compensation import DelayCompensation
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.sync.synchronous import Synchronous


def test_synchronous_servers_sum_with_weights_when_all_are_in() -> None:
    server = OneServer(Synchronous(), workers=3)
    assert server.pull(1, 0) == [1]
    assert server.push(2, 0, 0, (1, 10)) == [] and server.push(0, 0, 0, (2, 20), weight=0.5) == []
    assert server.pull(0, 1) == server.pull(2, 1) == [] == server.steps.made
    answers = server.push(1, 0, 0, (4, 40))
    assert server.steps.made == [([6.0, 60.0], 1.0, None)]
    assert [answer for answer in answers if isinstance(answer[1], ValuesPulled)] == [
        (worker, ValuesPulled(0, 1, version=1, min_clock=1, weight=2.5)) for worker in (0, 2)
    ]
    assert sorted(worker for worker, answer in answers if answer == PushTaken(0, 0, 1, True)) == [0, 1, 2]


def test_a_worker_that_leaves_is_not_waited_for_and_what_it_pushed_counts() -> None:
    server = OneServer(Synchronous(), workers=3)
    server.push(0, 0, 0, (1, 0))
    server.push(1, 0, 0, (2, 0))
    server.machine.on_view(0.0, [], [1], 0)
    assert server.pull(0, 1) == []
    server.machine.on_view(0.0, [], [2], 0)
    assert server.steps.made == [([3.0, 0.0], 1.0, None)]
    assert [part.worker for part in server.records[0].parts] == [0, 1]


def test_a_bound_lets_a_worker_read_so_many_clocks_ahead_of_the_slowest_and_not_before_its_own() -> None:
    server = OneServer(StaleSynchronous(1), workers=2)
    server.push(0, 0, 0)
    assert server.pull(0, 1) == [0]
    server.push(0, 1, 1)
    assert server.pull(0, 2) == []
    assert [to for to, answer in server.push(1, 0, 0) if isinstance(answer, ValuesPulled)] == [0]
    assert len(server.steps.made) == 3 and [record.version_applied for record in server.records] == [0, 1, 2]


def test_with_a_bound_of_zero_gradients_are_applied_by_clock_and_rank() -> None:
    server = OneServer(StaleSynchronous(0), workers=3)
    for worker in (2, 0):
        server.push(worker, 0, 0)
    assert server.steps.made == []
    server.push(1, 0, 0)
    assert [record.parts[0][::2] for record in server.records] == [(0, 0), (1, 0), (2, 0)]


def test_staleness_divides_the_rate_and_not_the_gradient() -> None:
    server = OneServer(Asynchronous(staleness_aware=True), workers=2)
    for clock in range(4):
        server.push(0, clock, 0, (1, 1))
    assert server.steps.made == [([1.0, 1.0], 1 / max(tau, 1), 0) for tau in range(4)]
    plain = OneServer(Asynchronous(), workers=2)
    for clock in range(4):
        plain.push(0, clock, 0)
    assert [scale for _, scale, _ in plain.steps.made] == [1.0] * 4


def test_softsync_applies_the_papers_update() -> None:
    """The mean weighted by 1/tau at the rate times the sum of weights over c: for SGD, rate * (1/c) sum of g/tau."""
    server = OneServer(SoftSync(1), workers=2)
    for clock in range(2):
        server.push(0, 2 * clock, 0)
        assert server.pull(0, 2 * clock + 1) == [0]
        server.push(0, 2 * clock + 1, 0)
    made = len(server.steps.made)
    assert made == 2 and server.push(0, 4, 0, (8, 0)) == []  # of version 0 at version 2: tau is 2
    server.push(1, 0, 2, (1, 0))
    ((gradient, _), lr_scale, worker) = server.steps.made[-1]
    assert worker is None and gradient * lr_scale == pytest.approx((8 / 2 + 1) / 2) and lr_scale == 0.75


def test_softsync_goes_on_when_the_workers_become_fewer() -> None:
    server = OneServer(SoftSync(1), workers=3)
    server.push(0, 0, 0)
    server.push(1, 0, 0)
    assert server.steps.made == []
    sent = server.tell(2, LeaveRange(LAYOUT.digest, 0, 1, 0))
    assert len(server.steps.made) == 1 and sum(isinstance(each.header, PushTaken) for each in sent) == 2


def test_backup_workers_take_the_first_and_tell_late_ones_to_go_on() -> None:
    server = OneServer(BackupWorkers(1), workers=3)
    server.push(2, 0, 0, (2, 0))
    assert server.pull(2, 1, newer_than=0) == []
    answers = server.push(0, 0, 0, (4, 0))
    assert server.steps.made == [([3.0, 0.0], 1.0, None)] and (2, PushTaken(0, 0, 1, True)) in answers
    assert server.push(1, 0, 0, (100, 0)) == [(1, PushTaken(0, 0, 1, False))]
    assert server.pull(1, 1, newer_than=0) == [1] and len(server.steps.made) == 1
    assert {part.version_read for part in server.records[0].parts} == {server.records[0].version_applied}


def test_workers_that_die_are_spared_first() -> None:
    server = OneServer(BackupWorkers(1), workers=3)
    server.machine.on_view(0.0, [], [2], 0)
    server.push(0, 0, 0)
    assert server.steps.made == []
    server.push(1, 0, 0)
    assert len(server.steps.made) == 1
    server.machine.on_view(0.0, [], [1], 0)
    server.push(0, 1, 1)
    assert len(server.steps.made) == 2


def test_delay_compensation_is_told_who_reads_and_who_has_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = OneServer(Asynchronous(delay_compensation=DelayCompensation(0.04)), workers=2)
    readers: list[int] = []
    monkeypatch.setattr(server.steps, "pulled_by", readers.append)
    server.pull(1, 0)
    server.push(1, 0, 0)
    server.pull(1, 1)
    assert readers == [1, 1] and server.steps.made[0][2] == 1


def test_an_update_that_fails_is_discarded_and_its_workers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    server = OneServer(SoftSync(1), workers=2)

    def fails(*_: Any, **__: Any) -> None:
        raise MalformedPayload("no")

    with monkeypatch.context() as broken:
        broken.setattr(server.steps, "apply", fails)
        server.push(0, 0, 0)
        answers = server.push(1, 0, 0)
    assert [(to, "failed: no" in answer.reason) for to, answer in answers] == [(0, True), (1, True)]
    server.push(0, 1, 0)
    assert (1, PushTaken(0, 1, 1, True)) in server.push(1, 1, 0)


def test_a_pull_is_judged_by_what_its_rule_needs() -> None:
    state = PullState(clock=5, newer_than=2, own_clock=5, min_clock=3, version=3)
    may_read = {
        str(sync): rule_for(sync, 4).may_read(state) for sync in (Synchronous(), StaleSynchronous(1), StaleSynchronous(2))
    }
    assert list(may_read.values()) == [False, False, True]
    assert not rule_for(StaleSynchronous(9), 4).may_read(state._replace(own_clock=4))
    assert not rule_for(Asynchronous(), 4).may_read(state._replace(own_clock=4))
    assert rule_for(SoftSync(1), 4).may_read(state._replace(own_clock=4))
    assert rule_for(BackupWorkers(1), 4).may_read(state)
    assert not rule_for(BackupWorkers(1), 4).may_read(state._replace(version=2))


def test_as_many_spare_workers_as_there_are_workers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Spare at most 2"):
        rule_for(BackupWorkers(3), 3)
