"""What each process of the laws on real processes does. In a module of its own, so that a fresh process can import it."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor, nn

import stretto
from laws.cases import BY_NAME
from laws.training import alone, assert_close, build, digest, share, state_of, train
from stretto.distributing import distribute
from stretto.errors import PeerLost, RankMismatch
from stretto.job import WireName
from stretto.parsing import parse
from stretto.schedule.orders import WaitFree
from stretto.strategy import Strategy


def learn(names: list[str], strategy: str, steps: int, wire: WireName = "auto") -> dict[str, list[str]]:
    """Train each case; its digests after every step. Rank 0 compares with the one-process run."""
    job = stretto.init(wire=wire)
    found = {}
    for name in names:
        run = train(job, BY_NAME[name], parse(strategy), steps)
        if job.rank == 0:
            assert_close(run.state, alone(name, steps))
        found[name] = run.digests
    stretto.shutdown()
    return found


def learn_compressed(strategies: list[str], steps: int, wire: WireName = "auto") -> dict[str, list[str]]:
    """Digests after every step, of a model large enough to be compressed, with an optimizer without momentum."""
    job = stretto.init(wire=wire)
    found: dict[str, list[str]] = {}
    for text in strategies:
        torch.manual_seed(job.rank)
        model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 1))
        _, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.05), text)
        found[text] = []
        for number in range(steps):
            x = share(BY_NAME["mlp"].batch(number), job.rank, job.world_size)
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found[text].append(digest(state_of(model)))
    stretto.shutdown()
    return found


def disagree() -> str:
    job = stretto.init()
    model = nn.Linear(3, 3 + job.rank)
    try:
        distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except RankMismatch as mismatch:
        return str(mismatch)
    return "no error"


def lose_rank_1() -> str:
    job = stretto.init()
    case = BY_NAME["mlp"]
    model = build(case, 0)
    distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), Strategy(schedule=WaitFree()))
    for number in range(5):
        if number == 3 and job.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            case.step(model, share(case.batch(number), job.rank, job.world_size), number)
        except PeerLost as lost:
            assert number == 3
            return f"rank {lost.rank} was lost in step {number}"
    return "nobody was lost"


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(self.norm(x))
        return out


def compile_in_every_way(ways: list[str]) -> None:
    """Each way must give what the same workers give without compiling."""
    stretto.init()
    expected = _train_compiled("not at all")
    for how in ways:
        for name, value in _train_compiled(how).items():
            assert torch.allclose(value, expected[name], rtol=1e-9, atol=1e-12), f"{name}, compiled {how}"
    stretto.shutdown()


def _train_compiled(how: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    plain = Blocks().double()
    model: Any = plain
    if how == "whole, before":
        model = torch.compile(plain, backend="aot_eager")
    if how == "in place, before":
        plain.compile(backend="aot_eager")
    if how == "per block":
        for block in plain.blocks:
            block.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distribute(model, optimizer, Strategy(schedule=WaitFree()))
    if how == "whole, after":
        model = torch.compile(plain, backend="aot_eager")
    if how == "in place, after":
        plain.compile(backend="aot_eager")
    batch = BY_NAME["float64 and AdamW"].batch
    for number in range(4):
        model(share(batch(number), stretto.rank(), stretto.world_size())).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = state_of(plain)
    sums = stretto.gather_object([float(value.double().sum()) for value in plain.parameters()])
    assert all(row == sums[0] for row in sums), f"{how}: replicas differ"
    return {name: value for name, value in state.items() if "running" not in name or stretto.rank() == 0}
