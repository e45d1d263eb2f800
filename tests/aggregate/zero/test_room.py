"""Memory under way: constant buffers, gradients that are sent from where they lie, and arenas for what stays."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from aggregate.zero.sliced import adamw, batch, close, go_on, same_bits, strategy, train
from stretto import recipes
from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.zero import large_apart, training, whole_state
from stretto.aggregate.zero.bucket import AT_ONCE, Room, SlicedBucket
from stretto.distributing import distribute, engine_of
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.schedule.orders import Buckets
from stretto.schedule.priority import Priority
from stretto.testing import run_jobs

BYTES = 4 * 1000
SMALL = Buckets(bytes=BYTES, first_bytes=BYTES)
stages = pytest.mark.parametrize("stage", [1, 2, 3])


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_apart, "LARGE_BYTES", BYTES)


def tall(width: int, layers: int) -> Any:
    """Layers of which each weight is larger than a bucket and each bias is not."""
    return nn.Sequential(nn.Linear(6, width), *[nn.Linear(width, width) for _ in range(layers)], nn.Linear(width, 3))


@pytest.mark.parametrize("stage", [2, 3])
def test_memory_for_buckets_does_not_grow_with_the_model_or_with_its_largest_layer(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C_B of ZeRO-R. (At stage 1 gradients have memory of their own.)"""
    longest: list[int] = []
    take = Room.take

    def noted(self: Room, dtype: Any, device: Any, num_elements: int) -> Tensor:
        memory = take(self, dtype, device, num_elements)
        longest.append(len(memory))
        return memory

    monkeypatch.setattr(Room, "take", noted)

    def program(job: Job, width: int, layers: int) -> None:
        model = tall(width, layers)
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage, SMALL), job=job)
        go_on(job, model, optimizer, range(2))

    for width, layers in ((40, 2), (40, 20), (160, 2)):
        longest.clear()
        run_jobs(2, program, width, layers)
        assert 0 < max(longest) < 2 * BYTES // 4  # a bucket is full when it has that many bytes


@stages
@pytest.mark.parametrize("size", [2, 3])
def test_a_large_gradient_is_sent_from_where_it_lies(stage: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lone: list[bool] = []
    fill = SlicedBucket.fill

    def noted(self: SlicedBucket) -> None:
        fill(self)
        if self.is_alone and self.num_gradient_elements > 1000:
            lone.append(self._borrowed is None)

    monkeypatch.setattr(SlicedBucket, "fill", noted)

    def program(job: Job, stage: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        model = tall(40, 3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 6)
        optimizer = AdamW(model.parameters(), lr=0.01)
        distribute(model, optimizer, strategy(stage, SMALL), job=job)
        go_on(job, model, optimizer, range(4))
        return [value.clone() for value in model.state_dict().values()]

    plain = run_jobs(size, program, 0)
    lone.clear()
    for mine in run_jobs(size, program, stage):
        assert same_bits(mine, plain[0]) if size == 2 else close(mine, plain[0])
    assert len(lone) == 4 * 3 * size and all(lone)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("how", ["gradient", "view", "array", "hook"])
def test_a_gradient_that_somebody_keeps_stays_as_it_was(stage: int, how: str) -> None:
    def program(job: Job) -> bool:
        model = nn.Sequential(nn.Linear(6, 40, bias=False), nn.Linear(40, 40, bias=False), nn.Linear(40, 3, bias=False))
        optimizer = SGD(model.parameters(), lr=0.1)
        kept: list[Any] = []
        weight: Any = model[1].weight

        def keep(parameter: Tensor) -> None:
            gradient: Any = parameter.grad
            kept.append(gradient if how == "gradient" else gradient.view(-1) if how == "view" else gradient.numpy())
            copies.append(gradient.clone())

        def keep_given(gradient: Tensor) -> None:
            kept.append(gradient)
            copies.append(gradient.clone())

        copies: list[Tensor] = []
        if how == "hook":
            weight.register_hook(keep_given)
        else:
            weight.register_post_accumulate_grad_hook(keep)
        distribute(model, optimizer, strategy(stage, Buckets(bytes=4, first_bytes=4)), job=job)
        for step in range(3):
            model(batch(step, job)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(kept) == 3
        return all(bool((torch.as_tensor(k).view(-1) == c.view(-1)).all()) for k, c in zip(kept, copies, strict=True))

    assert run_jobs(2, program) == [True, True]


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_lie_otherwise_are_copied(stage: int) -> None:
    """Expanded, channels-last, of a transposed parameter, without elements, added to in place."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(1)
            self.expanded = nn.Parameter(torch.randn(6, generator=generator))
            self.turned = nn.Parameter(torch.randn(3, 6, generator=generator).t())
            self.none = nn.Parameter(torch.empty(0, 3))
            conv: Any = nn.Conv2d(2, 3, 3, bias=False)
            self.conv = conv.to(memory_format=torch.channels_last)
            with torch.no_grad():
                self.conv.weight.copy_(torch.randn(self.conv.weight.shape, generator=generator))

        def forward(self, x: Tensor) -> Tensor:
            image = x[:, :2, None, None].expand(-1, 2, 4, 4).contiguous(memory_format=torch.channels_last)
            y: Tensor = (x @ self.turned) + self.expanded.sum() + self.conv(image).mean((2, 3)) + self.none.sum()
            return y

    def program(job: Job, stage: int) -> list[Tensor]:
        model = Odd()
        optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
        distribute(model, optimizer, strategy(stage, Buckets(bytes=4, first_bytes=4)), job=job)
        for step in range(3):
            model(batch(step, job)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return [value.clone() for value in model.state_dict().values()]

    plain = run_jobs(2, program, 0)
    assert all(same_bits(mine, plain[0]) for mine in run_jobs(2, program, stage))


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_r_trains_as_replicas_do(stage: int) -> None:
    how = replace(recipes.zero_r(stage, buffer_bytes=256), aggregate=AllReduce("ring"))
    plain = run_jobs(2, train, strategy(0))[0]
    assert all(same_bits(mine, plain) for mine in run_jobs(2, train, how))


@pytest.mark.parametrize("size", ["x", None, 1.5, 0, True])
def test_a_buffer_of_zero_r_has_a_whole_number_of_bytes(size: Any) -> None:
    with pytest.raises(ConfigurationError, match="positive whole number of bytes"):
        recipes.zero_r(buffer_bytes=size)


@stages
def test_what_stays_lies_in_one_piece_of_each_kind(stage: int) -> None:
    """M_D of ZeRO-R: exp_avg, exp_avg_sq; gradients from stage 2 on; parameters at stage 3. Also after the graph has changed."""

    def program(job: Job) -> None:
        model = tall(40, 4)
        optimizer = adamw(model)
        distribute(model, optimizer, strategy(stage, SMALL), job=job)
        way: Any = engine_of(model).training
        for steps in (range(2), range(2, 4)):
            go_on(job, model, optimizer, steps)
            sliced = way._optimizers[0]
            for name in ("exp_avg", "exp_avg_sq"):
                assert len({sliced.state_of(piece)[name].untyped_storage().data_ptr() for _, piece in sliced.pieces}) == 1
            if stage >= 2:
                slices = [bucket._slice_memory for bucket in way.sliced]
                assert len({each.untyped_storage().data_ptr() for each in slices}) == 1
            if stage == 3:
                memories = [memory for unit in way._units for memory in unit.memories if memory.is_trainable]
                assert len({memory.slice.untyped_storage().data_ptr() for memory in memories}) == 1
            model[1].weight.requires_grad_(False)

    run_jobs(2, program)


def test_room_lends_two_pieces_and_counts_what_has_memory_of_its_own() -> None:
    room, kind = Room(), (torch.float32, torch.device("cpu"))
    room.expect(*kind, 10)
    pieces = [room.take(*kind, 7) for _ in range(AT_ONCE)]
    assert [len(piece) for piece in pieces] == [10, 10] and not room.has(*kind)
    room.give(pieces[0])
    assert room.has(*kind) and room.take(*kind, 10) is pieces[0]
    room.give(pieces[0])
    large = room.take(*kind, 11)
    assert len(large) == 11 and not room.has(*kind)
    room.give(large)
    assert room.take(*kind, 10) is pieces[0]
    room.lose(pieces[0])
    room.count_in(*kind)
    assert not room.has(*kind)
    room.lose(torch.empty(3))
    assert room.has(*kind)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_state_goes_to_its_next_owners_a_bucket_at_a_time(stage: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When slices are cut anew, as every planned schedule does once."""
    num_whole: list[int] = []
    by_bucket = whole_state.states_by_bucket

    def noted(*arguments: Any) -> Iterator[Any]:
        before: list[weakref.ref[Tensor]] = []
        for states in by_bucket(*arguments):
            assert not any(each() is not None for each in before)
            before = [weakref.ref(each) for state in states.values() for each in state.values() if each.dim()]
            num_whole.extend([len(before)] if before else [])
            yield states
            del states

    monkeypatch.setattr(training, "states_by_bucket", noted)

    expected = run_jobs(size, train, strategy(0), adamw, range(7))
    found = run_jobs(size, train, strategy(stage, Priority()), adamw, range(7))
    assert len(num_whole) > size
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(mine, theirs, strict=True))
