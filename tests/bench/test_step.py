"""`benchmarks/step.py`: it runs, compares what is comparable, and writes what it measured, also where we lose."""

from __future__ import annotations

import importlib
import random
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from preloaded import Preloaded
from stretto.bench.machine import describe
from stretto.errors import ConfigurationError
from stretto.lab import lab_available

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step.py"
LIMIT_S = 200
pytestmark = pytest.mark.timeout(300)


def step(preloaded: Preloaded, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return preloaded.shell(shlex.join(["python", str(SCRIPT), *arguments]), folder=folder, timeout_s=LIMIT_S)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("step")


def report_of(folder: Path) -> tuple[list[dict[str, Any]], str]:
    (written,) = folder.glob("step_*.json")
    reports: list[dict[str, Any]] = msgspec.json.decode(written.read_bytes())
    return reports, written.with_suffix(".md").read_text()


@pytest.mark.processes
def test_all_contenders_take_turns_on_the_same_model_and_every_row_is_written(tmp_path: Path, preloaded: Preloaded) -> None:
    done = step(preloaded, "--quick", "-n", "2", "--models", "small", "--rounds", "2", "--output", "out", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    (report,), text = report_of(tmp_path / "out")
    names = ["stretto", "stretto, buckets of 2 MiB", "DDP", "DDP, views", "no gradients sent, a barrier"]
    assert [row["contender"] for row in report["rows"]] == names
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in report["rows"])
    assert all(row["peak_bytes"] > 2 * row["parameter_bytes"] for row in report["rows"])  # parameters and gradients at least
    assert {"torch", "stretto", "python", "numba"} <= set(report["machine"]["versions"])
    assert "python benchmarks/step.py --quick -n 2 --models small" in text
    assert "not judged" in text and "| DDP, views |" in text


@pytest.mark.processes
def test_alone_it_is_compared_with_the_plain_loop(tmp_path: Path, preloaded: Preloaded) -> None:
    done = step(preloaded, "--quick", "-n", "1", "--models", "small", "--json", "one.json", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    (report,) = msgspec.json.decode((tmp_path / "one.json").read_bytes())
    assert [row["contender"] for row in report["rows"]] == ["stretto", "plain loop"]
    assert "over a plain loop" in done.stdout


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.root
def test_it_runs_on_lab_hosts(tmp_path: Path) -> None:
    problem = lab_available()
    if problem is not None:
        pytest.skip(problem)
    command = [sys.executable, str(SCRIPT), "--quick", "--hosts", "2", "--rate", "1gbit", "--models", "small", "--output", "out"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )  # hosts start Python

    assert done.returncode == 0, done.stderr
    assert "2 lab hosts, 1gbit" in report_of(tmp_path / "out")[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "smal"], "there is no such model"),
        (["--rate", "1gbit"], "Add --hosts 4"),
        (["-n", "0"], "at least one"),
        (["--rounds", "0"], "nothing to report"),
    ],
)
def test_what_cannot_work_is_refused(arguments: list[str], said: str, script: Any) -> None:
    with pytest.raises(ConfigurationError, match=said):
        script.cases(script.parse(arguments))


def test_by_default_all_claims_are_measured(script: Any) -> None:
    settings = script.cases(script.parse([]))

    assert [(each.workers, each.lab, each.rate) for each in settings] == [
        (4, False, None), (4, True, None), (4, True, "1gbit"), (1, False, None),
    ]  # fmt: skip
    assert all(each.rounds >= 7 for each in settings) and settings[3].models == ["gpt"]


def report_with(script: Any, ours: list[float], ddp: list[float]) -> Any:
    taken = {"stretto": ours, "DDP": ddp, "DDP, views": ddp}
    rows = [
        script.StepRow(model="small", text="", contender=name, steps_per_turn=1, seconds=seconds)
        for name, seconds in taken.items()
    ]
    settings = script.StepSettings(models=["small"], workers=4, rounds=len(ours))
    return script.StepReport(settings=settings, machine=describe(), date="2026-01-01T00:00:00+00:00", rows=rows)


@pytest.mark.parametrize(
    ("ddp", "verdict"),
    [
        ([1.3, 1.31, 1.29, 1.3, 1.3, 1.32, 1.28], "| met |"),
        ([1.1, 1.11, 1.09, 1.1, 1.1, 1.12, 1.08], "**missed**"),
        ([5.0, 0.2, 1.9, 1.3, 1.25, 0.9, 3.0], "undecided"),  # the median is above the target, and says nothing
    ],
)
def test_a_claim_is_met_or_missed_only_if_the_whole_interval_says_so(ddp: list[float], verdict: str, script: Any) -> None:
    (line,) = script.claims(report_with(script, [1.0] * 7, ddp))

    assert verdict in line


def test_the_interval_of_a_median_holds_it_as_often_as_it_says(script: Any) -> None:
    generator = random.Random(5)
    for rounds in (7, 11, 21):
        draws = [[generator.lognormvariate(0, 1) for _ in range(rounds)] for _ in range(2000)]
        found = [script.ratio(draw, [1.0] * rounds) for draw in draws]
        assert sum(each.low <= 1.0 <= each.high for each in found) / len(found) > 0.94


def test_rows_where_we_lose_are_written_too(script: Any) -> None:
    report = report_with(script, [2.0] * 7, [1.0] * 7)

    assert "| stretto | 2.00 s | 2.00 s - 2.00 s | 0.50 |" in "\n".join(script.as_markdown([report], "command"))
