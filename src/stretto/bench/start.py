"""Start the workers of a benchmark, on this machine or on lab hosts, and read what they found."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stretto.errors import JobError
from stretto.launching import launch, launch_plan

if TYPE_CHECKING:
    from stretto.lab import Lab

LAB_LIMIT_S = 3600.0


def run_workers(
    program: str,
    settings: msgspec.Struct,
    environ: Mapping[str, str],
    *,
    workers: int,
    lab: bool,
    rate: str | None = None,
    per_host: int = 1,
    servers: int = 0,
) -> bytes:
    """What rank 0 has written to the file that is its last argument; the one before is `settings` as JSON. For the main thread.

    `program`: a script, or the name of a module. `lab`: on lab hosts, `per_host` workers on each, with links of that rate.
    `servers`: so many parameter servers, in the lab each on one host more.
    """
    with tempfile.TemporaryDirectory(prefix="stretto-bench-") as folder:
        answer = Path(folder) / "report.json"
        words = [msgspec.json.encode(settings).decode(), str(answer)]
        module = not program.endswith(".py")
        if lab:
            from stretto.lab import Lab

            with Lab(workers // per_host, rate, servers=servers, environ=environ) as made:
                _run_on_hosts(made, [*(["-m"] if module else []), program, *words], per_host)
        else:
            _run_here(program, words, module, workers, servers, environ)
        return answer.read_bytes()


def _run_here(program: str, words: list[str], module: bool, workers: int, servers: int, environ: Mapping[str, str]) -> None:
    plan = launch_plan.make_plan(
        program, words, module=module, workers=workers, servers=servers, nodes=1, node=None, rendezvous=None,
        secret_file=None, timeout_s=None, prefix=False,
    )  # fmt: skip
    code = launch.run(plan, environ)
    if code != 0:
        raise SystemExit(code)  # the launcher has said which worker failed and why


class _ToStderr:
    """Shows what rank 0 writes while it runs."""

    congested = False

    def write(self, number: int, data: bytes) -> None:
        if number == 0:
            sys.stderr.write(data.decode(errors="replace"))
            sys.stderr.flush()


def _run_on_hosts(made: Lab, words: list[str], per_host: int) -> None:
    job = made.start([sys.executable, *words], workers=per_host, sink=_ToStderr())
    results = job.wait(LAB_LIMIT_S)
    if job.first_failure is not None:
        failed = results[job.first_failure]
        raise JobError(
            f"the benchmark failed on rank {job.first_failure} first (exit code {failed.returncode}). It had written:\n"
            f"{failed.output.rstrip()[-4000:]}"
        )
