"""The report as a table, on a terminal or in a file."""

from __future__ import annotations

from itertools import groupby
from typing import TextIO

from rich.table import Table

from stretto.bench.results import AllReduceReport, AllReduceRow
from stretto.bench.settings import show_size
from stretto.bench.table_text import bandwidth, plain_table, seconds, spread, where_it_ran, wide_console

NARROWEST = 130
COLUMNS = ("contender", "wire", "time", "middle half", "algorithm MB/s", "bus MB/s", "of bare TCP", "x gloo")


def show(report: AllReduceReport, file: TextIO | None = None) -> None:
    """Print one table per size and load."""
    console = wide_console(file, NARROWEST)
    console.print(headline(report))
    for (size, load), rows in groupby(report.rows, key=lambda row: (row.size, row.load)):
        console.print(_table(report, size, load, list(rows)))
    console.print(footnotes(report))


def headline(report: AllReduceReport) -> str:
    settings, machine = report.settings, report.machine
    where = "lab hosts" if settings.lab else "workers"
    rate = f", links of {settings.rate}" if settings.rate else ""
    device = f", tensors on {machine.gpu}" if settings.device == "cuda" else ""
    return (
        f"all-reduce (sum, float32) between {settings.workers} {where}{rate}{device}; "
        f"{settings.repeat} rounds, each contender once per round\n"
        f"{where_it_ran(machine, 'torch')}"
    )


def footnotes(report: AllReduceReport) -> str:
    lines = [
        "Times: median over rounds of the slowest rank, with the middle half.",
        "Of bare TCP: t(bare TCP stream of the least bytes an all-reduce can send) / t.  x gloo: t(gloo) / t; above 1 is faster.",
    ]
    if not report.settings.lab and "encrypted" in report.settings.wires:
        lines.append("Workers of one host pass large tensors through shared memory, on the encrypted wire too.")
    return "\n".join(lines)


def _table(report: AllReduceReport, size: int, load: str, rows: list[AllReduceRow]) -> Table:
    busy = "" if not report.settings.busy else f", main thread {'idle' if load == 'idle' else f'in {load}'}"
    table = plain_table(f"{show_size(size)}{busy}", 2, COLUMNS)
    for row in sorted(rows, key=lambda row: row.median):
        table.add_row(*cells(row), style="bold" if row.contender == "auto" else "dim" if row.wire == "tcp" else None)
    return table


def cells(row: AllReduceRow) -> list[str]:
    """One line of the table, as text."""
    name = f"auto ({row.chosen})" if row.contender == "auto" else row.contender
    return [
        name,
        row.wire,
        seconds(row.median),
        spread(row.quartiles),
        bandwidth(row.algorithm_bandwidth),
        bandwidth(row.bus_bandwidth),
        "" if row.share_of_tcp is None else f"{row.share_of_tcp:.0%}",
        "" if row.times_gloo is None else f"{row.times_gloo:.2f}",
    ]
