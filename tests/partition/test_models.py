"""Models that pipelines usually get wrong: shared weights, several values between stages, odd batches, random numbers,
replicas."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from partition_models import WIDTH, Batches, batches, chain, made, share, trained_alone
from stretto import ConfigurationError, GPipe, Interleaved, OneForwardOneBackward, PipelineSchedule, ZeroBubble
from stretto.job import Job
from stretto.testing import run_jobs

SCHEDULES = (GPipe(), OneForwardOneBackward(), ZeroBubble())
Trained = tuple[dict[str, Tensor], list[float]]


def train(
    job: Job,
    make: Callable[[], nn.Module],
    data: Batches,
    stages: int,
    schedule: PipelineSchedule,
    cut: list[str] | None = None,
    strategy: str = "Strategy()",
    clip: float | None = None,
    accumulate: int = 1,
    recompute: bool = False,
) -> Trained:
    pipeline = stretto.pipeline(made(make), stages, 3, schedule, cut=cut, recompute=recompute)
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.01)
    if pipeline.replicas > 1:
        stretto.distribute(pipeline.module, optimizer, strategy)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        mine, targets = (share(each, pipeline.replica, pipeline.replicas) for each in (x, y))
        for _ in range(accumulate):
            loss = pipeline.forward_backward(mine, targets, nn.functional.mse_loss)
        if clip is not None:
            pipeline.clip_grad_norm_(clip)
        optimizer.step()
        losses.append(loss.item())
    if pipeline.replicas > 1:
        stretto.synchronize(pipeline.module)
    return pipeline.module.state_dict(), losses


def check_equal(results: list[Trained], expected: Trained, tolerance: float = 1e-5) -> None:
    seen = set()
    for state, _ in results:
        for name, value in state.items():
            torch.testing.assert_close(value, expected[0][name], rtol=tolerance, atol=tolerance)
            seen.add(name)
    assert seen == set(expected[0])


# -- shared weights -------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A linear layer with the weight of another."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def with_tied_ends() -> nn.Sequential:
    first, inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last = Tied(first.weight)
    return nn.Sequential(
        first, nn.Tanh(), inner, nn.Tanh(), nn.Linear(WIDTH, WIDTH), last, nn.Linear(WIDTH, 2), Tied(nn.Parameter(torch.eye(2)))
    )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_weights_shared_by_stages_get_the_sum_of_their_gradients(schedule: PipelineSchedule) -> None:
    expected = trained_alone(made(with_tied_ends), batches(8), clip=0.05)
    results = run_jobs(3, train, with_tied_ends, batches(8), 3, schedule, ["2", "5"], "Strategy()", 0.05)
    check_equal(results, expected)
    assert torch.equal(results[0][0]["0.weight"], results[2][0]["5.weight"])


def test_they_do_so_with_replicas_and_when_gradients_are_accumulated() -> None:
    data = batches(5, (6,))
    results = run_jobs(4, train, with_tied_ends, data, 2, OneForwardOneBackward(), ["2"], "Strategy()", 0.05, 2)
    check_equal(results, trained_alone(made(with_tied_ends), data, clip=0.05))  # a clip undoes that gradients count twice


@pytest.mark.parametrize(
    ("strategy", "why"), [("Strategy(schedule=Priority())", "after it"), ("Strategy(shard=Zero(1))", "slices of its own")]
)
def test_shared_weights_are_refused_where_gradients_are_not_whole_before_the_step(strategy: str, why: str) -> None:
    def loop(job: Job) -> str:
        with pytest.raises(ConfigurationError) as refused:
            train(job, with_tied_ends, batches(1), 2, GPipe(), ["2"], strategy)
        return str(refused.value)

    assert all("in which stages share parameters" in words and why in words for words in run_jobs(4, loop))


# -- values between stages --------------------------------------------------------------------------------------------------


class Opens(nn.Module):
    """Returns a dict: what it has computed, what came in (a skip connection), a mask that needs no gradient, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.linear(x)
        return {"h": h, "more": (h.detach() > 0, [x + h.sum()]), "scale": 0.5, "none": None}


class Passes(nn.Module):
    """Changes one of the values, and hands the others on as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "h": self.linear(values["h"]).tanh()}


class Closes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, values: dict[str, Any]) -> Tensor:
        mask, (skipped,) = values["more"]
        result: Tensor = self.linear(values["h"] * mask + skipped * values["scale"])
        return result


def with_a_skip() -> nn.Sequential:
    return nn.Sequential(Opens(), Passes(), Passes(), Closes())


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_dicts_with_skips_masks_and_plain_values_go_from_stage_to_stage(schedule: PipelineSchedule) -> None:
    # `h.sum()` is over a micro-batch, so the plain loop has micro-batches too: of one sample each.
    data = batches(6, (3,))
    model = made(with_a_skip)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in data:
        optimizer.zero_grad()
        for row in range(3):
            (nn.functional.mse_loss(model(x[row : row + 1]), y[row : row + 1]) / 3).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    check_equal(run_jobs(4, train, with_a_skip, data, 4, schedule), (model.state_dict(), []))


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return {"made of": object(), "x": self.linear(x)}


def test_what_cannot_travel_is_named() -> None:
    def loop(job: Job) -> str:
        pipeline = stretto.pipeline(made(lambda: nn.Sequential(Strange(), nn.Linear(WIDTH, 2))), 2, 2)
        with pytest.raises((ConfigurationError, stretto.StageFailed)) as refused:
            pipeline.forward_backward(*batches(1)[0], nn.functional.mse_loss)
        return str(refused.value)

    first, second = run_jobs(2, loop)
    assert "['made of'] is a builtins.object" in first and "as a tuple or dict" in first
    assert second.startswith("rank 0, stage 0 of the pipeline, failed in the forward of micro-batch 0: ConfigurationError")


# -- batches and random numbers -----------------------------------------------------------------------------------------------


def test_batches_of_every_size_count_as_they_should() -> None:
    data = batches(8, (8, 1, 5, 2, 4))
    for schedule in (OneForwardOneBackward(), Interleaved(2)):
        check_equal(run_jobs(2, train, chain, data, 2, schedule), trained_alone(made(chain), data))


def with_dropout() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.5), nn.Linear(64, 2))


def test_recomputation_draws_the_same_random_numbers() -> None:
    """Of one process with one stage: the threads of a test share one generator."""

    def gradients(*, recompute: bool) -> list[Tensor]:
        model = made(with_dropout)
        torch.manual_seed(3)

        def loop(job: Job) -> list[Tensor]:
            pipeline = stretto.pipeline(model, 1, 2, recompute=recompute)
            pipeline.forward_backward(*batches(1)[0], nn.functional.mse_loss)
            return [p.grad for p in pipeline.parameters() if p.grad is not None]

        result: list[Tensor] = run_jobs(1, loop)[0]
        return result

    for kept, anew in zip(gradients(recompute=False), gradients(recompute=True), strict=True):
        assert torch.equal(kept, anew)


def with_norm() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)
    )


def test_batch_norm_sees_micro_batches() -> None:
    """As a plain loop that accumulates over them does; replicas get the first one's statistics."""
    data = batches(4, (6,))
    model = made(with_norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in data:
        optimizer.zero_grad()
        for a, b in zip(x.split(2), y.split(2), strict=True):  # type: ignore[no-untyped-call]
            (nn.functional.mse_loss(model(a), b) / 3).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    check_equal(run_jobs(2, train, with_norm, data, 2, GPipe()), (model.state_dict(), []))
    results = run_jobs(4, train, with_norm, batches(3, (12,)), 2, GPipe(), None)
    for a, b in ((0, 1), (2, 3)):
        parameters = [name for name in results[a][0] if "running" not in name and "num_batches" not in name]
        assert all(torch.equal(results[a][0][name], results[b][0][name]) for name in parameters)


# -- around the loop ------------------------------------------------------------------------------------------------------------


def test_predict_and_evaluate_give_what_the_model_gives() -> None:
    x, y = batches(1, (7,))[0]
    model = made(chain)
    with torch.no_grad():
        expected = model(x.clone())

    def loop(job: Job, schedule: PipelineSchedule) -> tuple[Tensor | None, float]:
        pipeline = stretto.pipeline(made(chain), 3, 3, schedule).eval()
        return pipeline.predict(x.clone()), pipeline.evaluate(x.clone(), y, nn.MSELoss()).item()

    for schedule in (OneForwardOneBackward(), Interleaved(2)):
        first, second, third = run_jobs(3, loop, schedule)
        assert first[0] is None and second[0] is None
        torch.testing.assert_close(third[0], expected)
        assert first[1] == second[1] == third[1] == pytest.approx(nn.functional.mse_loss(expected, y).item(), abs=1e-6)


def test_losses_that_are_sums_are_added_up() -> None:
    x, y = batches(1, (7,))[0]
    model = made(chain)
    expected = nn.functional.mse_loss(model(x.clone()), y, reduction="sum")
    expected.backward()  # type: ignore[no-untyped-call]

    def loop(job: Job) -> tuple[float, dict[str, Tensor | None]]:
        pipeline = stretto.pipeline(made(chain), 2, 3, loss="sum")
        loss = pipeline.forward_backward(x.clone(), y, nn.MSELoss(reduction="sum"))
        return loss.item(), {name: p.grad for name, p in pipeline.module.named_parameters()}

    known = {name: p.grad for name, p in model.named_parameters()}
    for loss, gradients in run_jobs(2, loop):
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, known[name])


def test_a_stage_can_be_copied() -> None:
    def loop(job: Job) -> bool:
        pipeline = stretto.pipeline(made(chain), 2, 2)
        stretto.distribute(pipeline.module, torch.optim.SGD(pipeline.parameters(), lr=0.1))
        copied = copy.deepcopy(pipeline.module)
        return all(torch.equal(value, copied.state_dict()[name]) for name, value in pipeline.module.state_dict().items())

    assert run_jobs(2, loop) == [True, True]


def test_a_sampler_gives_all_stages_of_a_replica_the_same() -> None:
    def loop(job: Job) -> list[int]:
        pipeline = stretto.pipeline(made(chain), 2, 2)
        return [int(each) for each in stretto.Sampler(range(12), seed=3, job=pipeline.job)]

    first, second, third, fourth = run_jobs(4, loop)
    assert first == third and second == fourth and sorted(first + second) == list(range(12))


# -- replicas, with any strategy -----------------------------------------------------------------------------------------------

EXACT = (
    "Strategy(schedule=AfterBackward())",
    "Strategy(schedule=WaitFree())",
    "Strategy(schedule=Buckets(bytes=100))",
    "Strategy(schedule=Priority())",
    "Strategy(schedule=Merged())",
    "Strategy(aggregate=Hierarchy())",
    "hypar_flow()",
)
COMPILED = ("Int8()", "PowerSGD(rank=2)", "ErrorFeedback(TopK(0.1))")  # whose kernels may have to be compiled first
LOSSY = (
    "Strategy(compress=Float16())",
    "Strategy(compress=ErrorFeedback(Sign()))",
    "Strategy(sync=StaleSynchronous(1))",
    "Strategy(sync=LocalSGD(every=5))",
    *(pytest.param(f"Strategy(compress={codec})", marks=pytest.mark.slow) for codec in COMPILED),
    pytest.param("Strategy(aggregate=Hierarchy(), compress=Int8())", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("strategy", EXACT)
def test_replicas_train_with_any_exact_strategy(strategy: str) -> None:
    data = batches(5, (6,))
    check_equal(
        run_jobs(4, train, chain, data, 2, OneForwardOneBackward(), None, strategy), trained_alone(made(chain), data), 1e-4
    )


SLICED = [
    (stage, schedule, recompute)
    for stage in (1, 2, 3)
    for schedule in (*SCHEDULES, Interleaved(2))
    for recompute in (False, True)
    if schedule != ZeroBubble() or (stage < 3 and not recompute)  # the others are refused
]
QUICK_SLICED = [
    (1, OneForwardOneBackward(), False),
    (1, ZeroBubble(), False),
    (2, Interleaved(2), False),
    (3, OneForwardOneBackward(), True),
    (3, GPipe(), False),
]


@pytest.mark.parametrize(
    ("stage", "schedule", "recompute"),
    [pytest.param(*each, marks=() if each in QUICK_SLICED else pytest.mark.slow) for each in SLICED],
    ids=repr,
)
def test_replicas_train_with_slices_of_every_stage(stage: int, schedule: PipelineSchedule, recompute: bool) -> None:
    data, shard = batches(20 if stage == 1 else 5, (6,)), f"Strategy(shard=Zero({stage}))"
    results = run_jobs(4, train, chain, data, 2, schedule, None, shard, None, 1, recompute)
    check_equal(results, trained_alone(made(chain), data), 1e-5)


@pytest.mark.parametrize("strategy", ["Strategy(schedule=Priority())", "Strategy(shard=Zero(2))"])
def test_they_clip_by_the_norm_of_all_gradients_wherever_these_are(strategy: str) -> None:
    """On their way across the barrier, or in slices."""
    data = batches(5, (6,))
    results = run_jobs(4, train, chain, data, 2, OneForwardOneBackward(), None, strategy, 0.05)
    check_equal(results, trained_alone(made(chain), data, clip=0.05), 1e-4)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_the_norm_is_that_of_all_stages_whoever_is_asked(norm_type: float) -> None:
    x, y = batches(1)[0]
    model = made(with_tied_ends)
    nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    before = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
    expected = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}

    def loop(job: Job, by_name: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
        pipeline = stretto.pipeline(made(with_tied_ends), 3, 3, cut=["2", "5"])
        pipeline.forward_backward(x, y, nn.functional.mse_loss)
        if by_name:
            norm = stretto.clip_grad_norm_(pipeline.parameters(), 0.05, norm_type)
        else:
            norm = pipeline.clip_grad_norm_(0.05, norm_type)
        return norm, {name: p.grad for name, p in pipeline.module.named_parameters()}

    for by_name in (False, True):
        for norm, gradients in run_jobs(3, loop, by_name):
            torch.testing.assert_close(norm, before)
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[name])


def test_clipping_says_what_is_not_finite_and_what_is_not_of_the_pipeline() -> None:
    def loop(job: Job) -> None:
        pipeline = stretto.pipeline(made(chain), 2, 2)
        other = nn.Parameter(torch.zeros(1))
        with pytest.raises(ConfigurationError, match=r"Write pipeline.clip_grad_norm_\(max_norm\)"):
            stretto.clip_grad_norm_([*pipeline.parameters(), other], 1.0)
        with pytest.raises(ConfigurationError, match="norm_type=0: the order of a norm"):
            pipeline.clip_grad_norm_(1.0, 0)
        for parameter in pipeline.parameters():
            parameter.grad = torch.full_like(parameter, float("nan") if pipeline.is_first else 1.0)
        for norm_type in (2.0, float("inf")):
            with pytest.raises(RuntimeError, match="is nan, so it cannot be clipped"):
                pipeline.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)

    run_jobs(2, loop)


@pytest.mark.parametrize("strategy", LOSSY)
def test_replicas_stay_equal_with_any_lossy_strategy(strategy: str) -> None:
    results = run_jobs(4, train, chain, batches(5, (6,)), 2, OneForwardOneBackward(), None, strategy, timeout_s=200)
    for a, b in ((0, 1), (2, 3)):
        for name, value in results[a][0].items():
            assert torch.equal(value, results[b][0][name]), re.sub("Strategy", "", strategy)


@pytest.mark.parametrize("aggregate", ["ParameterServer()", "Gossip(graph=Complete(), push_sum=True)", "SharedMemory()"])
def test_ways_to_train_that_take_all_workers_are_refused(aggregate: str) -> None:
    sync = ", sync=Asynchronous()" if "Shared" in aggregate else ""

    def loop(job: Job) -> str:
        with pytest.raises(ConfigurationError) as refused:
            train(job, chain, batches(1), 2, GPipe(), None, f"Strategy(aggregate={aggregate}{sync})")
        return str(refused.value)

    assert all("Write aggregate=AllReduce() or aggregate=Hierarchy()" in words for words in run_jobs(4, loop))
