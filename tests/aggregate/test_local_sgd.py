"""Local SGD by all-reduce: what becomes of optimizer state and buffers, several optimizers, dtypes, and what goes wrong.

Its laws are in `laws/test_local.py`.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

import stretto
from resumable_training import Training
from stretto.aggregate.all_reduce import AllReduce
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.none import NoCompression
from stretto.compress.one_bit_adam import OneBitAdam
from stretto.compress.sign import Sign
from stretto.distributing import distribute, engine_of, no_sync, synchronize
from stretto.errors import ConfigurationError, NonFiniteGradient, PeerLost, RankMismatch
from stretto.job import Job
from stretto.observe.trace import Tracer
from stretto.parsing import parse
from stretto.schedule.merged import Merged
from stretto.schedule.orders import AfterBackward, Buckets, WaitFree
from stretto.schedule.priority import Priority
from stretto.strategy import Strategy
from stretto.sync.local_sgd import LocalSGD
from stretto.sync.outer import Average, HeavyBall, Nesterov, Outer, SlowMo
from stretto.testing import run_jobs

RING = AllReduce("ring")


def local(every: int, **options: Any) -> Strategy:
    return Strategy(aggregate=RING, sync=LocalSGD(every, **options))


def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: LocalSGD(0), r"LocalSGD\(every=0\).*whole number of at least 1"),
        (lambda: LocalSGD(2.5), "whole number of at least 1"),  # type: ignore[arg-type]
        (lambda: LocalSGD(True), "whole number of at least 1"),
        (lambda: LocalSGD(4, start_after=-1), "whole number of at least 0"),
        (lambda: LocalSGD(4, outer=0.7), r"not an outer optimizer.\nWrite one of Average\(\), HeavyBall"),  # type: ignore[arg-type]
        (lambda: LocalSGD(4, outer=Outer()), "not an outer optimizer"),
        (lambda: LocalSGD(4, optimizer_state="drop"), 'Write "keep", "average" or "reset"'),  # type: ignore[arg-type]
        (lambda: Nesterov(0, 0.9), "finite and above 0"),
        (lambda: Nesterov(float("inf"), 0.9), "finite and above 0"),
        (lambda: HeavyBall(0.7, 1.0), "from 0 to below 1"),
        (lambda: SlowMo(-0.1), "from 0 to below 1"),
        (lambda: SlowMo(0.5, lr="1"), "finite and above 0"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_values_that_cannot_work_are_refused_with_what_to_write(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        make()


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"schedule": WaitFree()}, "gradients stay where they are"),
        ({"sync": LocalSGD(4, start_after=9), "schedule": Priority()}, "takes steps under the next forward"),
        ({"compress": OneBitAdam(10)}, "makes steps out of gradients"),
        ({"compress": Sign(vote=True)}, "makes steps out of gradients"),
        ({"aggregate": RING, "compress": ErrorFeedback(Sign())}, "do not add up"),
        ({"aggregate": stretto.SharedMemory()}, "no way of training that combines"),
    ],
)
def test_answers_that_do_not_go_together_are_refused(answers: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        Strategy(**{"sync": LocalSGD(4), **answers})


@pytest.mark.parametrize("schedule", [AfterBackward(), WaitFree(), Buckets(bytes=1000), Merged()])
def test_the_steps_before_start_after_have_a_schedule(schedule: Any) -> None:
    assert Strategy(sync=LocalSGD(4, start_after=1), schedule=schedule).schedule == schedule


@pytest.mark.parametrize("outer", [Average(), HeavyBall(0.7, 0.5), Nesterov(0.7, 0.9), SlowMo(0.6, lr=0.9)])
def test_a_strategy_is_read_back_from_its_text(outer: Outer) -> None:
    strategy = Strategy(sync=LocalSGD(4, outer=outer, start_after=3, optimizer_state="average"))
    assert parse(repr(strategy)) == strategy


# -- optimizer state --------------------------------------------------------------------------------------------------


def states_after(job: Job, optimizer_state: str, steps: int) -> list[Tensor]:
    model = nn.Linear(4, 2)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    strategy = local(3, optimizer_state=optimizer_state)
    model, optimizer = distribute(model, Adam(model.parameters(), lr=0.01), strategy, job=job)
    for number in range(steps):
        step(model, optimizer, torch.full((2, 4), float(job.rank + number)))
    return [optimizer.state[model.weight][kind].clone() for kind in ("exp_avg", "exp_avg_sq", "step") if optimizer.state]


def test_optimizer_state_is_kept_averaged_or_thrown_away_at_an_exchange() -> None:
    kept = run_jobs(2, states_after, "keep", 3)
    assert not torch.equal(kept[0][0], kept[1][0])
    averaged = run_jobs(2, states_after, "average", 3)
    for kind in (0, 1):
        assert torch.equal(averaged[0][kind], averaged[1][kind])
        torch.testing.assert_close(averaged[0][kind], (kept[0][kind] + kept[1][kind]) / 2)
    assert averaged[0][2] == 3
    assert run_jobs(2, states_after, "reset", 3) == [[], []]
    begun_anew = run_jobs(2, states_after, "reset", 4)
    assert begun_anew[0][2] == 1


def test_state_that_a_worker_does_not_have_stays_what_it_is_on_the_others() -> None:
    def program(job: Job) -> tuple[float, float]:
        model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        distribute(model, optimizer, local(1, optimizer_state="average"), job=job)
        for number, parameter in enumerate(model.parameters()):
            if number == 0 or job.rank == 1:  # the second layer is used by rank 1 alone
                parameter.grad = torch.full((1, 1), float(job.rank + 1))
        optimizer.step()
        first, second = (optimizer.state.get(parameter, {}) for parameter in model.parameters())
        return float(first["momentum_buffer"]), float(second["momentum_buffer"]) if second else 0.0

    assert run_jobs(2, program) == [(1.5, 0.0), (1.5, 2.0)]


def test_an_optimizer_that_cannot_step_without_its_state_is_not_reset() -> None:
    def program(job: Job) -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(ConfigurationError, match="Adagrad: it makes its state when it is made itself"):
            distribute(model, Adagrad(model.parameters()), local(2, optimizer_state="reset"), job=job)
        with pytest.raises(ConfigurationError, match="parameter bias has none"):
            distribute(model, SGD([model.weight], lr=0.1), local(2, outer=SlowMo(0.5)), job=job)

    run_jobs(2, program)


# -- buffers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", ["broadcast", "local"])
def test_statistics_are_averaged_with_the_weights_and_not_before(buffers: Any) -> None:
    def program(job: Job) -> list[list[Tensor]]:
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        model.register_buffer("precise", torch.full((2,), float(job.rank), dtype=torch.float64))
        model, optimizer = distribute(model, SGD(model.parameters(), lr=0.1), local(2), buffers=buffers, job=job)
        model.get_buffer("precise").add_(job.rank)
        seen = []
        for number in range(2):
            step(model, optimizer, torch.randn(8, 3, generator=torch.Generator().manual_seed(7 * number + job.rank)))
            seen.append([buffer.clone() for buffer in model.buffers()])
        return seen

    runs = run_jobs(3, program)
    assert not torch.equal(runs[0][0][1], runs[1][0][1])  # after a step of their own
    for mine, theirs in zip(runs[0][1], runs[2][1], strict=True):
        assert torch.equal(mine, theirs) == (buffers == "broadcast" or mine.dtype is torch.int64)
    precise, count = runs[0][1][0], runs[0][1][3]  # its own buffers come first
    assert count == 2 and precise.dtype is torch.float64
    assert precise.tolist() == [1.0 if buffers == "broadcast" else 0.0] * 2


# -- odd loops --------------------------------------------------------------------------------------------------------


def test_with_several_optimizers_an_exchange_comes_when_all_have_taken_so_many_steps() -> None:
    def program(job: Job) -> list[bool]:
        model = nn.ModuleList(nn.Linear(2, 1) for _ in range(2))
        optimizers = (SGD(model[0].parameters(), lr=0.1), Adam(model[1].parameters(), lr=0.1))
        distribute(model, optimizers, local(2), job=job)
        seen = []
        for which in (0, 0, 0, 1, 1, 0, 1, 1):  # the slower one has taken 2 steps after the fifth, and 4 at the end
            model[which](torch.full((1, 2), float(job.rank + 1))).sum().backward()
            optimizers[which].step()
            weights = [job.gather_object(parameter.tolist()) for parameter in model.parameters()]
            seen.append(all(one == other for one, other in weights))
        return seen

    assert run_jobs(2, program)[0] == [False, False, False, False, True, False, False, True]


def test_gradients_accumulate_under_no_sync_and_synchronize_has_nothing_to_do() -> None:
    def program(job: Job) -> None:
        training = Training(job, strategy=local(2))
        x = torch.randn(2, 5)
        with no_sync(training.model):
            training.model(x).sum().backward()
        before = training.model.first.weight.grad
        assert before is not None
        kept = before.clone()
        synchronize(training.model)
        assert torch.equal(before, kept) and training.model.first.weight.grad is before
        training.run(2)

    run_jobs(2, program)


@pytest.mark.parametrize("outer", [Average(), Nesterov(0.7, 0.9)])
def test_bfloat16_weights_are_brought_together_in_float32(outer: Outer) -> None:
    def program(job: Job) -> tuple[Tensor, Tensor]:
        model = nn.Linear(8, 8, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        distribute(model, SGD(model.parameters(), lr=1.0), local(1, outer=outer), job=job)
        model.weight.grad = torch.full_like(model.weight, (job.rank + 1) / 128)
        engine = engine_of(model)
        engine.loop.optimizers[0].step()
        return model.weight.detach().clone(), engine.training.state().shared.get("weight", {}).get(
            "outer weights", torch.zeros(0)
        )

    for weight, theta in run_jobs(2, program):
        expected = 1.0 - (1.0 if outer == Average() else 0.7 * 1.9) * 1.5 / 128
        assert torch.equal(weight, torch.full_like(weight, expected))  # rounded
        if theta.numel():
            torch.testing.assert_close(theta, torch.full_like(theta, expected))  # and not


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [NoCompression(), ErrorFeedback(Sign(block=64))], ids=repr)
@pytest.mark.parametrize("outer", [Average(), Nesterov(0.7, 0.9)])
def test_weights_that_are_not_finite_are_named_on_all_workers(compress: Any, outer: Outer) -> None:
    """Uncompressed, with check_finite=True; what is encoded must be finite anyway."""

    def program(job: Job) -> None:
        strategy = Strategy(sync=LocalSGD(2, outer=outer), compress=compress)
        training = Training(job, strategy=strategy, plain=True, check_finite=compress.lossless).run(1)
        if job.rank == 1:
            with torch.no_grad():
                training.model.last.weight[0, 3] = torch.nan
            training.model.zero_grad()
        with pytest.raises(NonFiniteGradient, match=r"^a weight is not finite: rank 1 in 'last.weight'") as caught:
            training.optimizer.step()
        assert "GradScaler" not in str(caught.value)  # it is refused here
        again = pickle.loads(pickle.dumps(caught.value))
        assert str(again) == str(caught.value) and again.found == {1: "last.weight"}

    run_jobs(3, program)


def test_workers_whose_learning_rates_differ_are_told_at_the_exchange() -> None:
    def program(job: Job) -> None:
        training = Training(job, strategy=local(2), plain=True).run(1)
        training.optimizer.param_groups[0]["lr"] = 0.1 + job.rank
        with pytest.raises(RankMismatch, match=r"(?s)learning rates \[0.1\].*learning rates \[1.1\]"):
            training.run(1)

    run_jobs(2, program)


def test_a_worker_that_has_died_is_named_at_the_next_exchange() -> None:
    together = threading.Barrier(3)  # not the job's: somebody may still wait there for whoever dies

    def program(job: Job) -> str:
        training = Training(job, strategy=local(4)).run(2)
        together.wait(20)
        if job.rank == 1:
            job.close(goodbye=False)
            return "gone"
        training.run(1)  # nobody is needed for a step of one's own
        with pytest.raises(PeerLost) as caught:
            training.run(1)
        return f"lost {caught.value.rank}"

    assert run_jobs(3, program) == ["lost 1", "gone", "lost 1"]


# -- what is written down ---------------------------------------------------------------------------------------------


def test_the_ledger_counts_exchanges_and_the_trace_shows_them(tmp_path: Any) -> None:
    def program(job: Job) -> tuple[dict[int, int], list[str]]:
        job.tracer = Tracer()
        training = Training(job, strategy=local(2), plain=True).run(4)
        with stretto.consensus(training.model):
            pass
        names = [span.name for span in job.tracer.spans if span.category == "transfer"]
        (sample,) = job.tracer.samples
        assert sample.name == "consensus distance of Net (model 1)"
        assert sample.values == {"distance": job.ledger.consensus_distance} and job.ledger.own_steps == 4
        training.optimizer.zero_grad()
        with torch.no_grad():
            training.model.last.weight.fill_(torch.nan)
        stretto.consensus(training.model)
        assert len(job.tracer.samples) == 1  # a file cannot hold what is not finite
        return dict(job.ledger.staleness), names

    assert run_jobs(2, program) == [({0: 2}, ["weights after step 2", "weights after step 4"])] * 2


def test_a_codec_that_loses_most_of_it_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run_jobs(2, lambda job: Training(job, strategy=Strategy(sync=LocalSGD(2), compress=Sign()), plain=True))
    assert "Write ErrorFeedback(Sign" in caplog.text
