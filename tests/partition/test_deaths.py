"""What the others see of a worker of a pipeline that dies or makes a mistake: all the same, soon, and naming it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from partition_models import WIDTH, batches, made
from preloaded import Preloaded
from stretto import PeerLost, StageFailed, Timeouts, WireTimeout
from stretto.job import Job
from stretto.testing import run_jobs

SOON_S = 2.0
TRIES = 3
SCRIPT = Path(__file__).parent / "dies.py"


def survivors(preloaded: Preloaded, folder: Path, workers: int, stages: int, victim: int, kind: str) -> dict[int, dict[str, Any]]:
    folder.mkdir()
    # --min-workers: a launcher that lets the others go on, until they have written down what they saw.
    preloaded.shell(f"stretto run -n {workers} --min-workers 1 {SCRIPT} {stages} {victim} {kind}", folder=folder)
    happened = json.loads((folder / "happened").read_text())
    found = {
        rank: json.loads((folder / f"caught{rank}").read_text()) for rank in range(workers) if (folder / f"caught{rank}").exists()
    }
    for each in found.values():
        each["after"] = each["at"] - happened
    return found


@pytest.mark.processes
@pytest.mark.parametrize(("workers", "stages", "victim"), [(3, 3, 0), (3, 3, 1), (3, 3, 2), (4, 2, 1), (4, 2, 2)])
def test_a_killed_worker_is_named_by_all_others_at_once(
    preloaded: Preloaded, tmp_path: Path, workers: int, stages: int, victim: int
) -> None:
    for attempt in range(TRIES):
        found = survivors(preloaded, tmp_path / str(attempt), workers, stages, victim, "killed")
        assert set(found) == set(range(workers)) - {victim}
        assert {(each["kind"], each["rank"]) for each in found.values()} == {("PeerLost", victim)}, found
        if max(each["after"] for each in found.values()) < SOON_S:
            return
    pytest.fail(f"not within {SOON_S} s: {found}")


@pytest.mark.processes
def test_a_mistake_on_one_stage_is_told_to_all(preloaded: Preloaded, tmp_path: Path) -> None:
    found = survivors(preloaded, tmp_path / "once", 3, 3, 1, "raises")
    assert found[1]["kind"] == "RuntimeError"
    assert found[1]["notes"][0].startswith("in stage 1 of a pipeline, in the forward of micro-batch 1")
    for rank in (0, 2):
        assert (found[rank]["kind"], found[rank]["rank"]) == ("StageFailed", 1)
        assert (
            "rank 1, stage 1 of the pipeline, failed in the forward of micro-batch 1: RuntimeError: no such"
            in found[rank]["text"]
        )


class Fails(nn.Module):
    """In the forward or the backward of its third micro-batch."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where, self.calls = nn.Linear(WIDTH, WIDTH), where, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x)
        if self.calls == 3 and self.where == "forward":
            raise ArithmeticError("a mistake")
        if self.calls == 3 and self.where == "backward":
            y.register_hook(self._fail)  # type: ignore[no-untyped-call]
        return y

    def _fail(self, gradient: Tensor) -> Tensor:
        raise ArithmeticError("a mistake")


@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_afterwards_the_pipeline_has_ended(where: str) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if where == "loss":
            raise ArithmeticError("a mistake")
        return nn.functional.mse_loss(output, target)

    def loop(job: Job) -> list[str]:
        model = made(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Fails(where), nn.Linear(WIDTH, 2)))
        pipeline = stretto.pipeline(model, 3, 4, cut=["1", "2"])
        seen = []
        for _ in range(2):
            try:
                pipeline.forward_backward(*batches(1)[0], loss_fn)
            except (StageFailed, ArithmeticError) as error:
                seen.append(f"{type(error).__name__}: {error}")
        job.barrier()
        return seen

    guilty = 2 if where == "loss" else 1
    for rank, seen in enumerate(run_jobs(3, loop)):
        # Who had nothing to do any more when it happened hears of it in the next call.
        assert seen[-1].startswith(f"StageFailed: rank {guilty}, stage {guilty} of the pipeline, failed in the ")
        assert seen[0] == ("ArithmeticError: a mistake" if rank == guilty else seen[-1])


def test_who_does_not_come_is_named_after_the_deadline() -> None:
    all_done = threading.Barrier(3, timeout=60)

    def loop(job: Job) -> str:
        pipeline = stretto.pipeline(made(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))), 3, 2)
        try:
            if job.rank != 1:
                pipeline.forward_backward(torch.ones(4, WIDTH), torch.ones(4, WIDTH), nn.functional.mse_loss)
        except (WireTimeout, PeerLost) as error:
            return f"{type(error).__name__} {error.rank}"
        finally:
            all_done.wait()
        return "absent"

    results = run_jobs(3, loop, timeouts=Timeouts(arrive_s=1.5, warn_s=1.0))
    assert results == ["WireTimeout 1", "absent", "WireTimeout 1"]
