"""Across the iteration barrier: every parameter is updated before it is read, and nobody can tell from the numbers."""

from __future__ import annotations

import copy
import gc
import io
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.worker import OneAtATime, Refusing, _mlp, assert_equal_everywhere, data, loss_of, mlp, seeded, state_of
from stretto import checkpoint
from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.all_reduce.planning import ROUNDS_BETWEEN, ROUNDS_TO_WATCH
from stretto.aggregate.all_reduce.training import SynchronousAllReduce
from stretto.aggregate.hierarchy import Hierarchy
from stretto.api import _leave_at_exit
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.top_k import TopK
from stretto.distributing import distribute, engine_of, join, no_sync, release, save_profile, synchronize
from stretto.engine.gradient_under_way import GradientUnderWay
from stretto.engine.per_parameter import check_per_parameter
from stretto.errors import BackwardFailed, ConfigurationError, PeerLost, StrettoError
from stretto.job import Job
from stretto.observe.trace import Tracer
from stretto.plan.profile import StepProfile
from stretto.plan.transfers import Gradient, TransferPlan
from stretto.schedule.caramel import Caramel
from stretto.schedule.merged import Merged
from stretto.schedule.orders import AfterBackward, WaitFree
from stretto.schedule.priority import Priority
from stretto.schedule.tictac import Tac, Tic
from stretto.strategy import Strategy
from stretto.testing import run_jobs


class Separately(Priority):
    """Each module's parameters by themselves, whatever the times: nothing is measured, and no two modules wait for each other."""

    __slots__ = ()

    @property
    def needs_profile(self) -> bool:
        return False

    def plan(self, gradients: Sequence[Gradient], profile: StepProfile | None) -> TransferPlan:
        return super().plan(gradients, None)


RING = AllReduce("ring")
CROSSING = Strategy(aggregate=RING, schedule=Separately(partition=64, credit=64))
BARRIER = Strategy(aggregate=RING, schedule=WaitFree())
WATCHED = 1  # without anything to measure, one round shows who reads which parameter
STEPS = ROUNDS_TO_WATCH + 4
MakeOptimizer = Callable[[Any], Optimizer]


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def crossing_of(model: nn.Module) -> Any:
    return cast(SynchronousAllReduce, engine_of(model).training)._crossing


def begin(job: Job, model: nn.Module, strategy: Strategy = CROSSING, make: MakeOptimizer = sgd) -> Optimizer:
    """Distributed, and past the rounds in which it is only watched."""
    optimizer = make(model.parameters())
    distribute(model, optimizer, strategy, job=job)
    for step in range(WATCHED):
        torch.autograd.backward(loss_of(model, job, step))
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def train(job: Job, strategy: Strategy, build: Callable[[], nn.Module], make: MakeOptimizer, steps: int) -> dict[str, Tensor]:
    model = seeded(build)
    optimizer = make(model.parameters())
    distribute(model, optimizer, strategy, job=job)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    for step in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, job, step))
        assert (step < WATCHED) == crossing_of(model).is_over
        optimizer.step()
        scheduler.step()
    return state_of(model)


def compare(
    size: int,
    strategy: Strategy,
    reference: Strategy,
    build: Callable[[], nn.Module] = _mlp,
    make: MakeOptimizer = sgd,
    hosts: Sequence[str] | None = None,
) -> None:
    """The same weights as with the barrier: to the last bit between two workers; with more, notes that ride with the gradients
    change where a ring cuts them, and so the order of additions."""

    def with_barrier(job: Job) -> dict[str, Tensor]:
        model = seeded(build)
        optimizer = make(model.parameters())
        distribute(model, optimizer, reference, job=job)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        for step in range(STEPS):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, job, step))
            optimizer.step()
            scheduler.step()
        return state_of(model)

    expected = run_jobs(size, with_barrier, hosts=hosts)
    found = run_jobs(size, train, strategy, build, make, STEPS, hosts=hosts)
    assert_same(expected, found)


def assert_same(expected: list[dict[str, Tensor]], found: list[dict[str, Tensor]]) -> None:
    assert_equal_everywhere(found)
    if len(expected) == 2:
        assert_equal_everywhere([expected[0], found[0]])
    for name, value in expected[0].items():
        tolerance = 1e-12 if value.dtype is torch.float64 else 1e-5
        torch.testing.assert_close(found[0][name], value, rtol=tolerance, atol=tolerance)


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


# -- what cannot be done ----------------------------------------------------------------------------------------------


def test_gradients_on_their_way_cannot_be_read() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = begin(job, model)
        other = loss_of(model, job, 1)
        torch.autograd.backward(loss_of(model, job, WATCHED))
        reads: list[Callable[[], Any]] = [
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: [p.grad.norm() for p in model.parameters() if p.grad is not None],
            lambda: torch.autograd.backward(other),  # a second one before the step
        ]
        for read in reads:
            with pytest.raises(ConfigurationError, match=r"on its way.*\n.*optimizer.synchronize\(\)"):
                read()
        optimizer.zero_grad()

    run_jobs(2, program)


class ClippedSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


class Unusual(torch.optim.SGD):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), r"LBFGS.*closure"),
        (lambda model: ClippedSGD(model.parameters(), lr=0.1), "differently if others step with it"),
        (lambda model: Counting(model.parameters(), lr=0.1), "param_groups"),
        (Unusual, "could not be found out"),
    ],
)
def test_optimizers_that_need_all_gradients_are_refused_on_all_workers(make: Callable[..., Optimizer], words: str) -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = make(model) if job.rank == 1 else sgd(model.parameters())
        with pytest.raises(ConfigurationError, match=words):
            distribute(model, optimizer, CROSSING, job=job)

    run_jobs(2, program)


@pytest.mark.parametrize("name", ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "Rprop"])
def test_the_optimizers_of_torch_update_each_parameter_by_itself(name: str) -> None:
    check_per_parameter(getattr(torch.optim, name)(mlp().parameters(), lr=0.1), "cross_barrier=True")


def test_complex_parameters_can_be_tried_out_too() -> None:
    check_per_parameter(torch.optim.Adam([torch.ones(2, dtype=torch.complex64, requires_grad=True)]), "cross_barrier=True")


def test_what_does_not_go_with_crossing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"native.*(.|\n)*AllReduce\(\)"):
        Strategy(aggregate=AllReduce("native"), schedule=Priority())

    def program(job: Job) -> None:
        model = mlp()
        with pytest.raises(ConfigurationError, match="check_finite=True"):
            distribute(model, sgd(model.parameters()), CROSSING, job=job, check_finite=True)
        begin(job, model)
        with pytest.raises(ConfigurationError, match=r"join with schedule=Separately"), join(model):
            pass

    run_jobs(2, program)


class CallsSuper(torch.optim.SGD):
    """torch gives `step` of the subclass and of SGD hooks of their own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Refusal(Exception):
    pass


def refused_by_a_hook(optimizer: Optimizer, *_: Any) -> None:
    raise Refusal


def halve(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)


def clamp(optimizer: Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.clamp_(-0.3, 0.3)


def step_of(kind: str, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if kind == "refused in every second step":
        hook = optimizer.register_step_pre_hook(refused_by_a_hook)
        if step % 2:
            with pytest.raises(Refusal):
                optimizer.step()
        hook.remove()
        if step % 2:
            return
    if kind == "another optimizer that clips" and step % 2:
        ClippedSGD(model.parameters(), lr=0.1).step()
        return
    optimizer.step()
    if kind == "converted there and back":
        model.float().double()
    if kind == "a module's state is loaded":
        first = list(model.children())[0]
        first.load_state_dict({name: value / 2 for name, value in first.state_dict().items()})


@pytest.mark.parametrize(
    "kind",
    [
        "a subclass that calls super",
        "refused in every second step",
        "halved by a hook",
        "clamped by a hook",
        "another optimizer that clips",
        "converted there and back",
        "a module's state is loaded",
        "weight_norm",
    ],
)
def test_whatever_happens_around_a_step_happens_in_its_order(kind: str) -> None:
    def program(job: Job, strategy: Strategy) -> dict[str, Tensor]:
        model = mlp()
        if kind == "weight_norm":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                nn.utils.weight_norm(model[0])  # its own hook reads the parameters before the module does
        optimizer = begin(job, model, strategy, lambda ps: CallsSuper(ps, lr=0.1, momentum=0.9))
        if kind == "halved by a hook":
            optimizer.register_step_pre_hook(halve)
        if kind == "clamped by a hook":
            optimizer.register_step_post_hook(clamp)
        for step in range(4):
            torch.autograd.backward(loss_of(model, job, step))
            step_of(kind, model, optimizer, step)
            optimizer.zero_grad()
        return state_of(model)

    torch.optim.SGD([torch.zeros(1)])  # from now on its `step` has hooks
    assert_equal_everywhere([*run_jobs(2, program, BARRIER), *run_jobs(2, program, CROSSING)])


def test_weights_changed_by_hand_before_their_update_are_refused() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = begin(job, model)
        for synchronised in (True, False):
            torch.autograd.backward(loss_of(model, job, 1))
            optimizer.step()
            optimizer.zero_grad()
            if synchronised:
                synchronize(model)
            clamp(optimizer)
            if synchronised:
                model(data(job.rank))
            else:
                with pytest.raises(ConfigurationError, match=r"was changed between optimizer.step\(\) and the next forward"):
                    model(data(job.rank))

    run_jobs(2, program)


def test_transforms_in_which_nothing_can_be_updated_are_refused() -> None:
    tracing = OneAtATime(2)

    def program(job: Job) -> None:
        model = mlp()
        optimizer = begin(job, model)
        torch.autograd.backward(loss_of(model, job, 1))
        optimizer.step()
        transforms: list[Callable[[], Any]] = [
            lambda: torch.func.vmap(model)(data(0)),
            lambda: torch.jit.trace(model, data(0)),  # type: ignore[no-untyped-call]
        ]
        for transform in transforms:
            with (
                tracing,
                warnings.catch_warnings(),
                pytest.raises(ConfigurationError, match=r"traced or transformed(.|\n)*stretto.synchronize"),
            ):
                warnings.simplefilter("ignore", DeprecationWarning)
                transform()
        synchronize(model)
        with tracing:
            torch.func.vmap(model)(data(0))

    run_jobs(2, program)


def test_hosts_with_different_numbers_of_workers_plan_together() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        optimizer = sgd(model.parameters())
        distribute(model, optimizer, Strategy(aggregate=Hierarchy(outer=RING), schedule=Priority()), job=job)
        for step in range(STEPS):
            torch.autograd.backward(loss_of(model, job, step))
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    assert_equal_everywhere(run_jobs(3, program, hosts=["a", "a", "b"]))


def test_copies_are_plain() -> None:
    def program(job: Job) -> None:
        model = mlp()
        begin(job, model)
        file = io.BytesIO()
        torch.save(model, file)
        assert b"stretto" not in file.getvalue()
        for module in copy.deepcopy(model).modules():
            hooks = (module._forward_pre_hooks, module._state_dict_pre_hooks, module._load_state_dict_pre_hooks)
            assert not any(hooks) and "_apply" not in module.__dict__

    run_jobs(2, program)


def test_a_module_that_is_kept_keeps_neither_the_model_nor_its_engine() -> None:
    collecting = threading.Lock()

    def program(job: Job) -> None:
        model = mlp()
        optimizer = begin(job, model)
        kept, engine = model[0], weakref.ref(engine_of(model))
        del model, optimizer
        with collecting:  # a second thread that collects at the same time does nothing
            gc.collect()
        assert engine() is None
        kept(data(0))

    run_jobs(2, program)


def test_released_while_it_is_watched_no_hook_is_left() -> None:
    def program(job: Job) -> None:
        model = mlp()
        distribute(model, sgd(model.parameters()), Strategy(aggregate=RING, schedule=Priority()), job=job)
        release(model)
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())

    run_jobs(2, program)


class LateReader(nn.Module):
    """After a while it reads the weight of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.by_hand = False
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hand:
            return torch.tanh(x) @ self.second.weight.t()
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


def test_a_weight_that_was_read_too_early_gives_nobody_a_step() -> None:
    def program(job: Job) -> None:
        model: LateReader = seeded(LateReader)
        optimizer = begin(job, model)
        torch.autograd.backward(loss_of(model, job, WATCHED))
        optimizer.step()
        optimizer.zero_grad()
        model.by_hand = job.rank == 1
        if job.rank == 1:
            with pytest.raises(ConfigurationError, match=r"has read second.weight before it was brought up to date"):
                torch.autograd.backward(loss_of(model, job, WATCHED + 1))
            optimizer.zero_grad()
        else:
            with pytest.raises(BackwardFailed, match="1"):
                torch.autograd.backward(loss_of(model, job, WATCHED + 1))
        model.by_hand = False
        kept = state_of(model)  # on rank 1 this also tells the others, which wait for it
        synchronize(model)
        model.by_hand = True
        torch.autograd.backward(loss_of(model, job, WATCHED + 2))
        optimizer.step()
        assert not torch.equal(kept["second.weight"], state_of(model)["second.weight"])

    run_jobs(2, program)


class OneTransfer(Separately):
    """All parameters together: the first module that is called brings all of them up to date."""

    __slots__ = ()

    def plan(self, gradients: Sequence[Gradient], profile: StepProfile | None) -> TransferPlan:
        return AfterBackward().plan(gradients, None)


class Regularised(LateReader):
    """Adds a weight up by hand, before any module is called; autograd keeps nothing of it."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_hand:
            return super().forward(x)
        total = self.second.weight.sum()
        out: Tensor = self.first(x) + total
        return out


def test_a_weight_that_was_updated_after_it_was_read_by_hand_is_noticed() -> None:
    def program(job: Job) -> None:
        model: Regularised = seeded(Regularised)
        optimizer = begin(job, model, Strategy(aggregate=RING, schedule=OneTransfer()))
        torch.autograd.backward(loss_of(model, job, WATCHED))
        optimizer.step()
        optimizer.zero_grad()
        model.by_hand = True
        with pytest.raises(ConfigurationError, match=r"has read second.weight before it was brought up to date"):
            torch.autograd.backward(loss_of(model, job, WATCHED + 1))
        assert crossing_of(model).is_over

    run_jobs(2, program)


def test_a_program_that_ends_waits_for_its_last_step() -> None:
    """Others may need the messages of this worker to take theirs."""

    def program(job: Job) -> None:
        model = mlp()
        optimizer = begin(job, model)
        torch.autograd.backward(loss_of(model, job, WATCHED))
        optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
        assert not crossing_of(model).is_over
        _leave_at_exit(job)
        assert crossing_of(model).is_over and not any(map(torch.equal, before, model.parameters()))

    run_jobs(2, program)


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_backward_that_fails_gives_nobody_a_step() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        optimizer = begin(job, model)
        torch.autograd.backward(loss_of(model, job, WATCHED))
        optimizer.step()
        optimizer.zero_grad()
        loss = loss_of(model, job, WATCHED + 1)
        if job.rank == 1:
            failing = model(Refusing.apply(data(1).requires_grad_()))  # type: ignore[no-untyped-call]
            with pytest.raises(RuntimeError, match="this backward cannot go on"):
                torch.autograd.backward(failing.sum())
            optimizer.zero_grad()
            model(data(1))  # closes the round
        else:
            with pytest.raises(BackwardFailed, match="1"):
                torch.autograd.backward(loss)
        kept = state_of(model)
        optimizer.step()
        assert_equal_everywhere([kept, state_of(model)])
        torch.autograd.backward(loss_of(model, job, WATCHED + 2))
        optimizer.step()
        return state_of(model)

    assert_equal_everywhere(run_jobs(3, program))


def test_a_peer_that_is_lost_under_the_forward_is_named_there_and_at_every_later_use(tmp_path: Any) -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = begin(job, model)
        checkpoint.save(tmp_path / "saved", model, optimizer, job=job)
        kept = state_of(model)
        torch.autograd.backward(loss_of(model, job, WATCHED))
        optimizer.step()
        training = cast(SynchronousAllReduce, engine_of(model).training)
        wait = training._wait

        def failing(buckets: Any) -> None:
            raise PeerLost(1, "as the test has it")

        training._wait = failing  # type: ignore[method-assign]
        with pytest.raises(PeerLost, match="as the test has it"):
            model(data(job.rank))
        training._wait = wait  # type: ignore[method-assign]
        for use in (lambda: model(data(job.rank)), model.state_dict, lambda: synchronize(model)):
            with pytest.raises(StrettoError, match=r"some parameters and not for others(.|\n)*as the test has it"):
                use()
        checkpoint.load(tmp_path / "saved", model, optimizer, job=job)
        assert_equal_everywhere([kept, state_of(model)])
        torch.autograd.backward(loss_of(model, job, WATCHED))
        optimizer.step()
        model(data(job.rank))

    run_jobs(2, program)


def test_an_interrupt_while_a_gradient_is_waited_for_loses_nothing() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        optimizer = begin(job, model)
        training = cast(SynchronousAllReduce, engine_of(model).training)
        torch.autograd.backward(loss_of(model, job, WATCHED))
        optimizer.step()
        if job.rank == 0:
            wait = training._wait

            def interrupted(buckets: Any) -> None:
                training._wait = wait  # type: ignore[method-assign]
                raise KeyboardInterrupt

            training._wait = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                model(data(0))
        return state_of(model)

    assert_equal_everywhere(run_jobs(2, program))


def test_an_update_that_fails_is_not_forgotten() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = begin(job, model)
        torch.autograd.backward(loss_of(model, job, WATCHED))
        optimizer.step()
        crossing = crossing_of(model)
        assert crossing._steps

        def out_of_memory(gradients: Any) -> None:
            raise RuntimeError("out of memory")

        crossing._steps[0].take = out_of_memory
        with pytest.raises(RuntimeError, match="out of memory"):
            model(data(job.rank))
        with pytest.raises(StrettoError, match=r"some parameters and not for others(.|\n)*out of memory"):
            model(data(job.rank))

    run_jobs(2, program)


def test_a_killed_worker_ends_the_forward_of_the_others() -> None:
    everybody = threading.Barrier(3, timeout=60)

    def program(job: Job) -> None:
        model = mlp()
        optimizer = begin(job, model)
        everybody.wait()
        if job.rank == 1:
            assert job.wire is not None
            job.wire.kill()  # type: ignore[attr-defined]
            return
        with pytest.raises(PeerLost) as lost:
            for step in range(3):
                torch.autograd.backward(loss_of(model, job, step))
                optimizer.step()
        assert lost.value.rank == 1

    run_jobs(3, program)
