"""One worker of `race.py`: python benchmarks/race_worker.py SETTINGS FOLDER, once per lab host, for one contender and seed.

Computation is emulated, so that hosts do not share processors: forward and backward of every block sleep until the moment at
which a host of this speed would have come so far (`Pace`), and compute real gradients meanwhile. A third of a step is forward,
and backward hands out gradients block by block, so what overlaps with it may.

Training goes on from weights that a short synchronous run has left (`race_report.begun`): the first steps of all, in which little
more than the frequency of bytes is learnt, are of no interest, and DiLoCo is published so. The worker copies its weights twice a
second (`Marks`) and writes them when it is done: `RANK.json` has times and steps, `RANK.pt` the weights. Nothing is validated
here. The loss of a moment is that of the mean of all workers' weights, which is what `stretto.consensus` gives; where all workers
hold the same weights it is theirs. Where they do not, each worker's own loss is found as well.

Each worker has a part of the text to itself (`part_of`), and a small one: there communication buys what it is for, to learn from
what the others have. With all of the text a worker of this size takes as many steps alone as pleases it and needs nobody.

Workers that wait for each other in every step stop together: rank 0 decides, and asking costs a collective, so they ask now and
then. The others stop by their own clocks. One that is to be killed is killed by a thread of its own, wherever it is then.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import race_peers
import torch
import torch.distributed as dist
from compress_loss import Text, loss_of
from step_models import Gpt
from torch import Tensor, nn

import stretto
from stretto.bench.compress_together import Together
from stretto.compress.layout import Layout
from stretto.compress.none import NoCompression
from stretto.job import Job

LENGTH, WIDTH, HEADS, DEPTH = 64, 96, 4, 3
ROWS = 8  # of a worker's batch
PART_BYTES = 48 << 10  # of a worker's text
RISE = 20  # steps in which the rate rises
FORWARD = 1 / 3  # of a step's computation
INTERFACES = Path("/proc/net/dev")


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train: a strategy's text, or a `peer` of `race_peers.PEERS`. Neither: no communication.

    `asks_every`: so many steps apart the workers ask rank 0 whether to go on; None: each stops by its own clock. `share`: of the
    time of a run, for those that are fast."""

    strategy: str | None = None
    peer: str | None = None
    rate: float = 4e-3
    asks_every: int | None = None
    share: float = 1.0


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One contender's run with one seed. A step computes for `compute_s`, on the last rank `slow_factor` times as long; rank
    `killed` dies after `kill_at_s`. `alone`: nothing is asked of all workers once they run, for one may be dead."""

    contender: Contender
    seed: int
    run_s: float
    compute_s: float
    slow_factor: float = 1.0
    killed: int | None = None
    kill_at_s: float = 0.0
    alone: bool = False
    hosts: int = 4
    mark_every_s: float = 0.5
    start: str = ""  # a file with the weights with which all begin
    peers: str | None = None  # where packages of peers lie


class RankRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker did. `marks`: seconds and steps when its weights were copied; `num_bytes`: sent by its host."""

    steps: int
    seconds: float
    marks: list[tuple[float, int]]
    num_bytes: int


class Pace:
    """Where a host of this speed would be in its step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._begin = time.perf_counter()

    def begin(self) -> None:
        self._begin = time.perf_counter()

    def until(self, share: float) -> None:
        """Return when this share of the step's computation is done."""
        left = self._begin + share * self._step_s - time.perf_counter()
        if left > 0:
            time.sleep(left)


class _Paced(torch.autograd.Function):
    """The identity, which takes time both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: Pace, forward_until: float, backward_until: float) -> Tensor:
        ctx.pace, ctx.until = pace, backward_until
        pace.until(forward_until)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.pace.until(ctx.until)
        return gradients[0], None, None, None


class PacedGpt(Gpt):
    """A GPT whose blocks take as long as those of a slower machine. Backward waits before a block's gradients are computed, so
    they are there when such a machine would have them."""

    def __init__(self, pace: Pace | None) -> None:
        super().__init__(WIDTH, HEADS, DEPTH, LENGTH)
        self._pace = pace

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self._pace is not None:
                forward_until = FORWARD * (number + 1) / DEPTH
                backward_until = FORWARD + (1 - FORWARD) * (DEPTH - number) / DEPTH
                x = _Paced.apply(x, self._pace, forward_until, backward_until)
        return self.head(self.norm(x))


class Marks:
    """The weights, now and then."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.times: list[tuple[float, int]] = []
        self.weights: list[Tensor] = []

    def consider(self, model: nn.Module, elapsed_s: float, steps: int) -> None:
        if elapsed_s >= self._every_s * len(self.times):
            self.times.append((elapsed_s, steps))
            self.weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))


def part_of(text: Tensor, rank: int, workers: int) -> Tensor:
    """What the rank learns from: so many bytes, as far from those of the others as the text is long."""
    begin = rank * (len(text) // workers)
    return text[begin : begin + PART_BYTES]


def sent_by_host() -> int:
    """Bytes that have left through eth0."""
    for line in INTERFACES.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0


def train(job: Job, settings: RunSettings, folder: Path) -> None:
    torch.set_num_threads(1)
    random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    text, who = Text(torch.device("cpu")), settings.contender
    own = part_of(text.train, job.rank, settings.hosts)
    pace = Pace(settings.compute_s * (settings.slow_factor if job.rank == settings.hosts - 1 else 1.0))
    core = PacedGpt(pace)
    nn.utils.vector_to_parameters(torch.load(settings.start), core.parameters())
    optimizer = torch.optim.AdamW(core.parameters(), lr=who.rate, weight_decay=0.0)
    rise = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / RISE))
    model: nn.Module = core
    peer = race_peers.Peer(optimizer)
    if who.strategy is not None:
        stretto.distribute(core, optimizer, who.strategy, job=job)
    elif who.peer is not None:
        peer = race_peers.made(who.peer, core, optimizer, job, settings.peers)
        model = peer.model(core)
    generator, marks = torch.Generator().manual_seed(1_000_003 * settings.seed + job.rank), Marks(settings.mark_every_s)
    _warm_up(text, who.strategy)
    run_s, asks_every = settings.run_s * who.share, None if settings.alone else who.asks_every
    job.barrier()
    sent, begin, steps = sent_by_host(), time.perf_counter(), 0
    if job.rank == settings.killed:
        threading.Timer(settings.kill_at_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while _goes_on(job, time.perf_counter() - begin, run_s, asks_every, steps):
        marks.consider(core, time.perf_counter() - begin, steps)
        pace.begin()
        loss = loss_of(model, text.rows(own, ROWS, generator))
        loss.backward()
        peer.optimizer.step()
        peer.stepped()
        peer.optimizer.zero_grad()
        rise.step()
        steps += 1
    seconds = time.perf_counter() - begin
    run = RankRun(steps=steps, seconds=seconds, marks=marks.times, num_bytes=sent_by_host() - sent)
    torch.save(torch.stack(marks.weights), folder / f"{job.rank}.pt")
    (folder / f"{job.rank}.json").write_bytes(msgspec.json.encode(run))
    peer.ended()
    if who.strategy is not None and not settings.alone:
        stretto.release(core)  # others wait for this worker no longer


def _warm_up(text: Text, strategy: str | None) -> None:
    """What torch does once in a process, and Numba once on a machine, belongs to nobody's first step."""
    model = PacedGpt(None)
    compress = NoCompression() if strategy is None else stretto.parse(strategy).compress
    if not compress.lossless:
        layout = Layout.of((name, parameter.shape) for name, parameter in model.named_parameters())
        gradient = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        Together(compress, layout, 2, torch.device("cpu")).round([gradient, gradient])
    loss_of(model, text.rows(text.train, ROWS, torch.Generator().manual_seed(0))).backward()
    torch.optim.AdamW(model.parameters()).step()


def _goes_on(job: Job, elapsed_s: float, run_s: float, asks_every: int | None, steps: int) -> bool:
    if asks_every is None:
        return elapsed_s < run_s
    return steps % asks_every != 0 or bool(job.gather_object(elapsed_s < run_s)[0])


def main(arguments: list[str]) -> None:
    settings, folder = msgspec.json.decode(arguments[0], type=RunSettings), Path(arguments[1])
    job = stretto.init()
    if settings.contender.peer is not None and job.world_size > 1:
        dist.init_process_group("gloo", rank=job.rank, world_size=job.world_size)
    train(job, settings, folder)
    if dist.is_initialized():
        dist.destroy_process_group()
    stretto.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
