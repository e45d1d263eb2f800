"""What a pipeline refuses, on all workers, before anything is trained: what was asked, why it cannot work, what to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stretto
from partition_models import WIDTH, batches, chain, made
from stretto import ConfigurationError, GPipe, Interleaved, RankMismatch
from stretto.job import Job
from stretto.testing import run_jobs


def norm() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("workers", "arguments", "words"),
    [
        (3, {"stages": 2}, "stages=2 among 3 workers.*Write stages= one of 1, 3"),
        (2, {"stages": 0}, "stages=0: the number of stages"),
        (2, {"stages": True}, "stages=True: the number of stages"),
        (2, {"microbatches": 0}, "microbatches=0: into how many"),
        (2, {"schedule": GPipe}, "Did you mean GPipe\\(\\), with parentheses"),
        (2, {"schedule": "1f1b"}, "cannot read the schedule of a pipeline"),
        (2, {"schedule": 5}, "not a schedule of pipelines"),
        (2, {"cut": ["1", "3"]}, "1 names are needed"),
        (2, {"cut": "1"}, "1 names are needed"),
        (2, {"cut": ["head"]}, "'head' is no layer"),
        (2, {"schedule": Interleaved(5)}, "2 stages of 5 parts each for a model of 15 layers, 8 of them with parameters"),
        (2, {"loss": "max"}, 'loss=.max.: write "mean" or "sum"'),
        (2, {"model": 3}, "the first argument is the nn.Module to cut"),
        (2, {"model": norm, "recompute": True}, "recompute=True with a BatchNorm"),
        (2, {"schedule": stretto.ZeroBubble(), "recompute": True}, "recomputed for both halves"),
        (2, {"layers": ["0", "1"]}, "in none of its layers"),
        (2, {"model": Pair, "layers": ["first", "second"]}, "without a sample"),
        (2, {"sample": torch.ones(())}, "the first dimension"),
    ],
)
def test_it_is_refused_at_construction(workers: int, arguments: dict[str, Any], words: str) -> None:
    def loop(job: Job) -> None:
        given: dict[str, Any] = {"model": chain, "stages": 2, "microbatches": 2} | arguments
        model = made(given["model"]) if callable(given["model"]) else given["model"]
        with pytest.raises(ConfigurationError, match=f"(?s){words}"):
            stretto.pipeline(**(given | {"model": model}))

    run_jobs(workers, loop)


def test_workers_that_ask_for_different_things_are_told_so() -> None:
    def loop(job: Job) -> None:
        with pytest.raises(RankMismatch, match="ranks 0 and 1 differ"):
            stretto.pipeline(made(chain), 2, 2 + job.rank)

    run_jobs(2, loop)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p, x, y: p.forward_backward(x, y), "needs the loss function"),
        (lambda p, x, y: p.forward_backward(x, y, nn.MSELoss(reduction="none")), 'reduction="none"'),
        (lambda p, x, y: p.forward_backward(x, y, nn.MSELoss(reduction="sum")), 'stretto.pipeline\\(..., loss="sum"\\)'),
        (lambda p, x, y: p.forward_backward(x, None, nn.MSELoss()), "the last stage of a pipeline needs the targets"),
        (lambda p, x, y: p.forward_backward(x, y[:3], nn.MSELoss()), "targets of 3 samples, and the first stage inputs of 8"),
        (lambda p, x, y: p.forward_backward(x, y, lambda a, b: (a - b).pow(2)), "needs the loss, one floating-point number"),
        (
            lambda p, x, y: p.evaluate(x, y, nn.MSELoss()) if p.is_first else p.predict(x),
            "calls predict where its first stage calls evaluate",
        ),
    ],
)
def test_a_call_that_cannot_work_is_refused_on_the_stage_that_knows(call: Any, words: str) -> None:
    """The others hear of it, as of any mistake on a stage."""

    def loop(job: Job) -> str:
        pipeline = stretto.pipeline(made(chain), 2, 2)
        with pytest.raises((ConfigurationError, stretto.StageFailed), match=f"(?s){words}") as refused:
            call(pipeline, *batches(1)[0])
        job.barrier()
        return type(refused.value).__name__

    assert "ConfigurationError" in run_jobs(2, loop)


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0])), "CrossEntropyLoss with weights of classes"),
        (nn.CrossEntropyLoss(ignore_index=1), "CrossEntropyLoss with targets to ignore \\(1\\)"),
        (nn.NLLLoss(ignore_index=1), "NLLLoss with targets to ignore"),
        (nn.functional.cross_entropy, "cross_entropy with targets to ignore \\(-100\\)"),
    ],
)
def test_means_that_are_not_over_samples_are_refused(loss_fn: Any, words: str) -> None:
    targets = torch.tensor([0, 1, 1, 1, 0, 0, 0, -100])

    def loop(job: Job) -> None:
        pipeline = stretto.pipeline(made(chain), 2, 2)
        x, _ = batches(1)[0]
        with pytest.raises((ConfigurationError, stretto.StageFailed), match=f'(?s){words}.*Write reduction="sum"'):
            pipeline.forward_backward(x, targets, loss_fn)

    run_jobs(2, loop)


@pytest.mark.parametrize(
    ("loss_fn", "targets"),
    [
        (nn.CrossEntropyLoss(ignore_index=1), torch.zeros(8, dtype=torch.long)),  # there is nothing to ignore
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0])), torch.softmax(torch.arange(16.0).reshape(8, 2).sin(), 1)),
    ],
)
def test_those_that_are_over_samples_are_right(loss_fn: nn.Module, targets: torch.Tensor) -> None:
    x, _ = batches(1)[0]
    expected = loss_fn(made(chain)(x.clone()), targets).item()

    def loop(job: Job) -> float:
        return stretto.pipeline(made(chain), 2, 3).forward_backward(x.clone(), targets, loss_fn).item()

    assert run_jobs(2, loop) == pytest.approx([expected] * 2)


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.get_buffer("scale")


@pytest.mark.parametrize("schedule", [GPipe(), Interleaved(2)], ids=repr)
def test_state_that_is_no_parameter_is_in_one_stage(schedule: stretto.PipelineSchedule) -> None:
    def loop(job: Job, shared: nn.Module) -> None:
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), shared)]
        stretto.pipeline(nn.Sequential(*layers), 2, 2, schedule)

    def refused(job: Job) -> None:
        with pytest.raises(ConfigurationError, match=r"(?s)buffer 1\.running_mean of stage 0.*is .\.running_mean of stage 1 too"):
            loop(job, nn.BatchNorm1d(WIDTH))

    run_jobs(2, refused)
    run_jobs(2, lambda job: loop(job, Constant()))


def test_replicas_that_nothing_keeps_equal_are_refused() -> None:
    def loop(job: Job) -> None:
        pipeline = stretto.pipeline(made(chain), 2, 2)
        with pytest.raises(ConfigurationError, match=r"(?s)2 replicas each.*stretto.distribute\(pipeline.module"):
            pipeline.forward_backward(*batches(1)[0], nn.functional.mse_loss)

    run_jobs(4, loop)


def test_a_grad_scaler_is_refused() -> None:
    def loop(job: Job) -> None:
        pipeline = stretto.pipeline(made(chain), 2, 2)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        stretto.distribute(pipeline.module, optimizer, scaler=torch.amp.GradScaler("cpu"))
        with pytest.raises(ConfigurationError, match="a pipeline with a GradScaler"):
            pipeline.forward_backward(*batches(1)[0], nn.functional.mse_loss)

    run_jobs(4, loop)


def test_backwards_in_halves_are_refused_with_parameters_in_slices() -> None:
    """On all workers, before anything is sent: the pipeline is as good as before."""

    def loop(job: Job) -> None:
        pipeline = stretto.pipeline(made(chain), 2, 2, stretto.ZeroBubble())
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        stretto.distribute(pipeline.module, optimizer, "Strategy(shard=Zero(3))")
        words = r"(?s)ZeroBubble\(\), which computes backwards in halves, with shard=Zero\(stage=3.*Write schedule=OneForward"
        with pytest.raises(ConfigurationError, match=words):
            pipeline.forward_backward(*batches(1)[0], nn.functional.mse_loss)
        pipeline.evaluate(*batches(1)[0], nn.functional.mse_loss)

    run_jobs(4, loop)
