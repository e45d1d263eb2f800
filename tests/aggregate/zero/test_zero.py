"""`shard=Zero(1)` and `Zero(2)`: the same training as `Replicated`, with less memory and as many bytes."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import stretto
from aggregate.parameter_server.optimizers import CASES, IDS
from aggregate.zero.sliced import (
    SMALL,
    STAGES,
    STEPS,
    adamw,
    backward,
    batch,
    close,
    go_on,
    net,
    same_bits,
    strategy,
    train,
    values,
)
from stretto.aggregate.all_reduce.planning import ROUNDS_TO_WATCH
from stretto.aggregate.zero.bucket import AT_ONCE, Room
from stretto.aggregate.zero.gradient import GradientInSlices
from stretto.aggregate.zero.slice_optimizer import SliceOptimizer
from stretto.distributing import distribute, no_sync, release
from stretto.engine.state import load_exactly
from stretto.errors import BackwardFailed, ConfigurationError, PeerLost, RankMismatch
from stretto.job import Job
from stretto.schedule.orders import AfterBackward, WaitFree
from stretto.schedule.priority import Priority
from stretto.shard.zero import Zero
from stretto.strategy import Strategy
from stretto.testing import run_jobs

stages = pytest.mark.parametrize("stage", STAGES)


# -- the same trajectory ----------------------------------------------------------------------------------------------


PAIRS = [(stage, each) for stage in STAGES for each in (SMALL, WaitFree(), Priority(partition=256))] + [(1, AfterBackward())]


@pytest.mark.parametrize(("stage", "schedule"), PAIRS, ids=repr)
def test_two_workers_have_the_bits_of_replicated(stage: int, schedule: Any) -> None:
    steps = range(ROUNDS_TO_WATCH + STEPS)
    plain = run_jobs(2, lambda job: train(job, strategy(0, schedule), steps=steps))
    for mine in run_jobs(2, lambda job: train(job, strategy(stage, schedule), steps=steps)):
        assert same_bits(mine, plain[0])


@stages
@pytest.mark.parametrize("size", [3, 4, pytest.param(7, marks=pytest.mark.slow)])
def test_direct_reduce_scatter_adds_in_the_order_of_direct_all_reduce(stage: int, size: int) -> None:
    """Where buckets carry no notes, so that they are cut alike: across the barrier. (Later plans follow from measured times.)"""
    schedule, steps = Priority(partition=1 << 20), range(ROUNDS_TO_WATCH - 1)
    plain = run_jobs(size, lambda job: train(job, strategy(0, schedule, "direct"), steps=steps))
    for mine in run_jobs(size, lambda job: train(job, strategy(stage, schedule, "direct"), steps=steps)):
        assert same_bits(mine, plain[0])


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_every_elementwise_optimizer_of_torch_steps_slices_as_it_steps_tensors(name: str, options: dict[str, Any]) -> None:
    def make(model: nn.Module) -> Optimizer:
        optimizer: Optimizer = getattr(torch.optim, name)(model.parameters(), **options)
        return optimizer

    def falls(model: nn.Module, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    plain = run_jobs(2, lambda job: train(job, strategy(0), make, after=falls))
    for mine in run_jobs(2, lambda job: train(job, strategy(2), make, after=falls)):
        assert close(mine, plain[0])


@stages
def test_groups_several_optimizers_and_schedulers(stage: int) -> None:
    def program(job: Job, stage: int) -> list[Tensor]:
        model = net()
        first = AdamW(
            [{"params": model[0].parameters(), "lr": 0.02}, {"params": [model[2].weight], "weight_decay": 0.3}], lr=0.01
        )
        second = SGD([*model[2].parameters(recurse=False)][1:] + [*model[4].parameters()], lr=0.05, momentum=0.9)
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (first, second)]
        distribute(model, (first, second), strategy(stage), job=job)
        for step in range(STEPS):
            backward(model, batch(step, job))
            first.step()
            if step != 2:
                second.step()
            for scheduler in schedulers:
                scheduler.step()
            model.zero_grad(set_to_none=step % 2 == 0)
        return values(model)

    plain = run_jobs(2, program, 0)
    for mine in run_jobs(2, program, stage):
        assert same_bits(mine, plain[0])


@stages
def test_parameters_that_are_frozen_unfrozen_and_added(stage: int) -> None:
    def program(job: Job, stage: int) -> list[Tensor]:
        model = net()
        model[2].requires_grad_(False)
        optimizer = AdamW([*model[0].parameters(), *model[4].parameters()], lr=0.01)
        distribute(model, optimizer, strategy(stage), job=job)
        go_on(job, model, optimizer, range(2))
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
        go_on(job, model, optimizer, range(2, 4))
        model[0].requires_grad_(False)
        go_on(job, model, optimizer, range(4, 6))
        return [*values(model), *(state["exp_avg"] for state in optimizer.state_dict()["state"].values())]

    plain = run_jobs(2, program, 0)
    for mine in run_jobs(2, program, stage):
        assert same_bits(mine, plain[0])


@stages
def test_what_is_kept_of_a_parameter_waits_while_it_is_not_in_the_optimizer(stage: int) -> None:
    def program(job: Job, stage: int) -> list[Tensor]:
        model = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage), job=job)
        parameters = optimizer.param_groups[0]["params"]
        go_on(job, model, optimizer, range(3))
        left = parameters.pop(0)
        go_on(job, model, optimizer, range(3, 6))
        parameters.insert(0, left)
        go_on(job, model, optimizer, range(6, 9))
        return [*values(model), *(each for state in optimizer.state_dict()["state"].values() for each in state.values())]

    plain = run_jobs(2, program, 0)
    for mine in run_jobs(2, program, stage):
        for one, other in zip(mine, plain[0], strict=True):  # gradients add up meanwhile, in another order
            torch.testing.assert_close(one, other)


@stages
def test_a_parameter_that_is_moved_to_other_memory_is_stepped_there(stage: int) -> None:
    def program(job: Job, stage: int) -> list[Tensor]:
        model = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage), job=job)
        go_on(job, model, optimizer, range(2))
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        go_on(job, model, optimizer, range(2, 4))
        return values(model)

    assert same_bits(run_jobs(2, program, stage)[0], run_jobs(2, program, 0)[0])


@stages
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_with_and_without_rounds(stage: int, set_to_none: bool) -> None:
    def program(job: Job, stage: int) -> list[Tensor]:
        model = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage), job=job)
        for step in range(STEPS):
            backward(model, batch(step, job))  # a round of its own, then one on top of it
            with no_sync(model):
                backward(model, batch(100 + step, job))
            backward(model, batch(200 + step, job))
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return values(model)

    plain = run_jobs(2, program, 0)
    for mine in run_jobs(2, program, stage):
        assert close(mine, plain[0])


@stages
def test_a_closure_and_a_step_hook_of_the_users_own_see_the_step(stage: int) -> None:
    def program(job: Job, stage: int) -> list[Tensor]:
        model = net()
        optimizer = adamw(model)
        averages = [p.detach().clone() for p in model.parameters()]

        def average(*_: Any) -> None:
            for mean, parameter in zip(averages, model.parameters(), strict=True):
                mean.lerp_(parameter.detach(), 0.5)

        optimizer.register_step_post_hook(average)  # before distribute(), so it would run before ours
        distribute(model, optimizer, strategy(stage), job=job)
        for step in range(STEPS):

            def closure() -> float:
                optimizer.zero_grad()
                backward(model, batch(step, job))  # noqa: B023
                return 0.0

            optimizer.step(closure)
        return [*values(model), *averages]

    assert same_bits(run_jobs(2, program, stage)[0], run_jobs(2, program, 0)[0])


# -- what p.grad is, clipping, scaling --------------------------------------------------------------------------------


@stages
@pytest.mark.parametrize("size", [2, 3])
def test_norms_and_clipping_are_those_of_the_whole_gradient(stage: int, size: int) -> None:
    def clip(model: nn.Module, optimizer: Optimizer) -> None:
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    found: list[float] = []
    plain = run_jobs(size, lambda job: train(job, strategy(0), after=clip))
    expected, found = sorted(found), []
    for mine in run_jobs(size, lambda job: train(job, strategy(stage), after=clip)):
        assert close(mine, plain[0])
    assert found and all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(sorted(found), expected, strict=True))


@stages
def test_other_uses_of_a_gradient_in_slices_say_what_to_write(stage: int) -> None:
    def program(job: Job) -> None:
        model = net()
        distribute(model, adamw(model), strategy(stage), job=job)
        backward(model, batch(0, job))
        gradient = next(model.parameters()).grad
        assert isinstance(gradient, GradientInSlices) and gradient.shape == (11, 6)
        with pytest.raises(ConfigurationError, match=r"in slices.*\n.*Replicated"):
            gradient.sum()
        with pytest.raises(ConfigurationError, match="in slices"):
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)

    run_jobs(2, program)


@stages
def test_a_grad_scaler_skips_everywhere_or_nowhere(stage: int) -> None:
    """The infinity is in one worker's slice only."""

    def program(job: Job, stage: int) -> tuple[list[Tensor], list[float]]:
        model = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage), job=job)
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2), []
        for step in range(STEPS):
            x = batch(step, job)
            loss = (model(x) - x[:, :3].sin()).pow(2).mean()
            if step == 2:
                loss = loss + next(model.parameters())[0, 0] * (torch.inf if job.rank == 0 else 1.0)
            scaler.scale(loss).backward()
            if step == 3:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return values(model), scales

    plain = run_jobs(3, program, 0)
    for mine, scales in run_jobs(3, program, stage):
        assert scales == plain[0][1] and len(set(scales)) > 1
        assert close(mine, plain[0][0])


@stages
def test_a_grad_scaler_with_one_optimizer_over_dense_and_sparse_gradients(stage: int) -> None:
    """The values of sparse gradients are unscaled in one list with those in slices. At step 1 only a sparse one is infinite."""

    def program(job: Job, stage: int) -> tuple[list[Tensor], list[float]]:
        model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 2))
        for number, parameter in enumerate(model.parameters()):
            parameter.data.copy_(torch.linspace(-1, 1 + number, parameter.numel()).view_as(parameter))
        optimizer = SGD(model.parameters(), lr=0.1)
        distribute(model, optimizer, strategy(stage), job=job)
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2), []
        for step in range(3):
            loss = model(torch.tensor([step, job.rank + step])).pow(2).mean()
            if step == 1:
                loss = loss + model[0](torch.tensor([7])).sum() * (torch.inf if job.rank == 0 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return values(model), scales

    plain = run_jobs(2, program, 0)
    for mine, scales in run_jobs(2, program, stage):
        assert scales == plain[0][1] == [8.0, 4.0, 4.0]
        assert close(mine, plain[0][0])


@stages
def test_check_finite_names_the_parameter_on_all_workers(stage: int) -> None:
    def program(job: Job) -> None:
        model = net()
        distribute(model, adamw(model), strategy(stage), job=job, check_finite=True)
        backward(model, batch(0, job))
        x = batch(1, job)
        loss = model(x).mean() + (next(model[2].parameters())[0, 0] * torch.inf if job.rank == 1 else 0.0)
        with pytest.raises(stretto.NonFiniteGradient, match=r"rank 1 in '2\.weight'"):
            loss.backward()

    run_jobs(3, program)


# -- memory and bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, pytest.param(7, marks=pytest.mark.slow)])
@stages
def test_law_8_bytes_are_those_of_an_all_reduce(stage: int, size: int) -> None:
    """A reduce-scatter and an all-gather of every bucket, (P-1)/P of it each, to the element; and the notes."""
    num_steps = 3

    def program(job: Job) -> dict[str, int]:
        model = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage), job=job)
        before = {kind: job.ledger.sent_by(kind) for kind in ("reduce_scatter", "all_gather", "all_reduce")}
        go_on(job, model, optimizer, range(num_steps))
        return {kind: job.ledger.sent_by(kind) - before[kind] for kind in before}

    found = run_jobs(size, program)
    num_elements = sum(parameter.numel() for parameter in net().parameters())
    each_way = num_steps * 4 * num_elements * (size - 1)  # by all workers
    assert sum(sent["reduce_scatter"] for sent in found) == sum(sent["all_gather"] for sent in found) == each_way
    notes = 4 * (5 + len(list(net().parameters())))
    assert sum(sent["all_reduce"] for sent in found) == num_steps * 2 * notes * (size - 1)


def test_stage_2_never_has_memory_for_more_than_two_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce-scatters, and the gathers of the steps."""
    most: list[int] = []
    take = Room.take

    def counted(self: Room, *kind: Any) -> Tensor:
        memory = take(self, *kind)
        most.append(sum(self._lent.values()))
        return memory

    monkeypatch.setattr(Room, "take", counted)
    run_jobs(3, lambda job: train(job, strategy(2)))
    assert max(most) == AT_ONCE == 2 and len(most) > 3 * STEPS * 4


def test_memory_of_a_gather_that_never_began_is_not_counted_as_lent() -> None:
    """Else a job that goes on from a saved state waits for it in every later round."""

    def program(job: Job) -> None:
        model = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(2), job=job)
        go_on(job, model, optimizer, range(1))
        training: Any = next(iter(job.engines)).training
        backward(model, batch(1, job))
        gather, training._steps._gather = training._steps._gather, _cannot_send
        with pytest.raises(OSError, match="no more sockets"):
            optimizer.step()
        training._steps._gather = gather
        assert sum(training._room._lent.values()) == 0

    run_jobs(2, program)


def _cannot_send(*arguments: Any) -> None:
    raise OSError("no more sockets")


# -- saving -----------------------------------------------------------------------------------------------------------


WAYS = [(0, 3), (1, 3), (2, 3), (2, 2), (1, 4), (0, 1), (2, 1)]


@pytest.mark.parametrize(("stage", "size"), WAYS)
@pytest.mark.parametrize(("saved_by", "saving"), [(1, 2), (2, 3), (0, 2)])
def test_a_checkpoint_goes_on_in_any_other_stage_and_number_of_workers(
    saved_by: int, saving: int, stage: int, size: int, tmp_path: Any
) -> None:
    path = tmp_path / "saved.pt"

    def begin(job: Job) -> list[Tensor]:
        model = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(saved_by), job=job)
        go_on(job, model, optimizer, range(3))
        stretto.save(path, model, optimizer, job=job)
        return values(model)

    def resume(job: Job) -> tuple[list[Tensor], list[Tensor]]:
        model = net()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage), job=job)
        if job.rank == 0 or job.world_size > 1:
            stretto.load(path, model, optimizer, job=job)
        loaded = values(model)
        state = optimizer.state_dict()["state"]
        return loaded, [state[number][name] for number in sorted(state) for name in ("step", "exp_avg", "exp_avg_sq")]

    saved = run_jobs(saving, begin)[0]
    content = torch.load(path, weights_only=True)["optimizer"]["state"]
    expected = [content[number][name] for number in sorted(content) for name in ("step", "exp_avg", "exp_avg_sq")]
    assert len(expected) == 18
    for loaded, state in run_jobs(size, resume):
        assert same_bits(loaded, saved) and same_bits(state, expected)


@stages
def test_a_state_dict_is_the_plain_one_and_training_goes_on_from_it(stage: int) -> None:
    def program(job: Job, stage: int) -> tuple[dict[str, Any], list[Tensor]]:
        model = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage), job=job)
        go_on(job, model, optimizer, range(3))
        state = deepcopy(optimizer.state_dict())  # torch gives references
        assert not optimizer.state or not stage
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        go_on(job, model, optimizer, range(3, 5))
        optimizer.load_state_dict(deepcopy(state))
        model.load_state_dict(weights)
        go_on(job, model, optimizer, range(3, 6))
        return state, values(model)

    plain_state, plain = run_jobs(2, program, 0)[0]
    for state, mine in run_jobs(2, program, stage):
        assert same_bits(mine, plain)
        assert state["param_groups"] == plain_state["param_groups"]
        assert state["state"].keys() == plain_state["state"].keys()
        for number, entries in state["state"].items():
            assert list(entries) == list(plain_state["state"][number])
            assert all(torch.equal(value, plain_state["state"][number][name]) for name, value in entries.items())


@stages
def test_releasing_and_distributing_anew_bring_the_state_back(stage: int) -> None:
    def program(job: Job, stage: int) -> list[Tensor]:
        model = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage), job=job)
        go_on(job, model, optimizer, range(2))
        distribute(model, optimizer, strategy(3 - stage if stage else 0), job=job)
        go_on(job, model, optimizer, range(2, 4))
        release(model)
        assert len(optimizer.state) == 6
        distribute(model, optimizer, strategy(0), job=job)
        go_on(job, model, optimizer, range(4, 6))
        return values(model)

    plain = run_jobs(2, program, 0)[0]
    assert same_bits(run_jobs(2, program, stage)[0], plain)


@stages
def test_saved_state_is_cast_to_the_dtype_of_the_weights(stage: int) -> None:
    """As torch does it, so a bfloat16 model goes on from the state of a float32 one."""

    def program(job: Job, stage: int) -> dict[int, dict[str, Tensor]]:
        precise = net()
        earlier = adamw(precise)
        backward(precise, batch(0, job))
        earlier.step()
        model = net().bfloat16()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage), job=job)
        optimizer.load_state_dict(earlier.state_dict())
        model(batch(1, job).bfloat16()).sum().backward()
        optimizer.step()
        state: dict[int, dict[str, Tensor]] = optimizer.state_dict()["state"]
        return state

    plain = run_jobs(2, program, 0)[0]
    for state in run_jobs(2, program, stage):
        for number, entries in state.items():
            assert {name: value.dtype for name, value in entries.items()} == {
                name: value.dtype for name, value in plain[number].items()
            }
        assert state[0]["exp_avg"].dtype == torch.bfloat16 and state[0]["step"].dtype == torch.float32


@stages
def test_load_exactly_keeps_the_dtypes_of_what_is_in_slices(stage: int) -> None:
    def program(job: Job) -> None:
        model = net().bfloat16()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        distribute(model, optimizer, strategy(stage), job=job)
        momenta = {number: {"momentum_buffer": torch.ones(p.shape)} for number, p in enumerate(model.parameters())}
        load_exactly(optimizer, {"state": momenta, "param_groups": optimizer.state_dict()["param_groups"]})
        assert {entries["momentum_buffer"].dtype for entries in optimizer.state_dict()["state"].values()} == {torch.float32}

    run_jobs(2, program)


@pytest.mark.parametrize(("option", "where"), [("fused", "meta"), ("capturable", "meta"), ("foreach", "cpu")])
def test_whole_state_goes_back_to_where_its_parameter_is(option: str, where: str) -> None:
    """By a device that is not the host: what a GPU would be asked for. The count of steps by torch's rule."""
    weight = nn.Parameter(torch.zeros(3, 2, device="meta"))
    optimizer = SliceOptimizer(AdamW([weight], lr=0.1), lambda values: None)
    optimizer.user.param_groups[0][option] = True
    optimizer.arrange([])
    placed = optimizer.beside_parameters({weight: {"step": torch.tensor(2.0), "exp_avg": torch.ones(3, 2)}})[weight]
    assert {name: value.device.type for name, value in placed.items()} == {"step": where, "exp_avg": "meta"}
    assert placed["step"].dtype == torch.float32


# -- failures and refusals --------------------------------------------------------------------------------------------


@stages
@pytest.mark.parametrize("schedule", [SMALL, Priority(partition=256)], ids=repr)
def test_a_backward_that_fails_on_one_worker_leaves_all_equal(stage: int, schedule: Any) -> None:
    def program(job: Job) -> list[Tensor]:
        model = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage, schedule), job=job)
        for step in range(ROUNDS_TO_WATCH + 4):
            x = batch(step, job)
            out = model(x)
            if step == ROUNDS_TO_WATCH + 2 and job.rank == 1:
                out.register_hook(_fail)
            try:
                (out - x[:, :3].sin()).pow(2).mean().backward()
                optimizer.step()
            except ZeroDivisionError:
                failed.append(job.rank)
            except BackwardFailed as error:
                failed.append(job.rank)
                assert error.ranks == [1]
            optimizer.zero_grad()
        return values(model)

    failed: list[int] = []
    first, *others = run_jobs(3, program)
    assert sorted(failed) == [0, 1, 2] and all(same_bits(first, other) for other in others)


def _fail(gradient: Tensor) -> None:
    raise ZeroDivisionError("on purpose")


@stages
def test_a_lost_worker_is_an_error_on_all_others_and_nobody_steps_again(stage: int) -> None:
    def program(job: Job) -> str:
        model = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage), job=job)
        go_on(job, model, optimizer, range(2))
        if job.rank == 1:
            backward(model, batch(2, job))
            job.close(goodbye=False)
            return "gone"
        with pytest.raises(PeerLost) as lost:
            go_on(job, model, optimizer, range(2, 5))
        with pytest.raises(stretto.StrettoError):
            go_on(job, model, optimizer, range(2, 5))
        return f"rank {lost.value.rank}"

    assert run_jobs(3, program) == ["rank 1", "gone", "rank 1"]


@stages
def test_state_dict_on_one_worker_alone_says_where_the_others_are(stage: int) -> None:
    def program(job: Job) -> None:
        model = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage), job=job)
        go_on(job, model, optimizer, range(1))
        with pytest.raises(RankMismatch):
            if job.rank == 0:
                optimizer.state_dict()
            else:
                backward(model, batch(1, job))

    run_jobs(2, program)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Zero(4), "stages are 1"),
        (lambda: Zero(0), "Replicated"),
        (lambda: Zero(True), "stages are 1"),
        (lambda: Zero(1, offload="disk"), "host memory"),  # type: ignore[arg-type]
        (lambda: Strategy(aggregate=stretto.AllReduce("butterfly"), shard=Zero(1)), "AllReduce\\('direct'\\)"),
        (lambda: Strategy(schedule=AfterBackward(), shard=Zero(2)), "save no memory.*\nWrite schedule=Buckets\\(\\)"),
        (lambda: Strategy(aggregate=stretto.ParameterServer(), shard=Zero(1)), "no way of training"),
        (lambda: Strategy(sync=stretto.LocalSGD(4), shard=Zero(1)), "no way of training"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_made(make: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make()


class MyAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS: each worker steps a slice"),
        (lambda m: MyAdam(m.parameters()), "subclass of Adam"),
        (lambda m: torch.optim.Adafactor(m.parameters()), "Adafactor"),
        (lambda m: (SGD(m.parameters(), lr=0.1), SGD(m[0].parameters(), lr=0.1)), "two optimizers"),
    ],
)
def test_optimizers_that_cannot_step_slices_are_refused_on_all_workers(optimizer: Any, says: str) -> None:
    def program(job: Job) -> None:
        model = net()
        with pytest.raises(ConfigurationError, match=says):
            distribute(model, optimizer(model), strategy(1), job=job)

    run_jobs(2, program)


@stages
def test_an_optimizer_that_was_not_given_is_refused(stage: int) -> None:
    def program(job: Job) -> None:
        model = net()
        distribute(model, adamw(model), strategy(stage), job=job)
        backward(model, batch(0, job))
        with pytest.raises(ConfigurationError, match="not given to distribute"):
            SGD(model.parameters(), lr=0.1).step()

    run_jobs(2, program)


# -- workers that run out of data -------------------------------------------------------------------------------------


@stages
@pytest.mark.parametrize("size", [2, 3])
def test_workers_that_run_out_of_data_go_on_to_step_their_slices(stage: int, size: int) -> None:
    """Clipping, unscaling and several optimizers too; one infinity, at which all skip."""

    def program(job: Job, stage: int) -> list[Tensor]:
        model = net()
        first, second = AdamW(list(model[0].parameters()), lr=0.01), SGD(list(model[2:].parameters()), lr=0.05, momentum=0.9)
        distribute(model, (first, second), strategy(stage), job=job)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        with stretto.join(model):
            for step in range(3 + 2 * job.rank):
                x = batch(step, job)
                loss = (model(x) - x[:, :3].sin()).pow(2).mean()
                if step == 4 and job.rank == 1:
                    loss = loss + next(model.parameters())[0, 0] * torch.inf
                scaler.scale(loss).backward()
                for optimizer in (first, second):
                    scaler.unscale_(optimizer)
                stretto.clip_grad_norm_(model.parameters(), 0.1)
                for optimizer in (first, second):
                    scaler.step(optimizer)
                scaler.update()
                model.zero_grad()
        go_on(job, model, second, range(20, 22))
        states = (each.state_dict()["state"] for each in (first, second))
        return [*values(model), *(v for state in states for _, kinds in sorted(state.items()) for v in kinds.values())]

    plain = run_jobs(size, program, 0)[0]
    for mine in run_jobs(size, program, stage):
        assert len(mine) == len(plain) and close(mine, plain, 2e-6)
