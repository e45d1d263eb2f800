"""Two protocols that run unchanged in virtual time and on wires: a token that goes around, and a register kept by a majority."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from stretto.protocol.machine import Actions, Machine, Reply, SendMessage, SetTimer


class Token(msgspec.Struct, frozen=True, tag=True):
    number: int
    lost: list[int]


class Taken(msgspec.Struct, frozen=True, tag=True):
    number: int


class Freeze(msgspec.Struct, frozen=True, tag=True):
    lost: list[int]


class Frozen(msgspec.Struct, frozen=True, tag=True):
    lost: list[int]
    seen: int


class TokenRing(Machine):
    """At most one living node holds the token, which goes from each to the next that lives.

    A token is passed on until it is confirmed, and taken once: its number rises from node to node. When a node dies the token
    may have died with it. So everybody who hears of that gives up the token; the lowest living rank asks all others whether they
    have, and then makes a new one. Tokens and answers count only between nodes that know of the same deaths. Safe as long as
    `left` means dead.
    """

    header_type = Token | Taken | Freeze | Frozen

    def __init__(self, rank: int, size: int, *, hold_s: float = 0.1, retry_s: float = 0.5) -> None:
        self.rank, self.size = rank, size
        self.hold_s, self.retry_s = hold_s, retry_s
        self.lost: list[int] = []
        self.seen = 0
        self.holding: int | None = None
        self.passing: SendMessage | None = None
        self.frozen: dict[int, int] = {}
        self.turns = 0
        self.on_take: Callable[[int], None] = lambda number: None
        self.on_release: Callable[[], None] = lambda: None

    @property
    def living(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.lost]

    def on_start(self, now: float) -> Actions:
        return self._take(1) if self.rank == 0 else ()

    def on_message(self, now: float, source: int, header: Token | Taken | Freeze | Frozen, payload: memoryview) -> Actions:
        match header:
            case Token(number, lost) if lost == self.lost:
                taken = self._take(number) if number > self.seen else ()
                return [SendMessage(source, Taken(number)), *taken]
            case Taken(number) if self.passing is not None and self.passing.header.number == number:
                self.passing = None
                return [SetTimer("again", None)]
            case Freeze(lost) if lost == self.lost:
                return [SendMessage(source, Frozen(lost, self.seen))]
            case Frozen(lost, seen) if lost == self.lost and self.frozen:
                self.frozen[source] = seen
                return self._make_if_all_are_frozen()
        return ()

    def on_timer(self, now: float, name: str) -> Actions:
        match name:
            case "work":
                return self._pass_on()
            case "again" if self.passing is not None:
                return [self.passing, SetTimer("again", self.retry_s)]
            case "freeze" if self.frozen:
                return self._ask_all_to_freeze()
        return ()

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        self.lost = sorted({*self.lost, *left})
        self._release()
        self.passing = None
        self.frozen = {self.rank: self.seen} if self.rank == self.living[0] else {}
        if self.frozen:
            return [*self._ask_all_to_freeze(), *self._make_if_all_are_frozen()]
        return ()

    def on_request(self, now: float, ticket: int, request: object) -> Actions:
        return [Reply(ticket, (self.turns, self.lost))]

    def _take(self, number: int) -> list[SetTimer]:
        self.seen = self.holding = number
        self.turns += 1
        self.on_take(number)
        return [SetTimer("work", self.hold_s)]

    def _release(self) -> None:
        if self.holding is not None:
            self.holding = None
            self.on_release()

    def _pass_on(self) -> Actions:
        if self.holding is None:
            return ()
        number = self.holding + 1
        self._release()
        to = min(self.living, key=lambda rank: (rank - self.rank - 1) % self.size)
        if to == self.rank:
            return self._take(number)
        self.passing = SendMessage(to, Token(number, self.lost))
        return [self.passing, SetTimer("again", self.retry_s)]

    def _ask_all_to_freeze(self) -> Actions:
        missing = [rank for rank in self.living if rank not in self.frozen]
        return [*(SendMessage(rank, Freeze(self.lost)) for rank in missing), SetTimer("freeze", self.retry_s)]

    def _make_if_all_are_frozen(self) -> Actions:
        if set(self.frozen) != set(self.living):
            return ()
        number = max(self.frozen.values()) + 1
        self.frozen = {}
        return self._take(number)


class Stamp(NamedTuple):
    number: int = 0
    rank: int = 0


class Query(msgspec.Struct, frozen=True, tag=True):
    operation: int


class Found(msgspec.Struct, frozen=True, tag=True):
    operation: int
    stamp: Stamp


class Store(msgspec.Struct, frozen=True, tag=True):
    operation: int
    stamp: Stamp


class Stored(msgspec.Struct, frozen=True, tag=True):
    operation: int


@dataclass(frozen=True)
class Read:
    pass


@dataclass(frozen=True)
class Write:
    value: bytes


@dataclass
class Disk:
    """What survives a restart."""

    stamp: Stamp = field(default_factory=Stamp)
    value: bytes = b""


@dataclass
class Operation:
    ticket: int
    write: bytes | None
    asked: Query | Store
    stamp: Stamp
    value: bytes
    answered: set[int]


class Register(Machine):
    """A register that every node reads and writes, kept by a majority of them (Attiya, Bar-Noy and Dolev, JACM 42(1), 1995).

    An operation asks a majority for the latest stamp, then has a majority store the latest value (a read), or its own with a
    later stamp (a write). Any two majorities share a node, so an operation that begins after another has ended sees its stamp.
    Needs neither order nor reliability, nor that `left` means dead: what is not answered is asked again.
    """

    header_type = Query | Found | Store | Stored

    def __init__(self, rank: int, size: int, disk: Disk | None = None, *, retry_s: float = 0.5) -> None:
        self.rank, self.size = rank, size
        self.disk = disk or Disk()
        self.retry_s = retry_s
        self.operations: dict[int, Operation] = {}
        self.num_operations = 0

    def on_request(self, now: float, ticket: int, request: Read | Write) -> Actions:
        self.num_operations += 1
        write = request.value if isinstance(request, Write) else None
        asked = Query(self.num_operations)
        self.operations[self.num_operations] = Operation(ticket, write, asked, self.disk.stamp, self.disk.value, {self.rank})
        return [*self._ask(self.num_operations), *self._go_on(self.num_operations), SetTimer("again", self.retry_s)]

    def on_message(self, now: float, source: int, header: Query | Found | Store | Stored, payload: memoryview) -> Actions:
        match header:
            case Query(number):
                return [SendMessage(source, Found(number, self.disk.stamp), self.disk.value)]
            case Store(number, stamp):
                self._keep(stamp, bytes(payload))
                return [SendMessage(source, Stored(number))]
            case Found(number, stamp):
                return self._answered(source, Query(number), stamp, bytes(payload))
            case Stored(number):
                operation = self.operations.get(number)
                if operation is None:
                    return ()
                return self._answered(source, operation.asked, operation.stamp, operation.value)

    def on_timer(self, now: float, name: str) -> Actions:
        again = [action for number in self.operations for action in self._ask(number)]
        return [*again, SetTimer("again", self.retry_s)] if again else ()

    def _ask(self, number: int) -> Sequence[SendMessage]:
        operation = self.operations[number]
        payload = operation.value if isinstance(operation.asked, Store) else b""
        return [SendMessage(rank, operation.asked, payload) for rank in range(self.size) if rank not in operation.answered]

    def _answered(self, source: int, asked: Query | Store, stamp: Stamp, value: bytes) -> Actions:
        operation = self.operations.get(asked.operation)
        if operation is None or operation.asked != asked:  # answered before, or by a majority of others
            return ()
        operation.answered.add(source)
        if stamp > operation.stamp:
            operation.stamp, operation.value = stamp, value
        return self._go_on(asked.operation)

    def _go_on(self, number: int) -> Actions:
        operation = self.operations[number]
        if len(operation.answered) <= self.size // 2:
            return ()
        if isinstance(operation.asked, Store):
            del self.operations[number]
            return [Reply(operation.ticket, (operation.stamp, operation.value))]
        if operation.write is not None:
            latest = max(operation.stamp, self.disk.stamp)
            operation.stamp, operation.value = Stamp(latest.number + 1, self.rank), operation.write
        operation.asked, operation.answered = Store(number, operation.stamp), {self.rank}
        self._keep(operation.stamp, operation.value)
        return [*self._ask(number), *self._go_on(number)]

    def _keep(self, stamp: Stamp, value: bytes) -> None:
        if stamp > self.disk.stamp:
            self.disk.stamp, self.disk.value = stamp, value
