"""Servers that step, across the barrier: `optimizer.step()` returns at once, and a module waits for its own values only."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aggregate.parameter_server.stepping_worker import PATIENCE_S, adam, batch
from engine.worker import seeded
from stretto import checkpoint
from stretto.aggregate.parameter_server import ParameterServer
from stretto.aggregate.parameter_server.client import ClientMachine, Pull, Push
from stretto.aggregate.parameter_server.inventory import KeptParameter
from stretto.aggregate.parameter_server.layout import ParameterRange, ParameterSlice, RangeLayout, ServedParameter
from stretto.aggregate.parameter_server.use_order import UseOrder, range_bytes_for_steps
from stretto.distributing import distribute, engine_of, no_sync, release, save_profile, synchronize
from stretto.errors import ConfigurationError, PeerLost, StrettoError
from stretto.job import Job
from stretto.observe.trace import Tracer
from stretto.schedule.caramel import Caramel
from stretto.schedule.merged import Merged
from stretto.schedule.orders import Buckets
from stretto.schedule.priority import Priority
from stretto.schedule.tictac import Tac, Tic
from stretto.strategy import Strategy
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.delay_compensation import DelayCompensation
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.testing import run_jobs

SMALL, PLAIN = Priority(partition=256, credit=256), Priority(cross_barrier=False)
STEPS = 4
Look = Callable[[Job, nn.Module, torch.optim.Optimizer], object]


BOUND_0 = StaleSynchronous(0)


def crossing(sync: Any = BOUND_0, schedule: Any = SMALL, shards: int = 2, replicas: int = 0) -> Strategy:
    return Strategy(aggregate=ParameterServer(shards, replicas), sync=sync, schedule=schedule)


def mlp() -> nn.Sequential:
    model: nn.Sequential = seeded(
        lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    )
    return model


def backward(model: nn.Module, rank: int, number: int) -> None:
    torch.autograd.backward(model(batch(rank, number)).pow(2).mean())


def take_step(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    backward(model, job.rank, number)
    optimizer.step()
    optimizer.zero_grad()


def begin(job: Job, strategy: Strategy, build: Callable[[], nn.Module] = mlp) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Past the step that is only watched."""
    model = build()
    model, optimizer = distribute(model, adam(model.parameters()), strategy, job=job)
    take_step(job, model, optimizer, 0)
    return model, optimizer


def under_way(model: nn.Module) -> int:
    training: Any = engine_of(model).training
    return sum(len(step.waiting) for step in training._under_way.values())


def values_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def trained(job: Job, strategy: Strategy, build: Callable[[], nn.Module] = mlp) -> list[Tensor]:
    model, optimizer = begin(job, strategy, build)
    for number in range(1, STEPS):
        take_step(job, model, optimizer, number)
        if strategy.schedule.cross_barrier:
            assert under_way(model) == len(list(model.parameters()))
    synchronize(model)
    assert under_way(model) == 0 and sum(job.ledger.staleness.values()) == STEPS
    return values_of(model)


def assert_same_bits(runs: list[list[Tensor]]) -> None:
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


# -- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 7, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
def test_with_a_bound_of_zero_the_bits_are_those_with_the_barrier(size: int) -> None:
    """Whatever the order: gradients of a clock are applied in the order of ranks."""
    barrier, found = (run_jobs(size, trained, crossing(schedule=schedule)) for schedule in (Buckets(), SMALL))
    assert_same_bits([*barrier, *found])


@cache
def with_the_barrier() -> list[list[Tensor]]:
    """Two workers."""
    return run_jobs(2, trained, crossing(schedule=Buckets(), replicas=1))


@pytest.mark.parametrize(
    "schedule",
    [Tic(), Tac(cross_barrier=False), Priority(), *(pytest.param(each, marks=pytest.mark.slow) for each in (Tac(), PLAIN))],
    ids=repr,
)
def test_every_order_gives_the_same_bits(schedule: Any) -> None:
    assert_same_bits([*with_the_barrier(), *run_jobs(2, trained, crossing(schedule=schedule, replicas=1))])


SYNCS = [
    StaleSynchronous(2), Asynchronous(staleness_aware=True), SoftSync(1), BackupWorkers(1),
    Asynchronous(delay_compensation=DelayCompensation(2.0, decay=0.95)),
    pytest.param(Asynchronous(), marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("sync", SYNCS, ids=repr)
def test_every_answer_trains_across_the_barrier_with_the_versions_that_were_read(sync: Any) -> None:
    def program(job: Job) -> tuple[dict[int, int], bool]:
        model, optimizer = begin(job, crossing(sync))
        first = values_of(model)
        for number in range(1, STEPS):
            take_step(job, model, optimizer, number)
        synchronize(model)
        return dict(job.ledger.staleness), all(not torch.equal(a, b) for a, b in zip(first, values_of(model), strict=True))

    for staleness, moved in run_jobs(3, program):
        assert moved and sum(staleness.values()) <= STEPS
        if isinstance(sync, StaleSynchronous):
            assert sum(staleness.values()) == STEPS and max(staleness) <= 2 * (2 * sync.bound + 1)
        if isinstance(sync, BackupWorkers):
            assert set(staleness) <= {0}


class Attention(nn.Module):
    """Its `out_proj` is never called: torch reads the weight itself. `tied` is read by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)
        self.tied = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.tied.weight
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unsqueeze(0)
        mixed, _ = self.inner(rows, rows, rows)
        out: Tensor = self.again(torch.tanh(self.tied(mixed))) * self.scale
        return out


def test_parameters_that_another_module_reads_are_waited_for_there() -> None:
    barrier, found = (
        run_jobs(2, trained, crossing(schedule=schedule), lambda: seeded(Attention)) for schedule in (Buckets(), SMALL)
    )
    assert_same_bits([*barrier, *found])


# -- who waits when ---------------------------------------------------------------------------------------------------


def test_a_step_returns_before_other_workers_have_pushed_and_a_module_waits_for_its_own_values_only() -> None:
    """With a bound of 0 nothing can be read before both have pushed."""
    returned = threading.Event()

    def program(job: Job) -> None:
        model, optimizer = begin(job, crossing())
        before = values_of(model)
        backward(model, job.rank, 1)
        if job.rank == 1:
            assert returned.wait(PATIENCE_S), "the step of rank 0 waits"
        optimizer.step()
        if job.rank == 0:
            assert all(map(torch.equal, before, model.parameters()))
            returned.set()
        model[0](batch(0, 0))  # type: ignore[index]
        moved = [not torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True)]
        assert moved == [True, True, False, False, False, False] and under_way(model) == 4
        model(batch(0, 0))
        assert under_way(model) == 0 and all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    run_jobs(2, program)


class Backwards(nn.Module):
    """Its forward reads the layers in the reverse order of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def test_the_next_step_is_pushed_and_pulled_in_the_order_in_which_the_forward_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Push | Pull] = []
    take = ClientMachine.on_request

    def on_request(self: ClientMachine, now: float, ticket: int, request: Any) -> Any:
        if self.rank == 0 and isinstance(request, (Push, Pull)):
            seen.append(request)
        return take(self, now, ticket, request)

    monkeypatch.setattr(ClientMachine, "on_request", on_request)

    def program(job: Job) -> list[str]:
        strategy = crossing(Asynchronous(), Priority(partition=64))  # so that no two layers share a range
        model, optimizer = begin(job, strategy, lambda: seeded(Backwards))
        take_step(job, model, optimizer, 1)  # in the order of registration, for no module has asked for anything yet
        model(batch(job.rank, 2))
        job.barrier()
        if job.rank == 0:
            seen.clear()
        job.barrier()
        take_step(job, model, optimizer, 2)
        model(batch(job.rank, 2))  # nothing is waited for any more when it has ended
        training: Any = engine_of(model).training
        return [each.slices[0].name for each in training._ranges]

    names = run_jobs(2, program)[0]
    for kind in (Push, Pull):
        requests = [request for request in seen if isinstance(request, kind)]
        layers = [int(names[request.range].split(".")[1]) for request in requests]
        assert len(layers) == len(names) and layers == sorted(layers, reverse=True)
        priorities = [request.urgency.priority for request in requests if request.urgency is not None]
        assert priorities == sorted(priorities) and len(set(priorities)) == 3 and len(priorities) == len(layers)


@pytest.mark.parametrize(("partition", "expected"), [(1, 4), (100, 100), (1 << 30, 1 << 20), (None, 1 << 20)])
def test_parts_are_ranges_of_one_value_at_least(partition: int | None, expected: int) -> None:
    large = [ServedParameter("w", 1 << 24)]
    assert range_bytes_for_steps(Priority(partition=partition), large, 2) == expected
    RangeLayout([ServedParameter("w", 3)], expected)


def entry(name: str, start: int) -> KeptParameter:
    return KeptParameter(name, nn.Parameter(torch.zeros(2)), 0, "0.0.0", start, start + 2)


def test_an_order_is_taken_from_calls_of_modules_and_not_from_those_for_everything() -> None:
    entries = [entry(name, 2 * place) for place, name in enumerate("abc")]
    a, b, c = (each.parameter for each in entries)
    ranges = [ParameterRange(place, "0.0.0", (ParameterSlice(name, 0, 2),)) for place, name in enumerate("abc")]
    ranges.append(ParameterRange(3, "0.0.0", (ParameterSlice("a", 0, 1), ParameterSlice("c", 0, 1))))
    order = UseOrder(Priority(credit=100), entries, 8, 1)

    def now() -> list[int]:
        turns = order.turns(ranges)
        assert all(urgency is not None and urgency.credit_bytes == 100 for _, urgency in turns)
        return [each.index for each, _ in turns]

    assert now() == [0, 3, 1, 2]
    for used in ([c], [b], [c], [a]):
        order.used(used)
    assert now() == [2, 3, 1, 0]
    assert now() == [2, 3, 1, 0]  # nothing was read: as it was
    order.used([a, b, c])  # an evaluation, say
    order.used([a])
    assert now() == [2, 3, 1, 0]
    order.used([b])
    order.used([c])
    assert now() == [1, 2, 3, 0]  # `a` was not read at all: it is the least urgent
    plain = UseOrder(Buckets(), entries, 8, 1)
    plain.used([c])
    plain.used([a])
    assert plain.turns(ranges) == [(each, None) for each in ranges]


LOOKS: dict[str, Look] = {
    "state_dict": lambda job, model, optimizer: model.state_dict(),
    "optimizer.state_dict": lambda job, model, optimizer: optimizer.state_dict(),
    "deepcopy": lambda job, model, optimizer: copy.deepcopy(model),
    "synchronize": lambda job, model, optimizer: synchronize(model),
    "optimizer.synchronize": lambda job, model, optimizer: optimizer.synchronize(),  # type: ignore[attr-defined]
    "evaluation": lambda job, model, optimizer: torch.no_grad()(model)(batch(0, 0)),
    "release": lambda job, model, optimizer: release(model),
}


@pytest.mark.parametrize("look", list(LOOKS))
def test_whoever_looks_sees_the_step_taken(look: str) -> None:
    def program(job: Job, schedule: Any) -> list[Tensor]:
        model, optimizer = begin(job, crossing(schedule=schedule))
        take_step(job, model, optimizer, 1)
        LOOKS[look](job, model, optimizer)
        return values_of(model)

    assert_same_bits([*after_one_step(), *run_jobs(2, program, SMALL)])


@cache
def after_one_step() -> list[list[Tensor]]:
    """With the barrier."""

    def program(job: Job) -> list[Tensor]:
        model, optimizer = begin(job, crossing(schedule=Buckets()))
        take_step(job, model, optimizer, 1)
        return values_of(model)

    return run_jobs(2, program)


def test_synchronize_waits_for_this_workers_values_and_for_no_other_worker() -> None:
    """The other one does not call it, and goes on when it has ended."""
    ended = threading.Event()

    def program(job: Job) -> None:
        model, optimizer = begin(job, crossing(Asynchronous()))
        before = values_of(model)
        with no_sync(model):
            backward(model, job.rank, 1)
        backward(model, job.rank, 2)
        optimizer.step()
        if job.rank == 1:
            assert ended.wait(PATIENCE_S), "rank 0 waits for rank 1"
            return
        synchronize(model)
        assert under_way(model) == 0 and not any(map(torch.equal, before, values_of(model)))
        ended.set()

    run_jobs(2, program)


def test_saving_and_going_on_from_there(tmp_path: Any) -> None:
    def program(job: Job) -> None:
        model, optimizer = begin(job, crossing())
        take_step(job, model, optimizer, 1)
        checkpoint.save(tmp_path / "saved", model, optimizer, job=job)
        found = []
        for _ in range(2):
            take_step(job, model, optimizer, 2)
            synchronize(model)
            found.append(values_of(model))
            checkpoint.load(tmp_path / "saved", model, optimizer, job=job)
        assert_same_bits(found)

    run_jobs(2, program)


def test_a_hook_of_the_program_that_runs_after_a_step_sees_its_values() -> None:
    def program(job: Job, schedule: Any) -> list[Tensor]:
        model, optimizer = begin(job, crossing(schedule=schedule))
        seen: list[list[Tensor]] = []
        optimizer.register_step_post_hook(lambda *_: seen.append(values_of(model)))
        take_step(job, model, optimizer, 1)
        assert under_way(model) == 0
        return seen[0]

    assert_same_bits([*after_one_step(), *run_jobs(2, program, SMALL)])


def test_gradients_are_clipped_and_accumulated_as_ever() -> None:
    def program(job: Job, schedule: Any) -> list[Tensor]:
        model, optimizer = begin(job, crossing(schedule=schedule))
        for number in range(1, 4):
            with no_sync(model):
                backward(model, job.rank, number)
            backward(model, job.rank, number + 10)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        synchronize(model)
        return values_of(model)

    barrier, found = (run_jobs(2, program, schedule) for schedule in (Buckets(), SMALL))
    assert_same_bits([*barrier, *found])


def test_the_trace_has_a_transfer_for_each_step() -> None:
    def program(job: Job) -> list[str]:
        job.tracer = Tracer()
        model, optimizer = begin(job, crossing())
        for number in range(1, 4):
            take_step(job, model, optimizer, number)
        synchronize(model)
        job.barrier()
        return [span.name for span in job.tracer.spans if span.category == "transfer"]

    for names in run_jobs(2, program):
        assert names.count("servers 0") in (3, 4)  # that of the last one is written by another thread, perhaps a little later


# -- what goes wrong --------------------------------------------------------------------------------------------------


def kill_server(job: Job, number: int, of: int) -> None:
    assert job.more_wires is not None
    wire: Any = job.more_wires(f"servers {of}", job.world_size + of)[job.world_size + number]
    wire.kill("killed by the test")


@pytest.mark.parametrize("killed", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2))])
def test_a_server_that_dies_while_values_are_on_their_way_changes_no_bit_if_there_is_a_copy(killed: int) -> None:
    killing = threading.Event()

    def program(job: Job, kills: bool) -> list[Tensor]:
        model, optimizer = begin(job, crossing(shards=3, replicas=1))
        for number in range(1, STEPS):
            take_step(job, model, optimizer, number)
            if kills and number == 2 and job.rank == 1:
                assert under_way(model)
                kill_server(job, killed, of=3)
                killing.set()
        synchronize(model)
        return values_of(model)

    undisturbed = run_jobs(2, program, False)
    assert_same_bits([*undisturbed, *run_jobs(2, program, True)])
    assert killing.is_set()


def test_without_a_copy_the_next_use_names_what_is_lost_and_so_does_every_later_one() -> None:
    def program(job: Job) -> None:
        model, optimizer = begin(job, crossing(shards=1))
        job.barrier()
        if job.rank == 0:
            kill_server(job, 0, of=1)
        with pytest.raises(PeerLost, match="a server, and the last with a copy of '"):
            for number in range(1, 4):
                take_step(job, model, optimizer, number)
        with pytest.raises(StrettoError, match="a server, and the last with a copy of '"):
            take_step(job, model, optimizer, 4)

    run_jobs(2, program)


def test_a_parameter_that_is_written_to_between_a_step_and_its_values_is_refused() -> None:
    def program(job: Job) -> None:
        model, optimizer = begin(job, crossing())
        take_step(job, model, optimizer, 1)
        with torch.no_grad():
            model[2].weight.clamp_(-1, 1)  # type: ignore[index]
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="was changed between optimizer.step"):
                model(batch(0, 0))
        with pytest.raises(ConfigurationError, match="was changed between optimizer.step"):
            optimizer.step()

    run_jobs(2, program)


def test_a_parameter_that_is_read_without_its_module_is_noticed_when_its_gradient_comes() -> None:
    def program(job: Job) -> None:
        model, optimizer = begin(job, crossing())
        take_step(job, model, optimizer, 1)
        first: Any = model[0]  # type: ignore[index]
        loss = nn.functional.linear(batch(0, 0), first.weight).sum()
        with pytest.raises(ConfigurationError, match="has read 0.weight before it was brought up to date"):
            torch.autograd.backward(loss)
        synchronize(model)
        take_step(job, model, optimizer, 2)

    run_jobs(2, program)


@pytest.mark.parametrize("schedule", [Merged(), Caramel(), Caramel(cross_barrier=False)], ids=repr)
def test_schedules_that_plan_by_when_gradients_are_ready_are_refused(schedule: Any) -> None:
    with pytest.raises(ConfigurationError, match="get all of them at once"):
        crossing(schedule=schedule)


def test_profiles_are_refused() -> None:
    def program(job: Job) -> None:
        model = mlp()
        with pytest.raises(ConfigurationError, match="Leave profile= out"):
            distribute(model, adam(model.parameters()), crossing(), job=job, profile="/does not exist")
        distribute(model, adam(model.parameters()), crossing(), job=job)
        with pytest.raises(ConfigurationError, match="no times are measured"):
            save_profile(model, "/does not exist")

    run_jobs(2, program)
