"""A checkpoint of a pipeline is the plain model's: any number of stages goes on from it, and so does a plain loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import stretto
from partition_models import batches, chain, made, trained_alone
from stretto import CheckpointError, Interleaved, OneForwardOneBackward, PipelineSchedule
from stretto.job import Job
from stretto.testing import run_jobs

DATA = batches(6, (6,))


def steps(pipeline: stretto.Pipeline, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
    for x, y in DATA[begin:end]:
        optimizer.zero_grad()
        pipeline.forward_backward(x, y, nn.functional.mse_loss)
        optimizer.step()


def made_of(
    stages: int, schedule: PipelineSchedule | None = None, seed: int = 0, strategy: str = "Strategy()"
) -> tuple[stretto.Pipeline, torch.optim.Adam]:
    pipeline = stretto.pipeline(made(chain, seed), stages, 2, schedule)
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.01)
    if pipeline.replicas > 1:
        stretto.distribute(pipeline.module, optimizer, strategy)
    return pipeline, optimizer


def begin(job: Job, path: Path, stages: int, strategy: str = "Strategy()") -> None:
    pipeline, optimizer = made_of(stages, strategy=strategy)
    steps(pipeline, optimizer, 0, 3)
    pipeline.save(path, optimizer, extra={"step": 3})


def go_on(job: Job, path: Path, stages: int, schedule: PipelineSchedule, strategy: str = "Strategy()") -> dict[str, Tensor]:
    pipeline, optimizer = made_of(stages, schedule, 5, strategy)
    assert pipeline.load(path, optimizer) == {"step": 3}
    steps(pipeline, optimizer, 3, 6)
    return pipeline.module.state_dict()


@pytest.mark.parametrize("saved_by", [(1, 1), (3, 3), (2, 4)])
def test_any_number_of_stages_goes_on(tmp_path: Path, saved_by: tuple[int, int]) -> None:
    stages, workers = saved_by
    path = tmp_path / "checkpoint.pt"
    run_jobs(workers, begin, path, stages)
    expected, _ = trained_alone(made(chain), DATA)
    for after, number, schedule in ((2, 2, OneForwardOneBackward()), (1, 2, OneForwardOneBackward()), (3, 3, Interleaved(2))):
        for state in run_jobs(number, go_on, path, after, schedule):
            for name, value in state.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("saved_by", "read_by"),
    [(1, 3), (3, 0), (0, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(0, 2), (1, 2), (2, 1), (2, 3), (3, 1)])],
)
def test_replicas_with_slices_of_another_stage_go_on(tmp_path: Path, saved_by: int, read_by: int) -> None:
    """And with another number of stages of the pipeline. 0: nothing is in slices."""
    texts = ["Strategy()", *(f"Strategy(shard=Zero({stage}))" for stage in (1, 2, 3))]
    path = tmp_path / "checkpoint.pt"
    run_jobs(4, begin, path, 2, texts[saved_by])
    expected, _ = trained_alone(made(chain), DATA)
    for after, workers in ((2, 4), (1, 3)):
        for state in run_jobs(workers, go_on, path, after, OneForwardOneBackward(), texts[read_by]):
            for name, value in state.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_a_plain_loop_goes_on_too_and_the_other_way_round(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    run_jobs(2, begin, path, 2)
    content = torch.load(path, weights_only=True)
    model = made(chain, seed=7)
    optimizer = torch.optim.Adam(model.parameters())
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    for x, y in DATA[3:]:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    expected, _ = trained_alone(made(chain), DATA)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_a_file_of_another_model_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "other.pt"

    def loop(job: Job) -> str:
        other = stretto.pipeline(made(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))), 2, 2)
        other.save(path, torch.optim.SGD(other.parameters(), lr=0.1))
        pipeline, optimizer = made_of(2)
        before = {name: value.clone() for name, value in pipeline.module.state_dict().items()}
        with pytest.raises(CheckpointError) as refused:
            pipeline.load(path, optimizer)
        assert all(torch.equal(value, before[name]) for name, value in pipeline.module.state_dict().items())
        return str(refused.value)

    for words in run_jobs(2, loop):
        assert "it is of another model" in words


def test_what_cannot_travel_is_named_on_all_workers_before_anything_is_sent(tmp_path: Path) -> None:
    def loop(job: Job) -> str:
        pipeline, optimizer = made_of(2)
        if pipeline.is_last:
            optimizer.param_groups[0]["lr"] = np.float64(0.1)
        with pytest.raises(CheckpointError) as refused:
            pipeline.save(tmp_path / "never.pt", optimizer)
        return str(refused.value)

    for words in run_jobs(2, loop):
        assert "optimizer.param_groups[0]['lr'] is a numpy.float64" in words and "Put its .item() there" in words
    assert not (tmp_path / "never.pt").exists()


def test_names_that_an_optimizer_has_stay_those_of_its_stage(tmp_path: Path) -> None:
    path, plain = tmp_path / "pipeline.pt", tmp_path / "plain.pt"
    model = made(chain)
    alone = torch.optim.Adam(model.named_parameters(), lr=0.01)

    def save_alone(job: Job) -> None:
        stretto.distribute(model, alone)
        nn.functional.mse_loss(model(DATA[0][0]), DATA[0][1]).backward()  # type: ignore[no-untyped-call]
        alone.step()
        stretto.save(plain, model, alone)

    run_jobs(1, save_alone)

    def loop(job: Job) -> bool:
        pipeline = stretto.pipeline(made(chain), 2, 2)
        optimizer = torch.optim.Adam(pipeline.module.named_parameters(), lr=0.01)
        mine = list(optimizer.param_groups[0]["param_names"])
        pipeline.load(plain, optimizer)
        pipeline.save(path, optimizer)
        return bool(optimizer.param_groups[0]["param_names"] == mine)

    assert run_jobs(2, loop) == [True, True]
    (group,) = torch.load(path, weights_only=True)["optimizer"]["param_groups"]
    assert "param_names" not in group and len(group["params"]) == len(list(model.parameters()))
    before = list(alone.param_groups[0]["param_names"])
    alone.load_state_dict(torch.load(path, weights_only=True)["optimizer"])
    assert alone.param_groups[0]["param_names"] == before
