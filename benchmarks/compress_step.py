"""Training steps with compressed gradients on slow links, against torch's DDP, its fp16 hook, and no communication at all.

    python benchmarks/compress_step.py                  rho = 10 and rho = 1 (needs root or user namespaces)
    python benchmarks/compress_step.py --rho 10 --rounds 9
    python benchmarks/compress_step.py --device cuda --rate 1gbit      links of this rate; the hosts share the GPU
    python benchmarks/compress_step.py --quick          few rounds: does the script work?

rho is how many times longer DDP's communication takes than its computation. The script times the step without communication on
all hosts at once, and sets the links to the rate at which DDP's bytes, 2 (P-1)/P times the gradients, take rho times as long.
On a GPU the model has 57 M parameters instead of 2.8 M.

Writes `compress_step_MACHINE_DATE.json` and `.md`. Let the machine be idle.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import harness
import msgspec
from compress_worker import CompressStepReport, CompressStepSettings
from harness import Ratio, ratio
from step_worker import DDP, DDP_FP16, LIMIT

from stretto.bench.start import run_workers
from stretto.bench.table_text import seconds, spread
from stretto.bench.turns import quartiles
from stretto.errors import ConfigurationError

WORKER = Path(__file__).with_name("compress_worker.py")
CODECS = {
    "Float16": "Float16()",
    "BFloat16": "BFloat16()",
    "Int8": "Int8()",
    "Int8 in hops": "Int8()",
    "Dynamic8": "Dynamic8()",
    "QSGD 4 bit": "QSGD(bits=4)",
    "TernGrad": "TernGrad()",
    "EF OneBit": "ErrorFeedback(OneBit())",
    "EF Sign": "ErrorFeedback(Sign())",
    "EF TopK 1 %": "ErrorFeedback(TopK(0.01))",
    "EF RandomK 1 %": "ErrorFeedback(RandomK(0.01))",
    "EF PowerSGD 4": "ErrorFeedback(PowerSGD(4))",
    "DGC 0.1 %": "DGC(0.001, warm_up=())",
    "DeMo": "DeMo()",
}
SCHEDULES = {"cpu": "Buckets(bytes=4194304, first_bytes=1048576)", "cuda": "Buckets()"}
NONE = "stretto, uncompressed"
CROSSING = ", across the barrier"
TARGETS = {"Int8": 3.0, "EF PowerSGD 4": 6.0, "EF TopK 1 %": 6.0, "EF Sign": 6.0}
OF_LIMIT = 0.80


def strategies(names: list[str], schedule: str, mebibytes: list[int]) -> dict[str, str]:
    """`mebibytes`: also in buckets of so many, beside `schedule`."""
    out = {NONE: "Strategy()"}
    for name in names:
        algorithm = 'AllReduce("ring")' if name.endswith("hops") else "AllReduce()"
        out[name] = f"Strategy(aggregate={algorithm}, compress={CODECS[name]}, schedule={schedule})"
        if TARGETS.get(name) == 6.0:
            out[name + CROSSING] = f"Strategy(compress={CODECS[name]}, schedule=Priority())"
        for size in mebibytes:
            sized = f"Strategy(compress={CODECS[name]}, schedule=Buckets(bytes={size << 20}))"
            out[f"{name}, buckets of {size} MiB"] = sized
    return out


def run(settings: CompressStepSettings) -> CompressStepReport:
    count, rate = settings.hosts * settings.workers, settings.rate
    answer = run_workers(str(WORKER), settings, os.environ, workers=count, lab=True, rate=rate, per_host=settings.workers)
    return msgspec.json.decode(answer, type=CompressStepReport)


def rate_for(rho: float, settings: CompressStepSettings) -> str:
    """Bits per second at which DDP's bytes take `rho` times as long as a step without communication."""
    alone = run(msgspec.structs.replace(settings, strategies={}, peers=(LIMIT,), rounds=15, rate=None))
    step_s = statistics.median(alone.rows[0].seconds)
    workers = settings.hosts * settings.workers
    num_bytes = 2 * (workers - 1) / workers * 4 * alone.num_parameters
    mbit = num_bytes * 8 / (rho * step_s) / 1e6
    print(f"a step without communication takes {step_s:.3f} s; rho = {rho:g} at {mbit:.0f} Mbit/s", flush=True)
    return f"{max(1, round(mbit))}mbit"


def compare(report: CompressStepReport, name: str, peer: str) -> Ratio:
    rows = {row.contender: row.seconds for row in report.rows}
    return ratio(rows[peer], rows[name])


def claims(report: CompressStepReport) -> list[str]:
    lines, rounds = [], report.settings.rounds
    names = {row.contender for row in report.rows}
    if (report.settings.rho or 0) >= 10:
        for name, least in TARGETS.items():
            if name in names:
                lines.append(_claim(report, name, DDP, least, rounds))
                lines.append(_claim(report, name, DDP_FP16, 1.0, rounds))
                if least == 6.0:
                    both = (name, name + CROSSING)
                    lines += [_claim(report, each, LIMIT, OF_LIMIT, rounds) for each in both if each in names]
    return lines


def _claim(report: CompressStepReport, name: str, peer: str, least: float, rounds: int) -> str:
    found = compare(report, name, peer)
    return f"| {name} | x {peer}, at least | {least:g} | {found} | {found.at_least(least, rounds)} |"


def rows_table(report: CompressStepReport) -> list[str]:
    rows = {row.contender: row for row in report.rows}
    peers = ("x DDP", "x DDP fp16 hook", "x uncompressed", "of the limit")
    lines = harness.table("contender", "time per step", "middle half", *peers, "MB sent")
    for row in sorted(report.rows, key=lambda row: statistics.median(row.seconds)):
        times = [compare(report, row.contender, peer).median for peer in (DDP, DDP_FP16, NONE, LIMIT) if peer in rows]
        sent = "" if row.bytes_sent is None else f"{row.bytes_sent / 1e6:.3f}"
        shown = " | ".join(f"{value:.2f}" for value in times)
        middle = spread(quartiles(row.seconds))
        lines.append(f"| {row.contender} | {seconds(statistics.median(row.seconds))} | {middle} | {shown} | {sent} |")
    return lines


def as_markdown(reports: list[CompressStepReport], command: str) -> list[str]:
    first, machine, settings = reports[0], reports[0].machine, reports[0].settings
    gpu, shared = (machine.gpu, "on the GPUs of one machine") if settings.device == "cuda" else (None, "one thread each")
    schedules = f"`{SCHEDULES[settings.device]}` where stretto compresses"
    if any(CROSSING in row.contender for row in first.rows):
        schedules += ", `Priority()` across the barrier"
    lines = [
        *harness.heading("Training step with compressed gradients", first.date, command, machine, gpu),
        f"Byte-level GPT, {first.num_parameters / 1e6:.1f} M parameters, batch {settings.rows} x {settings.length} "
        f"on each of {settings.hosts} lab hosts, SGD, {shared}; {schedules}. Median "
        f"over {settings.rounds} rounds of the slowest rank's time; contenders take turns in each round. Ratios are of two "
        "turns of each round, with the 95 % interval of the median. Above 1: faster than that peer.",
    ]
    for report in reports:
        rows = {row.contender: statistics.median(row.seconds) for row in report.rows}
        where = f"links of {report.settings.rate}; DDP's communication adds {rows[DDP] / rows[LIMIT] - 1:.1f} times the step "
        title = f"L{where[1:]}" if report.settings.rho is None else f"rho = {report.settings.rho:g}: {where}"
        judged = claims(report)
        head = harness.table("contender", "claim", "target", "measured", "verdict") if judged else []
        lines += ["", f"## {title}without any", "", *head, *judged, "", *rows_table(report)]
    return lines


def main(arguments: list[str]) -> None:
    parser = harness.parser("Time training steps with compressed gradients on slow lab links.", quick="2 rounds, two codecs")
    links = parser.add_mutually_exclusive_group()
    links.add_argument("--rho", type=float, nargs="+", default=[10.0, 1.0], help="communication over computation, of DDP (10 1)")
    links.add_argument("--rate", nargs="+", help="of the links, instead of rho: 1gbit")
    parser.add_argument("--codecs", default=",".join(CODECS), help=f"of {','.join(CODECS)}".replace("%", "%%"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mebibytes", type=int, nargs="*", default=[], help="also in buckets of so many MiB")
    parser.add_argument("--rows", type=int, help="of each worker's batch (16; on a GPU 4, of 256 bytes)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the hosts share the GPUs that there are")
    options = parser.parse_args(arguments)
    names = ["Int8", "EF Sign"] if options.quick else options.codecs.split(",")
    unknown = [name for name in names if name not in CODECS]
    if unknown:
        raise ConfigurationError(f"--codecs {','.join(unknown)}: there is no such row. Write some of {','.join(CODECS)}.")
    harness.check(options.device, options.rounds)
    chosen, rounds = strategies(names, SCHEDULES[options.device], options.mebibytes), 2 if options.quick else options.rounds
    settings = CompressStepSettings(strategies=chosen, rounds=rounds, rows=options.rows or 16)
    if options.device == "cuda":
        settings = msgspec.structs.replace(settings, device="cuda", rows=options.rows or 4, length=256, width=768, depth=8)
    rates: list[tuple[str, float | None]] = [(rate, None) for rate in options.rate or ()]
    reports = []
    for rate, rho in rates or ((rate_for(rho, settings), rho) for rho in options.rho):
        reports.append(run(msgspec.structs.replace(settings, rate=rate, rho=rho)))
        first, text = reports[0], as_markdown(reports, harness.command_of("compress_step", arguments))
        folder = harness.folder_of(options)
        harness.write("compress_step", reports, text, first.date, first.machine, folder, first.machine.gpu)
        print("\n".join(text))  # each rate's as soon as it is there


if __name__ == "__main__":
    harness.run(main)
