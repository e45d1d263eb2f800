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
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stretto.bench.results import Report, Row
from stretto.bench.settings import Settings, check, parse_algorithms, show_size
from stretto.bench.show import cells, headline, show
from stretto.bench.start import run_workers

LEAST_ROUNDS = 7
K, M = 1 << 10, 1 << 20
RESULTS = Path(__file__).parent / "results"
QUICK_RESULTS = Path("build/benchmarks")
Measure = Callable[[dict[str, Row]], float]  # from the rows of one size, "auto" over each wire and gloo, by wire


@dataclass(frozen=True)
class Claim:
    case: str
    size: int
    text: str
    target: float
    measure: Measure


def against_gloo(rows: dict[str, Row]) -> float:
    return rows["gloo"].median / rows["plain"].median


def share_of_tcp(rows: dict[str, Row]) -> float:
    return rows["plain"].share_of_tcp or 0.0


def encrypted_share(rows: dict[str, Row]) -> float:
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
    Claim("lab-4", 4 * K, "auto against gloo, 4 lab hosts, links unshaped", 3.0, against_gloo),
    Claim("lab-4", M, "auto against gloo, 4 lab hosts, links unshaped", 1.0, against_gloo),
    Claim("lab-4", 32 * M, "auto against gloo, 4 lab hosts, links unshaped", 0.97, against_gloo),
    Claim("lab-4-1gbit", 4 * K, "auto against gloo, 4 lab hosts, 1 Gbit/s", 2.5, against_gloo),
    Claim("lab-4-1gbit", M, "auto against gloo, 4 lab hosts, 1 Gbit/s", 1.0, against_gloo),
    Claim("lab-4-1gbit", 32 * M, "auto against gloo, 4 lab hosts, 1 Gbit/s", 0.98, against_gloo),
    Claim("lab-4-1gbit", 32 * M, "auto against a bare TCP stream of the same bytes, 1 Gbit/s", 0.97, share_of_tcp),
    Claim("lab-4-1gbit", 32 * M, "encrypted against plain, 1 Gbit/s", 0.90, encrypted_share),
    Claim("host-2", 32 * M, "auto against gloo, 2 workers of one host", 1.5, against_gloo),
    Claim("host-4", 32 * M, "auto against gloo, 4 workers of one host", 1.5, against_gloo),
    Claim("gpu", 200 * M, "auto against gloo, CUDA tensors, 4 lab hosts sharing a GPU, 10 Gbit/s", 0.97, against_gloo),
)


def quick(settings: Settings) -> Settings:
    small = list(dict.fromkeys(min(size, 64 * K) for size in settings.sizes))
    return msgspec.structs.replace(settings, sizes=small, repeat=1, warm_up=1)


def judged(claim: Claim, report: Report, size: int) -> str:
    """One line of the table of claims."""
    rows = [row for row in report.rows if row.size == size and row.load == "idle"]
    by_wire = {row.wire: row for row in rows if row.contender in ("auto", "gloo")}
    measured = claim.measure(by_wire)
    verdict = "met" if measured >= claim.target else "**missed**"
    if report.settings.repeat < LEAST_ROUNDS:
        verdict = f"not judged: fewer than {LEAST_ROUNDS} rounds"
    elif size != claim.size:
        verdict = f"not judged: the claim is about {show_size(claim.size)}"
    return f"| {claim.text} | {show_size(size)} | {claim.target:.2f} | {measured:.2f} | {verdict} |"


def claims_table(reports: dict[str, Report], shrink: Callable[[int], int]) -> list[str]:
    lines = ["| claim | size | at least | measured | verdict |", "|---|---|---|---|---|"]
    return lines + [judged(claim, reports[claim.case], shrink(claim.size)) for claim in CLAIMS if claim.case in reports]


def rows_table(name: str, report: Report) -> list[str]:
    lines = ["", f"## {name}", "", headline(report).splitlines()[0], ""]
    lines += ["| size | main thread | contender | wire | time | middle half | algorithm MB/s | bus MB/s | of bare TCP | x gloo |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    return lines + [f"| {show_size(row.size)} | {row.load} | {' | '.join(cells(row))} |" for row in report.rows]


def as_markdown(reports: dict[str, Report], shrink: Callable[[int], int], command: str) -> str:
    first = next(iter(reports.values()))
    versions = ", ".join(f"{name} {version}" for name, version in first.machine.versions.items())
    lines = [
        "# All-reduce",
        "",
        f"{first.date}; `{command}`",
        "",
        f"{first.machine.processor}, {first.machine.cores} cores, {first.machine.memory_bytes / 2**30:.0f} GiB, "
        f"{first.machine.system}{', ' + first.machine.gpu if first.machine.gpu else ''}; {versions}.",
        "",
        f"Median over {first.settings.repeat} rounds of the slowest rank's time; contenders take turns in each round. "
        "Ratios above 1 mean that we are faster.",
        "",
        *claims_table(reports, shrink),
    ]
    for name, report in reports.items():
        lines += rows_table(name, report)
    return "\n".join(lines) + "\n"


def machine_name(report: Report) -> str:
    name = report.machine.gpu or f"{report.machine.processor} {report.machine.cores} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure every claim about all-reduce on this machine.")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round; written to build/benchmarks")
    parser.add_argument("--gpu", action="store_true", help="the GPU case only")
    parser.add_argument("--only", action="append", choices=sorted(cases(1)), help="this case; may be repeated")
    parser.add_argument("--repeat", type=int, default=11, help="rounds that count (11)")
    parser.add_argument("--output", type=Path, help="folder for the two files (benchmarks/results)")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    names = options.only or (["gpu"] if options.gpu else [name for name in cases(1) if name != "gpu"])
    command = " ".join(["python benchmarks/all_reduce.py", *arguments])
    reports: dict[str, Report] = {}
    for name in names:
        settings = msgspec.structs.replace(cases(options.repeat)[name], command=command)
        print(f"--- {name}", flush=True)
        reports[name] = run_workers(check(quick(settings) if options.quick else settings), os.environ)
        show(reports[name])
    folder = options.output or (QUICK_RESULTS if options.quick else RESULTS)
    write(reports, folder, (lambda size: min(size, 64 * K)) if options.quick else (lambda size: size), command)


def write(reports: dict[str, Report], folder: Path, shrink: Callable[[int], int], command: str) -> None:
    first = next(iter(reports.values()))
    stem = folder / f"all_reduce_{machine_name(first)}_{first.date[:10]}"
    folder.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(reports), indent=1) + b"\n")
    stem.with_suffix(".md").write_text(as_markdown(reports, shrink, command))
    print("\n".join(claims_table(reports, shrink)))
    print(f"written: {stem}.md and {stem}.json")


if __name__ == "__main__":
    main(sys.argv[1:])
