"""How fast codecs are on a GPU, measured against a copy in its memory.

    python benchmarks/compress_gpu.py                 256 MB of float32, as one tensor and as many of odd sizes
    python benchmarks/compress_gpu.py --quick         16 MB, 3 rounds: does the script work?

Everything is counted in bytes of float32 values: a copy of n values in t seconds is 4n/t, and so is encoding them. (A copy moves
8n bytes, an encoder 5n or so: it may be faster than a copy.) Contenders take turns in each round; a call is timed by two CUDA
events. Ahead of them the device is given a millisecond of other work, so the call is launched before the device comes to it:
times are the device's, not those of the host's launches. Decoders wait until the device has said whether the payload is sound,
and that wait counts. The same calls on an idle device are timed too: then what the host does before a launch counts as well.

Writes `compress_gpu_MACHINE_DATE.json` (every time of every round, versions, machine) and `.md` (claims with verdicts, then all
rows).
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from importlib import metadata

import harness
import msgspec
import torch
from torch import Tensor

from stretto.bench.machine import MachineInfo, describe
from stretto.bench.table_text import seconds, spread
from stretto.bench.turns import now, quartiles
from stretto.compress.bfloat16 import BFloat16
from stretto.compress.codec import Codec
from stretto.compress.dynamic8 import Dynamic8
from stretto.compress.float16 import Float16
from stretto.compress.int8 import Int8
from stretto.compress.layout import Layout
from stretto.compress.one_bit import OneBit
from stretto.compress.qsgd import QSGD
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.sign import Sign
from stretto.compress.tern_grad import TernGrad
from stretto.compress.top_k import TopK

CALLS = 5  # of a turn
HELD_ELEMENTS = 1 << 28  # copied twice ahead of a call: about a millisecond
CODECS: tuple[Codec, ...] = (
    Int8(), Int8(stochastic=True), Sign(), BFloat16(), BFloat16(stochastic=True), TopK(0.001), TopK(0.01), TopK(0.1),
    Float16(), Dynamic8(), QSGD(), TernGrad(), OneBit(),
)  # fmt: skip
CLAIMED = (Int8, Sign, BFloat16, TopK)  # the others stand beside them
COPY_SHARE = 0.75  # of a copy's rate, at least: Int8, Sign and BFloat16, encoding and decoding
COPY_TIMES = 3.0  # a copy's time so often, at most: TopK, encoding
Call = Callable[[], object]


class GpuSettings(msgspec.Struct, frozen=True):
    num_elements: int
    rounds: int
    calls: int = CALLS


class GpuRow(msgspec.Struct, frozen=True):
    layout: str
    codec: str
    what: str
    payload_bytes: int
    seconds: list[float]  # of one call, in each round
    idle_seconds: list[float]  # where the device had nothing to do before


class GpuReport(msgspec.Struct, frozen=True):
    settings: GpuSettings
    machine: MachineInfo
    date: str
    copy_seconds: list[float]
    rows: list[GpuRow]


def layouts(num_elements: int) -> dict[str, Layout]:
    """`odd tensors`: none begins or ends where a GPU would like it to."""
    odd = max(1, num_elements // 64 - 3) | 1
    sizes = [odd] * (num_elements // odd)
    sizes.append(num_elements - sum(sizes))
    return {
        "one tensor": Layout.of([("w", (num_elements,))]),
        f"{len(sizes)} odd tensors": Layout.of((f"w{i}", (size,)) for i, size in enumerate(sizes)),
    }


# -- measuring --------------------------------------------------------------------------------------------------------


class Clock:
    """Times calls on the device."""

    def __init__(self) -> None:
        self._held = torch.zeros(2, HELD_ELEMENTS, device="cuda")

    def time(self, call: Call, before: Call, *, busy: bool) -> float:
        """The median of some calls. `before`: not timed, ahead of each."""
        return statistics.median(self._time_once(call, before, busy) for _ in range(CALLS))

    def _time_once(self, call: Call, before: Call, busy: bool) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before()
        torch.cuda.synchronize()
        for _ in range(2 if busy else 0):
            self._held[0].copy_(self._held[1])
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


class GpuCall:
    """A call to be timed, and what its times were. `before`: not timed, ahead of each call."""

    def __init__(self, call: Call, before: Call = lambda: None) -> None:
        self.call, self.before = call, before
        self.seconds: list[float] = []
        self.idle_seconds: list[float] = []

    def turn(self, clock: Clock, *, counts: bool) -> None:
        busy, idle = (clock.time(self.call, self.before, busy=busy) for busy in (True, False))
        if counts:
            self.seconds.append(busy)
            self.idle_seconds.append(idle)


def of_codec(codec: Codec, layout: Layout, values: Tensor, spare: Tensor) -> tuple[dict[str, GpuCall], int]:
    """What is timed, by name, and how long a payload is."""
    blocks, draw = codec.blocks(layout), RandomKeys.of_round(1, 0)
    payload = codec.encode(values, blocks, draw)

    def fill() -> None:
        spare.copy_(values)

    return {
        "encode": GpuCall(lambda: codec.encode(values, blocks, draw)),
        "encode_residual": GpuCall(lambda: codec.encode_residual(spare, blocks, draw), fill),
        "decode": GpuCall(lambda: codec.decode(payload, blocks, draw)),
        "add_decoded": GpuCall(lambda: codec.add_decoded(payload, blocks, draw, spare), fill),
    }, len(payload)


def measure(settings: GpuSettings) -> GpuReport:
    gc.disable()  # a collection in the middle of a turn would be counted
    generator = torch.Generator("cuda").manual_seed(0)
    values = torch.randn(settings.num_elements, device="cuda", generator=generator)
    spare, clock, rows = torch.empty_like(values), Clock(), []
    copy = GpuCall(lambda: spare.copy_(values))
    for name, layout in layouts(settings.num_elements).items():
        for codec in CODECS:
            contenders, payload_bytes = of_codec(codec, layout, values, spare)
            for number in range(-2, settings.rounds):
                for contender in (copy, *contenders.values()):
                    contender.turn(clock, counts=number >= 0)
            rows += [
                GpuRow(name, repr(codec), what, payload_bytes, one.seconds, one.idle_seconds) for what, one in contenders.items()
            ]
            print(f"{name}, {codec!r}", *(f"{what} {seconds(median(one))}" for what, one in contenders.items()), flush=True)
    machine = describe()
    machine = msgspec.structs.replace(machine, versions=machine.versions | {"triton": metadata.version("triton")})
    return GpuReport(settings, machine, now(), copy.seconds, rows)


def median(contender: GpuCall) -> float:
    return statistics.median(contender.seconds)


# -- writing ----------------------------------------------------------------------------------------------------------


def claims(report: GpuReport) -> list[str]:
    copy = statistics.median(report.copy_seconds)
    lines, rounds = harness.table("values", "codec", "claim", "target", "measured", "verdict"), report.settings.rounds
    claimed = tuple(codec.__name__ for codec in CLAIMED)
    for row in report.rows:
        share = copy / statistics.median(row.seconds)
        if not row.codec.startswith(claimed):
            continue
        if row.codec.startswith("TopK") and row.what == "encode":
            claim, target, found, met = "x a copy's time, at most", f"{COPY_TIMES:.2f}", 1 / share, 1 / share <= COPY_TIMES
        elif not row.codec.startswith("TopK") and row.what in ("encode", "decode"):
            claim, target, found, met = f"{row.what}, x a copy's rate, at least", f"{COPY_SHARE}", share, share >= COPY_SHARE
        else:
            continue
        lines.append(f"| {row.layout} | {row.codec} | {claim} | {target} | {found:.2f} | {harness.judge(rounds, met=met)} |")
    return lines


def as_markdown(report: GpuReport, command: str) -> list[str]:
    settings = report.settings
    value_bytes, copy = 4 * settings.num_elements, statistics.median(report.copy_seconds)
    columns = ("time", "middle half", "GB/s", "x a copy's rate", "on an idle device", "payload bits per value")
    lines = [
        *harness.heading("Codecs on a GPU", report.date, command, report.machine, report.machine.gpu),
        f"{value_bytes / 1e6:.0f} MB of float32 values, Gaussian. Median over {settings.rounds} rounds of the median of "
        f"{settings.calls} calls; contenders take turns in each round. GB/s count the bytes of the values. A copy on the device: "
        f"{seconds(copy)} ({spread(quartiles(report.copy_seconds))}), {value_bytes / copy / 1e9:,.0f} GB/s.",
        "",
        *claims(report),
        "",
        *harness.table("values", "codec", "what", *columns),
    ]
    for row in report.rows:
        time = statistics.median(row.seconds)
        lines.append(
            f"| {row.layout} | {row.codec} | {row.what} | {seconds(time)} | {spread(quartiles(row.seconds))} "
            f"| {value_bytes / time / 1e9:,.0f} | {copy / time:.2f} | {seconds(statistics.median(row.idle_seconds))} "
            f"| {8 * row.payload_bytes / settings.num_elements:.3f} |"
        )
    return lines


def main(arguments: list[str]) -> None:
    parser = harness.parser("Time codecs on a GPU against a copy in its memory.", quick="16 MB, 3 rounds")
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (15)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("compress_gpu.py: there is no CUDA device here. Run it on a machine that has one.")
    settings = GpuSettings(1 << 22, 3) if options.quick else GpuSettings(1 << 26, max(1, options.rounds))
    report = measure(settings)
    text, folder = as_markdown(report, harness.command_of("compress_gpu", arguments)), harness.folder_of(options)
    stem = harness.write("compress_gpu", [report], text, report.date, report.machine, folder, report.machine.gpu)
    harness.show(claims(report), stem)


if __name__ == "__main__":
    harness.run(main)
