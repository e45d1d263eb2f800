"""Across the iteration barrier: every parameter is updated before it is read, and nobody can tell from the numbers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.crossing import (
    BARRIER,
    CROSSING,
    RING,
    STEPS,
    WATCHED,
    MakeOptimizer,
    assert_same,
    begin,
    compare,
    crossing_of,
    sgd,
)
from engine.worker import _mlp, assert_equal_everywhere, data, loss_of, mlp, seeded, state_of
from stretto import checkpoint
from stretto.aggregate.all_reduce.planning import ROUNDS_BETWEEN, ROUNDS_TO_WATCH
from stretto.aggregate.all_reduce.training import SynchronousAllReduce
from stretto.aggregate.hierarchy import Hierarchy
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.top_k import TopK
from stretto.distributing import distribute, engine_of, no_sync, release, save_profile, synchronize
from stretto.engine.gradient_under_way import GradientUnderWay
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.observe.trace import Tracer
from stretto.schedule.caramel import Caramel
from stretto.schedule.merged import Merged
from stretto.schedule.orders import WaitFree
from stretto.schedule.priority import Priority
from stretto.schedule.tictac import Tac, Tic
from stretto.strategy import Strategy
from stretto.testing import run_jobs

# -- the same numbers -------------------------------------------------------------------------------------------------


SCHEDULES = (Priority(), Priority(partition=100, credit=100), Tic(), Tac(), Caramel(), Caramel(cross_barrier=False), Merged())


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_weights_are_those_of_training_with_the_barrier_whatever_the_plan(schedule: Any) -> None:
    def program(job: Job, schedule: Any) -> dict[str, Tensor]:
        model = mlp()
        optimizer = sgd(model.parameters())
        distribute(model, optimizer, Strategy(aggregate=RING, schedule=schedule), job=job)
        for step in range(STEPS):
            torch.autograd.backward(loss_of(model, job, step))
            optimizer.step()
            optimizer.zero_grad()
        planner = cast(SynchronousAllReduce, engine_of(model).training)._planner
        assert planner is not None and planner.plan is not None and planner.plan.schedule == repr(schedule)
        assert (planner.profile is not None) == schedule.needs_profile and not planner.is_watching
        return state_of(model)

    assert_same(run_jobs(2, program, WaitFree()), run_jobs(2, program, schedule))


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_weights_are_those_of_training_with_the_barrier(size: int) -> None:
    compare(size, CROSSING, BARRIER)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "Adam, foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    "two groups": lambda parameters: _in_two_groups(list(parameters)),
}


def _in_two_groups(parameters: list[Tensor]) -> Optimizer:
    return torch.optim.AdamW([{"params": parameters[:3], "lr": 0.02}, {"params": parameters[3:], "weight_decay": 0.1}], lr=0.01)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_any_optimizer_that_updates_each_parameter_by_itself_will_do(name: str) -> None:
    compare(2, CROSSING, BARRIER, make=OPTIMIZERS[name])


@pytest.mark.parametrize("codec", [ErrorFeedback(TopK(0.2)), ErrorFeedback(PowerSGD(1))], ids=repr)
def test_compressed_gradients_cross_too(codec: Any) -> None:
    def build() -> nn.Module:
        return _mlp().float()

    crossing, barrier = (Strategy(schedule=schedule, compress=codec) for schedule in (CROSSING.schedule, WaitFree()))
    compare(3, crossing, barrier, build=build)


def test_two_levels_cross_too() -> None:
    levels = Hierarchy(outer=RING)
    crossing, barrier = (Strategy(aggregate=levels, schedule=schedule) for schedule in (CROSSING.schedule, WaitFree()))
    compare(4, crossing, barrier, hosts=["a", "a", "b", "b"])


class Attention(nn.Module):
    """Its `out_proj` is never called: torch reads the weight itself. `tied` is read by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)
        self.tied = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.tied.weight
        self.scale = nn.Parameter(torch.ones(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unsqueeze(0)
        mixed, _ = self.inner(rows, rows, rows)
        out: Tensor = self.again(torch.tanh(self.tied(mixed))) * self.scale
        return out


def test_parameters_that_another_module_reads_are_waited_for_there() -> None:
    compare(2, CROSSING, BARRIER, build=Attention)


class ByMethod(nn.Module):
    """Nothing in it is a module that is called: parameters are read by the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(x @ self.first.weight.t() + self.first.bias) @ self.second.weight.t() + self.second.bias
        return out


def test_a_model_that_calls_none_of_its_modules_waits_when_it_is_called() -> None:
    compare(2, CROSSING, BARRIER, build=ByMethod)


# -- when what is waited for ------------------------------------------------------------------------------------------


def test_a_module_waits_for_its_own_parameters_and_no_others() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = begin(job, model)
        before = [p.detach().clone() for p in model.parameters()]
        torch.autograd.backward(loss_of(model, job, WATCHED))
        assert all(isinstance(p.grad, GradientUnderWay) for p in model.parameters())
        optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
        crossing_of(model)._use_the_wait_for = lambda bucket: None  # else others are updated too that have arrived meanwhile
        model[0](data(job.rank))
        moved = [not torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True)]
        assert moved == [True, True, False, False, False, False]
        model(data(job.rank))
        assert crossing_of(model).is_over and all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    run_jobs(2, program)


LOOKS: dict[str, Callable[[nn.Module, Optimizer, Job], dict[str, Tensor]]] = {
    "state_dict": lambda model, optimizer, job: state_of(model),
    "optimizer.state_dict": lambda model, optimizer, job: _after(optimizer.state_dict, model),
    "deepcopy": lambda model, optimizer, job: _raw(copy.deepcopy(model)),
    "torch.save": lambda model, optimizer, job: _saved(model),
    "evaluation": lambda model, optimizer, job: _evaluated(model, job),
    "inference mode": lambda model, optimizer, job: _inferred(model, job),
    "synchronize(model)": lambda model, optimizer, job: _after(lambda: synchronize(model), model),
    "optimizer.synchronize": lambda model, optimizer, job: _after(optimizer.synchronize, model),  # type: ignore[attr-defined]
    "release": lambda model, optimizer, job: _raw(release(model)),
}


def _after(look: Callable[[], object], model: nn.Module) -> dict[str, Tensor]:
    look()
    return _raw(model)


def _raw(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _saved(model: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return _raw(torch.load(file, weights_only=False))


def _evaluated(model: nn.Module, job: Job) -> dict[str, Tensor]:
    model.eval()
    with torch.no_grad():
        model(data(job.rank))
    return _raw(model.train())


def _inferred(model: nn.Module, job: Job) -> dict[str, Tensor]:
    with torch.inference_mode(), torch.autocast("cpu"):
        model(data(job.rank))
    return _raw(model)


@pytest.mark.parametrize("look", list(LOOKS))
def test_whoever_looks_sees_the_step_taken(look: str) -> None:
    def program(job: Job, strategy: Strategy) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = mlp()
        optimizer = begin(job, model, strategy, make=lambda ps: torch.optim.AdamW(ps, lr=0.01))
        torch.autograd.backward(loss_of(model, job, WATCHED))
        optimizer.step()
        optimizer.zero_grad()
        seen = LOOKS[look](model, optimizer, job)
        if look != "release":  # and training goes on as ever
            torch.autograd.backward(loss_of(model, job, WATCHED + 1))
            optimizer.step()
        return seen, state_of(model)

    expected, found = (run_jobs(2, program, strategy) for strategy in (BARRIER, CROSSING))
    for part in range(2):
        assert_equal_everywhere([each[part] for each in (*expected, *found)])


def test_what_is_loaded_is_not_stepped_by_what_came_before() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = begin(job, model)
        kept, kept_optimizer = state_of(model), copy.deepcopy(optimizer.state_dict())
        torch.autograd.backward(loss_of(model, job, WATCHED))
        optimizer.step()
        model.load_state_dict(kept)
        optimizer.load_state_dict(kept_optimizer)
        assert_equal_everywhere([kept, state_of(model)])

    run_jobs(2, program)


def test_saving_and_going_on_from_there(tmp_path: Any) -> None:
    def program(job: Job) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = mlp()
        optimizer = begin(job, model)
        for step in range(2):
            torch.autograd.backward(loss_of(model, job, step))
            optimizer.step()
            optimizer.zero_grad()
        checkpoint.save(tmp_path / "saved", model, optimizer, job=job)
        torch.autograd.backward(loss_of(model, job, 2))
        optimizer.step()
        optimizer.zero_grad()
        first = state_of(model)
        checkpoint.load(tmp_path / "saved", model, optimizer, job=job)
        torch.autograd.backward(loss_of(model, job, 2))
        optimizer.step()
        return first, state_of(model)

    for first, second in run_jobs(2, program):
        assert_equal_everywhere([first, second])


def test_with_the_same_profile_a_run_that_is_resumed_has_the_same_bits(tmp_path: Any) -> None:
    """Without it plans, and with them the order of additions, follow what each run has measured."""
    strategy = Strategy(aggregate=RING, schedule=Priority())

    def watch(job: Job) -> None:
        model = mlp()
        distribute(model, sgd(model.parameters()), strategy, job=job)
        with pytest.raises(ConfigurationError, match=r"no step of this Sequential has been measured.*after 0 rounds"):
            save_profile(model, tmp_path / "profile.json")
        for step in range(ROUNDS_TO_WATCH):
            torch.autograd.backward(loss_of(model, job, step))
        save_profile(model, tmp_path / "profile.json")

    def program(job: Job, steps: range) -> dict[str, Tensor]:
        model = mlp(seed=steps.start)
        optimizer = sgd(model.parameters())
        profile = tmp_path / ("profile.json" if job.rank == 0 else "only rank 0 reads it")
        distribute(model, optimizer, strategy, job=job, profile=profile)
        if steps.start:
            checkpoint.load(tmp_path / "saved", model, optimizer, job=job)
        for step in steps:
            torch.autograd.backward(loss_of(model, job, step))
            optimizer.step()
            optimizer.zero_grad()
        checkpoint.save(tmp_path / "saved", model, optimizer, job=job)
        return state_of(model)

    run_jobs(3, watch)
    whole = run_jobs(3, program, range(6))
    run_jobs(3, program, range(3))
    assert_equal_everywhere([*whole, *run_jobs(3, program, range(3, 6))])


def test_a_profile_of_something_else_is_refused_on_all_workers(tmp_path: Any) -> None:
    path = tmp_path / "profile.json"

    def watch(job: Job) -> None:
        model = mlp()
        distribute(model, sgd(model.parameters()), Strategy(schedule=Merged()), job=job)
        for step in range(ROUNDS_TO_WATCH):
            torch.autograd.backward(loss_of(model, job, step))
        save_profile(model, path)

    def refused(job: Job, build: Callable[[], nn.Module], schedule: Any, words: str) -> None:
        model = build()
        with pytest.raises(ConfigurationError, match=words):
            distribute(model, sgd(model.parameters()), Strategy(schedule=schedule), job=job, profile=path)

    run_jobs(2, watch)
    run_jobs(2, refused, lambda: nn.Linear(4, 4), Merged(), "a profile of Sequential .* for Linear")
    run_jobs(3, refused, mlp, Merged(), "on 2 workers for a job of 3")
    run_jobs(2, refused, mlp, WaitFree(), "plans nothing by measured times")
    path.write_text(path.read_text()[:100])
    run_jobs(2, refused, mlp, Merged(), "not a profile that stretto has saved")


# -- loops that are not the plain one ---------------------------------------------------------------------------------


def clipped(model: nn.Module, optimizer: Optimizer, job: Job, step: int) -> None:
    torch.autograd.backward(loss_of(model, job, step))
    optimizer.synchronize()  # type: ignore[attr-defined]
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


def accumulated(model: nn.Module, optimizer: Optimizer, job: Job, step: int) -> None:
    with no_sync(model):
        torch.autograd.backward(loss_of(model, job, step))
    torch.autograd.backward(loss_of(model, job, step + 100))
    optimizer.step()
    optimizer.zero_grad()


def accumulated_to_the_end(model: nn.Module, optimizer: Optimizer, job: Job, step: int) -> None:
    with no_sync(model):
        torch.autograd.backward(loss_of(model, job, step))
    synchronize(model)
    optimizer.step()
    optimizer.zero_grad()


def zeroed_in_place(model: nn.Module, optimizer: Optimizer, job: Job, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    torch.autograd.backward(loss_of(model, job, step))
    optimizer.step()


def never_zeroed(model: nn.Module, optimizer: Optimizer, job: Job, step: int) -> None:
    torch.autograd.backward(loss_of(model, job, step))
    optimizer.step()


def sometimes_not_stepped(model: nn.Module, optimizer: Optimizer, job: Job, step: int) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss_of(model, job, step))
    if step % 2:
        optimizer.step()


def dropped_before_the_step(model: nn.Module, optimizer: Optimizer, job: Job, step: int) -> None:
    torch.autograd.backward(loss_of(model, job, step))
    if step % 2:
        next(model.parameters()).grad = None
    optimizer.step()
    optimizer.zero_grad()


def evaluated_before_the_step(model: nn.Module, optimizer: Optimizer, job: Job, step: int) -> None:
    torch.autograd.backward(loss_of(model, job, step))
    with torch.no_grad():
        model(data(job.rank))
    optimizer.step()
    optimizer.zero_grad()


def with_a_closure(model: nn.Module, optimizer: Optimizer, job: Job, step: int) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, job, step)
        torch.autograd.backward(loss)
        return float(loss.detach())

    optimizer.step(closure)


def frozen_and_thawed(model: nn.Module, optimizer: Optimizer, job: Job, step: int) -> None:
    torch.autograd.backward(loss_of(model, job, step))
    optimizer.step()
    optimizer.zero_grad()
    list(model.children())[2].requires_grad_(step % 2 == 1)


LOOPS = (
    clipped, accumulated, accumulated_to_the_end, zeroed_in_place, never_zeroed, sometimes_not_stepped, dropped_before_the_step,
    evaluated_before_the_step, with_a_closure, frozen_and_thawed,
)  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops_of_all_kinds_do_what_they_do_with_the_barrier(loop: Callable[..., None]) -> None:
    def program(job: Job, strategy: Strategy) -> dict[str, Tensor]:
        model = mlp()
        optimizer = begin(job, model, strategy)
        for step in range(4):
            loop(model, optimizer, job, step)
        return state_of(model)

    assert_equal_everywhere([*run_jobs(2, program, BARRIER), *run_jobs(2, program, CROSSING)])


class Branching(nn.Module):
    """Which branch is taken depends on the rank and the step; `never` has no gradient anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.never = (nn.Linear(4, 4) for _ in range(4))
        self.turn = 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        branch = self.left if self.turn % 3 == 0 else self.right
        out: Tensor = branch(torch.tanh(self.first(x)))
        return out


def test_branches_that_only_some_workers_take() -> None:
    def program(job: Job, strategy: Strategy) -> dict[str, Tensor]:
        model: Branching = seeded(Branching)
        model.turn = job.rank
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        distribute(model, optimizer, strategy, job=job)
        for step in range(WATCHED + 6):
            torch.autograd.backward(loss_of(model, job, step))
            assert model.never.weight.grad is None
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    assert_same(run_jobs(3, program, BARRIER), run_jobs(3, program, CROSSING))


def test_parameters_that_are_used_now_and_then_travel_apart_from_others_on_all_workers_from_the_same_round_on() -> None:
    """The branch is drawn anew in every step, on every worker by itself, once the plan has been made."""

    def program(job: Job) -> tuple[dict[str, Tensor], list[list[str]], list[str]]:
        job.tracer = Tracer()
        model: Branching = seeded(Branching)
        optimizer = sgd(model.parameters())
        distribute(model, optimizer, Strategy(aggregate=RING, schedule=Merged()), job=job)
        draws = torch.Generator().manual_seed(job.rank)
        for step in range(ROUNDS_TO_WATCH + ROUNDS_BETWEEN + 2):
            model.turn = int(torch.randint(2, (), generator=draws)) + 1 if step >= ROUNDS_TO_WATCH else 0
            torch.autograd.backward(loss_of(model, job, step))
            optimizer.step()
            optimizer.zero_grad()
        events = [span.name for span in job.tracer.spans if span.category == "plan"]
        return state_of(model), [bucket.names for bucket in engine_of(model).buckets], events

    results = run_jobs(3, program)
    assert_equal_everywhere([state for state, _, _ in results])
    for _, buckets, events in results:
        assert buckets == results[0][1] and events == ["the graph has changed: 4 parameters travel apart from now on"]
        apart = [set(names) for names in buckets if any(name.startswith(("left", "right")) for name in names)]
        assert set().union(*apart) == {"left.weight", "left.bias", "right.weight", "right.bias"}


def test_rows_of_an_embedding_are_stepped_at_once_and_the_rest_crosses() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)).double()

    def program(job: Job, strategy: Strategy) -> dict[str, Tensor]:
        model = seeded(build)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        distribute(model, optimizer, strategy, job=job)
        for step in range(STEPS):
            model(torch.tensor([step % 10, job.rank])).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    assert_equal_everywhere([*run_jobs(2, program, BARRIER), *run_jobs(2, program, CROSSING)])
