"""`stretto trace DIR`: one file for Perfetto out of the ranks' files, and a table of what is in it."""

from __future__ import annotations

import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from stretto.errors import ConfigurationError
from stretto.observe.merge import Total, merge, missing_ranks, read, read_servers, total
from stretto.observe.quantities import size

MORE_THAN_ANY_TABLE = 400


def show_trace(folder: Path, output: Path | None) -> None:
    files = read(folder)
    target = output or folder / "trace.json"
    try:
        target.write_bytes(merge([*files, *read_servers(folder, files)]))
    except OSError as problem:
        raise ConfigurationError(f"{target} cannot be written ({problem.strerror}). Name another file with -o FILE.") from problem
    # The table is as wide as its contents. Told the width of the terminal (80 in a pipe), rich would cut words and numbers off.
    console = Console(file=sys.stdout, highlight=False, width=MORE_THAN_ANY_TABLE)
    console.print(_table([total(file) for file in files]))
    for rank in missing_ranks(files):
        console.print(f"rank {rank} left no trace: it was killed, or is still running")
    console.print(f"written: {target}; open it at https://ui.perfetto.dev", soft_wrap=True)


def _table(totals: list[Total]) -> Table:
    """At most 80 columns for what is usual."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for name in ("rank", "start-up", "start-up\nsent", "training", "compute", "wait", "sent", "received", "dropped"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in totals:
        table.add_row(
            str(each.rank),
            f"{each.start_up_s:.2f} s",
            size(each.start_up_bytes),
            f"{each.training_s:.2f} s",
            f"{each.computed:.0%}",
            f"{each.waited:.0%}",
            size(each.bytes_sent),
            size(each.bytes_received),
            str(each.num_dropped),
        )
    return table
