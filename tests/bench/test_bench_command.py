"""`stretto bench allreduce` as it is called: in workers of its own, on lab hosts, and inside a job."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import msgspec
import pytest

from preloaded import Preloaded
from stretto.bench.results import AllReduceReport
from stretto.lab import lab_available

LIMIT_S = 200
pytestmark = pytest.mark.timeout(300)

SMALL = ["--sizes", "4K,128K", "--repeat", "2", "--algorithms", "auto,ring"]


def stretto(preloaded: Preloaded, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return preloaded.shell(shlex.join(["stretto", *arguments]), folder=folder, timeout_s=LIMIT_S)


def rows_of(path: Path) -> set[tuple[int, str, str, str]]:
    report = msgspec.json.decode(path.read_bytes(), type=AllReduceReport)
    assert all(len(row.seconds) == 2 and min(row.seconds) > 0 for row in report.rows)
    return {(row.size, row.contender, row.wire, row.load) for row in report.rows}


def expected(sizes: list[int]) -> set[tuple[int, str, str, str]]:
    ours = {(size, name, wire, "idle") for size in sizes for name in ("auto", "ring") for wire in ("plain", "encrypted")}
    return ours | {(size, name, wire, "idle") for size in sizes for name, wire in (("gloo", "gloo"), ("bare TCP", "tcp"))}


@pytest.mark.processes
def test_every_contender_is_measured_at_every_size_in_workers_of_its_own(tmp_path: Path, preloaded: Preloaded) -> None:
    done = stretto(preloaded, "bench", "allreduce", "-n", "2", *SMALL, "--json", "out.json", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert rows_of(tmp_path / "out.json") == expected([4096, 128 << 10])
    assert "x gloo" in done.stdout and "of bare TCP" in done.stdout
    report = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=AllReduceReport)
    assert set(report.links) == {"plain", "encrypted"}
    assert report.settings.command == "stretto bench allreduce -n 2 " + " ".join([*SMALL, "--json", "out.json"])


@pytest.mark.slow
@pytest.mark.processes
def test_a_busy_main_thread_gives_rows_of_its_own(tmp_path: Path, preloaded: Preloaded) -> None:
    options = ["-n", "2", "--sizes", "4K", "--repeat", "2", "--algorithms", "auto", "--wire", "plain", "--busy"]
    done = stretto(preloaded, "bench", "allreduce", *options, "--peer", "none", "--json", "out.json", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    loads = {load for _, contender, _, load in rows_of(tmp_path / "out.json") if contender == "auto"}
    assert loads == {"idle", "python", "torch"}
    assert "gloo" not in {contender for _, contender, _, _ in rows_of(tmp_path / "out.json")}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.root
def test_lab_hosts_are_measured_too(tmp_path: Path, preloaded: Preloaded) -> None:
    problem = lab_available()
    if problem is not None:
        pytest.skip(problem)
    options = ["--hosts", "3", "--rate", "1gbit", "--sizes", "4K", "--repeat", "2", "--algorithms", "auto,ring"]
    done = stretto(preloaded, "bench", "allreduce", *options, "--json", "out.json", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert rows_of(tmp_path / "out.json") == expected([4096])
    assert "between 3 lab hosts, links of 1gbit" in done.stdout


@pytest.mark.processes
def test_inside_a_job_it_is_one_of_the_workers_and_rank_0_reports(tmp_path: Path, preloaded: Preloaded) -> None:
    inside = ["bench", "allreduce", "--sizes", "4K", "--repeat", "2", "--algorithms", "ring", "--wire", "plain"]
    done = stretto(preloaded, "run", "-n", "2", "-m", "stretto", *inside, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "[0] all-reduce (sum, float32) between 2 workers" in done.stdout and "[1]" not in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-n", "1"], "moves nothing"),
        (["-n", "2", "--hosts", "2"], "Leave one of them out"),
        (["--rate", "1gbit"], "--hosts 4 --rate 1gbit"),
        (["--json", "nowhere/out.json"], "there is no folder nowhere"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(
    options: list[str], said: str, tmp_path: Path, preloaded: Preloaded
) -> None:
    done = stretto(preloaded, "bench", "allreduce", *options, folder=tmp_path)

    assert done.returncode == 2 and done.stderr.startswith("stretto: ")
    assert said in done.stderr and "Traceback" not in done.stderr
