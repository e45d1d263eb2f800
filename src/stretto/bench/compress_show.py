"""The report of `stretto bench compress` as tables.

Three tables for each size: how fast, what is sent and what is lost, and below which link speed it pays.
"""

from __future__ import annotations

from itertools import groupby
from typing import TextIO

from rich.table import Table

from stretto.bench.compress_gradients import KINDS
from stretto.bench.compress_results import CompressReport, CompressRow, Timing, paying
from stretto.bench.compress_settings import CompressSettings
from stretto.bench.settings import show_size
from stretto.bench.table_text import plain_table, seconds, spread, where_it_ran, wide_console

NARROWEST = 150
CALLS = ("encode", "decode", "encode_residual", "add_decoded")
PAIRED = {  # two calls, one after the other
    "enc+dec/copy": ("encode", "decode"),
    "enc+add/copy": ("encode", "add_decoded"),
    "new mem/copy": ("encode_new", "decode_new"),
}
LONGEST_NAME = 27  # beyond it a codec's name is written in several lines


def show(report: CompressReport, file: TextIO | None = None) -> None:
    console = wide_console(file, NARROWEST)
    console.print(headline(report))
    for size, group in groupby(report.rows, key=lambda row: row.size):
        rows = list(group)
        for title, head, lines in (speed_table(rows), sent_table(rows), pay_table(rows, report.settings)):
            console.print(_table(f"{show_size(size)}: {title}", head, lines))
        console.print("\n".join(recommendations(rows, report.settings)) + "\n", soft_wrap=True)
    console.print(footnotes(report.settings), soft_wrap=True)


def headline(report: CompressReport) -> str:
    settings, machine = report.settings, report.machine
    where = str(machine.gpu) if settings.device == "cuda" else "one thread"
    return (
        f"codecs on float32 gradients, {where}; {settings.rounds} rounds, each call once per round, in turn with a copy\n"
        f"{where_it_ran(machine, 'torch', 'numba', 'triton')}"
    )


def footnotes(settings: CompressSettings) -> str:
    return (
        "GB/s: bytes of the float32 values per second, median and middle half. /copy: a copy's time / that of these two calls.\n"
        "Codecs write to memory that they have kept from the call before, as in training; the exchanges use add_decoded.\n"
        "New mem: encode+decode where every call takes memory anew, as the first round does (CPU; a GPU's torch keeps it).\n"
        "Error: |x - C(x)| / |x|, contraction: 1 - its square, in a worker's first round; empty where it hands out a direction.\n"
        f"Computed: by one of {settings.workers} workers in a round, the network left out.\n"
        "Pays below: the link speed per worker at which a round takes as long as a ring all-reduce of float32.\n"
        "Assumed: no overlap, no latency, a core (or a GPU) for each worker. Convergence is another matter."
    )


Cells = tuple[str, list[str], list[list[str]]]  # title, names of columns, lines


def speed_table(rows: list[CompressRow]) -> Cells:
    fastest = min(rows, key=lambda row: row.copy.median)
    lines = [
        [row.codec, *(rate(row.calls.get(call)) for call in CALLS), *(percent(row.of_copy(*calls)) for calls in PAIRED.values())]
        for row in rows
        if row.calls
    ]
    title = f"GB/s (a copy: {rate(fastest.copy)}, into new memory: {rate(fastest.clone)})"
    return title, ["codec", *CALLS, *PAIRED], lines


def sent_table(rows: list[CompressRow]) -> Cells:
    head = ["codec", "payload bytes", "bits/value"]
    for kind in KINDS:
        head += [f"error, {kind}", "contraction"]
    lines = []
    for row in rows:
        line = [row.codec, f"{row.payload_bytes:,}", f"{row.bits_per_value:.3f}"]
        for kind in KINDS:
            found = row.quality.get(kind)
            line += ["", ""] if found is None else [f"{found.relative_error:.3g}", f"{found.contraction:.4f}"]
        lines.append(line)
    return "what a worker says, and what is lost", head, lines


def pay_table(rows: list[CompressRow], settings: CompressSettings) -> Cells:
    head = ["codec", "bytes sent", "x fewer", "computed", "middle half", "pays below"]
    head += [link(rate) for rate in settings.rates]
    lines = []
    for row in sorted(rows, key=lambda row: -(row.break_even_mbit or 0.0)):
        fewer = f"{row.bytes_uncompressed / row.bytes_sent:.1f}" if row.bytes_sent else ""
        below = "never" if row.break_even_mbit is None else link(row.break_even_mbit)
        times = [f"{row.speed_up(rate):.2f}" + ("" if row.pays(rate) else " !") for rate in settings.rates]
        taken = [seconds(row.exchange.median), spread(row.exchange.quartiles)]
        lines.append([row.codec, f"{row.bytes_sent:,}", fewer, *taken, below, *times])
    title = f"{settings.workers} workers: when it pays (and how many times faster than uncompressed; !: slower)"
    return title, head, lines


def recommendations(rows: list[CompressRow], settings: CompressSettings) -> list[str]:
    """For each link speed those that pay, fastest first."""
    found = {rate: [row.codec for row in paying(rows, rate)] for rate in settings.rates}
    return [f"at {link(rate)} these pay: {', '.join(words) or 'none'}" for rate, words in found.items()]


def rate(of: Timing | None) -> str:
    """GB/s with the middle half."""
    if of is None:
        return ""
    size = of.gb_per_s * of.median
    low, high = (size / value for value in reversed(of.quartiles))
    return f"{digits(of.gb_per_s)} ({digits(low)}-{digits(high)})"


def digits(value: float) -> str:
    """Three that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def link(mbit: float) -> str:
    return f"{mbit / 1000:,.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"


def _table(title: str, head: list[str], lines: list[list[str]]) -> Table:
    table = plain_table(title, 1, head)
    name = table.columns[0]
    name.no_wrap, name.overflow = False, "fold"
    name.min_width = min(LONGEST_NAME, max((len(line[0]) for line in lines), default=0))
    for line in lines:
        table.add_row(*line)
    return table
