"""`shard=Zero(3)`: the same training as stage 2, with parameters that are there only while a module computes with them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import stretto
from aggregate.parameter_server.optimizers import CASES, IDS
from aggregate.zero.sliced import SMALL, STEPS, adamw, backward, batch, close, go_on, net, same_bits, strategy, train, values
from stretto.aggregate.zero.cut.freed import ParameterInSlices
from stretto.aggregate.zero.cut.gathering import Gatherer, Presence
from stretto.aggregate.zero.cut.units import find_units
from stretto.distributing import distribute, engine_of, gathered, no_sync, release, synchronize
from stretto.errors import BackwardFailed, ConfigurationError, PeerLost, RankMismatch
from stretto.job import Job
from stretto.schedule.orders import AfterBackward, Buckets, WaitFree
from stretto.schedule.priority import Priority
from stretto.shard.zero import Zero
from stretto.strategy import Strategy
from stretto.testing import run_jobs

Make = Callable[[], Any]


def all_free(model: nn.Module) -> bool:
    return all(type(parameter) is ParameterInSlices for parameter in model.parameters())


# -- units ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        y = self.inner(x)
        return x + (y if scale is None else y * scale)  # type: ignore[no-any-return]


class Tower(nn.Module):
    """An embedding whose weight is used twice, blocks, and a norm."""

    def __init__(self, blocks: int = 3, *, how: str = "plain") -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for block in self.blocks:
            if self.how == "plain" or not torch.is_grad_enabled():
                y = block(y, scale=self.scale)
            else:
                y = checkpoint(block, y, use_reentrant=self.how == "reentrant")
        if self.how == "twice":
            y = self.blocks[0](y)
        return nn.functional.linear(self.norm(y), self.first.weight.t())[:, :3]


def seeded(make: Make) -> Any:
    model = make()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def test_units_are_elements_of_containers_and_the_rest_is_the_root() -> None:
    units = find_units(Tower(), 0, 1 << 20)
    assert [unit.name for unit in units] == ["the root", "blocks.0", "blocks.1", "blocks.2"]
    assert [name for name, _ in units[0].parameters] == ["scale", "first.weight", "first.bias", "norm.weight", "norm.bias"]
    assert sum(len(unit.parameters) for unit in units) == len(list(Tower().parameters()))


def test_small_neighbours_are_one_unit_and_large_elements_are_divided() -> None:
    block = 4 * sum(p.numel() for p in Block().parameters())
    assert [unit.name for unit in find_units(Tower(), 2 * block)] == ["the root", "blocks.0 ... blocks.1", "blocks.2"]
    nested: Any = nn.Sequential(nn.Linear(2, 2), Tower(), nn.Linear(8, 8))
    assert [unit.name for unit in find_units(nested, 0, 4 * block)] == ["the root", "0", "1", "2"]
    nested[1].norm, nested[1].first = nn.LayerNorm(1), nn.Linear(1, 1)
    assert [unit.name for unit in find_units(nested, 0, block)] == ["the root", "0", *(f"1.blocks.{n}" for n in range(3)), "2"]


def test_what_units_share_is_the_roots() -> None:
    model: Any = nn.Sequential(Block(), Block(), nn.Linear(8, 8))
    model[2].weight = model[0].inner[0].weight
    units = find_units(model, 0, 1 << 20)
    assert [name for name, _ in units[0].parameters] == ["0.inner.0.weight"]
    assert set(units[0].modules) == {model, model[0].inner[0], model[2]}


# -- the same trajectory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [SMALL, Buckets(), WaitFree()], ids=repr)
def test_two_workers_have_the_bits_of_replicated(schedule: Any) -> None:
    plain = run_jobs(2, lambda job: train(job, strategy(0, schedule)))
    for mine in run_jobs(2, lambda job: train(job, strategy(3, schedule))):
        assert same_bits(mine, plain[0])


@pytest.mark.parametrize("algorithm", ["ring", "direct", "auto"])
@pytest.mark.parametrize("size", [3, 4, pytest.param(7, marks=pytest.mark.slow)])
def test_more_workers_have_those_of_each_other(size: int, algorithm: str) -> None:
    plain = run_jobs(size, lambda job: train(job, strategy(0, algorithm=algorithm)))
    first, *others = run_jobs(size, lambda job: train(job, strategy(3, algorithm=algorithm)))
    assert close(first, plain[0]) and all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_law_2_twenty_steps_are_those_of_one_process_on_the_whole_batch(size: int) -> None:
    def program(job: Job) -> list[Tensor]:
        model: Any = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(3), job=job)
        for step in range(20):
            backward(model, torch.randn(24, 6, generator=torch.Generator().manual_seed(step)).chunk(job.world_size)[job.rank])
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    (alone,) = run_jobs(1, program)
    for mine in run_jobs(size, program):
        assert close(mine, alone, 1e-5)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_every_elementwise_optimizer_of_torch_steps_slices(name: str, options: dict[str, Any]) -> None:
    def make(model: nn.Module) -> Optimizer:
        optimizer: Optimizer = getattr(torch.optim, name)(model.parameters(), **options)
        return optimizer

    plain = run_jobs(2, lambda job: train(job, strategy(0), make))
    for mine in run_jobs(2, lambda job: train(job, strategy(3), make)):
        assert close(mine, plain[0])


@pytest.mark.parametrize("make", [stretto.LARS, stretto.LAMB])
def test_optimizers_of_layers_step_by_norms_of_whole_tensors(make: Any) -> None:
    plain = run_jobs(3, lambda job: train(job, strategy(0), lambda model: make(model.parameters(), lr=0.1)))
    for mine in run_jobs(3, lambda job: train(job, strategy(3), lambda model: make(model.parameters(), lr=0.1))):
        assert close(mine, plain[0], 1e-5)


def tied() -> Any:
    model: Any = nn.Sequential(nn.Linear(6, 8), Block(), Block(), nn.Linear(8, 6), nn.Linear(6, 3))
    model[2].inner[0].weight = model[1].inner[0].weight
    return model


def of_two_dtypes() -> nn.Module:
    class Cast(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.dtype = dtype

        def forward(self, x: Tensor) -> Tensor:
            return x.to(self.dtype)

    return nn.Sequential(nn.Linear(6, 5), Cast(torch.float64), nn.Linear(5, 4).double(), Cast(torch.float32), nn.Linear(4, 3))


def half_frozen() -> Any:
    model: Any = nn.Sequential(nn.Linear(6, 8), Block(), Block(), nn.Linear(8, 3))
    for parameter in [*model[0].parameters(), *model[2].inner[0].parameters()]:
        parameter.requires_grad_(False)
    return model


class SomeUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        for number, layer in enumerate(self.layers):
            if (number + self.calls) % 3:
                x = x + layer(x).tanh()
        return x[:, :3]


MODELS: dict[str, Make] = {
    "tower": Tower,
    "checkpointed": lambda: Tower(how="checkpointed"),
    "reentrant": lambda: Tower(how="reentrant"),
    "called twice": lambda: Tower(how="twice"),
    "tied": tied,
    "dtypes": of_two_dtypes,
    "frozen": half_frozen,
    "unused": SomeUnused,
    "checkpointed in one": lambda: nn.Sequential(nn.Linear(6, 8), Recomputed(Block(), Block()), nn.Linear(8, 3)),
    "recurrent": lambda: Recurrent(),
    "channels last": lambda: Images(),
}


class Recomputed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)])

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.layers[0](x[:, None, :])
        return self.layers[1](out[:, 0])  # type: ignore[no-any-return]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: Any = nn.Sequential(nn.Conv2d(1, 4, 2, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 3))
        self.layers = layers.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.view(len(x), 1, 2, 3))  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", [WaitFree(), Buckets(bytes=600)], ids=repr)
@pytest.mark.parametrize("name", MODELS)
def test_awkward_models_train_as_replicated_ones(name: str, schedule: Any) -> None:
    def program(job: Job, stage: int) -> list[Tensor]:
        model = seeded(MODELS[name])
        optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        distribute(model, optimizer, strategy(stage, schedule), job=job)
        assert not stage or all_free(model)
        for step in range(STEPS):
            backward(model, batch(step, job))
            assert not stage or all_free(model)
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(batch(step, job))
            model.train()
            assert not stage or all_free(model)
        return values(model)

    for plain, mine in zip(run_jobs(2, program, 0), run_jobs(2, program, 3), strict=True):
        assert close(mine, plain)


def test_groups_several_optimizers_and_accumulation() -> None:
    def program(job: Job, stage: int) -> list[Tensor]:
        model: Any = net()
        first = AdamW([{"params": model[0].parameters(), "lr": 0.02}, {"params": [model[2].weight]}], lr=0.01)
        second = SGD([model[2].bias, *model[4].parameters()], lr=0.05, momentum=0.9)
        distribute(model, (first, second), strategy(stage, Buckets(bytes=1 << 20)), job=job)
        for step in range(STEPS):
            with no_sync(model):
                backward(model, batch(100 + step, job))
                assert not stage or all_free(model)
            backward(model, batch(step, job))
            backward(model, batch(200 + step, job))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            first.step()
            if step != 2:
                second.step()
            model.zero_grad(set_to_none=step % 2 == 0)
        with no_sync(model):
            backward(model, batch(300, job))
        synchronize(model)
        first.step()
        return values(model)

    plain = run_jobs(2, program, 0)
    for mine in run_jobs(2, program, 3):
        assert close(mine, plain[0])


def test_parameters_that_are_frozen_unfrozen_and_added() -> None:
    def program(job: Job, stage: int) -> list[Tensor]:
        model: Any = net()
        model[2].requires_grad_(False)
        optimizer = AdamW([*model[0].parameters(), *model[4].parameters()], lr=0.01)
        distribute(model, optimizer, strategy(stage), job=job)
        go_on(job, model, optimizer, range(2))
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
        go_on(job, model, optimizer, range(2, 4))
        model[0].requires_grad_(False)
        go_on(job, model, optimizer, range(4, 6))
        torch.manual_seed(job.rank)
        model.append(nn.Linear(3, 3))
        optimizer.add_param_group({"params": list(model[5].parameters())})
        if stage == 0:
            torch.manual_seed(0)
        go_on(job, model, optimizer, range(6, 8))
        assert not stage or all_free(model)
        return values(model)[:6]

    plain = run_jobs(2, program, 0)
    first, second = run_jobs(2, program, 3)
    assert same_bits(first, second) and same_bits(first[:2], plain[0][:2])


def test_a_grad_scaler_skips_everywhere_or_nowhere() -> None:
    def program(job: Job, stage: int) -> tuple[list[Tensor], list[float]]:
        model: Any = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage), job=job)
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2), []
        for step in range(STEPS):
            x = batch(step, job)
            loss = (model(x) - x[:, :3].sin()).pow(2).mean() * (torch.inf if step == 2 and job.rank == 0 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return values(model), scales

    plain = run_jobs(3, program, 0)
    for mine, scales in run_jobs(3, program, 3):
        assert scales == plain[0][1] and len(set(scales)) > 1
        assert close(mine, plain[0][0])


# -- what is free, and what can be read -------------------------------------------------------------------------------


def test_a_parameter_that_is_free_says_what_to_write() -> None:
    def program(job: Job) -> None:
        model: Any = net()
        expected = model[0].weight.detach().clone()
        distribute(model, adamw(model), strategy(3), job=job)
        weight = model[0].weight
        assert isinstance(weight, nn.Parameter) and weight.shape == (11, 6) and weight.numel() == 66 and weight.grad is None
        assert "in slices" in repr(weight) and repr(model)
        looks: list[Callable[[], Any]] = [
            lambda: weight.sum(), lambda: weight + 1, lambda: weight.detach(), lambda: weight.data, lambda: weight[0],
            lambda: nn.functional.linear(torch.ones(6), weight), lambda: weight.tolist(), lambda: weight.copy_(expected),
            lambda: torch.cat([weight]), lambda: deepcopy(weight), lambda: model.double(), lambda: weight.numpy(),
            lambda: setattr(weight, "data", expected), lambda: nn.init.zeros_(weight), lambda: weight.cpu(),
        ]  # fmt: skip
        for look in looks:
            with pytest.raises(ConfigurationError, match=r"in slices"):
                look()
        with gathered(model):
            assert torch.equal(weight, expected) and not all_free(model)
        assert all_free(model)
        with gathered(model, model[2]):
            assert torch.isfinite(model[2].weight).all() and type(weight) is ParameterInSlices

    run_jobs(2, program)


def test_what_is_changed_while_gathered_counts() -> None:
    def program(job: Job, stage: int) -> list[Tensor]:
        model: Any = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage), job=job)
        go_on(job, model, optimizer, range(2))
        with gathered(model):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.2, 0.2)
            loss = sum(parameter.pow(2).sum() for parameter in model.parameters()) + model(batch(7, job)).mean()
            assert isinstance(loss, Tensor)
            loss.backward()  # type: ignore[no-untyped-call]
            if stage:
                with pytest.raises(ConfigurationError, match="within"):
                    optimizer.step()
        optimizer.step()
        copy = deepcopy(model)
        assert not stage or type(copy[0].weight) is nn.Parameter
        go_on(job, model, optimizer, range(2, 4))
        return [*values(model), *values(copy)]

    plain = run_jobs(2, program, 0)
    for mine in run_jobs(2, program, 3):
        assert close(mine, plain[0])


def test_modules_and_methods_can_be_called_by_themselves() -> None:
    def program(job: Job) -> bool:
        model = seeded(Tower)
        expected = model.first(batch(0, job)), model.blocks[1](torch.ones(2, 8))
        distribute(model, adamw(model), strategy(3), job=job)
        found = model.first(batch(0, job)), model.blocks[1](torch.ones(2, 8))
        free = all_free(model)
        found[1].sum().backward()
        return free and all_free(model) and all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))

    assert run_jobs(2, program) == [True, True]


# -- memory and bytes -------------------------------------------------------------------------------------------------


def test_no_more_than_three_units_are_there_at_a_time() -> None:
    most: list[int] = []

    def program(job: Job) -> None:
        model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)])
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(3, WaitFree()), job=job)
        units = engine_of(model).training._units  # type: ignore[attr-defined]

        def count(*_: Any) -> None:
            most.append(sum(any(memory.is_there for memory in unit.memories) for unit in units))

        for module in model:
            module.register_forward_hook(count)
            module.register_forward_hook(lambda _, given, output: output.register_hook(count) and None)
        for step in range(3):
            model(batch(step, job)).sum().backward()
            optimizer.step()

    run_jobs(2, program)
    assert max(most) == 3 and len(most) > 60


@pytest.mark.parametrize("size", [2, 3, 4, pytest.param(7, marks=pytest.mark.slow)])
def test_law_8_bytes_are_one_and_a_half_times_those_of_an_all_reduce(size: int) -> None:
    num_steps = 3

    def program(job: Job) -> dict[str, int]:
        model: Any = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(3, WaitFree()), job=job)
        kinds = ("reduce_scatter", "all_gather", "all_reduce")
        before = {kind: job.ledger.sent_by(kind) for kind in kinds}
        go_on(job, model, optimizer, range(num_steps))
        return {kind: job.ledger.sent_by(kind) - before[kind] for kind in before}

    found = run_jobs(size, program)
    each_way = num_steps * 4 * sum(parameter.numel() for parameter in net().parameters()) * (size - 1)  # by all workers
    assert sum(sent["reduce_scatter"] for sent in found) == each_way
    assert sum(sent["all_gather"] for sent in found) == 2 * each_way
    notes = 4 * (5 + len(list(net().parameters())))
    assert sum(sent["all_reduce"] for sent in found) == num_steps * 2 * notes * (size - 1)


@pytest.mark.parametrize("how", ["plain", "checkpointed"])
def test_every_unit_is_gathered_once_in_forward_and_once_in_backward(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the root computes last; and the next unit is on its way when one is needed."""
    begun: list[str] = []  # on rank 0
    ahead: list[bool] = []
    begin, wait = Gatherer._begin, Gatherer._wait

    def noted(self: Gatherer, unit: Any, **options: Any) -> None:
        if self._job.rank == 0:
            begun.append(unit.name)
        begin(self, unit, **options)

    def waited(self: Gatherer, unit: Any) -> None:
        if self._job.rank == 0:
            ahead.append(any(each.presence is Presence.COMING for each in self.units if each is not unit))
        wait(self, unit)

    monkeypatch.setattr(Gatherer, "_begin", noted)
    monkeypatch.setattr(Gatherer, "_wait", waited)

    def program(job: Job) -> tuple[list[str], int]:
        model = Tower(5, how=how)
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(3, WaitFree()), job=job)
        go_on(job, model, optimizer, range(3))
        if job.rank == 0:
            begun.clear()
            ahead.clear()
        go_on(job, model, optimizer, range(3, 4))
        return list(begun), sum(ahead)

    names, num_ahead = run_jobs(2, program)[0]
    assert sorted(names) == sorted(2 * ["the root", *(f"blocks.{n}" for n in range(5))])
    assert num_ahead >= 8


# -- saving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved_by", "saving", "stage", "size"), [(3, 2, 3, 3), (3, 3, 0, 2), (3, 4, 2, 1), (0, 2, 3, 4), (2, 3, 3, 2), (3, 2, 0, 1)]
)
def test_a_checkpoint_goes_on_in_any_stage_and_number_of_workers(
    saved_by: int, saving: int, stage: int, size: int, tmp_path: Any
) -> None:
    path = tmp_path / "saved.pt"

    def begin(job: Job) -> list[Tensor]:
        model: Any = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(saved_by), job=job)
        go_on(job, model, optimizer, range(3))
        stretto.save(path, model, optimizer, job=job)
        return values(model)

    def resume(job: Job) -> tuple[list[Tensor], list[Tensor]]:
        model: Any = net()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage), job=job)
        stretto.load(path, model, optimizer, job=job)
        loaded = values(model)
        state = optimizer.state_dict()["state"]
        return loaded, [state[number][name] for number in sorted(state) for name in ("step", "exp_avg", "exp_avg_sq")]

    saved = run_jobs(saving, begin)[0]
    content = torch.load(path, weights_only=True)
    assert same_bits(list(content["model"].values()), saved)
    entries = content["optimizer"]["state"]
    expected = [entries[number][name] for number in sorted(entries) for name in ("step", "exp_avg", "exp_avg_sq")]
    for loaded, state in run_jobs(size, resume):
        assert same_bits(loaded, saved) and same_bits(state, expected)


def test_a_state_dict_is_the_plain_one_and_training_goes_on_from_it() -> None:
    def program(job: Job, stage: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        model = seeded(Tower)
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage, WaitFree()), job=job)
        go_on(job, model, optimizer, range(3))
        state = deepcopy(optimizer.state_dict())
        weights = deepcopy(dict(model.state_dict()))
        part = deepcopy(dict(model.blocks.state_dict()))
        assert all(torch.equal(value, weights[f"blocks.{name}"]) for name, value in part.items())
        assert model.state_dict(keep_vars=True)["scale"] is model.scale
        go_on(job, model, optimizer, range(3, 5))
        optimizer.load_state_dict(deepcopy(state))
        assert not model.load_state_dict(weights).missing_keys
        model.blocks[1].load_state_dict({"inner.0.bias": torch.ones(8)}, strict=False)
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.norm.load_state_dict({"weight": torch.ones(3), "bias": torch.ones(8)})
        go_on(job, model, optimizer, range(3, 6))
        return weights, values(model)

    plain_weights, plain = run_jobs(2, program, 0)[0]
    for weights, mine in run_jobs(2, program, 3):
        assert list(weights) == list(plain_weights) and same_bits(list(weights.values()), list(plain_weights.values()))
        assert same_bits(mine, plain)


def test_releasing_and_distributing_anew_bring_everything_back() -> None:
    def program(job: Job, stage: int) -> list[Tensor]:
        model: Any = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage), job=job)
        go_on(job, model, optimizer, range(2))
        distribute(model, optimizer, strategy(2 if stage else 0), job=job)
        go_on(job, model, optimizer, range(2, 4))
        distribute(model, optimizer, strategy(stage), job=job)
        go_on(job, model, optimizer, range(4, 5))
        release(model)
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters()) and len(optimizer.state) == 6
        return values(model)

    plain = run_jobs(2, program, 0)[0]
    assert same_bits(run_jobs(2, program, 3)[0], plain)


def test_a_model_that_nobody_holds_is_gone() -> None:
    def program(job: Job) -> bool:
        model: Any = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(3), job=job)
        go_on(job, model, optimizer, range(2))
        gone = weakref.ref(model[0])
        del model, optimizer
        job.barrier()  # another thread's collection may be under way
        gc.collect()
        return gone() is None

    assert run_jobs(2, program) == [True, True]


# -- failures and refusals --------------------------------------------------------------------------------------------


def _fail(*_: Any) -> None:
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("place", ["output", "middle", "first"])
def test_a_backward_that_fails_on_one_worker_leaves_all_equal(place: str) -> None:
    """Others wait for that worker in the middle of their own backward, or at its end."""

    def program(job: Job) -> list[Tensor]:
        model: Any = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(3, WaitFree()), job=job)
        for step in range(6):
            x = batch(step, job)
            handles = []
            if step == 3 and job.rank == 1 and place != "output":
                failing = model[2] if place == "middle" else model[0]
                handles.append(failing.register_forward_hook(lambda _, given, output: output.register_hook(_fail) and None))
            out = model(x)
            if step == 3 and job.rank == 1 and place == "output":
                out.register_hook(_fail)
            try:
                (out - x[:, :3].sin()).pow(2).mean().backward()
                optimizer.step()
            except ZeroDivisionError:
                failed.append(job.rank)
            except BackwardFailed as error:
                failed.append(job.rank)
                assert error.ranks == [1]
            for handle in handles:
                handle.remove()
            optimizer.zero_grad()
        return values(model)

    failed: list[int] = []
    first, *others = run_jobs(3, program)
    assert sorted(failed) == [0, 1, 2] and all(same_bits(first, other) for other in others)


@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_a_lost_worker_is_an_error_on_all_others(where: str) -> None:
    together = threading.Barrier(3)  # not the job's: the others may still be in their second round when rank 1 has ended it

    def program(job: Job) -> str:
        model: Any = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(3, WaitFree()), job=job)
        go_on(job, model, optimizer, range(2))
        together.wait(60)
        if job.rank == 1:

            def leave(*_: Any) -> None:
                job.close(goodbye=False)
                raise KeyError("gone")

            if where == "between":
                job.close(goodbye=False)
                return "gone"
            hook = model[2].register_forward_pre_hook if where == "forward" else model[2].register_full_backward_hook
            hook(leave)
            with pytest.raises(KeyError):
                go_on(job, model, optimizer, range(2, 3))
            return "gone"
        with pytest.raises(PeerLost) as lost:
            go_on(job, model, optimizer, range(2, 5))
        with pytest.raises(stretto.StrettoError):
            go_on(job, model, optimizer, range(2, 5))
        return f"rank {lost.value.rank}"

    assert run_jobs(3, program) == ["rank 1", "gone", "rank 1"]


def test_modules_in_another_order_on_another_worker_are_a_mismatch_that_names_them() -> None:
    class Either(nn.Module):
        def __init__(self, job: Job) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
            self.reversed = job.rank == 1

        def forward(self, x: Tensor) -> Tensor:
            for layer in reversed(self.layers) if self.reversed else self.layers:
                x = layer(x)
            return x

    def program(job: Job) -> str:
        model = Either(job)
        distribute(model, adamw(model), strategy(3, WaitFree()), job=job)
        with pytest.raises(RankMismatch) as mismatch:
            model(torch.ones(2, 6))
        return str(mismatch.value)

    for text in run_jobs(2, program):
        assert "of the parameters of layers.0" in text and "of the parameters of layers.1" in text


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Strategy(schedule=Priority(), shard=Zero(3)), "order in which they are called"),
        (lambda: Strategy(schedule=AfterBackward(), shard=Zero(3)), "WaitFree"),
        (lambda: Strategy(sync=stretto.LocalSGD(4), shard=Zero(3)), "no way of training"),
        (lambda: Strategy(aggregate=stretto.ParameterServer(), shard=Zero(3)), "no way of training"),
        (lambda: Zero(4), "stages are 1"),
    ],
)
def test_strategies_that_cannot_work_are_refused_when_they_are_made(make: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3)), "sparse=False"),
        (lambda: torch.compile(nn.Linear(3, 3), backend="eager"), "compiled"),
        (lambda: nn.Sequential(cast(Any, torch.compile(nn.Linear(3, 3), backend="eager"))), "compiled"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_on_all_workers(make: Any, says: str) -> None:
    def program(job: Job) -> None:
        model = models[job.rank]
        with pytest.raises(ConfigurationError, match=says):
            distribute(model, adamw(model), strategy(3), job=job)

    models = [make(), make()]

    run_jobs(2, program)


def test_a_derivative_of_a_derivative_is_refused_and_training_goes_on() -> None:
    def program(job: Job, stage: int) -> list[Tensor]:
        model: Any = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage), job=job)
        go_on(job, model, optimizer, range(2))
        if stage == 3:
            x = torch.ones(2, 6).requires_grad_()
            with pytest.raises(ConfigurationError, match=r"create_graph=True of .*\n.*Zero\(2\)"):
                torch.autograd.grad(model(x).sum(), x, create_graph=True)
        go_on(job, model, optimizer, range(2, 4))
        return values(model)

    assert same_bits(run_jobs(2, program, 3)[0], run_jobs(2, program, 0)[0])


def test_workers_that_run_out_of_data_are_refused() -> None:
    def program(job: Job) -> None:
        model: Any = net()
        distribute(model, adamw(model), strategy(3), job=job)
        with pytest.raises(ConfigurationError, match="gathers"), stretto.join(model):
            pass

    run_jobs(2, program)


def test_with_other_strategies_gathered_waits_for_what_is_under_way() -> None:
    def program(job: Job, stage: int) -> list[Tensor]:
        model: Any = net()
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage, Priority(partition=256)), job=job)
        go_on(job, model, optimizer, range(4))
        with gathered(model):
            return [parameter.detach().clone() for parameter in model.parameters()]

    assert same_bits(run_jobs(2, program, 2)[0], run_jobs(2, program, 0)[1])
