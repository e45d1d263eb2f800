"""Training with slow hosts: servers that wait for nobody, against DDP. 4 lab hosts, gradients of a byte GPT, 3 seeds.

    python benchmarks/slow_hosts.py                 one host takes 4 times as long for every step: when is a loss reached?
    python benchmarks/slow_hosts.py --stalls        every host stalls now and then, for 5 steps: how many steps are taken?
    python benchmarks/slow_hosts.py --tune          the loss at the end for several learning rates, on a seed that is not judged
    python benchmarks/slow_hosts.py --quick         a few seconds each: does the script work?

Computation is emulated, so hosts do not share processors (`slow_hosts_worker.py`). The loss to reach is the one that DDP has
after 70 % of its run, of the same seed; losses are validation losses, the mean of three neighbours. Each contender has the
learning rate that gave it the lowest loss on a seed of its own (`--tune`): one that steps with every worker's gradient by itself
takes more, and noisier, steps. Writes `slow_hosts_MACHINE_DATE.json` and `.md`. Let the machine be idle. Needs the lab.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import harness
import msgspec
from slow_hosts_worker import SlowReport, SlowRun, SlowSettings
from step_worker import DDP

from stretto.bench.start import run_workers

WORKER = Path(__file__).with_name("slow_hosts_worker.py")
SOFT, BACKUP, AWARE, STALE = "SoftSync(1)", "BackupWorkers(1)", "Asynchronous, staleness-aware", "StaleSynchronous(3)"
STRATEGIES: dict[str, str | None] = {
    DDP: None,
    "AllReduce": "Strategy()",
    SOFT: "Strategy(aggregate=ParameterServer(), sync=SoftSync(1))",
    BACKUP: "Strategy(aggregate=ParameterServer(), sync=BackupWorkers(1))",
    AWARE: "Strategy(aggregate=ParameterServer(), sync=Asynchronous(staleness_aware=True))",
    "Asynchronous": "Strategy(aggregate=ParameterServer(), sync=Asynchronous())",
    STALE: "Strategy(aggregate=ParameterServer(), sync=StaleSynchronous(3))",
}
RATES = dict.fromkeys(STRATEGIES, 2e-3) | {
    DDP: 4e-3,
    "AllReduce": 4e-3,
    SOFT: 4e-3,
}  # the best of TUNED in 20 s, with one slow host
TUNED = (1e-3, 2e-3, 4e-3, 8e-3)
JUDGED_BY_LOSS = (DDP, SOFT, BACKUP, AWARE, STALE)  # the others cost minutes: --all
SOONER = {SOFT: 1.6, BACKUP: 1.6, AWARE: 1.6}  # than DDP, with one slow host
FASTER = 1.25  # steps of StaleSynchronous(3), with stalls
SHARE = 0.7  # of DDP's run, where the loss to reach is
NEIGHBOURS = 3


def run(settings: SlowSettings) -> SlowReport:
    answer = run_workers(str(WORKER), settings, os.environ, workers=settings.hosts, lab=True)
    return msgspec.json.decode(answer, type=SlowReport)


def smooth(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each loss is the mean of it and the ones before it, so nothing is reached earlier than it was."""
    return [
        (at_s, statistics.fmean(loss for _, loss in curve[max(0, index + 1 - NEIGHBOURS) : index + 1]))
        for index, (at_s, _) in enumerate(curve)
    ]


def loss_at(curve: list[tuple[float, float]], at_s: float) -> float:
    """On the straight line between two measurements."""
    for (begin_s, before), (end_s, after) in zip(curve, curve[1:], strict=False):
        if begin_s <= at_s <= end_s:
            return before + (after - before) * (at_s - begin_s) / (end_s - begin_s)
    return curve[-1][1]


def seconds_to(curve: list[tuple[float, float]], target: float) -> float | None:
    """When the loss is first reached; None if it is not."""
    for (begin_s, before), (end_s, after) in zip(curve, curve[1:], strict=False):
        if after <= target:
            return end_s if before <= after else begin_s + (end_s - begin_s) * max(0.0, before - target) / (before - after)
    return None


def by_contender(report: SlowReport) -> dict[str, list[SlowRun]]:
    return {name: [run for run in report.runs if run.contender == name] for name in report.settings.strategies}


def sooner(report: SlowReport) -> dict[str, list[float | None]]:
    """For each seed, DDP's time to the loss over the contender's."""
    runs, targets = by_contender(report), {}
    for each in runs[DDP]:
        curve = smooth(each.curve)
        target = loss_at(curve, SHARE * each.seconds)
        targets[each.seed] = target, seconds_to(curve, target)
    found: dict[str, list[float | None]] = {}
    for name, own in runs.items():
        found[name] = []
        for each in own:
            target, ddp_s = targets[each.seed]
            mine = seconds_to(smooth(each.curve), target)
            found[name].append(None if mine is None or ddp_s is None else ddp_s / mine)
    return found


def steps_per_second(run: SlowRun) -> float:
    """Of a worker, in the mean."""
    return statistics.fmean(run.steps) / run.seconds


def faster(report: SlowReport) -> dict[str, list[float]]:
    runs = by_contender(report)
    ddp = [steps_per_second(each) for each in runs[DDP]]
    return {name: [steps_per_second(each) / base for each, base in zip(own, ddp, strict=True)] for name, own in runs.items()}


def claims(report: SlowReport) -> list[str]:
    """A claim is met if every seed says so."""
    lines = harness.table("claim", "target", "each seed", "verdict")
    if report.settings.losses:
        for name, target in SOONER.items():
            ratios = sooner(report)[name]
            met = all(each is not None and each >= target for each in ratios)
            lines.append(
                f"| {name}: reaches the loss sooner than DDP, x | {target} | {_shown(ratios)} | {harness.verdict(met)} |"
            )
    if report.settings.stall_chance:
        rates = faster(report)[STALE]
        met = all(each >= FASTER for each in rates)
        lines.append(f"| {STALE}: steps per second, x DDP | {FASTER} | {_shown(rates)} | {harness.verdict(met)} |")
    return lines


def _shown(ratios: list[float] | list[float | None]) -> str:
    return ", ".join("not reached" if each is None else f"{each:.2f}" for each in ratios)


def as_markdown(report: SlowReport, command: str) -> list[str]:
    settings, rates, times = report.settings, faster(report), sooner(report) if report.settings.losses else {}
    how = f"one of them takes {settings.slow_factor:g} times as long" if settings.slow_factor != 1 else "all equally fast"
    if settings.stall_chance:
        how += f", each step takes {settings.stall_factor:g} times as long with a chance of {settings.stall_chance:g}"
    lines = [
        *harness.heading("Training with slow hosts", report.date, command, report.machine),
        f"Byte-level GPT, {report.num_parameters / 1e6:.2f} M parameters, on {settings.hosts} lab hosts; a step computes for "
        f"{settings.compute_s:g} s ({report.gradient_s * 1e3:.0f} ms of it real gradients), {how}. AdamW, {settings.run_s:g} s "
        f"for each contender and seed ({', '.join(map(str, settings.seeds))}). Steps: of a worker in the mean.",
        "",
        *claims(report),
        "",
        *harness.table("contender", "rate", "steps/s", "x DDP", "loss at the end", "reaches DDP's loss, x sooner", "staleness"),
    ]
    for name, own in by_contender(report).items():
        losses = ", ".join(f"{smooth(each.curve)[-1][1]:.3f}" for each in own if each.curve)
        speed = statistics.fmean(map(steps_per_second, own))
        lines.append(
            f"| {name} | {settings.rates[name]:g} | {speed:.2f} | {_shown(rates[name])} | {losses} | "
            f"{_shown(times[name]) if times else ''} | {_staleness(own)} |"
        )
    return lines


def _staleness(runs: list[SlowRun]) -> str:
    counts: dict[int, int] = {}
    for each in runs:
        for tau, count in each.staleness.items():
            counts[tau] = counts.get(tau, 0) + count
    if not counts:
        return ""
    mean = sum(tau * count for tau, count in counts.items()) / sum(counts.values())
    return f"{mean:.1f}, at most {max(counts)}"


def tune(settings: SlowSettings, command: str, folder: Path) -> None:
    """Every contender with every rate, on one seed."""
    rates = {f"{name}, {rate:g}": rate for name in settings.strategies for rate in TUNED}
    strategies = {f"{name}, {rate:g}": text for name, text in settings.strategies.items() for rate in TUNED}
    report = run(msgspec.structs.replace(settings, strategies=strategies, rates=rates, seeds=[100]))
    text = [
        *harness.heading("Learning rates for training with slow hosts", report.date, command, report.machine),
        f"Loss at the end of {settings.run_s:g} s, seed 100; one host takes {settings.slow_factor:g} times as long.",
        "",
        *harness.table("contender", *(f"{rate:g}" for rate in TUNED)),
    ]
    last = {each.contender: smooth(each.curve)[-1][1] for each in report.runs}
    for name in settings.strategies:
        shown = [f"{last[f'{name}, {rate:g}']:.3f}" for rate in TUNED]
        text.append(f"| {name} | {' | '.join(shown)} |")
    stem = harness.write("slow_hosts_rates", report, text, report.date, report.machine, folder)
    harness.show(text[-len(settings.strategies) :], stem)


def main(arguments: list[str]) -> None:
    parser = harness.parser("Training with slow hosts.", quick="one seed, 3 s for each contender")
    parser.add_argument("--stalls", action="store_true", help="hosts stall at random, and none is slow all the time")
    parser.add_argument("--all", action="store_true", help="also contenders about which nothing is claimed")
    parser.add_argument("--tune", action="store_true", help="find learning rates")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, help="of each run (45; with stalls 20)")
    options = parser.parse_args(arguments)
    harness.check("cpu", len(options.seeds))
    run_s = 3.0 if options.quick else options.seconds or (20.0 if options.stalls else 45.0)
    names = list(STRATEGIES) if options.stalls or options.all or options.tune else JUDGED_BY_LOSS
    settings = SlowSettings(
        strategies={name: STRATEGIES[name] for name in names}, rates=RATES, run_s=run_s,
        seeds=options.seeds[:1] if options.quick else options.seeds,
        slow_factor=1.0 if options.stalls else 4.0, stall_chance=0.1 if options.stalls else 0.0, losses=not options.stalls,
    )  # fmt: skip
    command = harness.command_of("slow_hosts", arguments)
    if options.tune:
        tune(settings, command, harness.folder_of(options))
        return
    report = run(settings)
    theme = "slow_hosts_stalls" if options.stalls else "slow_hosts"
    stem = harness.write(theme, report, as_markdown(report, command), report.date, report.machine, harness.folder_of(options))
    harness.show(claims(report), stem)


if __name__ == "__main__":
    harness.run(main)
