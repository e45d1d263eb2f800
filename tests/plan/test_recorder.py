"""Recording steps: what is timed, to whom it is counted, who reads which parameter, and what does not count.

Times are exact here: a clock that stands still except where a layer says that it takes time.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stretto.distributing import distribute
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.plan import recorder as recorder_module
from stretto.plan.profile import StepProfile, TransferCost
from stretto.plan.profile_file import check, load, save
from stretto.plan.recorded_step import ModelParts
from stretto.plan.recorder import KEPT, StepRecorder
from stretto.plan.step_clock import CudaClock, HostClock, clock_for
from stretto.testing import run_jobs

COST = TransferCost(start_s=1e-4, per_byte_s=1e-9)


class Standing:
    """A clock that is moved by hand, in seconds."""

    now = 0.0
    on = True

    def runs(self) -> bool:
        return self.on

    def mark(self) -> float:
        return self.now

    def settle(self) -> None:
        pass

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Standing, forward_s: float, backward_s: float) -> Tensor:
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.now += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.clock.now += ctx.backward_s
        return gradients[0], None, None, None


class Layer(nn.Module):
    """x * weight, which takes a set time in forward and, before its gradient is there, in backward."""

    def __init__(self, clock: Standing, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.takes = (clock, forward_s, backward_s)

    def forward(self, x: Tensor) -> Tensor:
        return _Takes.apply(x * self.weight, *self.takes)  # type: ignore[no-any-return, no-untyped-call]


class Wait(nn.Module):
    """An activation that takes time and has no parameters."""

    def __init__(self, clock: Standing, forward_s: float, backward_s: float = 0.0) -> None:
        super().__init__()
        self.takes = (clock, forward_s, backward_s)

    def forward(self, x: Tensor) -> Tensor:
        return _Takes.apply(x, *self.takes)  # type: ignore[no-any-return, no-untyped-call]


X = torch.ones(2)


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(X).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def recorded(model: nn.Module, clock: Standing | None = None, steps: int = 3) -> tuple[StepRecorder, StepProfile]:
    with StepRecorder(model, clock=clock or HostClock()) as recorder:
        for _ in range(steps):
            step(model)
    return recorder, recorder.profile(cost=COST, world_size=2)


def in_forward(profile: StepProfile) -> dict[str, float]:
    return {module.name: round(module.forward_s, 9) for module in profile.modules}


def hooks_on(model: nn.Module) -> int:
    modules = sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_always_called) for m in model.modules()
    )
    return modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


# -- times ------------------------------------------------------------------------------------------------------------


def test_times_of_modules_gradients_and_updates_are_what_the_layers_take() -> None:
    clock = Standing()
    model = nn.Sequential(Layer(clock, 1, 10), nn.Sequential(Wait(clock, 0.5), Layer(clock, 2, 20)), Layer(clock, 3, 30))
    optimizers = [torch.optim.SGD([p], lr=0.0) for p in model.parameters()]
    for optimizer, takes in zip(optimizers, (5, 6, 7), strict=True):
        optimizer.register_step_post_hook(lambda *_, takes=takes: setattr(clock, "now", clock.now + takes))
    with StepRecorder(model, optimizers, clock=clock) as recorder:
        for _ in range(4):
            step(model, *optimizers)
            clock.now += 1000  # what happens between steps belongs to none
    profile = recorder.profile(cost=COST, world_size=2)

    assert (recorder.steps_seen, profile.steps, profile.model, profile.world_size) == (4, 3, "Sequential", 2)
    assert in_forward(profile) == {"0": 1.5, "1.1": 2, "2": 3}  # the activation is counted to the layer before it
    assert {m.name: m.backward_s for m in profile.modules} == {"0": 10, "1.1": 20, "2": 30}
    assert [(p.name, p.ready_s, p.used_by) for p in profile.parameters] == [
        ("2.weight", 30, 2), ("1.1.weight", 50, 1), ("0.weight", 60, 0),
    ]  # fmt: skip
    assert all(p.num_bytes == 8 for p in profile.parameters)
    assert (profile.forward_s, profile.backward_s, profile.update_s) == (6.5, 60, 18)
    assert profile.cost == COST


def test_the_first_step_is_thrown_away_and_the_median_ignores_a_step_that_took_long() -> None:
    clock = Standing()
    model = nn.Sequential(Layer(clock, 1, 10), Layer(clock, 2, 20))
    times = iter([500.0, 1.0, 1.0, 900.0, 1.0, 3.0])
    model[0].register_forward_pre_hook(lambda module, _: setattr(module, "takes", (clock, next(times), 10)))
    _, profile = recorded(model, clock, steps=6)
    assert in_forward(profile) == {"0": 1, "1": 2} and profile.forward_s == 3


def test_the_loss_and_what_comes_before_the_first_layer_are_part_of_the_forward() -> None:
    clock = Standing()
    model = nn.Sequential(Wait(clock, 4), Layer(clock, 1, 10), Layer(clock, 2, 20))
    loss = Wait(clock, 7, 70)
    with StepRecorder(model, clock=clock) as recorder:
        for _ in range(2):
            loss(model(X)).sum().backward()
    profile = recorder.profile(cost=COST, world_size=2)
    assert in_forward(profile) == {"1": 5, "2": 9 + 70}  # backward begins with the gradient of the model's output
    assert profile.forward_s == sum(m.forward_s for m in profile.modules)
    assert profile.backward_s == 30


def test_a_module_with_children_is_timed_until_the_first_of_them_and_repeated_calls_add_up() -> None:
    clock = Standing()

    class Parent(Layer):
        def __init__(self) -> None:
            super().__init__(clock, 1, 0)
            self.child = Layer(clock, 2, 0)

        def forward(self, x: Tensor) -> Tensor:
            return self.child(self.child(super().forward(x)))  # type: ignore[no-any-return]

    parent = Parent()
    recorder, profile = recorded(nn.Sequential(parent, parent), clock)  # a module that is there twice
    assert in_forward(profile) == {"0": 2, "0.child": 8}
    assert recorder.read_by == {"0.weight": "0", "0.child.weight": "0.child"}


def test_a_model_that_calls_itself_is_one_step() -> None:
    clock = Standing()

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(clock, 1, 1)

        def forward(self, x: Tensor, times: int = 2) -> Tensor:
            return self.layer(x if times == 0 else self(x, times - 1))  # type: ignore[no-any-return]

    recorder, profile = recorded(Again(), clock)
    assert recorder.steps_seen == 3 and in_forward(profile) == {"layer": 3}


@pytest.mark.parametrize("record_first", [False, True])
def test_waiting_for_other_workers_at_the_end_of_backward_is_no_part_of_it(record_first: bool) -> None:
    def program(job: Job) -> tuple[int, float]:
        clock = Standing()
        model = nn.Sequential(Layer(clock, 1, 10), Layer(clock, 2, 20))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        early = [StepRecorder(model, [optimizer], clock=clock)] if record_first else []
        distribute(model, optimizer, "Strategy(aggregate=AllReduce('ring'))", job=job)
        (engine,) = job.engines
        ended, waits = engine.training.backward_ended, []

        def wait(end: Any) -> Any:
            waits.append(1)
            clock.now += 1000
            return ended(end)

        engine.training.backward_ended = wait
        with early[0] if early else StepRecorder(model, [optimizer], clock=clock) as recorder:
            for _ in range(3):
                step(model, optimizer)
        profile = recorder.profile(cost=COST, world_size=job.world_size)
        assert (profile.forward_s, profile.backward_s, profile.update_s, profile.steps) == (3, 30, 0, 2)
        return len(waits), profile.backward_s

    assert run_jobs(2, program) == [(3, 30), (3, 30)]


# -- who reads which parameter ----------------------------------------------------------------------------------------


def test_a_parameter_that_another_module_reads_is_used_by_the_nearest_one_around_it_that_runs() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, next(self.inner.parameters()))

    attention = nn.MultiheadAttention(2, 1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.around = attention, Around()

        def forward(self, x: Tensor) -> Tensor:
            x = x.expand(1, 1, 2)
            return self.around(self.attention(x, x, x)[0])  # type: ignore[no-any-return]

    recorder, profile = recorded(Net())
    assert recorder.read_by == {
        "attention.in_proj_weight": "attention", "attention.in_proj_bias": "attention",
        "attention.out_proj.weight": "attention", "attention.out_proj.bias": "attention",
        "around.inner.0.weight": "around",
    }  # fmt: skip
    assert [module.name for module in profile.modules] == ["attention", "around"]  # the second has no parameters of its own
    assert all(profile.modules[p.used_by or 0].name == recorder.read_by[p.name] for p in profile.parameters)


def test_a_shared_parameter_is_used_by_the_module_that_runs_first() -> None:
    clock = Standing()

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = Layer(clock, 1, 10), Layer(clock, 2, 20)
            self.first.weight = self.last.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))  # type: ignore[no-any-return]

    recorder, profile = recorded(Tied(), clock)
    assert recorder.read_by == {"last.weight": "first"}
    (shared,) = profile.parameters
    assert shared.used_by == 0 and shared.ready_s == 30  # when both have given their part
    assert {m.name: (m.forward_s, m.backward_s) for m in profile.modules} == {"first": (2, 30), "last": (1, 0)}


def test_parameters_without_a_gradient_come_last_and_frozen_ones_not_at_all() -> None:
    clock = Standing()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.frozen, self.used = Layer(clock, 9, 9), Layer(clock, 1, 10), Layer(clock, 2, 20)
            self.frozen.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.frozen(x))  # type: ignore[no-any-return]

    recorder, profile = recorded(Net(), clock)
    assert in_forward(profile) == {"": 0, "frozen": 1, "used": 2}  # it takes its time also when nothing of it is trained
    assert [(p.name, p.ready_s) for p in profile.parameters] == [("used.weight", 20), ("unused.weight", profile.backward_s)]
    assert recorder.read_by == {"unused.weight": "", "used.weight": "used"}  # nobody knows whether the model reads it


def test_parts_that_are_called_by_themselves_make_a_step_too() -> None:
    clock = Standing()
    model = nn.ModuleDict({"encoder": Layer(clock, 1, 10), "decoder": Layer(clock, 2, 20), "unused": Layer(clock, 3, 30)})
    with StepRecorder(model, clock=clock) as recorder:
        for _ in range(3):
            model["decoder"](model["encoder"](X)).sum().backward()
    assert recorder.steps_seen == 3
    assert recorder.read_by == {"encoder.weight": "encoder", "decoder.weight": "decoder", "unused.weight": None}
    profile = recorder.profile(cost=COST, world_size=1)
    assert [(p.name, p.ready_s, p.used_by) for p in profile.parameters] == [
        ("decoder.weight", 0, 1), ("encoder.weight", 10, 0), ("unused.weight", 10, None),
    ]  # fmt: skip


# -- what does not count ----------------------------------------------------------------------------------------------


def test_only_forwards_that_lead_to_a_backward_count() -> None:
    clock = Standing()
    model = nn.Sequential(Layer(clock, 1, 10), Layer(clock, 2, 20))
    with StepRecorder(model, clock=clock) as recorder:
        for seen in range(3):
            with torch.no_grad():
                model(X)
            with torch.inference_mode():
                model[0](X)
            clock.on = False  # as while a CUDA graph is captured
            model(X)
            clock.on = True
            out = model(X)
            torch.autograd.grad(out.sum(), list(model.parameters()), retain_graph=True)  # a gradient, but no step
            assert recorder.steps_seen == seen
            out.sum().backward(retain_graph=True)
            out.sum().backward()  # a second one over the same forward
    profile = recorder.profile(cost=COST, world_size=1)
    assert profile.steps == 2 and in_forward(profile)["0"] == 1


def test_what_is_only_looked_at_or_transformed_is_no_part_of_a_step() -> None:
    model, ran = nn.Sequential(nn.Linear(2, 2)), []
    model[0].register_forward_pre_hook(lambda *_: ran.append(1))
    with StepRecorder(model) as recorder:
        step(model)
        for _ in range(2):
            torch.func.grad(lambda x: model(x).sum())(X)
            with warnings.catch_warnings(action="ignore"):  # newer versions of torch advise against it
                torch.jit.trace(model, X, check_trace=False)  # type: ignore[no-untyped-call]
            step(model)
    assert len(ran) == 7 and recorder.steps_seen == 3
    assert [len(one.begins) for one in recorder._notes.steps] == [2, 2]  # the model and its layer, once


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_backward_computes_again_is_backward(reentrant: bool) -> None:
    clock = Standing()

    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(clock, 1, 10), Layer(clock, 2, 20)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=reentrant))  # type: ignore[no-any-return]

    model = Saving()
    with StepRecorder(model, clock=clock) as recorder:
        for _ in range(3):
            model(X.clone().requires_grad_()).sum().backward()
    profile = recorder.profile(cost=COST, world_size=1)
    assert in_forward(profile) == {"first": 1, "second": 2}
    again = 31 if reentrant else 30  # torch's other way of it computes no further than backward needs
    assert {p.name: p.ready_s for p in profile.parameters} == {"second.weight": 20, "first.weight": again}
    assert profile.backward_s == again


def broken_forward(model: nn.Sequential) -> None:
    handle = model[1].register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        model(X)
    finally:
        handle.remove()


def broken_backward(model: nn.Sequential) -> None:
    out = model(X)
    handle = next(model.parameters()).register_hook(lambda gradient: 1 / 0)  # type: ignore[no-untyped-call]
    try:
        out.sum().backward()
    finally:
        handle.remove()


@pytest.mark.parametrize("broken", [broken_forward, broken_backward])
def test_a_step_that_fails_in_the_middle_leaves_nothing(broken: Callable[[nn.Sequential], None]) -> None:
    clock = Standing()
    model = nn.Sequential(Layer(clock, 1, 10), Layer(clock, 2, 20))
    with StepRecorder(model, clock=clock) as recorder:
        step(model)
        for seen in (1, 2):
            with pytest.raises(ZeroDivisionError):
                broken(model)
            assert recorder.steps_seen == seen
            clock.now += 1000
            try:
                raise ValueError  # a step within the handling of an error is one as any other
            except ValueError:
                step(model)
    profile = recorder.profile(cost=COST, world_size=1)
    assert (recorder.steps_seen, profile.steps, profile.forward_s, profile.backward_s) == (3, 2, 3, 30)


def test_the_first_update_only_warms_up() -> None:
    clock = Standing()
    model = nn.Sequential(Layer(clock, 1, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    times = iter([100.0, 5.0, 7.0])
    optimizer.register_step_post_hook(lambda *_: setattr(clock, "now", clock.now + next(times)))
    with StepRecorder(model, [optimizer], clock=clock) as recorder:
        for _ in range(3):
            step(model, optimizer)
    assert recorder.profile(cost=COST, world_size=1).update_s == 6


def test_an_update_that_computes_a_step_itself_is_not_taken_for_an_update() -> None:
    clock = Standing()
    model = nn.Sequential(Layer(clock, 1, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def closure() -> float:
        step(model)
        return 0.0

    with StepRecorder(model, [optimizer], clock=clock) as recorder:
        for _ in range(3):
            optimizer.step(closure)
    assert recorder.profile(cost=COST, world_size=1).update_s == 0


def test_a_forward_that_was_interrupted_spoils_one_step_at_most() -> None:
    clock = Standing()
    model = nn.Sequential(Layer(clock, 1, 10))
    with StepRecorder(model, clock=clock) as recorder:
        handle = model[0].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            model(X)  # torch tells hooks of an Exception only
        handle.remove()
        for _ in range(4):
            step(model)
    assert recorder.steps_seen == 4 and {step.forward_s(clock) for step in recorder._notes.steps} == {1}


def test_forwards_that_no_backward_follows_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MOST_CALLS", 10)
    model = nn.Sequential(nn.Linear(2, 2))
    with StepRecorder(model) as recorder:
        for _ in range(100):
            model(X)  # an evaluation without no_grad
            assert len(recorder._notes.begins) <= 12
        step(model)
        assert recorder.steps_seen == 1 and not recorder._notes.begins


def test_what_is_compiled_stays_one_graph_and_is_read_by_the_model_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with StepRecorder(model, called=compiled) as recorder:  # type: ignore[arg-type]
        for _ in range(3):
            compiled(X).sum().backward()
    assert recorder.steps_seen == 3
    assert set(recorder.read_by.values()) == {""}
    assert [module.name for module in recorder.profile(cost=COST, world_size=1).modules] == [""]


def test_a_compiled_model_that_refuses_to_be_a_truth_value_is_recorded() -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(TypeError, match="len"):
        bool(compiled)
    with StepRecorder(model, called=compiled) as recorder:  # type: ignore[arg-type]
        compiled(X).sum().backward()
    assert recorder.steps_seen == 1


# -- what stays -------------------------------------------------------------------------------------------------------


def test_no_hook_is_left_and_what_was_recorded_stays() -> None:
    clock = Standing()
    model = nn.Sequential(Layer(clock, 1, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    with StepRecorder(model, [optimizer], clock=clock) as recorder:
        assert hooks_on(model) > 0
        for _ in range(KEPT + 5):
            step(model)
    assert hooks_on(model) == 0
    assert len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks) == before
    step(model)
    assert recorder.steps_seen == KEPT + 5 and recorder.profile(cost=COST, world_size=1).steps == KEPT


def test_an_open_recorder_keeps_no_model_alive_and_its_hooks_are_not_copied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    recorder = StepRecorder(model)
    step(copy.deepcopy(model))
    assert recorder.steps_seen == 0
    step(model)
    assert recorder.steps_seen == 1
    gone = weakref.ref(model)
    parameter = model[0].weight  # the hook on it is still there
    del model
    gc.collect()
    assert gone() is None and parameter._post_accumulate_grad_hooks


def test_without_two_steps_there_is_no_profile() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with StepRecorder(model) as recorder:
        step(model)
    with pytest.raises(ConfigurationError, match=r"from 1 recorded steps.*\n.*at least two steps"):
        _ = recorder.profile(cost=COST, world_size=1)
    with pytest.raises(ConfigurationError, match=r"'0.weight' has no shape yet.*\n.*one forward"):
        StepRecorder(nn.Sequential(nn.LazyLinear(2)))


def test_a_real_clock_gives_a_profile_that_can_be_saved_and_is_of_its_model(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    _, profile = recorded(model)
    save(profile, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == profile
    check(profile, model, 2)
    assert profile.forward_s > 0 and profile.backward_s > 0
    assert [p.name.split(".")[0] for p in profile.parameters] == ["2", "2", "0", "0"]
    assert all(p.ready_s <= profile.backward_s for p in profile.parameters)


# -- clocks -----------------------------------------------------------------------------------------------------------


def test_a_gpu_is_timed_by_events_on_its_stream_that_are_read_when_all_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    clock = Standing()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.at: float | None = None

        def record(self, stream: str) -> None:
            assert stream == "the current stream of cuda:0"
            self.at = clock.now

        def synchronize(self) -> None:
            log.append("synchronize")

        def elapsed_time(self, end: Event) -> float:
            assert log == ["synchronize"] and self.at is not None and end.at is not None
            return (end.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the current stream of {device}")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model = nn.Sequential(Layer(clock, 1, 10), Layer(clock, 2, 20))
    with StepRecorder(model, clock=CudaClock(torch.device("cuda:0"), Event)) as recorder:
        for _ in range(3):
            step(model)
    profile = recorder.profile(cost=COST, world_size=1)
    assert in_forward(profile) == {"0": 1, "1": 2} and profile.backward_s == pytest.approx(30)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not CudaClock(torch.device("cuda:0"), Event).runs()


def test_the_clock_is_that_of_the_models_device() -> None:
    cpu, first, second = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))
    assert isinstance(clock_for([cpu, cpu]), HostClock) and isinstance(clock_for([]), HostClock)
    assert isinstance(clock_for([first, first]), CudaClock)
    for mixed in ([first, second], [cpu, first]):
        with pytest.raises(ConfigurationError, match=r"cuda:0.*\n.*clock=HostClock"):
            clock_for(mixed)


def test_parts_of_a_model_are_names_and_numbers() -> None:
    parts = ModelParts.of(nn.Sequential(nn.Linear(2, 3, bias=False), nn.Sequential(nn.Linear(3, 1))))
    assert parts.modules == ("", "0", "1", "1.0") and parts.parents == (0, 0, 0, 2)
    assert parts.parameters == (("0.weight", 24), ("1.0.weight", 12), ("1.0.bias", 4))
    assert parts.owners == ((1,), (3,), (3,)) and parts.with_parameters == {1, 3}
    assert list(parts.around(3)) == [2, 0] and list(parts.around(0)) == []
