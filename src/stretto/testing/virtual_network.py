"""A seeded datagram network in virtual time, on which protocols without input and output are run.

A protocol is a state machine: it is told of messages and timers, and answers with messages to send and timers to set.
It never blocks, never reads a clock, never draws a random number it was not given. So one seed gives one history:

    network = VirtualNetwork(seed=7, model=NetworkModel(Link(latency_s=1e-3, loss=0.1)), faults=[Kill("b", at_s=2.0)])
    network.add("a", Member(...)); network.add("b", Member(...))
    network.run(until_s=10)
    network.assert_all_fired()

Messages are lost, doubled, delayed and reordered as their `Link` says, and dropped when they are sent or arrive across
a cut or arrive at a dead node. A paused node's messages and timers wait for it, in order. Nodes keep no common memory
but the messages themselves, which must be values (they are not copied).

The same seed, model, faults and nodes give the same `trace.hexdigest()` in every process.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, NamedTuple, Protocol

import msgspec

from stretto.errors import ConfigurationError, StrettoError
from stretto.testing.faults import Cut, Fault, FaultLedger, Kill, Pause, Trace
from stretto.testing.network_model import Interfaces, Link, NetworkModel, NodeName


class Outgoing(NamedTuple):
    """Send `message` to the node `to`."""

    to: NodeName
    message: Any


class Timer(NamedTuple):
    """Call `on_timer(now, name)` in `after_s` seconds. A timer of the same name replaces the one before; None takes it
    back.
    """

    name: str
    after_s: float | None


Answer = Sequence[Outgoing | Timer]


class StateMachine(Protocol):
    """A protocol's part on one node."""

    def on_start(self, now: float) -> Answer: ...

    def on_message(self, now: float, source: NodeName, message: Any) -> Answer: ...

    def on_timer(self, now: float, name: str) -> Answer: ...


class OutOfBudget(StrettoError):
    """A run in virtual time used up its events or its time: it would not have ended by itself."""


@dataclass(slots=True)
class _Node:
    machine: StateMachine
    alive: bool = True
    paused: Pause | None = None
    waiting: list[Callable[[], None]] = field(default_factory=list)
    timers: dict[str, int] = field(default_factory=dict)  # name -> number of the setting that counts


Event = Callable[[], None]


class VirtualNetwork:
    """The network, its nodes and its clock. `encode` gives a message's bytes, for its size and for the trace."""

    def __init__(
        self,
        *,
        seed: int,
        model: NetworkModel | None = None,
        faults: Iterable[Fault] = (),
        encode: Callable[[Any], bytes] = msgspec.msgpack.encode,
    ) -> None:
        self.model = model or NetworkModel()
        self.now = 0.0
        self.num_events = 0
        self.trace = Trace()
        faults = list(faults)
        self._ledger = FaultLedger(faults, self.model.all_links())
        self._encode = encode
        self._random = Random(seed)
        self._events: list[tuple[float, int, Event]] = []
        self._sequence = 0
        self._nodes: dict[NodeName, _Node] = {}
        self._cuts: list[Cut] = []
        self._interfaces = Interfaces()
        self._newest: dict[tuple[NodeName, NodeName], int] = {}
        self._by_count = [fault for fault in faults if fault.at_event is not None]
        for fault in faults:
            if fault.at_s is not None:
                self.at(fault.at_s, partial(self._inject, fault))

    # What a test does

    def add(self, name: NodeName, machine: StateMachine) -> None:
        """A node joins now (also under the name of one that was killed: a restart). Its `on_start` runs as an event."""
        if name in self._nodes and self._nodes[name].alive:
            raise ConfigurationError(
                f"VirtualNetwork.add({name!r}): a node of that name is alive, and a name means one node.\n"
                f"Kill it first (Kill({name!r}, at_s=...)), or use another name."
            )
        node = _Node(machine)
        self._nodes[name] = node
        self.at(self.now, lambda: self._run_on(name, node, lambda: machine.on_start(self.now), "start"))

    def at(self, time_s: float, action: Event) -> None:
        """Do something at a virtual time: add a node, send from outside, look at a state."""
        self._sequence += 1
        heapq.heappush(self._events, (max(time_s, self.now), self._sequence, action))

    def send(self, source: NodeName, to: NodeName, message: Any) -> None:
        """Send as if `source` had: also from outside, where `source` need not be a node."""
        body = self._encode(message)
        link = self.model.link(source, to)
        start, end = self._interfaces.leave(self.now, source, link.seconds_for(len(body)))
        self.trace.record(self.now, f"send {source!r} {to!r} {body.hex()}")
        if self._is_cut(source, to) or self._happens("loss", link.loss):
            return
        self._carry(source, to, message, link, start, end)
        if self._happens("duplicate", link.duplicate):
            self._carry(source, to, message, link, start, end)

    def run(self, until_s: float, max_events: int = 1_000_000) -> None:
        """Go on until virtual time `until_s` or until nothing is left to happen. Raises `OutOfBudget` after
        `max_events`.
        """
        self.run_until(lambda: False, until_s, max_events)

    def run_until(self, condition: Callable[[], bool], until_s: float, max_events: int = 1_000_000) -> bool:
        """Go on until `condition()` holds after some event (True), or virtual time `until_s` or the end of all events
        (False).
        """
        last = self.num_events + max_events
        while not condition():
            if not self._events or self._events[0][0] > until_s:
                if until_s < math.inf:
                    self.now = max(self.now, until_s)
                return False
            if self.num_events >= last:
                raise OutOfBudget(
                    f"{max_events} events by virtual time {self.now:g} s and still not at {until_s:g} s: nodes that "
                    f"answer each "
                    f"other for ever, or a timer of zero seconds. The last were:\n{self._recent()}\n"
                    f"If the run is only long, allow more: max_events=..."
                )
            self._step()
        return True

    @property
    def fired(self) -> dict[str, int]:
        """How often each fault had an effect: by `str(fault)`, and "loss", "duplicate", "reorder"."""
        return dict(self._ledger.fired)

    def assert_all_fired(self) -> None:
        self._ledger.assert_all_fired()

    def is_alive(self, name: NodeName) -> bool:
        return name in self._nodes and self._nodes[name].alive

    # Events

    def _step(self) -> None:
        self.now, _, event = heapq.heappop(self._events)
        event()
        self.num_events += 1
        for fault in [fault for fault in self._by_count if fault.at_event == self.num_events]:
            self._inject(fault)

    def _carry(self, source: NodeName, to: NodeName, message: Any, link: Link, start: float, end: float) -> None:
        delay = link.latency_s + link.jitter.draw(self._random)
        if link.reorder and self._random.random() < link.reorder:
            delay += link.hold_s
        self._sequence += 1
        number = self._sequence

        def first_byte() -> None:
            done = self._interfaces.reach(self.now, to, end - start)
            self.at(done, lambda: self._arrive(source, to, message, number))

        self.at(start + delay, first_byte)

    def _arrive(self, source: NodeName, to: NodeName, message: Any, number: int) -> None:
        if self._is_cut(source, to):
            return
        if number < self._newest.get((source, to), 0):
            self._ledger.fired["reorder"] += 1
        self._newest[source, to] = max(number, self._newest.get((source, to), 0))
        node = self._nodes.get(to)
        if node is not None:
            what = f"message from {source!r}"
            self._run_on(to, node, lambda: node.machine.on_message(self.now, source, message), what)

    def _run_on(self, name: NodeName, node: _Node, call: Callable[[], Answer], what: str) -> None:
        """Let a node take one event, or keep the event for it while it is paused."""
        if not node.alive:
            return
        if node.paused is not None:
            self._ledger.fired[str(node.paused)] += 1
            node.waiting.append(lambda: self._run_on(name, node, call, what))
            return
        self.trace.record(self.now, f"{name!r} {what}")
        for action in call():
            if isinstance(action, Outgoing):
                self.send(name, action.to, action.message)
            else:
                self._set_timer(name, node, action)

    def _set_timer(self, name: NodeName, node: _Node, timer: Timer) -> None:
        self._sequence += 1
        number = self._sequence
        if timer.after_s is None:
            node.timers.pop(timer.name, None)
            return
        node.timers[timer.name] = number

        def ring() -> Answer:
            if node.timers.get(timer.name) != number:  # replaced, or taken back, since
                return ()
            del node.timers[timer.name]
            return node.machine.on_timer(self.now, timer.name)

        self.at(self.now + timer.after_s, lambda: self._run_on(name, node, ring, f"timer {timer.name}"))

    # Faults

    def _inject(self, fault: Fault) -> None:
        self.trace.record(self.now, str(fault))
        match fault:
            case Kill(name):
                if self.is_alive(name):
                    self._nodes[name].alive = False
                    self._ledger.fired[str(fault)] += 1
            case Pause(name):
                if self.is_alive(name):
                    node = self._nodes[name]
                    node.paused = fault
                    self.at(self.now + fault.for_s, lambda: self._resume(node, fault))
            case Cut():
                self._cuts.append(fault)
                if fault.for_s < math.inf:
                    self.at(self.now + fault.for_s, lambda: self._cuts.remove(fault))

    def _resume(self, node: _Node, pause: Pause) -> None:
        if node.paused is not pause:  # another pause began meanwhile: that one decides
            return
        node.paused = None
        waiting, node.waiting = node.waiting, []
        for event in waiting:
            event()

    def _is_cut(self, a: NodeName, b: NodeName) -> bool:
        hit = [cut for cut in self._cuts if cut.separates(a, b)]
        for cut in hit:
            self._ledger.fired[str(cut)] += 1
        return bool(hit)

    def _happens(self, kind: str, probability: float) -> bool:
        happens = probability > 0 and self._random.random() < probability
        if happens:
            self._ledger.fired[kind] += 1
        return happens

    def _recent(self) -> str:
        return "\n".join(f"  {time:.6f} {what}" for time, what in list(self.trace.entries)[-5:])
