"""A model that nobody holds any more is gone, with its buffers, hooks and threads; the job and its other models go on."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.worker import RING, data, seeded, start
from stretto.aggregate.all_reduce.compression_thread import CompressionThread
from stretto.compress.codec import Compression
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.none import NoCompression
from stretto.compress.one_bit_adam import OneBitAdam
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.sign import Sign
from stretto.distributing import distribute, engine_of
from stretto.errors import ConfigurationError, PeerLost, StrettoError
from stretto.job import Job
from stretto.plan.choose import Choices
from stretto.plan.costs import LinkCosts
from stretto.schedule.orders import WaitFree
from stretto.strategy import Strategy
from stretto.sync_batch_norm import SyncBatchNorm
from stretto.testing import run_jobs

PATIENCE_S = 30.0  # with nothing to wait for, as a rule: a rank may be slow where many run
EXACT, SIGN = NoCompression(), ErrorFeedback(Sign(block=16))
EVERY = [EXACT, SIGN, ErrorFeedback(PowerSGD(2)), OneBitAdam(1)]
Trained = tuple[nn.Module, torch.optim.Optimizer]


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """For the collector to look at: without those of torch, which take it 0.1 s each time."""
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1).step()  # imports as much again
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Traces:
    """Weak references to all that a distributed model has and takes."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        engine = engine_of(model)
        buffers = [bucket.flat for bucket in engine.buckets if bucket.num_bytes]
        parts = [("engine", engine), ("model", model), ("optimizer", optimizer), *(("parameter", p) for p in model.parameters())]
        parts += [("bucket", bucket) for bucket in engine.buckets] + [("buffer", buffer) for buffer in buffers]
        self._died = [(name, threading.Event()) for name, _ in parts]
        self._refs = [weakref.ref(part, _telling(died)) for (_, part), (_, died) in zip(parts, self._died, strict=True)]
        thread = engine.training._thread  # type: ignore[attr-defined]
        self.thread = None if thread is None else thread._thread

    def alive(self) -> list[str]:
        return [name for name, died in self._died if not died.is_set()]

    def assert_gone(self) -> None:
        """Collections of other ranks' threads may be under way, and then ours does nothing: it is asked for again."""
        until = time.monotonic() + PATIENCE_S
        gc.collect()
        for _, died in self._died:
            while not died.wait(0.05) and time.monotonic() < until:
                gc.collect()
        assert self.alive() == []
        if self.thread is not None:
            self.thread.join(max(0.0, until - time.monotonic()))
            assert not self.thread.is_alive()

    def assert_there(self) -> None:
        gc.collect()
        assert len(self.alive()) == len(self._died)
        assert self.thread is None or self.thread.is_alive()


def _telling(died: threading.Event) -> Callable[[object], None]:
    return lambda _: died.set()


def begin(job: Job, compress: Compression = EXACT, **options: Any) -> Trained:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    return with_strategy(job, model, compress, **options)


def with_strategy(job: Job, model: nn.Module, compress: Compression, **options: Any) -> Trained:
    job.choices = Choices([0], ["ring"], LinkCosts(alpha=1e-5, beta=1e-9, gamma=1e-9))  # not tried out in every test
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return distribute(model, optimizer, Strategy(compress=compress, schedule=WaitFree()), job=job, **options)


def train(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[Tensor]:
    for number in range(steps):
        loss: Tensor = model(data(job.rank, number).float()).pow(2).mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def assert_dead(one: weakref.ref[Any]) -> None:
    until = time.monotonic() + PATIENCE_S
    gc.collect()
    while one() is not None and time.monotonic() < until:
        gc.collect()
    assert one() is None


def assert_equal(everybody: list[list[Tensor]]) -> None:
    for other in everybody[1:]:
        assert all(torch.equal(a, b) for a, b in zip(everybody[0], other, strict=True))


@pytest.mark.parametrize(("size", "compress"), [(1, EXACT), (1, SIGN), *((3, one) for one in EVERY)])
def test_a_dropped_model_is_gone_and_others_train(size: int, compress: Compression) -> None:
    """Rank 0 collects at once, the others when another model has been distributed and trained."""

    def program(job: Job) -> tuple[list[Tensor], list[Tensor]]:
        one, other = begin(job, compress), begin(job)
        train(job, *one), train(job, *other)
        traces = Traces(*one)
        traces.assert_there()
        if job.rank == 0:
            del one
            traces.assert_gone()
        third = begin(job, compress)
        results = train(job, *other), train(job, *third)
        if job.rank != 0:
            del one
            traces.assert_gone()
        train(job, *third)
        assert engine_of(third[0]).rounds == (0 if size == 1 and compress == EXACT else 4)
        return results

    results = run_jobs(size, program)
    assert_equal([other for other, _ in results])
    assert_equal([third for _, third in results])


def part_of(model: nn.Module, optimizer: torch.optim.Optimizer, keep: str) -> Any:
    """What a user may hold on to, who has let go of all the rest."""
    if keep == "scheduler":
        return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    return attrgetter(keep)(SimpleNamespace(model=model, optimizer=optimizer))


@pytest.mark.parametrize(
    ("compress", "keep"),
    [(EXACT, "model"), (EXACT, "optimizer")]
    + [(SIGN, one) for one in ("model", "optimizer", "optimizer.step", "model.forward", "scheduler")],
)
def test_holding_either_is_enough_to_train_on(compress: Compression, keep: str) -> None:
    def program(job: Job) -> list[Tensor]:
        model, optimizer = begin(job, compress)
        train(job, model, optimizer)
        traces, engine = Traces(model, optimizer), weakref.ref(engine_of(model))
        held = part_of(model, optimizer, keep)
        del model, optimizer
        traces.assert_there()
        found = engine()
        assert found is not None
        result = train(job, found.model, found.loop.optimizers[0])
        assert found.rounds == 4
        del found, held
        traces.assert_gone()
        return result

    assert_equal(run_jobs(2, program))


def test_a_loss_that_is_kept_does_not_hold_the_engine() -> None:
    """For a curve to draw, say. It holds its graph and so the parameters, as it does without us."""

    def program(job: Job) -> None:
        model, optimizer = begin(job, SIGN)
        thread, engine = Traces(model, optimizer).thread, weakref.ref(engine_of(model))
        loss = model(data(job.rank).float()).pow(2).mean()
        torch.autograd.backward(loss)
        del model, optimizer
        assert_dead(engine)
        assert thread is not None
        thread.join(PATIENCE_S)
        assert not thread.is_alive() and bool(loss.isfinite())

    run_jobs(2, program)


@pytest.mark.parametrize("compress", [EXACT, SIGN], ids=repr)
@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_that_outlives_its_model_has_no_hooks_and_may_be_part_of_another(size: int, compress: Compression) -> None:
    """A backbone with another head in every phase."""

    def program(job: Job) -> list[Tensor]:
        backbone = seeded(lambda: nn.Linear(4, 8))
        for _ in range(3):
            head = seeded(lambda: nn.Linear(8, 1))
            model, optimizer = with_strategy(job, nn.Sequential(backbone, nn.Tanh(), head), compress, check_finite=True)
            result = train(job, model, optimizer)
            engine = weakref.ref(engine_of(model))
            del model, optimizer
            assert_dead(engine)
        torch.autograd.backward(backbone.weight.sum())
        hooks: Any = backbone.weight._post_accumulate_grad_hooks
        assert not hooks
        assert backbone.weight.grad is not None and bool((backbone.weight.grad == 1).all())
        return result

    assert_equal(run_jobs(size, program))


def test_who_trains_on_with_what_is_left_is_told_that_nobody_combines_it(caplog: pytest.LogCaptureFixture) -> None:
    """A container that was only made for `distribute`, and then another optimizer: nothing holds the engine any more."""

    def program(job: Job) -> None:
        backbone = seeded(lambda: nn.Linear(4, 8))
        model, optimizer = with_strategy(job, nn.Sequential(backbone), EXACT)
        train(job, model, optimizer)
        engine = weakref.ref(engine_of(model))
        del model, optimizer
        assert_dead(engine)
        for _ in range(2):
            torch.autograd.backward(backbone(data(job.rank).float()).sum())

    with caplog.at_level("WARNING", "stretto"):
        run_jobs(2, program)
    said = [record.getMessage() for record in caplog.records if "on this worker alone" in record.getMessage()]
    assert sorted(text.partition(":")[0] for text in said) == ["rank 0", "rank 1"]


def test_a_parameter_that_is_part_of_another_model_by_then_is_combined_and_nothing_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def program(job: Job) -> list[Tensor]:
        backbone = seeded(lambda: nn.Linear(4, 8))
        model, optimizer = with_strategy(job, nn.Sequential(backbone), EXACT)
        engine = weakref.ref(engine_of(model))
        del model, optimizer
        assert_dead(engine)
        return train(job, *with_strategy(job, nn.Sequential(backbone, nn.Tanh()), EXACT))

    with caplog.at_level("WARNING", "stretto"):
        assert_equal(run_jobs(2, program))
    assert "on this worker alone" not in caplog.text


def test_the_job_keeps_nothing_of_models_that_are_gone() -> None:
    def program(job: Job) -> None:
        for _ in range(3):
            model, optimizer = with_strategy(job, seeded(lambda: nn.Linear(4, 2)), SIGN)
            engine = weakref.ref(engine_of(model))
            assert len(job.threads) == 1
            del model, optimizer
            assert_dead(engine)
        assert len(job.threads) == 0

    run_jobs(1, program)


def test_a_collection_by_another_thread_does_not_make_a_dropped_model_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile ours does nothing: here the first two."""
    collected: list[int] = []
    collect = gc.collect

    def in_vain_at_first() -> int:
        collected.append(len(collected))
        return collect() if len(collected) > 2 else 0

    monkeypatch.setattr("stretto.engine.admission.gc.collect", in_vain_at_first)

    def program(job: Job) -> None:
        backbone = seeded(lambda: nn.Linear(4, 8))
        model, optimizer = with_strategy(job, nn.Sequential(backbone), EXACT)
        gc.disable()
        try:
            del model, optimizer
            with_strategy(job, nn.Sequential(backbone), EXACT)
        finally:
            gc.enable()

    run_jobs(1, program)
    assert len(collected) == 3


def test_what_is_only_waiting_to_be_collected_does_not_count_as_distributed() -> None:
    def program(job: Job) -> None:
        backbone = seeded(lambda: nn.Linear(4, 8))
        model, optimizer = with_strategy(job, nn.Sequential(backbone), SIGN)
        with pytest.raises(ConfigurationError, match=r"stretto\.release\("):
            with_strategy(job, nn.Sequential(backbone), SIGN)
        gc.disable()
        try:
            del model, optimizer
            assert len(job.engines) == 1
            train(job, *with_strategy(job, nn.Sequential(backbone), SIGN))
        finally:
            gc.enable()

    run_jobs(1, program)


class Failed(Exception):
    """By a test, in the middle of backward."""


def fail_in_backward(job: Job, model: nn.Module) -> None:
    """When the gradients of the last layer have left."""

    def fail(gradient: Tensor) -> Tensor:
        raise Failed

    hidden: list[Tensor] = []
    handle = model[1].register_forward_hook(lambda _, __, output: hidden.append(output))  # type: ignore[index]
    loss = model(data(job.rank).float()).pow(2).mean()
    handle.remove()
    hidden.pop().register_hook(fail)  # type: ignore[no-untyped-call]
    with pytest.raises(Failed):
        loss.backward()


@pytest.mark.parametrize("compress", [EXACT, SIGN], ids=repr)
def test_dropped_in_the_middle_of_a_round(compress: Compression) -> None:
    def program(job: Job) -> list[Tensor]:
        model, optimizer = begin(job, compress)
        train(job, model, optimizer)
        traces = Traces(model, optimizer)
        fail_in_backward(job, model)
        assert engine_of(model)._open and engine_of(model).buckets[0].sent
        del model, optimizer
        traces.assert_gone()
        return train(job, *begin(job, compress))

    assert_equal(run_jobs(2, program))


@pytest.mark.parametrize("compress", [EXACT, SIGN], ids=repr)
def test_who_waits_for_a_model_that_another_rank_has_dropped_gets_its_usual_error(compress: Compression) -> None:
    def program(job: Job) -> None:
        model, optimizer = begin(job, compress)
        train(job, model, optimizer)
        if job.rank == 0:
            traces = Traces(model, optimizer)
            fail_in_backward(job, model)
            del model, optimizer
            traces.assert_gone()  # and this rank leaves
            return
        with pytest.raises(PeerLost, match="rank 0"):
            train(job, model, optimizer)

    run_jobs(2, program)


def test_layers_that_normalise_together_are_gone_with_their_model() -> None:
    def program(job: Job) -> list[Tensor]:
        for _ in range(2):
            model = seeded(lambda: nn.Sequential(nn.Linear(4, 8), SyncBatchNorm(8), nn.Linear(8, 1)))
            optimizer = start(job, model, RING)
            result = train(job, model, optimizer)
            traces, link = Traces(model, optimizer), weakref.ref(model[1]._link)
            del model, optimizer
            traces.assert_gone()
            assert link() is None
        return result

    assert_equal(run_jobs(2, program))


def test_a_thread_that_waits_for_work_holds_nothing_of_what_it_has_done() -> None:
    """An error leads to its traceback, and that to all that was in use."""

    class Thing:
        pass

    def course(thing: Thing) -> Any:
        raise StrettoError("on purpose")
        yield thing

    def run(thread: CompressionThread) -> weakref.ref[Thing]:
        thing = Thing()
        with pytest.raises(StrettoError, match="on purpose"):
            thread.submit(course(thing), torch.device("cpu")).wait()
        return weakref.ref(thing)

    thread = CompressionThread()
    assert_dead(run(thread))
    thread.stop()
