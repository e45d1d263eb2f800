"""A step of a model whose optimizer state is in slices: each worker steps its own, and gives them to the others.

    for each bucket, in the order in which the next forward reads them:
        wait        until its gradients have arrived, if they are still on their way
        step        the pieces that this worker owns
        all-gather  of the bucket's parameters; at most two are under way, and what has come is copied into the model

so one slice is stepped while others travel. Without a barrier to cross all of it happens within `optimizer.step()`. With a
schedule that crosses it (`Priority`, `Caramel`, ...) `optimizer.step()` notes the options and returns, and a module's forward
waits for the buckets of its own parameters; what has arrived meanwhile is taken along.

No deadlock: buckets are stepped and gathered in one order, the same on all workers. Whoever waits for the gather of bucket k has
begun all before it, and waits for no later one, so the worker that is furthest behind never waits for one that waits for it.

If an exchange fails half of the parameters may have been updated: the error is raised at every later use, until a saved state has
been loaded (as in `crossing.py`, whose rules about who may read what are these).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.aggregate.all_reduce.bucket import ReducedBucket
from stretto.aggregate.all_reduce.crossing import Crossing
from stretto.aggregate.all_reduce.exchange import DirectExchange, EverybodysParts, Steps
from stretto.aggregate.zero.bucket import AT_ONCE, Room, SlicedBucket
from stretto.aggregate.zero.gradient import GradientInSlices
from stretto.aggregate.zero.slice_optimizer import Options, SliceOptimizer
from stretto.aggregate.zero.slices import SliceBounds
from stretto.compress.rounds import Gather
from stretto.engine import misuse
from stretto.engine.bucket import views_of
from stretto.observe.trace import Tracer


@dataclass(eq=False, slots=True)
class SlicedStep:
    """One call of `optimizer.step()`."""

    optimizer: SliceOptimizer
    options: Options
    slots: dict[SlicedBucket, dict[int, bool]]  # the parameters that step, and whether their gradient is zero
    versions: dict[Tensor, int]  # of parameters that are stepped later
    postponed: bool


class GatherUnderWay(NamedTuple):
    """Stepped slices on their way. `memory`: where they arrive; None: in the parameter itself."""

    bucket: SlicedBucket
    slots: dict[int, bool]
    memory: Tensor | None
    exchange: DirectExchange


class SlicedSteps(Crossing):
    """The steps that are not done. `find` gives the `SliceOptimizer` of one of the user's, `regroup` tells it that the user's has
    other parameters than before; the rest as for `Crossing`."""

    def __init__(
        self,
        wait_for: Callable[[ReducedBucket], None],
        finish: Callable[[ReducedBucket, Sequence[bool]], None],
        drop: Callable[[ReducedBucket], None],
        find: Callable[[Optimizer], SliceOptimizer],
        gather: Callable[[SlicedBucket, Tensor], DirectExchange],
        regroup: Callable[[SliceOptimizer, list[SlicedBucket]], None],
        room: Room,
        tracer: Tracer | None,
    ) -> None:
        super().__init__(wait_for, finish, drop, tracer)
        self._find, self._gather, self._regroup, self._room = find, gather, regroup, room
        self._sliced: dict[Tensor, tuple[SlicedBucket, int]] = {}
        self._queue: deque[tuple[SlicedStep, SlicedBucket]] = deque()
        self._gathers: deque[GatherUnderWay] = deque()
        self._step: SlicedStep | None = None

    def arrange(self, buckets: Sequence[SlicedBucket]) -> None:
        self._sliced = {p: (bucket, slot) for bucket in buckets for slot, p in enumerate(bucket.parameters)}

    # -- what begins --------------------------------------------------------------------------------------------------

    def begin(self, buckets: Sequence[ReducedBucket], used: Sequence[list[bool]]) -> None:
        self._under_way = dict(zip(buckets, used, strict=True))
        for bucket, flags in self._under_way.items():
            assert isinstance(bucket, SlicedBucket)
            bucket.is_under_way = True
            bucket.show(flags)

    def note_step(self, optimizer: Optimizer) -> set[Tensor] | None:
        self.check()
        self._step = None
        sliced = self._find(optimizer)
        if any(step.optimizer is sliced for step, _ in self._queue):
            self.settle_all()
        if not sliced.is_current:
            self._regroup(sliced, [*dict.fromkeys(bucket for bucket, _ in self._sliced.values())])
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        slots = {bucket: self._slots(bucket, sliced) for bucket in sliced.buckets}
        stepping = {bucket: mine for bucket, mine in slots.items() if mine}
        versions = {bucket.parameters[slot]: bucket.parameters[slot]._version for bucket in stepping for slot in stepping[bucket]}
        self._step = SlicedStep(sliced, sliced.options_now(), stepping, versions, bool(self._under_way))
        return {parameter for parameter in parameters if parameter not in self._sliced}

    def _slots(self, bucket: SlicedBucket, sliced: SliceOptimizer) -> dict[int, bool]:
        for slot, parameter in enumerate(bucket.parameters):
            if parameter in sliced.group_of and parameter.grad is not None and not isinstance(parameter.grad, GradientInSlices):
                if bucket in self._under_way:
                    self._arrive(bucket)
                bucket.put(slot)  # the program has put it there
        return {slot: zeroed for slot, zeroed in bucket.to_step().items() if bucket.parameters[slot] in sliced.group_of}

    def step_taken(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        self._queue.extend((step, bucket) for bucket in in_order(step.slots))
        if step.postponed:
            self._advance()
        else:
            self.settle_all()
            self._in_passing.clear()

    # -- what is waited for -------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return not (self._under_way or self._queue or self._gathers)

    @property
    def stale(self) -> frozenset[Tensor]:
        waiting = (bucket.parameters[slot] for bucket, slots in self._waiting() for slot in slots)
        return frozenset(waiting) | self._in_passing

    def is_stale(self, parameter: Tensor) -> bool:
        if parameter in self._in_passing:
            return True
        place = self._sliced.get(parameter)
        return place is not None and any(bucket is place[0] and place[1] in slots for bucket, slots in self._waiting())

    def _waiting(self) -> list[tuple[SlicedBucket, dict[int, bool]]]:
        """The parameters that are not up to date."""
        return [(bucket, step.slots[bucket]) for step, bucket in self._queue] + [
            (each.bucket, each.slots) for each in self._gathers
        ]

    def settle(self, parameters: Iterable[Tensor]) -> None:
        self.check()
        if self.is_over and not self._in_passing:
            return
        self._advance()
        for parameter in parameters:
            place = self._sliced.get(parameter)
            if place is not None:
                self._bring(place[0])
            self._in_passing.discard(parameter)

    def settle_all(self) -> None:
        self.check()
        while self._queue:
            self._run_next()
        while self._gathers:
            self._take()
        for bucket in list(self._under_way):
            self._arrive(bucket)
        self._in_passing.clear()

    def _advance(self) -> None:
        """Do what can be done without waiting for anybody."""
        while self._gathers and self._gathers[0].exchange.arrived:
            self._take()
        while self._queue and len(self._gathers) < AT_ONCE:
            bucket = self._queue[0][1]
            if bucket in self._under_way and (bucket.exchange is None or not bucket.exchange.arrived):
                return
            self._run_next()
            while self._gathers and self._gathers[0].exchange.arrived:
                self._take()

    def _bring(self, bucket: SlicedBucket) -> None:
        """Return when a bucket is up to date."""
        while any(other is bucket for _, other in self._queue):
            self._run_next()
        while any(each.bucket is bucket for each in self._gathers):
            self._take()
        if bucket in self._under_way:
            self._arrive(bucket)

    # -- one bucket ---------------------------------------------------------------------------------------------------

    def _arrive(self, bucket: ReducedBucket) -> None:
        """Its gradients are here."""
        used = self._under_way[bucket]
        try:
            self._wait_for(bucket)
        except Exception as error:
            self._failure = error
            raise
        assert isinstance(bucket, SlicedBucket)
        try:
            self._finish(bucket, used)
            bucket.complete()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            del self._under_way[bucket]

    def _run_next(self) -> None:
        """Step the next bucket, and begin to give it to the others."""
        step, bucket = self._queue[0]
        if bucket in self._under_way:
            self._arrive(bucket)
        while len(self._gathers) >= AT_ONCE:
            self._take()
        slots = step.slots[bucket]
        for slot in slots:
            parameter = bucket.parameters[slot]
            if step.postponed and parameter._version != step.versions[parameter]:
                raise misuse.changed_before_update(tuple(parameter.shape))
        self._queue.popleft()
        begin_ns = 0 if self._tracer is None else self._tracer.now()
        memory: Tensor | None = None
        try:
            step.optimizer.step(bucket, slots, step.options)
            flat = None if step.postponed else _lone_parameter(bucket)
            if flat is None:
                memory = self._room.take(bucket.flat.dtype, bucket.flat.device, bucket.num_gradient_elements)
                flat = memory[: bucket.num_gradient_elements]
                with torch.inference_mode(False), torch.no_grad():
                    for piece in bucket.pieces:
                        start = bucket.shares.start + piece.start
                        flat[start : start + piece.end - piece.begin].copy_(step.optimizer.weight_of(piece))
            self._gathers.append(GatherUnderWay(bucket, slots, memory, self._gather(bucket, flat)))
        except BaseException as error:  # also an interrupt: half of it may have been done
            self._failure = error
            if memory is not None:
                self._room.lose(memory)
            raise
        if self._tracer is not None:
            self._tracer.span("update", f"update of slice {bucket.number}", begin_ns)

    def _take(self) -> None:
        """Wait for the oldest of the gathers: everybody's slices become the parameters."""
        gather = self._gathers[0]
        try:
            gather.exchange.wait()
            bucket = gather.bucket
            stepped = [bucket.parameters[slot] for slot in gather.slots]
            with torch.inference_mode(False), torch.no_grad():
                if gather.memory is not None:
                    views = views_of(gather.memory[: bucket.num_gradient_elements], bucket.parameters)
                    torch._foreach_copy_([p.detach() for p in stepped], [views[slot] for slot in gather.slots])
                torch.autograd.graph.increment_version(stepped)
            bucket.written(gather.slots)
            self._in_passing.update(stepped)
            self._gathers.popleft()
            if gather.memory is not None:
                self._room.give(gather.memory)
        except BaseException as error:
            self._failure = error
            raise

    # -- failures -----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        for gather in self._gathers:
            with suppress(Exception):
                gather.exchange.wait()
            if gather.memory is not None:
                self._room.give(gather.memory)
        self._gathers.clear()
        self._queue.clear()
        self._step = None
        for bucket in self._under_way:
            with suppress(Exception):
                self._wait_for(bucket)
            self._drop(bucket)
            assert isinstance(bucket, SlicedBucket)
            bucket.drop()
        self._under_way, self._failure = {}, None
        self._in_passing.clear()


def in_order(buckets: Iterable[SlicedBucket]) -> list[SlicedBucket]:
    """As the next forward is expected to read them; the same on all workers."""
    return sorted(
        buckets, key=lambda bucket: (0 if bucket.sending.urgency is None else bucket.sending.urgency.priority, bucket.number)
    )


def _lone_parameter(bucket: SlicedBucket) -> Tensor | None:
    """The memory of the only parameter of a bucket, whose slice has been stepped in place."""
    if not bucket.is_alone or any(piece.is_apart for piece in bucket.pieces):
        return None
    parameter = bucket.parameters[0].detach()
    is_dense = parameter.is_contiguous() if bucket.layout.places[0].order is None else True
    return parameter.as_strided((parameter.numel(),), (1,)) if is_dense else None


def parts_of(flat: Tensor) -> Steps:
    """Slices of equal length, everybody's."""
    yield EverybodysParts(flat)


def uneven_parts_of(flat: Tensor, bounds: SliceBounds) -> Steps:
    """The same where they end at blocks of a codec: as rows of the longest."""
    longest = max(stop - start for start, stop in zip(bounds.bounds, bounds.bounds[1:], strict=False))
    row = torch.zeros(longest, dtype=flat.dtype, device=flat.device)
    row[: bounds.stop - bounds.start] = flat[bounds.start : bounds.stop]
    rows = yield Gather(row)
    for owner, (start, stop) in enumerate(zip(bounds.bounds, bounds.bounds[1:], strict=False)):
        flat[start:stop] = rows[owner, : stop - start]
