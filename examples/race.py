"""A race: the all-reduce algorithms of one host, on four workers of this machine, over a few sizes.

    python examples/race.py                     live table on a terminal, bars at the end, plot in demo-output/race.png
    python examples/race.py --workers 2 --sizes 1024 65536 --rounds 3
    python examples/race.py | cat               the final table only

Started by hand it launches its own workers with `stretto run` and shows what rank 0 reports, one line of JSON per measurement.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from stretto.api import Algorithm

ALGORITHMS: "tuple[Algorithm, ...]" = (
    "auto", "ring", "halving_doubling", "direct", "butterfly", "torus", "double_binary_tree", "binomial_tree",
    "bidirectional_ring", "chain", "master_worker", "all_to_all", "round_robin",
)  # fmt: skip
SIZES = (4 << 10, 256 << 10, 4 << 20, 16 << 20)
NARROWEST = 100
BAR = 48
Times = dict[int, dict[str, float]]  # size -> algorithm -> median seconds so far


# ---------------------------------------------------------------- in each worker


def race(sizes: list[int], rounds: int) -> None:
    """Let every algorithm run once per round, in turn; rank 0 prints each time as it comes."""
    import torch

    import stretto

    stretto.init()
    for size in sizes:
        tensor = torch.empty(size // 4)
        for number in range(rounds + 1):
            for algorithm in ALGORITHMS:
                tensor.fill_(float(stretto.rank()))
                stretto.barrier()
                begin = time.perf_counter()
                stretto.all_reduce(tensor, "sum", algorithm)
                seconds = time.perf_counter() - begin
                slowest = float(stretto.all_reduce(torch.tensor([seconds]), "max"))
                expected = sum(range(stretto.world_size()))
                assert bool((tensor == expected).all()), f"{algorithm} is wrong"
                if stretto.rank() == 0 and number > 0:  # the first round opens connections and makes plans
                    print(json.dumps([size, algorithm, slowest]), flush=True)
    stretto.shutdown()


# ---------------------------------------------------------------- in the process you started


def watch(options: argparse.Namespace) -> Times:
    """Start the workers; read what rank 0 prints; keep the table up to date."""
    command = [sys.executable, "-m", "stretto", "run", "-n", str(options.workers), "--no-prefix", __file__, "--race"]
    command += ["--rounds", str(options.rounds), "--sizes", *map(str, options.sizes)]
    samples: dict[tuple[int, str], list[float]] = {}
    times: Times = {size: {} for size in options.sizes}
    console = _console()
    workers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert workers.stdout is not None
    with workers, Live(console=console, refresh_per_second=8, transient=True) as live:
        for line in workers.stdout:
            size, algorithm, seconds = json.loads(line)
            samples.setdefault((size, algorithm), []).append(seconds)
            times[size][algorithm] = median(samples[size, algorithm])
            if console.is_terminal:
                live.update(table(times, options.workers))
    if workers.returncode != 0:
        raise SystemExit(workers.returncode)
    return times


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal or console.width >= NARROWEST else Console(highlight=False, width=NARROWEST)


def table(times: Times, workers: int) -> Table:
    """Algorithms by sizes; the fastest of each size stands out."""
    made = Table(title=f"all-reduce, {workers} workers: median ms", title_justify="left")
    made.add_column("algorithm", no_wrap=True)
    for size in times:
        made.add_column(show_size(size), justify="right", no_wrap=True)
    best = {size: min(row, key=row.__getitem__) for size, row in times.items() if row}
    for algorithm in ALGORITHMS:
        cells = []
        for size, row in times.items():
            text = f"{row[algorithm] * 1e3:.2f}" if algorithm in row else ""
            cells.append(f"[bold green]{text} <[/]" if best.get(size) == algorithm else f"{text}  ")
        made.add_row(algorithm, *cells)
    return made


def bars(times: Times, size: int) -> str:
    """The largest size as a bar chart in text."""
    row = times[size]
    longest = max(row.values())
    lines = [f"{show_size(size)}, shorter is faster:"]
    for algorithm, seconds in sorted(row.items(), key=lambda item: item[1]):
        lines.append(f"  {algorithm:<20}{'█' * max(1, round(seconds / longest * BAR))} {seconds * 1e3:.1f} ms")
    return "\n".join(lines)


def plot(times: Times, workers: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    colours = iter(matplotlib.colormaps["tab20"](range(20)))
    for algorithm in ALGORITHMS:
        values = [times[size][algorithm] * 1e3 for size in times]
        look = {"color": "black", "linewidth": 3} if algorithm == "auto" else {"color": next(colours), "linewidth": 1.5}
        axes.plot(list(times), values, marker="o", label=algorithm, **look)
    axes.set(xscale="log", yscale="log", xlabel="tensor (bytes)", ylabel="median time (ms)")
    axes.set_title(f"all-reduce among {workers} workers of this machine")
    axes.set_xticks(list(times), [show_size(size) for size in times])
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside right center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def show_size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KB"


NEXT = """\
What to try next:
  stretto run -n 3 examples/average.py                  your own job: ten lines
  stretto lab --hosts 4 --rate 1gbit -- python examples/average.py
                                                        the same on four hosts with slow links (root or user namespaces)
  stretto bench allreduce -n 4 --sizes 4K,1M,32M        beside torch's gloo and a bare TCP stream
  stretto doctor                                        what this machine has
(`make` has installed stretto into .venv: use .venv/bin/stretto, or activate it.)"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Race the all-reduce algorithms on this machine.")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="BYTES")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path("demo-output/race.png"))
    parser.add_argument("--race", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.race:
        race(options.sizes, options.rounds)
        return
    times = watch(options)
    _console().print(table(times, options.workers))
    print(bars(times, max(options.sizes)), end="\n\n")
    plot(times, options.workers, options.output)
    print(f"Plot: {options.output}\n\n{NEXT}")


if __name__ == "__main__":
    main()
