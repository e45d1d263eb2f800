"""One worker of `slow_hosts.py`: python benchmarks/slow_hosts_worker.py SETTINGS FILE, started once per lab host.

Each contender trains the same model from the same weights for the same time, one after the other, in an order that rotates with
the seed. Computation is emulated: a step sleeps between its forward and its backward until it has taken as long as this host
takes for it, and computes real gradients beside. So hosts do not share processors, and a slow host is slow in nothing else.

Rank 0 keeps copies of the model with their times while it trains; their validation losses are computed when the run is over, and
take no time from anybody.
"""

from __future__ import annotations

import random
import sys
import time

import msgspec
import torch
from compress_loss import Text, loss_of
from step_models import Gpt
from step_worker import take_part
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stretto
from stretto.bench.machine import MachineInfo, describe
from stretto.bench.turns import now
from stretto.job import Job

LENGTH, WIDTH, HEADS, DEPTH = 64, 96, 4, 3
ROWS = 4  # of a worker's batch
COPIES = 24  # of the model, in a run
VALIDATION_ROWS = 192
RISE = 20  # steps in which the rate rises
ALONE_STEPS = 10  # to find out what real gradients take


class SlowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`strategies`: contender -> strategy, None for DDP; `rates`: its learning rate.

    A step takes `compute_s`, `slow_factor` times as long on the last rank, and `stall_factor` times as long with a chance of
    `stall_chance` on any."""

    strategies: dict[str, str | None]
    rates: dict[str, float]
    seeds: list[int]
    run_s: float = 45.0
    compute_s: float = 0.15
    slow_factor: float = 1.0
    stall_factor: float = 5.0
    stall_chance: float = 0.0
    hosts: int = 4
    losses: bool = True  # whether copies are kept and validated


class SlowRun(msgspec.Struct, frozen=True, kw_only=True):
    """`steps`: of each rank, in `seconds`. `curve`: seconds and validation losses. `staleness`: of rank 0's steps, how many had
    which."""

    contender: str
    seed: int
    steps: list[int]
    seconds: float
    curve: list[tuple[float, float]]
    staleness: dict[int, int]


class SlowReport(msgspec.Struct, frozen=True, kw_only=True):
    settings: SlowSettings
    machine: MachineInfo
    date: str
    num_parameters: int
    gradient_s: float  # real, beside which the rest is slept
    runs: list[SlowRun]


class Pace:
    """How long each step of this host takes. Every contender meets the same stalls."""

    def __init__(self, settings: SlowSettings, rank: int, seed: int, gradient_s: float) -> None:
        self._random = random.Random(1_000_003 * seed + rank)
        self._settings = settings
        self._usual_s = settings.compute_s * (settings.slow_factor if rank == settings.hosts - 1 else 1.0)
        self._gradient_s = gradient_s

    def compute(self) -> None:
        """Take the time that computing takes beyond that of the real gradients."""
        stalls = self._random.random() < self._settings.stall_chance
        duration_s = self._usual_s * (self._settings.stall_factor if stalls else 1.0)
        time.sleep(max(0.0, duration_s - self._gradient_s))


class Copies:
    """The model, now and then."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.kept: list[tuple[float, dict[str, Tensor]]] = []

    def consider(self, model: nn.Module, elapsed_s: float) -> None:
        if elapsed_s >= self._every_s * len(self.kept):
            self.kept.append((elapsed_s, {name: value.clone() for name, value in model.state_dict().items()}))


def train(job: Job, settings: SlowSettings, contender: str, seed: int, text: Text, gradient_s: float) -> SlowRun:
    torch.manual_seed(seed)
    core = Gpt(WIDTH, HEADS, DEPTH, LENGTH)
    optimizer = torch.optim.AdamW(core.parameters(), lr=settings.rates[contender], weight_decay=0.0)
    rise = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / RISE))
    strategy, before = settings.strategies[contender], dict(job.ledger.staleness)
    model: nn.Module = core
    if strategy is None:
        model = DistributedDataParallel(core, gradient_as_bucket_view=True)
    else:
        stretto.distribute(core, optimizer, strategy, job=job)
    pace, copies = Pace(settings, job.rank, seed, gradient_s), Copies(settings.run_s / COPIES)
    generator = torch.Generator().manual_seed(1_000_003 * seed + job.rank)
    synchronous = strategy is None or "sync=" not in strategy
    job.barrier()
    begin, steps = time.perf_counter(), 0
    while _goes_on(job, time.perf_counter() - begin, settings.run_s, synchronous, steps):
        loss = loss_of(model, text.rows(text.train, ROWS, generator))
        pace.compute()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rise.step()
        steps += 1
        if job.rank == 0 and settings.losses:
            copies.consider(core, time.perf_counter() - begin)
    seconds = time.perf_counter() - begin
    if strategy is not None:
        stretto.release(core)  # servers wait for this worker no longer
    everybody = job.gather_object(steps)
    staleness = {tau: count - before.get(tau, 0) for tau, count in job.ledger.staleness.items() if count > before.get(tau, 0)}
    curve = [(at_s, _validate(core, state, text)) for at_s, state in copies.kept]
    job.barrier()
    return SlowRun(contender=contender, seed=seed, steps=everybody, seconds=seconds, curve=curve, staleness=staleness)


def _goes_on(job: Job, elapsed_s: float, run_s: float, synchronous: bool, steps: int) -> bool:
    """Workers that step together also stop together: rank 0 decides, now and then, for asking costs a collective."""
    if not synchronous:
        return elapsed_s < run_s
    return steps % 5 != 0 or bool(job.gather_object(elapsed_s < run_s)[0])


@torch.no_grad()
def _validate(model: nn.Module, state: dict[str, Tensor], text: Text) -> float:
    model.load_state_dict(state)
    return float(loss_of(model, text.rows(text.validation, VALIDATION_ROWS, torch.Generator().manual_seed(7))))


def _seconds_of_gradients(text: Text) -> float:
    """Of one step, with a processor to itself: the fastest of several."""
    torch.manual_seed(0)
    model, generator = Gpt(WIDTH, HEADS, DEPTH, LENGTH), torch.Generator().manual_seed(0)
    seconds = []
    for _ in range(ALONE_STEPS):
        begin = time.perf_counter()
        loss_of(model, text.rows(text.train, ROWS, generator)).backward()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def measure(job: Job, settings: SlowSettings) -> SlowReport:
    torch.set_num_threads(1)
    text = Text(torch.device("cpu"))
    gradient_s = min(job.gather_object(_seconds_of_gradients(text)))
    names, runs = list(settings.strategies), []
    for turn, seed in enumerate(settings.seeds):
        for offset in range(len(names)):
            contender = names[(turn + offset) % len(names)]
            runs.append(train(job, settings, contender, seed, text, gradient_s))
            if job.rank == 0:
                print(f"seed {seed}: {contender}, {sum(runs[-1].steps)} steps", file=sys.stderr, flush=True)
    count = sum(parameter.numel() for parameter in Gpt(WIDTH, HEADS, DEPTH, LENGTH).parameters())
    return SlowReport(
        settings=settings, machine=describe(), date=now(), num_parameters=count, gradient_s=gradient_s, runs=runs
    )  # fmt: skip


if __name__ == "__main__":
    take_part(sys.argv[1:], SlowSettings, measure)
