"""Compressed gradients in training loops: what users do, and what they must not."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.worker import remembered
from stretto.aggregate.all_reduce import compression_thread
from stretto.aggregate.all_reduce.compression_thread import CompressionThread, ThreadedExchange
from stretto.aggregate.all_reduce.exchange import UnderWay
from stretto.checkpoint import load, save
from stretto.collectives.plan import Kind, Plan
from stretto.collectives.request import Pending, Request
from stretto.compress.by_parameter import ByParameter
from stretto.compress.codec import Compression
from stretto.compress.demo import DeMo
from stretto.compress.dgc import DGC
from stretto.compress.ef21 import EF21
from stretto.compress.error_feedback import RESIDUAL, ErrorFeedback
from stretto.compress.float16 import Float16
from stretto.compress.int8 import Int8
from stretto.compress.none import NoCompression
from stretto.compress.one_bit_adam import OneBitAdam
from stretto.compress.power_sgd import PowerSGD
from stretto.compress.sign import Sign
from stretto.compress.state import SERVER
from stretto.compress.top_k import TopK
from stretto.distributing import distribute, engine_of, join, no_sync, weight
from stretto.errors import BackwardFailed, ConfigurationError, FrameError, NonFiniteGradient, StrettoError
from stretto.job import Job
from stretto.plan.choose import Choices
from stretto.plan.costs import LinkCosts
from stretto.schedule.orders import AfterBackward, WaitFree
from stretto.strategy import Strategy
from stretto.testing import run_jobs

_building = threading.Lock()  # torch's random state belongs to the process, and ranks are threads here
SIGN = ErrorFeedback(Sign(block=64))
TOP = ErrorFeedback(TopK(0.1))


def make(seed: int = 0) -> nn.Sequential:
    with _building, torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def begin(job: Job, compress: Compression = SIGN, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = make()
    job.choices = Choices([0], ["ring"], LinkCosts(alpha=1e-5, beta=1e-9, gamma=1e-9))  # not tried out in every test
    return distribute(model, sgd(model), Strategy(compress=compress, schedule=WaitFree()), job=job, **options)


def batch(job: Job, number: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(100 * number + job.rank))


def backward(model: nn.Module, x: Tensor, scale: float = 1.0) -> None:
    loss: Tensor = model(x).pow(2).mean() * scale
    torch.autograd.backward(loss)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def residuals(model: nn.Module) -> dict[str, Tensor]:
    return {name: kinds[RESIDUAL] for name, kinds in remembered(model).own.items() if RESIDUAL in kinds}


# -- how gradients are grouped ----------------------------------------------------------------------------------------


def test_buckets_that_travel_compressed_are_larger_on_the_same_links() -> None:
    def program(job: Job, compress: Compression) -> int:
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(16)))
        job.choices = Choices([0], ["ring"], LinkCosts(alpha=2e-4, beta=1e-7, gamma=1e-9))
        distribute(model, sgd(model), Strategy(compress=compress), job=job)
        return len(engine_of(model).training.buckets)  # type: ignore[attr-defined]

    plain, compressed = (run_jobs(2, program, compress, hosts=("a", "b")) for compress in (NoCompression(), Sign()))
    assert compressed[0] == compressed[1] and 1 < compressed[0] < plain[0] == plain[1]


def test_workers_of_one_host_have_larger_buckets_than_those_of_several() -> None:
    def program(job: Job) -> int:
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))  # 4 MiB
        job.choices = Choices([0], ["ring"], LinkCosts(alpha=2e-4, beta=1e-7, gamma=1e-9))
        distribute(model, sgd(model), job=job)
        return len(engine_of(model).training.buckets)  # type: ignore[attr-defined]

    assert run_jobs(2, program) == [1, 1]
    assert min(run_jobs(2, program, hosts=("a", "b"))) > 1


def test_all_parameters_may_be_frozen_for_a_while() -> None:
    def program(job: Job) -> bool:
        model = make()
        job.choices = Choices([0], ["ring"], LinkCosts(alpha=1e-5, beta=1e-9, gamma=1e-9))
        _, optimizer = distribute(model, sgd(model), Strategy(compress=Int8()), job=job)
        model.requires_grad_(False)
        model(batch(job, 0))
        model.requires_grad_(True)
        backward(model, batch(job, 1))
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        return not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    assert run_jobs(2, program) == [True, True]


# -- what a loop does -------------------------------------------------------------------------------------------------


def test_accumulated_gradients_are_compressed_once() -> None:
    def program(job: Job) -> tuple[list[Tensor], list[Tensor]]:
        model, _ = begin(job, Float16())
        with no_sync(model):
            backward(model, batch(job, 0))
        backward(model, batch(job, 1))
        other, _ = begin(job, Float16())
        (other(batch(job, 0)).pow(2).mean() + other(batch(job, 1)).pow(2).mean()).backward()
        return gradients(model), gradients(other)

    for mine, expected in run_jobs(3, program):
        assert all(torch.allclose(a, b, rtol=2e-3, atol=1e-6) for a, b in zip(mine, expected, strict=True))


@pytest.mark.parametrize("size", [1, 2])
def test_a_second_backward_before_the_step_is_refused_and_the_way_out_works(size: int) -> None:
    def program(job: Job) -> None:
        model, optimizer = begin(job)
        backward(model, batch(job, 0))
        with pytest.raises(ConfigurationError, match=r"second backward before optimizer.step(.|\n)*no_sync"):
            backward(model, batch(job, 1))
        optimizer.zero_grad()
        backward(model, batch(job, 2))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # zeros stay in place, and are added to: not a second mean
        backward(model, batch(job, 3))
        optimizer.zero_grad()
        backward(model, batch(job, 4))  # this step was left out

    run_jobs(size, program)


def test_workers_that_run_out_keep_their_residuals_and_take_part() -> None:
    def program(job: Job) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
        model, optimizer = begin(job, TOP)
        kept: dict[str, Tensor] = {}
        with join(model):
            for number in range(2 + job.rank):
                backward(model, batch(job, number))
                optimizer.step()
                optimizer.zero_grad()
                kept = residuals(model)
        return [p.detach().clone() for p in model.parameters()], kept, residuals(model)

    results = run_jobs(3, program)
    for parameters, kept, after in results:
        assert all(torch.equal(a, b) for a, b in zip(parameters, results[0][0], strict=True))
        assert all(torch.equal(kept[name], after[name]) for name in kept)


def test_weights_count_in_the_mean() -> None:
    def program(job: Job) -> tuple[list[Tensor], list[Tensor]]:
        model, _ = begin(job, Float16())
        plain = copy.deepcopy(model)
        weight(1.0 + job.rank, job=job)
        backward(model, batch(job, 0))
        backward(plain, batch(job, 0))
        return gradients(model), gradients(plain)

    results = run_jobs(3, program)
    for mine, _ in results:
        for index, found in enumerate(mine):
            exact = sum((1.0 + rank) * theirs[index] for rank, (_, theirs) in enumerate(results)) / 6.0
            assert torch.allclose(found, torch.as_tensor(exact), rtol=5e-3, atol=1e-5)


def test_a_backward_that_fails_leaves_residuals_untouched() -> None:
    def program(job: Job) -> None:
        model, optimizer = begin(job)
        backward(model, batch(job, 0))
        optimizer.step()
        optimizer.zero_grad()
        before = residuals(model)
        if job.rank == 1:
            out = model(batch(job, 1))
            spoiled: Any = model[2].weight
            handle = spoiled.register_hook(_fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                out.sum().backward()
            handle.remove()
        else:
            with pytest.raises(BackwardFailed):
                backward(model, batch(job, 1))
        if job.rank == 1:
            engine_of(model).flush()
        after = residuals(model)
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        backward(model, batch(job, 2))
        optimizer.step()

    run_jobs(2, program)


def _fail(gradient: Tensor) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("compress", [SIGN, TOP, ErrorFeedback(PowerSGD(2, min_rate=0.0)), EF21(TopK(0.1))], ids=repr)
def test_parameters_frozen_and_unfrozen_keep_what_they_had(compress: Compression) -> None:
    """Other buckets, other owners of blocks: residuals follow their parameters, and nothing of the server's is lost."""

    def program(job: Job) -> tuple[Any, Any, int]:
        model, optimizer = begin(job, compress)
        model[2].requires_grad_(False)
        layouts = set()
        for number in range(8):
            model[0].requires_grad_(number < 3 or number >= 6)
            model[2].requires_grad_(number >= 1)
            if number == 3:
                before = remembered(model).own["0.weight"]
            if number == 6:
                after = remembered(model).own["0.weight"]
            backward(model, batch(job, number))
            layouts.add(tuple(name for bucket in engine_of(model).buckets for name in bucket.names))
            optimizer.step()
            optimizer.zero_grad()
        return before, after, len(layouts)

    results = run_jobs(3, program)
    assert all(layouts >= 2 for _, _, layouts in results)
    before, after = (_mean_owed([{"0.weight": result[index]} for result in results]) for index in (0, 1))
    assert before.keys() == after.keys() and any(bool(value.any()) for value in before.values())
    assert all(torch.allclose(before[key], after[key], atol=1e-6) for key in before)


@pytest.mark.parametrize("compress", [SIGN, TOP, ErrorFeedback(PowerSGD(2)), EF21(TopK(0.1)), OneBitAdam(1)], ids=repr)
def test_a_parameter_that_nobody_used_keeps_what_it_had(compress: Compression) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 30), nn.Linear(6, 30)

        def forward(self, x: Tensor, two: bool) -> Tensor:
            out: Tensor = self.one(x) + self.two(x) if two else self.one(x)
            return out

    def program(job: Job) -> None:
        model = Branches()
        job.choices = Choices([0], ["ring"], LinkCosts(alpha=1e-5, beta=1e-9, gamma=1e-9))
        _, optimizer = distribute(model, sgd(model), Strategy(compress=compress), job=job)
        for number in range(5):
            own, shared = (part.get("two.weight", {}) for part in remembered(model)[1:])
            model(batch(job, number), number % 2 == 0).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for before, part in zip((own, shared), remembered(model)[1:], strict=True):
                after = part.get("two.weight", {})
                unchanged = all(torch.equal(before[kind], after[kind]) for kind in before)
                assert unchanged or number % 2 == 0

    run_jobs(3, program)


def test_a_scaler_changes_nothing_when_it_is_given() -> None:
    """Loss scales of every size give the same gradients, residuals included: they are kept in unscaled units."""

    def program(job: Job) -> tuple[list[Tensor], list[Tensor]]:
        return _scaled(job, [1.0, 1.0, 1.0]), _scaled(job, [1.0, 1024.0, 2.0**-6])

    def _scaled(job: Job, scales: list[float]) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        model, optimizer = begin(job, SIGN, scaler=scaler)
        for number, scale in enumerate(scales):
            scaler.update(scale) if number else scaler.scale(torch.tensor(1.0))
            scaler._scale = torch.tensor(scale)  # as if it had grown or shrunk to this
            loss: Tensor = scaler.scale(model(batch(job, number)).pow(2).mean())
            torch.autograd.backward(loss)
            scaler.step(optimizer)
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    for plain, scaled in run_jobs(3, program):
        assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-8) for a, b in zip(plain, scaled, strict=True))


def test_a_step_that_overflows_is_skipped_by_the_scaler_everywhere() -> None:
    def program(job: Job) -> list[bool]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        model, optimizer = begin(job, SIGN, scaler=scaler)
        same = []
        for number in range(3):
            before = [p.detach().clone() for p in model.parameters()]
            x = batch(job, number)
            if number == 1 and job.rank == 1:
                x = x * float("inf")
            loss: Tensor = scaler.scale(model(x).pow(2).mean())
            torch.autograd.backward(loss)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            same.append(all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
        return [*same, scaler.get_scale() == 2.0]

    assert run_jobs(3, program) == [[False, True, False, True]] * 3


def test_check_finite_names_rank_and_parameter() -> None:
    def program(job: Job) -> str:
        model, _ = begin(job, check_finite=True)
        x = batch(job, 0)
        with pytest.raises(NonFiniteGradient) as caught:
            backward(model, x * float("nan") if job.rank == 2 else x)
        return str(caught.value)

    assert {message.splitlines()[0] for message in run_jobs(3, program)} == {"a gradient is not finite: rank 2 in '2.bias'."}


def test_low_precision_and_empty_parameters_are_compressed_too() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(6, 9).bfloat16()
            self.high = nn.Linear(9, 1).double()
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.never = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.high(self.low(x.bfloat16()).double()) * self.scale + self.empty.sum()
            return out

    def program(job: Job) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Odd()
        _, optimizer = distribute(model, sgd(model), Strategy(compress=SIGN), job=job)
        for number in range(2):
            backward(model, batch(job, number))
            found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        assert model.never.weight.grad is None
        return found

    first, *others = run_jobs(3, program)
    for other in others:
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_last_round_of_a_join_changes_nothing() -> None:
    """In it nobody has data any more."""

    def program(job: Job) -> tuple[int, bool]:
        model, optimizer = begin(job, SIGN)
        with join(model):
            for number in range(2 + job.rank):
                backward(model, batch(job, number))
                optimizer.step()
                optimizer.zero_grad()
        return remembered(model).rounds, True

    assert run_jobs(3, program) == [(4, True)] * 3


@pytest.mark.parametrize(
    ("compress", "expected"), [(DeMo(sign=False), "mean"), (DeMo(), "direction"), (Sign(vote=True), "direction"), (SIGN, "mean")]
)
def test_weights_scale_means_and_not_directions(compress: Compression, expected: str) -> None:
    def program(job: Job) -> list[list[Tensor]]:
        out = []
        for value in (1.0, 8.0):
            weight(value, job=job)
            model, _ = begin(job, compress)
            backward(model, batch(job, 0))
            out.append(gradients(model))
        return out

    assert compress.hands_out == expected
    for once, eight in run_jobs(2, program):
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(once, eight, strict=True))


def test_a_clipped_gradient_is_clipped_in_its_own_units() -> None:
    def program(job: Job) -> list[list[Tensor]]:
        out = []
        for value in (1.0, 8.0):
            weight(value, job=job)
            model, _ = begin(job, DGC(0.5, clip=0.1, warm_up=()))
            backward(model, batch(job, 0))
            out.append(gradients(model))
        return out

    for once, eight in run_jobs(2, program):
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(once, eight, strict=True))


@pytest.mark.parametrize("compress", [SIGN, TOP, ErrorFeedback(PowerSGD(2))], ids=repr)
def test_state_is_saved_as_the_parameter_is_shaped_however_it_lies(compress: Compression) -> None:
    """Channels-last and transposed: gradient + residual before = handed out + residual, in the parameter's own shape."""

    def program(job: Job) -> None:
        convolution: Any = nn.Conv2d(3, 16, 3, bias=False)
        model: Any = convolution.to(memory_format=torch.channels_last)
        model.turned = nn.Parameter(torch.randn(24, 30).t())
        job.choices = Choices([0], ["ring"], LinkCosts(alpha=1e-5, beta=1e-9, gamma=1e-9))
        distribute(model, sgd(model), Strategy(compress=compress), job=job)
        given = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
        sum((p * given[name]).sum() for name, p in model.named_parameters()).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            left = remembered(model).own[name][RESIDUAL]
            assert torch.allclose(parameter.grad + left, given[name], atol=1e-5), name

    run_jobs(1, program)


def test_a_raw_error_in_an_exchange_leaves_no_trace() -> None:
    class Broken(Sign):
        def encode_residual(self, values: Tensor, blocks: Any, draw: Any) -> Tensor:
            raise MemoryError("on purpose")

    def program(job: Job) -> None:
        model, optimizer = begin(job)
        backward(model, batch(job, 0))
        optimizer.step()
        optimizer.zero_grad()
        before = residuals(model)
        buckets = [bucket for bucket in engine_of(model).training.buckets if bucket.state is not None]  # type: ignore[attr-defined]
        whole = [bucket.compression for bucket in buckets]
        for bucket in buckets:
            bucket.compression = ErrorFeedback(Broken(block=64))
        with pytest.raises(MemoryError, match="on purpose"):
            backward(model, batch(job, 1))
        assert all(torch.equal(before[name], value) for name, value in residuals(model).items())
        for bucket, compression in zip(buckets, whole, strict=True):
            bucket.compression = compression
        backward(model, batch(job, 1))

    run_jobs(1, program)


def test_a_bad_sparse_gradient_stops_everything() -> None:
    def program(job: Job) -> None:
        model = nn.ModuleDict({"words": nn.Embedding(5, 3, sparse=True), "last": nn.Linear(3, 40)})
        distribute(model, sgd(model), Strategy(compress=SIGN), job=job)
        for bad in (False, True):
            before = residuals(model)
            hidden = model["words"](torch.tensor([1, 2]))
            if bad and job.rank == 1:
                hidden.register_hook(lambda gradient: gradient * float("nan"))
            model["last"](hidden).sum().backward()
            assert bool(model["last"].weight.grad.isnan().all()) == bad  # type: ignore[union-attr, operator]
            model.zero_grad()
        assert before and all(torch.equal(before[name], value) for name, value in residuals(model).items())

    run_jobs(2, program)


@pytest.mark.parametrize("size", [1, 2])
def test_a_backward_after_the_job_has_ended_says_so(size: int) -> None:
    def program(job: Job) -> None:
        model, _ = begin(job)
        loss = model(batch(job, 0)).pow(2).mean()
        job.close(goodbye=True)
        with pytest.raises(StrettoError, match="the job was shut down"):
            torch.autograd.backward(loss)

    run_jobs(size, program)


def test_a_thread_ends_when_its_engine_is_closed() -> None:
    def program(job: Job) -> None:
        for _ in range(3):
            model, _ = begin(job)
            backward(model, batch(job, 0))
            thread = engine_of(model).training._thread._thread  # type: ignore[attr-defined]
            engine_of(model).close()
            thread.join(10)
            assert not thread.is_alive()

    run_jobs(1, program)


def test_a_parameter_that_comes_after_one_bit_adams_warm_up_is_refused() -> None:
    def program(job: Job) -> None:
        model, optimizer = begin(job, OneBitAdam(2))
        model[0].requires_grad_(False)
        for number in range(3):
            backward(model, batch(job, number))
            optimizer.step()
            optimizer.zero_grad()
        engine_of(model).training._remembered = ({}, {})  # type: ignore[attr-defined]  # as if it had been frozen from the beginning
        model[0].requires_grad_(True)
        with pytest.raises(ConfigurationError, match=r"0\.(weight|bias) wants a gradient after the warm-up"):
            model(batch(job, 3))

    run_jobs(2, program)


@pytest.mark.parametrize(
    "compress", [EF21(TopK(0.1)), DGC(0.1), OneBitAdam(2), ErrorFeedback(PowerSGD(2)), DeMo(sign=False)], ids=repr
)
def test_join_is_refused_where_a_worker_without_data_would_count(compress: Compression) -> None:
    def program(job: Job) -> None:
        model, _ = begin(job, compress)
        with pytest.raises(ConfigurationError, match="leave join out"), join(model):
            pass

    run_jobs(2, program)


@pytest.mark.parametrize("entry", [3, {}, {"compress": 3}, None])
def test_an_entry_that_stretto_did_not_write_is_refused(entry: Any) -> None:
    def program(job: Job) -> None:
        _, optimizer = begin(job)
        state = {**optimizer.state_dict(), "stretto": entry}
        if entry is None:
            optimizer.load_state_dict(state)
        else:
            with pytest.raises(ConfigurationError, match="that stretto did not write"):
                optimizer.load_state_dict(state)

    run_jobs(1, program)


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("then", "now"), [(3, 2), (2, 3), (4, 1), (1, 3)])
@pytest.mark.parametrize("compress", [SIGN, TOP, ErrorFeedback(PowerSGD(2)), EF21(TopK(0.1))], ids=repr)
def test_another_number_of_workers_conserves_what_was_owed(compress: Compression, then: int, now: int, tmp_path: Any) -> None:
    def first(job: Job) -> dict[str, Any]:
        model, optimizer = begin(job, compress)
        for number in range(3):
            backward(model, batch(job, number))
            optimizer.step()
            optimizer.zero_grad()
        save(tmp_path / "saved.pt", model, optimizer)
        return remembered(model).own

    def second(job: Job) -> dict[str, Any]:
        model, optimizer = begin(job, compress)
        resumed = load(tmp_path / "saved.pt", model, optimizer)
        assert any("as their mean" in line for line in resumed.carried)
        out = remembered(model).own
        backward(model, batch(job, 9))
        optimizer.step()
        return out

    before, after = _mean_owed(run_jobs(then, first)), _mean_owed(run_jobs(now, second))
    assert before.keys() == after.keys() and before
    assert all(torch.allclose(before[key], after[key], atol=1e-6) for key in before)


def _mean_owed(everybody: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What is left over, in the mean over workers, of each parameter; the server's residuals are part of it."""
    out: dict[str, Tensor] = {}
    for name in everybody[0]:
        for kind in everybody[0][name]:
            if kind != SERVER:
                total = sum(own[name][kind] for own in everybody) / len(everybody)
                if kind == RESIDUAL:
                    total = total + sum(own[name].get(SERVER, torch.zeros(())) for own in everybody)
                out[f"{name} {kind}"] = torch.as_tensor(total)
    return out


def test_a_state_dict_of_another_worker_gives_no_residuals(caplog: pytest.LogCaptureFixture) -> None:
    def program(job: Job) -> bool:
        model, optimizer = begin(job)
        backward(model, batch(job, 0))
        optimizer.step()
        state = optimizer.state_dict()
        state["stretto"] = {**state["stretto"], "rank": 0}
        optimizer.load_state_dict(state)
        return any(bool(residual.any()) for residual in residuals(model).values())

    assert run_jobs(2, program) == [True, False]
    assert "residuals of rank 0 of 2 are not taken by rank 1 of 2" in caplog.text


def test_a_state_dict_opens_as_a_plain_one() -> None:
    def program(job: Job) -> None:
        model, optimizer = begin(job)
        backward(model, batch(job, 0))
        optimizer.step()
        plain = make()
        sgd(plain).load_state_dict(optimizer.state_dict())

    run_jobs(2, program)


def test_a_checkpoint_of_another_compression_says_what_begins_anew(tmp_path: Any) -> None:
    def program(job: Job) -> list[str]:
        found: list[str] = []
        for compress in (SIGN, TOP, NoCompression()):
            model, optimizer = begin(job, compress)
            if found or compress is not SIGN:
                found += [line for line in load(tmp_path / "saved.pt", model, optimizer).lost if "compress=" in line]
            backward(model, batch(job, 0))
            optimizer.step()
            save(tmp_path / "saved.pt", model, optimizer)
        return found

    for found in run_jobs(2, program):
        assert any("begins anew" in line for line in found) and any("remembered" in line for line in found)


def test_residuals_of_another_shape_are_refused_before_anything_changes() -> None:
    def program(job: Job) -> None:
        model, optimizer = begin(job)
        backward(model, batch(job, 0))
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        state["stretto"]["own"]["0.weight"][RESIDUAL] = torch.zeros(3)
        before = residuals(model)
        with pytest.raises(ConfigurationError, match="residual of 0.weight has 3 elements, the parameter 120"):
            optimizer.load_state_dict(state)
        assert all(torch.equal(before[name], value) for name, value in residuals(model).items())

    run_jobs(2, program)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [DGC(0.1), OneBitAdam(2)], ids=repr)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p),
        lambda p: torch.optim.RMSprop(p, momentum=0.1),
        lambda p: torch.optim.Adagrad(p),
    ],
)
def test_momentum_twice_is_refused_with_the_line_to_write(compress: Compression, optimizer: Callable[..., Any]) -> None:
    def program(job: Job) -> None:
        model = make()
        with pytest.raises(ConfigurationError, match=r"keeps the momentum itself(.|\n)*Write torch.optim.SGD\("):
            distribute(model, optimizer(model.parameters()), Strategy(compress=compress), job=job)

    run_jobs(2, program)


def test_complex_parameters_are_refused_with_the_rule_to_write() -> None:
    def program(job: Job) -> None:
        model = nn.ParameterDict({"turn": nn.Parameter(torch.zeros(3, dtype=torch.complex64)), "w": nn.Parameter(torch.ones(3))})
        with pytest.raises(ConfigurationError, match=r"turn is of torch.complex64(.|\n)*ByParameter\(\('turn', NoCompression"):
            distribute(model, sgd(model), Strategy(compress=SIGN), job=job)
        chosen = ByParameter(("turn", NoCompression()), ("*", SIGN))
        distribute(model, sgd(model), Strategy(compress=chosen), job=job)
        (model["turn"].abs().sum() + model["w"].sum()).backward()

    run_jobs(2, program)


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "direct", "native"])
@pytest.mark.parametrize("compress", [Sign(), SIGN, TOP, ErrorFeedback(Int8()), ByParameter(("*", Sign()))], ids=repr)
def test_payloads_that_do_not_add_up_are_refused_where_they_would_be_added(algorithm: str, compress: Compression) -> None:
    from stretto.aggregate.all_reduce import AllReduce

    with pytest.raises(ConfigurationError, match=r"Write aggregate=AllReduce\(\)"):
        Strategy(aggregate=AllReduce(algorithm), compress=compress)


def test_a_vote_without_a_ballot_is_refused() -> None:
    def program(job: Job) -> None:
        model, _ = begin(job, ByParameter(("*", Sign(vote=True))))
        with pytest.raises(ConfigurationError, match="a vote has no empty ballot"), join(model):
            pass

    run_jobs(2, program)


def test_a_scaler_that_is_none_is_refused() -> None:
    def program(job: Job) -> None:
        with pytest.raises(ConfigurationError, match="give the torch.amp.GradScaler of the loop"):
            begin(job, scaler=1024.0)

    run_jobs(2, program)


# -- what goes wrong --------------------------------------------------------------------------------------------------


class Spoiled(Sign):
    """Rank 1 sends what no encoder writes."""

    def encode(self, values: Tensor, blocks: Any, draw: Any) -> Tensor:
        payload = super().encode(values, blocks, draw)
        if len(payload) >= 4:
            payload[:4] = 0xFF  # a scale that is not a number
        return payload


def test_a_malformed_payload_names_its_sender() -> None:
    def program(job: Job) -> str:
        model = make()
        codec = Spoiled(block=64) if job.rank == 1 else Sign(block=64)
        distribute(model, sgd(model), Strategy(compress=Sign(block=64), schedule=AfterBackward()), job=job)
        for bucket in engine_of(model).training.buckets:  # type: ignore[attr-defined]
            if bucket.state is not None:
                bucket.compression = codec
        with pytest.raises(FrameError) as caught:
            backward(model, batch(job, 0))
        assert caught.value.rank == 1
        assert all(p.grad is None for p in model.parameters())
        return str(caught.value)

    for message in run_jobs(2, program):
        assert "rank 1 sent a bad frame" in message and "a scale is not finite" in message


def test_an_exchange_that_raises_is_raised_where_it_is_waited_for() -> None:
    def under_way() -> Any:
        raise StrettoError("on purpose")
        yield

    thread = CompressionThread()
    exchange = thread.submit(under_way(), torch.device("cpu"))
    with pytest.raises(StrettoError, match="on purpose"):
        exchange.wait()
    thread.stop()


def test_a_thread_that_fails_ends_what_is_under_way_and_what_is_submitted_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def under_way() -> UnderWay:
        yield Pending(Request(Plan(Kind.BARRIER, "none", 0, 1, 1, ()), torch.empty(0)))  # which never ends

    def no_stream(*of: object) -> None:
        raise RuntimeError("no stream, on purpose")

    thread = CompressionThread()
    first = thread.submit(under_way(), torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(compression_thread, "_stream_of", no_stream)
        second = thread.submit(under_way(), torch.device("cpu"))
        for exchange in (first, second):
            with pytest.raises(StrettoError, match="the compression thread failed: .*on purpose"):
                exchange.wait()
    thread._thread.join(5)
    with pytest.raises(StrettoError, match="the compression thread has ended"):
        thread.submit(under_way(), torch.device("cpu")).wait()
    assert "the compression thread failed" in caplog.text


class Computation:
    """A GPU's event, that passes when the test says so."""

    def __init__(self) -> None:
        self.is_over, self.was_asked = False, threading.Event()

    def query(self) -> bool:
        self.was_asked.set()
        return self.is_over


def test_a_bucket_whose_gradients_are_not_computed_yet_holds_up_no_other_but_those_that_begin_after_it() -> None:
    steps: list[str] = []
    travelled, done = Pending(Request(Plan(Kind.BARRIER, "none", 0, 1, 1, ()), torch.empty(0))), threading.Event()

    def under_way(name: str) -> UnderWay:
        steps.append(f"{name} begins")
        yield travelled
        steps.append(f"{name} goes on")
        done.set()

    thread, computation = CompressionThread(), Computation()
    first = thread.submit(under_way("first"), torch.device("cpu"))
    late, closing = (ThreadedExchange(under_way(name), torch.device("cpu"), thread._thread) for name in ("late", "closing"))
    late.submitted = computation  # type: ignore[assignment]
    thread._ready.put(late)
    thread._ready.put(closing)
    assert computation.was_asked.wait(5)
    travelled.finish(None)
    assert done.wait(5) and steps == ["first begins", "first goes on"]
    first.wait()
    computation.is_over = True
    for exchange in (late, closing):
        exchange.wait()
    assert len(steps) == 6 and steps.index("late begins") < steps.index("closing begins")
    thread.stop()


def test_buckets_that_wait_for_a_gpu_end_with_their_thread() -> None:
    def under_way() -> UnderWay:
        raise AssertionError("it never begins")
        yield

    thread, computation = CompressionThread(), Computation()
    exchange = ThreadedExchange(under_way(), torch.device("cpu"), thread._thread)
    exchange.submitted = computation  # type: ignore[assignment]
    thread._ready.put(exchange)
    assert computation.was_asked.wait(5)
    thread.stop()
    with pytest.raises(StrettoError, match="shut down"):
        exchange.wait()
