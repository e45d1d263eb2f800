"""The examples run as their users would run them: small, with two workers, and piped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
LIMIT_S = 60

pytestmark = pytest.mark.processes


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STRETTO_")}
    whole = [sys.executable, *command]
    return subprocess.run(whole, cwd=folder, env=kept, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_the_average_is_the_mean_of_the_ranks(tmp_path: Path) -> None:
    done = run("-m", "stretto", "run", "-n", "2", str(EXAMPLES / "average.py"), folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] rank {rank} of 2: [0.5, 0.5, 0.5, 0.5]" for rank in (0, 1)]


def test_the_average_needs_no_launcher(tmp_path: Path) -> None:
    done = run(str(EXAMPLES / "average.py"), folder=tmp_path)

    assert (done.returncode, done.stdout) == (0, "rank 0 of 1: [0.0, 0.0, 0.0, 0.0]\n")


def test_the_race_shows_every_algorithm_once_and_draws_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small = ["--workers", "2", "--sizes", "1024", "65536", "--rounds", "1"]
    done = run(str(EXAMPLES / "race.py"), *small, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout  # piped: no live table, no colours
    assert done.stdout.count("double_binary_tree") == 2  # in the final table and in the bars
    assert "1 KB" in done.stdout and "64 KB, shorter is faster:" in done.stdout and "What to try next:" in done.stdout
    assert (tmp_path / "demo-output" / "race.png").read_bytes().startswith(b"\x89PNG")


def test_a_race_that_cannot_be_run_fails_with_the_workers_message(tmp_path: Path) -> None:
    done = run(str(EXAMPLES / "race.py"), "--workers", "0", folder=tmp_path)

    assert done.returncode == 2
    assert "at least one worker" in done.stderr
