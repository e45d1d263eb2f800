"""A mesh: the workers of a job in a grid whose dimensions have names.

    Mesh(data=2, model=3)        model = 0   1   2
                      data = 0           0   1   2         ranks of the job: the last dimension counts fastest,
                      data = 1           3   4   5         so its workers are neighbours, and share hosts first

The workers that differ in one dimension only are a group: this worker's row, column, ... `group("data")` of rank 4 is 1 and 4.

A failure anywhere leaves all others waiting, one for the other: rank 0 for 1, whose partner 4 has died. So all collectives of a
mesh's groups belong to one round of the whole job (`collectives/failures.py`), and when a worker is lost all others raise the
same error, which names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product

import torch

from stretto.aggregate.hierarchy.group_job import GroupJob
from stretto.api import current_job
from stretto.collectives import calls
from stretto.collectives.group import Group
from stretto.errors import ConfigurationError
from stretto.job import Job


class Mesh:
    """The workers of the job by named dimensions, `Mesh(data=2, model=2)`. All workers make it together; their number is the
    product of the sizes. The last dimension counts fastest: its workers are those of neighbouring ranks."""

    __public__ = ("dimensions", "group", "job", "place", "size")

    def __init__(self, **dimensions: int) -> None:
        job = current_job()
        job.check_usable()
        _check(dimensions, job.world_size)
        self.whole = job
        self.dimensions: Mapping[str, int] = dict(dimensions)
        self._places = dict(zip(dimensions, _coordinates(job.rank, tuple(dimensions.values())), strict=True))
        self._round = (job.new_channel(), 0)  # that all collectives of its groups are part of
        self._groups: dict[tuple[str, ...], Group] = {}
        self._jobs: dict[Group, GroupJob] = {}
        for name in dimensions:
            self.group(name)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.dimensions.items())
        return f"Mesh({sizes})"

    def __deepcopy__(self, memo: dict[int, object]) -> Mesh:
        """A copy of a model that is cut over it is cut over the same workers."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def size(self, dimension: str) -> int:
        """How many workers there are along a dimension."""
        self._check_names((dimension,))
        return self.dimensions[dimension]

    def place(self, dimension: str) -> int:
        """Where this worker is along a dimension, 0 .. size - 1."""
        self._check_names((dimension,))
        return self._places[dimension]

    def group(self, *dimensions: str) -> Group:
        """The workers that differ from this one in these dimensions only. The first time they are named together, all call it."""
        self._check_names(dimensions)
        key = tuple(name for name in self.dimensions if name in dimensions)
        if key not in self._groups:
            ranks = self.ranks(key)
            made = self.whole.world.alone() if len(ranks) == 1 else self.whole.world.sub(ranks)
            made.part_of = self._round
            self._groups[key] = made
        return self._groups[key]

    def job(self, *dimensions: str) -> Job:
        """`group(*dimensions)` as a job of its own, for `job=` of `Sampler`, `distribute` and others: its workers share the data,
        or train a model, among themselves. By no dimension: this worker by itself."""
        group = self.group(*dimensions)
        if group not in self._jobs:
            self._jobs[group] = GroupJob(self.whole, group)
        return self._jobs[group]

    def ranks(self, dimensions: tuple[str, ...]) -> list[int]:
        """Those of `group(*dimensions)` in the job, in order."""
        sizes = tuple(self.dimensions.values())
        ranges = [range(size) if name in dimensions else (self._places[name],) for name, size in self.dimensions.items()]
        return [_rank(place, sizes) for place in product(*ranges)]

    def _check_names(self, dimensions: tuple[str, ...]) -> None:
        for name in dimensions:
            if name not in self.dimensions:
                known = ", ".join(map(repr, self.dimensions))
                raise ConfigurationError(f"{name!r} is no dimension of {self!r}. Write one of {known}.")


def _coordinates(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for size in reversed(sizes):
        rank, place = divmod(rank, size)
        out.append(place)
    return tuple(reversed(out))


def _rank(place: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    rank = 0
    for coordinate, size in zip(place, sizes, strict=True):
        rank = rank * size + coordinate
    return rank


def _check(dimensions: Mapping[str, int], world_size: int) -> None:
    if not dimensions:
        raise ConfigurationError(
            f"Mesh() without a dimension. Name one or more, whose sizes multiply to the {world_size} workers of the job: "
            f"Mesh(data={world_size}), say."
        )
    for name, size in dimensions.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigurationError(f"Mesh({name}={size!r}): a dimension has a whole number of workers, 1 or more.")
    asked = math.prod(dimensions.values())
    if asked != world_size:
        sizes = " x ".join(map(str, dimensions.values()))
        text = ", ".join(f"{name}={size}" for name, size in dimensions.items())
        nearest = nearest_that_fits(dimensions, world_size)
        fits = ", ".join(f"{name}={size}" for name, size in nearest.items())
        raise ConfigurationError(
            f"Mesh({text}) has {sizes} = {asked} places, and this job has {world_size} workers: each has one place.\n"
            f"Write Mesh({fits}), which is the nearest that fits, or start {asked} workers."
        )


def nearest_that_fits(dimensions: Mapping[str, int], world_size: int) -> dict[str, int]:
    """The sizes whose product is the number of workers, and which have to grow or shrink least, as ratios."""

    def distance(sizes: tuple[int, ...]) -> tuple[float, int]:
        changes = [abs(math.log(size / asked)) for size, asked in zip(sizes, dimensions.values(), strict=True)]
        # Among sizes that are equally near, prefer to keep the later dimensions: they cut layers, the first one cuts the batch.
        return round(sum(changes), 9), -sum(number for number, change in enumerate(changes) if change == 0.0)

    sizes = min(_factorisations(world_size, len(dimensions)), key=distance)
    return dict(zip(dimensions, sizes, strict=True))


def _factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factorisations(number // first, count - 1):
                yield first, *rest


class Axis:
    """One dimension of a mesh as the modules that are cut along it see it: its size, this worker's place, and its collectives.

    All members call each in the same order, which is that of forward and backward of a model that all of them run alike.
    """

    def __init__(self, mesh: Mesh, name: str) -> None:
        self.mesh = mesh
        self.name = name
        self.group = mesh.group(name)
        self.size, self.place = self.group.size, self.group.rank
        self.job = mesh.whole

    def __repr__(self) -> str:
        return f"{self.name} of {self.mesh!r}"

    def __deepcopy__(self, memo: dict[int, object]) -> Axis:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace the tensor by the sum over all places; the same bits at each."""
        return self.combine_(tensor, "sum")

    def combine_(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        return self.job.start_all_reduce(tensor, op, "auto", self.group).wait()

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all places, in their order; all have one shape."""
        return list(calls.start_all_gather(self.group, tensor.contiguous()).wait().unbind())
