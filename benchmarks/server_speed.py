"""What one server moves, aggregation and optimizer included, against a bare ZeroMQ loop; and the memory that it takes.

    python benchmarks/server_speed.py
    python benchmarks/server_speed.py --quick      few rounds: does the script work?

A model goes up and comes down, in ranges of 1 MiB. The bare loop does the same without any protocol: a process that receives
each message with ZeroMQ, copies it to where it belongs and sends back what is there. Both on the same host and between two lab
hosts without a limit on their link; on one host the server's messages go through shared memory. Writes
`server_speed_MACHINE_DATE.json` and `.md`. Let the machine be idle. Needs the lab.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import harness
import msgspec
from harness import ratio
from server_speed_worker import ADAMW, SGD, SUM, ZMQ, SpeedReport, SpeedRow, SpeedSettings

from stretto.bench.start import run_workers
from stretto.bench.table_text import seconds

WORKER = Path(__file__).with_name("server_speed_worker.py")
OF_ZMQ = 0.7


def run(settings: SpeedSettings) -> SpeedReport:
    return msgspec.json.decode(run_workers(str(WORKER), settings, os.environ, workers=2, lab=True), type=SpeedReport)


def where(row: SpeedRow) -> str:
    return "between hosts" if row.between_hosts else "one host"


def claims(report: SpeedReport) -> list[str]:
    lines = harness.table("where", "claim", "target", "measured", "verdict")
    bare = {row.between_hosts: row.seconds for row in report.rows if row.contender == ZMQ}
    for row in report.rows:
        if row.contender in (SUM, SGD):
            found = ratio(bare[row.between_hosts], row.seconds)
            verdict = found.at_least(OF_ZMQ, report.settings.rounds)
            lines.append(f"| {where(row)} | {row.contender}, x {ZMQ}, at least | {OF_ZMQ} | {found} | {verdict} |")
    for each in report.memory:
        verdict = harness.verdict(each.models <= each.allowed)
        lines.append(f"| memory | {each.contender}, in models, at most | {each.allowed} | {each.models:.2f} | {verdict} |")
    return lines


def as_markdown(report: SpeedReport, command: str) -> list[str]:
    num_bytes, each_bytes = report.settings.num_bytes, report.settings.range_bytes
    lines = [
        *harness.heading("One server", report.date, command, report.machine),
        f"A model of {num_bytes / 2**20:.0f} MiB goes up and comes down, in ranges of {each_bytes / 2**20:g} MiB: median over "
        f"{report.settings.rounds} rounds in which contenders take turns. `{SUM}`: with `Synchronous()`, of one worker. "
        f"Memory, for a model of {report.settings.memory_bytes / 2**20:g} MiB: the highest that the resident memory of a new "
        "server came to, less what it was before, while two workers pushed and pulled at once; allowed are the values, the "
        "optimizer's state and two buffers.",
        "",
        *claims(report),
        "",
        *harness.table("where", "contender", "seconds", "GB/s, both ways"),
    ]
    for row in report.rows:
        median = statistics.median(row.seconds)
        lines.append(f"| {where(row)} | {row.contender} | {seconds(median)} | {2 * num_bytes / median / 1e9:.2f} |")
    return lines


def main(arguments: list[str]) -> None:
    parser = harness.parser("What one server moves.", quick="2 rounds")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mebibytes", type=int, default=64, help="of the model (64)")
    options = parser.parse_args(arguments)
    rounds = 2 if options.quick else options.rounds
    harness.check("cpu", rounds)
    settings = SpeedSettings(num_bytes=options.mebibytes << 20, rounds=rounds)
    report = run(settings)
    weighed = [run(msgspec.structs.replace(settings, weighed=kind)).memory for kind in (SGD, ADAMW)]
    report = msgspec.structs.replace(report, memory=[row for rows in weighed for row in rows])
    text = as_markdown(report, harness.command_of("server_speed", arguments))
    stem = harness.write("server_speed", report, text, report.date, report.machine, harness.folder_of(options))
    harness.show(claims(report), stem)


if __name__ == "__main__":
    harness.run(main)
