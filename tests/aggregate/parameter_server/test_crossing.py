"""Ordered transfers and the iteration barrier with servers that sum: the same bits, and what goes wrong says so."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from engine.crossing import Separately, crossing_of
from engine.worker import assert_equal_everywhere, seeded, state_of
from stretto import checkpoint
from stretto.aggregate.all_reduce.planning import ROUNDS_TO_WATCH
from stretto.aggregate.parameter_server import ParameterServer
from stretto.aggregate.parameter_server.client import ClientMachine, Pull, Push
from stretto.aggregate.parameter_server.layout import ServedParameter
from stretto.aggregate.parameter_server.training import SynchronousServers
from stretto.aggregate.parameter_server.transfer_cost import HOPS
from stretto.aggregate.parameter_server.transfer_order import range_bytes_of, urgency_with_servers
from stretto.collectives.urgency import Urgency
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.float16 import Float16
from stretto.compress.sign import Sign
from stretto.distributing import distribute, engine_of
from stretto.engine.gradient_under_way import GradientUnderWay
from stretto.errors import ConfigurationError, PeerLost, StrettoError
from stretto.job import Job
from stretto.plan.transfers import Transfer, TransferPlan
from stretto.schedule.caramel import Caramel
from stretto.schedule.merged import Merged
from stretto.schedule.orders import WaitFree
from stretto.schedule.priority import Priority
from stretto.schedule.tictac import Tac, Tic
from stretto.strategy import Strategy
from stretto.testing import run_jobs

STEPS = ROUNDS_TO_WATCH + 3
FEW = 4  # of schedules that need no profile
PART = 512  # bytes: the model is cut into a dozen ranges
SERVERS, COPIED = ParameterServer(shards=2), ParameterServer(shards=3, replicas=1)
CROSSING = Strategy(aggregate=SERVERS, schedule=Separately(partition=PART, credit=PART))


def mlp() -> nn.Sequential:
    model: nn.Sequential = seeded(
        lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    )
    return model


def begin(job: Job, strategy: Strategy) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    return distribute(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), strategy, job=job)


def backward(job: Job, model: nn.Module, step: int) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + job.rank))
    torch.autograd.backward(model(x).square().mean())


def take_step(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    backward(job, model, step)
    optimizer.step()
    optimizer.zero_grad()


def trained(job: Job, strategy: Strategy, steps: int = STEPS) -> dict[str, Tensor]:
    model, optimizer = begin(job, strategy)
    for step in range(steps):
        take_step(job, model, optimizer, step)
    training = cast(SynchronousServers, engine_of(model).training)
    if strategy.schedule.cross_barrier and job.world_size > 1:
        assert not crossing_of(model).is_over  # the last step is under way
    if type(strategy.schedule).__module__.startswith("stretto") and strategy.schedule.needs_profile and job.world_size > 1:
        assert training.profile is not None and training.profile.cost.hops == HOPS
        assert training.plan is not None and training.plan.schedule == repr(strategy.schedule)
    return state_of(model)


@pytest.mark.parametrize("size", [1, 3, 7, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
def test_weights_are_those_with_the_barrier_to_the_last_bit(size: int) -> None:
    """Servers add in the order of ranks, whatever the order of transfers."""
    expected = run_jobs(size, trained, Strategy(aggregate=SERVERS, schedule=WaitFree()), FEW)
    assert_equal_everywhere([*expected, *run_jobs(size, trained, CROSSING, FEW)])


@cache
def with_the_barrier() -> list[dict[str, Tensor]]:
    """Two workers."""
    return run_jobs(2, trained, Strategy(aggregate=SERVERS, schedule=WaitFree()))


SCHEDULES = [Tac(), Priority(partition=1000, credit=1000), Merged()]
MORE = [pytest.param(each, marks=pytest.mark.slow) for each in (Tic(), Tac(cross_barrier=False), Priority(), Caramel())]


@pytest.mark.parametrize("schedule", [*SCHEDULES, *MORE], ids=repr)
def test_every_schedule_gives_the_same_bits_and_plans_with_what_servers_cost(schedule: Any) -> None:
    found = run_jobs(2, trained, Strategy(aggregate=SERVERS, schedule=schedule))
    assert_equal_everywhere([*with_the_barrier(), *found])


@pytest.mark.parametrize("codec", [ErrorFeedback(Sign(block=64)), Float16()], ids=repr)
def test_compressed_pushes_and_pulls_cross_too(codec: Any) -> None:
    """With the same transfers the bits are those with the barrier."""
    barrier, across = (Separately(partition=1 << 20, credit=1 << 20, cross_barrier=crosses) for crosses in (False, True))
    strategies = [Strategy(aggregate=SERVERS, compress=codec, schedule=schedule) for schedule in (barrier, across)]
    expected, found = (run_jobs(2, trained, strategy, FEW) for strategy in strategies)
    assert_equal_everywhere([*expected, *found])


def test_a_module_waits_for_its_own_parameters_and_no_others() -> None:
    def program(job: Job) -> None:
        model, optimizer = begin(job, CROSSING)
        take_step(job, model, optimizer, 0)
        before = [p.detach().clone() for p in model.parameters()]
        backward(job, model, 1)
        assert all(isinstance(p.grad, GradientUnderWay) for p in model.parameters())
        optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
        crossing_of(model)._use_the_wait_for = lambda bucket: None  # else others are updated too that have arrived meanwhile
        model[0](torch.ones(1, 8))  # type: ignore[index]
        moved = [not torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True)]
        assert moved == [True, True, False, False, False, False]

    run_jobs(2, program)


def test_pushes_and_pulls_carry_the_place_of_their_parameters_in_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, Push | Pull]] = []
    take = ClientMachine.on_request

    def on_request(self: ClientMachine, now: float, ticket: int, request: Any) -> Any:
        if self.rank == 0 and isinstance(request, (Push, Pull)):
            seen.append((len(self.layout), request))
        return take(self, now, ticket, request)

    monkeypatch.setattr(ClientMachine, "on_request", on_request)

    def program(job: Job) -> list[tuple[int, int]]:
        model, optimizer = begin(job, CROSSING)
        take_step(job, model, optimizer, 0)
        job.barrier()
        if job.rank == 0:
            seen.clear()
        take_step(job, model, optimizer, 1)
        engine_of(model).settle()
        training = cast(SynchronousServers, engine_of(model).training)
        priorities = {"0": 0, "2": 1, "4": 2}  # modules in the order of forward
        return [
            (index, priorities[bucket.names[0].split(".")[0]])
            for bucket, ranges in training._ranges.items()
            for index, _, _ in ranges
        ]

    wanted = dict(run_jobs(2, program)[0])
    assert len(seen) == 2 * len(wanted)
    for _, request in seen:
        assert request.urgency is not None and request.urgency.priority == wanted[request.range]
        assert request.urgency.credit_bytes >= 2 * PART


@pytest.mark.parametrize("killed", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2))])
def test_a_server_that_dies_while_transfers_are_under_the_forward_changes_no_bit_if_there_is_a_copy(killed: int) -> None:
    strategy, killing = Strategy(aggregate=COPIED, schedule=Separately(partition=PART, credit=PART)), threading.Event()

    def program(job: Job, kills: bool) -> dict[str, Tensor]:
        model, optimizer = begin(job, strategy)
        for step in range(5):
            take_step(job, model, optimizer, step)
            if kills and job.rank == 1 and step == 3:
                assert not crossing_of(model).is_over
                kill_server(job, killed)
                killing.set()
        return state_of(model)

    undisturbed = run_jobs(2, program, False)
    disturbed = run_jobs(2, program, True)
    assert killing.is_set()
    assert_equal_everywhere([*undisturbed, *disturbed])


def kill_server(job: Job, number: int, of: int = 3) -> None:
    assert job.more_wires is not None
    wire: Any = job.more_wires(f"servers {of}", job.world_size + of)[job.world_size + number]
    wire.kill("killed by the test")


def test_without_a_copy_the_next_use_names_what_is_lost_and_so_does_every_later_one() -> None:
    def program(job: Job) -> None:
        strategy = Strategy(aggregate=ParameterServer(shards=1), schedule=Separately(partition=PART, credit=PART))
        model, optimizer = begin(job, strategy)
        take_step(job, model, optimizer, 0)
        job.barrier()
        if job.rank == 0:
            kill_server(job, 0, of=1)
        with pytest.raises(PeerLost, match="a server, and the last with a copy of '"):
            for step in range(1, 4):
                take_step(job, model, optimizer, step)
            engine_of(model).settle()
        with pytest.raises(StrettoError):
            take_step(job, model, optimizer, 4)

    run_jobs(2, program)


def test_saving_and_going_on_from_there(tmp_path: Any) -> None:
    def program(job: Job) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model, optimizer = begin(job, CROSSING)
        for step in range(3):
            take_step(job, model, optimizer, step)
        checkpoint.save(tmp_path / "saved", model, optimizer, job=job)
        take_step(job, model, optimizer, 3)
        first = state_of(model)
        checkpoint.load(tmp_path / "saved", model, optimizer, job=job)
        take_step(job, model, optimizer, 3)
        return first, state_of(model)

    for first, second in run_jobs(2, program):
        assert_equal_everywhere([first, second])


def test_frozen_and_thawed_while_transfers_are_under_way() -> None:
    def program(job: Job, strategy: Strategy) -> dict[str, Tensor]:
        model, optimizer = begin(job, strategy)
        for step in range(5):
            take_step(job, model, optimizer, step)
            list(model.children())[2].requires_grad_(step % 2 == 1)
        return state_of(model)

    expected = run_jobs(3, program, Strategy(aggregate=SERVERS, schedule=WaitFree()))
    assert_equal_everywhere([*expected, *run_jobs(3, program, CROSSING)])


def test_optimizers_that_need_all_gradients_at_once_are_refused() -> None:
    def program(job: Job) -> None:
        model = mlp()
        with pytest.raises(ConfigurationError, match=r"schedule=Priority\("):
            distribute(model, torch.optim.LBFGS(model.parameters()), Strategy(aggregate=SERVERS, schedule=Priority()), job=job)

    run_jobs(2, program)


def test_ranges_are_parts_of_transfers_and_enough_of_them_fit_into_the_window() -> None:
    parameters = [ServedParameter("w", 1 << 22)]
    transfer = Transfer(parameters=("w",), num_bytes=1 << 24, part_bytes=100 << 10)
    plan = TransferPlan(schedule="", transfers=(transfer, Transfer(parameters=("b",), num_bytes=4)), credit_bytes=200 << 10)
    assert range_bytes_of(plan, parameters, 2) == 100 << 10
    assert range_bytes_of(TransferPlan(schedule="", transfers=()), parameters, 2) == (1 << 24) // 48
    whole = TransferPlan(schedule="", transfers=(Transfer(parameters=("w",), num_bytes=1 << 24),), credit_bytes=80 << 10)
    assert range_bytes_of(whole, parameters, 2) == 80 << 10  # a range that is more than the credit would not be under control
    for servers, ranges in [(1, 4), (2, 2), (3, 2), (4, 1), (7, 1)]:
        assert urgency_with_servers(Urgency(3, 50 << 10), 100 << 10, servers) == Urgency(3, ranges * (100 << 10))
    assert urgency_with_servers(Urgency(3, 1 << 20), 100 << 10, 1) == Urgency(3, 1 << 20)
    assert urgency_with_servers(None, 100 << 10, 2) is None
