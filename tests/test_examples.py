"""The examples run as their users would run them: small, with a few workers, and piped.

Where it is the training that matters they run in forks of a process that has torch (`preloaded`), which also runs the commands of
the demo, the race and torchrun: each of `stretto run` and no launcher at all starts one of them in interpreters of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from preloaded import Preloaded

EXAMPLES = Path(__file__).parents[1] / "examples"
LIMIT_S = 200

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("STRETTO_")} | {"OMP_NUM_THREADS": "1"}


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, *command]
    return subprocess.run(whole, cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False)


def warm(preloaded: Preloaded, *command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return preloaded.shell(shlex.join(command), folder=folder, environ=environment(), timeout_s=LIMIT_S)


def test_the_average_is_the_mean_of_the_ranks(tmp_path: Path) -> None:
    done = run("-m", "stretto", "run", "-n", "2", str(EXAMPLES / "average.py"), folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] rank {rank} of 2: [0.5, 0.5, 0.5, 0.5]" for rank in (0, 1)]


def test_the_average_needs_no_launcher(tmp_path: Path) -> None:
    done = run(str(EXAMPLES / "average.py"), folder=tmp_path)

    assert (done.returncode, done.stdout) == (0, "rank 0 of 1: [0.0, 0.0, 0.0, 0.0]\n")


@pytest.mark.slow
def test_the_race_shows_every_algorithm_once_and_draws_a_plot(tmp_path: Path, preloaded: Preloaded) -> None:
    pytest.importorskip("matplotlib")
    small = ["--workers", "2", "--sizes", "1024", "65536", "--rounds", "1"]
    done = warm(preloaded, "python", str(EXAMPLES / "race.py"), *small, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout  # piped: no live table, no colours
    assert done.stdout.count("double_binary_tree") == 2  # in the final table and in the bars
    assert "1 KB" in done.stdout and "64 KB, shorter is faster:" in done.stdout and "What to try next:" in done.stdout
    assert (tmp_path / "demo-output" / "race.png").read_bytes().startswith(b"\x89PNG")


def test_a_race_that_cannot_be_run_fails_with_the_workers_message(tmp_path: Path, preloaded: Preloaded) -> None:
    done = warm(preloaded, "python", str(EXAMPLES / "race.py"), "--workers", "0", folder=tmp_path)

    assert done.returncode == 2
    assert "at least one worker" in done.stderr


# ---------------------------------------------------------------- training


def printed(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What an example has printed, without the rank before each line."""
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("[0] ") for line in done.stdout.splitlines()]


def losses(lines: list[str]) -> list[float]:
    return [float(word) for line in lines for word in re.findall(r"loss ([\d.]+)", line)]


def test_the_gpt_learns_the_same_whatever_the_number_of_workers(tmp_path: Path, preloaded: Preloaded) -> None:
    gpt, options = EXAMPLES / "gpt.py", ("--steps", "5", "--strategy", "horovod()")
    alone = losses(printed(preloaded.run(gpt, "--steps", "5", folder=tmp_path)))
    together = losses(printed(preloaded.run(gpt, *options, folder=tmp_path, workers=3)))

    assert len(alone) == 10 and alone[-1] < alone[0]  # training and validation, five times
    assert together == pytest.approx(alone, abs=2e-3)  # 32 rows cannot be shared equally by three


@pytest.mark.slow
def test_the_digits_are_learnt_the_same_by_one_worker_and_by_two(tmp_path: Path, preloaded: Preloaded) -> None:
    pytest.importorskip("sklearn")
    digits, options = EXAMPLES / "digits.py", ("--steps", "40", "--strategy", "Strategy(schedule=WaitFree())")
    alone = printed(preloaded.run(digits, "--steps", "40", folder=tmp_path))
    together = printed(preloaded.run(digits, *options, folder=tmp_path, workers=2))

    assert losses(together) == pytest.approx(losses(alone), abs=2e-3)
    assert float(re.findall(r"([\d.]+)%", together[-1])[0]) > 60


@pytest.mark.slow
def test_the_gan_trains_two_models_under_torchrun(tmp_path: Path, preloaded: Preloaded) -> None:
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / "gan.py")]
    done = warm(preloaded, *command, "--steps", "50", folder=tmp_path)

    assert [line.split()[1] for line in printed(done)] == ["10", "20", "30", "40", "50"]


def test_an_example_says_what_is_wrong_with_its_strategy(tmp_path: Path, preloaded: Preloaded) -> None:
    done = preloaded.run(EXAMPLES / "gan.py", "--strategy", "Strategy(schedule=Magic())", folder=tmp_path)

    assert done.returncode == 1
    assert "'Magic' is not known; known are AfterBackward, AllReduce, Asynchronous, " in done.stderr


def test_the_demo_trains_and_ends_with_a_table_and_a_picture(tmp_path: Path, preloaded: Preloaded) -> None:
    pytest.importorskip("matplotlib")
    done = warm(preloaded, "python", str(EXAMPLES / "train_demo.py"), "--workers", "2", "--steps", "10", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout  # piped: no live line, no colours
    assert done.stdout.count("samples/s") == 11  # ten steps, and the table's head
    assert "in communication" in done.stdout and "in 10 steps" in done.stdout and "What to try next:" in done.stdout
    assert (tmp_path / "demo-output" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_demo_that_cannot_be_run_fails_with_the_reason(tmp_path: Path, preloaded: Preloaded) -> None:
    done = warm(preloaded, "python", str(EXAMPLES / "train_demo.py"), "--workers", "0", folder=tmp_path)

    assert done.returncode == 2
    assert "at least one worker" in done.stderr


@pytest.mark.slow
def test_the_gpt_learns_with_one_bit_per_gradient_value(tmp_path: Path, preloaded: Preloaded) -> None:
    options = ("--steps", "5", "--strategy", "Strategy(compress=ErrorFeedback(Sign()))")
    found = losses(printed(preloaded.run(EXAMPLES / "gpt.py", *options, folder=tmp_path, workers=2)))
    assert len(found) == 10 and found[-1] < found[0] - 0.5
