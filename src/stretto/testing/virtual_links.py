"""A clock that jumps from event to event, links between nodes, and the faults on both: one seed gives one history.

Protocol machines (`virtual_network.py`) and programs on wires (`virtual.py`) run on it. They say what an event does to a node;
here is when it happens:

    transmissions   on a reliable connection a lost one comes again after `retransmit_s`, and none overtakes another
    Kill, Pause     of a node, at a time or after a number of events; a paused node goes on where it was
    Cut             between nodes; what a cut holds back goes on, in order, when it heals
    silence         a pause or a cut of more than `silence_s` parts the nodes concerned for good, although they live
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from stretto.errors import StrettoError
from stretto.testing.faults import Cut, Fault, FaultLedger, Kill, Pause, Trace
from stretto.testing.network_model import Interfaces, Link, NetworkModel, NodeName


class OutOfBudget(StrettoError):
    """A run in virtual time used up its events or its time: it would not have ended by itself."""


class VirtualNode(Protocol):
    """One life of a node."""

    paused: Pause | None

    @property
    def name(self) -> Any: ...
    @property
    def alive(self) -> bool: ...


N = TypeVar("N", bound=VirtualNode)


class VirtualLinks(ABC, Generic[N]):
    """See the module's text."""

    def __init__(self, seed: int, model: NetworkModel | None, faults: Iterable[Fault]) -> None:
        faults = list(faults)
        self.model = model or NetworkModel()
        self.now = 0.0
        self.num_events = 0
        self.trace = Trace()
        self.ledger = FaultLedger(faults, self.model.all_links())
        self._random = Random(seed)
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._sequence = 0
        self._nodes: dict[NodeName, N] = {}  # the last life of each
        self._interfaces = Interfaces()
        self._not_before: dict[tuple[NodeName, NodeName], float] = {}  # on a reliable connection, when the next may arrive
        self._cuts: list[Cut] = []
        self._held: list[Callable[[], None]] = []  # what cuts hold back
        self._by_count = [fault for fault in faults if fault.at_event is not None]
        for fault in faults:
            if fault.at_s is not None:
                self.at(fault.at_s, partial(self._inject, fault))

    # What a node does

    @abstractmethod
    def _end(self, node: N, reason: str) -> None:
        """It is killed."""

    @abstractmethod
    def _go_on(self, node: N) -> None:
        """Its pause is over."""

    @abstractmethod
    def _part(self, a: N, b: N) -> bool:
        """They have not heard of each other for too long. False: they had parted before."""

    # The clock

    def at(self, time_s: float, action: Callable[[], object]) -> None:
        """Do something at a virtual time. What returns False has done nothing: it takes no time, and is no event."""
        self._sequence += 1
        heapq.heappush(self._events, (max(time_s, self.now), self._sequence, action))

    def _take_event(self) -> None:
        before = self.now
        self.now, _, event = heapq.heappop(self._events)
        if event() is False:
            self.now = before
            return
        self.num_events += 1
        for fault in self._by_count:
            if fault.at_event == self.num_events:
                self._inject(fault)

    # Links

    def _first_byte_at(self, pair: tuple[NodeName, NodeName], link: Link, start: float) -> float:
        """When the first byte of a transmission on a reliable connection arrives that leaves at `start`."""
        first_byte = start + link.latency_s + link.jitter.draw(self._random)
        while self._happens("loss", link.loss):
            first_byte += link.retransmit_s
        self._not_before[pair] = max(first_byte, self._not_before.get(pair, 0.0))
        return self._not_before[pair]

    def _happens(self, kind: str, probability: float) -> bool:
        happens = probability > 0 and self._random.random() < probability
        if happens:
            self.ledger.fired[kind] += 1
        return happens

    def _is_cut(self, a: NodeName, b: NodeName) -> bool:
        hit = [cut for cut in self._cuts if cut.separates(a, b)]
        for cut in hit:
            self.ledger.fired[str(cut)] += 1
        return bool(hit)

    # Faults

    @property
    def fired(self) -> dict[str, int]:
        """How often each fault had an effect: by `str(fault)`, and "loss", "duplicate", "reorder"."""
        return dict(self.ledger.fired)

    def assert_all_fired(self) -> None:
        self.ledger.assert_all_fired()

    def _living(self) -> list[N]:
        return [node for node in self._nodes.values() if node.alive]

    def _inject(self, fault: Fault) -> None:
        self.trace.record(self.now, str(fault))
        if isinstance(fault, Cut):
            self._cut(fault)
        elif (node := self._nodes.get(fault.node)) is not None and node.alive:
            if isinstance(fault, Kill):
                self.ledger.fired[str(fault)] += 1
                self._end(node, "its process died")
            else:
                self._pause(node, fault)

    def _pause(self, node: N, pause: Pause) -> None:
        def fall_silent() -> None:
            if node.paused is pause:
                self._fall_silent(pause, ((node, other) for other in self._living() if other is not node))

        node.paused = pause
        self.at(self.now + pause.for_s, partial(self._resume, node, pause))
        if pause.for_s > self.model.silence_s:
            self.at(self.now + self.model.silence_s, fall_silent)

    def _resume(self, node: N, pause: Pause) -> bool:
        if node.paused is not pause:  # another pause began meanwhile: that one decides
            return False
        node.paused = None
        self._go_on(node)
        return True

    def _cut(self, cut: Cut) -> None:
        def fall_silent() -> None:
            self._fall_silent(
                cut, (pair for pair in combinations(self._living(), 2) if cut.separates(pair[0].name, pair[1].name))
            )

        self._cuts.append(cut)
        if cut.for_s < math.inf:
            self.at(self.now + cut.for_s, partial(self._heal, cut))
        if cut.for_s > self.model.silence_s:
            self.at(self.now + self.model.silence_s, fall_silent)

    def _heal(self, cut: Cut) -> None:
        """What was held back goes on, at once and in order; another cut may hold it back again."""
        self._cuts.remove(cut)
        held, self._held = self._held, []
        for go_on in held:
            go_on()

    def _fall_silent(self, fault: Fault, pairs: Iterable[tuple[N, N]]) -> None:
        for pair in list(pairs):
            if self._part(*pair):
                self.ledger.fired[str(fault)] += 1
