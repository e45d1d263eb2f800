"""The laws for strategies that lose something on the way.

    3   all replicas hold the same bits after every step
    4   scheduling and bucketing change nothing at all: every tensor is coded by itself
    5   error feedback conserves: what was handed out, plus what is left over, is what was put in
    8   bytes on the wire equal the formula
    9   save, kill, resume: the same bits as never having stopped
    +   a round that comes to nothing leaves no trace in what is remembered
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laws.cases import Case, plain_step
from laws.strategies import COMPRESSIONS
from laws.training import assert_same_bits, build, digest, share, state_of
from stretto.aggregate.all_reduce import AllReduce
from stretto.checkpoint import load, save
from stretto.compress.codec import Compression
from stretto.compress.error_feedback import RESIDUAL, ErrorFeedback
from stretto.compress.layout import Layout
from stretto.compress.none import NoCompression
from stretto.compress.sign import Sign
from stretto.compress.state import SERVER
from stretto.compress.top_k import TopK
from stretto.distributing import distribute, engine_of
from stretto.parsing import parse
from stretto.schedule.orders import AfterBackward, Buckets, Schedule, WaitFree
from stretto.session import Job
from stretto.strategy import Strategy
from stretto.testing import run_jobs

SIZES = (1, 2, 3, 4, 7)
STEPS = 5
FEEDBACK = [one for one in COMPRESSIONS if isinstance(one, ErrorFeedback)]


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 1))


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


CASE = Case("wide", wide, optimizer=plain_sgd)


def strategy_of(compression: Compression, schedule: Schedule, algorithm: str = "auto") -> Strategy:
    return Strategy(aggregate=AllReduce(algorithm), compress=compression, schedule=schedule)


Sent = dict[str, int]  # kind of collective -> payload bytes


@cache
def together(strategy: Strategy, size: int, steps: int = STEPS) -> list[tuple[list[str], list[Sent]]]:
    """For every worker: digests of its parameters after each step, and payload bytes it sent in each."""
    return run_jobs(size, train, strategy, steps)


def sent_by(job: Job) -> Sent:
    out: Sent = {}
    for (kind, _), num_bytes in job.ledger.sent.items():
        out[kind] = out.get(kind, 0) + num_bytes
    return out


def train(job: Job, strategy: Strategy, steps: int) -> tuple[list[str], list[Sent]]:
    model = build(CASE, seed=job.rank)
    _, optimizer = distribute(model, CASE.optimizer(model), strategy, job=job)
    digests, sent = [], []
    for number in range(steps):
        before = sent_by(job)
        plain_step(model, share(CASE.batch(number), job.rank, job.world_size), number)
        sent.append({kind: num_bytes - before.get(kind, 0) for kind, num_bytes in sent_by(job).items()})
        optimizer.step()
        optimizer.zero_grad()
        digests.append(digest(state_of(model)))
    return digests, sent


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_what_is_printed_reads_back(compression: Compression) -> None:
    strategy = Strategy(compress=compression)
    assert parse(repr(strategy)) == strategy and hash(parse(repr(strategy))) == hash(strategy)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_law_3_all_replicas_hold_the_same_bits_after_every_step(compression: Compression, size: int) -> None:
    runs = together(strategy_of(compression, Buckets(bytes=2000, first_bytes=200)), size)
    assert len(set(runs[0][0])) == STEPS  # the steps did change something
    for digests, _ in runs[1:]:
        assert digests == runs[0][0]


@pytest.mark.parametrize("schedule", [AfterBackward(), WaitFree()], ids=repr)
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_law_4_scheduling_and_bucketing_change_nothing(compression: Compression, schedule: Schedule) -> None:
    """Three workers, added up in the order of ranks where payloads are summed."""
    algorithm = "all_to_all" if compression.refusal("all_to_all") is None else "auto"
    buckets = strategy_of(compression, Buckets(bytes=2000, first_bytes=200), algorithm)
    assert together(strategy_of(compression, schedule, algorithm), 3)[0][0] == together(buckets, 3)[0][0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("compression", FEEDBACK, ids=repr)
def test_law_5_error_feedback_conserves(compression: Compression, size: int) -> None:
    """In the mean over workers: sum of handed out + residuals + the server's residuals = sum of gradients."""

    def program(job: Job) -> tuple[Tensor, Tensor, Tensor]:
        model = build(CASE, seed=0)
        distribute(model, CASE.optimizer(model), strategy_of(compression, Buckets(bytes=2000, first_bytes=200)), job=job)
        given = handed_out = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        for number in range(2 * STEPS):
            generator = torch.Generator().manual_seed(1000 * job.rank + number)
            gradients = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
            _backward_with(model, gradients)
            given = given + torch.cat([g.flatten() for g in gradients])
            handed_out = handed_out + torch.cat([_gradient(p).flatten() for p in model.parameters()])
            engine_of(model).stepped()
            model.zero_grad()
        return given, handed_out, _left_over(model, size)

    results = run_jobs(size, program)
    given, left = (torch.stack([result[index] for result in results]).mean(0) for index in (0, 2))
    for _, handed_out, _ in results:
        assert torch.allclose(handed_out + left, given, atol=1e-4)
    assert float(left.abs().max()) > 0  # something was lost on the way, and is remembered


def _backward_with(model: nn.Module, gradients: list[Tensor]) -> None:
    """A backward that gives every parameter the gradient wanted."""
    out = model(torch.zeros(2, 6)).sum() * 0.0
    terms = [(parameter * gradient).sum() for parameter, gradient in zip(model.parameters(), gradients, strict=True)]
    loss: Tensor = out + torch.stack(terms).sum()
    torch.autograd.backward(loss)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.double()


def _left_over(model: nn.Module, size: int) -> Tensor:
    """This worker's share of the mean: its residual, and P times what it keeps of the server's."""
    own, _ = engine_of(model).memory()
    parts = []
    for name, parameter in model.named_parameters():
        kinds = own.get(name, {})
        zeros = torch.zeros(parameter.shape)
        parts.append((kinds.get(RESIDUAL, zeros).double() + size * kinds.get(SERVER, zeros).double()).flatten())
    return torch.cat(parts)


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_law_8_bytes_equal_the_formula(compression: Compression, size: int) -> None:
    """One bucket per compression, by ring where payloads are summed. (`auto` may sum by something else: not counted there.)"""
    algorithm = _fixed(compression)
    groups: dict[Compression, list[tuple[str, tuple[int, ...]]]] = {}
    for name, parameter in reversed(list(build(CASE, 0).named_parameters())):
        groups.setdefault(compression.for_parameter(name, tuple(parameter.shape)), []).append((name, tuple(parameter.shape)))
    for rank, (_, sent) in enumerate(together(strategy_of(compression, AfterBackward(), algorithm), size)):
        sums = {one: one.bytes_sent(Layout.of(group), rank, size, algorithm) for one, group in groups.items()}
        others = [num_bytes for one, num_bytes in sums.items() if one.refusal("ring") is not None]
        if algorithm == "ring":
            num_notes = 5 + sum(map(len, groups.values()))  # the closing bucket: five notes, and one for each parameter
            closing = NoCompression().bytes_sent(Layout.of([("", (num_notes,))]), rank, size, "ring")
            assert sent[-1]["all_reduce"] == sum(num_bytes or 0 for num_bytes in sums.values()) + closing
        elif None not in others:
            found = sent[-1].get("all_gather", 0) + sent[-1].get("all_to_all", 0)
            assert found == sum(num_bytes or 0 for num_bytes in others) > 0


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_law_9_save_and_load_resume_with_the_same_bits(compression: Compression, size: int, tmp_path: Any) -> None:
    strategy = strategy_of(compression, Buckets(bytes=2000, first_bytes=200), _fixed(compression))

    def program(job: Job, numbers: range) -> dict[str, Tensor]:
        model = build(CASE, seed=job.rank + numbers.start)
        optimizer = CASE.optimizer(model)
        distribute(model, optimizer, strategy, job=job)
        if numbers.start:
            resumed = load(tmp_path / "saved.pt", model, optimizer)
            assert not resumed.lost, resumed.lost
        for number in numbers:
            plain_step(model, share(CASE.batch(number), job.rank, job.world_size), number)
            optimizer.step()
            optimizer.zero_grad()
        save(tmp_path / "saved.pt", model, optimizer)
        return state_of(model)

    whole = run_jobs(size, program, range(6))
    run_jobs(size, program, range(3))
    for rank, state in enumerate(run_jobs(size, program, range(3, 6))):
        assert_same_bits(state, whole[rank])


def _fixed(compression: Compression) -> str:
    """An all-reduce that two jobs choose alike, where there is a choice."""
    return "ring" if compression.refusal("ring") is None else "auto"


@pytest.mark.parametrize("compression", [ErrorFeedback(Sign(block=64)), ErrorFeedback(TopK(0.05))], ids=repr)
@pytest.mark.parametrize("size", [1, 3])
def test_law_9_the_optimizers_own_state_dict_resumes_with_the_same_bits(compression: Compression, size: int) -> None:
    strategy = strategy_of(compression, Buckets(bytes=2000, first_bytes=200))
    saved: dict[int, Any] = {}

    def program(job: Job, numbers: range) -> dict[str, Tensor]:
        model = build(CASE, seed=job.rank + numbers.start)
        optimizer = CASE.optimizer(model)
        distribute(model, optimizer, strategy, job=job)
        if numbers.start:
            model.load_state_dict(saved[job.rank]["model"])
            optimizer.load_state_dict(saved[job.rank]["optimizer"])
        for number in numbers:
            plain_step(model, share(CASE.batch(number), job.rank, job.world_size), number)
            optimizer.step()
            optimizer.zero_grad()
        if numbers.stop == 3:
            saved[job.rank] = {"model": state_of(model), "optimizer": optimizer.state_dict()}
        return state_of(model)

    whole = run_jobs(size, program, range(6))
    run_jobs(size, program, range(3))
    for rank, state in enumerate(run_jobs(size, program, range(3, 6))):
        assert_same_bits(state, whole[rank])


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_a_round_with_a_bad_gradient_leaves_no_trace(compression: Compression, size: int) -> None:
    """One worker's batch has a NaN: all gradients are NaN on all workers, and going on is as if it had not been."""

    def program(job: Job) -> tuple[list[str], list[str]]:
        return train_with(job, True), train_with(job, False)  # in one job: `auto` chooses once

    def train_with(job: Job, with_fault: bool) -> list[str]:
        model = build(CASE, seed=0)
        _, optimizer = distribute(model, CASE.optimizer(model), strategy_of(compression, WaitFree(), _fixed(compression)), job=job)
        digests = []
        for number in range(4):
            if with_fault and number == 2:
                before = engine_of(model).rounds
                _step_with_nan(model, job)
                engine_of(model).rounds = before  # random numbers are drawn by the number of the round
            plain_step(model, share(CASE.batch(number), job.rank, job.world_size), number)
            optimizer.step()
            optimizer.zero_grad()
            digests.append(digest(state_of(model)))
        return digests

    for with_fault, without in run_jobs(size, program):
        assert with_fault == without


def _step_with_nan(model: nn.Module, job: Job) -> None:
    batch = torch.full((4, 6), float("nan") if job.rank == job.world_size - 1 else 0.5)
    plain_step(model, batch, 0)
    for parameter in model.parameters():
        assert parameter.grad is not None and bool(parameter.grad.isnan().all())
    model.zero_grad()
