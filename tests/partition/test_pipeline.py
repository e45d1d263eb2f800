"""A pipeline trains what one process trains on the whole batch, with every schedule, and any number of stages and replicas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import stretto
from partition_models import batches, chain, made, share, trained_alone
from stretto import GPipe, Interleaved, OneForwardOneBackward, PipelineSchedule, ZeroBubble
from stretto.job import Job
from stretto.observe.trace import Tracer
from stretto.testing import run_jobs

STEPS = 20
SCHEDULES = (GPipe(), OneForwardOneBackward(), OneForwardOneBackward(eager=1), Interleaved(2), ZeroBubble())


def trained(
    job: Job,
    stages: int,
    schedule: PipelineSchedule,
    microbatches: int,
    steps: int,
    strategy: str | None = None,
    recompute: bool = False,
) -> tuple[dict[str, Tensor], list[float], list[int]]:
    pipeline = stretto.pipeline(made(chain), stages, microbatches, schedule, recompute=recompute)
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.01)
    if pipeline.replicas > 1:
        stretto.distribute(pipeline.module, optimizer, strategy)
    losses, peaks = [], []
    for x, y in batches(steps):
        mine, targets = (share(each, pipeline.replica, pipeline.replicas) for each in (x, y))
        if pipeline.replicas > 1:
            stretto.weight(len(mine) / len(x))
        optimizer.zero_grad()
        loss = pipeline.forward_backward(
            mine if pipeline.is_first else None, targets if pipeline.is_last else None, nn.functional.mse_loss
        )
        optimizer.step()
        losses.append(loss.item())
        peaks.append(pipeline.last_peak)
    return pipeline.module.state_dict(), losses, peaks


def check_equal(results: list[tuple[dict[str, Tensor], list[float], list[int]]], steps: int, replicas: int) -> None:
    expected, losses = trained_alone(made(chain), batches(steps))
    seen = set()
    for state, mine, _ in results:
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)
            seen.add(name)
        if replicas == 1:
            assert mine == pytest.approx(losses, abs=1e-5)
    assert seen == set(expected)


ALL = [(stages, schedule) for stages in (1, 2, 3, 4) for schedule in SCHEDULES]


@pytest.mark.parametrize(("stages", "schedule"), ALL, ids=lambda value: repr(value))
def test_it_trains_what_one_process_trains(stages: int, schedule: PipelineSchedule) -> None:
    """The second batch has 7 samples, which the micro-batches do not divide."""
    check_equal(run_jobs(stages, trained, stages, schedule, 4, STEPS), STEPS, 1)


QUICK = [(2, OneForwardOneBackward(), 2), (2, ZeroBubble(), 2), (2, Interleaved(2), 2), (1, GPipe(), 3)]
WITH_REPLICAS = [
    pytest.param(stages, schedule, replicas, marks=() if (stages, schedule, replicas) in QUICK else pytest.mark.slow)
    for stages, schedule in ALL
    for replicas in (2, 3)
]


@pytest.mark.parametrize(("stages", "schedule", "replicas"), WITH_REPLICAS, ids=lambda value: repr(value))
def test_so_do_replicas_of_its_stages(stages: int, schedule: PipelineSchedule, replicas: int) -> None:
    check_equal(run_jobs(stages * replicas, trained, stages, schedule, 3, STEPS), STEPS, replicas)


def test_activations_are_held_as_the_plan_says() -> None:
    peaks = {
        repr(schedule): [peaks[-2] for _, _, peaks in run_jobs(3, trained, 3, schedule, 6, 2)]
        for schedule in (GPipe(), OneForwardOneBackward())
    }
    assert peaks == {"GPipe()": [6, 6, 6], "OneForwardOneBackward(eager=0)": [3, 2, 1]}


def test_waits_for_other_stages_are_traced() -> None:
    def loop(job: Job) -> set[str]:
        job.tracer = Tracer()
        pipeline = stretto.pipeline(made(chain), 2, 2)
        pipeline.forward_backward(*batches(1)[0], nn.functional.mse_loss)
        waits = {span.name for span in job.tracer.spans if span.category == "wait" and "stage" in span.name}
        job.tracer = None  # it is nobody's wish to write it
        return waits

    first, last = run_jobs(2, loop)
    assert first == {f"for the gradients of micro-batch {number} from stage 1" for number in range(2)}
    assert last == {f"for the values of micro-batch {number} from stage 0" for number in range(2)}


def test_recomputation_changes_nothing() -> None:
    check_equal(run_jobs(2, trained, 2, OneForwardOneBackward(), 3, 4, None, True), 4, 1)
