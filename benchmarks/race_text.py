"""What a race has found, in Markdown: its claims and its table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import harness
from race_report import (
    BEGUN_STEPS,
    DDP,
    NONE,
    RaceReport,
    after_kill,
    against,
    equal_steps,
    fast_rate,
    loss_after_kill,
    loss_at,
    megabytes_per_step,
    rho,
    slopes,
    sooner,
    step_rate,
    targets,
)
from race_worker import PART_BYTES

SOONER, STEPS, FAST, ON, LOSS = "sooner", "steps", "fast", "on", "loss"
CLAIMS: dict[str, list[tuple[str, str, float]]] = {  # race -> (contender, what, target)
    "rho10": [
        ("diloco(every=20)", SOONER, 4.0), ("streaming_diloco()", SOONER, 4.0), ("streaming_diloco()", ON, 0.9),
        ("sgp()", STEPS, 1.3), ("choco_sgd(TopK(0.05))", STEPS, 4.0),
    ],
    "slow_host": [
        (name, what, target) for what, target in ((SOONER, 2.0), (FAST, 0.9)) for name in ("adpsgd()", "wagma(size=2)", "wagma()")
    ],
}  # fmt: skip
KEPT_RATE, KEPT_LOSS = 0.95, 1.03
FIGURES: dict[str, tuple[str, Callable[[RaceReport, str], Sequence[float | None]]]] = {
    SOONER: ("reaches DDP's loss sooner, x", sooner),
    STEPS: ("steps per second, x DDP", lambda report, name: against(report, name, DDP)),
    ON: ("steps per second, x no communication", lambda report, name: against(report, name, NONE)),
    FAST: ("steps per second of the fast hosts, x no communication", lambda report, name: against(report, name, NONE, fast_rate)),
}


def claims(report: RaceReport) -> list[str]:
    """A claim is met if every seed says so."""
    if report.settings.killed is not None:
        return _claims_of_kill(report)
    lines = harness.table("claim", "target", "each seed", "verdict")
    for name, what, target in CLAIMS.get(report.settings.name, []):
        if name in report.names:
            text, figure = FIGURES[what]
            lines.append(_claim(f"{name}: {text}", target, figure(report, name), lambda each, target=target: each >= target))
    return lines if len(lines) > 2 else []


def _claims_of_kill(report: RaceReport) -> list[str]:
    lines = harness.table("claim", "target", "each seed", "verdict")
    for name in report.names:
        text = f"{name}: steps per second of the others after the kill, x undisturbed, at least"
        lines.append(_claim(text, KEPT_RATE, after_kill(report, name), lambda each: each >= KEPT_RATE))
        text = f"{name}: loss at the end, x undisturbed, at most"
        lines.append(_claim(text, KEPT_LOSS, loss_after_kill(report, name), lambda each: each <= KEPT_LOSS))
    return lines


def _claim(text: str, target: float, found: Sequence[float | None], holds: Callable[[float], bool]) -> str:
    met = bool(found) and all(each is not None and holds(each) for each in found)
    return f"| {text} | {target:g} | {shown(found)} | {harness.verdict(met)} |"


def shown(values: Sequence[float | None], digits: int = 2) -> str:
    return ", ".join("not reached" if each is None else f"{each:.{digits}f}" for each in values) or "none"


def as_markdown(report: RaceReport, command: str) -> list[str]:
    return [
        *harness.heading("A race to a loss", report.date, command, report.machine),
        _how(report),
        "",
        *claims(report),
        "",
        *(_table_of_kill(report) if report.settings.killed is not None else _table(report)),
        *_failures(report),
    ]


def _how(report: RaceReport) -> str:
    settings = report.settings
    links = f"links of {settings.rate}" if settings.rate else "links as fast as the machine"
    words = [
        f"Byte-level GPT, {report.num_parameters / 1e6:.2f} M parameters, AdamW, on {settings.hosts} lab hosts with {links}; a "
        f"step computes for {settings.compute_s * 1e3:g} ms (emulated; gradients are real), seeds "
        f"{', '.join(map(str, settings.seeds))}, {settings.run_s:g} s a run or its share. All begin with the weights "
        f"of {BEGUN_STEPS} synchronous steps. {_judged(report)}",
    ]
    if report.at_once > 1:
        words.append(
            f"{report.at_once} runs at a time, each on a lab of its own, seed after seed: what is compared ran side by side or "
            "shortly after each other."
        )
    if settings.rho is not None:
        words.append(f"DDP communicates {shown(rho(report), 1)} times as long as it computes (each seed).")
    if settings.slow_factor != 1:
        words.append(f"The last host takes {settings.slow_factor:g} times as long for every step.")
    if settings.killed is not None:
        words.append(f"Rank {settings.killed} is killed (SIGKILL) after {settings.kill_at_s:g} s.")
    elif report.of(DDP):
        falls = ", ".join(f"{100 * each:.1f} %" for each in slopes(report))
        losses = shown(list(targets(report).values()), 3)
        words.append(
            f"The loss to reach is DDP's after 70 % of its run: {losses} (each seed), where it is falling by {falls} in a fifth "
            "of the run."
        )
    return " ".join(words)


def _judged(report: RaceReport) -> str:
    """What the losses are losses of."""
    marks = f"the mean of three marks, one each {report.settings.mark_every_s:g} s or step"
    if not any(run.own for run in report.runs):
        return f"Losses are of the mean of the workers' weights, {marks}."
    words = [
        f"Each worker has {PART_BYTES >> 10} KiB of text to itself. Losses are validation losses, {marks}: of the mean of the "
        "workers' weights and, where these differ, the mean of what workers have with weights of their own."
    ]
    if report.of(NONE) and report.of(DDP):
        words.append(
            "Without communication workers are judged by weights of their own, for to make the mean is an exchange. By the mean "
            f"they would reach DDP's loss so many times sooner: {shown(sooner(report, NONE, by_mean=True))} (each seed)."
        )
    return " ".join(words)


def _table(report: RaceReport) -> list[str]:
    at, slow = equal_steps(report), report.settings.slow_factor != 1
    columns = ["contender", "rate", "steps/s", "x DDP", "x no communication", "MB sent a step", f"loss after {at:.0f} steps",
               "loss at the end", "with own weights", "reaches DDP's loss, x sooner"]  # fmt: skip
    if slow:
        columns.insert(5, "fast hosts, x no communication")
    lines = harness.table(*columns)
    for name in report.names:
        if not (runs := report.of(name)):
            continue
        cells = [
            name, f"{report.settings.contenders[name].rate:g}", f"{statistics.fmean(map(step_rate, runs)):.2f}",
            shown(against(report, name, DDP)), shown(against(report, name, NONE)),
            f"{statistics.fmean(map(megabytes_per_step, runs)):.3f}",
            shown([loss_at(run.mean_by_steps, at) for run in runs], 3), shown([run.mean_by_time[-1][1] for run in runs], 3),
            shown([run.own_by_time[-1][1] for run in runs if run.own], 3), shown(sooner(report, name)),
        ]  # fmt: skip
        if slow:
            cells.insert(5, shown(against(report, name, NONE, fast_rate)))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _table_of_kill(report: RaceReport) -> list[str]:
    lines = harness.table("contender", "rate", "steps/s undisturbed", "loss undisturbed", "loss, one killed", "MB sent a step")
    for name in report.names:
        if not (runs := report.of(name)):
            continue
        losses = (shown([run.last_loss for run in report.of(name, killed=killed)], 3) for killed in (False, True))
        sent = statistics.fmean(map(megabytes_per_step, runs))
        speed = statistics.fmean(map(step_rate, runs))
        lines.append(f"| {name} | {report.settings.contenders[name].rate:g} | {speed:.2f} | {' | '.join(losses)} | {sent:.3f} |")
    return lines


def _failures(report: RaceReport) -> list[str]:
    found = dict.fromkeys((run.contender, run.killed, run.failed) for run in report.runs if run.failed is not None)
    lines = [
        f"- {name}{', one killed' if killed else ''}: `{reason.strip().splitlines()[-1][:300]}`"
        for name, killed, reason in found
        if reason is not None
    ]
    return ["", "Did not run:", "", *lines] if lines else []
