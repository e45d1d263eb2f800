"""From the marks of a few recorded steps to what is true of a step of this model: medians, and who reads which parameter.

Plain data in and out; `recorder.py` takes the marks.

    forward of a module    from the moment it begins until the next module of the profile begins, or backward does. So
                           activations, the loss and whatever else is computed in between belong to the module before them, and
                           the modules' times add up to the forward. A module that has both parameters and children is timed
                           until its first child begins.
    ready                  from the beginning of backward until the gradient has been accumulated
    backward of a module   the time between its gradients being ready and those before them. Autograd tells nothing more: what it
                           computes between two gradients is counted to the later one, activations included.
    read by                the first of a parameter's own modules to run. Where none of them runs, because another module reads
                           the parameter itself (nn.MultiheadAttention never calls its `out_proj`), the nearest module around it
                           that does. Not noticed: a module that reads another's parameter before that other one has run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import nn

from stretto.plan.profile import ModuleProfile, ParameterProfile
from stretto.plan.step_clock import StepClock


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A model's modules and trainable parameters, by number. It holds names only, so that what hangs on tensors may hold it."""

    modules: tuple[str, ...]  # the model itself is number 0 and has the name ""
    parents: tuple[int, ...]  # of each module; the model's own is itself
    with_parameters: frozenset[int]  # modules that have some of their own, frozen ones included
    parameters: tuple[tuple[str, int], ...]  # name and bytes
    owners: tuple[tuple[int, ...], ...]  # of each parameter: the modules that have it

    @staticmethod
    def of(model: nn.Module) -> ModelParts:
        modules = dict(model.named_modules())
        numbers = {name: number for number, name in enumerate(modules)}
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        owners = defaultdict(list)
        for number, module in enumerate(modules.values()):
            for parameter in module._parameters.values():
                if parameter is not None:
                    owners[parameter].append(number)
        return ModelParts(
            modules=tuple(modules),
            parents=tuple(numbers[name.rpartition(".")[0]] for name in modules),
            with_parameters=frozenset(number for some in owners.values() for number in some),
            parameters=tuple((name, p.numel() * p.element_size()) for name, p in named),
            owners=tuple(tuple(dict.fromkeys(owners[p])) for _, p in named),
        )

    def around(self, number: int) -> Iterable[int]:
        """The modules around one, the nearest first."""
        while number != 0:
            number = self.parents[number]
            yield number


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The marks of one forward and backward: beginnings of modules in their order, and when gradients were ready."""

    begins: list[tuple[int, Any]]
    ready: dict[int, Any]
    backward_begins: Any
    backward_ends: Any

    def forward_s(self, clock: StepClock) -> float:
        return max(0.0, clock.seconds(self.begins[0][1], self.backward_begins))

    def backward_s(self, clock: StepClock) -> float:
        return max(0.0, clock.seconds(self.backward_begins, self.backward_ends))

    def ready_s(self, clock: StepClock) -> dict[int, float]:
        return {number: max(0.0, clock.seconds(self.backward_begins, mark)) for number, mark in self.ready.items()}

    def module_s(self, clock: StepClock, members: set[int]) -> dict[int, float]:
        """How long the forward of each of these modules took, all its calls together."""
        taken: defaultdict[int, float] = defaultdict(float)
        begins = [(number, mark) for number, mark in self.begins if number in members]
        if begins:
            begins[0] = (begins[0][0], self.begins[0][1])  # what precedes them all belongs to the first
        ends = [*(mark for _, mark in begins[1:]), self.backward_begins]
        for (number, begin), end in zip(begins, ends, strict=False):
            taken[number] += max(0.0, clock.seconds(begin, end))
        return taken


def order_of(steps: Iterable[RecordedStep]) -> list[int]:
    """The modules that have run, in the order in which they first did."""
    return list(dict.fromkeys(number for step in steps for number, _ in step.begins))


def readers(parts: ModelParts, order: Sequence[int]) -> list[int | None]:
    """For each parameter the module that is the first to read it, given the order in which modules run."""
    place = {number: index for index, number in enumerate(order)}

    def reader(owners: tuple[int, ...]) -> int | None:
        if ran := [number for number in owners if number in place]:
            return min(ran, key=place.__getitem__)
        return next((number for owner in owners for number in parts.around(owner) if number in place), None)

    return [reader(owners) for owners in parts.owners]


def summary(
    parts: ModelParts, steps: Sequence[RecordedStep], clock: StepClock
) -> tuple[tuple[ModuleProfile, ...], tuple[ParameterProfile, ...]]:
    """Modules in the order of their first use, and parameters in the order of their gradients. A parameter that never had a
    gradient is the last, and ready when backward ends."""
    order = order_of(steps)
    read_by = readers(parts, order)
    members = {number for number in order if number in parts.with_parameters} | {n for n in read_by if n is not None}
    modules = [number for number in order if number in members]
    forward_s = _medians(step.module_s(clock, members) for step in steps)
    ready_s = _medians(step.ready_s(clock) for step in steps)
    backward_s = _between_gradients(ready_s, read_by)
    last = max(median(step.backward_s(clock) for step in steps), *ready_s.values(), 0.0)
    used_by = {number: index for index, number in enumerate(modules)}
    parameters = [
        ParameterProfile(
            name=name,
            num_bytes=num_bytes,
            ready_s=ready_s.get(number, last),
            used_by=None if (reader := read_by[number]) is None else used_by[reader],
        )
        for number, (name, num_bytes) in sorted(
            enumerate(parts.parameters), key=lambda item: (item[0] not in ready_s, ready_s.get(item[0], last))
        )
    ]
    return (
        tuple(
            ModuleProfile(name=parts.modules[number], forward_s=forward_s[number], backward_s=backward_s.get(number, 0.0))
            for number in modules
        ),
        tuple(parameters),
    )


def _medians(measured: Iterable[dict[int, float]]) -> dict[int, float]:
    """The median for each number, over the steps in which it occurs."""
    times: defaultdict[int, list[float]] = defaultdict(list)
    for step in measured:
        for number, seconds in step.items():
            times[number].append(seconds)
    return {number: median(some) for number, some in times.items()}


def _between_gradients(ready_s: dict[int, float], read_by: Sequence[int | None]) -> dict[int, float]:
    """For each module the time between its gradients and those that were ready before them."""
    taken: defaultdict[int, float] = defaultdict(float)
    before = 0.0
    for number, seconds in sorted(ready_s.items(), key=lambda item: item[1]):
        if (reader := read_by[number]) is not None:
            taken[reader] += seconds - before
        before = seconds
    return taken
