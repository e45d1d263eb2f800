"""The most urgent message first: what a worker sends to one peer waits in a queue by priority, and few bytes are on their way.

A wire sends to a peer in the order in which it is handed messages, and what it was handed cannot be overtaken. So messages of
collectives that have an `Urgency` are kept back here, and only so many are handed over that the link does not run dry: a message
leaves while fewer than `credit_bytes` are on their way to its receiver. Of those that wait the smallest priority goes first,
and among equals the one that has waited longest. This is ByteScheduler's credit (Peng et al., SOSP 2019), one for each receiver:
a single message makes it stop-and-wait, an infinite one the order of arrival. As there, the last message may exceed it.

Each worker decides for itself. That works without a word between them because collectives carry their name, and well if all have
the same priorities. Collectives without an `Urgency` do not pass here; they share the wire with whatever is on its way.

Cost: a push and a pop of a heap for each message that has to wait.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from stretto.wire.base import Handle

if TYPE_CHECKING:
    from stretto.collectives.run import CollectiveRun

OnSent = Callable[[Handle], None]


class Urgency(NamedTuple):
    """How soon a collective's messages are needed: smaller priorities first, with so many bytes on their way to each receiver."""

    priority: int
    credit_bytes: int


class WaitingMessage(NamedTuple):
    """Ordered by urgency, then by age; no two have the same `number`."""

    priority: int
    number: int
    credit_bytes: int
    run: CollectiveRun
    num_bytes: int
    send: Callable[[OnSent], None]
    on_done: OnSent


class SendQueue:
    """One worker's messages that wait, by receiver."""

    def __init__(self) -> None:
        self._under_way: Counter[int] = Counter()  # bytes, by receiver
        self._waiting: defaultdict[int, list[WaitingMessage]] = defaultdict(list)
        self._count = 0
        self._releasing: set[int] = set()

    def submit(
        self, run: CollectiveRun, to: int, urgency: Urgency, num_bytes: int, send: Callable[[OnSent], None], on_done: OnSent
    ) -> None:
        """Send now, or when it is this message's turn. `send` hands it to the wire, with what to call when it has left."""
        self._count += 1
        message = WaitingMessage(urgency.priority, self._count, urgency.credit_bytes, run, num_bytes, send, on_done)
        heapq.heappush(self._waiting[to], message)
        self._release(to)

    def forget(self, run: CollectiveRun) -> None:
        """The collective has ended: what is left of it counts no longer, whether or not the wire ever says that it has gone."""
        for to, num_bytes in run.credit_taken.items():
            self._under_way[to] -= num_bytes
        receivers = list(run.credit_taken)
        run.credit_taken.clear()
        for to in receivers:
            self._release(to)

    def _release(self, to: int) -> None:
        if to in self._releasing:  # a message left at once, and the loop below goes on
            return
        self._releasing.add(to)
        try:
            waiting = self._waiting[to]
            while waiting and self._under_way[to] < waiting[0].credit_bytes:
                message = heapq.heappop(waiting)
                if not (message.run.failing or message.run.pending.done):  # else nobody waits for it any more
                    self._send(to, message)
        finally:
            self._releasing.discard(to)

    def _send(self, to: int, message: WaitingMessage) -> None:
        run, num_bytes = message.run, message.num_bytes
        self._under_way[to] += num_bytes
        run.credit_taken[to] += num_bytes

        def left(handle: Handle) -> None:
            if run.credit_taken[to]:  # else the collective has ended, and its credit was given back
                run.credit_taken[to] -= num_bytes
                self._under_way[to] -= num_bytes
            message.on_done(handle)
            self._release(to)

        message.send(left)
