"""Across the iteration barrier: what cannot be done is refused, and what fails is told."""

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

from engine.crossing import BARRIER, CROSSING, RING, STEPS, WATCHED, Separately, begin, crossing_of, sgd
from engine.worker import OneAtATime, Refusing, assert_equal_everywhere, data, loss_of, mlp, seeded, state_of
from stretto import checkpoint
from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.all_reduce.training import SynchronousAllReduce
from stretto.aggregate.hierarchy import Hierarchy
from stretto.api import _leave_at_exit
from stretto.distributing import distribute, engine_of, join, release, synchronize
from stretto.engine.per_parameter import check_per_parameter
from stretto.errors import BackwardFailed, ConfigurationError, PeerLost, StrettoError
from stretto.job import Job
from stretto.plan.profile import StepProfile
from stretto.plan.transfers import Gradient, TransferPlan
from stretto.schedule.orders import AfterBackward
from stretto.schedule.priority import Priority
from stretto.strategy import Strategy
from stretto.testing import run_jobs

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
