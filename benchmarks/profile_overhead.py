"""What recording a profile costs a step: the same model with a recorder and without one, in turns (`profile_overhead_worker.py`).

    python benchmarks/profile_overhead.py            a GPT and 100 small layers in one process; the GPT in two workers here
    python benchmarks/profile_overhead.py --quick    few rounds: does the script work?

A recorder is there for a few rounds only (`plan/recorder.py`); afterwards none of its hooks may be left, so it costs nothing.
Writes `profile_overhead_MACHINE_DATE.json` and `.md`. Let the machine be idle.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import harness
import msgspec
from profile_overhead_worker import OverheadReport, OverheadSettings, models

from stretto.bench.start import run_workers
from stretto.bench.table_text import seconds

WORKER = Path(__file__).with_name("profile_overhead_worker.py")
AT_MOST = 1.05


def run(settings: OverheadSettings) -> OverheadReport:
    answer = run_workers(str(WORKER), settings, os.environ, workers=settings.workers, lab=False)
    return msgspec.json.decode(answer, type=OverheadReport)


def claims(report: OverheadReport) -> list[str]:
    settings, lines = report.settings, []
    where = "one process" if settings.workers == 1 else f"{settings.workers} workers of one host"
    for row in report.rows:
        found = harness.ratio(row.on, row.off)
        shown = f"{found.median - 1:+.1%} ({found.low - 1:+.1%} to {found.high - 1:+.1%})"
        verdict = harness.judge(settings.rounds, met=found.high <= AT_MOST, missed=found.low > AT_MOST)
        lines.append(
            f"| {where} | {row.text} | a step that is recorded, over one that is not, at most | 5 % | {shown} | {verdict} |"
        )
        left = harness.verdict(row.hooks_left == 0)
        lines.append(f"| {where} | {row.text} | hooks left when the recorder is closed | 0 | {row.hooks_left} | {left} |")
    return lines


def judged(reports: list[OverheadReport]) -> list[str]:
    lines = harness.table("where", "model", "claim", "target", "measured", "verdict")
    return lines + [line for report in reports for line in claims(report)]


def as_markdown(reports: list[OverheadReport], command: str) -> list[str]:
    first = reports[0]
    lines = [
        *harness.heading("Recording a profile", first.date, command, first.machine),
        f"Ratios of {first.settings.rounds} rounds, in each of which both have their turn, with the 95 % interval of the median.",
        "",
        *judged(reports),
        "",
        *harness.table("workers", "model", "recorded, per step", "not recorded, per step", "steps per turn"),
    ]
    for report in reports:
        for row in report.rows:
            on, off = seconds(statistics.median(row.on)), seconds(statistics.median(row.off))
            lines.append(f"| {report.settings.workers} | {row.text} | {on} | {off} | {row.steps_per_turn} |")
    return lines


def main(arguments: list[str]) -> None:
    parser = harness.parser("What recording a profile costs a training step.", quick="3 rounds")
    parser.add_argument("--rounds", type=int, help="rounds that count (31)")
    options = parser.parse_args(arguments)
    rounds = options.rounds if options.rounds is not None else 3 if options.quick else 31
    harness.check("cpu", rounds)
    reports = []
    for workers, names in ((1, list(models())), (2, ["gpt"])):
        reports.append(run(OverheadSettings(models=names, workers=workers, rounds=rounds)))
    first, text = reports[0], as_markdown(reports, harness.command_of("profile_overhead", arguments))
    stem = harness.write("profile_overhead", reports, text, first.date, first.machine, harness.folder_of(options))
    harness.show(judged(reports), stem)


if __name__ == "__main__":
    harness.run(main)
