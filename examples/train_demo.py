"""Four workers of this machine train the GPT of examples/gpt.py while you watch. This is `make demo`.

    python examples/train_demo.py               a live line on a terminal; table, sparkline and demo-output/loss.png at the end
    python examples/train_demo.py --workers 2 --steps 40 --strategy "horovod()"
    python examples/train_demo.py | cat         plain lines

Started by hand it launches its own workers with `stretto run` and shows what rank 0 reports: a line of JSON per step, and one
at the end.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 60
NARROWEST = 100
SMOOTHING = 6  # neighbours on either side
WARM_UP = 3  # steps that fill caches and open connections: trained on, not timed


# ---------------------------------------------------------------- in each worker


def train(steps: int, strategy: str, seed: int) -> None:
    """The loop of examples/gpt.py with a stopwatch; rank 0 reports."""
    import gpt
    import torch

    import stretto

    ledger = stretto.init().ledger  # always kept: bytes sent and received, and how long the training thread has waited
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    text = gpt.standard_library().train
    model = gpt.Gpt().to(stretto.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = stretto.distribute(model, optimizer, strategy)

    timed_s, waited_s, bytes_sent, num_rows = 0.0, 0.0, 0, 0
    for step in range(1, steps + 1):
        begin_s, waited_before_s, sent_before = time.perf_counter(), ledger.waited_s, ledger.bytes_sent
        rows = gpt.my_rows(text, generator)
        stretto.weight(len(rows))
        loss = gpt.loss_of(model, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step > min(WARM_UP, steps - 1):
            timed_s += time.perf_counter() - begin_s
            waited_s += ledger.waited_s - waited_before_s
            bytes_sent += ledger.bytes_sent - sent_before
            num_rows += len(rows)
        mean = gpt.mean_over_rows(loss.detach(), len(rows))
        _report({"step": step, "loss": mean, "rate": gpt.GLOBAL_BATCH * (step - WARM_UP) / timed_s if step > WARM_UP else 0.0})
    validation = gpt.validate(model, gpt.standard_library().validation)
    workers = stretto.gather_object({"timed_s": timed_s, "waited_s": waited_s, "bytes_sent": bytes_sent, "num_rows": num_rows})
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    _report(
        {"workers": workers, "validation": validation, "parameters": num_parameters, "strategy": repr(stretto.parse(strategy))}
    )
    stretto.shutdown()


def _report(content: dict[str, Any]) -> None:
    import stretto

    if stretto.rank() == 0:
        print(json.dumps(content), flush=True)


# ---------------------------------------------------------------- in the process you started


@dataclass
class Story:
    """What rank 0 has told so far."""

    losses: list[float] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)


def watch(options: argparse.Namespace, console: Console) -> Story:
    """Start the workers and show each step as it is reported."""
    command = [sys.executable, "-m", "stretto", "run", "-n", str(options.workers), "--no-prefix", __file__, "--train"]
    command += ["--steps", str(options.steps), "--strategy", options.strategy, "--seed", str(options.seed)]
    story = Story()
    workers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert workers.stdout is not None
    with workers, _progress(console, options.steps) as show:
        for line in workers.stdout:
            told = json.loads(line)
            if "step" in told:
                story.losses.append(told["loss"])
                show(told)
            else:
                story.end = told
    if workers.returncode != 0:
        raise SystemExit(workers.returncode)
    return story


@contextmanager
def _progress(console: Console, steps: int) -> Iterator[Any]:
    """A live line on a terminal; elsewhere a line every tenth of the way."""
    if not console.is_terminal:
        yield lambda told: _print_some(console, told, steps)
        return
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("the workers start ...", total=steps)
        yield lambda told: progress.update(task, completed=told["step"], description=_line(told, steps))


def _print_some(console: Console, told: dict[str, Any], steps: int) -> None:
    if told["step"] % max(1, steps // 10) == 0:
        console.print(_line(told, steps))


def _line(told: dict[str, Any], steps: int) -> str:
    return f"step {told['step']:4d}/{steps}  loss {told['loss']:.3f}  {told['rate']:6.1f} samples/s"


def table(story: Story) -> Table:
    """One row per worker, and the whole job."""
    workers = story.end["workers"]
    made = Table(title=f"{story.end['strategy']}\n{story.end['parameters']:,} parameters", title_justify="left", show_footer=True)
    slowest_s = max(worker["timed_s"] for worker in workers)
    waited = sum(worker["waited_s"] for worker in workers) / sum(worker["timed_s"] for worker in workers)
    rows = sum(worker["num_rows"] for worker in workers)
    sent = sum(worker["bytes_sent"] for worker in workers)
    made.add_column("worker", footer="all", no_wrap=True)
    made.add_column("samples/s", footer=f"{rows / slowest_s:.1f}", justify="right", no_wrap=True)
    made.add_column("in communication", footer=f"{waited:.0%}", justify="right")
    made.add_column("sent", footer=f"{sent / 1e6:,.1f} MB", justify="right", no_wrap=True)
    made.add_column("loss: first, last", footer=f"{story.losses[0]:.2f}, {story.losses[-1]:.2f}", justify="right")
    made.add_column("validation", footer=f"{story.end['validation']:.2f}", justify="right")
    for rank, worker in enumerate(workers):
        made.add_row(
            str(rank),
            f"{worker['num_rows'] / worker['timed_s']:.1f}",
            f"{worker['waited_s'] / worker['timed_s']:.0%}",
            f"{worker['bytes_sent'] / 1e6:.1f} MB",
        )
    return made


def sparkline(values: list[float]) -> str:
    """As many characters as SPARKLINE_WIDTH, or as there are values; each the mean of its part of them."""
    width = min(SPARKLINE_WIDTH, len(values))
    parts = [values[len(values) * k // width : len(values) * (k + 1) // width] for k in range(width)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    return "".join(SPARKS[round((mean - low) / (high - low or 1.0) * (len(SPARKS) - 1))] for mean in means)


def smoothed(values: list[float]) -> list[float]:
    """Each value's mean with its neighbours, as many on either side."""
    made = []
    for place in range(len(values)):
        reach = min(SMOOTHING, place, len(values) - 1 - place)
        near = values[place - reach : place + reach + 1]
        made.append(sum(near) / len(near))
    return made


def plot(story: Story, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    steps = range(1, len(story.losses) + 1)
    axes.plot(steps, story.losses, color="tab:blue", alpha=0.35, label="each step")
    axes.plot(steps, smoothed(story.losses), color="tab:blue", linewidth=2, label="smoothed")
    axes.axhline(story.end["validation"], color="tab:orange", linestyle="--", label="validation, at the end")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.set_title(f"byte-level GPT, {len(story.end['workers'])} workers")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal or console.width >= NARROWEST else Console(highlight=False, width=NARROWEST)


NEXT = """\
What to try next:
  stretto run -n 2 examples/gpt.py                      the same losses on 1, 2 or 3 workers
  stretto run -n 4 examples/gpt.py --strategy "data_parallel()"
                                                        another strategy: a master gathers, averages and sends back
  stretto run -n 4 --trace demo-output/trace examples/gpt.py && stretto trace demo-output/trace
                                                        who computed, sent and waited when
  stretto lab --hosts 4 --rate 1gbit -- python examples/digits.py
                                                        on four hosts with slow links (root or user namespaces)
  python examples/race.py                               a race of the all-reduce algorithms
(`make demo` has installed stretto into .venv: use .venv/bin/stretto, or activate it.)"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on a few workers of this machine, and show how it goes.")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--strategy", default="Strategy()", metavar="TEXT", help="for instance 'horovod()'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("demo-output/loss.png"))
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: a training has at least one step")
    if options.train:
        train(options.steps, options.strategy, options.seed)
        return
    console = _console()
    console.print(f"A byte-level GPT learns Python's standard library on {options.workers} workers of this machine.")
    story = watch(options, console)
    console.print(table(story))
    console.print("In communication: the share of its time in which a worker waited for gradients, slower workers included.")
    print(f"\nloss  {sparkline(story.losses)}  {story.losses[0]:.2f} to {story.losses[-1]:.2f} in {len(story.losses)} steps")
    plot(story, options.output)
    print(f"Picture: {options.output}\n\n{NEXT}")


if __name__ == "__main__":
    main()
