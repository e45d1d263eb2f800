"""Every claim about the speed of all-reduce, measured on this machine: `make bench`.

    python benchmarks/all_reduce.py                 all cases that need no GPU (about five minutes on 2 cores)
    python benchmarks/all_reduce.py --gpu           the GPU case only: 4 lab hosts sharing one GPU
    python benchmarks/all_reduce.py --only host-2   one case
    python benchmarks/all_reduce.py --quick         small sizes, one round: does the script work?

Writes `all_reduce_MACHINE_DATE.json` (every time of every round, versions, machine) and `.md` (claims with verdicts, then all
rows, also those where we lose). Needs root or user namespaces for the lab. Let the machine be idle: every ratio compares
contenders that took turns in one run, but a machine without a free core measures its scheduler.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

import harness
import msgspec

from stretto.bench.command import measured
from stretto.bench.results import AllReduceReport, AllReduceRow
from stretto.bench.settings import Settings, check, parse_algorithms, show_size
from stretto.bench.show import cells, headline, show

K, M = 1 << 10, 1 << 20
Measure = Callable[[dict[str, AllReduceRow]], float]  # from the rows of one size, "auto" over each wire and gloo, by wire


@dataclass(frozen=True)
class AllReduceClaim:
    case: str
    size: int
    text: str
    target: float
    measure: Measure


def against_gloo(rows: dict[str, AllReduceRow]) -> float:
    return rows["gloo"].median / rows["plain"].median


def share_of_tcp(rows: dict[str, AllReduceRow]) -> float:
    return rows["plain"].share_of_tcp or 0.0


def encrypted_share(rows: dict[str, AllReduceRow]) -> float:
    return rows["plain"].median / rows["encrypted"].median


def cases(repeat: int) -> dict[str, Settings]:
    """What is run, by name. `catalogue` and `busy` carry no claim: they are there to be looked at."""
    auto = ["auto"]
    return {
        "lab-4": Settings(sizes=[4 * K, M, 32 * M], algorithms=auto, workers=4, lab=True, repeat=repeat),
        "lab-4-1gbit": Settings(sizes=[4 * K, M, 32 * M], algorithms=auto, workers=4, lab=True, rate="1gbit", repeat=repeat),
        "host-2": Settings(sizes=[32 * M], algorithms=auto, workers=2, repeat=repeat),
        "host-4": Settings(sizes=[32 * M], algorithms=auto, workers=4, repeat=repeat),
        "catalogue": Settings(
            sizes=[4 * K, M, 32 * M], algorithms=parse_algorithms("all"), wire="plain", workers=4, lab=True, repeat=repeat
        ),
        "busy": Settings(sizes=[4 * K, M, 32 * M], algorithms=auto, workers=2, busy=True, repeat=repeat),
        "gpu": Settings(sizes=[200 * M], algorithms=auto, workers=4, lab=True, rate="10gbit", device="cuda", repeat=repeat),
    }


CLAIMS = (
    AllReduceClaim("lab-4", 4 * K, "auto against gloo, 4 lab hosts, links unshaped", 3.0, against_gloo),
    AllReduceClaim("lab-4", M, "auto against gloo, 4 lab hosts, links unshaped", 1.0, against_gloo),
    AllReduceClaim("lab-4", 32 * M, "auto against gloo, 4 lab hosts, links unshaped", 0.97, against_gloo),
    AllReduceClaim("lab-4-1gbit", 4 * K, "auto against gloo, 4 lab hosts, 1 Gbit/s", 2.5, against_gloo),
    AllReduceClaim("lab-4-1gbit", M, "auto against gloo, 4 lab hosts, 1 Gbit/s", 1.0, against_gloo),
    AllReduceClaim("lab-4-1gbit", 32 * M, "auto against gloo, 4 lab hosts, 1 Gbit/s", 0.98, against_gloo),
    AllReduceClaim("lab-4-1gbit", 32 * M, "auto against a bare TCP stream of the same bytes, 1 Gbit/s", 0.97, share_of_tcp),
    AllReduceClaim("lab-4-1gbit", 32 * M, "encrypted against plain, 1 Gbit/s", 0.90, encrypted_share),
    AllReduceClaim("host-2", 32 * M, "auto against gloo, 2 workers of one host", 1.5, against_gloo),
    AllReduceClaim("host-4", 32 * M, "auto against gloo, 4 workers of one host", 1.5, against_gloo),
    AllReduceClaim("gpu", 200 * M, "auto against gloo, CUDA tensors, 4 lab hosts sharing a GPU, 10 Gbit/s", 0.97, against_gloo),
)


def quick(settings: Settings) -> Settings:
    small = list(dict.fromkeys(min(size, 64 * K) for size in settings.sizes))
    return msgspec.structs.replace(settings, sizes=small, repeat=1, warm_up=1)


def judged(claim: AllReduceClaim, report: AllReduceReport, size: int) -> str:
    """One line of the table of claims."""
    rows = [row for row in report.rows if row.size == size and row.load == "idle"]
    by_wire = {row.wire: row for row in rows if row.contender in ("auto", "gloo")}
    found = claim.measure(by_wire)
    verdict = harness.judge(report.settings.repeat, met=found >= claim.target)
    if size != claim.size and not verdict.startswith("not judged"):
        verdict = f"not judged: the claim is about {show_size(claim.size)}"
    return f"| {claim.text} | {show_size(size)} | {claim.target:.2f} | {found:.2f} | {verdict} |"


def claims_table(reports: dict[str, AllReduceReport], shrink: Callable[[int], int]) -> list[str]:
    lines = harness.table("claim", "size", "at least", "measured", "verdict")
    return lines + [judged(claim, reports[claim.case], shrink(claim.size)) for claim in CLAIMS if claim.case in reports]


def rows_table(name: str, report: AllReduceReport) -> list[str]:
    columns = ("contender", "wire", "time", "middle half", "algorithm MB/s", "bus MB/s", "of bare TCP", "x gloo")
    lines = ["", f"## {name}", "", headline(report).splitlines()[0], "", *harness.table("size", "main thread", *columns)]
    return lines + [f"| {show_size(row.size)} | {row.load} | {' | '.join(cells(row))} |" for row in report.rows]


def as_markdown(reports: dict[str, AllReduceReport], shrink: Callable[[int], int], command: str) -> list[str]:
    first = next(iter(reports.values()))
    lines = [
        *harness.heading("All-reduce", first.date, command, first.machine, first.machine.gpu),
        f"Median over {first.settings.repeat} rounds of the slowest rank's time; contenders take turns in each round. "
        "Ratios above 1 mean that we are faster.",
        "",
        *claims_table(reports, shrink),
    ]
    for name, report in reports.items():
        lines += rows_table(name, report)
    return lines


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser("Measure every claim about all-reduce on this machine.", quick="small sizes, one round")
    parser.add_argument("--gpu", action="store_true", help="the GPU case only")
    parser.add_argument("--only", action="append", choices=sorted(cases(1)), help="this case; may be repeated")
    parser.add_argument("--repeat", type=int, default=11, help="rounds that count (11)")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    names = options.only or (["gpu"] if options.gpu else [name for name in cases(1) if name != "gpu"])
    command = harness.command_of("all_reduce", arguments)
    reports: dict[str, AllReduceReport] = {}
    for name in names:
        settings = msgspec.structs.replace(cases(options.repeat)[name], command=command)
        print(f"--- {name}", flush=True)
        reports[name] = measured(check(quick(settings) if options.quick else settings), os.environ)
        show(reports[name])
    shrink: Callable[[int], int] = (lambda size: min(size, 64 * K)) if options.quick else (lambda size: size)
    first, text = next(iter(reports.values())), as_markdown(reports, shrink, command)
    stem = harness.write("all_reduce", reports, text, first.date, first.machine, harness.folder_of(options), first.machine.gpu)
    harness.show(claims_table(reports, shrink), stem)


if __name__ == "__main__":
    harness.run(main)
