"""Time to a fixed validation loss: every way to train here and those of other libraries, on 4 lab hosts, 3 seeds.

    python benchmarks/race.py rho10                links on which DDP communicates ten times as long as it computes
    python benchmarks/race.py slow_host            one host takes four times as long for every step
    python benchmarks/race.py kill                 one of four is killed in the middle; against the same run undisturbed
    python benchmarks/race.py rho10 --only DDP "diloco(every=20)" "no communication"
    python benchmarks/race.py --at-once 8          so many runs at a time, each on a lab of its own: on 16 cores
    python benchmarks/race.py rho10 --peers FOLDER          where packages of other libraries lie (`race_peers.py` has how)
    python benchmarks/race.py rho10 --tune         the loss at the end for several learning rates, on a seed that is not judged
    python benchmarks/race.py --simulate           step rates with a latency of 50 ms, in virtual time
    python benchmarks/race.py --simulate --steps-of RESULT.json    and when they reach the loss of that race
    python benchmarks/race.py rho10 --quick        a few seconds each: does the script work?

Computation is emulated and gradients are real (`race_worker.py`). Contenders take turns: for each seed every one runs once, in
a job of its own, in an order that rotates with the seed. With `--at-once` several turns are taken side by side, in the same
order, so that those of one seed run within about a minute of each other; labs share nothing but processors, of which a run needs
about one. The loss to reach is the one that DDP has after 70 % of its run, of the same seed; without communication workers have
to reach it with weights of their own. A new contender is a line below. Writes `race_NAME_MACHINE_DATE.json`, `.md` and `.svg`,
anew after each run, so that a race that is broken off leaves what it has found. Let the machine be idle. Needs the lab.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import harness
import msgspec
import race_plots
import race_simulate
import torch
from race_report import DDP, NONE, SHARE, RaceReport, RaceRun, RaceSettings, begun, with_losses
from race_text import as_markdown, claims
from race_worker import Contender, PacedGpt, RankRun, RunSettings

from stretto.bench.machine import describe
from stretto.bench.turns import now
from stretto.errors import JobError
from stretto.lab import Lab

WORKER = Path(__file__).with_name("race_worker.py")
OVERHEAD_S = 0.007  # of a step without communication, beyond what it is to compute: optimizer, hooks, waking up
GLOO = 1.08  # what DDP's all-reduces take, over what their bytes take
PAYLOAD = 0.956  # of a link's rate: frames are charged as on Ethernet
PATIENCE_S = 100.0  # beyond the time of a run
RHO = 10.0
TUNING_SEED = 100
TUNED = (1e-3, 2e-3, 4e-3, 8e-3)
EVERY = 20

LOCAL = f"local_sgd(every={EVERY})"
DILOCO = f"diloco(every={EVERY})"
STREAMING = f"streaming_diloco(every={EVERY}, fragments=2, overlap={EVERY // 2 - 1})"

SLOW_LINKS: dict[str, Contender] = {
    DDP: Contender(peer=DDP, asks_every=2),
    "DDP, fp16 hook": Contender(peer="DDP, fp16 hook", asks_every=2),
    "Strategy()": Contender(strategy="Strategy()", asks_every=2),
    "EF TopK 1 %": Contender(strategy="Strategy(compress=ErrorFeedback(TopK(0.01)))", asks_every=5, share=0.5, rate=2e-3),
    "EF PowerSGD 4": Contender(strategy="Strategy(compress=ErrorFeedback(PowerSGD(4)))", asks_every=5, share=0.5),
    "PeriodicModelAverager": Contender(peer="PeriodicModelAverager", asks_every=EVERY, share=0.5),
    "torchft DiLoCo": Contender(peer="torchft DiLoCo", asks_every=EVERY, share=0.5),
    "torchft streaming DiLoCo": Contender(peer="torchft streaming DiLoCo", asks_every=EVERY, share=0.5),
    "torchft LocalSGD": Contender(peer="torchft LocalSGD", asks_every=EVERY, share=0.5),
    "hivemind": Contender(peer="hivemind", share=0.5),
    LOCAL: Contender(strategy=LOCAL, asks_every=EVERY, share=0.5),
    DILOCO: Contender(strategy=DILOCO, asks_every=EVERY, share=0.4),
    "streaming_diloco()": Contender(strategy="streaming_diloco()", asks_every=50, share=0.4),
    STREAMING: Contender(strategy=STREAMING, asks_every=50, share=0.5),
    "post_local_sgd(20, every=20)": Contender(strategy="post_local_sgd(20, every=20)", asks_every=EVERY, share=0.5),
    "slowmo()": Contender(strategy="slowmo()", asks_every=12, share=0.5),
    "pipelined, bound 1": Contender(strategy="Strategy(sync=StaleSynchronous(1))", asks_every=2),
    "dpsgd()": Contender(strategy="dpsgd()"),
    "sgp()": Contender(strategy="sgp()", share=0.6),
    "overlap_sgp()": Contender(strategy="overlap_sgp()", share=0.6),
    "choco_sgd(TopK(0.05))": Contender(strategy="choco_sgd(TopK(0.05))", share=0.4),
    "noloco(20)": Contender(strategy="noloco(20)", share=0.5),
    NONE: Contender(share=SHARE),
}
SLOW_HOST: dict[str, Contender] = {
    DDP: Contender(peer=DDP, asks_every=5),
    DILOCO: Contender(strategy=DILOCO, asks_every=EVERY),
    "backup_workers()": Contender(strategy="backup_workers()", share=0.6),
    "adpsgd()": Contender(strategy="adpsgd()", share=0.5),
    "wagma(size=2)": Contender(strategy="wagma(size=2)", share=0.6),
    "wagma()": Contender(strategy="wagma()", share=0.6),
    NONE: Contender(share=SHARE),
}
KILL: dict[str, Contender] = {
    name: Contender(strategy=name)
    for name in ("sgp()", "choco_sgd(TopK(0.05))", "adpsgd()", "wagma(size=2)", "wagma()", "moshpit(size=2)", "moshpit()")
}
RACES: dict[str, RaceSettings] = {
    "rho10": RaceSettings(name="rho10", contenders=SLOW_LINKS, seeds=[], run_s=75.0, compute_s=0.06, rate=None, rho=RHO),
    "slow_host": RaceSettings(
        name="slow_host", contenders=SLOW_HOST, seeds=[], run_s=66.0, compute_s=0.15, rate=None, slow_factor=4.0
    ),
    "kill": RaceSettings(
        name="kill", contenders=KILL, seeds=[], run_s=24.0, compute_s=0.075, rate="1gbit", killed=2, kill_at_s=12.0
    ),
}


def num_parameters() -> int:
    return sum(parameter.numel() for parameter in PacedGpt(None).parameters())


def rate_for(rho: float, settings: RaceSettings) -> str:
    """That at which DDP's bytes, 2 (P-1)/P times the gradients, take `rho` times as long as a step without communication."""
    num_bytes = 2 * (settings.hosts - 1) / settings.hosts * 4 * num_parameters()
    return f"{round(GLOO * num_bytes * 8 / (rho * (settings.compute_s + OVERHEAD_S)) / PAYLOAD / 1e3)}kbit"


class Turn(NamedTuple):
    """A contender's run with a seed."""

    settings: RaceSettings
    contender: str
    seed: int
    killed: bool = False


def turns(settings: RaceSettings) -> list[Turn]:
    """Of a race, in their order. A run with a kill follows the same run without."""
    names = list(settings.contenders)
    disturbed = (False, True) if settings.killed is not None else (False,)
    return [
        Turn(settings, names[(number + offset) % len(names)], seed, killed)
        for number, seed in enumerate(settings.seeds)
        for offset in range(len(names))
        for killed in disturbed
    ]


def run_once(turn: Turn, peers: str | None, start: str) -> RaceRun:
    """In a job of its own; `start`: the file with the weights with which it begins."""
    settings, contender = turn.settings, turn.settings.contenders[turn.contender]
    found = RaceRun(contender=turn.contender, seed=turn.seed, killed=turn.killed)
    one = RunSettings(
        contender=contender, seed=turn.seed, run_s=settings.run_s, compute_s=settings.compute_s,
        slow_factor=settings.slow_factor, killed=settings.killed if turn.killed else None, kill_at_s=settings.kill_at_s,
        alone=settings.killed is not None, hosts=settings.hosts, mark_every_s=settings.mark_every_s, start=start, peers=peers,
    )  # fmt: skip
    temporary = tempfile.TemporaryDirectory(prefix="stretto-race-")
    with temporary as place, Lab(settings.hosts, settings.rate, environ=os.environ) as lab:
        folder = Path(place)
        job = lab.start([sys.executable, str(WORKER), msgspec.json.encode(one).decode(), place])
        try:
            results = job.wait(settings.run_s * contender.share + PATIENCE_S, keep_going=turn.killed)
        except JobError as problem:
            return msgspec.structs.replace(found, failed=_end_of(str(problem)))
        bad = [rank for rank, each in enumerate(results) if each.returncode != 0 and rank != one.killed]
        if bad:
            first = bad[0] if turn.killed or job.first_failure is None else job.first_failure
            return msgspec.structs.replace(found, failed=_end_of(results[first].output))
        ranks = [_left_by(folder, rank) for rank in range(settings.hosts)]
        return with_losses(msgspec.structs.replace(found, ranks=ranks), folder)


def _end_of(output: str) -> str:
    return output[-4000:].strip() or "ended without a word"


def _left_by(folder: Path, rank: int) -> RankRun | None:
    path = folder / f"{rank}.json"
    return msgspec.json.decode(path.read_bytes(), type=RankRun) if path.exists() else None


class Labs:
    """Where turns are taken: so many processes, each with a lab while it has a run."""

    def __init__(self, pool: ProcessPoolExecutor, peers: str | None, folder: Path) -> None:
        self._pool, self._peers, self._folder = pool, peers, folder
        self._begin = time.perf_counter()

    def take(self, all_turns: list[Turn]) -> Iterator[tuple[Turn, RaceRun]]:
        """Each turn with what came of it, as they end; and a line about each."""
        seeds = {turn.seed: turn.settings.hosts for turn in all_turns}
        starts = {seed: self._folder / f"{seed}.pt" for seed in seeds}
        for made in [self._pool.submit(_begin, seed, hosts, str(starts[seed])) for seed, hosts in seeds.items()]:
            made.result()
        waiting: dict[Future[RaceRun], Turn] = {
            self._pool.submit(run_once, turn, self._peers, str(starts[turn.seed])): turn for turn in all_turns
        }
        for number, ended in enumerate(as_completed(waiting)):
            turn, run = waiting[ended], ended.result()
            self._tell(f"{number + 1} of {len(waiting)}", turn, run)
            yield turn, run

    def _tell(self, place: str, turn: Turn, run: RaceRun) -> None:
        title = f"{turn.settings.name}, seed {run.seed}: {run.contender}{', one killed' if run.killed else ''}"
        steps = [each.steps for each in run.living]
        said = f"failed: {run.failed}" if run.failed is not None else f"{steps} steps, {run.last_loss:.3f}"
        print(f"{time.perf_counter() - self._begin:6.1f} s, {place}: {title}: {said}", file=sys.stderr, flush=True)


@contextmanager
def labs(at_once: int, peers: str | None) -> Iterator[Labs]:
    pool = ProcessPoolExecutor(at_once, get_context("spawn"), torch.set_num_threads, (1 if at_once > 1 else 2,))
    with tempfile.TemporaryDirectory(prefix="stretto-race-") as place, pool:
        yield Labs(pool, peers, Path(place))


def _begin(seed: int, hosts: int, path: str) -> None:
    torch.save(begun(seed, hosts), path)


def race(races: list[RaceSettings], with_labs: Labs, at_once: int, command: str, folder: Path) -> None:
    """All runs of all races. What is known of a race is written after each of its runs."""
    runs: dict[str, list[RaceRun]] = {settings.name: [] for settings in races}
    reports: dict[str, tuple[RaceReport, Path]] = {}
    machine, date = describe(), now()
    for turn, run in with_labs.take(list(itertools.chain.from_iterable(map(turns, races)))):
        name = turn.settings.name
        runs[name].append(run)
        report = RaceReport(
            settings=turn.settings, machine=machine, date=date, num_parameters=num_parameters(), at_once=at_once, runs=runs[name]
        )
        stem = harness.write(f"race_{name}", report, as_markdown(report, command), date, machine, folder)
        stem.with_suffix(".svg").write_text(race_plots.picture(report))
        reports[name] = report, stem
    for report, stem in reports.values():
        harness.show(claims(report), stem)


def tune(races: list[RaceSettings], with_labs: Labs) -> None:
    """Every contender with every rate, on one seed: the loss at the end."""

    def with_rate(settings: RaceSettings, name: str, rate: float) -> RaceSettings:
        return msgspec.structs.replace(settings, contenders={name: msgspec.structs.replace(settings.contenders[name], rate=rate)})

    tried = [
        Turn(with_rate(settings, name, rate), name, TUNING_SEED)
        for settings, rate in itertools.product(races, TUNED)
        for name in settings.contenders
    ]
    found: dict[tuple[str, str], dict[float, float | None]] = {}
    for turn, run in with_labs.take(tried):
        losses = found.setdefault((turn.settings.name, turn.contender), {})
        losses[turn.settings.contenders[turn.contender].rate] = None if run.failed is not None else run.last_loss
    for (where, name), losses in found.items():
        print(f"{where}, {name}: {dict(sorted(losses.items()))}", flush=True)


def main(arguments: list[str]) -> None:
    parser = harness.parser("Time to a fixed validation loss, on 4 lab hosts.", quick="one seed, 4 s for each contender")
    parser.add_argument("race", nargs="*", help=f"of {', '.join(RACES)} (all)")
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", help="these of the races' contenders")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, help="of each run")
    parser.add_argument("--at-once", type=int, default=1, metavar="RUNS", help="so many runs at a time, on a lab each (1)")
    parser.add_argument("--peers", help="folder with packages of other libraries")
    parser.add_argument("--tune", action="store_true", help="find learning rates")
    parser.add_argument("--simulate", action="store_true", help="step rates with a latency of 50 ms, in virtual time")
    parser.add_argument("--steps-of", type=Path, metavar="RESULT", help="with --simulate: the race whose loss is reached")
    options = parser.parse_args(arguments)
    command = harness.command_of("race", arguments)
    if options.simulate:
        steps_of: Path | None = options.steps_of
        result = None if steps_of is None else msgspec.json.decode(steps_of.read_bytes(), type=RaceReport)
        race_simulate.write(command, harness.folder_of(options), result)
        return
    harness.check("cpu", len(options.seeds))
    races = [prepared(RACES[name], options.only, options.seconds, options.quick, options.seeds) for name in options.race or RACES]
    with labs(options.at_once, options.peers) as with_labs:
        if options.tune:
            tune(races, with_labs)
        else:
            race(races, with_labs, options.at_once, command, harness.folder_of(options))


def prepared(
    settings: RaceSettings, only: list[str] | None, seconds: float | None, quick: bool, seeds: list[int]
) -> RaceSettings:
    names = only or list(settings.contenders)
    if unknown := [name for name in names if name not in settings.contenders]:
        known = ", ".join(settings.contenders)
        raise harness.ConfigurationError(f"--only {', '.join(unknown)}: not in this race. Write some of {known}.")
    run_s = seconds or (4.0 if quick else settings.run_s)
    return msgspec.structs.replace(
        settings, contenders={name: settings.contenders[name] for name in names}, seeds=seeds[:1] if quick else seeds,
        run_s=run_s, kill_at_s=settings.kill_at_s * run_s / settings.run_s, mark_every_s=min(0.5, run_s / 12),
        rate=rate_for(settings.rho, settings) if settings.rho is not None else settings.rate,
    )  # fmt: skip


if __name__ == "__main__":
    harness.run(main)
