"""The most urgent first: what a worker pushes to each server, and what a server answers to each worker's pulls, waits in a queue
by priority, and few bytes are under way.

What has been handed to a wire cannot be overtaken any more. So bulk waits here, and leaves while what is *under way* to its
receiver has room for it in its credit. Of what waits the smallest priority goes first, and among equals what has waited longest.
What is larger than its credit leaves when nothing else is under way.

    a push      is under way until the server says that it has come (`PushReceived`). All workers push the same ranges first, so
                it is before the servers that queues arise, and a worker cannot see them otherwise
    a pull      is asked for as soon as its push has left, and says how urgent it is: so the server knows all that is wanted
    an answer   waits at the server, and is under way until it has left it (`Machine.on_sent`)

Nothing starves: what has seen `patience` others leave since it came is next, whatever its priority. That is more than a model has
ranges, so within a step priorities alone decide.

Cost:      a push and a pop of a heap for each message; one short message for each push.
Invariant: per receiver, what is under way is at most the credit of what left last, or that alone. Pushes of one range leave in
           the order in which they were made.
Reference: Peng et al., "A generic communication scheduler for distributed DNN training acceleration" (ByteScheduler), SOSP 2019,
           for the credit; Hashemi, Jyothi and Campbell, "TicTac", MLSys 2019, for the order of pulls.
Departs:   TicTac orders at the worker alone, which asks in order. Here servers order answers too: an urgent range that is the
           last to be complete overtakes others that were asked for, and could be answered, before.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from typing import NamedTuple

from stretto.collectives.urgency import Urgency

Key = tuple[int, int]  # a range, and the clock of a push, or -1 of a pull; of an answer: whose


class QueuedMessage(NamedTuple):
    """Ordered by urgency, then by age; no two have the same `number`."""

    priority: int
    number: int
    key: Key
    to: int
    num_bytes: int
    credit_bytes: int
    due: int  # when so many have left for that receiver it is the next one


class Lane:
    """What one node sends of one kind, to all receivers."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._waiting: dict[int, dict[Key, QueuedMessage]] = {}  # by range
        self._by_urgency: defaultdict[int, list[QueuedMessage]] = defaultdict(list)  # by receiver; also some that wait no longer
        self._by_age: defaultdict[int, deque[QueuedMessage]] = defaultdict(deque)
        self._num_left: Counter[int] = Counter()  # by receiver
        self._under_way: dict[int, tuple[int, int]] = {}  # by number: the receiver, and how many bytes
        self._in_window: Counter[int] = Counter()  # by receiver
        self._count = 0

    def wait(self, key: Key, to: int, num_bytes: int, urgency: Urgency) -> None:
        """This is to be sent to that receiver, and nothing else of that key any more."""
        self.cancel(key)
        self._count += 1
        of_range = self._waiting.setdefault(key[0], {})
        priority = max((urgency.priority, *(each.priority for each in of_range.values() if each.to == to)))
        due = self._num_left[to] + self._patience
        waiting = QueuedMessage(priority, self._count, key, to, num_bytes, urgency.credit_bytes, due)
        of_range[key] = waiting
        heapq.heappush(self._by_urgency[to], waiting)
        self._by_age[to].append(waiting)

    def waits(self, index: int) -> bool:
        """Whether something of that range has not left."""
        return index in self._waiting

    def cancel(self, key: Key) -> None:
        """If it has not left it does not."""
        of_range = self._waiting.get(key[0], {})
        of_range.pop(key, None)
        if not of_range:
            self._waiting.pop(key[0], None)

    def sent(self, number: int) -> None:
        """That is under way no longer."""
        if number in self._under_way:
            to, num_bytes = self._under_way.pop(number)
            self._in_window[to] -= num_bytes

    def lose(self, receiver: int) -> None:
        """Nothing goes there any more."""
        for waiting in self._by_age.pop(receiver, ()):
            if self._is_current(waiting):
                self.cancel(waiting.key)
        self._by_urgency.pop(receiver, None)
        for number in [number for number, (to, _) in self._under_way.items() if to == receiver]:
            self.sent(number)

    def leave(self, *, all_of_them: bool = False) -> list[QueuedMessage]:
        """Those that leave now, in their order. `all_of_them`: whatever is under way."""
        left = []
        for to in list(self._by_urgency):
            while (waiting := self._next(to)) is not None and (all_of_them or self._has_room(waiting)):
                self.cancel(waiting.key)
                self._num_left[to] += 1
                self._under_way[waiting.number] = (to, waiting.num_bytes)
                self._in_window[to] += waiting.num_bytes
                left.append(waiting)
        return left

    def _has_room(self, waiting: QueuedMessage) -> bool:
        under_way = self._in_window[waiting.to]
        return under_way == 0 or under_way + waiting.num_bytes <= waiting.credit_bytes

    def _next(self, to: int) -> QueuedMessage | None:
        """Whose turn it is; None, and no queue for that receiver, if nothing waits for it."""
        by_urgency, by_age = self._by_urgency[to], self._by_age[to]
        while by_urgency and not self._is_current(by_urgency[0]):
            heapq.heappop(by_urgency)
        while by_age and not self._is_current(by_age[0]):
            by_age.popleft()
        if not by_age:
            del self._by_urgency[to], self._by_age[to]
            return None
        oldest = by_age[0]
        return oldest if self._num_left[to] >= oldest.due else by_urgency[0]

    def _is_current(self, waiting: QueuedMessage) -> bool:
        return self._waiting.get(waiting.key[0], {}).get(waiting.key) is waiting
