"""Which send a receive means: by source and tag, in the order of the sends; or by tag alone, from anybody.

A transfer between two members is a collective of these two, and needs a number that both know. The sender counts, and announces
each send to its receiver: the channel of the pair, the number, the tag. A receive is matched with the earliest announcement from
its source with its tag, or, if none is here, waits for one; any source takes the one that came first. So sends with different
tags may be received in any order, and the data itself travels as any other collective's does: small ones at once, larger ones
when the receiver has begun.

Needs order (announcements of one pair are matched in the order in which they come), and that `left` means dead: a receive from a
member that has left ends with why, and so does one from anybody when a member has died. One that left in order had nothing more
to send; a receive from anybody goes on waiting for the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from stretto.errors import PeerLost, StrettoError, WireTimeout
from stretto.protocol.machine import Actions, Machine, Reply, SendMessage, SetTimer

MOST_WAITING: Final = 1 << 16  # announcements of one peer that nobody has asked for yet


class SendAnnouncement(msgspec.Struct, frozen=True, array_like=True):
    """A send has begun."""

    channel: int  # of the pair, which also names the group
    number: int
    tag: int


class Announce(msgspec.Struct, frozen=True):
    """Requested by a sender."""

    to: int
    announcement: SendAnnouncement


class Receive(msgspec.Struct, frozen=True):
    """Requested by a receiver: the next send with this tag from one of these ranks, each with the channel of the pair."""

    channels: dict[int, int]
    tag: int
    patience_s: float


class WaitingReceive(msgspec.Struct):
    ticket: int
    receive: Receive
    left: set[int]  # sources that have left in order meanwhile


class PairMatching(Machine):
    """See the module's text. `why_lost`: why a rank has left; None: in order."""

    header_type = SendAnnouncement

    def __init__(self, why_lost: Callable[[int], PeerLost], in_order: Callable[[int], bool]) -> None:
        self._why_lost = why_lost
        self._in_order = in_order
        self._announced: dict[tuple[int, int], deque[tuple[int, int]]] = {}  # (source, channel) -> (tag, number), in order
        self._arrivals: dict[tuple[int, int, int], int] = {}  # (source, channel, number) -> when, as a count
        self._count = 0
        self._num_waiting: dict[int, int] = {}
        self._receives: list[WaitingReceive] = []
        self._gone: set[int] = set()
        self._overrun: dict[tuple[int, int], StrettoError] = {}  # (source, channel) with too many sends, and what to raise

    def on_message(self, now: float, source: int, header: SendAnnouncement, payload: memoryview) -> Actions:
        for waiting in self._receives:
            if waiting.receive.channels.get(source) == header.channel and waiting.receive.tag == header.tag:
                self._receives.remove(waiting)
                return [SetTimer(str(waiting.ticket), None), Reply(waiting.ticket, (source, header.number))]
        waits = self._num_waiting.get(source, 0)
        if (source, header.channel) in self._overrun:
            return ()
        if waits >= MOST_WAITING:
            return self._give_up(source)
        self._num_waiting[source] = waits + 1
        self._announced.setdefault((source, header.channel), deque()).append((header.tag, header.number))
        self._count += 1
        self._arrivals[source, header.channel, header.number] = self._count
        return ()

    def on_request(self, now: float, ticket: int, request: Announce | Receive) -> Actions:
        if isinstance(request, Announce):
            return [SendMessage(request.to, request.announcement), Reply(ticket)]
        found = self._find(request)
        if found is not None:
            return [Reply(ticket, found)]
        for pair in request.channels.items():
            if pair in self._overrun:
                return [Reply(ticket, error=self._overrun[pair])]
        waiting = WaitingReceive(ticket, request, set())
        for rank in self._gone:
            error = self._hopeless(waiting, rank)
            if error is not None:
                return [Reply(ticket, error=error)]
        self._receives.append(waiting)
        return [SetTimer(str(ticket), request.patience_s)]

    def on_timer(self, now: float, name: str) -> Actions:
        for waiting in self._receives:
            if str(waiting.ticket) == name:
                self._receives.remove(waiting)
                receive = waiting.receive
                what = f"a receive with tag {receive.tag} from rank {', '.join(map(str, receive.channels))}"
                return [Reply(waiting.ticket, error=WireTimeout(next(iter(receive.channels)), what, receive.patience_s))]
        return ()

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        self._gone |= set(left)
        actions: list[SendMessage | SetTimer | Reply] = []
        for rank in left:
            for waiting in list(self._receives):
                error = self._hopeless(waiting, rank)
                if error is not None:
                    self._receives.remove(waiting)
                    actions += [SetTimer(str(waiting.ticket), None), Reply(waiting.ticket, error=error)]
        return actions

    def _give_up(self, source: int) -> Actions:
        """Too many sends of this rank wait: those of the channel that has most are forgotten, and so is the newest."""
        if len(self._overrun) >= MOST_WAITING:
            raise StrettoError(f"rank {source} begins sends that nobody receives here, in more channels than there are groups.")
        full = max((pair for pair in self._announced if pair[0] == source), key=lambda pair: len(self._announced[pair]))
        forgotten = self._announced.pop(full)
        for _, number in forgotten:
            del self._arrivals[(*full, number)]
        self._num_waiting[source] -= len(forgotten)
        error = self._overrun[full] = StrettoError(
            f"rank {source} had begun {len(forgotten)} sends in one group that nobody received here, so nothing more is received "
            f"from it in this group.\nReceive what is sent, or send less ahead."
        )
        actions: list[SendMessage | SetTimer | Reply] = []
        for waiting in list(self._receives):
            if waiting.receive.channels.get(source) == full[1]:
                self._receives.remove(waiting)
                actions += [SetTimer(str(waiting.ticket), None), Reply(waiting.ticket, error=error)]
        return actions

    def _find(self, receive: Receive) -> tuple[int, int] | None:
        """The earliest announcement that fits."""
        best: tuple[int, int, int] | None = None
        for source, channel in receive.channels.items():
            for tag, number in self._announced.get((source, channel), ()):
                if tag == receive.tag:
                    when = self._arrivals[source, channel, number]
                    if best is None or when < best[0]:
                        best = when, source, number
                    break
        if best is None:
            return None
        _, source, number = best
        channel = receive.channels[source]
        announced = self._announced[source, channel]
        announced.remove((receive.tag, number))
        if not announced:
            del self._announced[source, channel]
        del self._arrivals[source, channel, number]
        self._num_waiting[source] -= 1
        return source, number

    def _hopeless(self, waiting: WaitingReceive, rank: int) -> PeerLost | None:
        """Why nothing can be received any more, if that is so, now that this rank is gone."""
        if rank not in waiting.receive.channels:
            return None
        if self._in_order(rank):
            waiting.left.add(rank)
            if waiting.left != waiting.receive.channels.keys():
                return None
        return self._why_lost(rank)
