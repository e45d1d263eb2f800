"""The life of a round: who is in it, what ends it, and what happens when a backward does not get to its end."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from engine.worker import (
    RING,
    assert_equal_everywhere,
    bytes_sent,
    data,
    gradients_of,
    mlp,
    rounds,
    seeded,
    start,
    state_of,
)
from laws.cases import Checkpointed
from stretto.aggregate.all_reduce.training import SynchronousAllReduce
from stretto.distributing import distribute, engine_of, join, no_sync, weight
from stretto.engine.training import RoundEnd
from stretto.errors import BackwardFailed, ConfigurationError, NonFiniteGradient, PeerLost
from stretto.job import Job
from stretto.schedule.orders import AfterBackward, WaitFree
from stretto.strategy import Strategy
from stretto.testing import run_jobs


def mean_gradients(size: int, step: int = 0, only: list[int] | None = None) -> dict[str, Tensor]:
    """What one process computes from everybody's data."""
    model = mlp()
    ranks = list(range(size)) if only is None else only
    for rank in ranks:
        (model(data(rank, step)).pow(2).mean() / len(ranks)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-14)


# -- unused -----------------------------------------------------------------------------------------------------------


def test_a_parameter_that_nobody_uses_keeps_no_gradient_and_is_not_decayed() -> None:
    def program(job: Job) -> None:
        model: Any = nn.ModuleDict({"used": nn.Linear(2, 2), "never": nn.Linear(2, 2)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        distribute(model, optimizer, RING, job=job)
        before = model["never"].weight.detach().clone()
        for _ in range(3):
            model["used"](torch.ones(1, 2)).sum().backward()
            assert model["never"].weight.grad is None and model["used"].weight.grad is not None
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(model["never"].weight, before)

    run_jobs(3, program)


def test_a_parameter_that_some_use_is_combined_with_zeros() -> None:
    def program(job: Job) -> None:
        model: Any = nn.ModuleDict({"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1, bias=False)})
        start(job, model)
        model["b" if job.rank == 2 else "a"](torch.full((1, 2), job.rank + 1.0)).sum().backward()
        assert torch.equal(model["a"].weight.grad, torch.full((1, 2), (1.0 + 2.0) / 3))
        assert torch.equal(model["b"].weight.grad, torch.full((1, 2), 3.0 / 3))

    run_jobs(3, program)


# -- beginning and end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [AfterBackward(), WaitFree()], ids=repr)
def test_a_parameter_of_two_checkpointed_segments_is_late_and_still_right(schedule: Any) -> None:
    reference = seeded(lambda: Checkpointed(False).double())  # here, since checkpointing sets the random state of the process
    for rank in range(3):
        (reference(data(rank, width=6)).pow(2).mean() / 3).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}

    def program(job: Job) -> int:
        model = seeded(lambda: Checkpointed(True).double())
        start(job, model, Strategy(aggregate=RING.aggregate, schedule=schedule))
        training, late = cast(SynchronousAllReduce, engine_of(model).training), list[int]()
        add_late = training._add_late

        def add_and_count(end: RoundEnd, used: list[list[bool]]) -> None:
            late.append(len(end.late))
            add_late(end, used)

        training._add_late = add_and_count  # type: ignore[method-assign]
        model(data(job.rank, width=6)).pow(2).mean().backward()
        assert rounds(model) == 1
        assert_gradients(model, expected)
        return sum(late)

    for num_late in run_jobs(3, program):
        assert (num_late > 0) == (schedule == WaitFree())


def test_submodules_called_directly_are_synchronised() -> None:
    def program(job: Job) -> None:
        model = mlp()
        start(job, model)
        hidden = data(job.rank)
        for layer in model:
            hidden = layer(hidden)
        torch.autograd.backward(hidden.pow(2).mean())
        assert_gradients(model, mean_gradients(3))

    run_jobs(3, program)


def test_outputs_in_dicts_tuples_and_unknown_objects_are_all_right() -> None:
    class Opaque:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Odd(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Any:
            out = self.inner(x)
            return {"a": [(out, None)], "b": 3, "c": Opaque(out)}

    def program(job: Job) -> None:
        inner = mlp()
        model = Odd(inner)
        start(job, model)
        model(data(job.rank))["c"].value.pow(2).mean().backward()
        assert_gradients(inner, mean_gradients(2))
        assert rounds(model) == 1

    run_jobs(2, program)


def test_nothing_is_sent_in_evaluation_or_without_gradients_even_by_one_rank_alone() -> None:
    def program(job: Job) -> None:
        model = mlp()
        start(job, model)
        before = bytes_sent(job)
        if job.rank == 1:
            with torch.no_grad():
                model(data(0))
            model.eval()
            model(data(0))
            with torch.inference_mode():
                model(data(0))
            model.train()
        assert bytes_sent(job) == before
        model(data(job.rank)).pow(2).mean().backward()
        assert_gradients(model, mean_gradients(3))

    run_jobs(3, program)


def test_training_in_evaluation_mode_is_synchronised() -> None:
    def program(job: Job) -> None:
        model = mlp().eval()
        start(job, model)
        model(data(job.rank)).pow(2).mean().backward()
        assert_gradients(model, mean_gradients(2))

    run_jobs(2, program)


def test_gradients_wrt_inputs_alone_start_no_round() -> None:
    def program(job: Job) -> None:
        model = mlp()
        start(job, model)
        before = bytes_sent(job)
        x = data(job.rank).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
        assert bytes_sent(job) == before and rounds(model) == 0
        model(data(job.rank)).pow(2).mean().backward()
        assert_gradients(model, mean_gradients(2))

    run_jobs(2, program)


def test_no_sync_sends_nothing_and_what_it_gathered_goes_with_the_next_round() -> None:
    def program(job: Job) -> None:
        model = mlp()
        start(job, model)
        before = bytes_sent(job)
        with no_sync(model):
            (model(data(job.rank, 0)).pow(2).mean() / 2).backward()
            assert bytes_sent(job) == before
        (model(data(job.rank, 1)).pow(2).mean() / 2).backward()
        first, second = mean_gradients(3, 0), mean_gradients(3, 1)
        assert_gradients(model, {name: (first[name] + second[name]) / 2 for name in first})

    run_jobs(3, program)


def test_only_backward_decides_about_no_sync() -> None:
    def program(job: Job) -> None:
        model = mlp()
        start(job, model)
        with no_sync(model):
            loss = model(data(job.rank)).pow(2).mean()
        loss.backward()
        assert_gradients(model, mean_gradients(2))

    run_jobs(2, program)


# -- failures ---------------------------------------------------------------------------------------------------------


class Bomb(torch.autograd.Function):
    """Does nothing, and raises in backward if it is armed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, armed: bool) -> Tensor:
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.armed:
            raise ZeroDivisionError("on purpose")
        return gradient, None


class Mined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = Bomb.apply(self.layers[:2](x), self.armed)  # type: ignore[no-untyped-call]
        out: Tensor = self.layers[2:](hidden)  # these have their gradients, and some have been sent, when it goes off
        return out


@pytest.mark.parametrize("failing", [[0, 1, 2], [1], [0, 2]], ids=str)
@pytest.mark.parametrize("schedule", [AfterBackward(), WaitFree()], ids=repr)
def test_after_an_exception_in_backward_nobody_steps_and_training_goes_on(failing: list[int], schedule: Any) -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = Mined()
        optimizer = start(job, model, Strategy(aggregate=RING.aggregate, schedule=schedule))
        for step in range(4):
            model.armed = step == 1 and job.rank in failing
            loss = model(data(job.rank, step)).pow(2).mean()
            try:
                loss.backward()
            except ZeroDivisionError:
                assert step == 1 and job.rank in failing
                continue
            except BackwardFailed as failed:
                assert step == 1 and job.rank not in failing
                assert failed.ranks == failing
                assert all(p.grad is None for p in model.parameters())
                continue
            assert step != 1
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    states = run_jobs(3, program)
    assert_equal_everywhere(states)
    model = Mined()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in (0, 2, 3):
        for rank in range(3):
            (model(data(rank, step)).pow(2).mean() / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in state_of(model).items():
        torch.testing.assert_close(states[0][name], value, rtol=1e-12, atol=1e-14)


def test_a_step_after_a_swallowed_exception_changes_nothing() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = Mined()
        optimizer = start(job, model)
        before = state_of(model)
        model.armed = True
        with pytest.raises(ZeroDivisionError):
            model(data(job.rank)).sum().backward()
        optimizer.step()
        assert_equal_everywhere([before, state_of(model)])
        model.armed = False
        model(data(job.rank)).sum().backward()
        optimizer.step()
        return state_of(model)

    assert_equal_everywhere(run_jobs(3, program))


def test_backward_may_be_tried_again_without_another_forward() -> None:
    def program(job: Job) -> None:
        model: Any = mlp()
        start(job, model)
        armed = [True]

        def explode(gradient: Tensor) -> None:
            if armed[0]:
                raise ZeroDivisionError("on purpose")

        loss = model(data(job.rank)).pow(2).mean()
        handle = model[0].weight.register_hook(explode)
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        armed[0] = False
        loss.backward()
        handle.remove()
        assert_gradients(model, mean_gradients(3))
        assert rounds(model) == 2

    run_jobs(3, program)


def test_an_exception_in_forward_costs_nothing() -> None:
    def program(job: Job) -> None:
        model = mlp()
        start(job, model)
        if job.rank == 1:
            with pytest.raises(RuntimeError, match="shape"):
                model(torch.ones(3, 7, dtype=torch.float64))
        model(data(job.rank)).pow(2).mean().backward()
        assert_gradients(model, mean_gradients(3))

    run_jobs(3, program)


def test_a_lost_peer_ends_training_on_all_others_with_its_rank() -> None:
    def program(job: Job) -> None:
        model = mlp()
        optimizer = start(job, model)
        for step in range(3):
            if job.rank == 1 and step == 1:
                assert job.wire is not None
                job.wire.kill()  # type: ignore[attr-defined]
                return
            try:
                model(data(job.rank, step)).sum().backward()
            except PeerLost as lost:
                assert step <= 1 and lost.rank == 1  # 0: it was done with that round, and died before we were
                break
            optimizer.step()
        else:
            raise AssertionError("nobody was lost")
        before = state_of(model)
        with pytest.raises(PeerLost, match="rank 1"):  # training on gives the same answer, at once
            model(data(job.rank)).sum().backward()
        optimizer.step()
        assert_equal_everywhere([before, state_of(model)])

    run_jobs(3, program)


def test_training_on_after_a_peer_has_left_names_it() -> None:
    def program(job: Job) -> None:
        model = mlp()
        start(job, model)
        if job.rank == 2:
            return
        with pytest.raises(PeerLost, match="rank 2"):
            model(data(job.rank)).sum().backward()

    run_jobs(3, program)


# -- finite or not ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_by_default_a_bad_gradient_is_bad_on_all_ranks(bad: float) -> None:
    def program(job: Job) -> None:
        model = mlp()
        start(job, model)
        (model(data(job.rank)).sum() * (bad if job.rank == 1 else 1.0)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None and not parameter.grad.isfinite().any()

    run_jobs(3, program)


def test_with_check_finite_all_ranks_raise_and_name_rank_and_parameter() -> None:
    def program(job: Job) -> None:
        model: Any = mlp()
        optimizer = start(job, model, check_finite=True)
        model(data(job.rank)).sum().backward()
        loss = model(data(job.rank)).sum()
        if job.rank == 1:
            model[2].bias.register_hook(lambda g: g * float("nan"))
        if job.rank == 2:
            model[0].weight.register_hook(lambda g: g * float("inf"))
        with pytest.raises(NonFiniteGradient, match="rank 1 in '2.bias', rank 2 in '0.weight'") as caught:
            loss.backward()
        assert caught.value.found == {1: "2.bias", 2: "0.weight"}
        optimizer.zero_grad()

    run_jobs(3, program)


@pytest.mark.parametrize("size", [1, 2])
def test_check_finite_sees_sparse_gradients_and_a_world_of_one(size: int) -> None:
    def program(job: Job) -> None:
        model = nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        distribute(model, optimizer, RING, check_finite=True, job=job)
        (model(torch.tensor([job.rank])).sum() * 2).backward()
        optimizer.zero_grad()
        with pytest.raises(NonFiniteGradient, match="rank 0 in 'weight'"):
            (model(torch.tensor([job.rank])).sum() * (float("nan") if job.rank == 0 else 1)).backward()

    run_jobs(size, program)


# -- weights and running out of data ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[6, 2, 4], [5, 0, 1]], ids=str)
def test_unequal_batches_are_weighted_into_the_mean_over_samples(lengths: list[int]) -> None:
    def program(job: Job) -> None:
        model = mlp()
        start(job, model)
        weight(lengths[job.rank], job=job)
        model(data(job.rank, length=lengths[job.rank])).pow(2).mean().backward()  # NaN for the empty one
        reference = mlp()
        everything = torch.cat([data(rank, length=length) for rank, length in enumerate(lengths)])
        reference(everything).pow(2).mean().backward()
        assert_gradients(model, {n: p.grad for n, p in reference.named_parameters() if p.grad is not None})

    run_jobs(3, program)


def test_weights_hold_for_sparse_gradients() -> None:
    def program(job: Job) -> None:
        model = seeded(lambda: nn.Embedding(4, 2, sparse=True))
        start(job, model)
        weight(float(job.rank), job=job)
        scale = float("nan") if job.rank == 0 else float(job.rank)
        (model(torch.tensor([job.rank, 3])) * scale).sum().backward()
        gradient = model.weight.grad.to_dense()
        expected = torch.tensor([0.0, 1 * 1 / 3, 2 * 2 / 3, (1 * 1 + 2 * 2) / 3])
        torch.testing.assert_close(gradient, expected[:, None].expand(4, 2))

    run_jobs(3, program)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_makes_no_sense_is_refused(bad: float) -> None:
    def program(job: Job) -> None:
        with pytest.raises(ConfigurationError, match="a weight is a finite number, 0 or more"):
            weight(bad, job=job)

    run_jobs(1, program)


@pytest.mark.parametrize("batches", [[3, 5, 1], [0, 2, 2], [4, 4, 4], [0, 0, 0]], ids=str)
def test_workers_may_run_out_of_batches_at_different_times(batches: list[int]) -> None:
    def program(job: Job) -> tuple[dict[str, Tensor], Any]:
        model = mlp(job.rank)
        optimizer = start(job, model)
        with join(model):
            for step in range(batches[job.rank]):
                model(data(job.rank, step)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        momentum = {f"momentum {n}": s["momentum_buffer"].clone() for n, s in optimizer.state_dict()["state"].items()}
        job.barrier()
        return {**state_of(model), **momentum}, None

    states = [state for state, _ in run_jobs(3, program)]
    assert_equal_everywhere(states)
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(max(batches)):
        there = [rank for rank in range(3) if step < batches[rank]]
        for rank in there:
            (model(data(rank, step)).pow(2).mean() / len(there)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in state_of(model).items():
        torch.testing.assert_close(states[0][name], value, rtol=1e-10, atol=1e-14)


def test_training_goes_on_together_after_a_join() -> None:
    def program(job: Job) -> dict[str, Tensor]:
        model = mlp()
        optimizer = start(job, model)
        for _ in range(2):
            with join(model):
                for step in range(1 + job.rank):
                    model(data(job.rank, step)).pow(2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        model(data(job.rank)).sum().backward()
        optimizer.step()
        return state_of(model)

    assert_equal_everywhere(run_jobs(3, program))


# -- memory -----------------------------------------------------------------------------------------------------------


def test_gradients_live_in_the_buckets_and_nowhere_else() -> None:
    """As DDP with gradient_as_bucket_view=True: one copy of the gradients. Beside them only the notes of each bucket."""

    def program(job: Job) -> None:
        model = seeded(lambda: nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)]))
        optimizer = start(job, model)
        for _ in range(2):
            model(torch.ones(2, 32)).sum().backward()
            storages = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in model.parameters()}
            buckets = engine_of(model).buckets
            assert set(storages) == {bucket.flat.untyped_storage().data_ptr() for bucket in buckets}
            num_parameters = sum(1 for _ in model.parameters())
            own = sum(p.numel() * p.element_size() for p in model.parameters())
            assert sum(storages.values()) == own + 4 * (5 * len(buckets) + num_parameters)
            optimizer.step()
            optimizer.zero_grad()
        assert gradients_of(model)["0.weight"] is None

    run_jobs(2, program)
