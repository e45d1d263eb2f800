"""Training loops that are not the plain one: several optimizers, scalers, line searches, steps that must not be taken."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from engine.worker import (
    RING,
    OneAtATime,
    assert_equal_everywhere,
    data,
    gradients_of,
    loss_of,
    mlp,
    remembered,
    rounds,
    seeded,
    start,
    state_of,
    take_step,
)
from stretto.aggregate.all_reduce.training import SynchronousAllReduce
from stretto.compress.codec import Compression
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.int8 import Int8
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.sign import Sign
from stretto.compress.top_k import TopK
from stretto.distributing import distribute, engine_of, join, no_sync, release, synchronize, weight
from stretto.errors import ConfigurationError, RankMismatch
from stretto.job import Job
from stretto.plan.choose import Choices
from stretto.plan.costs import LinkCosts
from stretto.strategy import Strategy
from stretto.testing import run_jobs

SIZE = 2
Optimizers = tuple[torch.optim.Optimizer, ...]


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    states = list(optimizer.state.values())
    return {f"{n}.{key}": value.clone() for n, state in enumerate(states) for key, value in state.items()}


# -- T2: the dtype of an optimizer's state ----------------------------------------------------------------------------


class MasterWeights(torch.optim.Optimizer):
    """SGD on float32 copies of bfloat16 parameters; some of its state lies in a list and in a dict."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(master=p.float(), moments=[torch.zeros(p.shape)], more={"sum": torch.zeros(p.shape)})
                if p.grad is not None:
                    state["moments"][0].mul_(0.9).add_(p.grad)
                    state["more"]["sum"].add_(p.grad)
                    state["master"].sub_(state["moments"][0], alpha=group["lr"])
                    p.copy_(state["master"])


@pytest.mark.parametrize("how", ["distribute", "join"])
def test_state_of_another_dtype_than_its_parameter_reaches_all_workers_as_it_is(how: str) -> None:
    def program(job: Job) -> tuple[dict[str, Tensor], list[Any]]:
        model = mlp().bfloat16()
        optimizer = MasterWeights(model.parameters())
        if how == "distribute":
            for step in range(3):
                take_step(model, job, optimizer, step=step + 10 * job.rank)
        distribute(model, optimizer, RING, job=job)
        with join(model):
            for step in range(3 + job.rank):
                take_step(model, job, optimizer, step=step)
        take_step(model, job, optimizer, step=9)
        return state_of(model), [[s["master"], s["moments"][0], s["more"]["sum"]] for s in optimizer.state.values()]

    everybody = run_jobs(SIZE, program)
    assert_equal_everywhere([state for state, _ in everybody])
    for mine, other in zip(everybody[0][1], everybody[1][1], strict=True):
        assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(mine, other, strict=True))


# -- T3: the scaler ---------------------------------------------------------------------------------------------------


def scaled_step(model: nn.Module, job: Job, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, step: int) -> None:
    torch.autograd.backward(scaler.scale(loss_of(model, job, step)))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize("given", [False, True])
def test_the_scaler_is_the_same_on_all_workers_after_join(given: bool) -> None:
    def program(job: Job) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        optimizer = start(job, model, scaler=scaler if given else None)
        with join(model):
            for step in range(1 + job.rank):
                scaled_step(model, job, optimizer, scaler, step)
        for step in range(4):
            scaled_step(model, job, optimizer, scaler, 5 + step)
        return state_of(model), scaler.state_dict()

    everybody = run_jobs(SIZE, program)
    assert_equal_everywhere([state for state, _ in everybody])
    assert everybody[0][1] == everybody[1][1] and everybody[0][1]["scale"] == 32.0


def test_a_scaler_that_one_worker_has_never_used_is_asked_for_at_the_end_of_join() -> None:
    def program(job: Job) -> None:
        model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = start(job, model)
        with pytest.raises(ConfigurationError, match=r"rank 0 has not been seen yet(.|\n)*scaler=scaler"), join(model):
            for step in range(2 * job.rank):
                scaled_step(model, job, optimizer, scaler, step)

    run_jobs(SIZE, program)


def test_scales_that_differ_are_a_mismatch_in_the_next_round() -> None:
    def program(job: Job) -> None:
        model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        optimizer = start(job, model)
        scaled_step(model, job, optimizer, scaler, 0)
        if job.rank:
            scaler.update(4.0)
        with pytest.raises(RankMismatch, match=r"a loss scale of 8 for 1 steps(.|\n)*a loss scale of 4 for"):
            scaled_step(model, job, optimizer, scaler, 1)

    run_jobs(SIZE, program)


# -- T4, U8: several optimizers, new ones, and none -------------------------------------------------------------------


def halves(model: nn.Sequential) -> Optimizers:
    one = torch.optim.AdamW(model[0].parameters(), lr=0.01)
    return one, torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1, momentum=0.9)


def test_several_optimizers_are_made_equal_at_the_beginning_and_after_join() -> None:
    def program(job: Job) -> tuple[dict[str, Tensor], ...]:
        model = mlp()
        optimizers = halves(model)
        take_step(model, job, *optimizers, step=job.rank)
        assert distribute(model, optimizers, RING, job=job) == (model, optimizers)
        with join(model):
            for step in range(2 + job.rank):
                take_step(model, job, *optimizers, step=step)
        take_step(model, job, *optimizers, step=7)
        return state_of(model), *map(optimizer_state, optimizers)

    everybody = run_jobs(SIZE, program)
    for part in range(3):
        assert_equal_everywhere([states[part] for states in everybody])


def test_an_optimizer_made_later_may_step_and_takes_its_place_when_it_is_given() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        start(job, model)
        second = torch.optim.Adam(model.parameters(), lr=0.01)
        take_step(model, job, second)
        with pytest.raises(ConfigurationError, match=r"Adam steps parameters of Sequential \(model 1\) inside join"), join(model):
            take_step(model, job, second)
        distribute(model, second, RING, job=job)
        with join(model):
            for step in range(1 + job.rank):
                take_step(model, job, second, step=step)
        assert len(job.engines) == 1 and engine_of(model).loop.optimizers == (second,)
        return state_of(model) | optimizer_state(second)

    assert_equal_everywhere(run_jobs(SIZE, program))


def test_what_a_compression_remembers_stays_when_a_new_optimizer_is_given() -> None:
    sign = Strategy(compress=ErrorFeedback(Sign(block=16)))

    def program(job: Job) -> None:
        job.choices = Choices([0], ["ring"], LinkCosts(alpha=1e-5, beta=1e-9, gamma=1e-9))
        model = mlp()
        take_step(model, job, start(job, model, sign))
        own = remembered(model).own
        second = start(job, model, sign)
        assert own and remembered(model).rounds == 1
        for name, kinds in remembered(model).own.items():
            assert all(torch.equal(value, own[name][kind]) for kind, value in kinds.items())
        take_step(model, job, second)
        assert "stretto" in second.state_dict()
        release(model)
        assert "stretto" not in second.state_dict()

    run_jobs(SIZE, program)


def test_a_released_model_is_a_plain_one() -> None:
    def program(job: Job) -> None:
        model = mlp()
        plain = set(vars(model))
        optimizer = start(job, model)
        take_step(model, job, optimizer)
        assert release(model) is model and release(model) is model
        assert set(vars(model)) == plain and not model._forward_pre_hooks and not model._forward_hooks
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
        assert not job.engines
        with pytest.raises(ConfigurationError, match="has not been distributed"):
            no_sync(model).__enter__()
        take_step(model, job, optimizer, step=job.rank)  # alone
        take_step(model, job, start(job, model), step=1)  # and together again
        assert rounds(model) == 1

    run_jobs(SIZE, program)


def test_a_job_of_one_keeps_no_record_of_its_steps() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizers = halves(model)
        distribute(model, optimizers, RING, job=job)
        for step in range(3):
            take_step(model, job, *optimizers, step=step)
        assert not engine_of(model).loop._steps

    run_jobs(1, program)


# -- T6: steps without a round ----------------------------------------------------------------------------------------


def test_a_step_with_gradients_that_nobody_combined_is_refused() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        optimizer = start(job, model)
        for step in range(2):
            with no_sync(model):
                torch.autograd.backward(loss_of(model, job, step))
        with pytest.raises(ConfigurationError, match=r"SGD.step\(\) after 2 backward passes(.|\n)*stretto.synchronize\(model\)"):
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()  # zeros are the same everywhere
        with no_sync(model):
            torch.autograd.backward(loss_of(model, job, 2))
            with pytest.raises(ConfigurationError, match="under no_sync"):
                optimizer.step()
        synchronize(model)
        synchronize(model)  # nothing is left to do
        assert rounds(model) == 1
        optimizer.step()
        return state_of(model)

    everybody = run_jobs(SIZE, program)
    assert_equal_everywhere(everybody)
    alone = mlp()
    for rank in range(SIZE):
        (alone(data(rank, 2)).pow(2).mean() / SIZE).backward()
    for name, p in alone.named_parameters():
        torch.testing.assert_close(everybody[0][name], p.detach() - 0.1 * p.grad)  # type: ignore[operator]


def test_a_step_whose_closure_combines_what_was_accumulated_is_taken() -> None:
    """As Lightning does: the last backward of an accumulation runs inside the step."""

    def program(job: Job, synchronised: bool) -> dict[str, Tensor]:
        model = mlp()
        optimizer = start(job, model)

        def closure() -> float:
            if synchronised:
                torch.autograd.backward(loss_of(model, job, 1))
            return 0.0

        with no_sync(model):
            torch.autograd.backward(loss_of(model, job))
        if not synchronised:
            with pytest.raises(ConfigurationError, match="all of them under no_sync"):
                optimizer.step(closure)
            optimizer.zero_grad()
        optimizer.step(closure)
        return state_of(model)

    for synchronised in (True, False):
        assert_equal_everywhere(run_jobs(SIZE, program, synchronised))


def test_a_step_within_backward_is_refused() -> None:
    """Each parameter's own optimizer, stepped as its gradient comes, would step with this worker's gradient."""

    def program(job: Job) -> None:
        model = mlp()
        start(job, model)
        own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: own[p].step())  # type: ignore[no-untyped-call]
        with pytest.raises(ConfigurationError, match=r"within backward(.|\n)*after loss.backward\(\)"):
            torch.autograd.backward(loss_of(model, job))

    run_jobs(SIZE, program)


# -- T8: line searches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_lbfgs_decides_by_the_mean_loss(weighted: bool) -> None:
    def program(job: Job) -> tuple[dict[str, Tensor], float]:
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=6, line_search_fn="strong_wolfe")
        distribute(model, optimizer, RING, job=job)
        if weighted:
            weight(1.0 + job.rank, job=job)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, job)
            torch.autograd.backward(loss)
            return loss

        step: Any = optimizer.step  # torch gives it no types
        losses = [step(closure), step(closure=closure)]
        with pytest.raises(ConfigurationError, match="join with LBFGS"):
            join(model).__enter__()
        return state_of(model), float(losses[1])

    everybody = run_jobs(SIZE, program)
    assert_equal_everywhere([state for state, _ in everybody])
    weights = [1.0 + rank if weighted else 1.0 for rank in range(SIZE)]
    alone = mlp()
    optimizer = torch.optim.LBFGS(alone.parameters(), lr=1.0, max_iter=6, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = [alone(data(rank)).pow(2).mean() * w for rank, w in enumerate(weights)]
        loss = torch.stack(losses).sum() / sum(weights)
        torch.autograd.backward(loss)
        return loss.detach()

    step: Any = optimizer.step
    losses = [step(closure) for _ in range(2)]
    assert everybody[0][1] == everybody[1][1] == pytest.approx(float(losses[1]), rel=1e-6)
    for name, value in state_of(alone).items():
        torch.testing.assert_close(everybody[0][0][name], value, rtol=1e-5, atol=1e-8)


# -- T13: an exception that one worker swallows -----------------------------------------------------------------------


class Alarm(Exception):
    """What a signal handler of the user's might raise."""


def test_a_worker_that_lost_a_round_to_an_exception_is_found_out_in_the_next() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model)
        take_step(model, job, optimizer)
        training = cast(SynchronousAllReduce, engine_of(model).training)
        if job.rank == 1:
            receive = training._wait

            def interrupted(buckets: Any) -> None:
                receive(buckets)
                raise Alarm

            training._wait = interrupted  # type: ignore[method-assign]
            with pytest.raises(Alarm):
                torch.autograd.backward(loss_of(model, job, 1))
            training._wait = receive  # type: ignore[method-assign]
        else:
            torch.autograd.backward(loss_of(model, job, 1))
        optimizer.step()  # on rank 1 without gradients
        optimizer.zero_grad()
        with pytest.raises(RankMismatch, match=r"2 rounds before it(.|\n)*1 rounds before it"):
            torch.autograd.backward(loss_of(model, job, 2))

    run_jobs(SIZE, program)


def test_a_step_that_one_worker_left_out_is_found_out_in_the_next_round() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model)
        torch.autograd.backward(loss_of(model, job))
        if job.rank == 0:
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RankMismatch, match=r"since then a step of SGD(.|\n)*no step since then"):
            torch.autograd.backward(loss_of(model, job, 1))

    run_jobs(SIZE, program)


# -- T7, T16, T18, T22 ------------------------------------------------------------------------------------------------


def test_a_model_made_channels_last_after_distribute_trains_with_a_fused_optimizer() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).float()

    def images(rank: int, step: int) -> Tensor:
        return torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))

    def program(job: Job) -> dict[str, Tensor]:
        model = seeded(make)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        distribute(model, optimizer, RING, job=job)
        model.to(memory_format=torch.channels_last)
        for step in range(3):
            model(images(job.rank, step)).pow(2).mean().backward()
            assert all(p.grad.stride() == p.stride() for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    everybody = run_jobs(SIZE, program)
    assert_equal_everywhere(everybody)
    alone = seeded(make).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1, fused=True)
    for step in range(3):
        (sum(alone(images(rank, step)).pow(2).mean() for rank in range(SIZE)) / SIZE).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in state_of(alone).items():
        torch.testing.assert_close(everybody[0][name], value, rtol=1e-3, atol=1e-4)


def test_a_change_first_seen_in_inference_mode_does_not_break_training() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        model[0].requires_grad_(False)
        optimizer = start(job, model)
        model[0].requires_grad_(True)
        with torch.inference_mode():
            model(data(job.rank))
        take_step(model, job, optimizer)
        return state_of(model)

    assert_equal_everywhere(run_jobs(SIZE, program))


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_gradients_of_another_dtype_than_their_parameters_are_combined_in_it() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = mlp().bfloat16()
        for p in model.parameters():
            p.grad_dtype = torch.float32
        start(job, model)
        torch.autograd.backward(loss_of(model, job))
        found = {name: g for name, g in gradients_of(model).items() if g is not None}
        assert found and all(g.dtype == torch.float32 for g in found.values())
        return found

    assert_equal_everywhere(run_jobs(SIZE, program))


class Awkward(nn.Module):
    """A buffer whose elements are one place in memory, and an output that holds itself."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.body = nn.Linear(4, 1, dtype=torch.float64)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((1,), 1.0 + rank, dtype=torch.float64).expand(3, 4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        output: dict[str, Any] = {"y": self.body(x) * self.scale.sum()}
        output["self"] = [output]
        return output


def test_expanded_buffers_and_outputs_that_refer_to_themselves() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = seeded(lambda: Awkward(job.rank))
        optimizer = start(job, model)
        for step in range(2):
            model(data(job.rank, step))["y"].pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if job.rank:
                model.get_buffer("scale")[:1, :1] += 1.0  # drifts, and is rank 0's again in the next forward
        model(data(job.rank))
        return state_of(model)

    everybody = run_jobs(SIZE, program)
    assert_equal_everywhere(everybody)
    assert torch.equal(everybody[1]["scale"], torch.ones(3, 4, dtype=torch.float64))


# -- T23: what a DDP user expects of p.grad ---------------------------------------------------------------------------


def test_gradients_that_are_kept_stay_as_they_were() -> None:
    """As methods do that compare the gradients of several losses (PCGrad)."""

    def program(job: Job) -> tuple[list[dict[str, Tensor]], list[int]]:
        model = mlp()
        start(job, model)
        kept, places = [], []
        for step in range(3):
            model.zero_grad()
            torch.autograd.backward(loss_of(model, job, step))
            kept.append({n: p.grad if step else p.grad.view(-1).detach() for n, p in model.named_parameters()})  # type: ignore[union-attr]
            places.append(next(model.parameters()).grad.data_ptr())  # type: ignore[union-attr]
        return [{n: g.clone().view(-1) for n, g in each.items()} for each in kept], places  # type: ignore[union-attr]

    (mine, places), (other, _) = run_jobs(SIZE, program)
    assert len(set(places)) == 3
    for step in range(3):
        alone = mlp()
        for rank in range(SIZE):
            (alone(data(rank, step)).pow(2).mean() / SIZE).backward()
        for name, p in alone.named_parameters():
            torch.testing.assert_close(mine[step][name], p.grad.view(-1))  # type: ignore[union-attr]
            assert torch.equal(mine[step][name], other[step][name])


def test_memory_of_gradients_that_nobody_keeps_is_used_again() -> None:
    def program(job: Job, set_to_none: bool) -> set[int]:
        model = mlp()
        optimizer = start(job, model)
        places = set()
        for step in range(12):
            torch.autograd.backward(loss_of(model, job, step))
            optimizer.step()
            places.add(next(model.parameters()).grad.data_ptr())  # type: ignore[union-attr]
            optimizer.zero_grad(set_to_none=set_to_none)
        return places

    for set_to_none in (True, False):
        assert [len(places) for places in run_jobs(SIZE, program, set_to_none)] == [1] * SIZE


def test_a_hook_of_the_users_sees_the_gradient_of_its_worker() -> None:
    def program(job: Job) -> None:
        model, seen = mlp(), dict[str, Tensor]()
        first: Any = model[0].weight
        first.register_post_accumulate_grad_hook(lambda p: seen.update(before=p.grad.clone()))
        start(job, model)
        first.register_post_accumulate_grad_hook(lambda p: seen.update(after=p.grad.clone()))
        for step in range(2):
            torch.autograd.backward(loss_of(model, job, step))
            (own,) = torch.autograd.grad(loss_of(model, job, step), first)
            assert torch.equal(seen["before"], own) and torch.equal(seen["after"], own)
            assert not torch.equal(first.grad, own)
            model.zero_grad()

    run_jobs(SIZE, program)


# -- T14: torch.compile after distribute ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_compiled_after_distribute_as_one_graph(backend: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()

    def program(job: Job) -> dict[str, Tensor]:
        model = seeded(make)
        optimizer = start(job, model)
        with tracing:
            compiled: Any = torch.compile(model, fullgraph=True, backend=backend)
            compiled(data(0))
        for step in range(3):
            with no_sync(compiled):
                torch.autograd.backward(loss_of(compiled, job, step))
            take_step(compiled, job, optimizer, step=step)
        assert rounds(compiled) == 3
        return state_of(model)

    torch.compile(nn.Linear(1, 1), backend=backend)(torch.ones(1, 1))  # what torch starts on the way is not a rank's
    tracing = OneAtATime(SIZE)
    assert_equal_everywhere(run_jobs(SIZE, program))


# -- U12: codecs that lose gradients for good -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "warns"),
    [
        (PowerSGD(2, min_rate=0.0), True),
        (TopK(0.1), True),
        (Sign(vote=True), False),
        (ErrorFeedback(TopK(0.1)), False),
        (Int8(), False),
    ],
    ids=repr,
)
def test_a_codec_that_needs_error_feedback_and_has_none_is_warned_about_once(
    codec: Compression, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def program(job: Job) -> None:
        job.choices = Choices([0], ["ring"], LinkCosts(alpha=1e-5, beta=1e-9, gamma=1e-9))
        start(job, mlp().float(), Strategy(compress=codec))

    run_jobs(SIZE, program)
    said = [record.message for record in caplog.records if "is lost for good" in record.message]
    assert [f"Write ErrorFeedback({codec!r})" in message for message in said] == [True] * warns


def test_what_has_no_memory_is_refused_with_its_name() -> None:
    def program(job: Job) -> None:
        model = mlp()
        model.register_buffer("mask", torch.empty(3, device="meta"))
        with pytest.raises(ConfigurationError, match=r"mask of Sequential is on the meta device(.|\n)*to_empty"):
            start(job, model)

    run_jobs(SIZE, program)
