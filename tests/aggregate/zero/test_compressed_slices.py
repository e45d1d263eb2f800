"""Codecs on the reduce-scatter and on gathered weights; optimizer state in host memory; LARS and LAMB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import stretto
from aggregate.zero.sliced import SMALL, STAGES, STEPS, adamw, close, go_on, net, same_bits, train, values
from stretto import (
    E3M0,
    LAMB,
    LARS,
    QSGD,
    AllReduce,
    BFloat16,
    ByParameter,
    Dynamic8,
    ErrorFeedback,
    Float16,
    Int8,
    NoCompression,
    OneBit,
    PowerSGD,
    Replicated,
    Sign,
    Strategy,
    TernGrad,
    TopK,
    Zero,
)
from stretto.compress.codec import Compression
from stretto.distributing import distribute, engine_of
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.schedule.priority import Priority
from stretto.testing import run_jobs

CODECS: list[Compression] = [
    Float16(),
    BFloat16(),
    Int8(block=16),
    Dynamic8(block=32),
    QSGD(bits=8, bucket=32),
    TernGrad(),
    ErrorFeedback(Int8(block=16)),
    ErrorFeedback(E3M0(block=16)),
    ErrorFeedback(Sign(block=16)),
    ErrorFeedback(OneBit()),
    ErrorFeedback(BFloat16()),
    ByParameter(("*.bias", NoCompression()), ("0.*", BFloat16()), ("*", ErrorFeedback(Sign(block=16)))),
]
stages = pytest.mark.parametrize("stage", STAGES)
every_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)


def strategy(stage: int, compress: Compression | None = None, schedule: Any = SMALL, **options: Any) -> Strategy:
    shard = Zero(stage, **options) if stage else Replicated()
    return Strategy(aggregate=AllReduce(), compress=compress or NoCompression(), schedule=schedule, shard=shard)


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@every_codec
def test_two_workers_have_the_bits_of_replicated_compressed_training(stage: int, codec: Compression) -> None:
    """Two workers gather payloads where all replicas are to have the mean: then nothing is encoded twice there either."""
    plain = run_jobs(2, lambda job: train(job, strategy(0, codec), sgd))
    for mine in run_jobs(2, lambda job: train(job, strategy(stage, codec), sgd)):
        assert same_bits(mine, plain[0])


@pytest.mark.parametrize("size", [1, 3])
@every_codec
def test_all_replicas_hold_the_same_bits(codec: Compression, size: int) -> None:
    first, *others = run_jobs(size, lambda job: train(job, strategy(2, codec), sgd))
    assert all(same_bits(first, other) for other in others)
    assert all(bool(value.isfinite().all()) for value in first)


@every_codec
def test_bytes_of_gradients_are_those_of_one_phase(codec: Compression) -> None:
    """A payload of each slice goes to its owner: (P-1)/P of the payload of the whole, to one block per slice and worker."""
    size, num_steps = 4, 2

    def program(job: Job) -> int:
        model = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 3))
        optimizer = sgd(model)
        distribute(model, optimizer, strategy(1, codec, stretto.AfterBackward()), job=job)
        before = job.ledger.sent_by("reduce_scatter") + job.ledger.sent_by("all_to_all")
        go_on(job, model, optimizer, range(num_steps))
        return job.ledger.sent_by("reduce_scatter") + job.ledger.sent_by("all_to_all") - before

    num_elements = 6 * 64 + 64 + 64 * 64 + 64 + 64 * 3 + 3
    for sent in run_jobs(size, program):
        assert 0 < sent < num_steps * 4 * num_elements * (size - 1) / size
        if isinstance(codec, (Float16, BFloat16)):
            assert abs(sent - num_steps * 2 * num_elements * (size - 1) / size) <= 2 * num_steps * size


def test_error_feedback_conserves() -> None:
    """What was handed out and what is left over are what was put in: by SGD without momentum the weights show the former."""
    size, rate = 3, 0.1

    def program(job: Job) -> tuple[Tensor, Tensor, Tensor]:
        model = nn.Linear(40, 5, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = SGD(model.parameters(), lr=rate)
        distribute(model, optimizer, strategy(2, ErrorFeedback(Sign(block=16))), job=job)
        given = torch.zeros(5, 40)
        for step in range(5):
            gradient = torch.randn(5, 40, generator=torch.Generator().manual_seed(10 * step + job.rank))
            given += gradient
            torch.autograd.backward((model.weight * gradient).sum())
            optimizer.step()
            optimizer.zero_grad()
        residual = engine_of(model).training.state().own["weight"]["residual"]
        return given, residual.view(5, 40), model.weight.detach() / -rate

    found = run_jobs(size, program)
    given, residual = (torch.stack([each[place] for each in found]).mean(0) for place in (0, 1))
    torch.testing.assert_close(found[0][2] + residual, given, rtol=1e-4, atol=1e-4)


@every_codec
def test_save_and_load_go_on_with_the_same_bits(codec: Compression, tmp_path: Any) -> None:
    _resumes(strategy(2, codec), strategy(1, codec), sgd, tmp_path)


def _resumes(first: Strategy, second: Strategy, make: Callable[[nn.Module], Optimizer], tmp_path: Any) -> None:
    """As if it had never stopped: three workers, `second` from the middle on."""

    def program(job: Job, how: Strategy, steps: range) -> list[Tensor]:
        model = net()
        optimizer = make(model)
        distribute(model, optimizer, how, job=job)
        if steps.start:
            stretto.load(tmp_path / "saved.pt", model, optimizer, job=job)
        go_on(job, model, optimizer, steps)
        stretto.save(tmp_path / "saved.pt", model, optimizer, job=job)
        return values(model)

    whole = run_jobs(3, program, first, range(6))
    (tmp_path / "saved.pt").unlink()
    run_jobs(3, program, first, range(3))
    for mine in run_jobs(3, program, second, range(3, 6)):
        assert same_bits(mine, whole[0])


# -- weights ----------------------------------------------------------------------------------------------------------


@stages
@pytest.mark.parametrize(
    "codec", [Int8(block=16), Dynamic8(block=32), BFloat16(), Float16(), BFloat16(stochastic=True)], ids=repr
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_are_rounded_on_all_workers_alike_and_the_owners_are_not(stage: int, codec: Compression, size: int) -> None:
    def program(job: Job) -> tuple[list[Tensor], list[Tensor]]:
        model = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage, weights=codec), job=job)
        go_on(job, model, optimizer, range(STEPS))
        training: Any = engine_of(model).training
        return values(model), list(training._unrounded().values())

    found = run_jobs(size, program)
    shown, kept = found[0]
    for others, theirs in found[1:]:
        assert same_bits(shown, others) and same_bits(kept, theirs)
    plain = run_jobs(size, lambda job: train(job, strategy(0)))[0]
    assert not same_bits(shown, plain)
    assert close(shown, plain, 0.1)


def test_steps_that_are_too_small_for_the_codec_add_up_in_the_owners_weights() -> None:
    """A step of 1e-4 of a weight of 1 is nothing in bfloat16, and 100 of them are not."""

    def program(job: Job) -> float:
        model = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = SGD(model.parameters(), lr=1e-4)
        distribute(model, optimizer, strategy(2, weights=BFloat16()), job=job)
        for _ in range(100):
            torch.autograd.backward(model.weight.sum())
            optimizer.step()
            optimizer.zero_grad()
        return float(model.weight.detach()[0, 0])

    assert run_jobs(2, program) == [pytest.approx(0.99, abs=0.004)] * 2


def test_unrounded_weights_are_saved_and_a_program_that_writes_weights_is_heard(tmp_path: Any) -> None:
    _resumes(strategy(2, weights=Int8(block=16)), strategy(1, weights=Int8(block=16)), adamw, tmp_path)

    def program(job: Job) -> list[Tensor]:
        model = net()
        optimizer = SGD(model.parameters(), lr=0.0)
        distribute(model, optimizer, strategy(2, weights=BFloat16()), job=job)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(3.0)
        go_on(job, model, optimizer, range(1))
        return values(model)

    assert all(bool((value == 3.0).all()) for value in run_jobs(2, program)[0])


@pytest.mark.parametrize("schedule", [SMALL, Priority(partition=256)], ids=repr)
def test_offload_on_a_cpu_and_all_options_at_once(schedule: Any) -> None:
    plain = run_jobs(2, lambda job: train(job, strategy(0)))
    for mine in run_jobs(2, lambda job: train(job, strategy(2, offload="cpu"))):
        assert same_bits(mine, plain[0])
    how = strategy(2, ErrorFeedback(Int8(block=16)), schedule, offload="cpu", weights=Int8(block=16))
    first, second = run_jobs(2, lambda job: train(job, how, steps=range(8)))
    assert same_bits(first, second) and close(first, run_jobs(2, lambda job: train(job, strategy(0), steps=range(8)))[0], 0.1)


# -- LARS and LAMB ----------------------------------------------------------------------------------------------------


@stages
@pytest.mark.parametrize("size", [3, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "make",
    [
        lambda m: LARS(m.parameters(), lr=0.5, trust_coefficient=0.02),
        lambda m: LARS(m.parameters(), lr=0.1, adapt="all", decay="all", weight_decay=0.01),
        lambda m: LAMB(m.parameters(), lr=0.01),
        lambda m: LAMB(m.parameters(), lr=0.01, adapt="all", norm_bounds=(0.1, 2.0)),
    ],
    ids=["LARS", "LARS all", "LAMB", "LAMB all"],
)
def test_layers_that_are_cut_have_the_norms_of_whole_ones(stage: int, size: int, make: Any, tmp_path: Any) -> None:
    plain = run_jobs(size, lambda job: train(job, strategy(0), make))
    runs = run_jobs(size, lambda job: train(job, strategy(stage), make))
    assert all(same_bits(runs[0], mine) for mine in runs[1:]) and close(runs[0], plain[0], 2e-6)
    if size == 3:
        _resumes(strategy(stage), strategy(stage), make, tmp_path)


def test_layerwise_steps_across_the_barrier() -> None:
    make = lambda m: LAMB(m.parameters(), lr=0.01)  # noqa: E731
    plain = run_jobs(3, lambda job: train(job, strategy(0), make, steps=range(8)))
    runs = run_jobs(3, lambda job: train(job, strategy(2, schedule=Priority(partition=256)), make, steps=range(8)))
    assert all(same_bits(runs[0], mine) for mine in runs[1:]) and close(runs[0], plain[0], 2e-6)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [TopK(0.1), ErrorFeedback(PowerSGD(2)), Sign(vote=True), ErrorFeedback(TopK(0.1))], ids=repr)
def test_codecs_that_cannot_be_sliced_are_refused(codec: Compression) -> None:
    with pytest.raises(ConfigurationError, match=r"shard=Zero.*\nWrite a codec of blocks"):
        strategy(1, codec)


@pytest.mark.parametrize("codec", [TopK(0.1), ErrorFeedback(Int8()), Sign(), PowerSGD(2), NoCompression()], ids=repr)
def test_codecs_in_which_weights_cannot_be_sent_are_refused(codec: Compression) -> None:
    with pytest.raises(ConfigurationError, match=r"weights=.*\nWrite weights=Int8"):
        strategy(2, weights=codec)
