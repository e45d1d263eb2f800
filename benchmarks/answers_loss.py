"""What differences cost in loss: values that servers send by a codec (`ParameterServer(answers=)`), against float32.

    python benchmarks/answers_loss.py                  3 seeds, a few minutes
    python benchmarks/answers_loss.py --quick          1 seed, few steps: does the script work?

A byte-level GPT on the text of Python's standard library. Four workers take turns: each computes a gradient on the values that it
was sent after its last one, servers step by it, and send it what they have then; so every gradient is 3 updates late, as with
`Asynchronous()` among equal workers. All of it in one process, through the code that servers and workers run
(`aggregate/parameter_server/answers.py`). All runs of one seed begin with the same weights and see the same batches. Writes
`answers_loss_MACHINE_DATE.json` and `.md`.
"""

from __future__ import annotations

import statistics
import sys
import time
from concurrent.futures import Future
from itertools import count

import harness
import msgspec
import torch
from compress_loss import LENGTH, Text, loss_of
from step_models import Gpt
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from stretto.aggregate.parameter_server.answers import OwnCopies, SentCopies, answer_codecs
from stretto.aggregate.parameter_server.client import PulledPayload
from stretto.aggregate.parameter_server.layout import RangeLayout, ServedParameter
from stretto.aggregate.parameter_server.messages import CopyName, ValuesPulled
from stretto.bench.machine import MachineInfo, describe
from stretto.bench.turns import now

WORKERS, ROWS, WIDTH, DEPTH, RATE = 4, 4, 96, 3, 1e-3
FLOAT32 = "float32"
CODECS = (FLOAT32, "Float16()", "Int8()", "Dynamic8()", "Sign()", "TopK(0.1)", "TopK(0.01)")


class AnswersRow(msgspec.Struct, frozen=True, kw_only=True):
    """`bytes_down`: of an answer, in bytes per parameter; the first ones, whole, left out."""

    codec: str
    seed: int
    loss: float
    bytes_down: float
    seconds: float


class AnswersReport(msgspec.Struct, frozen=True, kw_only=True):
    machine: MachineInfo
    date: str
    command: str
    steps: int
    num_parameters: int
    rows: list[AnswersRow]


class Way:
    """From the servers to one worker: its copy of the model, flat."""

    def __init__(self, model: nn.Module, codec: str, numbers: count[int]) -> None:
        served = [ServedParameter(name, each.numel(), "", tuple(each.shape)) for name, each in model.named_parameters()]
        self._ranges = RangeLayout(served, 64 << 10).ranges
        how = answer_codecs(self._ranges, served, "" if codec == FLOAT32 else codec)
        codecs = [how(each.index) for each in self._ranges]
        self._sent = [None if made is None else SentCopies(made, lambda: CopyName(0, 0, next(numbers))) for made in codecs]
        self._own = OwnCopies(how)
        self.values = torch.empty(sum(each.numel for each in self._ranges))

    def pull(self, values: Tensor, draw: int) -> int:
        """Returns the bytes that have travelled."""
        start = num_bytes = 0
        for each, sent in zip(self._ranges, self._sent, strict=True):
            part, memory = values[start : start + each.numel], self.values[start : start + each.numel]
            start += each.numel
            if sent is None:
                memory.copy_(part)
                num_bytes += each.num_bytes
                continue
            answer = sent.answer(0, self._own.wanted(each.index, draw, whole=False), part.numpy().tobytes())
            header = ValuesPulled(each.index, 0, 0, 0, 1.0, since=answer.since, copy=answer.copy)
            came: Future[PulledPayload] = Future()
            read = self._own.into(each, came, memory, draw)
            came.set_result(PulledPayload(0, header, bytes(answer.payload)))
            read.result(0)
            num_bytes += memoryview(answer.payload).nbytes
        return num_bytes


def train(codec: str, seed: int, steps: int, text: Text) -> tuple[AnswersRow, int]:
    torch.manual_seed(seed)
    model, begin = Gpt(WIDTH, 6, DEPTH, LENGTH), time.perf_counter()
    center = parameters_to_vector(model.parameters()).detach().clone().requires_grad_()
    optimizer = torch.optim.AdamW([center], lr=RATE, weight_decay=0.0)
    numbers: count[int] = count()
    ways = [Way(model, codec, numbers) for _ in range(WORKERS)]
    generators = [torch.Generator().manual_seed(1_000_003 * seed + rank) for rank in range(WORKERS)]
    for way in ways:
        way.pull(center.detach(), 0)
    num_bytes = 0
    for step in range(steps):
        worker = step % WORKERS
        vector_to_parameters(ways[worker].values, model.parameters())
        model.zero_grad()
        loss_of(model, text.rows(text.train, ROWS, generators[worker])).backward()
        center.grad = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        optimizer.step()
        num_bytes += ways[worker].pull(center.detach(), 1 + step // WORKERS)
    vector_to_parameters(center.detach(), model.parameters())
    row = AnswersRow(
        codec=codec, seed=seed, loss=validate(model, text), bytes_down=num_bytes / steps / center.numel(),
        seconds=time.perf_counter() - begin,
    )  # fmt: skip
    return row, center.numel()


@torch.no_grad()
def validate(model: nn.Module, text: Text) -> float:
    """Of the servers' values, on the same rows for every run."""
    generator = torch.Generator().manual_seed(7)
    return statistics.fmean(float(loss_of(model, text.rows(text.validation, 64, generator))) for _ in range(6))


def as_markdown(report: AnswersReport) -> list[str]:
    losses = {(row.codec, row.seed): row.loss for row in report.rows}
    lines = [
        *harness.heading("Loss with values sent as differences", report.date, report.command, report.machine),
        f"Byte-level GPT, {report.num_parameters / 1e6:.2f} M parameters, AdamW with a rate of {RATE:g} on the servers, "
        f"{WORKERS} workers that take turns, {report.steps} updates of {ROWS} x {LENGTH} bytes. Validation loss of the servers' "
        "values, paired over seeds: mean of loss / loss with float32 - 1, and its smallest and largest.",
        "",
        *harness.table("`answers=`", "loss", "over float32", "smallest to largest", "bytes down for each parameter"),
    ]
    for codec in dict.fromkeys(row.codec for row in report.rows):
        rows = [row for row in report.rows if row.codec == codec]
        over = [100 * (row.loss / losses[FLOAT32, row.seed] - 1) for row in rows]
        loss, sent = (statistics.fmean(values) for values in ([row.loss for row in rows], [row.bytes_down for row in rows]))
        shown = f"{statistics.fmean(over):+.2f} % | {min(over):+.2f} to {max(over):+.2f} %"
        lines.append(f"| {codec} | {loss:.4f} | {shown} | {sent:.3f} |")
    return lines


def main(arguments: list[str]) -> None:
    parser = harness.parser("Loss with values that are sent as differences.", quick="1 seed, 40 updates")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="updates, of all workers together (400)")
    options = parser.parse_args(arguments)
    seeds, steps = (1, 40) if options.quick else (options.seeds, options.steps)
    torch.set_num_threads(1)
    text, rows, numel = Text(torch.device("cpu")), [], 0
    for seed in range(seeds):
        for codec in CODECS:
            row, numel = train(codec, seed, steps, text)
            rows.append(row)
            print(f"{codec}, seed {seed}: {row.loss:.4f} in {row.seconds:.0f} s", file=sys.stderr, flush=True)
    report = AnswersReport(
        machine=describe(), date=now(), command=harness.command_of("answers_loss", arguments), steps=steps, num_parameters=numel,
        rows=rows,
    )  # fmt: skip
    lines = as_markdown(report)
    stem = harness.write("answers_loss", report, lines, report.date, report.machine, harness.folder_of(options))
    harness.show(lines[-len(CODECS) :], stem)


if __name__ == "__main__":
    harness.run(main)
