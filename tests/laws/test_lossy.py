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

from engine.worker import remembered
from laws.cases import Case, plain_step
from laws.strategies import COMPRESSIONS
from laws.training import build, digest, share, state_of
from stretto.aggregate.all_reduce import AllReduce
from stretto.checkpoint import load, save
from stretto.compress.codec import Compression
from stretto.compress.error_feedback import RESIDUAL, ErrorFeedback
from stretto.compress.layout import Layout
from stretto.compress.none import NoCompression
from stretto.compress.state import SERVER
from stretto.distributing import distribute, engine_of
from stretto.job import Job
from stretto.parsing import parse
from stretto.plan.choose import Choices
from stretto.plan.costs import LinkCosts
from stretto.schedule.orders import AfterBackward, Buckets, WaitFree
from stretto.strategy import Schedule, Strategy
from stretto.testing import run_jobs

SIZES = [pytest.param(size, marks=[pytest.mark.slow] if size in (2, 4) else []) for size in (1, 2, 3, 4, 7)]
STEPS = 5
HALF = 3  # what is saved then is of one round more than any warm-up has
FEW = 3  # of seven workers: one more than any warm-up has
ONE_IN_THREE = [  # the others are as sure, and run in `make test-slow`
    pytest.param(one, id=repr(one), marks=[pytest.mark.slow] if number % 3 else []) for number, one in enumerate(COMPRESSIONS)
]
FEEDBACK = [one for one in COMPRESSIONS if isinstance(one, ErrorFeedback)]


def begin(job: Job, strategy: Strategy, seed: int = 0, auto: str = "ring") -> tuple[nn.Module, torch.optim.Optimizer]:
    """`auto` is settled beforehand: trying algorithms out takes longer than a test, and may end differently in every job."""
    job.choices = Choices([0], [auto], LinkCosts(alpha=1e-5, beta=1e-9, gamma=1e-9))
    model = build(CASE, seed)
    return distribute(model, CASE.optimizer(model), strategy, job=job)


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 1))


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


CASE = Case("wide", wide, optimizer=plain_sgd)


def strategy_of(compression: Compression, schedule: Schedule, algorithm: str = "auto") -> Strategy:
    return Strategy(aggregate=AllReduce(algorithm), compress=compression, schedule=schedule)


Sent = dict[str, int]  # kind of collective -> payload bytes


@cache
def together(strategy: Strategy, size: int, auto: str = "ring") -> list[tuple[list[str], list[Sent]]]:
    """For every worker: digests of its parameters after each step, and payload bytes it sent in each."""
    return run_jobs(size, train, strategy, auto, steps_of(size))


def steps_of(size: int) -> int:
    return STEPS if size < 7 else FEW


def sent_by(job: Job) -> Sent:
    out: Sent = {}
    for (kind, _), num_bytes in job.ledger.sent.items():
        out[kind] = out.get(kind, 0) + num_bytes
    return out


def train(job: Job, strategy: Strategy, auto: str, steps: int) -> tuple[list[str], list[Sent]]:
    model, optimizer = begin(job, strategy, job.rank, auto)
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


def by_ring(compression: Compression) -> str:
    """Payloads are summed by ring, with hops where there is a choice."""
    return "ring" if compression.refusal("ring") is None else "auto"


IN_RANK_ORDER = "all_to_all"  # payloads that are summed are added up in the order of ranks
WORLDS = [
    pytest.param(1, "ring"),
    pytest.param(2, "ring", marks=pytest.mark.slow),
    pytest.param(3, IN_RANK_ORDER),  # the run that laws 4 and 9 ask about, too
    pytest.param(3, "ring", marks=pytest.mark.slow),
    pytest.param(4, "ring", marks=pytest.mark.slow),
    pytest.param(7, "ring"),  # a few steps only; and the run that law 8 counts the bytes of
]


@pytest.mark.parametrize(("size", "auto"), WORLDS)
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_law_3_all_replicas_hold_the_same_bits_after_every_step(compression: Compression, size: int, auto: str) -> None:
    """In buckets; with seven workers all at once."""
    buckets = strategy_of(compression, Buckets(bytes=2000, first_bytes=200))
    runs = together(buckets if size < 7 else strategy_of(compression, AfterBackward(), by_ring(compression)), size, auto)
    assert len(set(runs[0][0])) == steps_of(size)  # the steps did change something
    for digests, _ in runs[1:]:
        assert digests == runs[0][0]


@pytest.mark.parametrize("schedule", [pytest.param(AfterBackward(), marks=pytest.mark.slow), WaitFree()], ids=repr)
@pytest.mark.parametrize("compression", ONE_IN_THREE)
def test_law_4_scheduling_and_bucketing_change_nothing(compression: Compression, schedule: Schedule) -> None:
    """Three workers."""
    buckets = strategy_of(compression, Buckets(bytes=2000, first_bytes=200))
    one, other = (together(strategy, 3, IN_RANK_ORDER) for strategy in (strategy_of(compression, schedule), buckets))
    assert one[0][0] == other[0][0]


@pytest.mark.parametrize("size", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4, 7))])
@pytest.mark.parametrize("compression", FEEDBACK, ids=repr)
def test_law_5_error_feedback_conserves(compression: Compression, size: int) -> None:
    check_conservation(strategy_of(compression, Buckets(bytes=2000, first_bytes=200)), size)


def check_conservation(strategy: Strategy, size: int) -> None:
    """In the mean over workers: sum of handed out + residuals + the server's residuals = sum of gradients."""

    def program(job: Job) -> tuple[Tensor, Tensor, Tensor]:
        model, _ = begin(job, strategy)
        given = handed_out = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        for number in range(2 * STEPS):
            generator = torch.Generator().manual_seed(1000 * job.rank + number)
            gradients = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
            _backward_with(model, gradients)
            given = given + torch.cat([g.flatten() for g in gradients])
            handed_out = handed_out + torch.cat([_gradient(p).flatten() for p in model.parameters()])
            engine_of(model).before_step(engine_of(model).loop.optimizers[0])
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
    own = remembered(model).own
    parts = []
    for name, parameter in model.named_parameters():
        kinds = own.get(name, {})
        zeros = torch.zeros(parameter.shape)
        parts.append((kinds.get(RESIDUAL, zeros).double() + size * kinds.get(SERVER, zeros).double()).flatten())
    return torch.cat(parts)


@pytest.mark.parametrize("size", [pytest.param(size, marks=[pytest.mark.slow] if size < 7 else []) for size in (2, 3, 4, 7)])
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_law_8_bytes_equal_the_formula(compression: Compression, size: int) -> None:
    """One bucket per compression, by ring where payloads are summed; with and without hops, where there is a choice."""
    algorithm = by_ring(compression)
    groups: dict[Compression, list[tuple[str, tuple[int, ...]]]] = {}
    for name, parameter in reversed(list(build(CASE, 0).named_parameters())):
        groups.setdefault(compression.for_parameter(name, tuple(parameter.shape)), []).append((name, tuple(parameter.shape)))
    for rank, (_, sent) in enumerate(together(strategy_of(compression, AfterBackward(), algorithm), size)):
        expected = [one.bytes_sent(Layout.of(group), rank, size, algorithm) for one, group in groups.items()]
        if None in expected:
            continue  # it depends on the values
        num_notes = 5 + sum(map(len, groups.values()))  # the closing bucket: five notes, and one for each parameter
        closing = NoCompression().bytes_sent(Layout.of([("", (num_notes,))]), rank, size, "ring")
        assert sum(sent[-1].values()) == sum(num_bytes or 0 for num_bytes in expected) + closing


@pytest.mark.parametrize(
    ("size", "auto"),
    [pytest.param(1, IN_RANK_ORDER, marks=pytest.mark.slow), (3, IN_RANK_ORDER), pytest.param(3, "ring", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("compression", ONE_IN_THREE)
def test_law_9_what_was_saved_resumes_with_the_same_bits(compression: Compression, size: int, auto: str, tmp_path: Any) -> None:
    check_resuming(strategy_of(compression, Buckets(bytes=2000, first_bytes=200)), size, auto, tmp_path)


def check_resuming(strategy: Strategy, size: int, auto: str, tmp_path: Any) -> None:
    """By `save` and `load`, and by the state dicts of model and optimizer; law 3 has the run that was never stopped."""
    saved: dict[int, Any] = {}

    def go_on(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> str:
        for number in numbers:
            plain_step(model, share(CASE.batch(number), job.rank, job.world_size), number)
            optimizer.step()
            optimizer.zero_grad()
        return digest(state_of(model))

    def first_half(job: Job) -> str:
        model, optimizer = begin(job, strategy, job.rank, auto)
        half = go_on(job, model, optimizer, range(HALF))
        saved[job.rank] = {"model": state_of(model), "optimizer": optimizer.state_dict()}
        save(tmp_path / "saved.pt", model, optimizer)
        return half

    def second_half(job: Job, from_file: bool) -> str:
        model, optimizer = begin(job, strategy, job.rank + 3, auto)
        if from_file:
            resumed = load(tmp_path / "saved.pt", model, optimizer)
            assert not resumed.lost, resumed.lost
        else:
            model.load_state_dict(saved[job.rank]["model"])
            optimizer.load_state_dict(saved[job.rank]["optimizer"])
        return go_on(job, model, optimizer, range(HALF, STEPS))

    never_stopped = [digests for digests, _ in together(strategy, size, auto)]
    assert run_jobs(size, first_half) == [digests[HALF - 1] for digests in never_stopped]
    for from_file in (True, False):
        assert run_jobs(size, second_half, from_file) == [digests[-1] for digests in never_stopped]


@pytest.mark.parametrize("size", SIZES[0:3:2])
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_a_round_with_a_bad_gradient_leaves_no_trace(compression: Compression, size: int) -> None:
    check_that_a_bad_round_leaves_no_trace(strategy_of(compression, WaitFree()), size)


def check_that_a_bad_round_leaves_no_trace(strategy: Strategy, size: int) -> None:
    """One worker's batch has a NaN: all gradients are NaN on all workers, and going on is as if it had not been."""

    def program(job: Job) -> list[str]:
        model, optimizer = begin(job, strategy, auto=IN_RANK_ORDER)
        digests = []
        for number in range(4):
            if number == 2:
                _step_with_nan(model, job)
            plain_step(model, share(CASE.batch(number), job.rank, job.world_size), number)
            optimizer.step()
            optimizer.zero_grad()
            digests.append(digest(state_of(model)))
        return digests

    for with_fault, (without, _) in zip(run_jobs(size, program), together(strategy, size, IN_RANK_ORDER), strict=True):
        assert with_fault == without[:4]


def _step_with_nan(model: nn.Module, job: Job) -> None:
    batch = torch.full((4, 6), float("nan") if job.rank == job.world_size - 1 else 0.5)
    plain_step(model, batch, 0)
    for parameter in model.parameters():
        assert parameter.grad is not None and bool(parameter.grad.isnan().all())
    model.zero_grad()
