"""A seeded network in virtual time on which protocol machines run: one seed gives one history.

    network = VirtualNetwork(seed=7, model=NetworkModel(Link(latency_s=1e-3, loss=0.1)), faults=[Kill(1, at_s=2.0)])
    for rank in range(3):
        network.add(rank, Member(rank))
    reply = network.request(0, Read())
    network.run(until_s=10)
    network.assert_all_fired()

Messages take what their `Link` says. By default they are datagrams: lost, doubled, delayed and reordered, and dropped where
they meet a cut. With `reliable=True` they come once and in order, as on a wire: a lost transmission comes again after
`retransmit_s`, and a cut holds messages back until it heals. A machine that needs order is run there, any other without.

Views are those of a wire. A node that is killed has left after `detect_s` to twice that, for each of the others at a time of its
own. A pause or a cut of more than `silence_s` parts the nodes concerned for good, on both sides, although they live. Nothing
passes between nodes of which one has left for the other. A node that is added while the network runs, under a new name or that
of a dead one, has joined for all others, and the generation is one higher; nothing of a former life reaches anybody.

A paused node's messages and timers wait for it, in order. Payloads are copied when they arrive, not when they are sent, and
overwritten after `on_message`: a machine that changes or keeps what it must not is found out. An exception in a machine ends the
run, with a note where and when it was. The same seed, model, faults and machines give the same `trace.hexdigest()` everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from stretto.errors import ConfigurationError
from stretto.protocol.machine import Actions, HeaderReader, Machine, Payload, Reply, SendMessage, SetTimer
from stretto.testing.faults import Fault, Pause
from stretto.testing.network_model import Link, NetworkModel, NodeName
from stretto.testing.virtual_links import OutOfBudget, VirtualLinks


@dataclass(slots=True, eq=False)
class _Node:
    """One life of a node: a restart makes another."""

    name: NodeName
    machine: Machine
    reader: HeaderReader
    alive: bool = True
    paused: Pause | None = None
    waiting: list[tuple[str, Callable[[], Actions]]] = field(default_factory=list)
    timers: dict[str, int] = field(default_factory=dict)  # name -> number of the setting that counts
    left: set[NodeName] = field(default_factory=set)  # peers that have left, as far as it was told
    replies: dict[int, Future[Any]] = field(default_factory=dict)


@dataclass(slots=True)
class _Packet:
    """A message under way. The lives that it is between count, not their names; somebody outside has none."""

    source: NodeName
    sender: _Node | None
    target: _Node
    link: Link
    header: bytes
    payload: Payload
    number: int


class VirtualNetwork(VirtualLinks[_Node]):
    """The network, its nodes and its clock. See the module's text."""

    def __init__(
        self, *, seed: int, model: NetworkModel | None = None, faults: Iterable[Fault] = (), reliable: bool = False
    ) -> None:
        super().__init__(seed, model, faults)
        self.generation = 0
        self._reliable = reliable
        if reliable and any(link.duplicate or link.reorder for link in self.model.all_links()):
            raise ConfigurationError(
                f"VirtualNetwork(reliable=True) with {self.model}: on a reliable network every message comes once and in order.\n"
                f"Leave out duplicate= and reorder=, or run the machines with reliable=False."
            )
        self._seed = seed
        self._newest: dict[tuple[NodeName, NodeName], int] = {}  # number of the last message that arrived

    # What a test does

    def add(self, name: NodeName, machine: Machine) -> None:
        """A node joins now, perhaps under the name of one that was killed: a restart. Its `on_start` is an event."""
        former = self._nodes.get(name)
        if former is not None and former.alive:
            raise ConfigurationError(
                f"VirtualNetwork.add({name!r}): a node of that name is alive, and a name means one node.\n"
                f"Kill it first (Kill({name!r}, at_s=...)), or use another name."
            )
        others = self._living()
        if former is not None:
            for other in others:
                self._leave(other, former)
        node = self._nodes[name] = _Node(name, machine, HeaderReader(machine))
        self.at(self.now, lambda: self._start(node))
        if self.num_events:
            self.generation += 1
            for other in others:
                other.left.discard(name)
                self._tell_view(other, [name], [])

    def request(self, name: NodeName, request: Any) -> Future[Any]:
        """Hand a request to a node's machine, as its program would. A node that is killed answers nobody."""
        reply: Future[Any] = Future()
        node = self._nodes[name]
        self._sequence += 1
        ticket = self._sequence
        node.replies[ticket] = reply
        self.at(self.now, lambda: self._run_on(node, "request", lambda: node.machine.on_request(self.now, ticket, request)))
        return reply

    def send(self, source: NodeName, to: NodeName, header: Any, payload: Payload = b"") -> float | None:
        """Send as if `source` had: also from outside, where `source` need not be a node. Says when it will have left it; None: it
        does not."""
        body = msgspec.msgpack.encode(header)
        self.trace.record(self.now, f"send {source!r} {to!r} {body.hex()}")
        target = self._nodes.get(to)
        sender = self._nodes.get(source)
        if target is None or (sender is not None and to in sender.left):
            return None
        link = self.model.link(source, to)
        self._sequence += 1
        packet = _Packet(source, sender, target, link, body, payload, self._sequence)
        if source == to:
            self.at(self.now, lambda: self._arrive(packet))
            return self.now
        start, end = self._interfaces.leave(self.now, source, link.seconds_for(len(body) + memoryview(payload).nbytes))
        if self._reliable:
            self._carry(packet, start, end)
        elif not self._is_cut(source, to) and not self._happens("loss", link.loss):
            self._carry(packet, start, end)
            if self._happens("duplicate", link.duplicate):
                self._carry(packet, start, end)
        return end

    def run(self, until_s: float, max_events: int = 1_000_000) -> None:
        """Go on until virtual time `until_s` or until nothing is left to happen. Raises `OutOfBudget` after `max_events`."""
        self.run_until(lambda: False, until_s, max_events)

    def run_until(self, condition: Callable[[], bool], until_s: float, max_events: int = 1_000_000) -> bool:
        """Go on until `condition()` holds after some event (True), or virtual time `until_s` or the end of all events (False)."""
        last = self.num_events + max_events
        while not condition():
            if not self._events or self._events[0][0] > until_s:
                if until_s < math.inf:
                    self.now = max(self.now, until_s)
                return False
            if self.num_events >= last:
                raise OutOfBudget(
                    f"{max_events} events by virtual time {self.now:g} s and still not at {until_s:g} s: nodes that answer each "
                    f"other for ever, or a timer of zero seconds. The last were:\n{self._recent()}\n"
                    f"If the run is only long, allow more: max_events=..."
                )
            self._take_event()
        return True

    def is_alive(self, name: NodeName) -> bool:
        return name in self._nodes and self._nodes[name].alive

    # Messages

    def _carry(self, packet: _Packet, start: float, end: float) -> None:
        link, pair = packet.link, (packet.source, packet.target.name)
        if self._reliable:
            first_byte = self._first_byte_at(pair, link, start)
        else:
            first_byte = start + link.latency_s + link.jitter.draw(self._random)
            if link.reorder and self._random.random() < link.reorder:
                first_byte += link.hold_s
        if end == start:
            self.at(first_byte, lambda: self._arrive(packet))
        else:
            self.at(first_byte, lambda: self._receive(packet, end - start))

    def _receive(self, packet: _Packet, seconds: float) -> None:
        """The first byte is here; the last one will be when the receiver's interface has taken all before it."""
        self.at(self._interfaces.reach(self.now, packet.target.name, seconds), lambda: self._arrive(packet))

    def _arrive(self, packet: _Packet) -> None:
        if self._is_of_former_life(packet):
            return
        if not self._is_cut(packet.source, packet.target.name):
            self._hand_over(packet)
        elif self._reliable:
            self._held.append(partial(self._arrive, packet))

    def _is_of_former_life(self, packet: _Packet) -> bool:
        """Its sender or its target has been replaced by a node of the same name since it was sent."""
        return self._nodes[packet.target.name] is not packet.target or self._nodes.get(packet.source) is not packet.sender

    def _hand_over(self, packet: _Packet) -> None:
        source, target = packet.source, packet.target
        pair = (source, target.name)
        if packet.number < self._newest.get(pair, 0):
            self.ledger.fired["reorder"] += 1
        else:
            self._newest[pair] = packet.number
        self._run_on(target, f"message from {source!r}", lambda: self._take(packet))

    def _take(self, packet: _Packet) -> Actions:
        node = packet.target
        if packet.source in node.left:
            return ()
        header = node.reader.read(packet.source, packet.header)
        if header is None:
            return ()
        payload = bytearray(packet.payload)
        actions = tuple(node.machine.on_message(self.now, packet.source, header, memoryview(payload)))
        payload[:] = b"\xa5" * len(payload)
        return actions

    # Events

    def _run_on(self, node: _Node, what: str, event: Callable[[], Actions]) -> None:
        """Let a node take one event, or keep the event for it while it is paused."""
        if not node.alive:
            return
        if node.paused is not None:
            self.ledger.fired[str(node.paused)] += 1
            node.waiting.append((what, event))
            return
        self.trace.record(self.now, f"{node.name!r} {what}")
        try:
            for action in event():
                self._perform(node, action)
        except Exception as error:
            error.add_note(f"{what} at node {node.name!r}, virtual time {self.now:g} s, seed {self._seed}")
            raise

    def _perform(self, node: _Node, action: SendMessage | SetTimer | Reply) -> None:
        if isinstance(action, SendMessage):
            assert not isinstance(action.to, bytes)
            sent_at = self.send(node.name, action.to, action.header, action.payload)
            if sent_at is not None and (token := action.token) is not None:
                self.at(sent_at, lambda: self._run_on(node, "sent", lambda: node.machine.on_sent(self.now, token)))
        elif isinstance(action, SetTimer):
            self._set_timer(node, action.name, action.after_s)
        elif action.error is None:
            node.replies.pop(action.ticket).set_result(action.value)
        else:
            node.replies.pop(action.ticket).set_exception(action.error)

    def _set_timer(self, node: _Node, name: str, after_s: float | None) -> None:
        if after_s is None:
            node.timers.pop(name, None)
            return
        if not -math.inf < after_s < math.inf:
            raise ValueError(f"timer {name!r} in {after_s} s: give a finite number of seconds, or None to take a timer back")
        self._sequence += 1
        number = node.timers[name] = self._sequence

        def ring() -> Actions:
            if node.timers.get(name) != number:  # replaced, or taken back, since
                return ()
            del node.timers[name]
            return node.machine.on_timer(self.now, name)

        self.at(self.now + after_s, lambda: self._run_on(node, f"timer {name}", ring))

    # Views

    def _start(self, node: _Node) -> None:
        self._run_on(node, "start", lambda: node.machine.on_start(self.now))
        node.left = {other.name for other in self._nodes.values() if not other.alive}
        if node.left:
            self._tell_view(node, [], sorted(node.left, key=str))

    def _tell_view(self, node: _Node, joined: list[NodeName], left: list[NodeName]) -> None:
        generation = self.generation
        what = f"view +{joined} -{left}"
        self._run_on(node, what, lambda: node.machine.on_view(self.now, joined, left, generation))

    def _leave(self, node: _Node, other: _Node) -> bool:
        """For `node`, the other one has left, unless it has already, or has come back since."""
        news = node.alive and self._nodes[other.name] is other and other.name not in node.left
        if news:
            node.left.add(other.name)
            self._tell_view(node, [], [other.name])
        return news

    def _part(self, a: _Node, b: _Node) -> bool:
        return self._leave(a, b) | self._leave(b, a)

    def _end(self, node: _Node, reason: str) -> None:
        node.alive = False
        for other in self._living():
            found_s = self.model.detect_s * (1 + self._random.random())
            self.at(self.now + found_s, partial(self._leave, other, node))

    def _go_on(self, node: _Node) -> None:
        waiting, node.waiting = node.waiting, []
        for what, event in waiting:
            self._run_on(node, what, event)

    def _recent(self) -> str:
        return "\n".join(f"  {time:.6f} {what}" for time, what in list(self.trace.entries)[-5:])
