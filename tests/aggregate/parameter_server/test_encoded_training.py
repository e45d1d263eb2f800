"""Training with servers and a codec, in threads: what the laws (`tests/laws/test_lossy_servers.py`) do not ask."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aggregate.parameter_server.test_training import batch, kill_server, mlp, started, take_step, trained, weights
from engine.worker import remembered
from stretto.aggregate.parameter_server import ParameterServer
from stretto.aggregate.parameter_server.messages import PushGradient, ValuesPulled
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.aggregate.parameter_server.training import SynchronousServers
from stretto.compress.by_parameter import ByParameter
from stretto.compress.codec import Codec, Compression
from stretto.compress.error_feedback import RESIDUAL, ErrorFeedback
from stretto.compress.float16 import Float16
from stretto.compress.int8 import Int8
from stretto.compress.layout import Layout
from stretto.compress.none import NoCompression
from stretto.compress.one_bit import OneBit
from stretto.compress.sign import Sign
from stretto.compress.state import SERVER
from stretto.compress.top_k import TopK
from stretto.distributing import distribute, engine_of
from stretto.errors import BackwardFailed
from stretto.job import Job
from stretto.plan.profile import TransferCost
from stretto.schedule.priority import Priority
from stretto.strategy import Strategy
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.testing import run_jobs

FEEDBACK = ErrorFeedback(Sign(block=64))


def on_servers(compression: Compression, replicas: int = 0, **others: Any) -> Strategy:
    return Strategy(aggregate=ParameterServer(shards=3, replicas=replicas), compress=compression, **others)


@pytest.mark.parametrize(
    "compression",
    [FEEDBACK, Int8(), ErrorFeedback(TopK(0.1)), pytest.param(ErrorFeedback(OneBit()), marks=pytest.mark.slow)],
    ids=repr,
)
def test_bytes_up_and_down_are_those_of_the_formula(compression: Compression, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, moved, take, send = threading.Lock(), Counter[str](), ServerMachine.on_message, ServerMachine._send

    def on_message(self: ServerMachine, now: float, source: int, header: Any, payload: memoryview) -> Any:
        with lock:
            moved["up"] += payload.nbytes if isinstance(header, PushGradient) else 0
        return take(self, now, source, header, payload)

    def _send(self: ServerMachine, to: int, header: Any, payload: Any = b"") -> None:
        with lock:
            moved["down"] += memoryview(payload).nbytes if isinstance(header, ValuesPulled) else 0
        send(self, to, header, payload)

    monkeypatch.setattr(ServerMachine, "on_message", on_message)
    monkeypatch.setattr(ServerMachine, "_send", _send)
    run_jobs(2, trained, on_servers(compression))  # 6 steps
    codec: Any = getattr(compression, "codec", compression)
    assert isinstance(codec, Codec)
    blocks = codec.blocks(Layout.of((name, p.shape) for name, p in mlp().named_parameters()))
    assert moved == {direction: 6 * 2 * (codec.num_bytes(blocks) or 0) for direction in ("up", "down")}


@pytest.mark.parametrize(
    "compression",
    [
        NoCompression(),
        ErrorFeedback(Sign(block=64)),
        ErrorFeedback(TopK(0.1)),
        ByParameter(("0.*", NoCompression()), ("*", Int8())),
    ],
    ids=repr,
)
@pytest.mark.parametrize("size", [2, 3])
def test_a_plan_counts_the_bytes_that_are_pushed_and_pulled(
    size: int, compression: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured cost is of bytes that are pushed and pulled as they are; here one second for each."""
    monkeypatch.setattr(SynchronousServers, "_measure", lambda *_: TransferCost(start_s=0.0, per_byte_s=1.0, hops=2))

    def work(job: Job) -> tuple[float, float]:
        model, optimizer = started(job, on_servers(compression, schedule=Priority()))
        for step in range(6):
            take_step(job, model, optimizer, step)
        model.state_dict()  # waits for what is under way
        profile = engine_of(model).training.profile
        assert profile is not None
        moved = sum(n for (kind, _), n in job.ledger.sent.items() if kind == "push")
        moved += sum(n for (kind, _), n in job.ledger.received.items() if kind == "pull")
        as_they_are = 2 * sum(parameter.nbytes for parameter in model.parameters())
        return profile.cost.per_byte_s, moved / 6 / as_they_are

    for planned, counted in run_jobs(size, work):
        assert planned == pytest.approx(counted, rel=0.02)
        assert counted < 0.9 or compression.lossless


@pytest.mark.parametrize("killed", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2))])
def test_a_server_that_dies_in_mid_training_changes_no_bit_if_there_is_a_copy(killed: int) -> None:
    killing = threading.Event()

    def disturb(job: Job, step: int, model: nn.Module) -> None:
        if job.rank == 1 and step == 3:
            kill_server(job, killed, of=3)
            killing.set()

    strategy = on_servers(FEEDBACK, replicas=1)
    undisturbed, disturbed = run_jobs(2, trained, strategy), run_jobs(2, trained, strategy, disturb)
    assert killing.is_set()
    assert all(torch.equal(a, b) for run in disturbed for a, b in zip(run, undisturbed[0], strict=True))


def test_across_the_barrier_weights_are_the_same_bits() -> None:
    """With urgent pushes and pulls of parts."""

    def program(job: Job, strategy: Strategy) -> list[Tensor]:
        model, optimizer = started(job, strategy)
        for step in range(5):
            take_step(job, model, optimizer, step)
        model.state_dict()
        return weights(model)

    plain = run_jobs(2, program, on_servers(FEEDBACK))
    crossing = run_jobs(2, program, on_servers(FEEDBACK, schedule=Priority(partition=4096, credit=8192)))
    assert all(torch.equal(a, b) for run in crossing for a, b in zip(run, plain[0], strict=True))


@pytest.mark.parametrize(
    "strategy",
    [
        on_servers(FEEDBACK),
        on_servers(FEEDBACK, sync=StaleSynchronous(0)),
        on_servers(Float16(), sync=StaleSynchronous(0)),
    ],
    ids=["sums", "steps", "steps in 16 bits"],
)
def test_distributing_anew_in_mid_training_changes_nothing(strategy: Strategy) -> None:
    def program(job: Job, anew: bool) -> list[Tensor]:
        model, optimizer = started(job, strategy)
        for step in range(4):
            if anew and step == 2:
                distribute(model, optimizer, strategy, job=job)
            take_step(job, model, optimizer, step)
        return weights(model)

    without, anew = run_jobs(2, program, False), run_jobs(2, program, True)
    assert all(torch.equal(a, b) for run in anew for a, b in zip(run, without[0], strict=True))


@pytest.mark.parametrize("there_and_back", [False, True])
def test_what_is_left_over_goes_along_between_servers_and_all_reduce(there_and_back: bool) -> None:
    """Nothing of it is lost, by a mean over workers."""
    strategies = (Strategy(compress=FEEDBACK), on_servers(FEEDBACK))
    first, second = strategies if there_and_back else strategies[::-1]

    def program(job: Job) -> tuple[Tensor, Tensor]:
        model, optimizer = started(job, first)
        given = _flat({name: torch.zeros(p.shape) for name, p in model.named_parameters()})
        heard = given.clone()
        for step in range(4):
            if step == 2:
                distribute(model, optimizer, second, job=job)
            loss = model(batch(job, step)).square().mean()
            given += _flat(dict(enumerate(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))))
            loss.backward()
            heard += _flat({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
            engine_of(model).before_step(engine_of(model).loop.optimizers[0])
            model.zero_grad()
        own = remembered(model).own
        left = [own[n][RESIDUAL] + job.world_size * own[n].get(SERVER, torch.zeros(p.shape)) for n, p in model.named_parameters()]
        return given - heard, torch.cat([each.flatten() for each in left])

    results = run_jobs(3, program)
    missing, left = (torch.stack([result[index] for result in results]).mean(0) for index in (0, 1))
    assert torch.allclose(missing, left, atol=1e-5) and float(left.abs().max()) > 1e-4


def test_a_round_whose_backward_failed_leaves_no_trace() -> None:
    def program(job: Job, fails: bool) -> list[Tensor]:
        model, optimizer = started(job, on_servers(FEEDBACK))
        for step in range(4):
            if fails and step in (1, 2):
                out = model(torch.ones(2, 8))
                if job.rank == 1:
                    out.register_hook(_fail)
                with pytest.raises((BackwardFailed, ZeroDivisionError)):
                    out.sum().backward()
                engine_of(model).flush()
                optimizer.zero_grad()
            take_step(job, model, optimizer, step)
        return weights(model)

    without, disturbed = run_jobs(2, program, False), run_jobs(2, program, True)
    assert all(torch.equal(a, b) for run in disturbed for a, b in zip(run, without[0], strict=True))


def _fail(gradient: Tensor) -> None:
    raise ZeroDivisionError("on purpose")


class InTurns(nn.Module):
    """Another layer is left out in each call, on all workers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, leave_out: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != leave_out:
                x = layer(x).tanh()
        return x


def test_of_parameters_that_nobody_uses_in_a_round_nothing_is_said_and_nothing_is_lost() -> None:
    def program(job: Job) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        model = InTurns()
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), on_servers(FEEDBACK), job=job)
        given = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
        used = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
        for step in range(9):
            generator = torch.Generator().manual_seed(100 * job.rank + step)
            out = model(torch.randn(4, 16, generator=generator), step % 3).square().mean()
            inside = [(n, p) for n, p in model.named_parameters() if not n.startswith(f"layers.{step % 3}.")]
            for (name, _), gradient in zip(
                inside, torch.autograd.grad(out, [p for _, p in inside], retain_graph=True), strict=True
            ):
                given[name] += gradient
            out.backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    used[name] += parameter.grad
            assert {n for n, p in model.named_parameters() if p.grad is None} == {n for n in given if n not in dict(inside)}
            engine_of(model).before_step(engine_of(model).loop.optimizers[0])
            model.zero_grad()
        own = remembered(model).own
        left = {
            name: own.get(name, {}).get(RESIDUAL, torch.zeros(p.shape))
            + job.world_size * own.get(name, {}).get(SERVER, torch.zeros(p.shape))
            for name, p in model.named_parameters()
        }
        return _flat(given), _flat(used), _flat(left)

    results = run_jobs(3, program)
    given, left = (torch.stack([result[index] for result in results]).mean(0) for index in (0, 2))
    assert torch.allclose(results[0][1] + left, given, atol=1e-5) and float(left.abs().max()) > 1e-4


def _flat(tensors: Mapping[Any, Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in tensors.values()])
