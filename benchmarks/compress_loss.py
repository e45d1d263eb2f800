"""What compression costs in loss: validation loss after the same number of steps, paired over seeds.

    stretto run -n 4 benchmarks/compress_loss.py --seeds 0 1 2 3 4            trains everything, writes one JSON
    stretto run -n 4 benchmarks/compress_loss.py --seeds 3 --json seed3.json  one seed, to run several at once
    python benchmarks/compress_loss.py --merge seed*.json                     writes compress_loss_MACHINE_DATE.{json,md}

A byte-level GPT on the text of Python's standard library (every tenth module is kept for validation), a few hundred steps. All
runs of one seed begin with the same weights and see the same batches; each row is the mean over seeds of loss / uncompressed
loss - 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from step_models import Gpt
from torch import Tensor, nn
from torch.nn import functional

import stretto
from stretto.bench.machine import Machine, describe
from stretto.distributing import engine_of

RESULTS = Path(__file__).parent / "results"
LENGTH, ROWS = 64, 8
BASE = "uncompressed"
ADAM, PLAIN = "AdamW", "SGD"
WARM_UP = 60
RUNS: dict[str, tuple[str, str]] = {  # name -> (compress=..., optimizer)
    BASE: ("NoCompression()", ADAM),
    "Float16": ("Float16()", ADAM),
    "BFloat16": ("BFloat16()", ADAM),
    "Int8": ("Int8()", ADAM),
    "QSGD 4 bit": ("QSGD(4)", ADAM),
    "PowerSGD 4": ("PowerSGD(4)", ADAM),
    "EF PowerSGD 4": ("ErrorFeedback(PowerSGD(4))", ADAM),
    "TopK 1 %": ("TopK(0.01)", ADAM),
    "EF TopK 1 %": ("ErrorFeedback(TopK(0.01))", ADAM),
    "EF TopK 1 %, warm-up": (f"WarmUp({WARM_UP}, ErrorFeedback(TopK(0.01)))", ADAM),
    "Sign": ("Sign()", ADAM),
    "EF Sign": ("ErrorFeedback(Sign())", ADAM),
    "EF Sign, warm-up": (f"WarmUp({WARM_UP}, ErrorFeedback(Sign()))", ADAM),
    "1-bit Adam": (f"OneBitAdam({WARM_UP})", PLAIN),
}
TARGETS = {
    "BFloat16": 1.0, "Int8": 1.0, "EF PowerSGD 4": 3.0, "EF TopK 1 %": 6.0, "EF Sign": 6.0, "EF TopK 1 %, warm-up": 3.0,
    "EF Sign, warm-up": 3.0, "1-bit Adam": 3.0,
}  # fmt: skip


class Row(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    compress: str
    optimizer: str
    seed: int
    loss: float
    seconds: float
    megabytes_sent: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    date: str
    workers: int
    steps: int
    learning_rate: float
    device: str
    rows: list[Row]


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


def train(name: str, seed: int, options: argparse.Namespace, text: Text) -> Row:
    job = stretto.current_job()
    compress, kind = RUNS[name]
    torch.manual_seed(seed)
    model = Gpt(192, 6, 6, LENGTH).to(text.train.device)
    parameters = model.parameters()
    rate = options.lr
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0) if kind == ADAM else torch.optim.SGD(parameters, lr=rate)
    stretto.distribute(model, optimizer, f"Strategy(compress={compress})")
    sent, begin = job.ledger.bytes_sent, time.perf_counter()
    generator = torch.Generator().manual_seed(1_000_003 * seed + job.rank)
    for _ in range(options.steps):
        loss_of(model, text.rows(text.train, ROWS, generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = validate(model, text)
    seconds = time.perf_counter() - begin
    engine_of(model).close()
    megabytes = (job.ledger.bytes_sent - sent) / 1e6
    return Row(run=name, compress=compress, optimizer=kind, seed=seed, loss=loss, seconds=seconds, megabytes_sent=megabytes)


@torch.no_grad()
def validate(model: nn.Module, text: Text) -> float:
    """The same rows for every run."""
    generator = torch.Generator().manual_seed(7)
    losses = [float(loss_of(model, text.rows(text.validation, 64, generator))) for _ in range(16)]
    return statistics.fmean(losses)


def work(options: argparse.Namespace) -> None:
    job = stretto.init()
    device = job.device if options.device == "cuda" else torch.device("cpu")
    text = Text(device)
    rows = []
    for seed in options.seeds:
        for name in options.runs or RUNS:
            rows.append(train(name, seed, options, text))
            if job.rank == 0:
                print(f"seed {seed}, {name}: loss {rows[-1].loss:.4f} in {rows[-1].seconds:.1f} s", flush=True)
    if job.rank == 0:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        report = Report(
            machine=describe(), date=date, workers=job.world_size, steps=options.steps, learning_rate=options.lr,
            device=str(device.type), rows=rows,
        )  # fmt: skip
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    stretto.shutdown()


def merge(files: list[Path], folder: Path) -> None:
    reports = [msgspec.json.decode(file.read_bytes(), type=Report) for file in files]
    whole = msgspec.structs.replace(reports[0], rows=[row for report in reports for row in report.rows])
    machine = whole.machine.gpu or f"{whole.machine.processor} {whole.machine.cores} cores"
    name = "-".join("".join(c if c.isalnum() else " " for c in machine.lower()).split())
    stem = folder / f"compress_loss_{name}_{whole.date[:10]}"
    folder.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")
    stem.with_suffix(".md").write_text(as_markdown(whole))
    print(stem.with_suffix(".md").read_text())


def as_markdown(report: Report) -> str:
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    base = {row.seed: row.loss for row in report.rows if row.run == BASE}
    spread = statistics.stdev(base.values()) / statistics.fmean(base.values()) if len(base) > 1 else 0.0
    lines = [
        "# Loss with compressed gradients",
        "",
        f"{report.date}; `stretto run -n {report.workers} benchmarks/compress_loss.py --device {report.device}`, one job per "
        "seed, several at once",
        "",
        f"{machine.processor}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB, {machine.system}"
        f"{', ' + machine.gpu if machine.gpu else ''}; {versions}.",
        "",
        f"Byte-level GPT, 2.8 M parameters, {report.workers} workers with {ROWS} x {LENGTH} bytes each, {report.steps} steps at "
        f"rate {report.learning_rate:g} (AdamW; SGD on the direction that 1-bit Adam hands out), warm-ups of {WARM_UP} steps. "
        f"Validation loss, paired over {len(base)} seeds: mean of loss / uncompressed loss - 1 and its smallest and largest. "
        f"The uncompressed losses of different seeds alone spread by {spread:.1%} (standard deviation).",
        "",
        "| run | `compress=` | loss | over uncompressed | smallest to largest | target | verdict | MB sent per worker |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row.run for row in report.rows):
        lines.append(_line(name, [row for row in report.rows if row.run == name], base))
    return "\n".join(lines) + "\n"


def _line(name: str, rows: list[Row], base: dict[int, float]) -> str:
    over = [100 * (row.loss / base[row.seed] - 1) for row in rows]
    mean, target = statistics.fmean(over), TARGETS.get(name)
    verdict = "" if target is None else "met" if mean <= target else "**missed**"
    shown = "" if target is None else f"{target:g} %"
    loss, sent = statistics.fmean(row.loss for row in rows), statistics.fmean(row.megabytes_sent for row in rows)
    return (
        f"| {name} | `{rows[0].compress}` | {loss:.4f} | {mean:+.2f} % | {min(over):+.2f} to {max(over):+.2f} % | {shown} "
        f"| {verdict} | {sent:.1f} |"
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Validation loss with compressed gradients against uncompressed ones.")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs", nargs="*", choices=list(RUNS), help="all")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks/compress_loss.json"))
    parser.add_argument("--merge", type=Path, nargs="*", help="JSON files of several jobs, to be put together")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for what --merge writes")
    options = parser.parse_args(arguments)
    if options.merge:
        merge(options.merge, options.output)
    else:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        work(options)


if __name__ == "__main__":
    main(sys.argv[1:])
