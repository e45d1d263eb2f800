"""Edges of odd training loops: accumulation that ends early, scalers, copies and compiled models."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from engine.interrupted import interrupted_once
from engine.worker import (
    RING,
    OneAtATime,
    assert_equal_everywhere,
    bytes_sent,
    data,
    gradients_of,
    loss_of,
    mlp,
    rounds,
    seeded,
    start,
    state_of,
    take_step,
)
from forked import in_a_fork, refusal
from preloaded import Preloaded
from stretto.checkpoint import load, save
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.sign import Sign
from stretto.distributing import distribute, engine_of, join, no_sync, release, synchronize
from stretto.errors import CheckpointError, ConfigurationError, RankMismatch
from stretto.job import Job
from stretto.observe.trace import Tracer
from stretto.strategy import Strategy
from stretto.testing import run_jobs

SIZE = 2
SIGN = Strategy(schedule=RING.schedule, compress=ErrorFeedback(Sign()))


def backward(model: nn.Module, job: Job, step: int = 0) -> None:
    torch.autograd.backward(loss_of(model, job, step))


def mean_gradients(ranks: range, step: int = 0) -> dict[str, Tensor]:
    """Of a plain model, over the data of these ranks."""
    alone = mlp()
    for rank in ranks:
        (alone(data(rank, step)).pow(2).mean() / len(ranks)).backward()
    return {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}


def assert_gradients(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], msg=name)


# -- scalers and learning rates ---------------------------------------------------------------------------------------


def test_a_scaler_that_is_not_enabled_is_none() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model, scaler = mlp(), torch.amp.GradScaler("cpu", enabled=False)
        optimizer = start(job, model)
        with join(model):
            for step in range(job.rank):  # rank 0 has never stepped with it, which does not matter
                torch.autograd.backward(scaler.scale(loss_of(model, job, step)))
                scaler.step(optimizer)
                scaler.update()
        assert engine_of(model).loop.scale() is None
        return state_of(model)

    assert_equal_everywhere(run_jobs(SIZE, program))


def test_a_scale_that_was_read_before_all_were_made_equal_is_forgotten() -> None:
    """On an accelerator the scale is only read at a step, so what was read may be that of another worker's past."""

    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model)
        loop = engine_of(model).loop
        loop.scaler = OnAnAccelerator()  # type: ignore[assignment]
        with join(model):
            for step in range(1 + job.rank):
                take_step(model, job, optimizer, step=step)
                loop._scale = (8.0 * (1 + step), step)
            loop.scaler, scaler = None, loop.scaler
        loop.scaler = scaler
        take_step(model, job, optimizer, step=5)
        assert rounds(model) == 3 + 1 and "loss scale" not in loop.text()

    run_jobs(SIZE, program)


class OnAnAccelerator:
    _scale = _growth_tracker = None

    def is_enabled(self) -> bool:
        return True


def test_a_learning_rate_of_none_is_one() -> None:
    class Own(torch.optim.SGD):
        pass

    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        optimizer = Own(model.parameters(), lr=0.1)
        distribute(model, optimizer, RING, job=job)
        optimizer.param_groups[0]["lr"] = None  # it finds its own, like Adafactor
        optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
        take_step(model, job, optimizer)
        assert engine_of(model).loop.learning_rates() == [None]
        return state_of(model)

    assert_equal_everywhere(run_jobs(SIZE, program))


# -- which optimizer has stepped --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False])
def test_steps_of_two_optimizers_of_one_class_are_told_apart(given: bool) -> None:
    def program(job: Job) -> None:
        model: Any = mlp()
        pair = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD([*model[2].parameters()][:1], lr=0.1)]
        if given:
            distribute(model, pair, RING, job=job)
        else:
            start(job, model)
        backward(model, job)
        pair[job.rank].step()
        model.zero_grad()
        names = r"SGD \(optimizer 0\)(.|\n)*SGD \(optimizer 1\)" if given else r"of 2 parameters\)(.|\n)*of 1 parameters\)"
        with pytest.raises(RankMismatch, match=names):
            backward(model, job, 1)

    run_jobs(SIZE, program)


def test_gradients_that_the_program_made_itself_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model)
        take_step(model, job, optimizer)
        backward(model, job, 1)
        optimizer.step()
        optimizer.step()  # the same mean once more is nothing wrong
        for _ in range(2):
            for p in model.parameters():
                p.grad = torch.full_like(p, 1.0 + job.rank)
            optimizer.step()

    run_jobs(SIZE, program)
    assert len(caplog.records) == SIZE and all("no backward pass has left there" in each.message for each in caplog.records)


def test_an_optimizer_that_is_not_torchs_gets_the_loss_of_its_worker() -> None:
    """Only LBFGS decides by it. Whatever else a closure returns is the program's own affair."""

    class Own(torch.optim.SGD):
        seen: Any = None

        def step(self, closure: Any = None) -> Any:
            self.seen = closure()
            return super().step()

    class LBFGSNew(Own):
        pass

    def program(job: Job) -> tuple[Any, Any]:
        seen = []
        for kind in (Own, LBFGSNew):
            model = mlp()
            optimizer = kind(model.parameters(), lr=0.1)
            distribute(model, optimizer, RING, job=job)
            for returned in (torch.tensor([1.0 + job.rank]), torch.ones(2) * job.rank, "done"):

                def closure(returned: Any = returned, model: Any = model, optimizer: Any = optimizer) -> Any:
                    optimizer.zero_grad()
                    backward(model, job)
                    return returned

                optimizer.step(closure)
                seen.append(optimizer.seen)
        return [str(each) for each in seen], rounds(model)

    for rank, (seen, _) in enumerate(run_jobs(SIZE, program)):
        expected = [str(torch.tensor([1.0 + rank])), str(torch.ones(2) * rank), "done"]
        assert seen == [*expected, str(torch.tensor([1.5])), *expected[1:]]


# -- accumulation -----------------------------------------------------------------------------------------------------


def accumulated(model: nn.Module, job: Job) -> None:
    with no_sync(model):
        backward(model, job)


def distributed_again(model: nn.Module, job: Job, path: Path) -> None:
    distribute(model, torch.optim.Adam(model.parameters()), RING, job=job)


def loaded(model: nn.Module, job: Job, path: Path) -> None:
    optimizer = engine_of(model).loop.optimizers
    save(path, model, optimizer)
    load(path, model, optimizer)


@pytest.mark.parametrize("between", [distributed_again, loaded])
def test_what_was_accumulated_before_is_still_this_workers_own(between: Callable[..., None], tmp_path: Path) -> None:
    def program(job: Job) -> None:
        model = mlp()
        start(job, model)
        accumulated(model, job)
        between(model, job, tmp_path / "c.pt")
        with pytest.raises(ConfigurationError, match=r"after 1 backward passes(.|\n)*stretto.release\(model\)"):
            engine_of(model).loop.optimizers[0].step()
        synchronize(model)
        assert_gradients(model, mean_gradients(range(SIZE)))

    run_jobs(SIZE, program)


@pytest.mark.parametrize("size", [2, 3])
def test_synchronize_with_workers_that_have_accumulated_nothing(size: int) -> None:
    """The mean is over those that have something, also where zeros or an old mean lie in p.grad."""

    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        optimizer = start(job, model)
        synchronize(model)
        assert rounds(model) == 0  # nobody has anything
        backward(model, job, 7)
        optimizer.zero_grad(set_to_none=job.rank == 1)
        if job.rank:
            accumulated(model, job)
        synchronize(model)
        assert_gradients(model, mean_gradients(range(1, size)))
        assert job.weight == 1.0
        optimizer.step()
        return state_of(model)

    assert_equal_everywhere(run_jobs(size, program))


def test_synchronize_inside_no_sync_is_refused() -> None:
    def program(job: Job) -> None:
        model = mlp()
        start(job, model)
        with no_sync(model), pytest.raises(ConfigurationError, match="inside no_sync"):
            synchronize(model)

    def alone(job: Job) -> None:
        model = mlp()
        start(job, model)
        with no_sync(model):
            synchronize(model)  # in a job of one there is nothing to combine

    run_jobs(SIZE, program)
    run_jobs(1, alone)


def test_synchronize_over_a_mean_that_nobody_has_used_is_refused_on_all() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model, SIGN)
        backward(model, job)
        if job.rank == 1:
            optimizer.zero_grad()
        with no_sync(model):
            backward(model, job, 1)
        with pytest.raises(ConfigurationError, match="on rank 0 p.grad still holds the mean"):
            synchronize(model)

    run_jobs(SIZE, program)


def test_synchronize_leaves_kept_gradients_alone_and_shares_buffers() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()

    def program(job: Job) -> dict[str, Tensor]:
        model = seeded(make)
        optimizer = start(job, model)
        kept: list[tuple[Tensor, Tensor]] = []
        for step in range(3):
            accumulated(model, job)
            synchronize(model)
            gradient = next(model.parameters()).grad
            assert gradient is not None
            kept.append((gradient, gradient.clone()))
            optimizer.step()
            optimizer.zero_grad()
            assert all(torch.equal(old, copied) for old, copied in kept), step
        return state_of(model)  # with the statistics of BatchNorm, which differ unless they are shared

    assert_equal_everywhere(run_jobs(SIZE, program))


def test_a_round_of_a_worker_without_data_leaves_kept_gradients_alone() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model)
        with join(model):
            for step in range(3 if job.rank else 1):
                backward(model, job, step)
                gradient = next(model.parameters()).grad
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    assert gradient is not None
                    kept, copied = gradient, gradient.clone()
        assert torch.equal(kept, copied)

    run_jobs(SIZE, program)


def test_sparse_gradients_that_nobody_combined_are_refused_too() -> None:
    def program(job: Job) -> None:
        model = seeded(lambda: nn.Embedding(5, 2, sparse=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        distribute(model, optimizer, RING, job=job)
        with no_sync(model):
            model(torch.tensor([job.rank])).sum().backward()
        with pytest.raises(ConfigurationError, match="under no_sync"):
            optimizer.step()

    run_jobs(SIZE, program)


# -- backwards --------------------------------------------------------------------------------------------------------


def test_a_backward_within_a_backward_belongs_to_the_outer_round() -> None:
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, losses: list[Tensor]) -> Tensor:
            ctx.losses = losses
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            torch.autograd.backward(ctx.losses)
            return gradients[0], None

    def program(job: Job) -> dict[str, Tensor | None]:
        model = mlp()
        start(job, model)
        inputs = Inner.apply(data(job.rank, 1).requires_grad_(), [loss_of(model, job)])  # type: ignore[no-untyped-call]
        model(inputs).pow(2).mean().backward()
        assert rounds(model) == 1
        both = {name: mean_gradients(range(SIZE))[name] + g for name, g in mean_gradients(range(SIZE), 1).items()}
        assert_gradients(model, both)
        return gradients_of(model)

    run_jobs(SIZE, program)


def test_a_second_backward_through_the_same_graph_broadcasts_no_buffers() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()

    def program(job: Job) -> list[int]:
        model = seeded(make)
        start(job, model)
        loss, sent = loss_of(model, job), [bytes_sent(job)]
        for _ in range(3):
            torch.autograd.backward(loss, retain_graph=True)
            sent.append(bytes_sent(job))
        return [after - before for before, after in zip(sent, sent[1:], strict=False)]

    for first, *others in run_jobs(SIZE, program):
        assert others == [first, first]


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch for CUDA runs no backward in a fork once its parent has")
def test_a_backward_in_a_forked_child_is_refused_at_once_also_with_compression() -> None:
    def program(job: Job) -> str:
        model = mlp()
        start(job, model, SIGN)
        refused: str = in_a_fork(lambda: refusal(lambda: backward(model, job)))
        take_step(model, job, engine_of(model).loop.optimizers[0])
        return refused

    [said] = run_jobs(1, program)
    assert "which was forked from rank 0" in said


@pytest.mark.processes
def test_a_signal_that_ends_one_workers_wait_is_told_to_all_in_the_next_round(preloaded: Preloaded, tmp_path: Path) -> None:
    for rank, said in enumerate(preloaded.launch(interrupted_once, 2, str(tmp_path))):
        assert said.startswith(f"{rank == 1}: ") and "1 rounds before it" in said and "0 rounds before it" in said


# -- changes of parameters --------------------------------------------------------------------------------------------


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_parameters_that_were_swapped_by_a_conversion_are_combined(swapping: None) -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        optimizer = start(job, model)
        take_step(model, job, optimizer)
        with converting:
            model.float()
        take_step(model, job, optimizer, step=1)
        assert rounds(model) == 2
        return state_of(model)

    converting = threading.Lock()
    assert_equal_everywhere(run_jobs(SIZE, program))


def test_a_matrix_that_was_transposed_in_place_is_combined_as_it_is_now() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model: Any = seeded(lambda: nn.Sequential(nn.Linear(4, 3, bias=False)).double())
        optimizer = start(job, model)
        take_step(model, job, optimizer)
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
        take_step(model, job, optimizer, step=1)
        assert engine_of(model).buckets[-1].views[0].stride() == (1, 3)
        return state_of(model)

    assert_equal_everywhere(run_jobs(SIZE, program))


# -- copies -----------------------------------------------------------------------------------------------------------


def test_a_traced_graph_that_is_distributed_can_be_copied_and_pickled() -> None:
    """It copies its `__dict__` itself, and asks nobody what to leave out."""

    def program(job: Job) -> dict[str, Tensor]:
        job.tracer = Tracer(job.rank)
        with tracing:
            model = fx.symbolic_trace(mlp())
        optimizer = start(job, model)
        take_step(model, job, optimizer)
        with tracing:
            copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))]
        for plain in copies:
            before = rounds(model)
            torch.autograd.backward(loss_of(plain, job))
            assert rounds(model) == before and release(plain) is plain
        take_step(model, job, optimizer, step=1)
        assert rounds(model) == 2
        return state_of(model)

    tracing = OneAtATime(SIZE)
    assert_equal_everywhere(run_jobs(SIZE, program))


# -- compiled models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", ["before", "after"])
def test_a_compiled_model_has_the_names_of_a_plain_one_and_can_be_saved_loaded_and_joined(compiled: str, tmp_path: Path) -> None:
    path = tmp_path / "c.pt"

    def make(job: Job) -> tuple[Any, torch.optim.Optimizer]:
        model: Any = mlp()
        if compiled == "before":
            model = torch.compile(model, backend="eager")
            return model, start(job, model)
        optimizer = start(job, model)
        return torch.compile(model, backend="eager"), optimizer

    def program(job: Job) -> dict[str, Tensor]:
        model, optimizer = make(job)
        with tracing:
            model(data(0))
        with join(model):
            for step in range(1 + job.rank):
                take_step(model, job, optimizer, step=step)
        save(path, model, optimizer)
        return state_of(model._orig_mod)

    def resume(job: Job, wrapped: bool) -> dict[str, Tensor]:
        model, optimizer = make(job) if wrapped else (plain := mlp(3), start(job, plain))
        load(path, model, optimizer)
        return state_of(getattr(model, "_orig_mod", model))

    tracing = OneAtATime(SIZE)
    torch.compile(nn.Linear(1, 1), backend="eager")(torch.ones(1, 1))  # what torch starts on the way is not a rank's
    saved = run_jobs(SIZE, program)
    assert list(torch.load(path, weights_only=True)["model"]) == list(mlp().state_dict())
    assert_equal_everywhere([*saved, *run_jobs(SIZE, resume, True), *run_jobs(SIZE, resume, False)])


def test_workers_that_are_not_at_the_same_step_save_nothing(tmp_path: Path) -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model)
        backward(model, job)
        if job.rank == 0:
            optimizer.step()
        with pytest.raises(CheckpointError, match=r"rank 0:.* a step of SGD\n.*rank 1:.* no step since then"):
            save(tmp_path / "c.pt", model, optimizer)

    run_jobs(SIZE, program)
    assert not (tmp_path / "c.pt").exists()
