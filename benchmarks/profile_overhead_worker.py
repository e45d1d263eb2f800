"""One worker of `profile_overhead.py`: python benchmarks/profile_overhead_worker.py SETTINGS FILE, started once per rank.

One model, which is trained with a recorder and without one in turns (`stretto.bench.turns`):

    a turn: barrier; open the recorder, or not; a step that does not count; so many steps that they take about `TURN_S`; close it

It is the same model in both, so nothing but the recorder differs. Alone it is a plain loop; with several workers they train it
together, with the default strategy.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from functools import partial

import msgspec
import torch
from step_models import Workload, mean_square, workloads
from step_worker import LIMIT, WARM_UP, TrainedModel, take_part
from torch import Tensor, nn

from stretto.bench.machine import MachineInfo, describe
from stretto.bench.turns import now, of_slowest_rank, take_turns, timed
from stretto.errors import JobError
from stretto.job import Job
from stretto.plan.recorder import StepRecorder

TURN_S = 0.2
HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)


class OverheadSettings(msgspec.Struct, frozen=True, kw_only=True):
    models: list[str]
    workers: int = 1
    rounds: int = 31


class OverheadRow(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per step, of the slowest rank, one per round; hooks that are left on the model and its optimizer afterwards."""

    model: str
    text: str
    steps_per_turn: int
    on: list[float]
    off: list[float]
    hooks_left: int


class OverheadReport(msgspec.Struct, frozen=True, kw_only=True):
    settings: OverheadSettings
    machine: MachineInfo
    date: str
    rows: list[OverheadRow]


def models() -> dict[str, Workload]:
    """`layers` computes next to nothing for each of its hooks: there a recorder costs most."""
    return {
        "gpt": workloads()["gpt"],
        "layers": Workload(
            "100 x Linear(64), batch 32", lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(100))),
            lambda: torch.randn(32, 64), mean_square,
        ),
    }  # fmt: skip


def num_hooks(trained: TrainedModel) -> int:
    holders = [*trained.core.modules(), *trained.core.parameters(), trained.optimizer]
    return sum(len(getattr(holder, name, None) or ()) for holder in holders for name in HOOKS)


def turn(job: Job, trained: TrainedModel, batch: Tensor, steps: int, recorder: type[StepRecorder] | None) -> float:
    job.barrier()
    with nullcontext() if recorder is None else recorder(trained.core, [trained.optimizer]) as recording:
        trained.step(batch)
        seconds = timed(lambda: trained.step(batch), batch.device, steps)
    if recording is not None and recording.steps_seen != steps + 1:
        raise JobError(f"the recorder has seen {recording.steps_seen} of {steps + 1} steps: a bug.")
    return seconds


def measure_model(job: Job, settings: OverheadSettings, name: str) -> OverheadRow:
    workload = models()[name]
    trained = TrainedModel(LIMIT, workload, job, torch.device("cpu"), "Strategy()" if job.world_size > 1 else None)
    torch.manual_seed(1 + job.rank)
    batch = workload.batch()
    for _ in range(WARM_UP):
        trained.step(batch)
    mean = timed(partial(trained.step, batch), batch.device, WARM_UP)
    steps = int(job.gather_object(max(1, math.ceil(TURN_S / mean)))[0])
    hooks = num_hooks(trained)
    turns = [partial(turn, job, trained, batch, steps, recorder) for recorder in (StepRecorder, None)]
    on, off = of_slowest_rank(job, take_turns(turns, settings.rounds))
    left = num_hooks(trained) - hooks
    return OverheadRow(model=name, text=workload.text, steps_per_turn=steps, on=on, off=off, hooks_left=left)


def measure(job: Job, settings: OverheadSettings) -> OverheadReport:
    torch.set_num_threads(1)
    rows = [measure_model(job, settings, name) for name in settings.models]
    return OverheadReport(settings=settings, machine=describe(), date=now(), rows=rows)


if __name__ == "__main__":
    take_part(sys.argv[1:], OverheadSettings, measure)
