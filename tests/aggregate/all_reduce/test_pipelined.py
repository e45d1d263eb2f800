"""`StaleSynchronous` with `AllReduce`: averages that are applied `bound` steps late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

import stretto
from stretto.aggregate.all_reduce import AllReduce
from stretto.compress.codec import Compression
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.none import NoCompression
from stretto.compress.one_bit_adam import OneBitAdam
from stretto.compress.qsgd import QSGD
from stretto.compress.sign import Sign
from stretto.compress.warm_up import WarmUp
from stretto.distributing import distribute, engine_of, release, synchronize
from stretto.errors import ConfigurationError, NonFiniteGradient, StrettoError
from stretto.job import Job
from stretto.schedule.orders import Buckets
from stretto.schedule.priority import Priority
from stretto.strategy import Strategy
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.testing import run_jobs

Weights = list[Tensor]
STEPS = 7


def late(bound: int, compress: Compression | None = None) -> Strategy:
    schedule = Buckets(bytes=256, first_bytes=64)
    return Strategy(
        aggregate=AllReduce("ring") if compress is None else AllReduce(),
        sync=StaleSynchronous(bound),
        compress=compress or NoCompression(),
        schedule=schedule,
    )


def net() -> nn.Module:
    """The same on all workers, which are threads and share torch's generator."""
    model, generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    loss: Tensor = model(batch(step, rank)).square().mean()
    return loss


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def weights(model: nn.Module) -> Weights:
    return [parameter.detach().clone() for parameter in model.parameters()]


def by_hand(size: int, bound: int, make: Callable[[nn.Module], Optimizer], steps: int) -> tuple[list[Weights], Weights]:
    """What one process does that has all the data: the weights after every step, and after those that are left at the end."""
    model = net()
    optimizer = make(model)
    means: list[Weights] = []
    after = []

    def apply() -> None:
        for parameter, mean in zip(model.parameters(), means.pop(0), strict=True):
            parameter.grad = mean
        optimizer.step()

    for step in range(steps):
        total = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in range(size):
            gradients = torch.autograd.grad(loss_of(model, step, rank), list(model.parameters()))
            total = [one + other / size for one, other in zip(total, gradients, strict=True)]
        means.append(total)
        if len(means) > bound:
            apply()
        after.append(weights(model))
    while means:
        apply()
    return after, weights(model)


def train(
    job: Job, strategy: Strategy, make: Callable[[nn.Module], Optimizer] = sgd, steps: int = STEPS
) -> tuple[list[Weights], Weights, dict[int, int]]:
    model = net()
    model, optimizer = distribute(model, make(model), strategy, job=job)
    after = []
    for step in range(steps):
        backward(loss_of(model, step, job.rank))
        optimizer.step()
        optimizer.zero_grad()
        after.append(weights(model))
    synchronize(model)
    return after, weights(model), dict(job.ledger.staleness)


def equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def assert_close(one: Weights, other: Weights) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize(("size", "bound"), [(2, 1), (3, 2), (4, 1), (7, 3), (2, 0), (2, 10)])
def test_every_average_is_applied_once_and_as_late_as_it_says(
    size: int, bound: int, make: Callable[[nn.Module], Optimizer]
) -> None:
    results = run_jobs(size, train, late(bound), make)
    expected, at_the_end = by_hand(size, bound, make, STEPS)

    for after, end, staleness in results:
        for mine, first, right in zip(after, results[0][0], expected, strict=True):
            assert equal(mine, first)
            assert_close(mine, right)
        assert equal(end, results[0][1])
        assert_close(end, at_the_end)
        assert staleness == {k: (STEPS - bound if k == bound else 1) for k in range(min(bound, STEPS - 1) + 1)}


@pytest.mark.parametrize("compress", [None, ErrorFeedback(Sign(block=8))], ids=repr)
def test_a_bound_of_zero_is_synchronous(compress: Compression | None) -> None:
    synchronous = Strategy(
        aggregate=late(0, compress).aggregate, compress=compress or NoCompression(), schedule=Buckets(bytes=256, first_bytes=64)
    )
    for one, other in zip(run_jobs(3, train, late(0, compress)), run_jobs(3, train, synchronous), strict=True):
        assert all(equal(mine, theirs) for mine, theirs in zip(one[0], other[0], strict=True))


def test_a_world_of_one_is_the_plain_loop() -> None:
    (after, end, _), expected = run_jobs(1, train, late(2))[0], by_hand(1, 0, sgd, STEPS)
    assert all(equal(mine, right) for mine, right in zip(after, expected[0], strict=True))
    assert equal(end, expected[1])


def test_what_a_gradient_holds_after_backward() -> None:
    def look(job: Job) -> None:
        model = net()
        model, optimizer = distribute(model, SGD(model.parameters(), lr=0.0), late(2), job=job)
        for step in range(5):
            backward(loss_of(model, step, job.rank))
            for parameter in model.parameters():
                assert (parameter.grad is None) == (step < 2)
            if step >= 2:
                plain = net()
                loss = sum(loss_of(plain, step - 2, rank) for rank in range(3)) / 3
                assert isinstance(loss, Tensor)
                backward(loss)
                for mine, right in zip(model.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(mine.grad, right.grad)
            optimizer.step()
            optimizer.zero_grad()

    run_jobs(3, look)


def test_clipping_sees_the_average() -> None:
    def clipped(job: Job) -> Weights:
        model = net()
        model, optimizer = distribute(model, sgd(model), late(1), job=job)
        for step in range(4):
            backward(loss_of(model, step, job.rank))
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            assert (float(norm) > 0) == (step > 0)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    results = run_jobs(3, clipped)
    assert all(equal(mine, results[0]) for mine in results)


LOSSY = [ErrorFeedback(Sign(block=8)), QSGD(bits=4, bucket=16), stretto.Int8(block=8), ErrorFeedback(stretto.PowerSGD(2))]


@pytest.mark.parametrize("compress", LOSSY, ids=repr)
def test_replicas_stay_equal_with_codecs(compress: Compression) -> None:
    results = run_jobs(3, train, late(2, compress))
    for after, end, _ in results:
        assert all(equal(mine, first) for mine, first in zip(after, results[0][0], strict=True))
        assert equal(end, results[0][1]) and not equal(end, after[0])


def test_rounds_that_are_under_way_together_draw_other_random_numbers() -> None:
    def draws(job: Job) -> list[Tensor]:
        model = nn.Linear(64, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        model, optimizer = distribute(model, SGD(model.parameters(), lr=0.0), late(1, QSGD(bits=2, bucket=64)), job=job)
        seen = []
        for _ in range(5):
            backward((model.weight * torch.linspace(0.1, 1, 64)).sum())
            model(torch.zeros(1, 64)).sum()  # nothing: the round is over
            if model.weight.grad is not None:
                seen.append(model.weight.grad.clone())
            optimizer.zero_grad()
        return seen

    for seen in run_jobs(2, draws):
        assert len(seen) == 4 and not any(torch.equal(a, b) for a, b in zip(seen, seen[1:], strict=False))


def test_what_was_accumulated_is_one_round() -> None:
    def accumulate(job: Job) -> tuple[Weights, dict[int, int]]:
        model = net()
        model, optimizer = distribute(model, sgd(model), late(1), job=job)
        for step in range(3):
            with stretto.no_sync(model):
                for micro in range(2):
                    backward(loss_of(model, 2 * step + micro, job.rank) / 2)
            synchronize(model)
            optimizer.step()
            optimizer.zero_grad()
        synchronize(model)
        return weights(model), dict(job.ledger.staleness)

    results = run_jobs(2, accumulate)
    assert all(equal(mine, results[0][0]) for mine, _ in results)
    assert all(staleness == {0: 1, 1: 2} for _, staleness in results)


def test_a_second_backward_on_top_of_an_average_is_refused() -> None:
    def twice(job: Job) -> None:
        model = net()
        model, _ = distribute(model, sgd(model), late(1), job=job)
        backward(loss_of(model, 0, job.rank))
        backward(loss_of(model, 1, job.rank))
        with pytest.raises(ConfigurationError, match=r"a second backward before.*StaleSynchronous\(bound=1\)"):
            backward(loss_of(model, 2, job.rank))

    run_jobs(2, twice)


@pytest.mark.parametrize("compress", [None, ErrorFeedback(Sign(block=8)), QSGD(bits=4, bucket=16)], ids=repr)
@pytest.mark.parametrize("saved_after", [1, 4])
def test_save_load_and_go_on_with_the_same_bits(tmp_path: Path, compress: Compression | None, saved_after: int) -> None:
    path = tmp_path / "checkpoint"

    def whole(job: Job) -> Weights:
        return _train_on(job, *_begin(job), range(STEPS))

    def first(job: Job) -> Weights:
        model, optimizer = _begin(job)
        _train_on(job, model, optimizer, range(saved_after), finish=False)
        stretto.save(path, model, optimizer, job=job)
        return _train_on(job, model, optimizer, range(saved_after, STEPS))

    def second(job: Job) -> Weights:
        model, optimizer = _begin(job)
        _train_on(job, model, optimizer, range(3), finish=False)  # averages of another life are dropped
        resumed = stretto.load(path, model, optimizer, job=job)
        assert not resumed.lost, resumed.lost
        before = job.ledger.staleness.copy()
        found = _train_on(job, model, optimizer, range(saved_after, STEPS))
        assert job.ledger.staleness - before == ({0: 1, 1: 1, 2: 5} if saved_after == 1 else {2: 5})
        return found

    def _begin(job: Job) -> tuple[nn.Module, Optimizer]:
        model = net()
        return distribute(model, sgd(model), late(2, compress), job=job)

    expected, went_on, came_back = run_jobs(3, whole), run_jobs(3, first), run_jobs(3, second)
    for one, other, third in zip(expected, went_on, came_back, strict=True):
        assert equal(one, other) and equal(one, third)


def _train_on(job: Job, model: nn.Module, optimizer: Optimizer, steps: range, *, finish: bool = True) -> Weights:
    for step in steps:
        backward(loss_of(model, step, job.rank))
        optimizer.step()
        optimizer.zero_grad()
    if finish:
        synchronize(model)
    return weights(model)


def test_averages_that_are_late_are_loaded_by_another_number_of_workers(tmp_path: Path) -> None:
    def save(job: Job) -> Weights:
        model = net()
        model, optimizer = distribute(model, sgd(model), late(2, ErrorFeedback(Sign(block=8))), job=job)
        _train_on(job, model, optimizer, range(4), finish=False)
        stretto.save(tmp_path / "checkpoint", model, optimizer, job=job)
        synchronize(model)
        return weights(model)

    def load(job: Job) -> Weights:
        model = net()
        model, optimizer = distribute(model, sgd(model), late(2, ErrorFeedback(Sign(block=8))), job=job)
        stretto.load(tmp_path / "checkpoint", model, optimizer, job=job)
        synchronize(model)
        return weights(model)

    saved, loaded = run_jobs(2, save), run_jobs(3, load)
    assert all(equal(mine, saved[0]) for mine in loaded)


def test_averages_of_before_are_dropped_where_a_checkpoint_has_none(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def write(job: Job) -> None:
        model = net()
        model, optimizer = distribute(model, sgd(model), Strategy(aggregate=AllReduce("ring")), job=job)
        _train_on(job, model, optimizer, range(2), finish=False)
        stretto.save(path, model, optimizer, job=job)

    def read(job: Job) -> None:
        model = net()
        model, optimizer = distribute(model, sgd(model), late(2), job=job)
        _train_on(job, model, optimizer, range(3), finish=False)  # two averages are late
        stretto.load(path, model, optimizer, job=job)
        loaded = weights(model)
        backward(loss_of(model, 3, job.rank))
        assert all(parameter.grad is None for parameter in model.parameters())  # a warm-up begins
        optimizer.step()
        assert equal(weights(model), loaded)

    run_jobs(2, write)
    run_jobs(2, read)


def test_another_number_of_workers_begins_with_the_mean_of_what_each_lane_had_left_over(tmp_path: Path) -> None:
    strategy = late(1, ErrorFeedback(Sign(block=8)))

    def residuals(model: nn.Module) -> dict[str, Tensor]:
        own = engine_of(model).training.state().own
        return {f"{name} {kind}": own[name][kind] for name in own for kind in own[name] if kind.endswith(" residual")}

    def save(job: Job) -> dict[str, Tensor]:
        model = net()
        model, optimizer = distribute(model, sgd(model), strategy, job=job)
        _train_on(job, model, optimizer, range(4), finish=False)
        stretto.save(tmp_path / "checkpoint", model, optimizer, job=job)
        return residuals(model)

    def load(job: Job) -> dict[str, Tensor]:
        model = net()
        model, optimizer = distribute(model, sgd(model), strategy, job=job)
        stretto.load(tmp_path / "checkpoint", model, optimizer, job=job)
        return residuals(model)

    (one, other), loaded = run_jobs(2, save), run_jobs(3, load)
    assert {name.split()[2] for name in one} == {"0", "1"}  # two lanes
    for mine in loaded:
        assert mine.keys() == one.keys()
        for name, value in mine.items():
            torch.testing.assert_close(value, (one[name] + other[name]) / 2)
            assert value.abs().sum() > 0


def test_release_and_a_new_strategy_take_the_steps_that_are_left() -> None:
    def leave(job: Job) -> tuple[Weights, Weights]:
        out = []
        for again in (False, True):
            model = net()
            model, optimizer = distribute(model, sgd(model), late(2), job=job)
            _train_on(job, model, optimizer, range(4), finish=False)
            if again:
                distribute(model, optimizer, Strategy(), job=job)
            else:
                release(model)
            out.append(weights(model))
        return out[0], out[1]

    expected = by_hand(2, 2, sgd, 4)[1]
    for released, again in run_jobs(2, leave):
        assert_close(released, expected)
        assert_close(again, expected)


def test_a_backward_that_fails_is_heard_of_and_nobody_goes_on() -> None:
    def break_off(*_: object) -> None:
        raise RuntimeError("a bad batch")

    heard = threading.Event()

    def fail(job: Job) -> int:
        model = net()
        model, optimizer = distribute(model, sgd(model), late(1), job=job)
        steps = 0
        with pytest.raises(Exception, match="a bad batch" if job.rank == 1 else "on another worker"):
            for step in range(6):
                if (step, job.rank) == (2, 1):
                    broken = [*model.children()][-1].register_full_backward_hook(break_off)
                _train_on(job, model, optimizer, range(step, step + 1), finish=False)
                steps += 1
        if job.rank == 1:
            broken.remove()
            optimizer.zero_grad()
            with pytest.raises(StrettoError, match=r"(?s)on this worker.*begin from a saved state"):
                loss_of(model, 3, job.rank)
        for attempt in (optimizer.step, optimizer.state_dict):
            with pytest.raises(StrettoError, match="begin from a saved state"):
                attempt()
        if job.rank == 0:
            heard.set()
        assert heard.wait(30)  # a worker that leaves would be lost to the others, which they would hear first
        assert release(model) is model
        return steps

    assert run_jobs(2, fail) == [3, 2]


def test_a_gradient_that_is_not_finite_is_named() -> None:
    def spoil(job: Job) -> None:
        model = net()
        model, optimizer = distribute(model, sgd(model), late(1), check_finite=True, job=job)
        for step in range(3):
            factor = float("nan") if step == 1 and job.rank == 1 else 1.0
            if step == 2:
                with pytest.raises(NonFiniteGradient, match="rank 1"):
                    backward(loss_of(model, step, job.rank))
                return
            backward(loss_of(model, step, job.rank) * factor)
            optimizer.step()
            optimizer.zero_grad()

    run_jobs(2, spoil)


def test_no_step_is_taken_at_the_end_for_an_average_that_is_not_finite() -> None:
    def spoil(job: Job) -> None:
        model = net()
        model, optimizer = distribute(model, sgd(model), late(1), check_finite=True, job=job)
        backward(loss_of(model, 0, job.rank))
        optimizer.step()
        optimizer.zero_grad()
        backward(loss_of(model, 1, job.rank) * (float("nan") if job.rank == 1 else 1.0))
        optimizer.step()
        before, where = weights(model), "rank 1 in '" if job.rank == 1 else "not by this worker's"
        with pytest.raises(NonFiniteGradient, match=f"still to be applied is not finite: {where}"):
            synchronize(model)
        assert equal(weights(model), before)

    run_jobs(2, spoil)


def test_a_parameter_that_is_unfrozen_joins_and_nothing_is_lost() -> None:
    def unfreeze(job: Job) -> tuple[Weights, dict[int, int]]:
        model = net()
        first = next(model.parameters())
        first.requires_grad_(False)
        model, optimizer = distribute(model, sgd(model), late(2), job=job)
        _train_on(job, model, optimizer, range(3), finish=False)
        first.requires_grad_(True)
        _train_on(job, model, optimizer, range(3, 6))
        return weights(model), dict(job.ledger.staleness)

    results = run_jobs(2, unfreeze)
    assert all(equal(mine, results[0][0]) for mine, _ in results)
    assert all(sum(staleness.values()) == 6 for _, staleness in results)
    assert not torch.equal(results[0][0][0], next(net().parameters()))


def test_the_exchange_runs_under_the_next_step() -> None:
    """Rank 1 comes late to every backward, by a whole step, and rank 0 does not wait for it at its own."""
    passed = [threading.Event() for _ in range(4)]

    def run(job: Job) -> None:
        model = net()
        model, optimizer = distribute(model, sgd(model), late(1), job=job)
        for step in range(4):
            if job.rank == 1:
                assert passed[step].wait(30)  # rank 0 has ended this step already
            backward(loss_of(model, step, job.rank))
            optimizer.step()
            optimizer.zero_grad()
            if job.rank == 0:
                passed[step].set()

    run_jobs(2, run)


REFUSED: list[tuple[Callable[[], Strategy], str]] = [
    (lambda: Strategy(sync=StaleSynchronous(1), schedule=Priority()), "Leave schedule= out"),
    (lambda: Strategy(sync=StaleSynchronous(1), compress=OneBitAdam(10)), "momentum from round to round"),
    (lambda: Strategy(sync=StaleSynchronous(1), compress=WarmUp(3, ErrorFeedback(Sign()))), "WarmUp counts rounds"),
    (lambda: Strategy(sync=StaleSynchronous(1), aggregate=AllReduce("native")), "while the caller waits"),
]


@pytest.mark.parametrize(("make", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_strategies_that_make_no_sense_are_refused(make: Callable[[], Strategy], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        make()


def test_models_and_optimizers_that_cannot_be_trained_so_are_refused() -> None:
    def refuse(job: Job) -> None:
        sparse = nn.Embedding(4, 2, sparse=True)
        with pytest.raises(ConfigurationError, match="sparse gradients"):
            distribute(sparse, SGD(sparse.parameters(), lr=0.1), late(1), job=job)
        model = net()
        with pytest.raises(ConfigurationError, match="decides by several losses"):
            distribute(model, LBFGS(model.parameters()), late(1), job=job)
        with pytest.raises(ConfigurationError, match="GradScaler"):
            scaler = torch.amp.GradScaler("cpu")
            distribute(model, SGD(model.parameters(), lr=0.1), late(1), scaler=scaler, job=job)

    run_jobs(2, refuse)


def test_join_is_refused() -> None:
    def join(job: Job) -> None:
        model = net()
        model, _ = distribute(model, sgd(model), late(1), job=job)
        with pytest.raises(ConfigurationError, match="out of data"), stretto.join(model):
            pass

    run_jobs(2, join)
