"""Optimizer state and gradients that are in slices, whole again: for `state_dict`, a checkpoint, and when slices are cut anew.

    every worker     what it has of each parameter whose first element it owns: numbers, and which vectors there are
    bucket by bucket each vector's slices                                                   -->   all, or rank 0

Cost: as many bytes as the state has, to each worker that is to have it; in host memory there. All workers must call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.aggregate.zero.bucket import SlicedBucket
from stretto.aggregate.zero.gradient import GradientInSlices
from stretto.aggregate.zero.slice_optimizer import SliceOptimizer
from stretto.aggregate.zero.slices import Piece
from stretto.collectives.calls import start_recv, start_send
from stretto.engine.state import kinds, put_together, take_apart
from stretto.job import Job

States = dict[Tensor, dict[str, Any]]


def whole_state(job: Job, optimizer: SliceOptimizer, *, only_rank_0: bool = False) -> States:
    """What torch's own optimizer would have in `state`, for the parameters that are in slices."""
    return {p: state for some in states_by_bucket(job, optimizer, only_rank_0=only_rank_0) for p, state in some.items()}


def states_by_bucket(job: Job, optimizer: SliceOptimizer, *, only_rank_0: bool = False) -> Iterator[States]:
    """The same, one bucket after the other: who keeps none of it has memory for one bucket at a time. All workers take all."""
    described = _described(job, optimizer)
    gets = job.rank == 0 or not only_rank_0
    for bucket in optimizer.buckets:
        found: States = {}
        for slot, (scalars, _) in sorted(described.get(bucket.number, {}).items()):
            if gets:
                found[bucket.parameters[slot]] = dict(scalars)
        vectors = {name for _, names in described.get(bucket.number, {}).values() for name in names}
        for name in sorted(vectors):
            slots = {slot: names[name] for slot, (_, names) in described[bucket.number].items() if name in names}
            dtype = getattr(torch, next(iter(slots.values())))
            flat = brought_together(job, bucket, _vector(optimizer, name), dtype, only_rank_0=only_rank_0)
            if flat is not None:
                for slot in slots:
                    place = bucket.layout.places[slot]
                    part = place.as_tensor(flat[place.start : place.stop])
                    found[bucket.parameters[slot]][name] = _like(part, bucket.parameters[slot])
        yield found


def _like(part: Tensor, parameter: Tensor) -> Tensor:
    """A copy that lies in memory as torch would have it."""
    return torch.empty_like(parameter, dtype=part.dtype, device="cpu", requires_grad=False).copy_(part)


def _vector(optimizer: SliceOptimizer, name: str) -> Callable[[Piece], Tensor | None]:
    def part(piece: Piece) -> Tensor | None:
        value = optimizer.state_of(piece).get(name) if piece.parameter in optimizer.group_of else None
        return value if isinstance(value, Tensor) else None

    return part


Described = dict[int, dict[int, tuple[dict[str, Any], dict[str, str]]]]  # bucket, slot -> numbers, and dtypes of vectors


def _described(job: Job, optimizer: SliceOptimizer) -> Described:
    """What there is of each parameter, as the owner of its first element has it."""
    mine = []
    tensors: list[Tensor] = []
    for bucket, piece in optimizer.pieces:
        state = optimizer.state_of(piece)
        if piece.begin == 0 and state:
            names = {
                name: str(value.dtype).removeprefix("torch.")
                for name, value in state.items()
                if name in optimizer.vectors and isinstance(value, Tensor)
            }
            scalars = {name: value for name, value in state.items() if name not in names}
            mine.append([bucket.number, piece.slot, take_apart(scalars, tensors), list(map(list, names.items()))])
    values = [float(tensor) for tensor in tensors]
    found: Described = {}
    for entries, numbers in job.gather_object([mine, values]):
        given = iter(numbers)
        for number, slot, scalars, names in entries:
            scalar_tensors = [
                torch.tensor(next(given), dtype=getattr(torch, kind), device="cpu").view(shape) for kind, shape in kinds(scalars)
            ]
            found.setdefault(number, {})[slot] = put_together(scalars, iter(scalar_tensors)), dict(names)
    return found


def brought_together(
    job: Job,
    bucket: SlicedBucket,
    part_of: Callable[[Piece], Tensor | None],
    dtype: torch.dtype,
    *,
    only_rank_0: bool = False,
) -> Tensor | None:
    """A vector as long as the bucket's gradients of which each worker has its part, in host memory; None where it is not wanted.
    What a worker has nothing of is zero."""
    bounds, count = bucket.shares.bounds, bucket.num_gradient_elements
    gets = job.rank == 0 or not only_rank_0
    mine = torch.zeros(bucket.shares.stop - bucket.shares.start, dtype=dtype, device="cpu")
    for piece in bucket.pieces:
        part = part_of(piece)
        if part is not None:
            mine[piece.start : piece.stop].copy_(part)
    if only_rank_0 and job.rank != 0:
        if len(mine):
            start_send(job.world, mine, 0).wait()
        return None
    flat = torch.zeros(count, dtype=dtype, device="cpu")
    flat[bucket.shares.start : bucket.shares.stop] = mine
    for owner in range(job.world_size):
        part = flat[bounds[owner] : bounds[owner + 1]]
        if not len(part):
            continue
        if not only_rank_0:
            job.broadcast(part, owner)
        elif owner != 0 and gets:
            start_recv(job.world, part, owner).wait()
    return flat


def make_gradients_whole(job: Job, buckets: Sequence[SlicedBucket]) -> None:
    """Every `p.grad` that is in slices becomes a tensor with values, the same on all workers."""
    for bucket in buckets:
        gradients = [(slot, p, p.grad) for slot, p in enumerate(bucket.parameters) if isinstance(p.grad, GradientInSlices)]
        if not gradients:
            continue
        flat = brought_together(job, bucket, bucket.valid_part, bucket.flat.dtype)
        assert flat is not None
        for slot, parameter, gradient in gradients:
            assert isinstance(gradient, GradientInSlices)
            place = bucket.layout.places[slot]
            part = place.as_tensor(flat[place.start : place.stop])
            whole = torch.empty_like(parameter, dtype=flat.dtype, requires_grad=False).copy_(part)
            added = gradient.take_added()
            parameter.grad = whole if added is None else whole.add_(added)
