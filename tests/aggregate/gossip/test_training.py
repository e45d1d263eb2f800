"""Training by gossip in a job: what is overlapped, who is waited for, who is left out, and what is refused."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

import stretto
from aggregate.peers.returning_peers import come_back, kill, newcomer
from preloaded import Preloaded
from stretto import recipes
from stretto.aggregate.gossip import Complete, Gossip, Graph, OnePeerExponential, RandomMatching, Ring, Star, Torus
from stretto.aggregate.gossip.training import GossipTraining, PushSumGossip
from stretto.aggregate.peers.living import LivingWorkers
from stretto.averaging import consensus
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.none import NoCompression
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.qsgd import QSGD
from stretto.compress.tern_grad import TernGrad
from stretto.compress.top_k import TopK
from stretto.distributing import distribute, engine_of, release
from stretto.errors import ConfigurationError, WireTimeout
from stretto.job import Job
from stretto.schedule.orders import WaitFree
from stretto.strategy import Strategy
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.testing import run_jobs
from stretto.timeouts import Timeouts

EVERY = [recipes.dpsgd(), recipes.sgp(), recipes.overlap_sgp(2), recipes.choco_sgd(), recipes.dpsgd(RandomMatching())]

UNEVEN = Graph(((0, 1), (1, 2), (2, 0), (0, 2)), one_way=True)  # rank 2 has two sources, the others one


def model_of(job: Job, strategy: Strategy, rate: float = 0.1) -> tuple[nn.Module, Optimizer]:
    """Every worker's weights move by its rank + 1 in each step, times the rate."""
    model = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = distribute(model, SGD(model.parameters(), lr=rate), strategy, job=job)
    return model, optimizer


def step(job: Job, model: nn.Module, optimizer: Optimizer) -> None:
    (-(job.rank + 1) * model(torch.ones(1, 3)).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("strategy", EVERY, ids=repr)
def test_consensus_is_the_mean_of_all_optimizers_steps_and_training_goes_on_from_it(strategy: Strategy) -> None:
    def work(job: Job) -> tuple[float, float, float, float]:
        model, optimizer = model_of(job, strategy)
        for _ in range(5):
            step(job, model, optimizer)
        weight = next(model.parameters())
        with consensus(model) as lent:
            mean = float(weight.detach().mean())
            model(torch.ones(1, 3))  # what is on its way are the weights of before
        own = float(weight.detach().mean())
        for _ in range(3):
            step(job, model, optimizer)
        distance = consensus(model).distance
        begin = float(weight.detach().mean())
        step(job, model, optimizer)
        consensus(model)
        return mean, own, lent.distance + distance, float(weight.detach().mean()) - begin

    found = run_jobs(4, work)
    assert [round(mean, 4) for mean, _, _, _ in found] == [round(0.1 * 2.5 * 5, 4)] * 4
    assert len({own for _, own, _, _ in found}) > 1 and all(distance > 0 for _, _, distance, _ in found)
    assert [round(moved, 4) for _, _, _, moved in found] == [round(0.1 * 2.5, 4)] * 4


def test_consensus_of_push_sum_is_one_mean_of_values_and_masses_whoever_dies_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2, which has most sources and so the largest mass, dies when it has the mean of the weights and the others ask for
    more."""
    means = dict.fromkeys(range(3), 0)
    mean_of_living = LivingWorkers.mean

    def mean(living: LivingWorkers, values: torch.Tensor) -> Any:
        rank = living._job.rank
        means[rank] += 1
        if rank == 2 and means[2] == 2:
            kill(living._job)
            raise RuntimeError("killed")
        return mean_of_living(living, values)

    def work(job: Job) -> tuple[float, float]:
        model, optimizer = model_of(job, Strategy(aggregate=Gossip(UNEVEN, push_sum=True)))
        for _ in range(4):
            step(job, model, optimizer)
        mass = engine_of(model).training.mass  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="killed") if job.rank == 2 else nullcontext():
            consensus(model)
        return mass, float(next(model.parameters()).detach().mean())

    monkeypatch.setattr(LivingWorkers, "mean", mean)
    found = run_jobs(3, work)
    assert means[2] == 2 and found[2][0] > 1.2, "it was killed, and its mass would be missing"
    assert [weight for _, weight in found[:2]] == pytest.approx([0.1 * 2.0 * 4] * 2, abs=1e-4)


def test_after_consensus_all_masses_are_1() -> None:
    def work(job: Job) -> tuple[float, float]:
        model, optimizer = model_of(job, Strategy(aggregate=Gossip(UNEVEN, push_sum=True)))
        for _ in range(4):
            step(job, model, optimizer)
        before = engine_of(model).training.mass  # type: ignore[attr-defined]
        consensus(model)
        step(job, model, optimizer)
        after = engine_of(model).training.mass  # type: ignore[attr-defined]
        consensus(model)  # nobody leaves before: whoever has left changes the masses of the others
        return before, after

    found = run_jobs(3, work)
    assert found[2][0] > 1.2 > 0.8 > found[1][0]
    assert [after for _, after in found] == pytest.approx([1 / 3 + 1 / 2, 1 / 3 + 1 / 2, 1 / 3 + 1 / 2 + 1 / 2])


def test_models_travel_while_the_gradient_is_computed() -> None:
    """A worker whose neighbours have begun their step, and not ended it, can end its own."""
    ended, begun = threading.Event(), threading.Barrier(3)

    def work(job: Job) -> bool:
        model, optimizer = model_of(job, recipes.dpsgd())
        loss = -model(torch.ones(1, 3)).sum()
        begun.wait(20)
        if job.rank:
            in_time = ended.wait(20)  # in the middle of its step
        loss.backward()
        optimizer.step()
        if job.rank == 0:
            ended.set()
            in_time = True
        return in_time

    assert all(run_jobs(3, work))


def test_overlap_sgp_waits_for_nobody_within_its_bound_and_counts_what_was_late() -> None:
    ahead = threading.Event()

    def work(job: Job) -> tuple[bool, int, float]:
        model, optimizer = model_of(job, recipes.overlap_sgp(2))
        in_time = True
        for number in range(6):
            if job.rank == 1 and number == 0:
                in_time = ahead.wait(20)  # rank 0 has ended two steps that this one has not begun
            step(job, model, optimizer)
            if job.rank == 0 and number == 1:
                ahead.set()
        consensus(model)
        training = engine_of(model).training
        assert isinstance(training, PushSumGossip)
        return in_time, max(job.ledger.staleness), training.mass

    (in_time, staleness, mass), (other_in_time, _, other_mass) = run_jobs(2, work)
    assert in_time and other_in_time and 1 <= staleness <= 2
    assert mass + other_mass == pytest.approx(2.0)


def test_a_worker_that_has_finished_is_left_out_without_an_error() -> None:
    def work(job: Job) -> float:
        model, optimizer = model_of(job, recipes.dpsgd(Complete()))
        for _ in range(3 if job.rank == 1 else 8):
            step(job, model, optimizer)
        if job.rank == 1:
            release(model)
        return float(next(model.parameters()).detach().mean())

    values = run_jobs(3, work)
    # The two that are left move by 1 and 3 in each of five more steps, and their mean by 2.
    assert (values[0] + values[2]) / 2 == pytest.approx(values[1] + 5 * 0.2, abs=0.1)


@pytest.mark.parametrize("strategy", [recipes.dpsgd(), pytest.param(recipes.sgp(), marks=pytest.mark.slow)], ids=repr)
def test_a_neighbour_that_does_not_come_is_named_when_the_time_is_over(strategy: Strategy) -> None:
    over = threading.Event()

    def work(job: Job) -> str:
        model, optimizer = model_of(job, strategy)
        step(job, model, optimizer)
        if job.rank == 1:
            over.wait(20)
            return "late"
        try:
            for _ in range(3):
                step(job, model, optimizer)
        except WireTimeout as problem:
            return f"{problem.rank}: {problem}"
        finally:
            over.set()
        return "no error"

    said = run_jobs(2, work, timeouts=Timeouts(arrive_s=1.0, warn_s=0.5))
    assert said[0].startswith("1: rank 1 did not take part in step") and "of Linear" in said[0] and said[1] == "late"


@pytest.mark.parametrize(
    "strategy",
    [
        recipes.choco_sgd(pull=0.5),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (recipes.dpsgd(), recipes.overlap_sgp())),
    ],
    ids=repr,
)
def test_one_that_comes_back_takes_part_again(strategy: Strategy) -> None:
    """The others go on meanwhile; then all take the same steps to the end, and agree on the mean."""
    jobs: dict[int, Job] = {}
    back, entered, stepped = threading.Event(), threading.Event(), threading.Barrier(3)
    last: list[int] = []

    def to_the_end(job: Job, model: nn.Module, optimizer: Optimizer, taken: int) -> tuple[float, float, int]:
        while not entered.is_set() or taken < last[0]:
            step(job, model, optimizer)
            taken += 1
        own = float(next(model.parameters()).detach().mean())
        consensus(model)
        return own, float(next(model.parameters()).detach().mean()), job.ledger.sent_by("gossip")

    def second_life(job: Job) -> tuple[float, float, int]:
        model, optimizer = model_of(job, strategy)
        last.append(job.first_step + 20)
        entered.set()
        return to_the_end(job, model, optimizer, job.first_step)

    def work(job: Job) -> tuple[float, float, int]:
        jobs[job.rank] = job
        model, optimizer = model_of(job, strategy)
        for _ in range(2):
            step(job, model, optimizer)
        stepped.wait(20)
        if job.rank == 2:
            kill(job)
            assert back.wait(20)
            found: tuple[float, float, int] = come_back(job, jobs[0], second_life)
            return found
        network: Any = job.peer_network
        while 2 in network.living:
            pass
        network.admit([newcomer(jobs[2])])
        back.set()
        return to_the_end(job, model, optimizer, 2)

    found = run_jobs(3, work)
    assert len({mean for _, mean, _ in found}) == 1 and all(sent > 0 for _, _, sent in found)
    # By itself it would have moved by 0.3 in each of 20 steps, and the others by 0.1 and 0.2.
    assert max(own for own, _, _ in found) - min(own for own, _, _ in found) < 2.0


def test_schedulers_clipping_and_several_optimizers_work_as_ever() -> None:
    def work(job: Job) -> tuple[list[float], float]:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        one, other = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)
        model, _ = distribute(model, (one, other), recipes.dpsgd(), job=job)
        scheduler = StepLR(one, step_size=2, gamma=0.5)
        norms = []
        for number in range(4):
            (100 * model(torch.randn(2, 3, generator=torch.Generator().manual_seed(number + job.rank))).sum()).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            one.step()
            other.step()
            scheduler.step()
            model.zero_grad()
        assert job.ledger.staleness == {0: 4}
        return norms, one.param_groups[0]["lr"]

    found = run_jobs(2, work)
    assert found[0][0] != found[1][0] and all(rate == pytest.approx(0.025) for _, rate in found)


def test_a_model_may_be_distributed_again_and_begins_from_the_mean() -> None:
    def work(job: Job) -> tuple[float, float]:
        model, optimizer = model_of(job, recipes.sgp())
        for _ in range(3):
            step(job, model, optimizer)
        distribute(model, optimizer, recipes.choco_sgd(), job=job)
        begin = float(next(model.parameters()).detach().mean())
        for _ in range(3):
            step(job, model, optimizer)
        consensus(model)
        return begin, float(next(model.parameters()).detach().mean())

    for begin, end in run_jobs(3, work):
        assert begin == pytest.approx(0.1 * 2 * 3, abs=1e-5) and end == pytest.approx(0.1 * 2 * 6, abs=1e-4)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Gossip(Ring), "that is no graph"),  # type: ignore[arg-type]
        (lambda: Gossip(Ring(), pull=1.5), "(?s)pull=1.5.*above 0 and up to 1"),
        (lambda: Gossip(Ring(), push_sum=True, pull=0.5), "(?s)push-sum.*Leave pull= out"),
        (lambda: Strategy(aggregate=Gossip(Ring()), schedule=WaitFree()), "Leave schedule= out"),
        (lambda: Strategy(aggregate=Gossip(Ring()), sync=StaleSynchronous(2)), r"(?s)Write Gossip\(Ring\(\), push_sum=True\)"),
        (lambda: Strategy(aggregate=Gossip(Ring(), push_sum=True), compress=TopK(0.1)), "(?s)push-sum.*Write Gossip"),
        (lambda: recipes.choco_sgd(graph=OnePeerExponential()), "(?s)is one-way.*Ring"),
        (lambda: recipes.choco_sgd(graph=RandomMatching()), "(?s)changes from step to step.*Ring"),
        (lambda: recipes.choco_sgd(ErrorFeedback(TopK(0.1))), r"(?s)error feedback already.*compress=TopK\(fraction=0.1\)"),
        (lambda: recipes.choco_sgd(PowerSGD(2)), "(?s)rounds of its own.*Take a codec"),
        (lambda: recipes.choco_sgd(TernGrad()), "(?s)public copies would not come closer.*Take TopK"),
    ],
)
def test_answers_that_do_not_go_together_are_refused_with_what_to_write(make: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make()


@pytest.mark.parametrize(
    ("graph", "size", "says"),
    [
        (Graph(((0, 1), (1, 2))), 4, "its edges join 3, ranks 0 to 2"),
        (Torus(rows=2), 3, "3 workers do not make 2 rows"),
        (Graph(((0, 1), (1, 2), (2, 0), (0, 2)), one_way=True), 3, "(?s)rows of its mixing matrix.*push_sum=True"),
    ],
)
def test_a_graph_that_does_not_suit_the_job_is_refused_before_anything_is_sent(graph: Any, size: int, says: str) -> None:
    def work(job: Job) -> None:
        with pytest.raises(ConfigurationError, match=says):
            model_of(job, Strategy(aggregate=Gossip(graph)))

    run_jobs(size, work)


def test_choco_with_nothing_lost_takes_any_graph() -> None:
    assert Strategy(aggregate=Gossip(OnePeerExponential(), pull=0.5), compress=NoCompression())
    assert stretto.parse("choco_sgd(QSGD(8), graph=Torus(rows=2), pull=0.3)") == recipes.choco_sgd(
        QSGD(8), graph=Torus(rows=2), pull=0.3
    )
    assert stretto.parse("Strategy(aggregate=Gossip(Graph(((0, 1), (1, 2)), shares=(0.25, 0.5))))")
    assert issubclass(Strategy(aggregate=Gossip(Star())).training, GossipTraining)
    with pytest.raises(ConfigurationError, match="no way of training"):
        Strategy(aggregate=Gossip(Ring()), sync=SoftSync(1))


TRAINS = """
import os, signal, sys, time
import torch, stretto
from stretto import recipes

job = stretto.init(timeouts=stretto.Timeouts(arrive_s=30.0))
torch.manual_seed(0)
model = torch.nn.Linear(30_000, 10, bias=False)  # of a message one piece is not all
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
stretto.distribute(model, optimizer, stretto.parse(sys.argv[1]))
for number in range(20):
    if job.rank == 2 and number == 7:
        print("dies", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    (model.weight ** 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("ended", bool(model.weight.isfinite().all()), float((model.weight ** 2).mean()) < 1e-4, flush=True)
stretto.shutdown()
"""


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "strategy", ["dpsgd()", pytest.param("overlap_sgp()", marks=pytest.mark.slow), "choco_sgd(TopK(0.3), pull=0.3)"]
)
def test_when_a_worker_is_killed_the_others_end_all_steps(strategy: str, tmp_path: Path, preloaded: Preloaded) -> None:
    (tmp_path / "trains.py").write_text(TRAINS)
    done = preloaded.shell(f"stretto run -n 4 --min-workers 1 trains.py '{strategy}'", folder=tmp_path)

    assert done.stdout.count("dies") == 1, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "ended" in line) == [
        f"[{rank}] ended True True" for rank in (0, 1, 3)
    ]
