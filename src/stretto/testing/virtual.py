"""The wire on a virtual clock: the same programs, on a network of numbers, at sizes no test machine has.

    wires = virtual_world(64, NetworkModel(Link(latency_s=5e-5, bytes_per_s=1.25e8)), seed=1)

Ranks are threads, one for each wire, but exactly one runs at a time: it has the *baton* until it waits in `progress` or
`compute`, ends (`close`, `finish`), or is killed. The next is drawn, by the seed, among those that can go on. When
nobody can, the clock jumps to the next event: a message that arrives, a fault, the timeout of some `progress`. So a run
depends on the seed and the program only (`world.trace.hexdigest()` proves it), takes no longer than its Python code,
and time costs nothing.

Messages take what `network_model.py` says. A send is done when its last byte has left the sender's interface; the
memory is read then, not earlier. Connections are reliable and in order: a lost transmission comes again after
`retransmit_s`, a cut holds messages back until it heals. A killed rank is found lost after `detect_s`; a paused one,
and one behind a cut, after `silence_s`, on both sides and for good.

One thread drives each rank: a second one (other than to `wake`) would run outside virtual time. Computation takes no
time unless `wire.compute(seconds)` says so; a `progress` that finds nothing takes at least `POLL_S`, so that polling
cannot stop the clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from stretto.errors import ConfigurationError
from stretto.testing.envelopes import Arrival, Envelope, Gone, Goodbye, Item, Knock, Posted, Sent
from stretto.testing.faults import Cut, Fault, Pause
from stretto.testing.in_process import InProcessWire
from stretto.testing.network_model import NetworkModel
from stretto.testing.virtual_schedule import Activity, Seat, VirtualDeadlock, VirtualSchedule
from stretto.wire.handshake import Life

__all__ = [
    "VirtualDeadlock",
    "VirtualWire",
    "VirtualWorld",
    "virtual_world",
]

POLL_S = 1e-6


class _Transmission:
    """Something on its way from a wire to one life of a rank: `item` goes into its inbox, unless `truncated` by then."""

    __slots__ = ("item", "num_bytes", "sender", "source", "target", "target_life", "truncated")

    def __init__(self, sender: VirtualWire, target: int, num_bytes: int, item: Item) -> None:
        self.sender, self.source, self.num_bytes, self.item = sender, sender.rank, num_bytes, item
        self.target, self.target_life = target, sender.life_of(target)
        self.truncated = False  # its sender died before the last byte had left


class VirtualWire(InProcessWire):
    """One rank of a `virtual_world`."""

    def __init__(self, rank: int, world: VirtualWorld, check: bool, generation: int = 0, members: Iterable[Life] = ()) -> None:
        super().__init__(rank, world.size, check, generation, members)
        self.world = world
        self.seat = Seat(self, world.lock)
        self._woken = False

    def newcomer(self, rank: int, generation: int) -> VirtualWire:
        """The wire of a rank that joins this rank's view, or comes back to it under a later generation; for a thread of its own.

        The caller is a rank whose turn it is. (A killed rank may make its own successor, and drive it after calling `finish`.)
        """
        return self.world._add(VirtualWire(rank, self.world, self._check, generation, self.members()))

    def progress(self, timeout_s: float) -> None:
        self._enter()
        if not self._woken and not self._has_news():
            self.world._wait(self.seat, max(timeout_s, POLL_S), Activity.WAITING)
        self._woken = False
        self._enter()
        self._drain()

    def compute(self, seconds: float) -> None:
        """Be busy for that long: virtual time passes, messages arrive but are not looked at."""
        self._enter()
        if seconds > 0:
            self.world._wait(self.seat, seconds, Activity.COMPUTING)
        self._enter()

    def wake(self) -> None:
        self.world._nudge(self.seat)

    def now(self) -> float:
        return self.world.now

    def kill(self, reason: str = "its process died") -> None:
        self.world._kill(self.seat, reason)

    def close(self) -> None:
        """Goodbye; and this rank no longer holds the clock."""
        if not self._closed and self._killed is None and not self.world.failed:
            self.world._take_baton(self.seat)
            self._closed = True
            self._release()
            self.world._say_goodbye(self)
        self.finish()

    def abandon(self) -> None:
        super().abandon()
        self.finish()

    def finish(self) -> None:
        """This rank's thread has nothing more to do: the others go on without waiting for it. Idempotent."""
        self.world._finish(self.seat)
        self._closed = True

    @property
    def is_killed(self) -> bool:
        return self._killed is not None

    def _enter(self) -> None:
        self.world._take_baton(self.seat)
        super()._enter()

    def _transmit(self, envelope: Envelope) -> None:
        self.world._send(_Transmission(self, envelope.target, envelope.num_bytes, Arrival(envelope)))

    def _transmit_post(self, to: int, posted: Posted) -> None:
        self.world._send(_Transmission(self, to, len(posted.body), posted))

    def _part_from(self, rank: int, generation: int) -> None:
        self._left.add(rank)
        self.world._send(_Transmission(self, rank, 0, Goodbye(self.life, generation)))

    def life_of(self, rank: int) -> Life:
        return Life(rank, self._lives[rank])

    def _acknowledge(self, envelope: Envelope) -> None:
        """Nothing to tell: here a send is done when it has left, not when it is received."""

    def _may_keep_parked(self, envelope: Envelope) -> bool:
        return False


class VirtualWorld(VirtualSchedule):
    """The network between all ranks, and its faults, on the schedule that they share."""

    def __init__(
        self,
        size: int,
        model: NetworkModel | None,
        seed: int,
        faults: Iterable[Fault],
        *,
        check: bool,
        deadline_s: float,
        stall_s: float,
    ) -> None:
        faults = list(faults)
        super().__init__(seed, model, faults, deadline_s, stall_s)
        _check_world(size, self.model, faults)
        self.size = size
        self._severed: set[tuple[int, int]] = set()
        self.wires = [VirtualWire(rank, self, check) for rank in range(size)]
        self._seat(self.wires)

    def _add(self, newcomer: VirtualWire) -> VirtualWire:
        with self.lock:
            rank = newcomer.rank
            self._nodes[rank] = newcomer.seat
            self._ready.append(newcomer.seat)
            self._severed = {pair for pair in self._severed if rank not in pair}
            self.trace.record(self.now, f"newcomer {newcomer.life}")
        for other in newcomer.peers:
            self._send(_Transmission(newcomer, other, 0, Knock(newcomer.life)))
        return newcomer

    # The network -----------------------------------------------------------------------------------------------------

    def _send(self, message: _Transmission) -> None:
        with self.lock:
            source, target = message.source, message.target
            link = self.model.link(source, target)
            start, end = self._interfaces.leave(self.now, source, link.seconds_for(message.num_bytes))
            head = self._first_byte_at((source, target), link, start)
            self.trace.record(self.now, f"send {source} {target} {message.num_bytes} {_name(message.item)}")
            self.at(end, partial(self._leave, message))
            self.at(head, partial(self._first_byte, message, end - start))

    def _leave(self, message: _Transmission) -> None:
        """The last byte has left the sender: now its memory is read, and the send is done."""
        if message.sender.is_killed:
            message.truncated = True
        elif isinstance(message.item, Arrival):
            message.item.envelope.read()
            self._push(message.sender.seat, Sent(message.item.envelope))

    def _first_byte(self, message: _Transmission, seconds: float) -> None:
        if self._is_severed(message):
            return
        if self._is_cut(message.source, message.target):
            self._held.append(partial(self._first_byte, message, seconds))
            return
        done = self._interfaces.reach(self.now, message.target, seconds)
        self.at(done, partial(self._last_byte, message))

    def _last_byte(self, message: _Transmission) -> None:
        self.trace.record(self.now, f"arrive {message.source} {message.target} {_name(message.item)}")
        target = self._nodes[message.target]
        if not message.truncated and not self._is_severed(message) and target.wire.life == message.target_life:
            self._push(target, message.item)

    def _is_severed(self, message: _Transmission) -> bool:
        return (message.source, message.target) in self._severed

    def _push(self, target: Seat, item: Item) -> None:
        if target.alive:
            target.wire._inbox.append(item)
            if target.activity is Activity.WAITING:
                self._let_go_on(target)

    def _say_goodbye(self, wire: VirtualWire) -> None:
        for other in wire.peers:
            self._send(_Transmission(wire, other, 0, Goodbye(wire.life)))

    # Faults ----------------------------------------------------------------------------------------------------------

    def _kill(self, rank: Seat, reason: str) -> None:
        with self.lock:
            if rank.alive:
                self._end(rank, reason)

    def _end(self, node: Seat, reason: str) -> None:
        node.wire._killed = reason
        self._let_go_on(node)  # to unwind: its next call raises WireKilled
        self.at(self.now + self.model.detect_s, partial(self._lose_everywhere, node, reason))

    def _lose_everywhere(self, rank: Seat, reason: str) -> None:
        self.trace.record(self.now, f"lost {rank.name}")
        for other in self._nodes.values():
            if other is not rank:
                self._push(other, Gone(rank.wire.life, reason))

    def _pause(self, node: Seat, pause: Pause) -> None:
        if node.activity is Activity.COMPUTING:  # what was left of the computation is left afterwards
            node.until += pause.for_s
            self.ledger.fired[str(pause)] += 1
        super()._pause(node, pause)

    def _go_on(self, node: Seat) -> None:
        if node.due:
            node.due = False
            self._let_go_on(node)

    def _part(self, a: Seat, b: Seat) -> bool:
        """Nothing passes between them any more."""
        if (a.name, b.name) in self._severed or not (a.alive and b.alive):
            return False
        self._severed |= {(a.name, b.name), (b.name, a.name)}
        self.trace.record(self.now, f"sever {a.name} {b.name}")
        reason = f"no heartbeat for {self.model.silence_s:g} s (stopped, or its link is cut)"
        self._push(a, Gone(b.wire.life, reason))
        self._push(b, Gone(a.wire.life, reason))
        return True


def _check_world(size: int, model: NetworkModel, faults: list[Fault]) -> None:
    if size < 1:
        raise ConfigurationError(f"virtual_world({size}): a world has at least one rank. Write virtual_world(1) or more.")
    if any(link.duplicate or link.reorder for link in model.all_links()):
        raise ConfigurationError(
            "virtual_world with Link(duplicate=...) or Link(reorder=...): a wire is reliable and in order, so neither can "
            "happen on it.\nUse loss and jitter here, or run a datagram protocol on VirtualNetwork."
        )
    for fault in faults:
        nodes = fault.side + (fault.others or ()) if isinstance(fault, Cut) else (fault.node,)
        if any(not isinstance(node, int) or not 0 <= node < size for node in nodes):
            raise ConfigurationError(f"{fault} in a world of {size}: its nodes must be ranks, 0 to {size - 1}.")


def _name(item: Item) -> str:
    match item:
        case Arrival(envelope):
            return repr(tuple(envelope.tag))
        case Posted(_, topic, body):
            return f"post {topic} {body.hex()}"
        case _:
            return type(item).__name__


def virtual_world(
    size: int,
    model: NetworkModel | None = None,
    seed: int = 0,
    faults: Iterable[Fault] = (),
    *,
    check: bool = False,
    deadline_s: float = 1e6,
    stall_s: float = 60.0,
) -> list[VirtualWire]:
    """The wires of a world of `size` ranks on a virtual clock. Their `world` has the clock, the trace and the faults
    that fired.

    Each rank's thread must end with `wire.close()` or `wire.finish()` (as `stretto.testing.run_virtual` sees to).
    """
    return VirtualWorld(size, model, seed, faults, check=check, deadline_s=deadline_s, stall_s=stall_s).wires
