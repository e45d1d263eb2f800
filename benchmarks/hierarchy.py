"""Two levels against one: training steps on 2 lab hosts of 2 workers each, whose links are slow.

    python benchmarks/hierarchy.py             32 MB of gradients at 1 Gbit/s, and a byte GPT at rho 3, compressed between hosts
    python benchmarks/hierarchy.py --quick     few rounds: does the script work?

Contenders take turns in the same processes (`compress_step.py` has how). Bytes between hosts are those of
both workers of a host. Writes `hierarchy_MACHINE_DATE.json` and `.md`. Let the machine be idle. Needs the lab.
"""

from __future__ import annotations

import statistics

import harness
from compress_step import SCHEDULES, rate_for, run
from compress_worker import CompressStepReport, CompressStepSettings
from harness import ratio
from msgspec.structs import replace
from step_worker import DDP, LIMIT

RING, TWO_LEVELS, COMPRESSED = "flat ring", "two levels", "two levels, EF PowerSGD 4"
FLAT = {
    RING: 'Strategy(aggregate=AllReduce("ring"))',
    "flat, auto": "Strategy()",
    "flat, hierarchical plan": 'Strategy(aggregate=AllReduce("hierarchical"))',
}
LEVELS = {
    TWO_LEVELS: "Strategy(aggregate=Hierarchy())",
    "two levels, by wire": 'Strategy(aggregate=Hierarchy(inner=AllReduce("ring")))',
}
POWER_SGD = f"compress=ErrorFeedback(PowerSGD(4)), schedule={SCHEDULES['cpu']}"
LOSSY = {COMPRESSED: f"Strategy(aggregate=Hierarchy(), {POWER_SGD})", "flat, EF PowerSGD 4": f"Strategy({POWER_SGD})"}
RHO = 3.0
OF_LIMIT = 0.75
MOST_BYTES = 0.67


def claims(exact: CompressStepReport, lossy: CompressStepReport) -> list[str]:
    rows, rounds = {row.contender: row for row in exact.rows}, exact.settings.rounds
    part = (rows[TWO_LEVELS].bytes_between_hosts or 0) / (rows[RING].bytes_between_hosts or 1)
    best = min(FLAT, key=lambda name: statistics.median(rows[name].seconds))
    speed = ratio(rows[best].seconds, rows[TWO_LEVELS].seconds)
    limit = {row.contender: row.seconds for row in lossy.rows}
    reached = ratio(limit[LIMIT], limit[COMPRESSED])
    return [
        *harness.table("claim", "target", "measured", "verdict"),
        f"| bytes between hosts, x the flat ring's, at most | {MOST_BYTES} | {part:.3f} | "
        f"{harness.verdict(part <= MOST_BYTES)} |",
        f"| step, x the best flat one ({best}), at least | 1.00 | {speed} | {speed.at_least(1.0, rounds)} |",
        f"| EF PowerSGD 4 between hosts, of the rate without communication, at least | {OF_LIMIT} | {reached} | "
        f"{reached.at_least(OF_LIMIT, lossy.settings.rounds)} |",
    ]


def rows_of(report: CompressStepReport) -> list[str]:
    lines = harness.table("contender", "step, ms", "x DDP", "MB from host to host")
    by_name = {row.contender: row.seconds for row in report.rows}
    for row in sorted(report.rows, key=lambda row: statistics.median(row.seconds)):
        sent = "" if row.bytes_between_hosts is None else f"{row.bytes_between_hosts / 1e6:.3f}"
        against = ratio(by_name[DDP], row.seconds)
        lines.append(f"| {row.contender} | {1e3 * statistics.median(row.seconds):.1f} | {against} | {sent} |")
    return lines


def main(arguments: list[str]) -> None:
    parser = harness.parser("Two levels against one, on 2 lab hosts of 2 workers.", quick="2 rounds")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args(arguments)
    rounds = 2 if options.quick else options.rounds
    settings = CompressStepSettings(strategies={}, peers=(LIMIT, DDP), hosts=2, workers=2, rounds=rounds, rows=16)
    exact = run(replace(settings, strategies={**FLAT, **LEVELS}, model="linear", rate="1gbit"))
    lossy = run(replace(settings, strategies={"flat, auto": "Strategy()", **LOSSY}, rate=rate_for(RHO, settings), rho=RHO))
    judged = claims(exact, lossy)
    text = [
        *harness.heading("Two levels", exact.date, harness.command_of("hierarchy", arguments), exact.machine),
        f"2 lab hosts of 2 workers, one thread each; median over {rounds} rounds of the slowest rank's time.", "",
        *judged, "", f"## {4 * exact.num_parameters / 1e6:.0f} MB of gradients, links of {exact.settings.rate}", "",
        *rows_of(exact), "",
        f"## Byte GPT, {lossy.num_parameters / 1e6:.1f} M parameters, links of {lossy.settings.rate} (rho = {RHO:g})", "",
        *rows_of(lossy),
    ]  # fmt: skip
    stem = harness.write("hierarchy", [exact, lossy], text, exact.date, exact.machine, harness.folder_of(options))
    harness.show(judged, stem)


if __name__ == "__main__":
    harness.run(main)
