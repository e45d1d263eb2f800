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
import os
import statistics
from pathlib import Path

import harness
import msgspec
from harness import ratio
from step_models import workloads
from step_worker import StepReport, StepRow, StepSettings

from stretto.bench.results import as_json
from stretto.bench.start import run_workers
from stretto.bench.table_text import seconds, spread
from stretto.bench.turns import quartiles
from stretto.errors import ConfigurationError

WORKER = Path(__file__).with_name("step_worker.py")
MODELS = list(workloads())
SMALL = ("small", "tiny")
ALONE_AT_MOST = 1.02
BUCKET_BYTES = 25 << 20


def standard_cases(models: list[str], rounds: int) -> list[StepSettings]:
    """What the claims are about, on a machine without a GPU."""
    return [
        StepSettings(models=models, workers=4, rounds=rounds, memory=True),
        StepSettings(models=models, workers=4, lab=True, rounds=rounds),
        StepSettings(models=models, workers=4, lab=True, rate="1gbit", rounds=rounds),
        StepSettings(models=[name for name in models if name == "gpt"] or models[:1], workers=1, rounds=rounds),
    ]


def case_name(settings: StepSettings) -> str:
    what = "lab hosts" if settings.lab else "worker of one host" if settings.workers == 1 else "workers of one host"
    where = f"{settings.workers} {what}"
    rate = f", {settings.rate}" if settings.rate else ", unshaped" if settings.lab else ""
    return f"{where}{rate}{', GPU' if settings.device == 'cuda' else ''}"


def run(settings: StepSettings) -> StepReport:
    answer = run_workers(str(WORKER), settings, os.environ, workers=settings.workers, lab=settings.lab, rate=settings.rate)
    return msgspec.json.decode(answer, type=StepReport)


# -- judging ----------------------------------------------------------------------------------------------------------


def by_model(report: StepReport) -> dict[str, dict[str, StepRow]]:
    models: dict[str, dict[str, StepRow]] = {}
    for row in report.rows:
        models.setdefault(row.model, {})[row.contender] = row
    return models


def claims(report: StepReport) -> list[str]:
    """The claims' table, one or two lines per model of this report."""
    settings, lines = report.settings, []
    for model, rows in by_model(report).items():
        if settings.workers == 1:
            found = ratio(rows["stretto"].seconds, rows["plain loop"].seconds)
            shown = f"{found.median - 1:+.1%} ({found.low - 1:+.1%} to {found.high - 1:+.1%})"
            verdict = harness.judge(settings.rounds, met=found.high <= ALONE_AT_MOST, missed=found.low > ALONE_AT_MOST)
            lines.append(_claim(settings, model, "over a plain loop, at most", "2 %", shown, verdict))
            continue
        least = 1.0 if settings.device == "cuda" else 0.97 if settings.lab and model not in SMALL else 1.2
        found = ratio(rows["DDP"].seconds, rows["stretto"].seconds)
        verdict = found.at_least(least, settings.rounds)
        lines.append(_claim(settings, model, "x DDP, at least", f"{least:.2f}", str(found), verdict))
        if rows["stretto"].peak_bytes is not None:
            lines.append(_memory_claim(settings, model, rows))
    return lines


def _memory_claim(settings: StepSettings, model: str, rows: dict[str, StepRow]) -> str:
    extra = (rows["stretto"].peak_bytes or 0) - (rows["DDP, views"].peak_bytes or 0)
    verdict = harness.verdict(extra <= min(BUCKET_BYTES, rows["stretto"].parameter_bytes))
    return _claim(settings, model, "memory over DDP with views, at most", "one bucket", f"{extra / 1e6:+.2f} MB", verdict)


def _claim(settings: StepSettings, model: str, what: str, target: str, measured: str, verdict: str) -> str:
    return f"| {case_name(settings)} | {model} | {what} | {target} | {measured} | {verdict} |"


# -- writing ----------------------------------------------------------------------------------------------------------


def claims_table(reports: list[StepReport]) -> list[str]:
    lines = harness.table("where", "model", "claim", "target", "measured", "verdict")
    return lines + [line for report in reports for line in claims(report)]


def rows_table(report: StepReport) -> list[str]:
    columns = ("model", "contender", "time per step", "middle half", "x DDP", "steps per turn", "peak memory")
    lines = ["", f"## {case_name(report.settings)}", "", *harness.table(*columns)]
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


def as_markdown(reports: list[StepReport], command: str) -> list[str]:
    first = reports[0]
    lines = [
        *harness.heading("Training step", first.date, command, first.machine, first.machine.gpu),
        f"Median over {first.settings.rounds} rounds of the slowest rank's time per step; contenders take turns in each round. "
        "Claims compare the two turns of each round, with the 95 % interval of the median. Above 1 means that we are faster. "
        "Alone, the plain loop is in DDP's place.",
        "",
        *claims_table(reports),
    ]
    for report in reports:
        lines += rows_table(report)
    return lines


# -- the command line -------------------------------------------------------------------------------------------------


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser("Time training steps against torch's DDP on gloo.", quick="3 rounds, the small models")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-n", "--workers", type=int, help="so many workers of this machine")
    where.add_argument("--hosts", type=int, help="so many lab hosts")
    parser.add_argument("--rate", help="speed of the lab's links: 1gbit")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}; with commas")
    parser.add_argument("--rounds", type=int, default=21, help="rounds that count (21)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: workers share the GPUs that there are")
    parser.add_argument("--json", type=Path, help="also write the JSON to this file")
    return parser.parse_args(arguments)


def cases(options: argparse.Namespace) -> list[StepSettings]:
    models = list(SMALL) if options.quick and options.models == ",".join(MODELS) else options.models.split(",")
    rounds = min(3, options.rounds) if options.quick else options.rounds
    unknown = [name for name in models if name not in MODELS]
    if unknown:
        raise ConfigurationError(f"--models {','.join(unknown)}: there is no such model. Write some of {','.join(MODELS)}.")
    harness.check(options.device, rounds)
    if options.rate is not None and options.hosts is None:
        raise ConfigurationError(f"--rate {options.rate} without --hosts: only lab links can be shaped. Add --hosts 4.")
    number = next((number for number in (options.workers, options.hosts) if number is not None), None)
    if number is not None and number < 1:
        raise ConfigurationError(f"{number} workers: a job has at least one. Write for instance -n 4.")
    if number is None and options.device == "cpu" and not options.quick:
        return standard_cases(models, rounds)
    lab = options.hosts is not None
    settings = StepSettings(
        models=models, workers=number or 4, lab=lab, rate=options.rate, device=options.device, rounds=rounds, memory=not lab
    )
    return [settings]


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    reports = []
    for settings in cases(options):
        print(f"--- {case_name(settings)}", flush=True)
        reports.append(run(settings))
    first, text = reports[0], as_markdown(reports, harness.command_of("step", arguments))
    stem = harness.write("step", reports, text, first.date, first.machine, harness.folder_of(options), first.machine.gpu)
    harness.show(claims_table(reports), stem)
    if options.json is not None:
        options.json.write_bytes(as_json(reports))


if __name__ == "__main__":
    harness.run(main)
