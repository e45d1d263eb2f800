"""Workers that do different things are told so at once: nobody waits for a round that does not come, and no replica drifts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from engine.worker import RING, Refusing, assert_equal_everywhere, data, mlp, rounds, seeded, start, state_of
from stretto.distributing import distribute, join
from stretto.errors import ConfigurationError, RankMismatch
from stretto.job import Job
from stretto.testing import run_jobs


def with_buffers() -> Any:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def fail_in_the_loss(model: nn.Module, x: Tensor) -> None:
    with pytest.raises(RuntimeError, match="this backward cannot go on"):
        Refusing.apply(model(x)).square().mean().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("where", ["loss", "forward"])
def test_a_batch_skipped_by_one_rank_of_a_model_with_buffers_is_a_mismatch_at_once(size: int, where: str) -> None:
    def program(job: Job) -> str:
        model = with_buffers()
        optimizer = start(job, model)
        step(model, optimizer, data(job.rank))
        if job.rank == 1 and where == "loss":
            fail_in_the_loss(model, data(job.rank))
        elif job.rank == 1:
            with pytest.raises(RuntimeError):
                model(data(job.rank, width=5))
        with pytest.raises(RankMismatch) as mismatch:
            for number in range(3):
                step(model, optimizer, data(job.rank, number))
        return str(mismatch.value)

    for text in run_jobs(size, program):
        assert (
            "of the buffers of Sequential (model 1), for a forward in training mode before round" in text
            and "for gradients" in text
        )


def test_a_batch_skipped_by_one_rank_of_a_model_without_buffers_is_just_that() -> None:
    def program(job: Job) -> tuple[int, dict[str, Tensor]]:
        model = mlp()
        optimizer = start(job, model)
        if job.rank == 1:
            fail_in_the_loss(model, data(job.rank))
        for number in range(3):
            step(model, optimizer, data(job.rank, number))
        return rounds(model), state_of(model)

    results = run_jobs(2, program)
    assert [number for number, _ in results] == [3, 3]
    assert_equal_everywhere([state for _, state in results])


def test_a_layer_added_on_one_rank_only() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model)
        step(model, optimizer, data(job.rank))
        if job.rank == 1:
            model.append(nn.Linear(1, 1).double())
        with pytest.raises(RankMismatch, match="of new parameters"):
            step(model, optimizer, data(job.rank))

    run_jobs(2, program)


def test_a_parameter_frozen_on_one_rank_only() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model)
        step(model, optimizer, data(job.rank))
        if job.rank == 1:
            model[0].weight.requires_grad_(False)
        step(model, optimizer, data(job.rank))  # counts as unused there
        with pytest.raises(RankMismatch, match=r"for gradients of \w+ \(model 1\), layout"):
            step(model, optimizer, data(job.rank))

    run_jobs(2, program)


def test_different_learning_rates_are_named() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model)
        step(model, optimizer, data(job.rank))
        optimizer.param_groups[0]["lr"] = 0.1 + job.rank
        with pytest.raises(RankMismatch, match=r"learning rates \[1\.1\]"):
            step(model, optimizer, data(job.rank))

    run_jobs(2, program)


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_of_another_model_added_to_the_optimizer_later(size: int) -> None:
    def program(job: Job) -> None:
        model, other = mlp(), mlp(1)
        optimizer = start(job, model)
        step(model, optimizer, data(job.rank))
        optimizer.add_param_group({"params": list(other.parameters())})
        with pytest.raises(ConfigurationError, match="not one of the model's"):
            step(model, optimizer, data(job.rank))

    run_jobs(size, program)


@pytest.mark.parametrize("wrong", ["optimizer", "buffers", "strategy", "model"])
def test_what_is_refused_on_one_rank_is_refused_on_all(wrong: str) -> None:
    def program(job: Job) -> str:
        model: Any = mlp()
        mine = job.rank == 1
        optimizer = torch.optim.SGD((mlp() if mine and wrong == "optimizer" else model).parameters(), lr=0.1)
        given: Any = 3 if mine and wrong == "model" else model
        buffers: Any = "sometimes" if mine and wrong == "buffers" else "broadcast"
        strategy: Any = "nonsense" if mine and wrong == "strategy" else RING
        with pytest.raises(ConfigurationError) as refused:
            distribute(given, optimizer, strategy, buffers=buffers, job=job)
        return str(refused.value)

    texts = run_jobs(3, program)
    for text in (texts[0], texts[2]):
        assert "refused on rank 1" in text and texts[1] in text


def test_two_models_under_one_join() -> None:
    def program(job: Job) -> list[dict[str, Tensor]]:
        first, second = mlp(), mlp(1)
        optimizers = start(job, first), start(job, second)
        for _ in range(2):
            with join(first, second):
                for number in range(1 + 2 * job.rank):
                    step(first, optimizers[0], data(job.rank, number))
                    step(second, optimizers[1], data(job.rank, number))
        assert rounds(first) == rounds(second)
        return [state_of(first), state_of(second)]

    results = run_jobs(3, program)
    for number in range(2):
        assert_equal_everywhere([result[number] for result in results])


@pytest.mark.parametrize("size", [1, 2])
def test_a_join_inside_a_join_and_one_of_nothing(size: int) -> None:
    def program(job: Job) -> None:
        first, second = mlp(), mlp(1)
        start(job, first), start(job, second)
        with pytest.raises(ConfigurationError, match=r"join\(model_a, model_b\)"), join(first), join(second):
            pass
        with pytest.raises(ConfigurationError, match="the same one twice"), join(first, first):
            pass
        with pytest.raises(ConfigurationError, match="nothing to wait for"), join():
            pass

    run_jobs(size, program)


@pytest.mark.parametrize("size", [1, 2])
def test_saving_inside_a_join(size: int, tmp_path: Any) -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model)
        with pytest.raises(ConfigurationError, match="inside join"), join(model):
            stretto.save(tmp_path / "last.pt", model, optimizer)

    run_jobs(size, program)
    assert not list(tmp_path.iterdir())


def test_a_scheduler_stepped_per_batch_inside_a_join() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with pytest.raises(ConfigurationError, match="learning rates differ"), join(model):
            for number in range(1 + job.rank):
                step(model, optimizer, data(job.rank, number))
                scheduler.step()

    run_jobs(2, program)


def test_a_scheduler_stepped_after_each_join() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        optimizer = start(job, model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(3):
            with join(model):
                for number in range(1 + job.rank):
                    step(model, optimizer, data(job.rank, number))
            scheduler.step()
        step(model, optimizer, data(job.rank))
        return state_of(model)

    assert_equal_everywhere(run_jobs(2, program))
