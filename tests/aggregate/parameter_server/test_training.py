"""Synchronous training with servers, in threads: what the laws (`tests/laws`) do not ask."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.worker import Refusing, seeded
from preloaded import Preloaded
from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.parameter_server import ParameterServer
from stretto.aggregate.parameter_server.client import ClientMachine
from stretto.aggregate.parameter_server.messages import PushGradient
from stretto.aggregate.parameter_server.network import hosts_of_servers
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.compress.power_sgd import PowerSGD
from stretto.distributing import distribute, engine_of, join, release
from stretto.errors import BackwardFailed, ConfigurationError, PeerLost, StrettoError, WireError
from stretto.job import Job
from stretto.schedule.orders import AfterBackward, Buckets
from stretto.strategy import Strategy
from stretto.testing import run_jobs
from stretto.timeouts import Timeouts

TWO = Strategy(aggregate=ParameterServer(shards=2))
SAFE = Strategy(aggregate=ParameterServer(shards=3, replicas=1))


def mlp() -> nn.Sequential:
    model: nn.Sequential = seeded(lambda: nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1)))
    return model


def started(job: Job, strategy: Strategy, model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp() if model is None else model
    return distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy, job=job)


def batch(job: Job, step: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + job.rank))


def take_step(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(batch(job, step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def trained(job: Job, strategy: Strategy, disturb: Callable[[Job, int, nn.Module], None] = lambda *_: None) -> list[Tensor]:
    model, optimizer = started(job, strategy)
    for step in range(6):
        disturb(job, step, model)
        take_step(job, model, optimizer, step)
    return weights(model)


def kill_server(job: Job, number: int, of: int) -> None:
    assert job.more_wires is not None
    wire: Any = job.more_wires(f"servers {of}", job.world_size + of)[job.world_size + number]
    wire.kill("killed by the test")


def close(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_weights_are_those_of_an_all_reduce_and_the_same_bits_in_every_run(size: int) -> None:
    ring = run_jobs(size, trained, Strategy(aggregate=AllReduce("ring")))
    first, again = run_jobs(size, trained, TWO), run_jobs(size, trained, TWO)
    assert close(first[0], ring[0])
    assert all(torch.equal(a, b) for run in (*first, *again) for a, b in zip(run, first[0], strict=True))


def test_when_a_worker_is_lost_to_the_servers_in_mid_round_nobody_gets_a_mean_without_it() -> None:
    """The servers go on without it, and what the others pull is not everybody's sum."""
    cut = threading.Event()

    def program(job: Job) -> str:
        model = mlp()
        started(job, Strategy(aggregate=ParameterServer(shards=1), schedule=Buckets(bytes=64, first_bytes=64)), model)
        hidden = model[:2](batch(job, 0))
        if job.rank == 1:
            assert job.more_wires is not None
            wire: Any = job.more_wires("servers 1", 3)[1]
            wire.kill("cut off by the test")
            cut.set()
        assert cut.wait(30)
        with pytest.raises(StrettoError) as caught:
            model[2:](hidden).square().mean().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        return type(caught.value).__name__

    assert run_jobs(2, program)[0] in ("IncompleteSum", "PeerLost")
    assert cut.is_set()


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_server_that_dies_in_mid_training_changes_no_bit_if_there_is_a_copy(killed: int) -> None:
    killing = threading.Event()

    def disturb(job: Job, step: int, model: nn.Module) -> None:
        if job.rank == 1 and step == 3:
            kill_server(job, killed, of=3)
            killing.set()

    undisturbed, disturbed = run_jobs(2, trained, SAFE), run_jobs(2, trained, SAFE, disturb)
    assert killing.is_set()
    assert all(torch.equal(a, b) for run in disturbed for a, b in zip(run, undisturbed[0], strict=True))


def test_a_server_that_fails_inside_ends_and_its_copy_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    armed, failed, take = threading.Event(), set[int](), ServerMachine.on_message

    def on_message(self: ServerMachine, now: float, source: int, header: Any, payload: memoryview) -> Any:
        if armed.is_set() and not failed and isinstance(header, PushGradient):  # the first server that is pushed to
            failed.add(self.rank)
            raise MemoryError("raised by the test")
        return take(self, now, source, header, payload)

    def disturb(job: Job, step: int, model: nn.Module) -> None:
        if job.rank == 1 and step == 3:
            armed.set()

    undisturbed = run_jobs(2, trained, SAFE)
    monkeypatch.setattr(ServerMachine, "on_message", on_message)
    disturbed = run_jobs(2, trained, SAFE, disturb)
    assert len(failed) == 1
    assert all(torch.equal(a, b) for run in disturbed for a, b in zip(run, undisturbed[0], strict=True))


def test_without_a_copy_all_workers_are_told_which_parameters_are_lost() -> None:
    def program(job: Job) -> str:
        def disturb(job: Job, step: int, model: nn.Module) -> None:
            if step == 3 and job.rank == 0:
                kill_server(job, 0, of=1)

        with pytest.raises(PeerLost, match="a server, and the last with a copy of .*weight") as caught:
            trained(job, Strategy(aggregate=ParameterServer(shards=1)), disturb)
        return str(caught.value)

    assert len(set(run_jobs(2, program))) == 1


def test_what_is_frozen_and_unfrozen_is_served_anew() -> None:
    def disturb(job: Job, step: int, model: nn.Module) -> None:
        next(model.parameters()).requires_grad_(step not in (2, 3))

    ring = run_jobs(3, trained, Strategy(aggregate=AllReduce("ring")), disturb)
    assert all(close(run, ring[0]) for run in run_jobs(3, trained, TWO, disturb))


def num_machines() -> int:
    """That have not been freed, of the jobs of this process."""
    gc.collect()
    return sum(type(each) in (ServerMachine, ClientMachine) for each in gc.get_objects())


def test_a_model_that_is_released_leaves_no_memory_on_the_servers() -> None:
    def program(job: Job) -> int:
        for _ in range(3):
            model, optimizer = started(job, TWO)
            take_step(job, model, optimizer, 0)
            release(model)
        job.barrier()
        deadline = time.monotonic() + 10
        while job.rank == 0 and num_machines() and time.monotonic() < deadline:
            threading.Event().wait(0.05)
        found = num_machines() if job.rank == 0 else 0
        job.barrier()
        return found

    assert run_jobs(2, program) == [0, 0]


def test_after_the_death_of_a_server_the_next_model_is_served_by_those_that_live() -> None:
    def program(job: Job) -> list[Tensor]:
        model, optimizer = started(job, TWO)
        take_step(job, model, optimizer, 0)
        job.barrier()
        if job.rank == 0:
            kill_server(job, 0, of=2)
            while 2 not in job.server_networks[2]._wire.lost:
                threading.Event().wait(0.01)
        return trained(job, TWO)

    found, ring = run_jobs(2, program), run_jobs(2, trained, Strategy(aggregate=AllReduce("ring")))
    assert all(close(run, ring[0]) for run in found)


def test_two_models_share_the_servers_and_one_that_is_released_is_served_no_longer() -> None:
    def program(job: Job, strategy: Strategy) -> tuple[list[Tensor], int]:
        first, second = started(job, strategy), started(job, strategy)
        for step in range(3):
            take_step(job, *first, step)
            take_step(job, *second, step + 1)
        release(first[0])
        take_step(job, *second, 7)
        return weights(second[0]), len(job.server_networks)

    ring, servers = run_jobs(2, program, Strategy(aggregate=AllReduce("ring"))), run_jobs(2, program, TWO)
    assert all(close(found, ring[0][0]) and networks == 1 for found, networks in servers)


class Mined(nn.Module):
    """Its backward raises, half-way, when it is `armed`."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = mlp()
        self.armed = False

    def forward(self, x: Tensor) -> Any:
        hidden = self.parts[:2](x)
        return self.parts[2:](Refusing.apply(hidden) if self.armed else hidden)  # type: ignore[no-untyped-call]


def test_after_a_backward_that_fails_on_one_worker_nobody_has_stepped_and_training_goes_on() -> None:
    def program(job: Job, failing: int | None) -> list[Tensor]:
        model = Mined()
        optimizer = started(job, TWO, model)[1]
        for step in (0, 1, 2) if failing is not None else (0, 2):
            model.armed = step == 1 and job.rank == failing
            try:
                take_step(job, model, optimizer, step)
            except (RuntimeError, BackwardFailed) as error:
                assert step == 1 and isinstance(error, BackwardFailed) == (job.rank != failing)
        return weights(model)

    without = run_jobs(3, program, None)
    assert all(torch.equal(a, b) for run in run_jobs(3, program, 1) for a, b in zip(run, without[0], strict=True))


def test_half_precision_is_added_up_in_float32_and_rounded_once() -> None:
    def program(job: Job) -> Tensor:
        model = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), TWO, job=job)
        x = torch.full((1, 4), 1.0 + job.rank / 64, dtype=torch.bfloat16)
        model(x).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.float()

    mean = sum(float(torch.tensor(1.0 + rank / 64).bfloat16()) for rank in range(3)) / 3
    assert all(torch.equal(found, torch.full((1, 4), mean).bfloat16().float()) for found in run_jobs(3, program))


def test_what_float32_cannot_hold_is_combined_by_all_reduce() -> None:
    def program(job: Job, strategy: Strategy) -> list[Any]:
        model = seeded(lambda: nn.ModuleList([nn.Linear(4, 4).double(), nn.Linear(4, 4)]))
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, job=job)
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(job.rank))
        (model[0](x.double()).square().mean() + model[1](x).square().mean()).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    ring, servers = run_jobs(3, program, Strategy(aggregate=AllReduce("ring"))), run_jobs(3, program, TWO)
    for one, other in zip(ring[0], servers[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14 if one.dtype is torch.float64 else 1e-6, atol=1e-15)


def test_a_worker_that_hangs_in_its_backward_is_given_up_at_the_deadline() -> None:
    over = threading.Event()

    class Hanging(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            assert over.wait(30)
            return gradient

    def program(job: Job) -> str:
        model = mlp()
        strategy = Strategy(aggregate=ParameterServer(shards=1), schedule=Buckets(bytes=512, first_bytes=64))
        started(job, strategy, model)
        hidden = model[:2](batch(job, 0))
        out = model[2:](Hanging.apply(hidden) if job.rank == 1 else hidden)  # type: ignore[no-untyped-call]
        try:
            out.square().mean().backward()
        except StrettoError as error:
            over.set()
            return str(error)
        return "well"

    found = run_jobs(2, program, timeouts=Timeouts(arrive_s=1.0))
    assert "have not got everybody's within 1 s" in found[0]


def test_a_worker_that_runs_out_of_data_leaves_the_others_to_go_on() -> None:
    def program(job: Job, strategy: Strategy) -> list[Tensor]:
        model, optimizer = started(job, strategy)
        with join(model):
            for step in range(2 + job.rank):
                take_step(job, model, optimizer, step)
        return weights(model)

    ring = run_jobs(3, program, Strategy(aggregate=AllReduce("ring")))
    assert all(close(run, ring[0]) for run in run_jobs(3, program, TWO))


KILLS = """
import torch, stretto
from stretto import ParameterServer, Strategy

job = stretto.init()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))  # ranges for both servers
optimizer = torch.optim.Adam(model.parameters())
stretto.distribute(model, optimizer, Strategy(aggregate=ParameterServer(shards=2, replicas=1)))
(network,) = job.server_networks.values()
for step in range(6):
    if step == 3 and job.rank == 0:
        network.processes[0].kill()
        network.processes[0].wait()
    model(torch.randn(8, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
alive = [process.pid for process in network.processes if process.poll() is None]
assert len(alive) == (0 if job.rank == 0 else 1)
total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
assert len(set(stretto.gather_object(total))) == 1
print("alive", *alive, flush=True)
stretto.shutdown()
"""


@pytest.mark.processes
def test_training_goes_on_when_a_server_process_is_killed_and_no_process_is_left(tmp_path: Path, preloaded: Preloaded) -> None:
    (tmp_path / "kills.py").write_text(KILLS)
    done = preloaded.run(tmp_path / "kills.py", folder=tmp_path, workers=2)
    assert done.returncode == 0, done.stderr
    assert "has lost server 0" in done.stderr
    pids = [int(word) for word in done.stdout.split() if word.isdigit()]
    assert len(pids) == 1
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):  # they end when the last worker has left
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_servers_are_spread_over_the_hosts() -> None:
    def program(job: Job) -> list[int]:
        return hosts_of_servers(job, 3)

    assert run_jobs(4, program, hosts=("a", "a", "b", "b"))[0] == [0, 2, 1]
    assert run_jobs(2, program)[0] == [0, 1, 0]


def test_alone_nothing_is_served() -> None:
    def program(job: Job) -> tuple[bool, int]:
        model, optimizer = started(job, Strategy(aggregate=ParameterServer()))
        take_step(job, model, optimizer, 0)
        return engine_of(model).engaged, len(job.server_networks)

    assert run_jobs(1, program) == [(False, 0)]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: ParameterServer(shards=0), "at least one server"),
        (lambda: ParameterServer(shards=True), "at least one server"),
        (lambda: ParameterServer(replicas=-1), "0 or a"),
        (lambda: ParameterServer(shards=2, replicas=2), "Write shards=3"),
        (lambda: Strategy(aggregate=ParameterServer(), compress=PowerSGD(2)), "Write a codec that servers know"),
    ],
    ids=["none", "flag", "negative", "too many copies", "compressed"],
)
def test_what_cannot_work_is_refused_where_it_is_written(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        make()


def test_more_copies_than_servers_are_refused_by_distribute_on_all_workers() -> None:
    def program(job: Job) -> bool:
        with pytest.raises(ConfigurationError, match="has 2 servers"):
            started(job, Strategy(aggregate=ParameterServer(replicas=2)))
        return True

    assert run_jobs(2, program) == [True, True]


def test_a_worker_that_is_in_another_collective_is_found_out() -> None:
    def program(job: Job) -> str:
        model, _ = started(job, Strategy(aggregate=ParameterServer(shards=1), schedule=AfterBackward()))
        with pytest.raises(WireError) as caught:
            if job.rank == 0:
                job.barrier()
            else:
                model(batch(job, 0)).square().mean().backward()
        return type(caught.value).__name__

    assert run_jobs(2, program, timeouts=Timeouts(warn_s=0.5, arrive_s=20.0)) == ["RankMismatch"] * 2
