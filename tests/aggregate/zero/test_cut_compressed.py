"""`Zero(3)` with codecs on gradients and on gathered parameters, and with slices in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import stretto
from aggregate.zero.sliced import SMALL, STEPS, adamw, backward, batch, close, go_on, net, same_bits, train, values
from aggregate.zero.test_compressed_slices import CODECS, _resumes, sgd, strategy
from stretto import BFloat16, ByParameter, Dynamic8, ErrorFeedback, Float16, Int8, NoCompression, Sign, WaitFree
from stretto.compress.codec import Compression
from stretto.distributing import distribute, engine_of, gathered, release
from stretto.job import Job
from stretto.testing import run_jobs

WEIGHTS = [Int8(block=16), Dynamic8(block=32), BFloat16(), Float16(), BFloat16(stochastic=True), Int8(block=16, stochastic=True)]
every_weights = pytest.mark.parametrize("codec", WEIGHTS, ids=repr)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_all_workers_have_the_same_model_when_gradients_are_compressed(codec: Compression, size: int) -> None:
    first, *others = run_jobs(size, lambda job: train(job, strategy(3, codec), sgd))
    assert all(same_bits(first, other) for other in others)
    assert close(first, run_jobs(size, lambda job: train(job, strategy(0), sgd))[0], 0.5)


@pytest.mark.parametrize("second", [1, 2, 3])
def test_what_error_feedback_remembers_goes_to_other_stages(second: int, tmp_path: Any) -> None:
    """Slices end elsewhere there, but blocks do not, and residuals are whole on each worker."""
    codec = ErrorFeedback(Sign(block=16))
    _resumes(strategy(3, codec), strategy(second, codec), sgd, tmp_path)


class Seen(torch.autograd.Function):
    """x w^T, which notes the weights that it computes with on its way there and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seen: list[Tensor]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.seen = seen
        seen.append(weight.clone())
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.seen.append(weight.clone())
        return gradient @ weight, gradient.t() @ x, None


class Watched(nn.Linear):
    seen: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return Seen.apply(x, self.weight, self.seen) + self.bias  # type: ignore[no-any-return, no-untyped-call]


def watched() -> Any:
    model: Any = net()
    model[2].__class__ = Watched
    model[2].seen = []
    return model


@every_weights
@pytest.mark.parametrize("size", [1, 2, 3])
def test_forward_and_backward_compute_with_the_same_rounded_weights_on_all_workers(codec: Compression, size: int) -> None:
    def program(job: Job) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        model = watched()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(3, weights=codec), job=job)
        go_on(job, model, optimizer, range(STEPS))
        layer = model[2]
        layer.seen.clear()
        backward(model, batch(0, job))
        with torch.inference_mode():
            model(batch(0, job))
        optimizer.zero_grad()
        with gathered(model, layer):
            exact = layer.weight.detach().clone()
        return [seen.clone() for seen in layer.seen], [exact], values(model)

    found = run_jobs(size, program)
    (forward, again, evaluated), (exact,), shown = found[0]
    assert torch.equal(forward, again)
    if not getattr(codec, "stochastic", False):  # a round has gone by in between: others are drawn
        assert torch.equal(forward, evaluated)
    assert not torch.equal(forward, exact) and torch.allclose(forward, exact, atol=0.02)
    for others, (theirs,), model in found[1:]:
        assert same_bits([forward, again, evaluated, exact], [*others, theirs]) and same_bits(model, shown)
    plain = run_jobs(size, lambda job: train(job, strategy(0)))[0]
    assert not same_bits(shown, plain) and close(shown, plain, 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_too_small_for_what_is_gathered_add_up_in_slices(dtype: torch.dtype, tmp_path: Any) -> None:
    """A step of 1e-4 of a weight of 1 is nothing in bfloat16, and 100 of them are not; also across a checkpoint, a look at the
    weights, and layers that are frozen for a while."""

    def program(job: Job, steps: range, path: Any) -> float:
        model: Any = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).to(dtype)
        for layer in model:
            nn.init.ones_(layer.weight)
        optimizer = SGD(model.parameters(), lr=1e-4)
        distribute(model, optimizer, strategy(3, None, WaitFree(), weights=BFloat16()), job=job)
        if steps.start:
            stretto.load(path, model, optimizer, job=job)
        for step in steps:
            with gathered(model):  # changes nothing
                assert model[0].weight.dtype is dtype
            if step in (30, 40):
                model[1].weight.requires_grad_(step == 40)
            loss = model[0](torch.ones(1, 8, dtype=dtype)).sum() + 0 * model[1](torch.ones(1, 8, dtype=dtype)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        stretto.save(path, model, optimizer, job=job)
        training: Any = engine_of(model).training
        return float(training._unrounded()["0.weight"][0, 0])

    path = tmp_path / "saved.pt"
    assert run_jobs(2, program, range(100), path) == [pytest.approx(0.99, abs=1e-5)] * 2
    run_jobs(2, program, range(50), path)
    assert run_jobs(2, program, range(50, 100), path) == [pytest.approx(0.99, abs=1e-5)] * 2


@every_weights
def test_save_and_resume_have_the_bits_of_never_having_stopped(codec: Compression, tmp_path: Any) -> None:
    how = strategy(3, ErrorFeedback(Int8(block=16)), weights=codec)
    _resumes(how, how, adamw, tmp_path)


def test_what_is_written_while_gathered_counts_and_releasing_gives_unrounded_weights() -> None:
    def program(job: Job) -> tuple[list[Tensor], list[Tensor]]:
        model: Any = net()
        optimizer = AdamW(model.parameters(), lr=0.01)
        distribute(model, optimizer, strategy(3, weights=Int8(block=16)), job=job)
        go_on(job, model, optimizer, range(2))
        before = values(model)
        with gathered(model), torch.no_grad():
            model[0].weight[0, 0] = 0.1234567
        release(model)
        return before, [parameter.detach().clone() for parameter in model.parameters()]

    for before, after in run_jobs(3, program):
        assert float(after[0][0, 0]) == pytest.approx(0.1234567, abs=1e-7)
        before[0][0, 0] = after[0][0, 0]
        assert same_bits(before, after)


def test_each_parameter_its_own_codec_and_all_options_at_once() -> None:
    codec = ByParameter(("*.bias", NoCompression()), ("0.*", BFloat16()), ("*", ErrorFeedback(Int8(block=16))))
    how = strategy(3, codec, SMALL, weights=Int8(block=16), offload="cpu")
    first, second = run_jobs(2, lambda job: train(job, how, steps=range(8)))
    assert same_bits(first, second) and close(first, run_jobs(2, lambda job: train(job, strategy(0), steps=range(8)))[0], 0.1)


def test_bytes_are_a_quarter_with_int8_on_both_ways() -> None:
    size, num_steps, width = 4, 2, 256

    def program(job: Job, how: Any) -> int:
        model = nn.Sequential(nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 3))
        optimizer = sgd(model)
        distribute(model, optimizer, how, job=job)
        go_on(job, model, optimizer, range(1))
        kinds = ("reduce_scatter", "all_to_all", "all_gather")
        before = sum(map(job.ledger.sent_by, kinds))
        go_on(job, model, optimizer, range(num_steps))
        return sum(map(job.ledger.sent_by, kinds)) - before

    plain = run_jobs(size, program, strategy(3, schedule=WaitFree()))
    coded = run_jobs(size, program, strategy(3, Int8(), WaitFree(), weights=Int8()))
    for more, less in zip(plain, coded, strict=True):
        assert 0.25 < less / more < 0.27
