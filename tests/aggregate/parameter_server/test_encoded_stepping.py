"""Servers that step, and gradients that a codec writes: what is applied, what is left out, and what travels each way."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aggregate.parameter_server.stepping_worker import PATIENCE_S, backward, mlp, sgd, train, values_of
from aggregate.parameter_server.test_training import kill_server
from engine.worker import remembered
from stretto.aggregate.parameter_server import ParameterServer
from stretto.aggregate.parameter_server.messages import PushGradient, PushTaken, ValuesPulled
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.aggregate.parameter_server.step_under_way import Step
from stretto.checkpoint import load, save
from stretto.compress.bfloat16 import BFloat16
from stretto.compress.by_parameter import ByParameter
from stretto.compress.codec import Codec, Compression
from stretto.compress.ef21 import EF21
from stretto.compress.error_feedback import RESIDUAL, ErrorFeedback
from stretto.compress.float16 import Float16
from stretto.compress.layout import Layout
from stretto.compress.none import NoCompression
from stretto.compress.one_bit import OneBit
from stretto.compress.qsgd import QSGD
from stretto.compress.random_k import RandomK
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sign import Sign
from stretto.compress.top_k import TopK
from stretto.compress.warm_up import WarmUp
from stretto.distributing import distribute, engine_of
from stretto.errors import ConfigurationError, NonFiniteGradient
from stretto.job import Job
from stretto.strategy import Strategy
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.testing import run_jobs

STEPS = 4
FEEDBACK = ErrorFeedback(Sign(block=8))


def strategy(compression: Compression, sync: Any = StaleSynchronous(0), replicas: int = 0) -> Strategy:  # noqa: B008
    return Strategy(aggregate=ParameterServer(2, replicas), sync=sync, compress=compression)


class OneWorker:
    """What one worker pushes, computed without servers."""

    def __init__(self, compression: Compression, rank: int) -> None:
        self.codec: Any = getattr(compression, "codec", compression)
        self.remembers, self.rank = isinstance(compression, ErrorFeedback), rank
        named = [(name, tuple(p.shape)) for name, p in mlp().named_parameters()]
        self.blocks = self.codec.blocks(Layout.of(named))
        self.residual = torch.zeros(self.blocks.num_elements)

    def applied(self, gradient: Tensor, number: int) -> Tensor:
        keys = RandomKeys.of_round(number, self.rank)
        values = self.residual + gradient
        payload = self.codec.encode(values, self.blocks, keys)
        decoded: Tensor = self.codec.decode(payload, self.blocks, keys)
        if self.remembers:
            self.residual = values - decoded
        return decoded


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([each.detach().flatten() for each in tensors])


def one_after_the_other(compression: Compression, size: int) -> list[Tensor]:
    """One process does what servers do with a bound of 0."""
    model, workers = mlp(), [OneWorker(compression, rank) for rank in range(size)]
    optimizer, rounded = sgd(model.parameters()), mlp()
    to_16_bits = workers[0].codec.payload_dtype if isinstance(workers[0].codec, Float16 | BFloat16) else None
    seen = []
    for number in range(STEPS):
        for mine, theirs in zip(rounded.parameters(), model.parameters(), strict=True):
            mine.data.copy_(theirs.data if to_16_bits is None else theirs.data.to(to_16_bits))
        gradients = []
        for rank in range(size):
            rounded.zero_grad()
            backward(rounded, rank, number)
            gradients.append(flat([p.grad for p in rounded.parameters() if p.grad is not None]))
        for worker, gradient in zip(workers, gradients, strict=True):
            parts = torch.split(worker.applied(gradient, number), [p.numel() for p in model.parameters()])
            for parameter, part in zip(model.parameters(), parts, strict=True):
                parameter.grad = part.view(parameter.shape)
            optimizer.step()
        seen.append(flat(list(model.parameters())))
    return seen if to_16_bits is None else [each.to(to_16_bits).float() for each in seen]


@pytest.mark.parametrize(
    "compression",
    [
        FEEDBACK, ErrorFeedback(OneBit()), ErrorFeedback(RandomK(0.2)), QSGD(bucket=8), ErrorFeedback(Float16()),
        *(pytest.param(one, marks=pytest.mark.slow) for one in (ErrorFeedback(TopK(0.2)), Float16(), BFloat16())),
    ],
    ids=repr,
)  # fmt: skip
def test_servers_apply_what_the_codec_has_written_and_workers_keep_the_rest(compression: Compression) -> None:
    """Bit for bit what one process computes."""

    def program(job: Job) -> list[Tensor]:
        model = mlp(job.rank)
        _, optimizer = distribute(model, sgd(model.parameters()), strategy(compression), job=job)
        return [flat(each) for each in train(job, model, optimizer, range(STEPS))]

    expected = one_after_the_other(compression, 3)
    for seen in run_jobs(3, program):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(seen, expected, strict=True))


class Vector(nn.Module):
    """One parameter; the gradient is what the call is given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(60))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.w * gradient).sum()


def start(job: Job, compression: Compression, sync: Any) -> tuple[Vector, torch.optim.Optimizer]:
    model = Vector()
    return distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), strategy(compression, sync), job=job)


def step_by(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(model(gradient))
    optimizer.step()


def left_over(model: nn.Module) -> Tensor:
    return remembered(model).own.get("w", {}).get(RESIDUAL, torch.zeros(60))


@pytest.mark.parametrize(
    ("codec", "sync"),
    [
        (Sign(block=8), Asynchronous()),
        (TopK(0.1), StaleSynchronous(2)),
        (OneBit(), Asynchronous()),
        *(pytest.param(codec, sync, marks=pytest.mark.slow) for codec, sync in [
            (Sign(block=8), StaleSynchronous(2)), (TopK(0.1), Asynchronous()), (OneBit(), StaleSynchronous(2)),
        ]),
    ],
    ids=repr,
)  # fmt: skip
def test_law_5_what_was_applied_and_what_is_left_over_is_what_was_given(codec: Codec, sync: Any) -> None:
    def program(job: Job) -> tuple[Tensor, Tensor, Tensor]:
        model, optimizer = start(job, ErrorFeedback(codec), sync)
        given = torch.zeros(60)
        for number in range(8):
            gradient = torch.randn(60, generator=torch.Generator().manual_seed(100 * job.rank + number))
            given += gradient
            step_by(model, optimizer, gradient)
        job.barrier()
        engine_of(model).training.before_save()
        return given, left_over(model), model.w.detach().clone()

    results = run_jobs(3, program)
    given, left = (torch.stack([result[index] for result in results]).sum(0) for index in (0, 1))
    for _, _, values in results:
        assert torch.allclose(left - values, given, atol=1e-4)
    assert float(left.abs().max()) > 0.01


def test_of_a_push_that_came_too_late_nothing_is_left_over_and_nothing_of_earlier_ones_is_lost() -> None:
    """Rank 2 takes one step with the others, then falls behind by one, and its gradient is discarded."""
    together, done = threading.Barrier(3, timeout=PATIENCE_S), threading.Event()
    job_done = threading.Barrier(2, timeout=PATIENCE_S)

    def program(job: Job) -> tuple[Tensor, Tensor] | None:
        model, optimizer = start(job, ErrorFeedback(TopK(0.1)), BackupWorkers(1))
        gradient = torch.linspace(-1, 1, 60) * (job.rank + 1)
        if job.rank == 2:
            residual = torch.linspace(0, 1, 60)
            engine_of(model).training._encoding._everything().copy_(residual)  # type: ignore[attr-defined]
            together.wait()
            assert done.wait(PATIENCE_S)
            step_by(model, optimizer, 1000 * gradient)
            assert not job.ledger.staleness  # it was discarded
            return residual, left_over(model)
        together.wait()
        for _ in range(3):
            step_by(model, optimizer, gradient)
        job_done.wait()
        done.set()
        return None

    before, after = run_jobs(3, program)[2]
    assert torch.equal(before, after)


class TwoGroups(nn.Module):
    """Two parameters, each a range of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(60)) for _ in range(2))


def test_a_range_that_came_too_late_is_settled_before_its_next_push_while_another_one_is_undecided() -> None:
    def program(job: Job) -> None:
        model = TwoGroups()
        optimizer = torch.optim.SGD([{"params": [model.a]}, {"params": [model.b]}], lr=1.0)
        distribute(model, optimizer, strategy(ErrorFeedback(TopK(0.1)), BackupWorkers(1)), job=job)
        training: Any = engine_of(model).training
        late, waiting = training._ranges
        encoding, first, second = training._encoding, torch.linspace(-1, 1, 60), torch.linspace(0, 1, 60)
        fates = [Future[PushTaken](), Future[PushTaken]()]
        for each in (late, waiting):
            encoding.payload(each, first, 0, 0)
        fates[0].set_result(PushTaken(late.index, 0, 3, False))
        training._unsettled.append(Step(0, [late, waiting], [0, 0], fates, [], 0, 0))
        training._settle()
        assert not encoding._of(late).any() and encoding._of(waiting).any()
        for each in (late, waiting):
            encoding.payload(each, second, 1, 1)
        kept = encoding._of(late).clone()
        fates[1].set_result(PushTaken(waiting.index, 0, 3, True))
        training._settle()
        assert torch.equal(encoding._of(late), kept) and torch.equal(kept, second * (second < second[54]))
        assert not training._unsettled

    run_jobs(2, program)


@pytest.mark.parametrize(
    ("compression", "up", "down"),
    [
        (FEEDBACK, None, 4 * 37),
        (ErrorFeedback(TopK(0.2)), None, 4 * 37),
        (Float16(), 2 * 37, 2 * 37),
        (ErrorFeedback(BFloat16()), 2 * 37, 2 * 37),
        (WarmUp(100, FEEDBACK), 4 * 37, 4 * 37),
        (ByParameter(("0.*", Float16()), ("*", NoCompression())), 2 * 30 + 4 * 7, 2 * 30 + 4 * 7),
    ],
    ids=repr,
)
def test_what_travels_each_way_is_what_the_page_says(
    compression: Compression, up: int | None, down: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    def program(job: Job) -> None:
        model = mlp(job.rank)
        _, optimizer = distribute(model, sgd(model.parameters()), strategy(compression), job=job)
        train(job, model, optimizer, range(STEPS))

    run_jobs(2, program)
    if up is None:
        up = OneWorker(compression, 0).codec.num_bytes(OneWorker(compression, 0).blocks)
    assert moved == {"up": 2 * STEPS * up, "down": 2 * (STEPS + 1) * down}  # values are pulled once more, to begin with


@pytest.mark.parametrize("compression", [FEEDBACK, Float16(), pytest.param(QSGD(bucket=8), marks=pytest.mark.slow)], ids=repr)
def test_law_9_what_was_saved_resumes_with_the_same_bits(compression: Compression, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def program(job: Job, resumes: bool) -> Tensor:
        model = mlp(job.rank + 10 * resumes)
        _, optimizer = distribute(model, sgd(model.parameters()), strategy(compression), job=job)
        if resumes:
            assert not load(path, model, optimizer, job=job).lost
        else:
            train(job, model, optimizer, range(3))
            save(path, model, optimizer, job=job)
        train(job, model, optimizer, range(3, 6))
        return flat(values_of(model))

    without, resumed = run_jobs(3, program, False), run_jobs(3, program, True)
    assert all(torch.equal(one, other) for one, other in zip(without, resumed, strict=True))


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_server_that_dies_changes_no_bit_if_there_is_a_copy(killed: int) -> None:
    def program(job: Job, kills: bool) -> Tensor:
        model = mlp()
        _, optimizer = distribute(model, sgd(model.parameters()), strategy(FEEDBACK, replicas=1), job=job)
        train(job, model, optimizer, range(3))
        if kills and job.rank == 0:
            kill_server(job, killed, of=2)
            killing.set()
        train(job, model, optimizer, range(3, 6))
        return flat(values_of(model))

    killing = threading.Event()
    without, disturbed = run_jobs(2, program, False), run_jobs(2, program, True)
    assert killing.is_set()
    assert all(torch.equal(one, without[0]) for one in disturbed)


WARMING = WarmUp(2, ErrorFeedback(TopK(0.2)))


@pytest.mark.parametrize(
    ("sync", "compression"),
    [
        (Asynchronous(staleness_aware=True), FEEDBACK),
        (SoftSync(1), WARMING),
        (BackupWorkers(1), FEEDBACK),
        pytest.param(Asynchronous(staleness_aware=True), WARMING, marks=pytest.mark.slow),
        pytest.param(SoftSync(1), FEEDBACK, marks=pytest.mark.slow),
        pytest.param(BackupWorkers(1), WARMING, marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_every_answer_trains(sync: Any, compression: Compression) -> None:
    def program(job: Job) -> Tensor:
        model = mlp()
        before = flat(values_of(model))
        _, optimizer = distribute(model, sgd(model.parameters()), strategy(compression, sync), job=job)
        train(job, model, optimizer, range(6))
        return flat(values_of(model)) - before

    assert all(float(moved.abs().max()) > 1e-3 and bool(moved.isfinite().all()) for moved in run_jobs(3, program))


def test_a_gradient_that_is_not_finite_is_refused_before_anything_is_pushed() -> None:
    def program(job: Job) -> float:
        model, optimizer = start(job, FEEDBACK, Asynchronous())
        with pytest.raises(NonFiniteGradient, match="w"):
            step_by(model, optimizer, torch.full((60,), float("nan")))
        step_by(model, optimizer, torch.ones(60))
        job.barrier()
        engine_of(model).training.before_save()
        return float(model.w.detach().max())

    assert run_jobs(2, program) == [-2.0, -2.0]


@pytest.mark.parametrize("compression", [EF21(TopK(0.1)), Sign(vote=True), WarmUp(3, EF21(TopK(0.1)))], ids=repr)
def test_what_needs_a_mean_of_all_workers_is_refused_when_the_strategy_is_made(compression: Compression) -> None:
    with pytest.raises(ConfigurationError, match="with servers that step"):
        strategy(compression, Asynchronous())
