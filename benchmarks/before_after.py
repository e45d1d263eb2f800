"""Did anything get slower? Two commits, in turns, in one run on this machine.

    git worktree add /tmp/before COMMIT
    python benchmarks/before_after.py --before /tmp/before                 this tree against that one
    python benchmarks/before_after.py --before /tmp/before --only host-4   in one place
    python benchmarks/before_after.py --before /tmp/before --quick         one model, few turns: does the script work?

A job of each commit is started (`before_after_worker.py`, with the library of its own tree) and both stay. They take turns: one
takes some steps, or reduces a tensor some times, for about `TURN_S`, while the other sleeps; then the other way round, the first
of a turn being last in the next. A turn gives one ratio, before / after, of the slowest ranks' times; so a machine that is slower
for a second slows down both. Jobs are started anew a few times, because where a process happens to lie in memory is worth some
percent too. Shown are the median over all turns and the interval that holds the true median with 95 % confidence. Above 1: we got
faster.

Writes `before_after_MACHINE_DATE.json` and `.md`. Let the machine be idle. Needs root or user namespaces for the lab.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import harness
import msgspec
from harness import ratio

from stretto.bench.machine import MachineInfo, describe
from stretto.bench.turns import now, take_turns
from stretto.errors import ConfigurationError

HERE = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("before_after_worker.py")
SLOWER_AT_MOST = 0.97
START_S, TURN_LIMIT_S, END_S = 90.0, 120.0, 30.0
TURN_S = 0.15
MOST_TIMES = 200

STEPS = ["step, linear", "step, gpt", "step, small", "step, tiny"]
REDUCTIONS = [f"all-reduce, {size}" for size in (4 << 10, 1 << 20, 32 << 20)]
CODECS = ["Int8()", "ErrorFeedback(Sign())", "ErrorFeedback(TopK(0.01))", "ErrorFeedback(PowerSGD(4))"]
COMPRESSED = [f"compressed, {codec}" for codec in CODECS]
PLACES: dict[str, tuple[int, list[str], list[str]]] = {  # workers, how they are started, what they do
    "host-4": (4, ["run", "-n", "4"], STEPS + REDUCTIONS),
    "lab-4": (4, ["lab", "--hosts", "4", "--", sys.executable], STEPS + REDUCTIONS),
    "lab-4-1gbit": (4, ["lab", "--hosts", "4", "--rate", "1gbit", "--", sys.executable], STEPS[:2] + REDUCTIONS),
    "lab-4-25mbit": (4, ["lab", "--hosts", "4", "--rate", "25mbit", "--", sys.executable], COMPRESSED),
    "alone": (1, ["run", "-n", "1"], STEPS),
}


class BeforeAfterReport(msgspec.Struct, frozen=True, kw_only=True):
    command: str
    date: str
    machine: MachineInfo
    commits: dict[str, str]
    starts: int
    seconds: dict[str, dict[str, list[float]]]  # place and case -> tree -> per time, of the slowest rank, one per turn


class Crew:
    """The workers of one tree's job."""

    def __init__(self, connections: list[socket.socket]) -> None:
        self._files = [connection.makefile("rw") for connection in connections]

    def work(self, case: str, times: int) -> float:
        """Seconds for each time, of the slowest rank."""
        for file in self._files:
            file.write(json.dumps({"case": case, "times": times}) + "\n")
            file.flush()
        said = [file.readline() for file in self._files]
        if not all(said):
            raise SystemExit(f"a worker has ended in the middle of {case!r}: its output is above")
        return max(float(json.loads(line)["seconds"]) for line in said)


@contextmanager
def crew(name: str, tree: Path, workers: int, start: list[str]) -> Iterator[Crew]:
    """Start a job with the library of `tree`; end it."""
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder, ExitStack() as opened:
        path = str(Path(folder, "driver"))
        listening = opened.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(path)
        listening.listen(workers)
        listening.settimeout(START_S)
        known = [str(tree / "src"), os.environ.get("PYTHONPATH", "")]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, known))}
        command = [sys.executable, "-c", "from stretto.cli import main; main()", *start, str(WORKER), path]
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL)
        opened.callback(_end, process)
        connections = [opened.enter_context(listening.accept()[0]) for _ in range(workers)]
        for connection in connections:
            connection.settimeout(TURN_LIMIT_S)
            if not Path(json.loads(_line(connection))["library"]).is_relative_to(tree):
                raise SystemExit(f"a worker of {name!r} has the library of another tree")
        yield Crew(connections)
        for connection in connections:
            connection.shutdown(socket.SHUT_WR)


def _line(connection: socket.socket) -> bytes:
    said = b""
    while not said.endswith(b"\n"):
        more = connection.recv(1)
        if not more:
            raise SystemExit("a worker has ended before it began: its output is above")
        said += more
    return said


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def compared(crews: dict[str, Crew], case: str, turns: int) -> dict[str, list[float]]:
    """The times of every turn. How long a turn is, both learn from the slower one."""
    slowest = max(each.work(case, 2) for each in crews.values())
    times = max(1, min(MOST_TIMES, math.ceil(TURN_S / slowest)))
    seconds = take_turns([partial(each.work, case, times) for each in crews.values()], turns)
    return dict(zip(crews, seconds, strict=True))


def commit_of(tree: Path) -> str:
    if (tree / "COMMIT").is_file():  # where there is no git
        return (tree / "COMMIT").read_text().strip()
    asked = subprocess.run(["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def run(options: argparse.Namespace, command: str) -> BeforeAfterReport:
    before = options.before.resolve()
    if not (before / "src" / "stretto").is_dir():
        raise ConfigurationError(
            f"--before {options.before}: this is no tree of stretto. Make one: git worktree add FOLDER COMMIT"
        )
    trees = {"before": before, "after": HERE}
    seconds: dict[str, dict[str, list[float]]] = {}
    for place in options.only or PLACES:
        workers, start, cases = PLACES[place]
        for number in range(options.starts):
            with ExitStack() as opened:
                crews = {name: opened.enter_context(crew(name, tree, workers, start)) for name, tree in trees.items()}
                for case in cases[:1] if options.quick else cases:
                    for name, found in compared(crews, case, options.turns).items():
                        seconds.setdefault(f"{place}: {case}", {}).setdefault(name, []).extend(found)
            print(f"{place}, start {number + 1}", flush=True)
    return BeforeAfterReport(
        command=command,
        date=now(),
        machine=describe(),
        commits={name: commit_of(tree) for name, tree in trees.items()},
        starts=options.starts,
        seconds=seconds,
    )


def as_markdown(report: BeforeAfterReport) -> list[str]:
    lines = [
        *harness.heading("Before and after", report.date, report.command, report.machine),
        f"Commit {report.commits['before']} (before) and {report.commits['after']} (after): a job of each, started "
        f"{report.starts} times, taking turns. Times are of the slowest rank, per step or all-reduce (`auto`, sizes in bytes). "
        "Ratios above 1 mean that we got faster; with the 95 % interval of the median over turns.",
        "",
        *harness.table("case", "before, ms", "after, ms", "before / after", "at least", "verdict"),
    ]
    for case, trees in report.seconds.items():
        found = ratio(trees["before"], trees["after"])
        verdict = found.at_least(SLOWER_AT_MOST, len(trees["before"]))
        times = [f"{1e3 * statistics.median(trees[name]):.3f}" for name in ("before", "after")]
        shown = f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})"
        lines.append(f"| {case} | {times[0]} | {times[1]} | {shown} | {SLOWER_AT_MOST:.2f} | {verdict} |")
    return lines


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = harness.parser("Compare the speed of two commits on this machine.", quick="one case, few turns")
    parser.add_argument("--before", type=Path, required=True, help="a tree of the earlier commit: git worktree add FOLDER COMMIT")
    parser.add_argument("--only", action="append", choices=sorted(PLACES), help="in this place; may be repeated")
    parser.add_argument("--starts", type=int, default=3, help="how often the two jobs are started (3)")
    parser.add_argument("--turns", type=int, default=11, help="turns of each job, for each case and start (11)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.starts, options.turns, options.only = 1, 2, options.only or ["alone"]
    return options


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    shown = [word if word != str(options.before) else "TREE" for word in arguments]
    report = run(options, harness.command_of("before_after", shown))
    text = as_markdown(report)
    harness.write("before_after", report, text, report.date, report.machine, harness.folder_of(options), report.machine.gpu)
    print("\n".join(text))


if __name__ == "__main__":
    harness.run(main)
