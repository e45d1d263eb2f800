"""FSDP2 and DDP, unchanged, on our process groups against the same on gloo's.

    python benchmarks/torch_backend.py                          four workers of this machine, and four lab hosts at 1 Gbit/s
    python benchmarks/torch_backend.py -n 4                     four workers of this machine
    python benchmarks/torch_backend.py --hosts 4 --rate 1gbit   four lab hosts (needs root or user namespaces)
    python benchmarks/torch_backend.py --quick                  a small model, 3 rounds: does the script work?

Writes `torch_backend_MACHINE_DATE.json` and `.md`. How it is measured: `torch_backend_worker.py`. Let the machine be idle.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

import harness
import msgspec
from harness import ratio
from torch_backend_worker import DDP, FSDP, SIZES, BackendReport, BackendRow, BackendSettings

from stretto.bench.start import run_workers
from stretto.bench.table_text import seconds, spread
from stretto.bench.turns import quartiles
from stretto.errors import ConfigurationError

WORKER = Path(__file__).with_name("torch_backend_worker.py")
FASTER_ON_A_NETWORK = 1.25
FASTER_ON_ONE_HOST = 1.0
BYTES_WITHIN = 0.01


def case_name(settings: BackendSettings) -> str:
    what = "lab hosts" if settings.lab else "workers of one host"
    rate = f", {settings.rate}" if settings.rate else ", unshaped" if settings.lab else ""
    return f"{settings.workers} {what}{rate}, {settings.model} parameters"


def run(settings: BackendSettings) -> BackendReport:
    answer = run_workers(str(WORKER), settings, os.environ, workers=settings.workers, lab=settings.lab, rate=settings.rate)
    return msgspec.json.decode(answer, type=BackendReport)


def by_name(report: BackendReport) -> dict[tuple[str, str], BackendRow]:
    return {(row.library, row.backend): row for row in report.rows}


def least_bytes(report: BackendReport, library: str) -> float:
    """What the algorithms must send per worker and step: two gathers and a reduce-scatter, or an all-reduce."""
    share = 4 * report.parameters * (report.settings.workers - 1) / report.settings.workers
    return (3 if library == FSDP else 2) * share


def claims(report: BackendReport) -> list[str]:
    settings, rows, lines = report.settings, by_name(report), []
    for library in (FSDP, DDP):
        found = ratio(rows[library, "gloo"].seconds, rows[library, "stretto"].seconds)
        target = FASTER_ON_A_NETWORK if settings.rate and library == FSDP else FASTER_ON_ONE_HOST
        verdict = found.at_least(target, settings.rounds)
        lines.append(f"| {case_name(settings)} | {library} | x gloo, at least | {target:.2f} | {found} | {verdict} |")
        if settings.lab:
            sent, least = statistics.median(rows[library, "stretto"].sent), least_bytes(report, library)
            verdict = harness.verdict(abs(sent / least - 1) <= BYTES_WITHIN)
            shown = f"{least / 1e6:.0f} MB | {sent / 1e6:.1f} MB"
            lines.append(f"| {case_name(settings)} | {library} | sent per worker and step, to 1 % | {shown} | {verdict} |")
    return lines


def claims_table(reports: list[BackendReport]) -> list[str]:
    lines = harness.table("where", "library", "claim", "target", "measured", "verdict")
    return lines + [line for report in reports for line in claims(report)]


def rows_table(report: BackendReport) -> list[str]:
    columns = (
        "library",
        "backend",
        "time per step",
        "middle half",
        "x gloo",
        "sent per worker and step",
        "peak memory",
        "steps per turn",
    )
    lines = ["", f"## {case_name(report.settings)}", "", *harness.table(*columns)]
    rows = by_name(report)
    for row in report.rows:
        median = statistics.median(row.seconds)
        base = statistics.median(rows[row.library, "gloo"].seconds)
        sent = f"{statistics.median(row.sent) / 1e6:.1f} MB" if report.settings.lab else ""
        lines.append(
            f"| {row.library} | {row.backend} | {seconds(median)} | {spread(quartiles(row.seconds))} | {base / median:.2f} "
            f"| {sent} | {row.peak_bytes / 1e6:.1f} MB | {row.steps_per_turn} |"
        )
    return lines


def as_markdown(reports: list[BackendReport], command: str) -> list[str]:
    first = reports[0]
    lines = [
        *harness.heading("FSDP2 and DDP on our process groups and on gloo's", first.date, command, first.machine),
        f"A byte GPT, two sequences of 32 tokens for each worker, SGD. Median over {first.settings.rounds} rounds of the slowest "
        "rank's time per step; contenders take turns in each round. Claims compare the two turns of each round, with the 95 % "
        "interval of the median. Above 1 means that ours is faster. Peak memory is the most that torch had allocated.",
        "",
        *claims_table(reports),
    ]
    for report in reports:
        lines += rows_table(report)
    return lines


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser("Time FSDP2 and DDP on the backends stretto and gloo.", quick="a small model, 3 rounds, one host")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-n", "--workers", type=int, help="so many workers of this machine")
    where.add_argument("--hosts", type=int, help="so many lab hosts")
    parser.add_argument("--rate", help="speed of the lab's links: 1gbit")
    parser.add_argument("--model", choices=tuple(SIZES), default="38 M", help="how many parameters (38 M)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (9)")
    return parser.parse_args(arguments)


def cases(options: argparse.Namespace) -> list[BackendSettings]:
    rounds = min(3, options.rounds) if options.quick else options.rounds
    harness.check("cpu", rounds)
    if options.rate is not None and options.hosts is None:
        raise ConfigurationError(f"--rate {options.rate} without --hosts: only lab links can be shaped. Add --hosts 4.")
    number = next((number for number in (options.workers, options.hosts) if number is not None), None)
    if number is not None and number < 2:
        raise ConfigurationError(f"{number} workers: nothing would travel. Write for instance -n 4.")
    model = "1 M" if options.quick else options.model
    if number is None and not options.quick:
        return [
            BackendSettings(model=model, rounds=rounds),
            BackendSettings(model=model, rounds=rounds, lab=True, rate="1gbit"),
        ]
    lab = options.hosts is not None
    return [BackendSettings(model=model, workers=number or 4, lab=lab, rate=options.rate, rounds=rounds)]


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    reports = []
    for settings in cases(options):
        print(f"--- {case_name(settings)}", flush=True)
        reports.append(run(settings))
    first, text = reports[0], as_markdown(reports, harness.command_of("torch_backend", arguments))
    stem = harness.write("torch_backend", reports, text, first.date, first.machine, harness.folder_of(options))
    harness.show(claims_table(reports), stem)


if __name__ == "__main__":
    harness.run(main)
