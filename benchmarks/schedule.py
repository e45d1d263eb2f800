"""What the order of transfers is worth: steps of an emulated accelerator on 4 lab hosts, against torch's DDP on gloo.

    python benchmarks/schedule.py             an MLP of equal layers and a byte GPT, communication 0.3, 1 and 3 times computation
    python benchmarks/schedule.py --quick     few rounds at rho 1: does the script work?
    python benchmarks/schedule.py --device cuda     models of more than 100 M parameters; the hosts share the GPU
    python benchmarks/schedule.py --servers         pushes and pulls with four servers at rho 1, across the barrier and with it
    python benchmarks/schedule.py --compressed      compressed gradients at rho 10, against no communication
    python benchmarks/schedule.py --late            averages that are applied a step late, at rho 1

On hosts without an accelerator computation and communication fight for the same cores, so what overlaps could not be judged:
modules sleep instead (`schedule_worker.py`). The link's rate is chosen such that a ring all-reduce of all gradients takes rho
times as long as computation; four servers beside the workers put as many bytes on each link. Predictions are those of
`plan/simulate.py` with the profile that rank 0 recorded in this very run. Writes `schedule_MACHINE_DATE.json` and `.md`; the last
three options write `schedule_servers_...`, `schedule_compressed_...` and `late_...`. --models, --schedules and --rho narrow any
of them. Let the machine be idle. Needs the lab.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import harness
import msgspec
from harness import ratio
from msgspec.structs import replace
from schedule_worker import DDP, DDP_SMALL, DDP_STATIC, ScheduleReport, ScheduleSettings, workloads
from step_worker import LIMIT

from stretto.bench.start import run_workers
from stretto.errors import ConfigurationError

WORKER = Path(__file__).with_name("schedule_worker.py")
BUCKETS, MERGED, PRIORITY, CARAMEL = "Buckets()", "Merged()", "Priority()", "Caramel()"
SCHEDULES = {
    name: f"Strategy(schedule={name})"
    for name in (
        BUCKETS, "WaitFree()", "AfterBackward()", MERGED, "Priority(cross_barrier=False)", "Tac()", PRIORITY, CARAMEL,
    )
}  # fmt: skip
CROSSING = (PRIORITY, CARAMEL)
OF_LIMIT = 0.8  # of the rate without communication, at rho 10
CODECS = {"EF Sign": "Sign()", "EF TopK 1 %": "TopK(0.01)", "EF PowerSGD 4": "PowerSGD(4)"}
COMPRESSED = {
    f"{name}, {schedule}": f"Strategy(compress=ErrorFeedback({codec}), schedule={schedule})"
    for name, codec in CODECS.items()
    for schedule in (BUCKETS, PRIORITY)
}
TAC, TAC_BARRIER = "4 servers, Tac()", "4 servers, Tac(cross_barrier=False)"
SERVERS = {
    f"4 servers, {schedule}": f"Strategy(aggregate=ParameterServer(), schedule={schedule})"
    for schedule in (BUCKETS, "Tac()", "Tac(cross_barrier=False)", "Tic()", PRIORITY)
} | {f"ring, {schedule}": f'Strategy(aggregate=AllReduce("ring"), schedule={schedule})' for schedule in (BUCKETS, "Tac()")}
ONE_LATE = "StaleSynchronous(1)"
LATE = {
    name: f"Strategy({answer})"
    for name, answer in ((BUCKETS, ""), (PRIORITY, "schedule=Priority()"), (ONE_LATE, "sync=StaleSynchronous(1)"))
}
ACROSS = 1.15  # of the same with the barrier, at rho 1


class Comparison(NamedTuple):
    """What is measured in one run, by its rows; and the models and rhos that are measured if no others are asked for."""

    theme: str
    strategies: dict[str, str]
    models: tuple[str, ...] = ("mlp", "gpt")
    rhos: tuple[float, ...] = (1.0,)
    peers: tuple[str, ...] = (LIMIT,)


ORDER = Comparison("schedule", SCHEDULES, rhos=(0.3, 1.0, 3.0), peers=(LIMIT, DDP, DDP_STATIC, DDP_SMALL))
OTHERS = {
    "servers": Comparison("schedule_servers", SERVERS),
    "compressed": Comparison("schedule_compressed", COMPRESSED, models=("gpt",), rhos=(10.0,)),
    "late": Comparison("late", LATE),
}


def rate_for(settings: ScheduleSettings) -> str:
    num_bytes = sum(parameter.nbytes for parameter in workloads(settings.device)[settings.model].model().parameters())
    on_link = 2 * num_bytes * (settings.workers - 1) / settings.workers
    return f"{round(8 * on_link / (settings.rho * settings.compute_s) / 1e6)}mbit"


def computing_s(settings: ScheduleSettings) -> float:
    """A step without communication, of workers that share a GPU."""
    report = run(replace(settings, strategies={}, peers=(LIMIT,), rounds=3))
    return statistics.median(report.rows[0].seconds)


def run(settings: ScheduleSettings) -> ScheduleReport:
    answer = run_workers(str(WORKER), settings, os.environ, workers=settings.workers, lab=True, rate=settings.rate)
    return msgspec.json.decode(answer, type=ScheduleReport)


def fastest_of(report: ScheduleReport, names: tuple[str, ...]) -> str | None:
    """Of those that took part."""
    rows = {row.contender: row.seconds for row in report.rows if row.contender in names}
    return min(rows, key=lambda name: statistics.median(rows[name]), default=None)


def claims(report: ScheduleReport) -> list[str]:
    settings, rows = report.settings, {row.contender: row for row in report.rows}
    best, peer = fastest_of(report, CROSSING), fastest_of(report, (DDP, DDP_STATIC))
    where, rounds, lines = f"{settings.model}, rho {settings.rho:g}", settings.rounds, []
    least_ddp, least_own = (1.2, 1.1) if settings.rho == 1.0 else (1.0, 1.0)
    targets = {peer: least_ddp, BUCKETS: least_own, DDP_SMALL: 1.0} if best is not None else {}
    if ONE_LATE in rows:  # what it gains, beside what is said of schedules elsewhere
        if BUCKETS not in rows or settings.rho != 1.0:
            return []
        found = ratio(rows[BUCKETS].seconds, rows[ONE_LATE].seconds)
        return [f"| {where} | {ONE_LATE}, x {BUCKETS}, at least | 1.10 | {found} | {found.at_least(1.1, rounds)} |"]
    for name, least in targets.items():
        if name in rows and best is not None:
            found = ratio(rows[name].seconds, rows[best].seconds)
            lines.append(f"| {where} | {best}, x {name}, at least | {least:.2f} | {found} | {found.at_least(least, rounds)} |")
    if settings.rho == 1.0 and best is not None:
        alpha = alpha_of(report, best)
        lines.append(f"| {where} | alpha of {best}, at least | 0.75 | {alpha:.2f} | {harness.verdict(alpha >= 0.75)} |")
    better = fastest_of(report, ("WaitFree()", "AfterBackward()"))
    if MERGED in rows and better is not None:
        found = ratio(rows[better].seconds, rows[MERGED].seconds)
        lines.append(f"| {where} | {MERGED}, x {better}, at least | 1.00 | {found} | {found.at_least(1.0, rounds)} |")
    if TAC in rows and TAC_BARRIER in rows and settings.rho == 1.0:
        found = ratio(rows[TAC_BARRIER].seconds, rows[TAC].seconds)
        lines.append(
            f"| {where} | {TAC}, x the same with the barrier, at least | {ACROSS} | {found} | {found.at_least(ACROSS, rounds)} |"
        )
    for name in (name for name in rows if name in COMPRESSED and settings.rho == 10.0):
        found = ratio(rows[LIMIT].seconds, rows[name].seconds)
        lines.append(f"| {where} | {name}, x {LIMIT}, at least | {OF_LIMIT} | {found} | {found.at_least(OF_LIMIT, rounds)} |")
    plain = [row for row in report.rows if row.contender not in COMPRESSED]  # what codecs compute is in no profile
    off = [(row.contender, row.predicted_s / statistics.median(row.seconds)) for row in plain if row.predicted_s]
    if off:
        worst = max(off, key=lambda one: abs(one[1] - 1))
        shown = f"{worst[1]:.2f} ({worst[0]})"
        lines.append(
            f"| {where} | predicted over measured, the worst, within | 0.90 to 1.10 | {shown} | "
            f"{harness.verdict(abs(worst[1] - 1) <= 0.1)} |"
        )
    return lines


def alpha_of(report: ScheduleReport, name: str) -> float:
    """(N + C - T) / min(N, C), with N the time that the bytes need at the link's rate and C a step without communication."""
    rows = {row.contender: statistics.median(row.seconds) for row in report.rows}
    n, c, t = report.settings.rho * report.settings.compute_s, rows[LIMIT], rows[name]
    return (n + c - t) / min(n, c)


def rows_of(report: ScheduleReport) -> list[str]:
    settings = report.settings
    peer = DDP if any(row.contender == DDP for row in report.rows) else LIMIT
    base = next(row.seconds for row in report.rows if row.contender == peer)
    text = workloads(settings.device)[settings.model].text
    title = f"{text}, rho {settings.rho:g}: {settings.compute_s * 1e3:.0f} ms, links of {settings.rate}"
    lines = [
        "",
        f"## {title}",
        "",
        *harness.table("contender", "step, ms", f"x {peer.removesuffix(', views')}", "transfers", "predicted, ms"),
    ]
    for row in sorted(report.rows, key=lambda row: statistics.median(row.seconds)):
        predicted = "" if row.predicted_s is None else f"{1e3 * row.predicted_s:.0f}"
        lines.append(
            f"| {row.contender} | {1e3 * statistics.median(row.seconds):.0f} | {ratio(base, row.seconds)} "
            f"| {row.num_transfers or ''} | {predicted} |"
        )
    return lines


def main(arguments: list[str]) -> None:
    parser = harness.parser("Steps with every schedule on 4 lab hosts with an emulated accelerator.", quick="2 rounds at rho 1")
    parser.add_argument("--rounds", type=int, help="how often each contender has its turn (11)")
    parser.add_argument("--models", help=f"of {', '.join(workloads('cpu'))}; with commas")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the hosts share the GPU")
    parser.add_argument("--compute", type=float, help="seconds of a step (0.6 on an emulated accelerator; measured on a GPU)")
    parser.add_argument("--steps", type=int, default=2, help="of a turn (2)")
    parser.add_argument("--schedules", help="some of the rows; with semicolons")
    parser.add_argument("--rho", help="communication over computation; with commas")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--compressed", action="store_true", help="compressed gradients at rho 10, without DDP")
    kinds.add_argument("--servers", action="store_true", help="pushes and pulls of a parameter server at rho 1, without DDP")
    kinds.add_argument("--late", action="store_true", help="averages that are applied late, at rho 1, without DDP")
    options = parser.parse_args(arguments)
    asked = next((other for name, other in OTHERS.items() if getattr(options, name)), ORDER)
    rounds = options.rounds if options.rounds is not None else 2 if options.quick else 11
    harness.check(options.device, rounds)
    names = some_of(asked.strategies, options.schedules, ";", "--schedules")
    models = asked.models if options.models is None else some_of(workloads(options.device), options.models, ",", "--models")
    rhos = rhos_of(options, asked)
    peers = tuple(peer for peer in asked.peers if options.device == "cpu" or peer != DDP_SMALL)
    reports: list[ScheduleReport] = []
    for model in models:
        settings = ScheduleSettings(
            model=model, strategies={name: asked.strategies[name] for name in names}, peers=peers, rounds=rounds,
            steps=options.steps, device=options.device,
        )  # fmt: skip
        if options.compute is not None or options.device == "cuda":
            settings = replace(settings, compute_s=options.compute or computing_s(settings))
        for rho in rhos:
            print(f"--- {model}, rho {rho:g}", flush=True)
            at_rho = replace(settings, rho=rho)
            reports.append(run(replace(at_rho, rate=rate_for(at_rho))))
            write(asked.theme, reports, harness.command_of("schedule", arguments), harness.folder_of(options))


def some_of(known: Iterable[str], asked: str | None, separator: str, option: str) -> list[str]:
    """What was asked for; all if nothing was."""
    names = list(known) if asked is None else asked.split(separator)
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(
            f"{option} {separator.join(unknown)}: there is no such row. Write some of {separator.join(known)}."
        )
    return names


def rhos_of(options: argparse.Namespace, asked: Comparison) -> tuple[float, ...]:
    if options.rho is None:
        return (1.0,) if options.quick and 1.0 in asked.rhos else asked.rhos
    try:
        rhos = tuple(float(rho) for rho in options.rho.split(","))
    except ValueError:
        rhos = ()
    if not rhos or not all(0 < rho < math.inf for rho in rhos):
        raise ConfigurationError(f"--rho {options.rho}: not one or several positive numbers. Write 0.3,1,3, for example.")
    return rhos


def as_markdown(reports: list[ScheduleReport], command: str) -> list[str]:
    first, settings = reports[0], reports[0].settings
    gpu = first.machine.gpu if settings.device == "cuda" else None
    how = "an accelerator is emulated by modules that sleep" if gpu is None else "all share the GPU"
    what = "Averages that come late" if ONE_LATE in settings.strategies else "Order of transfers"
    return [
        *harness.heading(what, first.date, command, first.machine, gpu),
        f"4 lab hosts, one worker each; {how}. Median over {settings.rounds} rounds of the slowest rank's time per step; "
        "contenders take turns in each round. Above 1 means faster.", "", *judged(reports),
        *(line for report in reports for line in rows_of(report)),
    ]  # fmt: skip


def judged(reports: list[ScheduleReport]) -> list[str]:
    claimed = [line for report in reports for line in claims(report)]
    return [*harness.table("where", "claim", "target", "measured", "verdict"), *claimed]


def write(theme: str, reports: list[ScheduleReport], command: str, folder: Path) -> None:
    """What there is so far."""
    first = reports[0]
    gpu = first.machine.gpu if first.settings.device == "cuda" else None
    stem = harness.write(theme, reports, as_markdown(reports, command), first.date, first.machine, folder, gpu)
    harness.show(judged(reports), stem)
    print("\n".join(rows_of(reports[-1])), flush=True)


if __name__ == "__main__":
    harness.run(main)
