"""Gathers of units, and which of them begins while another one is computed with.

Gathers have numbers in the order in which they begin since the last round, which is that of the program: all workers call the
same modules in the same order. A worker that calls another one is found out by the label, which names the unit: `RankMismatch`,
on all of them.

Prefetch: the order of the last pass of the same kind (forward, forward without gradients, backward) tells which unit comes next,
if this pass is at the same place of it. Its gather begins together with that of the one that is needed now. If the guess is wrong
it is wrong on all workers alike, and the unit is free again at the end of the pass.

Memory: two units and the root; in backward a third, until its last input has a gradient.

A worker whose backward has failed takes part in no further gather, and others would wait for it there. When it closes its round
it begins the next gather *for nothing*, under a label that says so: whoever is in it, or comes to it, raises `BackwardFailed`,
and closes the round too. Then all begin as many as any of them has begun, so that none is left under way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum

import torch
from torch import nn

from stretto.aggregate.all_reduce.exchange import DirectExchange, ExchangeDriver, Sending
from stretto.aggregate.zero.cut.memory import CutMemory
from stretto.aggregate.zero.stepping import parts_of
from stretto.errors import BackwardFailed, RankMismatch, WireError
from stretto.job import Job

LONGEST_PASS = 4096  # units of a pass that are remembered
FAILED = " of nothing: backward has failed on rank "
FORWARD, WITHOUT_GRADIENTS, BACKWARD = "forward", "without gradients", "backward"


class Presence(Enum):
    """Where the values of a unit are."""

    FREE = "in slices"
    COMING = "on their way"
    HERE = "here"


class CutUnit:
    """What is gathered together, and what is known of it in the pass under way."""

    def __init__(self, number: int, name: str, modules: Sequence[nn.Module], memories: Sequence[CutMemory]) -> None:
        self.number, self.name, self.modules, self.memories = number, name, list(modules), list(memories)
        self.presence = Presence.FREE
        self.exchanges: list[DirectExchange] = []
        self.is_exact = False  # what is gathered, or on its way
        self.held = 0  # by `gathered`
        self.active = 0  # forwards that run
        self.ran: set[nn.Module] = set()
        self.inputs = 0  # tensors given to its modules in forward that have gradients
        self.begin_pass()

    def begin_pass(self) -> None:
        self.inputs_done = 0
        self.accumulated = 0

    @property
    def is_rounded(self) -> bool:
        return any(memory.is_rounded for memory in self.memories)

    @property
    def num_trainable(self) -> int:
        return sum(parameter.requires_grad for memory in self.memories for parameter in memory.parameters)


class Gatherer:
    """All gathers of one model."""

    def __init__(self, job: Job, driver: ExchangeDriver, channel: int, name: str) -> None:
        self._job, self._driver, self._channel, self.name = job, driver, channel, name
        self._round, self._begun = 0, 0  # gathers since the end of that round
        self._orders: dict[str, list[int]] = {}  # kind of pass -> the units of the last one
        self._passed: dict[str, list[int]] = {}  # and of the one under way
        self._for_nothing: list[DirectExchange] = []
        self.drawn = 0  # what codecs that draw lots begin with: the same in a forward and its backward
        self.units: list[CutUnit] = []

    def arrange(self, units: list[CutUnit]) -> None:
        self.units = units
        self._orders, self._passed = {}, {}

    def round_ended(self) -> None:
        """All workers have come to its end, whatever each of them has gathered before: an error on one, say."""
        self._round, self._begun = self._round + 1, 0

    # -- after a failure ----------------------------------------------------------------------------------------------

    def say_that_it_failed(self) -> None:
        """This worker's pass has failed. Others may wait for it in the next gather, and hear of it there."""
        self._begin_for_nothing(self._begun + 1)

    def _begin_for_nothing(self, until: int) -> None:
        self._job.whereabouts.claim(self._channel)
        while self._begun < until:
            nothing = torch.zeros(self._job.world_size, dtype=torch.uint8, device="cpu")
            under_way = self._driver.drive(parts_of(nothing), self._next_number(), f"{FAILED}{self._job.rank}", Sending())
            self._for_nothing.append(DirectExchange(under_way))

    def agree_on_the_end(self) -> None:
        """On all workers, of which some have failed: every gather that any of them has begun is begun by all, so it ends."""
        self._begin_for_nothing(max(self._job.gather_object(self._begun)))
        for exchange in (*self._for_nothing, *(each for unit in self.units for each in unit.exchanges)):
            with suppress(WireError):
                exchange.wait()
        self._for_nothing.clear()
        self._orders, self._passed = {}, {}  # how far each has come differs

    def _next_number(self) -> int:
        number, self._begun = (self._round & 0xFFFF) << 16 | self._begun & 0xFFFF, self._begun + 1
        return number

    # -- gathers ------------------------------------------------------------------------------------------------------

    def bring(self, unit: CutUnit, kind: str | None = None, *, exactly: bool = False) -> None:
        """Return when the unit's values are here. `kind`: of the pass that uses it, if it is one. `exactly`: those that are in
        slices, where a codec makes others of them."""
        if exactly and not unit.is_exact and unit.is_rounded:
            self._wait(unit)
            unit.presence = Presence.FREE
        if unit.presence is Presence.FREE:
            self._begin(unit, exactly=exactly)
        following = None if kind is None else self._next(unit, kind)
        if following is not None and following.presence is Presence.FREE:
            self._begin(following)
        self._wait(unit)

    def _next(self, unit: CutUnit, kind: str) -> CutUnit | None:
        passed, order = self._passed.setdefault(kind, []), self._orders.get(kind, [])
        if (not passed or passed[-1] != unit.number) and len(passed) < LONGEST_PASS:
            passed.append(unit.number)
        place = len(passed)
        return self.units[order[place]] if place < len(order) and order[place - 1] == unit.number else None

    def _begin(self, unit: CutUnit, *, exactly: bool = False) -> None:
        self._job.whereabouts.claim(self._channel)
        unit.presence, unit.is_exact = Presence.COMING, exactly
        for memory in unit.memories:
            memory.take()
            if memory.num_elements:
                label = f" of the parameters of {unit.name} in {self.name}"
                steps = memory.gather(self.drawn, exactly=exactly)
                under_way = self._driver.drive(steps, self._next_number(), label, Sending())
                unit.exchanges.append(DirectExchange(under_way))

    def _wait(self, unit: CutUnit) -> None:
        if unit.presence is not Presence.COMING:
            return
        try:
            for exchange in unit.exchanges:
                exchange.wait()
        except RankMismatch as mismatch:  # its memory is free when the round has ended, on all workers
            if failed := sorted({int(rank) for rank in re.findall(f"{FAILED}(\\d+)", str(mismatch))}):
                raise BackwardFailed(failed) from None
            raise
        unit.exchanges.clear()
        for memory in unit.memories:
            memory.is_gathered = True
            memory.show()
        unit.presence = Presence.HERE

    def release(self, unit: CutUnit) -> None:
        """The values are not needed now. Waits for nobody: what is on its way stays."""
        if unit.presence is Presence.HERE and not unit.held:
            self._free(unit)

    def _free(self, unit: CutUnit) -> None:
        unit.exchanges.clear()
        for memory in unit.memories:
            memory.free()
        unit.presence = Presence.FREE

    def end_pass(self) -> None:
        """Everything is free again, also what was gathered for nothing."""
        self._orders.update(self._passed)
        self._passed = {}
        for unit in self.units:
            unit.ran.clear()
            unit.begin_pass()
            if not unit.active:
                for exchange in unit.exchanges:
                    with suppress(WireError):  # nobody has asked for it; who is lost will be missed where something is
                        exchange.wait()
                if unit.presence is not Presence.FREE and not unit.held:
                    self._free(unit)

    def is_idle(self) -> bool:
        return all(unit.presence is Presence.FREE for unit in self.units)

    def abandon(self) -> None:
        """Nothing is gathered any more; what is under way ends by itself or at its deadline."""
        for unit in self.units:
            for exchange in unit.exchanges:
                with suppress(Exception):
                    exchange.wait()
            unit.exchanges.clear()
