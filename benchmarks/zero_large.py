"""A model whose replicated state does not fit: four workers that share one GPU train a GPT of 2.5 B parameters with `Zero(3)`.

    python benchmarks/zero_large.py                                     2.5 B in float32: 40 GB of state, four workers, one GPU
    python benchmarks/zero_large.py --strategy "Strategy(shard=Zero(3, offload='cpu'))"
    python benchmarks/zero_large.py --quick                             a small one on the CPU: does the script work?

Replicated, four workers would need 4 x 16 bytes for each parameter, 160 GB. In slices they need 4 x 4, and what is gathered.
While it is distributed each worker holds the whole model once, in `--dtype`: 40 GB for the four. Of every worker: the most memory
on the device until the first step has ended, and afterwards; seconds of a step; and the loss, which has to fall. Writes
`zero_large_MACHINE_DATE.json` and `.md`.
"""

from __future__ import annotations

import os
import sys
import time

import harness
import msgspec
import torch
from step_models import Gpt, next_byte
from step_worker import take_part
from torch.optim import AdamW
from zero_worker import forget_peak, resident

import stretto
from stretto.bench.machine import MachineInfo, describe
from stretto.bench.start import run_workers
from stretto.bench.turns import now
from stretto.job import Job

HEADS, LENGTH = 16, 128


class LargeSettings(msgspec.Struct, frozen=True, kw_only=True):
    strategy: str
    device: str
    dtype: str
    width: int
    depth: int
    steps: int
    workers: int


class LargeReport(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds`: per step, of the slowest rank, without the first; losses: of rank 0. Bytes: of the worker that held most."""

    settings: LargeSettings
    machine: MachineInfo
    device_name: str
    device_bytes: int
    date: str
    num_parameters: int
    beginning_bytes: int
    training_bytes: int
    seconds: float
    losses: list[float]


def measure(job: Job, settings: LargeSettings) -> LargeReport:
    on_gpu = settings.device == "cuda"
    _forget_peak(on_gpu)
    torch.manual_seed(0)
    with torch.device(settings.device):
        model = Gpt(settings.width, HEADS, settings.depth, LENGTH).to(getattr(torch, settings.dtype))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = AdamW(model.parameters(), lr=1e-4)
    stretto.distribute(model, optimizer, settings.strategy, job=job)
    batch = torch.randint(256, (1, LENGTH), generator=torch.Generator().manual_seed(job.rank)).to(settings.device)
    losses, seconds, beginning = [], 0.0, 0
    for number in range(settings.steps):
        begin = time.perf_counter()
        loss = next_byte(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        job.barrier()
        if number == 0:
            beginning = _peak(on_gpu)
            _forget_peak(on_gpu)
        else:
            seconds += (time.perf_counter() - begin) / (settings.steps - 1)
    everybody = job.gather_object([seconds, beginning, _peak(on_gpu)])
    return LargeReport(
        settings=settings,
        machine=describe(),
        device_name=torch.cuda.get_device_name() if on_gpu else "the CPU",
        device_bytes=torch.cuda.get_device_properties(0).total_memory if on_gpu else describe().memory_bytes,
        date=now(),
        num_parameters=num_parameters,
        beginning_bytes=max(each[1] for each in everybody),
        training_bytes=max(each[2] for each in everybody),
        seconds=max(each[0] for each in everybody),
        losses=losses,
    )


def _forget_peak(on_gpu: bool) -> None:
    torch.cuda.reset_peak_memory_stats() if on_gpu else forget_peak()


def _peak(on_gpu: bool) -> int:
    return torch.cuda.max_memory_allocated() if on_gpu else resident("VmHWM")


def as_markdown(report: LargeReport, command: str) -> list[str]:
    settings = report.settings
    replicated = settings.workers * 16 * report.num_parameters / 1e9
    on_gpu = settings.device == "cuda"
    does_not_fit = harness.verdict(replicated * 1e9 > report.device_bytes) if on_gpu else "not judged: a CPU"
    trains = harness.verdict(report.losses[-1] < report.losses[0])
    gpu = report.device_name if on_gpu else None
    return [
        *harness.heading("A model whose replicated state does not fit", report.date, command, report.machine, gpu),
        f"{settings.workers} workers share {report.device_name} ({report.device_bytes / 1e9:.0f} GB); a byte-level GPT of "
        f"{report.num_parameters / 1e9:.2f} B parameters in {settings.dtype}, AdamW, `{settings.strategy}`. Memory of the worker "
        f"that held most; of a CPU the whole process's.",
        "",
        *harness.table("claim", "measured", "verdict"),
        f"| replicated in float32 it does not fit | {replicated:.1f} GB for {settings.workers} workers | {does_not_fit} |",
        f"| it trains | loss {report.losses[0]:.3f}, then {report.losses[-1]:.3f} after {settings.steps} steps | {trains} |",
        "",
        *harness.table("", "GB of each worker"),
        f"| until the first step has ended | {report.beginning_bytes / 1e9:.2f} |",
        f"| from then on | {report.training_bytes / 1e9:.2f} |",
        "",
        f"{report.seconds:.2f} s a step.",
    ]


def main(arguments: list[str]) -> None:
    parser = harness.parser("A model whose replicated state does not fit on one GPU.", quick="a small model on the CPU")
    parser.add_argument("--strategy", default="Strategy(shard=Zero(3))")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--depth", type=int, default=32, help="blocks, of 12 x width x width parameters")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args(arguments)
    device = "cpu" if options.quick else options.device
    harness.check(device, options.steps)
    width, depth = (128, 4) if options.quick else (options.width, options.depth)
    settings = LargeSettings(
        strategy=options.strategy,
        device=device,
        dtype=options.dtype,
        width=width,
        depth=depth,
        steps=max(options.steps, 2),
        workers=options.workers,
    )
    answer = run_workers(__file__, settings, os.environ, workers=options.workers, lab=False)
    report = msgspec.json.decode(answer, type=LargeReport)
    text = as_markdown(report, harness.command_of("zero_large", arguments))
    gpu = report.device_name if device == "cuda" else None
    stem = harness.write("zero_large", report, text, report.date, report.machine, harness.folder_of(options), gpu)
    harness.show(text[6:], stem)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):  # a worker
        take_part(sys.argv[1:], LargeSettings, measure)
    else:
        harness.run(main)
