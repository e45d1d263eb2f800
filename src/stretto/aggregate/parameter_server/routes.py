"""Where a worker's requests for one range go: to the first server of its chain that lives, and again to another one if that
changes.

A request is sent once to a server. It is sent again when that server has died or says that it does not serve the range
(`NotHead`), to the next one of the chain, or to the first of a later chain (`RangesPlaced`), in the order in which requests
were made.

If no server of the chain is left, this worker's account may be old. It asks everybody else who has the range, and waits for the
answer of all: an answer comes from a server that knows of these deaths too, so nothing of the dead can reach it any more. If
nobody has a copy, the range is lost. A server that dies meanwhile may have had one, and have passed it on: all are asked again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from stretto.aggregate.parameter_server.lives import Lives
from stretto.aggregate.parameter_server.messages import PushGradient, RangeChain, ServedRequest
from stretto.collectives.urgency import Urgency
from stretto.errors import PeerLost
from stretto.protocol.machine import Payload

RequestKey = tuple[str, int]  # kind of request, and the clock of a push


class RangeRequest(NamedTuple):
    """A request that has not been answered. `into`: where pulled values go; `urgency`: of a push."""

    ticket: int
    header: ServedRequest
    payload: Payload = b""
    into: memoryview | None = None
    urgency: Urgency | None = None

    @property
    def key(self) -> RequestKey:
        return type(self.header).__name__, self.header.clock if isinstance(self.header, PushGradient) else -1


@dataclass(eq=False)
class Route:
    """One range, as a worker knows it. See the module's text."""

    index: int
    epoch: int
    members: list[int]  # that live
    last_dead: int = -1  # of the members
    sent_to: int | None = None  # who has all requests
    attempt: int = 0  # how often they were sent to somebody
    turned_away_by: int | None = None  # it may come to serve the range, and then says so
    requests: dict[RequestKey, RangeRequest] = field(default_factory=dict)
    asked: set[int] | None = None  # who has not said yet whether it has the range; None: nobody is asked
    is_held: bool = False  # somebody has a copy, and will serve it
    lost: PeerLost | None = None

    def heard_of(self, chain: RangeChain, lives: Lives) -> None:
        """An active chain. If it is a later one, all begins anew; its first server may still be the one that has the requests."""
        if chain.epoch <= self.epoch:
            return
        self.epoch = chain.epoch
        self.members = [rank for rank in chain.members if lives.is_here(rank)]
        self.last_dead = next((rank for rank in chain.members if not lives.is_here(rank)), self.last_dead)
        self.turned_away_by = self.asked = None
        if self.members[:1] != [self.sent_to]:
            self.sent_to = None

    def serves_now(self, source: int, chain: RangeChain) -> None:
        """A server says of itself that it has an active chain. Others may have said so before it did, and what it had turned away
        earlier may have come in between."""
        if chain.epoch == self.epoch and source == self.turned_away_by and chain.members[:1] == [source]:
            self.turned_away_by = None

    def turned_away(self, by: int, holds: bool, attempt: int) -> None:
        """A server does not serve the range. One that has no copy of it will not do so either."""
        if self.attempt == attempt and by in (self.sent_to, self.turned_away_by):
            self.sent_to = None
            self.turned_away_by = by
            if not holds and by in self.members:
                self.members.remove(by)

    def left(self, rank: int) -> None:
        """A server has died. It may have been one that had the range, or was about to: all are asked again."""
        if rank in self.members:
            self.members.remove(rank)
            self.last_dead = rank
        if self.sent_to == rank:
            self.sent_to = None
        if self.turned_away_by == rank:
            self.turned_away_by = None
        self.asked = None
