"""Start the workers of a benchmark, on this machine or on lab hosts, and read what they found."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stretto.bench.settings import Settings
from stretto.errors import JobError
from stretto.launching import launch, launch_plan

if TYPE_CHECKING:
    from stretto.bench.results import Report

LAB_LIMIT_S = 3600.0


def run_workers(settings: Settings, environ: Mapping[str, str]) -> Report:
    """Run the benchmark in workers of its own; for the main thread."""
    with tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder:
        answer = Path(folder) / "report.json"
        words = [msgspec.json.encode(settings).decode(), str(answer)]
        if settings.lab:
            _run_on_hosts(settings, words, environ)
        else:
            _run_here(settings, words, environ)
        from stretto.bench.results import Report  # brings in torch: not before the workers had the machine to themselves

        return msgspec.json.decode(answer.read_bytes(), type=Report)


def _run_here(settings: Settings, words: list[str], environ: Mapping[str, str]) -> None:
    plan = launch_plan.make_plan(
        "stretto.bench.worker",
        words,
        module=True,
        workers=settings.workers,
        nodes=1,
        node=None,
        rendezvous=None,
        secret_file=None,
        timeout_s=None,
        prefix=False,
    )
    code = launch.run(plan, environ)
    if code != 0:
        raise SystemExit(code)  # the launcher has said which worker failed and why


class _ToStderr:
    """Shows what the first host writes while it runs."""

    congested = False

    def write(self, number: int, data: bytes) -> None:
        if number == 0:
            sys.stderr.write(data.decode(errors="replace"))
            sys.stderr.flush()


def _run_on_hosts(settings: Settings, words: list[str], environ: Mapping[str, str]) -> None:
    from stretto.lab import Lab

    command = [sys.executable, "-m", "stretto.bench.worker", *words]
    with Lab(settings.workers, settings.rate, environ=environ) as lab:
        job = lab.start(command, sink=_ToStderr())
        results = job.wait(LAB_LIMIT_S)
    if job.first_failure is not None:
        failed = results[job.first_failure]
        raise JobError(
            f"the benchmark failed on host {job.first_failure} first (exit code {failed.returncode}). It had written:\n"
            f"{failed.output.rstrip()[-4000:]}\nAsked for: {settings.command or shlex.join(command[:3])}"
        )
