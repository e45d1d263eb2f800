"""Every claim about the time of a training step, measured on this machine against torch's DistributedDataParallel on gloo.

    python benchmarks/step.py                             all cases that need no GPU
    python benchmarks/step.py -n 4                        four workers of this machine
    python benchmarks/step.py --hosts 4 --rate 1gbit      four lab hosts with links of that speed (needs root or user namespaces)
    python benchmarks/step.py -n 1 --models gpt           a job of one against the plain loop
    python benchmarks/step.py --device cuda --hosts 4 --rate 10gbit --models gpt      several workers share the GPU
    python benchmarks/step.py --quick                     few rounds, two models: does the script work?

Writes `step_MACHINE_DATE.json` (every time of every round, versions, machine) and `.md` (claims with verdicts, then all rows,
also those where we lose). How it is measured: `step_worker.py`. Let the machine be idle: every ratio compares contenders that
took turns in one run, but a machine without a free core measures its scheduler.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from step_models import workloads
from step_worker import Report, Row, Settings

from stretto.bench.machine import Machine
from stretto.bench.results import quartiles
from stretto.bench.table_text import seconds, spread
from stretto.errors import ConfigurationError, JobError, StrettoError
from stretto.lab import Lab
from stretto.launching import launch, launch_plan

LEAST_ROUNDS = 7
LAB_LIMIT_S = 3600.0
RESULTS = Path(__file__).parent / "results"
QUICK_RESULTS = Path("build/benchmarks")
WORKER = Path(__file__).with_name("step_worker.py")
MODELS = list(workloads())
SMALL = ("small", "tiny")
ALONE_AT_MOST = 1.02
RISK = 0.05
BUCKET_BYTES = 25 << 20


def standard_cases(models: list[str], rounds: int) -> list[Settings]:
    """What the claims are about, on a machine without a GPU."""
    return [
        Settings(models=models, workers=4, rounds=rounds, memory=True),
        Settings(models=models, workers=4, lab=True, rounds=rounds),
        Settings(models=models, workers=4, lab=True, rate="1gbit", rounds=rounds),
        Settings(models=[name for name in models if name == "gpt"] or models[:1], workers=1, rounds=rounds),
    ]


def case_name(settings: Settings) -> str:
    what = "lab hosts" if settings.lab else "worker of one host" if settings.workers == 1 else "workers of one host"
    where = f"{settings.workers} {what}"
    rate = f", {settings.rate}" if settings.rate else ", unshaped" if settings.lab else ""
    return f"{where}{rate}{', GPU' if settings.device == 'cuda' else ''}"


# -- running ----------------------------------------------------------------------------------------------------------


def run(settings: Settings) -> Report:
    with tempfile.TemporaryDirectory(prefix="stretto-step-") as folder:
        answer = Path(folder) / "report.json"
        words = [msgspec.json.encode(settings).decode(), str(answer)]
        if settings.lab:
            _run_on_hosts(settings, words)
        else:
            _run_here(settings, words)
        return msgspec.json.decode(answer.read_bytes(), type=Report)


def _run_here(settings: Settings, words: list[str]) -> None:
    plan = launch_plan.make_plan(
        str(WORKER), words, module=False, workers=settings.workers, nodes=1, node=None, rendezvous=None, secret_file=None,
        timeout_s=None, prefix=False,
    )  # fmt: skip
    code = launch.run(plan, os.environ)
    if code != 0:
        raise SystemExit(code)  # the launcher has said which worker failed and why


def _run_on_hosts(settings: Settings, words: list[str]) -> None:
    with Lab(settings.workers, settings.rate, environ=os.environ) as lab:
        job = lab.start([sys.executable, str(WORKER), *words])
        results = job.wait(LAB_LIMIT_S)
    if job.first_failure is not None:
        failed = results[job.first_failure]
        raise JobError(
            f"the benchmark failed on host {job.first_failure} first (exit code {failed.returncode}). It had written:\n"
            f"{failed.output.rstrip()[-4000:]}"
        )


# -- judging ----------------------------------------------------------------------------------------------------------


def by_model(report: Report) -> dict[str, dict[str, Row]]:
    models: dict[str, dict[str, Row]] = {}
    for row in report.rows:
        models.setdefault(row.model, {})[row.contender] = row
    return models


class Ratio(NamedTuple):
    """A ratio of two contenders: the median over rounds, and the interval that holds the true median with 95 % confidence."""

    median: float
    low: float
    high: float


def ratio(above: list[float], below: list[float]) -> Ratio:
    """Round by round, for the two took turns. Whatever the distribution, the true median lies between the k-th smallest and the
    k-th largest of n values, unless fewer than k of n fair coins show heads (or tails): k is the largest with 5 % for that."""
    values = sorted(a / b for a, b in zip(above, below, strict=True))
    n, k = len(values), 1
    while 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n <= RISK:
        k += 1
    return Ratio(statistics.median(values), values[k - 1], values[n - k])


def claims(report: Report) -> list[str]:
    """The claims' table, one or two lines per model of this report."""
    settings, lines = report.settings, []
    for model, rows in by_model(report).items():
        if settings.workers == 1:
            found = ratio(rows["stretto"].seconds, rows["plain loop"].seconds)
            shown = f"{found.median - 1:+.1%} ({found.low - 1:+.1%} to {found.high - 1:+.1%})"
            verdict = judge(settings.rounds, met=found.high <= ALONE_AT_MOST, missed=found.low > ALONE_AT_MOST)
            lines.append(_claim(settings, model, "over a plain loop, at most", "2 %", shown, verdict))
            continue
        least = 1.0 if settings.device == "cuda" else 0.97 if settings.lab and model not in SMALL else 1.2
        found = ratio(rows["DDP"].seconds, rows["stretto"].seconds)
        shown = f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"
        verdict = judge(settings.rounds, met=found.low >= least, missed=found.high < least)
        lines.append(_claim(settings, model, "x DDP, at least", f"{least:.2f}", shown, verdict))
        if rows["stretto"].peak_bytes is not None:
            lines.append(_memory_claim(settings, model, rows))
    return lines


def judge(rounds: int, *, met: bool, missed: bool) -> str:
    """A claim is met or missed only if the whole interval says so: on a busy machine a median alone says nothing."""
    if rounds < LEAST_ROUNDS:
        return f"not judged: fewer than {LEAST_ROUNDS} rounds"
    return "met" if met else "**missed**" if missed else "undecided: too noisy"


def _memory_claim(settings: Settings, model: str, rows: dict[str, Row]) -> str:
    extra = (rows["stretto"].peak_bytes or 0) - (rows["DDP, views"].peak_bytes or 0)
    verdict = "met" if extra <= min(BUCKET_BYTES, rows["stretto"].parameter_bytes) else "**missed**"
    return _claim(settings, model, "memory over DDP with views, at most", "one bucket", f"{extra / 1e6:+.2f} MB", verdict)


def _claim(settings: Settings, model: str, what: str, target: str, measured: str, verdict: str) -> str:
    return f"| {case_name(settings)} | {model} | {what} | {target} | {measured} | {verdict} |"


# -- writing ----------------------------------------------------------------------------------------------------------


def claims_table(reports: list[Report]) -> list[str]:
    lines = ["| where | model | claim | target | measured | verdict |", "|---|---|---|---|---|---|"]
    return lines + [line for report in reports for line in claims(report)]


def rows_table(report: Report) -> list[str]:
    lines = ["", f"## {case_name(report.settings)}", ""]
    lines += [
        "| model | contender | time per step | middle half | x DDP | steps per turn | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for rows in by_model(report).values():
        base = statistics.median((rows.get("DDP") or rows["plain loop"]).seconds)
        for row in rows.values():
            median = statistics.median(row.seconds)
            peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.2f} MB"
            lines.append(
                f"| {row.text} | {row.contender} | {seconds(median)} | {spread(quartiles(row.seconds))} | {base / median:.2f} "
                f"| {row.steps_per_turn} | {peak} |"
            )
    return lines


def as_markdown(reports: list[Report], command: str) -> str:
    first = reports[0]
    machine = first.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    lines = [
        "# Training step",
        "",
        f"{first.date}; `{command}`",
        "",
        f"{machine.processor}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB, {machine.system}"
        f"{', ' + machine.gpu if machine.gpu else ''}; {versions}.",
        "",
        f"Median over {first.settings.rounds} rounds of the slowest rank's time per step; contenders take turns in each round. "
        "Claims compare the two turns of each round, with the 95 % interval of the median. Above 1 means that we are faster. "
        "Alone, the plain loop is in DDP's place.",
        "",
        *claims_table(reports),
    ]
    for report in reports:
        lines += rows_table(report)
    return "\n".join(lines) + "\n"


def machine_name(machine: Machine) -> str:
    name = machine.gpu or f"{machine.processor} {machine.cores} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def write(reports: list[Report], folder: Path, command: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"step_{machine_name(reports[0].machine)}_{reports[0].date[:10]}"
    stem.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(reports), indent=1) + b"\n")
    stem.with_suffix(".md").write_text(as_markdown(reports, command))
    print("\n".join(claims_table(reports)))
    print(f"written: {stem}.md and {stem}.json")


# -- the command line -------------------------------------------------------------------------------------------------


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time training steps against torch's DDP on gloo.")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-n", "--workers", type=int, help="so many workers of this machine")
    where.add_argument("--hosts", type=int, help="so many lab hosts")
    parser.add_argument("--rate", help="speed of the lab's links: 1gbit")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}; with commas")
    parser.add_argument("--rounds", type=int, default=21, help="rounds that count (21)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: workers share the GPUs that there are")
    parser.add_argument("--quick", action="store_true", help="3 rounds, the small models; written to build/benchmarks")
    parser.add_argument("--json", type=Path, help="also write the JSON to this file")
    parser.add_argument("--output", type=Path, help="folder for the two files (benchmarks/results)")
    return parser.parse_args(arguments)


def check(device: str, rounds: int) -> None:
    """Workers without a GPU would be given their CPU, and its times would be taken for a GPU's."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            "--device cuda: torch sees no GPU here (`stretto doctor` says what it sees). Leave the option out, or run it where "
            "there is one."
        )
    if rounds < 1:
        raise ConfigurationError(f"--rounds {rounds}: there would be nothing to report. Write {LEAST_ROUNDS} or more.")


def cases(options: argparse.Namespace) -> list[Settings]:
    models = list(SMALL) if options.quick and options.models == ",".join(MODELS) else options.models.split(",")
    rounds = min(3, options.rounds) if options.quick else options.rounds
    unknown = [name for name in models if name not in MODELS]
    if unknown:
        raise ConfigurationError(f"--models {','.join(unknown)}: there is no such model. Write some of {','.join(MODELS)}.")
    check(options.device, rounds)
    if options.rate is not None and options.hosts is None:
        raise ConfigurationError(f"--rate {options.rate} without --hosts: only lab links can be shaped. Add --hosts 4.")
    number = next((number for number in (options.workers, options.hosts) if number is not None), None)
    if number is not None and number < 1:
        raise ConfigurationError(f"{number} workers: a job has at least one. Write for instance -n 4.")
    if number is None and options.device == "cpu" and not options.quick:
        return standard_cases(models, rounds)
    lab = options.hosts is not None
    settings = Settings(
        models=models, workers=number or 4, lab=lab, rate=options.rate, device=options.device, rounds=rounds, memory=not lab
    )
    return [settings]


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    command = " ".join(["python benchmarks/step.py", *arguments])
    reports = []
    for settings in cases(options):
        print(f"--- {case_name(settings)}", flush=True)
        reports.append(run(settings))
    write(reports, options.output or (QUICK_RESULTS if options.quick else RESULTS), command)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(reports), indent=1) + b"\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except StrettoError as problem:
        raise SystemExit(f"step.py: {problem}") from None
