"""Numbers and tables as people read them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from stretto.bench.machine import MachineInfo


def seconds(value: float) -> str:
    """Three significant digits, in the unit that suits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1 or unit == "µs":
            scaled = value * factor
            digits = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
            return f"{scaled:.{digits}f} {unit}"
    raise AssertionError("the last unit takes everything")


def spread(quartiles: tuple[float, float]) -> str:
    return f"{seconds(quartiles[0])} - {seconds(quartiles[1])}"


def bandwidth(bytes_per_second: float) -> str:
    """In units of 10^6 bytes per second, as network rates are counted."""
    return f"{bytes_per_second / 1e6:,.0f}" if bytes_per_second >= 1e7 else f"{bytes_per_second / 1e6:.2f}"


def wide_console(file: TextIO | None, narrowest: int) -> Console:
    """For stdout or a file. Tables are not broken where that is narrow, but wider than what they are written to."""
    target = sys.stdout if file is None else file
    console = Console(file=target, highlight=False)
    return console if console.width >= narrowest else Console(file=target, highlight=False, width=narrowest)


def where_it_ran(machine: MachineInfo, *packages: str) -> str:
    """The machine and the versions of these packages, where they are there."""
    versions = ", ".join(f"{name} {machine.versions[name]}" for name in packages if name in machine.versions)
    return (
        f"{machine.processor}, {machine.cores} cores, {machine.system}; {versions}, "
        f"stretto {machine.versions['stretto']}, Python {machine.versions['python']}"
    )


def plain_table(title: str, names: int, columns: Sequence[str]) -> Table:
    """The first `names` columns are text, the others numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < names else "right", no_wrap=True)
    return table
