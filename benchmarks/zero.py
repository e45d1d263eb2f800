"""What sharded state costs and gives: a GPT of 38 M parameters with AdamW on 4 lab hosts, against torch's own ways on gloo.

    python benchmarks/zero.py                           7 rounds at 1 Gbit/s
    python benchmarks/zero.py --compressed              the same with codecs, at 100 Mbit/s
    python benchmarks/zero.py --quick                   one round of a small model: does the script work?

Of every contender: time per step, bytes that leave a worker's host per step, and the most memory that any worker's process held.
Each has processes of its own, because memory belongs to a process; contenders take turns in each round. DeepSpeed takes part
where it is installed: `DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8`, in an environment of its own.
Writes `zero_MACHINE_DATE.json` and `.md`. Let the machine be idle. Needs the lab.
"""

from __future__ import annotations

import os
import statistics
from importlib.util import find_spec
from pathlib import Path

import harness
import msgspec
from harness import ratio
from msgspec.structs import replace
from zero_worker import DDP, DEEPSPEED, FSDP2, FSDP2_PINNED, PEERS, REDUNDANCY, ZeroReport, ZeroSettings

from stretto.bench.start import run_workers

WORKER = Path(__file__).with_name("zero_worker.py")
REPLICATED, CROSSING = "Replicated()", "Zero({}), Priority()"
OURS = {
    REPLICATED: "Strategy()",
    "Zero(1)": "Strategy(shard=Zero(1))",
    "Zero(2)": "Strategy(shard=Zero(2))",
    "Zero(3)": "Strategy(shard=Zero(3))",
    CROSSING.format(1): "Strategy(shard=Zero(1), schedule=Priority())",
    CROSSING.format(2): "Strategy(shard=Zero(2), schedule=Priority())",
}
COMPRESSED = {
    REPLICATED: "Strategy()",
    "Zero(2)": "Strategy(shard=Zero(2))",
    "Zero(2), gradients in Int8": "Strategy(compress=Int8(), shard=Zero(2))",
    "Zero(2), gradients and weights in Int8": "Strategy(compress=Int8(), shard=Zero(2, weights=Int8()))",
    "Zero(3)": "Strategy(shard=Zero(3))",
    "Zero(3), gradients and weights in Int8": "Strategy(compress=Int8(), shard=Zero(3, weights=Int8()))",
}
STAGES = ("Zero(1)", "Zero(2)")
SHARDED_PEERS = tuple(name for name in PEERS if name not in (DDP, FSDP2_PINNED))
SLOW, MOST_RESIDENT = "100mbit", 450
FEW_WARM_UP = 2  # enough for contenders that plan nothing after their first step
PINNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
MEMORY = {
    "MB resident": "resident_bytes",
    "MB resident until the first step has ended": "beginning_bytes",
    "MB before": "before_bytes",
}
Reports = dict[str, list[ZeroReport]]


class ZeroResults(msgspec.Struct, frozen=True, kw_only=True):
    settings: ZeroSettings
    rounds: int
    reports: Reports


def run(settings: ZeroSettings) -> ZeroReport:
    environment = {**os.environ, **(PINNED if settings.contender == FSDP2_PINNED else {})}
    answer = run_workers(str(WORKER), settings, environment, workers=settings.workers, lab=True, rate=settings.rate)
    return msgspec.json.decode(answer, type=ZeroReport)


def claims(results: ZeroResults) -> list[str]:
    reports, rounds = results.reports, results.rounds
    seconds = {name: [each.seconds for each in mine] for name, mine in reports.items()}
    sent = {name: statistics.median(each.sent_bytes for each in mine) for name, mine in reports.items()}
    lines = []

    def faster(name: str, base: str, least: float) -> None:
        if name in seconds and base in seconds:
            found = ratio(seconds[base], seconds[name])
            lines.append(f"| {name}, x {base}, at least | {least:.2f} | {found} | {found.at_least(least, rounds)} |")

    def bytes_of(name: str, most: float) -> None:
        if name in sent and REPLICATED in sent:
            share = sent[name] / sent[REPLICATED]
            lines.append(
                f"| bytes of {name}, x {REPLICATED}, at most | {most:.3f} | {share:.3f} | {harness.verdict(share <= most)} |"
            )

    for name in STAGES if results.settings.rate != SLOW else ():
        faster(name, REPLICATED, 0.98)
        faster(f"{name}, Priority()", REPLICATED, 1.05)
        for peer in SHARDED_PEERS:
            faster(name, peer, 1.4)
        bytes_of(name, 1.01)
    for peer in (FSDP2, "DeepSpeed ZeRO 3"):
        faster("Zero(3)", peer, 1.3)
    bytes_of("Zero(3)", 1.5 * 1.01)
    for name in COMPRESSED if results.settings.rate == SLOW else ():
        if "Int8" in name:
            faster(name, name.partition(",")[0], 2.0)
            for peer in (REDUNDANCY, FSDP2):
                faster(name, peer, 2.0)
    if "Zero(3)" in reports and results.settings.rate != SLOW:
        held = statistics.median(each.resident_bytes for each in reports["Zero(3)"]) / 1e6
        found = f"{held:.0f} | {harness.verdict(held <= MOST_RESIDENT)}"
        lines.append(f"| MB resident with Zero(3), on every worker, at most | {MOST_RESIDENT} | {found} |")
    return lines


def rows_of(results: ZeroResults) -> list[str]:
    first = next(iter(results.reports.values()))[0]
    columns = ("contender", "step, ms", "MB sent per worker and step", *MEMORY, "bytes per parameter")
    lines = ["", *harness.table(*columns)]
    for name, reports in results.reports.items():
        seconds, sent = (statistics.median(getattr(each, field) for each in reports) for field in ("seconds", "sent_bytes"))
        memory = [statistics.median(getattr(each, field) for each in reports) for field in MEMORY.values()]
        grown = statistics.median(each.resident_bytes - each.before_bytes for each in reports) / first.num_parameters
        figures = [f"{each:.0f}" for each in (1e3 * seconds, sent / 1e6, *(each / 1e6 for each in memory))]
        lines.append(f"| {name} | {' | '.join(figures)} | {grown:.1f} |")
    return lines


def as_markdown(results: ZeroResults, command: str) -> list[str]:
    first, settings = next(iter(results.reports.values()))[0], results.settings
    return [
        *harness.heading("Sharded state", first.date, command, first.machine),
        f"4 lab hosts with links of {settings.rate}, one worker each; a byte-level GPT of {first.num_parameters / 1e6:.1f} M "
        f"parameters in float32, AdamW. Median over {results.rounds} rounds; each contender has processes of its own in each. "
        "Resident: the most that any worker's process held after its first step; until the first step has ended: the most while "
        "it made the model, distributed it and took that step; before: with everything imported and no model; bytes per "
        "parameter: resident less before.", "", *judged(results), *rows_of(results),
    ]  # fmt: skip


def judged(results: ZeroResults) -> list[str]:
    return [*harness.table("claim", "target", "measured", "verdict"), *claims(results)]


def main(arguments: list[str]) -> None:
    parser = harness.parser("Sharded state against torch's, on 4 lab hosts.", quick="one round of a small model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rate", help=f"of the links (1gbit; with --compressed {SLOW})")
    parser.add_argument("--compressed", action="store_true", help="codecs on a slow network")
    parser.add_argument("--contenders", help=f"some of {';'.join([*OURS, *PEERS])}; with semicolons")
    options = parser.parse_args(arguments)
    rounds = 1 if options.quick else options.rounds
    harness.check("cpu", rounds)
    peers = (REDUNDANCY, FSDP2) if options.compressed else PEERS
    here = [name for name in peers if name not in DEEPSPEED or find_spec("deepspeed") is not None]
    every: dict[str, str | None] = {**(COMPRESSED if options.compressed else OURS), **dict.fromkeys(here)}
    chosen = every if options.contenders is None else {name: every[name] for name in options.contenders.split(";")}
    settings = ZeroSettings(contender=DDP, rate=options.rate or (SLOW if options.compressed else "1gbit"))
    if options.compressed:
        settings = replace(settings, warm_up=2, steps=1)
    if options.quick:
        settings = replace(settings, width=128, depth=4, steps=2)
    reports: Reports = {}
    for number in range(rounds):
        for name, strategy in chosen.items():
            warm_up = settings.warm_up if name.endswith("Priority()") else FEW_WARM_UP
            reports.setdefault(name, []).append(run(replace(settings, contender=name, strategy=strategy, warm_up=warm_up)))
        print(f"round {number + 1} of {rounds}", flush=True)
    results = ZeroResults(settings=settings, rounds=rounds, reports=reports)
    first = next(iter(reports.values()))[0]
    command = harness.command_of("zero", arguments)
    text = as_markdown(results, command)
    stem = harness.write(
        "zero_compressed" if options.compressed else "zero", results, text, first.date, first.machine, harness.folder_of(options)
    )
    harness.show(judged(results), stem)
    print("\n".join(rows_of(results)), flush=True)


if __name__ == "__main__":
    harness.run(main)
