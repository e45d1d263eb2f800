"""Does a group have the network to itself? Two groups of 2 on 4 lab hosts at 1 Gbit/s, at once, against a job of 2.

    python benchmarks/groups.py            both all-reduce 32 MB; 11 turns
    python benchmarks/groups.py --quick    1 MB, two turns: does the script work?

A job of four workers, split into two groups that both all-reduce at once, and a job of two, each on lab hosts of its own,
take turns (`before_after.py` has how): the first of a turn is last in the next. The time of a turn is that of the slowest worker.
Writes `groups_MACHINE_DATE.json` and `.md`. Let the machine be idle. Needs root or user namespaces for the lab.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack

import msgspec
from before_after import HERE, compared, crew
from harness import command_of, folder_of, heading, parser, ratio, run, show, table, write

from stretto.bench.machine import MachineInfo, describe
from stretto.bench.turns import now

AT_LEAST = 0.9  # of the speed of a job of two
CASE = "pairs, {}"


class GroupsReport(msgspec.Struct, frozen=True, kw_only=True):
    command: str
    date: str
    machine: MachineInfo
    num_bytes: int
    seconds: dict[str, list[float]]  # "two groups", "a job of 2": of the slowest worker, one for each turn


def measured(num_bytes: int, turns: int) -> dict[str, list[float]]:
    def lab(hosts: int) -> list[str]:
        return ["lab", "--hosts", str(hosts), "--rate", "1gbit", "--", sys.executable]

    with ExitStack() as opened:
        crews = {
            name: opened.enter_context(crew(name, HERE, workers, lab(workers)))
            for name, workers in (("a job of 2", 2), ("two groups", 4))
        }
        return compared(crews, CASE.format(num_bytes), turns)


def as_markdown(report: GroupsReport) -> tuple[list[str], list[str]]:
    """The page, and its table."""
    alone, groups = report.seconds["a job of 2"], report.seconds["two groups"]
    found = ratio(alone, groups)
    times = [f"{1e3 * statistics.median(each):.1f}" for each in (alone, groups)]
    claim = table("all-reduce", "a job of 2, ms", "two groups at once, ms", "speed of a group", "at least", "verdict")
    verdict = found.at_least(AT_LEAST, len(alone))
    claim += [f"| {report.num_bytes} bytes | {' | '.join(times)} | {found} | {AT_LEAST} | {verdict} |"]
    return [*heading("Groups", report.date, report.command, report.machine), *claim], claim


def main(arguments: list[str]) -> None:
    made = parser("Two groups at once against a job of the size of one.", "1 MB, two turns")
    made.add_argument("--turns", type=int, default=11, help="turns of each job (11)")
    options = made.parse_args(arguments)
    num_bytes, turns = (1 << 20, 2) if options.quick else (32 << 20, options.turns)
    report = GroupsReport(
        command=command_of("groups", arguments), date=now(), machine=describe(), num_bytes=num_bytes,
        seconds=measured(num_bytes, turns),
    )  # fmt: skip
    page, claim = as_markdown(report)
    show(claim, write("groups", report, page, report.date, report.machine, folder_of(options)))


if __name__ == "__main__":
    run(main)
