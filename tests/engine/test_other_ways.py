"""Ways to train and to look at a model that do not pass its own forward, or pass it without training."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from engine.worker import RING, OneAtATime, assert_equal_everywhere, data, gradients_of, rounds, seeded, start, state_of
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.sign import Sign
from stretto.errors import BackwardFailed, ConfigurationError
from stretto.job import Job
from stretto.plan.choose import Choices
from stretto.plan.costs import LinkCosts
from stretto.schedule.orders import WaitFree
from stretto.strategy import Strategy
from stretto.testing import run_jobs

SIZE = 2
LOSSY = Strategy(compress=ErrorFeedback(Sign(block=16)), schedule=WaitFree())


def payload_sent(job: Job) -> int:
    return sum(job.ledger.sent.values())


class Parts(nn.Module):
    """Trained through `loss` or its parts, never by calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh())
        self.head = nn.Linear(3, 1)
        self.extra: nn.Module = nn.Identity()
        self.double()

    def loss(self, x: Tensor) -> Tensor:
        loss: Tensor = self.extra(self.head(self.body(x))).pow(2).mean()
        return loss


def parts() -> Parts:
    model: Parts = seeded(Parts)
    return model


def train_by_parts(job: Job, model: Parts, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        model.loss(data(job.rank, step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


# -- T1: training that does not go through model(x) -------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [RING, LOSSY], ids=["exact", "lossy"])
def test_a_parameter_unfrozen_or_added_without_a_forward_of_the_model_is_combined(strategy: Strategy) -> None:
    def program(job: Job) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        job.choices = Choices([0], ["ring"], LinkCosts(alpha=1e-5, beta=1e-9, gamma=1e-9))  # nothing is tried out
        model = parts()
        model.head.requires_grad_(False)
        optimizer = start(job, model, strategy)
        train_by_parts(job, model, optimizer)
        model.head.requires_grad_(True)
        train_by_parts(job, model, optimizer)
        model.extra = seeded(lambda: nn.Linear(1, 1).double(), seed=job.rank)
        optimizer.add_param_group({"params": list(model.extra.parameters())})
        train_by_parts(job, model, optimizer)
        model.loss(data(job.rank, 9)).backward()  # type: ignore[no-untyped-call]
        return state_of(model), gradients_of(model)

    everybody = run_jobs(SIZE, program)
    assert_equal_everywhere([state for state, _ in everybody])  # buffers too
    assert_equal_everywhere([{name: g for name, g in gradients.items() if g is not None} for _, gradients in everybody])
    assert set(everybody[0][1]) == set(dict(parts().named_parameters())) | {"extra.weight", "extra.bias"}


def test_the_gradient_of_a_parameter_unfrozen_without_a_forward_is_the_mean_at_once() -> None:
    """Also where nothing else is trained, so that no round is there to notice it: before the step."""

    def program(job: Job, alone: bool) -> Tensor:
        model = parts()
        model.head.requires_grad_(False)
        optimizer = start(job, model)
        train_by_parts(job, model, optimizer, steps=1)
        model.head.requires_grad_(True)
        model.body.requires_grad_(not alone)
        model.body.eval()
        model.loss(data(job.rank, 5)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return model.head.weight.detach().clone()

    for alone in (False, True):
        found = run_jobs(SIZE, program, alone)
        assert torch.equal(found[0], found[1])


def test_a_failed_backward_of_parts_is_told_to_the_others_and_training_goes_on() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise RuntimeError("on purpose")

    def fails(model: Parts, job: Job) -> Tensor:
        hidden = model.body(data(job.rank))
        return model.head(hidden if job.rank else Fails.apply(hidden)).sum()  # type: ignore[no-any-return,no-untyped-call]

    def program(job: Job) -> dict[str, Tensor]:
        model = parts()
        optimizer = start(job, model, buffers="local")
        with pytest.raises((RuntimeError, BackwardFailed)) as caught:
            fails(model, job).backward()  # type: ignore[no-untyped-call]
        assert isinstance(caught.value, BackwardFailed) == (job.rank != 0)
        if job.rank == 0:
            with pytest.raises(ConfigurationError, match=r"zero_grad\(\)"):
                model.loss(data(job.rank)).backward()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
        train_by_parts(job, model, optimizer)
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    assert_equal_everywhere(run_jobs(SIZE, program))


# -- T5: functional_call ----------------------------------------------------------------------------------------------


def test_functional_call_leaves_the_job_and_the_callers_tensors_alone() -> None:
    def program(job: Job) -> tuple[dict[str, Tensor], int]:
        model = parts()
        optimizer = start(job, model)
        teacher: dict[str, Tensor] = {name: nn.Parameter(p.detach() + job.rank) for name, p in model.named_parameters()}
        mine = {name: p.detach().clone() for name, p in teacher.items()}
        model.forward = lambda x: model.head(model.body(x))
        before = payload_sent(job)
        functional_call(model, teacher, (data(job.rank),))  # a mean teacher
        functional_call(model, {**teacher, **{n: b.clone() for n, b in model.named_buffers()}}, (data(job.rank),))
        model.body.eval()  # torch.func refuses to change the statistics of a BatchNorm
        grad(lambda weights: functional_call(model, weights, (data(job.rank),)).sum())(mine)
        model.body.train()
        assert payload_sent(job) == before
        assert all(torch.equal(teacher[name], value) for name, value in mine.items())
        fast: dict[str, Tensor] = dict(model.named_parameters())
        inner = functional_call(model, fast, (data(job.rank),)).pow(2).mean()
        gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), gradients, strict=True)}
        functional_call(model, fast, (data(job.rank, 1),)).pow(2).mean().backward()  # MAML
        optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}, rounds(model)

    everybody = run_jobs(SIZE, program)
    assert_equal_everywhere([state for state, _ in everybody])
    assert [number for _, number in everybody] == [1] * SIZE


# -- T12, U6: export, trace, script, copies ---------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_distributed_model_can_be_exported_traced_and_scripted_and_trains_on() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = seeded(lambda: Small().double())
        optimizer = start(job, model)
        before = payload_sent(job)
        with tracing:
            if job.rank == 0:  # one worker alone: nothing of it may wait for others
                for strict in (False, True):
                    torch.export.export(model, (data(0),), strict=strict)
                torch.jit.trace(model, (data(0),), check_trace=False)  # type: ignore[no-untyped-call]
                torch.jit.script(copy.deepcopy(model))
        assert payload_sent(job) == before
        model(data(job.rank)).pow(2).mean().backward()
        optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    tracing = OneAtATime(SIZE)
    torch.export.export(nn.Linear(1, 1), (torch.ones(1, 1),), strict=True)  # what torch starts on the way is not a rank's
    assert_equal_everywhere(run_jobs(SIZE, program))


class Noted(nn.Module):
    """With a hook of the user's own, which counts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 1)
        self.calls = 0
        self.register_forward_hook(count)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def count(module: Any, *_: Any) -> None:
    module.calls += 1


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "torch.save": lambda model: torch.load(saved(model), weights_only=False),
}


def test_a_copy_has_nothing_of_ours_and_all_of_the_users() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = seeded(Noted)
        optimizer = start(job, model)
        model(data(job.rank).float()).pow(2).mean().backward()
        for name, make in COPIES.items():
            plain = make(model)
            assert plain.calls == 1 and "stretto" not in repr(plain.__dict__), name
            plain(data(0).float()).sum()
            assert plain.calls == 2, name
        assert b"stretto" not in saved(model).getvalue()
        optimizer.step()
        model(data(job.rank, 1).float()).pow(2).mean().backward()  # the model itself is distributed as before
        assert rounds(model) == 2
        return state_of(model)

    assert_equal_everywhere(run_jobs(SIZE, program))


def saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file
