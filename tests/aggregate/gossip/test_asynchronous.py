"""AD-PSGD: workers train and are averaged in pairs meanwhile; nobody waits for a slow one, a dead one, or one that comes back."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from aggregate.peers.returning_peers import come_back, kill, newcomer
from preloaded import Preloaded
from stretto import Asynchronous, ConfigurationError, Gossip, Ring, Strategy, TopK, recipes
from stretto.aggregate.gossip.graph import MixingGraph
from stretto.job import Job
from stretto.strategy import WAYS
from stretto.testing import run_jobs

PATIENCE_S = 30.0
Pair = tuple[nn.Module, torch.optim.Optimizer]


def started(strategy: Strategy | None = None, dtype: torch.dtype = torch.float32) -> Pair:
    """Sixty-four weights, all 0."""
    model = nn.Linear(8, 8, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return stretto.distribute(model, optimizer, strategy or recipes.adpsgd())


def step(pair: Pair, by: float) -> None:
    model, optimizer = pair
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -by)
    optimizer.step()


def value(pair: Pair) -> float:
    (parameter,) = pair[0].parameters()
    assert bool((parameter == parameter.flatten()[0]).all())
    return float(parameter.detach().flatten()[0])


@pytest.mark.parametrize("graph", [None, Ring()], ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_the_mean_moves_by_the_mean_of_all_steps_whoever_has_averaged_with_whom(size: int, graph: MixingGraph | None) -> None:
    def program(job: Job) -> Any:
        pair = started(recipes.adpsgd(graph))
        for _ in range(20 + 5 * job.rank):  # not all take as many
            step(pair, by=job.rank + 1)
        with stretto.consensus(pair[0]):
            first = value(pair)
        for _ in range(10):
            step(pair, by=1.0)
        with torch.no_grad():
            next(pair[0].parameters()).add_(5.0)  # the program writes, and it counts
        stretto.consensus(pair[0])
        second = value(pair)
        step(pair, by=0.0)
        return first, second, job.ledger.sent_by("gossip"), dict(job.ledger.staleness)

    runs = run_jobs(size, program)
    mean = sum((20 + 5 * rank) * (rank + 1) for rank in range(size)) / size
    for first, second, sent, staleness in runs:
        assert first == pytest.approx(mean, rel=1e-5) and second == pytest.approx(mean + 15, rel=1e-5)
        assert sent % (4 * 64) == 0  # law 8: whole models and whole moves
        assert size == 1 or sum(staleness.values()) in {20 + 5 * rank + 11 for rank in range(size)}
    assert size == 1 or sum(sent for _, _, sent, _ in runs) >= 2 * 4 * 64


def test_workers_come_together_without_waiting_for_one_that_stands_still() -> None:
    stand, over = threading.Event(), threading.Event()

    def program(job: Job) -> Any:
        pair = started()
        if job.rank == 3:
            assert over.wait(PATIENCE_S)  # computing for ever, as far as the others can see
            step(pair, by=0.0)
        else:
            end = time.monotonic() + PATIENCE_S
            step(pair, by=float(job.rank + 1))
            while not stand.is_set():
                assert time.monotonic() < end
                step(pair, by=0.0)
                if job.rank == 0 and 1.3 < value(pair) < 1.7 and ("gossip", 3) in job.ledger.sent:  # (1 + 2 + 3 + 0) / 4
                    stand.set()
            if job.rank == 0:
                over.set()
        with stretto.consensus(pair[0]) as mean:
            pass
        return value(pair), mean.distance

    values = run_jobs(4, program)
    assert sum(one for one, _ in values) == pytest.approx(6.0, rel=1e-5)
    assert values[3][0] > 0


def test_half_precision_weights_keep_the_mean_to_their_own_rounding() -> None:
    def program(job: Job) -> float:
        pair = started(dtype=torch.bfloat16)
        for _ in range(20):
            step(pair, by=1.0 + job.rank)
        stretto.consensus(pair[0])
        return value(pair)

    assert run_jobs(2, program) == pytest.approx([30.0, 30.0], abs=0.5)


def test_what_was_saved_goes_on_and_nothing_is_lost(tmp_path: Path) -> None:
    def program(job: Job) -> Any:
        pair = started()
        for _ in range(10):
            step(pair, by=1.0 + job.rank)
        stretto.save(tmp_path / "x.pt", *pair)
        with stretto.consensus(pair[0]):
            before = value(pair)
        own = value(pair)
        for _ in range(5):
            step(pair, by=100.0)
        stretto.load(tmp_path / "x.pt", *pair)
        assert value(pair) == own
        step(pair, by=1.0)
        stretto.consensus(pair[0])
        return before, value(pair)

    for before, after in run_jobs(3, program):
        assert before == pytest.approx(20.0, rel=1e-5) and after == pytest.approx(21.0, rel=1e-5)


def test_one_that_is_killed_is_left_out_and_comes_back_with_the_model_of_one_that_lives() -> None:
    jobs: dict[int, Job] = {}
    back, met = threading.Event(), threading.Event()

    def second_life(job: Job) -> Any:
        pair = started()
        begins = value(pair), job.first_step
        end = time.monotonic() + PATIENCE_S
        while not job.ledger.sent_by("gossip") and time.monotonic() < end:
            step(pair, by=0.0)
        met.set()
        stretto.consensus(pair[0])
        return begins, value(pair)

    together = threading.Barrier(3)  # not the job's: somebody may still wait there for whoever dies

    def program(job: Job) -> Any:
        jobs[job.rank] = job
        pair = started()
        for _ in range(10):
            step(pair, by=1.0)
        stretto.consensus(pair[0])
        together.wait(PATIENCE_S)
        if job.rank == 1:
            kill(job)
            assert back.wait(PATIENCE_S)
            return come_back(job, jobs[0], second_life)
        while 1 in job.peer_network.living:
            pass
        for _ in range(10):
            step(pair, by=1.0)
        stretto.consensus(pair[0])  # before it, only their mean is certain
        job.peer_network.admit([newcomer(jobs[1])])
        back.set()
        end = time.monotonic() + PATIENCE_S
        while not met.is_set() and time.monotonic() < end:
            step(pair, by=0.0)
        stretto.consensus(pair[0])
        return value(pair)

    first, ((begins, first_step), last), third = run_jobs(3, program, timeout_s=90)
    assert begins == pytest.approx(20.0, rel=1e-4) and first_step > 20
    assert first == third == last == pytest.approx(20.0, rel=1e-4)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"sync": Asynchronous(staleness_aware=True)}, "no server corrects it"),
        ({"aggregate": Gossip(Ring(), pull=0.5)}, "the mean of both, and no share of it"),
        ({"aggregate": Gossip(stretto.Exponential())}, "both ways, and this graph is one-way"),
        ({"compress": TopK(0.1)}, "would be taken for their values"),
        ({"schedule": stretto.WaitFree()}, "no transfers under backward"),
        ({"aggregate": Gossip(Ring(), push_sum=True)}, "no way of training that combines the three"),
    ],
    ids=str,
)
def test_what_cannot_be_averaged_in_pairs_is_refused(answers: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        Strategy(**{"aggregate": Gossip(Ring()), "sync": Asynchronous(), **answers})
    assert any(way.training.__name__ == "AsynchronousGossip" for way in WAYS)


KILLED = """
import os, signal, sys, time
import torch, stretto

comes_back = "back" in sys.argv
job = stretto.init(timeouts=stretto.Timeouts(arrive_s=60.0))
generator = torch.Generator().manual_seed(7)
x = torch.randn(256, 8, generator=generator)
target = x @ torch.randn(8, 1, generator=generator)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
stretto.distribute(model, optimizer, stretto.recipes.adpsgd())
print("life", job.life, "begins at", job.first_step, flush=True)
if not job.life:
    stretto.barrier()  # nobody is killed while others still connect

def step():
    optimizer.zero_grad()
    mine = slice(job.rank, None, job.world_size)
    torch.nn.functional.mse_loss(model(x[mine]), target[mine]).backward()
    optimizer.step()

if job.life:
    open("back", "w").close()
began = time.monotonic()
for number in range(100):
    step()
    if number == 30 and job.rank == 1 and not job.life:
        os.kill(os.getpid(), signal.SIGKILL)
while not comes_back and time.monotonic() < began + 4:  # one of the last to be heard of is known to be dead after 3 s
    step()
    time.sleep(0.02)
end = time.monotonic() + 60
while comes_back and not os.path.exists("back"):
    assert time.monotonic() < end
    step()
    time.sleep(0.01)
distance = stretto.consensus(model).distance
print("loss", float(torch.nn.functional.mse_loss(model(x), target)), "distance", distance, flush=True)
stretto.shutdown()
"""


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize("comes_back", [pytest.param(False, marks=pytest.mark.slow), True], ids=["for good", "and comes back"])
def test_one_of_four_processes_is_killed_in_the_middle_and_the_others_finish(
    comes_back: bool, tmp_path: Path, preloaded: Preloaded
) -> None:
    (tmp_path / "train.py").write_text(KILLED)
    restarts, argument = ("--max-restarts 1", "back") if comes_back else ("", "")
    done = preloaded.shell(f"stretto run -n 4 --min-workers 3 {restarts} train.py {argument}", folder=tmp_path, timeout_s=170)

    assert done.returncode == (0 if comes_back else 3), done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+) distance", done.stdout)]
    assert len(losses) == 3 + comes_back and max(losses) < 0.01
    assert len(set(losses[:3])) == 1  # those that live have the same bits
    lives = sorted(int(life) for life in re.findall(r"life (\d+) begins", done.stdout))
    assert lives == [0, 0, 0, 0] + [1] * comes_back
    if comes_back:
        assert int(re.findall(r"life 1 begins at (\d+)", done.stdout)[0]) > 0
