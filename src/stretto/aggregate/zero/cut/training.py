"""Synchronous training with parameters in slices: `shard=Zero(3)`.

    forward     a unit's parameters are gathered before it computes, and free afterwards              m (P-1)/P bytes sent
    backward    gathered again, free when nothing reads them any more                                 m (P-1)/P
                its gradients leave as a reduce-scatter as soon as all are there (`../training.py`)   m (P-1)/P
    step        each worker steps its slices; nothing is sent                                         0

so 1.5 times what an all-reduce of the gradients sends. What a unit is: `units.py`. Rounds, notes, unused and late gradients,
failures, optimizer state: as in stages 1 and 2. A bucket of gradients is some of a unit's parameters, of one dtype, device, codec
and optimizer, and so is a piece of the memory in which they are gathered: both are cut at the same places.

Result: the same bits as stage 2 with the same buckets.
Memory: see `shard/zero.py`; in addition three gathered units at most, and the root, and two buckets of gradients.
Workers must call the same modules in the same order, in evaluation too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.all_reduce.bucket import ReducedBucket, make_buckets
from stretto.aggregate.all_reduce.exchange import ExchangeDriver
from stretto.aggregate.zero.bucket import Room, SlicedBucket
from stretto.aggregate.zero.cut import admission
from stretto.aggregate.zero.cut.gathering import CutUnit, Gatherer
from stretto.aggregate.zero.cut.memory import CutMemory, SliceLayout, slice_layout
from stretto.aggregate.zero.cut.passes import Passes
from stretto.aggregate.zero.cut.state_dicts import StateDicts
from stretto.aggregate.zero.cut.stepping import CutOptimizer, CutSteps
from stretto.aggregate.zero.cut.units import UnitPlan, find_units
from stretto.aggregate.zero.norms import SliceNorms
from stretto.aggregate.zero.slices import Apart, Piece, SliceBounds
from stretto.aggregate.zero.training import ShardedAllReduce
from stretto.compress.codec import Codec, Compression
from stretto.engine.arena import laid_out, shrink_heap
from stretto.engine.state import copy_by
from stretto.engine.training import Named, Participation, RoundEnd, RoundResult, Setting, TrainingState
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.plan.transfers import Transfer, TransferPlan
from stretto.schedule.orders import Buckets

if TYPE_CHECKING:
    from stretto.strategy import Strategy

MERGED_BYTES = 4 << 20  # neighbours are one unit up to this size, if the schedule does not say


class CutBucket(SlicedBucket):
    """Gradients of parameters that are in slices: what is stepped are views of these."""

    memory: CutMemory

    def cut(self, shares: SliceBounds, norms: SliceNorms, room: Room | None, apart: Apart | None = None) -> None:
        assert room is not None, "gradients are in slices too"
        self.shares, self.norms, self.room = shares, norms, room
        self.pieces = self.memory.pieces()
        self._by_slot = {piece.slot: piece for piece in self.pieces}


class CutParameters(ShardedAllReduce):
    """`AllReduce` + `Synchronous` + `Zero(3)`."""

    parameters_in_slices = True
    _kind_of_steps = CutSteps

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        admission.check_called(setting.model, setting.called, strategy)
        self._units: list[CutUnit] = []
        self._known: set[Tensor] = set(setting.model.parameters())
        self._copies: dict[Tensor, Tensor] | None = None
        if not self.engaged:
            return
        self._optimizers = [CutOptimizer(optimizer, self._add_up) for optimizer in setting.loop.optimizers]
        channel = self._gather_channel
        driver = ExchangeDriver(job, self._group, channel, self._algorithm)
        self._gathers = Gatherer(job, driver, channel, setting.name)
        self._passes = Passes(self._gathers)
        self._state_dicts = StateDicts(self._fetch)
        self.no_join = f"shard={strategy.shard!r}: a worker that has run out of data makes no forward, which gathers parameters"

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        super().check_strategy(strategy)
        admission.check_strategy(strategy)

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        super().check(model, optimizers, strategy, job)
        admission.check(model, strategy)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def _make_buckets(self, dense: Sequence[Named]) -> list[ReducedBucket]:
        self._passes.tidy()
        self._cut_units()
        transfers, memories = [], []
        for unit in reversed(self._units):  # the root, at number 0, is the last of which all gradients are there
            for memory in reversed(unit.memories):
                if memory.parameters[0].requires_grad:
                    names = tuple(place.name for place in memory.layout.places)
                    transfers.append(Transfer(parameters=names, num_bytes=memory.num_elements * memory.whole.element_size()))
                    memories.append(memory)
        self.plan = TransferPlan(schedule=repr(self._strategy.schedule), transfers=tuple(transfers), reason="within a unit each")
        buckets = make_buckets(dense, self.plan, self._strategy.compress, apart=True, kind=CutBucket)
        for bucket, memory in zip(buckets, memories, strict=False):
            assert isinstance(bucket, CutBucket)
            bucket.memory = memory
            bucket.cut(memory.shares, self._norms, self._room)
        return buckets

    def _cut_units(self) -> None:
        """Units as the model is now. Those that are as they were stay; others become whole for a moment."""
        model = self._setting.model
        plans = find_units(model, self._merged_bytes, MERGED_BYTES)
        before = {
            frozenset(_key(memory.parameters, memory.is_trainable) for memory in unit.memories): unit for unit in self._units
        }
        groups = [self._groups(plan) for plan in plans]
        wanted = [frozenset(_key([p for _, p in group], group[0][1].requires_grad) for group in each) for each in groups]
        kept = {key: unit for key, unit in before.items() if key in set(wanted)}
        for key, unit in before.items():
            if key not in kept:
                self._gathers.bring(unit, exactly=True)
                for memory in unit.memories:
                    memory.give_back()
        self._adopt_new()
        new = [group for each, key in zip(groups, wanted, strict=True) if key not in kept for group in each]
        memories = iter(self._memories(new, [memory for unit in kept.values() for memory in unit.memories]))
        self._units = [
            CutUnit(number, plan.name, plan.modules, kept[key].memories if key in kept else [next(memories) for _ in group])
            for number, (plan, group, key) in enumerate(zip(plans, groups, wanted, strict=True))
        ]
        self._gathers.arrange(self._units)
        self._passes.arrange(self._units)
        self._state_dicts.arrange(model, [memory for unit in self._units for memory in unit.memories])

    def _memories(self, groups: Sequence[list[Named]], staying: Sequence[CutMemory]) -> list[CutMemory]:
        """New ones. The slices of all, also of those that stay as they are, lie in one arena."""
        if not groups:
            return []
        layouts = [self._layout_of(group) for group in groups]
        homes = laid_out((each.kind, each.length) for each in (*layouts, *(memory.sliced for memory in staying)))
        codec = self._shard.weights
        assert codec is None or isinstance(codec, Codec), "admission has looked at it"
        made = [
            CutMemory(each, home, codec if each.named[0][1].requires_grad else None)
            for each, home in zip(layouts, homes, strict=False)
        ]
        for memory, home in zip(staying, homes[len(layouts) :], strict=True):
            memory.move(home)
        shrink_heap()  # the parameters were there
        return made

    def _layout_of(self, group: list[Named]) -> SliceLayout:
        name, first = group[0]
        apart = self._apart(first.device)
        if apart is not None and not first.requires_grad:  # nobody steps it
            apart = Apart(apart.device, None)
        return slice_layout(group, self._codec_of(name, first), apart, self._group.rank, self._group.size)

    def _codec_of(self, name: str, parameter: Tensor) -> Compression:
        return self._strategy.compress.for_parameter(name, tuple(parameter.shape))

    @property
    def _merged_bytes(self) -> int:
        schedule = self._strategy.schedule
        if not isinstance(schedule, Buckets):
            return 0
        return MERGED_BYTES if schedule.bytes is None else schedule.bytes

    def _groups(self, plan: UnitPlan) -> list[list[Named]]:
        """What is reduced and stepped together. Not more than `_merged_bytes`: each needs memory while it is under way."""
        found: dict[Any, list[list[Named]]] = {}
        for name, parameter in plan.parameters:
            answer = self._codec_of(name, parameter) if parameter.requires_grad else None
            kind = parameter.dtype, parameter.device, parameter.requires_grad, self._owner_of(name), answer
            groups = found.setdefault(kind, [])
            if not groups or sum(p.nbytes for _, p in groups[-1]) + parameter.nbytes > self._merged_bytes:
                groups.append([])
            groups[-1].append((name, parameter))
        return [group for groups in found.values() for group in groups]

    def _adopt_new(self) -> None:
        """Parameters that came later have rank 0's values, before they are cut."""
        now = list(self._setting.model.parameters())
        if new := [parameter for parameter in now if parameter not in self._known]:
            copy_by(partial(self._broadcast, f" of new parameters of {self._setting.name}"), new)
        self._known = set(now)

    def adopt(self, new: Sequence[Tensor], found: Sequence[Named]) -> None:
        super().adopt((), found)

    # -- rounds and steps ---------------------------------------------------------------------------------------------

    def backward_ended(self, end: RoundEnd) -> RoundResult:
        if end.participation is Participation.FAILED:
            self._gathers.say_that_it_failed()
        try:
            return super().backward_ended(end)
        finally:
            self._gathers.round_ended()
            self._gathers.drawn = self._num_rounds & 0xFFFFFFFF

    def _give_up(self, participation: Participation) -> None:
        self._gathers.agree_on_the_end()
        self._passes.tidy()
        super()._give_up(participation)

    def hook_model(self) -> None:
        """The engine has its hooks on the model: ours come after them."""
        self._passes.arrange(self._units)

    def before_step(self, optimizer: Optimizer) -> Set[Tensor] | None:
        if any(unit.held for unit in self._units):
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step() within `with stretto.gathered(model)`: what the step does to the slices "
                f"would be overwritten at its end.\nCall it after the block."
            )
        self._passes.tidy()
        return super().before_step(optimizer)

    def _weight_of(self, piece: Piece) -> Tensor:
        return piece.weight.detach()

    def load_state(self, state: TrainingState) -> None:
        super().load_state(state)
        self._gathers.drawn = self._num_rounds & 0xFFFFFFFF

    # -- all values ---------------------------------------------------------------------------------------------------

    @contextmanager
    def whole_parameters(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        asked = set(parameters)
        units = [unit for unit in self._units if any(p in asked for memory in unit.memories for p in memory.parameters)]
        for unit in units:
            self._gathers.bring(unit, exactly=True)
            unit.held += 1
        try:
            yield
        finally:
            for unit in units:
                unit.held -= 1
                for memory in unit.memories:
                    if memory.is_there:
                        memory.store()
                if not unit.active and not unit.held:
                    self._gathers.release(unit)

    def show_parameters(self) -> None:
        """All values are there until the next pass or step begins."""
        if self.engaged and not self._is_whole:
            for unit in self._units:
                self._gathers.bring(unit, exactly=True)
            self._passes.mark_dirty()

    def _fetch(self, module: nn.Module) -> dict[Tensor, Tensor]:
        if self._copies is not None:
            return self._copies
        return self._copied(set(module.parameters()), keeps=True)

    def _copied(self, parameters: set[Tensor], *, keeps: bool) -> dict[Tensor, Tensor]:
        """Copies in host memory, a unit after the other; `keeps`: on this worker."""
        found: dict[Tensor, Tensor] = {}
        for unit in self._units:
            mine = [p for memory in unit.memories for p in memory.parameters if p in parameters]
            if mine:
                with self.whole_parameters(mine):
                    if keeps:
                        found |= {p: _on_host(p) for p in mine}
        return found

    @contextmanager
    def result_shown(self) -> Iterator[None]:
        """Rank 0 has all parameters."""
        with super().result_shown():
            if self.engaged:
                self._passes.tidy()
                self._copies = self._copied(self._known, keeps=self._job.rank == 0)
            try:
                yield
            finally:
                self._copies = None

    def before_release(self) -> None:
        if self.engaged and self._units and not self._is_whole:
            self._passes.tidy()
            super().before_release()
            for unit in self._units:
                self._gathers.bring(unit, exactly=True)
                for memory in unit.memories:
                    memory.give_back()
            self._forget_units()

    def _forget_units(self) -> None:
        self._passes.close()
        self._state_dicts.close()
        self._units = []
        self._gathers.arrange([])

    def close(self) -> None:
        if self.engaged:
            self._passes.close()
            self._state_dicts.close()
            self._gathers.abandon()
        super().close()


def _key(parameters: Sequence[Tensor], is_trainable: bool) -> tuple[int, ...]:
    """What is cut alike: the same parameters, stepped or not."""
    return (*map(id, parameters), is_trainable)


def _on_host(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return torch.empty_like(value, device="cpu").copy_(value)
