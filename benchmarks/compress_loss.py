"""What compression costs in loss: validation loss after the same number of steps, paired over seeds.

    python benchmarks/compress_loss.py --device cuda --jobs 14       everything; so many runs at once
    python benchmarks/compress_loss.py --seeds 0 --runs "EF Sign"    some of it

A byte-level GPT on the text of Python's standard library (every tenth module is kept for validation), a few hundred steps. All
runs of one seed begin with the same weights and see the same batches; each row is the mean over seeds of loss / uncompressed
loss - 1, where the uncompressed run has the same optimizer and rate. The rate rises over the first `RISE` steps and falls along a
cosine to nothing, as is usual for such models.

The four workers of a run live in one process: their gradients are computed one after the other, and their exchanges run side by
side in memory (`stretto.bench.compress_together`), through the same code as over a wire. Writes `compress_loss_MACHINE_DATE.json`
and `.md`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import harness
import msgspec
import torch
from step_models import Gpt
from torch import Tensor, nn
from torch.nn import functional

from stretto.bench.compress_together import Together
from stretto.bench.machine import MachineInfo, describe
from stretto.bench.turns import now
from stretto.compress.layout import Layout
from stretto.parsing import parse

WORKERS, LENGTH, ROWS = 4, 64, 2
SGD, ADAM, PLAIN = "SGD, momentum 0.9", "AdamW", "SGD"
RATES = {SGD: 0.01, ADAM: 1e-3, PLAIN: 1e-3}  # the highest of the schedule
RISE = 30
BASES = {SGD: "uncompressed, SGD", ADAM: "uncompressed, AdamW", PLAIN: "uncompressed, AdamW"}
WARM_UP = 75
RUNS: dict[str, tuple[str, str]] = {  # name -> (compress=..., optimizer)
    "uncompressed, SGD": ("NoCompression()", SGD),
    "BFloat16": ("BFloat16()", SGD),
    "Int8": ("Int8()", SGD),
    "PowerSGD 4": ("PowerSGD(4)", SGD),
    "EF PowerSGD 4": ("ErrorFeedback(PowerSGD(4))", SGD),
    "TopK 1 %": ("TopK(0.01)", SGD),
    "EF TopK 1 %": ("ErrorFeedback(TopK(0.01))", SGD),
    "Sign": ("Sign()", SGD),
    "EF Sign": ("ErrorFeedback(Sign())", SGD),
    "EF Sign, warm-up": (f"WarmUp({WARM_UP}, ErrorFeedback(Sign()))", SGD),
    "uncompressed, AdamW": ("NoCompression()", ADAM),
    "1-bit Adam": (f"OneBitAdam({WARM_UP})", PLAIN),
    "EF TopK 1 %, AdamW": ("ErrorFeedback(TopK(0.01))", ADAM),
    "EF Sign, AdamW": ("ErrorFeedback(Sign())", ADAM),
}
TARGETS = {
    "BFloat16": 1.0, "Int8": 1.0, "EF PowerSGD 4": 3.0, "EF TopK 1 %": 6.0, "EF Sign": 6.0, "EF Sign, warm-up": 3.0,
    "1-bit Adam": 3.0,
}  # fmt: skip


class LossRow(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    compress: str
    optimizer: str
    rate: float
    seed: int
    loss: float
    seconds: float
    megabytes_sent: float


class LossReport(msgspec.Struct, frozen=True, kw_only=True):
    machine: MachineInfo
    date: str
    command: str
    steps: int
    rows: list[LossRow]


class Text:
    """Bytes of the standard library's top-level modules, in alphabetical order; every tenth for validation."""

    def __init__(self, device: torch.device) -> None:
        parts: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        for number, file in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
            parts[number % 10 == 9].extend(file.read_bytes())
        self.train, self.validation = (torch.frombuffer(part, dtype=torch.uint8).long().to(device) for part in parts)

    def rows(self, text: Tensor, count: int, generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(text) - LENGTH - 1, (count,), generator=generator).to(text.device)
        return text[starts[:, None] + torch.arange(LENGTH + 1, device=text.device)]


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    logits: Tensor = model(rows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(name: str, seed: int, steps: int, device: torch.device, rate: float | None) -> LossRow:
    compress, kind = RUNS[name]
    rate = RATES[kind] if rate is None else rate
    torch.manual_seed(seed)
    model, text = Gpt(192, 6, 6, LENGTH).to(device), Text(device)
    optimizer = _optimizer(model, kind, rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share_of_rate(step, steps))
    named = list(model.named_parameters())
    layout = Layout.of((parameter_name, parameter.shape) for parameter_name, parameter in named)
    together = Together(parse(f"Strategy(compress={compress})").compress, layout, WORKERS, device)
    generators = [torch.Generator().manual_seed(1_000_003 * seed + rank) for rank in range(WORKERS)]
    sent, begin = 0, time.perf_counter()
    for _ in range(steps):
        gradients = [_gradient(model, text.rows(text.train, ROWS, generator)) for generator in generators]
        sent += together.round(gradients).bytes_sent
        for (_, parameter), place in zip(named, layout.places, strict=True):
            parameter.grad = gradients[0][place.start : place.stop].view(parameter.shape)
        optimizer.step()
        schedule.step()
    loss, seconds = validate(model, text), time.perf_counter() - begin
    return LossRow(
        run=name, compress=compress, optimizer=kind, rate=rate, seed=seed, loss=loss, seconds=seconds, megabytes_sent=sent / 1e6
    )


def _optimizer(model: nn.Module, kind: str, rate: float) -> torch.optim.Optimizer:
    if kind == ADAM:
        return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9 if kind == SGD else 0.0)


def _share_of_rate(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / RISE) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _gradient(model: nn.Module, rows: Tensor) -> Tensor:
    """One worker's, as one vector."""
    model.zero_grad()
    loss_of(model, rows).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@torch.no_grad()
def validate(model: nn.Module, text: Text) -> float:
    """The same rows for every run."""
    generator = torch.Generator().manual_seed(7)
    losses = [float(loss_of(model, text.rows(text.validation, 64, generator))) for _ in range(6)]
    return statistics.fmean(losses)


def run_all(options: argparse.Namespace, done_so_far: Callable[[list[LossRow]], None]) -> None:
    """Each run in a process of its own, so many at once, seed by seed."""

    def one(task: tuple[str, int]) -> LossRow:
        name, seed = task
        words = ["--one", name, str(seed), "--steps", str(options.steps), "--device", options.device]
        words += [] if options.rate is None else ["--rate", str(options.rate)]
        done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{name}, seed {seed} failed:\n{done.stderr[-2000:]}")
        row = msgspec.json.decode(done.stdout.splitlines()[-1], type=LossRow)
        print(f"{name}, seed {seed}: {row.loss:.4f} in {row.seconds:.0f} s", file=sys.stderr, flush=True)
        return row

    names = options.runs or list(RUNS)
    rows: list[LossRow] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for task in as_completed([pool.submit(one, (name, seed)) for seed in options.seeds for name in names]):
            rows.append(task.result())
            done_so_far(sorted(rows, key=lambda row: (list(RUNS).index(row.run), row.seed)))


def write(report: LossReport, folder: Path) -> None:
    harness.write("compress_loss", report, as_markdown(report), report.date, report.machine, folder, report.machine.gpu)


def as_markdown(report: LossReport) -> list[str]:
    losses = {(row.run, row.seed): row.loss for row in report.rows}
    base = [loss for (name, _), loss in losses.items() if name == BASES[SGD]]
    spread = statistics.stdev(base) / statistics.fmean(base) if len(base) > 1 else 0.0
    columns = ("loss", "over uncompressed", "smallest to largest", "target", "verdict", "MB sent")
    lines = [
        *harness.heading("Loss with compressed gradients", report.date, report.command, report.machine, report.machine.gpu),
        f"Byte-level GPT, 2.8 M parameters, {WORKERS} workers with {ROWS} x {LENGTH} bytes each, {report.steps} steps, "
        f"the rate rising for {RISE} and then falling along a cosine to 0. "
        f"Validation loss, paired over seeds: mean of loss / uncompressed loss - 1 with the same optimizer and rate (1-bit Adam: "
        f"with AdamW), and its smallest and largest. Uncompressed losses of different seeds spread by {spread:.1%} (std).",
        "",
        *harness.table("run", "`compress=`", "optimizer, rate", *columns),
    ]
    for name in dict.fromkeys(row.run for row in report.rows):
        lines.append(_line(name, [row for row in report.rows if row.run == name], losses))
    return lines


def _line(name: str, rows: list[LossRow], losses: dict[tuple[str, int], float]) -> str:
    base = BASES[rows[0].optimizer]
    over = [100 * (row.loss / losses[base, row.seed] - 1) for row in rows if (base, row.seed) in losses] or [float("nan")]
    mean, target = statistics.fmean(over), TARGETS.get(name)
    verdict = "" if target is None else harness.verdict(mean <= target)
    shown = "" if target is None else f"{target:g} %"
    loss, sent = statistics.fmean(row.loss for row in rows), statistics.fmean(row.megabytes_sent for row in rows)
    how = f"{rows[0].optimizer}, {rows[0].rate:g}"
    return (
        f"| {name} | `{rows[0].compress}` | {how} | {loss:.4f} | {mean:+.2f} % | {min(over):+.2f} to {max(over):+.2f} % "
        f"| {shown} | {verdict} | {sent:.0f} |"
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Validation loss with compressed gradients against uncompressed ones.")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs", nargs="*", choices=list(RUNS), help="all")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, help="another learning rate than the default of each optimizer")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="so many runs at once")
    parser.add_argument("--output", type=Path, default=harness.RESULTS)
    parser.add_argument("--one", nargs=2, metavar=("RUN", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.one is not None:
        row = train(options.one[0], int(options.one[1]), options.steps, torch.device(options.device), options.rate)
        print(msgspec.json.encode(row).decode())
        return
    command, date = harness.command_of("compress_loss", arguments), now()
    machine = describe()

    def keep(rows: list[LossRow]) -> None:
        write(LossReport(machine=machine, date=date, command=command, steps=options.steps, rows=rows), options.output)

    run_all(options, keep)


if __name__ == "__main__":
    harness.run(main)
