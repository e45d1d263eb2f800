"""What a race has found: its values, the losses of its runs, and what is computed from them. `race_text.py` writes it down."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import torch
from compress_loss import Text, loss_of
from race_worker import RISE, ROWS, Contender, PacedGpt, RankRun, part_of
from slow_hosts import loss_at, seconds_to, smooth

from stretto.bench.machine import MachineInfo

DDP, NONE = "DDP", "no communication"
SHARE = 0.7  # of DDP's run, where the loss to reach is
SETTLED = 0.1  # of a run, before which no step is counted in its rate
VALIDATION_ROWS = 96
BEGUN_STEPS, BEGUN_RATE = 40, 8e-3  # before the race


class RaceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A race on lab hosts: who takes part, how long, how fast hosts and links are, and whether one is killed."""

    name: str
    contenders: dict[str, Contender]
    seeds: list[int]
    run_s: float
    compute_s: float
    rate: str | None
    slow_factor: float = 1.0
    killed: int | None = None
    kill_at_s: float = 0.0
    hosts: int = 4
    mark_every_s: float = 0.5
    rho: float | None = None  # what the rate was chosen for


class RaceRun(msgspec.Struct, frozen=True, kw_only=True):
    """One contender with one seed. `ranks`: what each worker did, None of one that was killed; `curve`: seconds, steps and
    validation loss of the mean of the workers' weights; `own`: at the same moments, the mean of the losses that workers have with
    weights of their own; `failed`: why there is nothing else."""

    contender: str
    seed: int
    killed: bool = False
    ranks: list[RankRun | None] = []
    curve: list[tuple[float, float, float]] = []
    own: list[float] = []
    failed: str | None = None

    @property
    def living(self) -> list[RankRun]:
        return [each for each in self.ranks if each is not None]

    @property
    def by_time(self) -> list[tuple[float, float]]:
        """What the contender is judged by: the loss of the mean of the weights. Without communication there is no such mean, for
        to make it is an exchange, and workers are judged by weights of their own."""
        return self.own_by_time if self.contender == NONE and self.own else self.mean_by_time

    @property
    def mean_by_time(self) -> list[tuple[float, float]]:
        return smooth([(seconds, loss) for seconds, _, loss in self.curve])

    @property
    def own_by_time(self) -> list[tuple[float, float]]:
        return smooth([(seconds, loss) for (seconds, _, _), loss in zip(self.curve, self.own, strict=True)])

    @property
    def by_steps(self) -> list[tuple[float, float]]:
        """As `by_time`."""
        return self._over_steps(self.by_time)

    @property
    def mean_by_steps(self) -> list[tuple[float, float]]:
        return self._over_steps(self.mean_by_time)

    def _over_steps(self, by_time: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(steps, loss) for (_, steps, _), (_, loss) in zip(self.curve, by_time, strict=True)]

    @property
    def last_loss(self) -> float:
        return self.by_time[-1][1]


class RaceReport(msgspec.Struct, frozen=True, kw_only=True):
    settings: RaceSettings
    machine: MachineInfo
    date: str
    num_parameters: int
    at_once: int = 1
    runs: list[RaceRun]

    def of(self, contender: str, *, killed: bool = False) -> list[RaceRun]:
        """Its runs that came to an end, by seed."""
        found = [run for run in self.runs if run.contender == contender and run.killed == killed and run.failed is None]
        return sorted(found, key=lambda run: run.seed)

    @property
    def names(self) -> list[str]:
        return [name for name in self.settings.contenders if any(run.contender == name for run in self.runs)]


def with_losses(run: RaceRun, folder: Path) -> RaceRun:
    """The run with its losses, found from what its workers have left in the folder."""
    living = [rank for rank, each in enumerate(run.ranks) if each is not None]
    weights = [torch.load(folder / f"{rank}.pt") for rank in living]
    marks = [each.marks for each in run.living]
    text, model = Text(torch.device("cpu")), PacedGpt(None)
    curve, own = [], []
    for places in moments(marks):
        chosen = [each[place] for each, place in zip(weights, places, strict=True)]
        times = [each[place] for each, place in zip(marks, places, strict=True)]
        seconds, steps = (statistics.fmean(mark[which] for mark in times) for which in (0, 1))
        loss = validate(model, torch.stack(chosen).mean(0), text)
        curve.append((round(seconds, 3), round(steps, 2), loss))
        alike = all(torch.equal(each, chosen[0]) for each in chosen)
        own.append(loss if alike else round(statistics.fmean(validate(model, each, text) for each in chosen), 5))
    return msgspec.structs.replace(run, curve=curve, own=own)


def moments(marks: list[list[tuple[float, int]]]) -> list[list[int]]:
    """For each mark of the worker that has the most of them, and every worker, which of its marks is the nearest in time. A slow
    worker has one a step, and then belongs to several; a moment after the last mark of some worker is none."""
    end_s = min(each[-1][0] for each in marks)
    times = [seconds for seconds, _ in max(marks, key=len) if seconds <= end_s] or [0.0]
    return [[min(range(len(each)), key=lambda at: abs(each[at][0] - time_s)) for each in marks] for time_s in times]


def begun(seed: int, workers: int) -> torch.Tensor:
    """The weights with which all contenders of a seed begin: some steps of synchronous training, with other batches."""
    torch.manual_seed(seed)
    model, text = PacedGpt(None), Text(torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=BEGUN_RATE, weight_decay=0.0)
    rise = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / RISE))
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1000)
    parts = [part_of(text.train, rank, workers) for rank in range(workers)]
    for _ in range(BEGUN_STEPS):
        loss_of(model, torch.cat([text.rows(part, ROWS, generator) for part in parts])).backward()
        optimizer.step()
        optimizer.zero_grad()
        rise.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@torch.no_grad()
def validate(model: PacedGpt, weights: torch.Tensor, text: Text) -> float:
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    rows = text.rows(text.validation, VALIDATION_ROWS, torch.Generator().manual_seed(7))
    return round(float(loss_of(model, rows)), 5)


# -- figures ----------------------------------------------------------------------------------------------------------


def rate_of(run: RankRun, begin_s: float | None = None) -> float:
    """Steps per second of a worker, from `begin_s` (else when it has settled) to its last mark."""
    begin_s = SETTLED * run.seconds if begin_s is None else begin_s
    first = next((mark for mark in run.marks if mark[0] >= begin_s), run.marks[0])
    last = run.marks[-1]
    return (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else 0.0


def step_rate(run: RaceRun) -> float:
    """Of a worker in the mean."""
    return statistics.fmean(map(rate_of, run.living))


def fast_rate(run: RaceRun) -> float:
    """The same, of all workers but the last, which may be slow."""
    return statistics.fmean(map(rate_of, run.living[:-1]))


def against(report: RaceReport, name: str, base: str, figure: object = step_rate) -> list[float]:
    """For each seed, the contender's figure over that of `base`."""
    bases = {run.seed: run for run in report.of(base)}
    assert callable(figure)
    return [figure(run) / figure(bases[run.seed]) for run in report.of(name) if run.seed in bases]


def rho(report: RaceReport) -> list[float]:
    """For each seed, how many times as long DDP's communication takes as its computation: what it adds to a step."""
    alone = {run.seed: run for run in report.of(NONE)}
    return [step_rate(alone[run.seed]) / step_rate(run) - 1 for run in report.of(DDP) if run.seed in alone]


def targets(report: RaceReport) -> dict[int, float]:
    """The loss to reach: that which DDP has after 70 % of its run, of the same seed."""
    return {run.seed: loss_at(run.by_time, SHARE * run.living[0].seconds) for run in report.of(DDP)}


def slopes(report: RaceReport) -> list[float]:
    """By what share of itself DDP's loss falls between 60 % and 80 % of its run: whether the target is on a plateau."""
    found = []
    for run in report.of(DDP):
        before, after = (loss_at(run.by_time, share * run.living[0].seconds) for share in (0.6, 0.8))
        found.append((before - after) / before)
    return found


def sooner(report: RaceReport, name: str, *, by_mean: bool = False) -> list[float | None]:
    """For each seed, DDP's time to the target over the contender's; None if that never reaches it. `by_mean`: it is judged by the
    mean of the workers' weights, even if it never makes that."""
    goals, base = targets(report), {run.seed: run for run in report.of(DDP)}
    found: list[float | None] = []
    for run in report.of(name):
        if run.seed in goals:
            curve = run.mean_by_time if by_mean else run.by_time
            mine, ddp_s = seconds_to(curve, goals[run.seed]), seconds_to(base[run.seed].by_time, goals[run.seed])
            found.append(None if mine is None or ddp_s is None else ddp_s / mine)
    return found


def steps_to(report: RaceReport, name: str) -> list[float | None]:
    """For each seed, the steps after which the contender has reached the target."""
    goals = targets(report)
    return [seconds_to(run.by_steps, goals[run.seed]) for run in report.of(name) if run.seed in goals]


def equal_steps(report: RaceReport) -> float:
    """As many steps as every contender has taken in every run."""
    return min((run.by_steps[-1][0] for name in report.names if name != NONE for run in report.of(name)), default=0.0)


def megabytes_per_step(run: RaceRun) -> float:
    """What a host has sent."""
    return statistics.fmean(rank.num_bytes / max(1, rank.steps) for rank in run.living) / 1e6


def after_kill(report: RaceReport, name: str) -> list[float]:
    """For each seed, the survivors' step rate after the kill, over that of the same workers in the undisturbed run."""
    undisturbed, settings = {run.seed: run for run in report.of(name)}, report.settings
    found = []
    for run in report.of(name, killed=True):
        if (other := undisturbed.get(run.seed)) is not None:
            pairs = [(mine, theirs) for mine, theirs in zip(run.ranks, other.ranks, strict=True) if mine and theirs]
            begin_s = settings.kill_at_s
            found.append(sum(rate_of(mine, begin_s) for mine, _ in pairs) / sum(rate_of(theirs, begin_s) for _, theirs in pairs))
    return found


def loss_after_kill(report: RaceReport, name: str) -> list[float]:
    """For each seed, the loss at the end over that of the undisturbed run."""
    undisturbed = {run.seed: run.last_loss for run in report.of(name)}
    return [run.last_loss / undisturbed[run.seed] for run in report.of(name, killed=True) if run.seed in undisturbed]
