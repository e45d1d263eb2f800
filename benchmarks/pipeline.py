"""How long stages of a pipeline wait: ours and torch's schedules on gloo, on one host, with an emulated accelerator.

    python benchmarks/pipeline.py                   2 and 4 stages, 4, 8 and 16 micro-batches, 7 rounds; about 4 minutes
    python benchmarks/pipeline.py --rate 100mbit    the same on lab hosts, with letters that take half a forward
    python benchmarks/pipeline.py --quick           2 stages, 4 micro-batches, 2 rounds

A stage's forward of a micro-batch takes 10 ms of sleep and its backward 20 (`pipeline_worker.py` has how). The bubble is the
share of a step beyond what the slowest stage needs to compute by itself, which takes its turns too: 1 - T0 / T, round by round.
Writes `pipeline_MACHINE_DATE.json` and `.md`, with `--rate` `pipeline_hosts_...`.
"""

from __future__ import annotations

import os
from pathlib import Path

import harness
import msgspec
from harness import command_of, folder_of, heading, judge, parser, ratio, run, show, table, write
from msgspec.structs import replace
from pipeline_worker import LIMIT, OURS, PEER_OF, PipelineReport, PipelineRow, PipelineSettings

from stretto.bench.start import run_workers

WORKER = Path(__file__).with_name("pipeline_worker.py")
ABOVE = 0.03  # the most that a bubble may be above (K-1)/(V M+K-1)
FASTER = 1.03
PARTS = {"interleaved, 2 parts": 2}
CLAIMED = ("GPipe", "1F1B", "1F1B, eager", "interleaved, 2 parts")
LETTER_SAMPLES = 250  # 64,000 bytes: 5.1 ms at 100 Mbit/s, half a forward


def bubble(row: PipelineRow, limit: PipelineRow) -> harness.Ratio:
    """1 - T0 / T: the median over rounds, and the interval that holds the true one."""
    share = ratio(limit.seconds, row.seconds)
    return harness.Ratio(1 - share.median, 1 - share.high, 1 - share.low)


def precise(found: harness.Ratio) -> str:
    return f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})"


def ideal(row: PipelineRow, settings: PipelineSettings) -> float:
    others = settings.stages - 1
    parts = 3 if row.schedule == "zero-bubble" else PARTS.get(row.schedule, 1)
    return others / (parts * row.microbatches + others)


def lines_of(report: PipelineReport) -> list[str]:
    settings = report.settings
    lines = []
    for mine in (row for row in report.rows if row.ours):
        theirs = PEER_OF.get(mine.schedule, mine.schedule)
        peer = next(
            row for row in report.rows if not row.ours and (row.microbatches, row.schedule) == (mine.microbatches, theirs)
        )
        limit = next(row for row in report.rows if (row.microbatches, row.schedule) == (mine.microbatches, LIMIT))
        found = ratio(peer.seconds, mine.seconds)
        waits, peer_waits = bubble(mine, limit), bubble(peer, limit)
        best = ideal(mine, settings)
        verdicts = ["", ""]
        if mine.schedule in CLAIMED and settings.rate is None:
            verdicts[0] = judge(settings.rounds, met=waits.high <= best + ABOVE, missed=waits.low > best + ABOVE)
        if mine.schedule in CLAIMED:
            verdicts[1] = found.at_least(FASTER, settings.rounds)
        held = "/".join(map(str, mine.peaks)) + ("" if mine.peaks == mine.planned_peaks else " **not as planned**")
        lines.append(
            f"| {settings.stages} | {mine.microbatches} | {mine.schedule} | {best:.3f} | {precise(waits)} | {verdicts[0]} "
            f"| {precise(peer_waits)} | {found} | {verdicts[1]} | {held} |"
        )
    return lines


def place(settings: PipelineSettings) -> str:
    if settings.rate is None:
        return "One host"
    return f"Lab hosts with links of {settings.rate}, letters of {settings.letter_bytes} bytes"


def main(arguments: list[str]) -> None:
    made = parser("Bubbles of pipelines, beside torch's on gloo.", "2 stages, 4 micro-batches, 2 rounds")
    made.add_argument("--rounds", type=int, default=harness.LEAST_ROUNDS)
    made.add_argument("--unit", type=float, default=10.0, help="milliseconds of a stage's forward; longer on a busy machine (10)")
    made.add_argument("--rate", help="of the links between lab hosts, one for each stage; without it: one host")
    options = made.parse_args(arguments)
    cells = {2: [4]} if options.quick else {2: [4, 8, 16], 4: [4, 8, 16]}
    rounds = 2 if options.quick else options.rounds
    harness.check("cpu", rounds)
    reports = []
    for stages, microbatches in cells.items():
        settings = PipelineSettings(stages=stages, microbatches=microbatches, rounds=rounds, unit_s=options.unit / 1e3)
        if options.rate is not None:
            settings = replace(settings, rate=options.rate, samples=LETTER_SAMPLES)
        lab = settings.rate is not None
        answer = run_workers(str(WORKER), settings, os.environ, workers=stages, lab=lab, rate=settings.rate)
        reports.append(msgspec.json.decode(answer, type=PipelineReport))
    first = reports[0]
    columns = (
        "K",
        "M",
        "schedule",
        "ideal",
        "bubble",
        f"at most {ABOVE} above",
        "torch on gloo",
        "rate, x torch",
        "at least 1.03",
        "held",
    )
    page = [*table(*columns), *(line for report in reports for line in lines_of(report))]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    about = [
        f"{place(first.settings)}, one process a stage, {rounds} rounds; a forward of {options.unit:g} ms; "
        "*bubble*: 1 - T0 / T, where T0 is the slowest stage's "
        f"computation alone; load of the machine over the last 1, 5 and 15 minutes: {load}. "
        "*ideal*: (K-1)/(V M+K-1), and for zero-bubble (K-1)/(3 M+K-1). *held*: the most micro-batches (in each part) whose "
        f"activations a stage held, by stage, counted. torch's zero-bubble schedule has two parts a stage, ours one. "
        f"Schedules: {', '.join(map(repr, OURS.values()))}.",
        "",
    ]  # fmt: skip
    text = [*heading("Pipelines", first.date, command_of("pipeline", arguments), first.machine), *about, *page]
    stem = "pipeline" if options.rate is None else "pipeline_hosts"
    show(page, write(stem, reports, text, first.date, first.machine, folder_of(options)))


if __name__ == "__main__":
    run(main)
