"""Did anything get slower? Two commits, measured in alternation on this machine.

    git worktree add /tmp/before COMMIT
    python benchmarks/before_after.py --before /tmp/before                 step and all-reduce, this tree against that one
    python benchmarks/before_after.py --before /tmp/before --only host-4   one case
    python benchmarks/before_after.py --before /tmp/before --quick         one round, small sizes: does the script work?

Two commits cannot live in one process, so each round starts both of them, in turns, with the benchmark scripts and the library of
their own tree. Every process times a peer beside us (DDP on gloo, gloo's all-reduce) in turns of its own; what is compared is our
time in units of the peer's, so that a machine that is slower for a minute slows down both. A round gives one ratio, before /
after; shown are the median over rounds and the interval that holds the true median with 95 % confidence. Above 1: we got faster.

Writes `before_after_MACHINE_DATE.json` and `.md`, after every round anew. Let the machine be idle. Needs root or user namespaces
for the lab.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from step import LEAST_ROUNDS, QUICK_RESULTS, RESULTS, judge, machine_name, ratio

from stretto.bench.machine import Machine, describe
from stretto.errors import ConfigurationError, StrettoError

HERE = Path(__file__).resolve().parents[1]
SLOWER_AT_MOST = 0.97
TIMEOUT_S = 1800
CASES: dict[str, tuple[str, list[str]]] = {  # the script and its options
    "host-4": ("step", ["-n", "4"]),
    "lab-4": ("step", ["--hosts", "4"]),
    "lab-4-1gbit": ("step", ["--hosts", "4", "--rate", "1gbit"]),
    "alone": ("step", ["-n", "1", "--models", "gpt"]),
    "all-reduce": ("all_reduce", ["--only", "lab-4", "--only", "lab-4-1gbit", "--only", "host-2", "--only", "host-4"]),
}
QUICK_CASES: dict[str, tuple[str, list[str]]] = {
    "host-4": ("step", ["-n", "2", "--quick", "--models", "small"]),
    "all-reduce": ("all_reduce", ["--only", "host-2", "--quick"]),
}
COUNTED = {"step": "--rounds", "all_reduce": "--repeat"}

Found = dict[str, float]  # case -> our time / the peer's time, in one process


class Report(msgspec.Struct, frozen=True, kw_only=True):
    command: str
    date: str
    machine: Machine
    commits: dict[str, str]
    turns: int  # of each contender in a process
    ratios: dict[str, dict[str, list[float]]]  # case -> tree -> ours / peer's, one per round


def measure(tree: Path, script: str, options: list[str], turns: int | None) -> Found:
    """Run a script of `tree` with the library of `tree`, and read what it found."""
    counted = [] if turns is None else [COUNTED[script], str(turns)]
    with tempfile.TemporaryDirectory(prefix="stretto-before-after-") as folder:
        command = [sys.executable, str(tree / "benchmarks" / f"{script}.py"), *options, *counted, "--output", folder]
        path = [str(tree / "src"), os.environ.get("PYTHONPATH", "")]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        (written,) = Path(folder).glob("*.json")
        content = json.loads(written.read_text())
    return _step(content) if script == "step" else _all_reduce(content)


def _step(reports: list[Any]) -> Found:
    found = {}
    for report in reports:
        settings = report["settings"]
        where = f"{settings['workers']} {'lab hosts' if settings['lab'] else 'workers'}{' ' + (settings['rate'] or '')}".rstrip()
        rows = {(row["model"], row["contender"]): statistics.median(row["seconds"]) for row in report["rows"]}
        for (model, contender), seconds in rows.items():
            if contender == "stretto":
                peer = rows.get((model, "DDP")) or rows[model, "plain loop"]
                found[f"step, {model}, {where}"] = seconds / peer
    return found


def _all_reduce(reports: dict[str, Any]) -> Found:
    found = {}
    for case, report in reports.items():
        gloo = {row["size"]: row["median"] for row in report["rows"] if row["wire"] == "gloo"}
        for row in report["rows"]:
            if row["contender"] == "auto":
                found[f"all-reduce, {case}, {row['size']} bytes, {row['wire']}"] = row["median"] / gloo[row["size"]]
    return found


def commit_of(tree: Path) -> str:
    if (tree / "COMMIT").is_file():  # where there is no git
        return (tree / "COMMIT").read_text().strip()
    asked = subprocess.run(["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def run(options: argparse.Namespace, command: str) -> Iterator[Report]:
    """What is known after each round."""
    before = options.before.resolve()
    if not (before / "benchmarks" / "step.py").is_file():
        raise ConfigurationError(
            f"--before {options.before}: this is no tree of stretto. Make one: git worktree add FOLDER COMMIT"
        )
    trees = {"before": before, "after": HERE}
    known = QUICK_CASES if options.quick else CASES
    cases = [known[name] for name in options.only or known]
    ratios: dict[str, dict[str, list[float]]] = {}
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    for number in range(1 if options.quick else options.rounds):
        for script, call in cases:
            for tree in sorted(trees, reverse=bool(number % 2)):
                found = measure(trees[tree], script, call, None if options.quick else options.turns)
                for case, value in found.items():
                    ratios.setdefault(case, {}).setdefault(tree, []).append(value)
        print(f"round {number + 1}", flush=True)
        yield Report(
            command=command,
            date=begun,
            machine=describe(),
            commits={name: commit_of(tree) for name, tree in trees.items()},
            turns=options.turns,
            ratios=ratios,
        )


def as_markdown(report: Report) -> str:
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    rounds = max(len(each["before"]) for each in report.ratios.values())
    lines = [
        "# Before and after", "",
        f"{report.date}; `{report.command}`", "",
        f"{machine.processor}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB, {machine.system}; {versions}.", "",
        f"Commit {report.commits['before']} (before) and {report.commits['after']} (after), started in turns in each of {rounds} "
        f"rounds. Our time in units of the peer's in the same process (median of {report.turns} turns), before / after: above 1 "
        "means that we got faster. With the 95 % interval of the median over rounds.", "",
        "| case | before, x peer | after, x peer | before / after | at least | verdict |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for case, trees in report.ratios.items():
        if len(trees.get("before", [])) != len(trees.get("after", [])):
            continue  # one of the trees does not measure it
        found = ratio(trees["before"], trees["after"])
        verdict = judge(len(trees["before"]), met=found.low >= SLOWER_AT_MOST, missed=found.high < SLOWER_AT_MOST)
        times = [1 / statistics.median(trees[name]) for name in ("before", "after")]
        shown = f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})"
        lines.append(f"| {case} | {times[0]:.2f} | {times[1]:.2f} | {shown} | {SLOWER_AT_MOST:.2f} | {verdict} |")
    return "\n".join(lines) + "\n"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the speed of two commits on this machine.")
    parser.add_argument("--before", type=Path, required=True, help="a tree of the earlier commit: git worktree add FOLDER COMMIT")
    parser.add_argument("--only", action="append", choices=sorted(CASES), help="this case; may be repeated")
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS, help=f"how often both are started ({LEAST_ROUNDS})")
    parser.add_argument("--turns", type=int, default=7, help="turns of each contender in a process (7)")
    parser.add_argument("--quick", action="store_true", help="one round, small sizes; written to build/benchmarks")
    parser.add_argument("--output", type=Path, help="folder for the two files (benchmarks/results)")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    shown = [word if word != str(options.before) else "TREE" for word in arguments]
    folder = options.output or (QUICK_RESULTS if options.quick else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    for report in run(options, " ".join(["python benchmarks/before_after.py", *shown])):
        stem = folder / f"before_after_{machine_name(report.machine)}_{report.date[:10]}"
        stem.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
        stem.with_suffix(".md").write_text(as_markdown(report))
    print(as_markdown(report))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except StrettoError as problem:
        raise SystemExit(f"before_after.py: {problem}") from None
