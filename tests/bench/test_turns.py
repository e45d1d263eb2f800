"""The one harness: contenders take turns, the slowest rank counts, and what the scripts write stays readable."""

from __future__ import annotations

import importlib
import re
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stretto.bench.turns import of_slowest_rank, take_turns, timed
from stretto.job import Job
from stretto.testing import run_jobs

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_in_every_round_another_contender_is_the_first() -> None:
    calls: list[str] = []

    def turn(name: str, seconds: float) -> float:
        calls.append(name)
        return seconds

    turns = [partial(turn, name, seconds) for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    assert take_turns(turns, rounds=4) == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc"


def test_a_time_is_that_of_each_of_several_calls() -> None:
    calls: list[int] = []

    assert 0 <= timed(lambda: calls.append(1), torch.device("cpu"), times=5) < 1 and len(calls) == 5


@pytest.mark.parametrize("size", [1, 3])
def test_the_slowest_rank_counts_in_every_turn_of_every_contender(size: int) -> None:
    def work(job: Job) -> list[list[float]]:
        return of_slowest_rank(job, [[float(job.rank), 1.0], [9.0 - job.rank, 2.0]])

    assert run_jobs(size, work) == [[[float(size - 1), 1.0], [9.0, 2.0]]] * size


@pytest.mark.parametrize(
    ("result", "script", "kind", "several"),
    [
        ("all_reduce_nvidia-h200_2026-11-15", "all_reduce", "AllReduceReport", dict),
        ("before_after_intel-r-xeon-r-processor-2-cores_2026-11-16", "before_after", "BeforeAfterReport", None),
        ("compress_gpu_nvidia-h200_2026-11-15", "compress_gpu", "GpuReport", list),
        ("compress_loss_amd-epyc-2-cores_2026-11-15", "compress_loss", "LossReport", None),
        ("compress_step_rho1_amd-epyc-2-cores_2026-11-15", "compress_step", "CompressStepReport", list),
        ("profile_overhead_amd-epyc-2-cores_2026-11-19", "profile_overhead", "OverheadReport", list),
        ("schedule_intel-r-xeon-r-processor-2-cores_2026-11-16", "schedule", "ScheduleReport", list),
        ("schedule_compressed_intel-r-xeon-r-processor-2-cores_2026-11-16", "schedule", "ScheduleReport", list),
        ("schedule_small_intel-r-xeon-r-processor-2-cores_2026-11-16", "schedule", "ScheduleReport", list),
        ("schedule_nvidia-h200_2026-11-16", "schedule", "ScheduleReport", list),
        ("late_amd-epyc-2-cores_2026-11-18", "schedule", "ScheduleReport", list),
        ("step_amd-epyc-2-cores_2026-11-15", "step", "StepReport", list),
        ("strangers_intel-r-xeon-r-processor-2-cores_2026-11-16", "strangers", "StrangersReport", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_committed_results_are_read_and_written_as_they_are(
    result: str, script: str, kind: str, several: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the JSON that lies there comes the text that lies beside it, byte for byte."""
    monkeypatch.syspath_prepend(str(RESULTS.parent))
    module = importlib.import_module(script)
    report, text = getattr(module, kind), (RESULTS / f"{result}.md").read_text()
    found: Any = msgspec.json.decode(
        (RESULTS / f"{result}.json").read_bytes(),
        type=report if several is None else dict[str, report] if several is dict else list[report],  # type: ignore[valid-type]
    )
    asked = re.search(r"; `(.*)`", text)
    assert asked is not None
    more: dict[str, list[Any]] = {
        "all_reduce": [lambda size: size, asked[1]], "before_after": [], "compress_gpu": [asked[1]], "compress_loss": [],
        "compress_step": [asked[1]], "profile_overhead": [asked[1]], "schedule": [asked[1]], "step": [asked[1]],
        "strangers": [asked[1]],
    }  # fmt: skip

    assert "\n".join(module.as_markdown(found[0] if script == "compress_gpu" else found, *more[script])) + "\n" == text
