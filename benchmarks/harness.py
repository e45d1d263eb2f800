"""What the scripts of this folder share: when a claim is met, where results are written and what stands above them.

Contenders take turns in every script (`stretto.bench.turns`), so two of them are compared round by round.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from stretto.bench.machine import MachineInfo
from stretto.bench.results import as_json
from stretto.bench.turns import check_device
from stretto.errors import ConfigurationError, StrettoError

LEAST_ROUNDS = 7
RISK = 0.05
RESULTS = Path(__file__).parent / "results"
QUICK_RESULTS = Path("build/benchmarks")


class Ratio(NamedTuple):
    """A ratio of two contenders: the median over rounds, and the interval that holds the true median with 95 % confidence."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"

    def at_least(self, target: float, rounds: int) -> str:
        return judge(rounds, met=self.low >= target, missed=self.high < target)


def ratio(above: list[float], below: list[float]) -> Ratio:
    """Round by round, for the two took turns. Whatever the distribution, the true median lies between the k-th smallest and the
    k-th largest of n values, unless fewer than k of n fair coins show heads (or tails): k is the largest with 5 % for that."""
    values = sorted(a / b for a, b in zip(above, below, strict=True))
    n, k = len(values), 1
    while 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n <= RISK:
        k += 1
    return Ratio(statistics.median(values), values[k - 1], values[n - k])


def judge(rounds: int, *, met: bool, missed: bool | None = None) -> str:
    """A claim is met or missed only if the whole interval says so: on a busy machine a median alone says nothing."""
    if rounds < LEAST_ROUNDS:
        return f"not judged: fewer than {LEAST_ROUNDS} rounds"
    return verdict(met) if met or missed is not False else "undecided: too noisy"


def verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def table(*columns: str) -> list[str]:
    """The first two lines of a table in Markdown."""
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def heading(title: str, date: str, command: str, machine: MachineInfo, gpu: str | None = None) -> list[str]:
    """What stands above every result: when, how and where it was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return [
        f"# {title}",
        "",
        f"{date}; `{command}`",
        "",
        f"{machine.processor}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB, {machine.system}"
        f"{', ' + gpu if gpu else ''}; {versions}.",
        "",
    ]


def write(
    theme: str, report: object, text: list[str], date: str, machine: MachineInfo, folder: Path, gpu: str | None = None
) -> Path:
    """THEME_MACHINE_DATE.json and .md."""
    name = gpu or f"{machine.processor} {machine.cores} cores"
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{theme}_{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}_{date[:10]}"
    stem.with_suffix(".json").write_bytes(as_json(report))
    stem.with_suffix(".md").write_text("\n".join(text) + "\n")
    return stem


def show(claims: list[str], stem: Path) -> None:
    print("\n".join(claims))
    print(f"written: {stem}.md and {stem}.json")


def parser(description: str, quick: str) -> argparse.ArgumentParser:
    """`quick`: what --quick does."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--quick", action="store_true", help=f"{quick}; written to {QUICK_RESULTS}")
    made.add_argument("--output", type=Path, help="folder for the two files (benchmarks/results)")
    return made


def folder_of(options: argparse.Namespace) -> Path:
    folder: Path = options.output or (QUICK_RESULTS if options.quick else RESULTS)
    return folder


def check(device: str, rounds: int) -> None:
    check_device(device)
    if rounds < 1:
        raise ConfigurationError(f"--rounds {rounds}: there would be nothing to report. Write {LEAST_ROUNDS} or more.")


def command_of(script: str, arguments: list[str]) -> str:
    return shlex.join(["python", f"benchmarks/{script}.py", *arguments])


def run(main: Callable[[list[str]], None]) -> None:
    """Call a script's `main`; what it refuses is said without a traceback."""
    try:
        main(sys.argv[1:])
    except StrettoError as problem:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {problem}") from None
