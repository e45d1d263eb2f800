"""Steps with servers that sum, against an all-reduce in a ring and torch's DDP: 4 lab hosts, gradients of a byte GPT.

    python benchmarks/servers.py                       links of 200 Mbit/s, where communication is the limit
    python benchmarks/servers.py --rate 1gbit
    python benchmarks/servers.py --quick               few rounds: does the script work?

A worker and a server share each host and its link, so the bytes on a link are those of the ring. 4 hosts more have a server each
and nothing else, for the row "on hosts of their own", where a link carries the model once each way. On two processors the servers
also take time from the model. Writes `servers_MACHINE_DATE.json` and `.md`. Let the machine be idle. Needs the lab.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import harness
import msgspec
from compress_worker import CompressStepReport, CompressStepSettings
from harness import ratio
from step_worker import DDP, LIMIT

from stretto.bench.start import run_workers
from stretto.bench.table_text import seconds, spread
from stretto.bench.turns import quartiles

WORKER = Path(__file__).with_name("compress_worker.py")
RING, FOUR, APART = "ring", "4 servers", "4 servers on hosts of their own"
STRATEGIES = {
    RING: 'Strategy(aggregate=AllReduce("ring"), schedule=Buckets(bytes=4194304))',
    FOUR: 'Strategy(aggregate=ParameterServer(placement="beside"))',
    APART: 'Strategy(aggregate=ParameterServer(placement="dedicated"))',
    "4 servers, 1 copy": 'Strategy(aggregate=ParameterServer(replicas=1, placement="beside"))',
    "2 servers": 'Strategy(aggregate=ParameterServer(shards=2, placement="beside"))',
    "1 server": 'Strategy(aggregate=ParameterServer(shards=1, placement="beside"))',
}
OF_RING = {FOUR: 0.9, APART: 1.2}


def run(settings: CompressStepSettings) -> CompressStepReport:
    answer = run_workers(str(WORKER), settings, os.environ, workers=settings.hosts, lab=True, rate=settings.rate, servers=4)
    return msgspec.json.decode(answer, type=CompressStepReport)


def claims(report: CompressStepReport) -> list[str]:
    rows = {row.contender: row.seconds for row in report.rows}
    lines = harness.table("links", "claim", "target", "measured", "verdict")
    for name, target in OF_RING.items():
        if name in rows:  # earlier results are without hosts for servers
            found = ratio(rows[RING], rows[name])
            verdict = found.at_least(target, report.settings.rounds)
            lines.append(f"| {report.settings.rate} | {name}, x {RING}, at least | {target} | {found} | {verdict} |")
    return lines


def as_markdown(report: CompressStepReport, command: str) -> list[str]:
    settings, rows = report.settings, {row.contender: row.seconds for row in report.rows}
    lines = [
        *harness.heading("Servers that sum", report.date, command, report.machine),
        f"Byte-level GPT, {report.num_parameters / 1e6:.1f} M parameters, batch {settings.rows} x {settings.length} on each of "
        f"{settings.hosts} lab hosts, links of {settings.rate}. Median over {settings.rounds} rounds of the slowest rank's time "
        "per step; contenders take turns in each round. Above 1 means faster.",
        "",
        *claims(report),
        "",
        *harness.table("contender", "step", "middle half", f"x {RING}", "x DDP"),
    ]
    for name, times in sorted(rows.items(), key=lambda each: statistics.median(each[1])):
        shown = f"{seconds(statistics.median(times))} | {spread(quartiles(times))}"
        lines.append(f"| {name} | {shown} | {ratio(rows[RING], times)} | {ratio(rows[DDP], times)} |")
    return lines


def main(arguments: list[str]) -> None:
    parser = harness.parser("Steps with servers that sum, on 4 lab hosts.", quick="2 rounds")
    parser.add_argument("--rate", default="200mbit", help="of the links (200mbit)")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    rounds = 2 if options.quick else options.rounds
    harness.check("cpu", rounds)
    report = run(CompressStepSettings(strategies=STRATEGIES, peers=(LIMIT, DDP), rounds=rounds, rate=options.rate))
    text = as_markdown(report, harness.command_of("servers", arguments))
    stem = harness.write("servers", report, text, report.date, report.machine, harness.folder_of(options))
    harness.show(claims(report), stem)


if __name__ == "__main__":
    harness.run(main)
