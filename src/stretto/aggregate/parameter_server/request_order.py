"""The most urgent first: what a worker pushes to each server, and what a server answers to each worker's pulls, waits in a queue
by priority, and few bytes are under way.

What has been handed to a wire cannot be overtaken any more. So bulk waits here, and leaves while what is *under way* to its
receiver has room for it in its credit. Of what waits the smallest priority goes first, and among equals what has waited longest.
What is larger than its credit leaves when nothing else is under way.

    a push      is under way until the server says that it has come (`PushReceived`). All workers push the same ranges first, so
                it is before the servers that queues arise, and a worker cannot see them otherwise
    a pull      is asked for as soon as its push has left, and says how urgent it is: so the server knows all that is wanted
    an answer   waits at the server, and is under way until it has left it (`Machine.on_sent`)

What has no urgency leaves in the order in which it came, and receivers take turns by bytes. What is under way to all of them
together is bounded by a window that follows the link (`send_window.py`).

Nothing starves: what has seen `patience` others leave since it came is next, whatever its priority. That is more than a model has
ranges, so within a step priorities alone decide.

Cost:      a push and a pop of a heap for each message; one short message for each push.
Invariant: per receiver, what is under way is at most the credit of what left last, or that alone. Pushes of one range leave in
           the order in which they were made. Without urgencies, two receivers for which something waits all the time are sent
           the same, to one message.
Reference: Peng et al., "A generic communication scheduler for distributed DNN training acceleration" (ByteScheduler), SOSP 2019,
           for the credit; Hashemi, Jyothi and Campbell, "TicTac", MLSys 2019, for the order of pulls; Goyal, Vin and Cheng,
           "Start-time fair queueing", SIGCOMM 1996, for the turns.
Departs:   TicTac orders at the worker alone, which asks in order. Here servers order answers too: an urgent range that is the
           last to be complete overtakes others that were asked for, and could be answered, before.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from typing import NamedTuple

from stretto.aggregate.parameter_server.send_window import SendWindow
from stretto.collectives.urgency import Urgency

Key = tuple[int, int]  # a range, and the clock of a push, or -1 of a pull; of an answer: whose


class QueuedMessage(NamedTuple):
    """Ordered by urgency, then by age; no two have the same `number`."""

    priority: int
    number: int
    key: Key
    to: int
    num_bytes: int
    credit_bytes: int | None  # None: it has no urgency
    due: int  # when so many have left for that receiver it is the next one


class Lane:
    """What one node sends of one kind, to all receivers. `window`: of what has no urgency."""

    def __init__(self, patience: int, window: SendWindow | None = None) -> None:
        self._patience = patience
        self._window = window
        self._waiting: dict[int, dict[Key, QueuedMessage]] = {}  # by range
        self._by_urgency: defaultdict[int, list[QueuedMessage]] = defaultdict(list)  # by receiver; also some that wait no longer
        self._by_age: defaultdict[int, deque[QueuedMessage]] = defaultdict(deque)
        self._num_left: Counter[int] = Counter()  # by receiver
        self._under_way: dict[int, tuple[int, int]] = {}  # by number: the receiver, and how many bytes
        self._in_window: Counter[int] = Counter()  # by receiver
        self._count = 0
        self._turns: Counter[int] = Counter()  # by receiver: bytes sent, or as much as to others when it began to wait
        self._turn = 0  # of what has left last

    def wait(self, key: Key, to: int, num_bytes: int, urgency: Urgency | None) -> None:
        """Queue this message for that receiver, in place of one with the same key that still waits."""
        self.cancel(key)
        self._count += 1
        of_range = self._waiting.setdefault(key[0], {})
        priority, credit_bytes = urgency or (0, None)
        priority = max((priority, *(each.priority for each in of_range.values() if each.to == to)))
        due = self._num_left[to] + self._patience
        waiting = QueuedMessage(priority, self._count, key, to, num_bytes, credit_bytes, due)
        of_range[key] = waiting
        if not self._by_age[to]:
            self._turns[to] = max(self._turns[to], self._turn)
        heapq.heappush(self._by_urgency[to], waiting)
        self._by_age[to].append(waiting)

    def waits(self, index: int) -> bool:
        """Whether something of that range has not left."""
        return index in self._waiting

    def cancel(self, key: Key) -> None:
        """If the message has not left yet, it is not sent."""
        of_range = self._waiting.get(key[0], {})
        of_range.pop(key, None)
        if not of_range:
            self._waiting.pop(key[0], None)

    def sent(self, number: int) -> None:
        """The message has come (an answer: has left this node), and is under way no longer."""
        if self._window is not None:
            self._window.came(number)
        self.drop(number)

    def drop(self, number: int) -> None:
        """The message is under way no longer, whatever has become of it."""
        if number in self._under_way:
            to, num_bytes = self._under_way.pop(number)
            self._in_window[to] -= num_bytes
            if self._window is not None:
                self._window.drop(number)

    def lose(self, receiver: int) -> None:
        """Nothing goes there any more."""
        for waiting in self._by_age.pop(receiver, ()):
            if self._is_current(waiting):
                self.cancel(waiting.key)
        self._by_urgency.pop(receiver, None)
        for number in [number for number, (to, _) in self._under_way.items() if to == receiver]:
            self.drop(number)

    def leave(self, *, all_of_them: bool = False) -> list[QueuedMessage]:
        """The messages that leave now, in their order. `all_of_them`: all that wait, however much is under way."""
        left = []
        while (waiting := self._next_of_all(all_of_them)) is not None:
            self.cancel(waiting.key)
            to, num_bytes = waiting.to, waiting.num_bytes
            self._turn = self._turns[to]
            self._turns[to] += num_bytes
            self._num_left[to] += 1
            self._under_way[waiting.number] = (to, num_bytes)
            self._in_window[to] += num_bytes
            if self._window is not None:
                self._window.left(waiting.number, num_bytes)
            left.append(waiting)
        return left

    def _next_of_all(self, all_of_them: bool) -> QueuedMessage | None:
        """The message that leaves next, of those for which there is room: receivers take turns."""
        waiting = [each for to in list(self._by_urgency) if (each := self._next(to)) is not None]
        if not all_of_them:
            plain = min((each for each in waiting if each.credit_bytes is None), key=self._turn_of, default=None)
            waiting = [each for each in waiting if (each is plain or each.credit_bytes is not None) and self._has_room(each)]
        return min(waiting, key=self._turn_of, default=None)

    def _turn_of(self, waiting: QueuedMessage) -> tuple[int, int]:
        return self._turns[waiting.to], waiting.number

    def _has_room(self, waiting: QueuedMessage) -> bool:
        if waiting.credit_bytes is None:
            return self._window is None or self._window.has_room(waiting.num_bytes)
        under_way = self._in_window[waiting.to]
        return under_way == 0 or under_way + waiting.num_bytes <= waiting.credit_bytes

    def _next(self, to: int) -> QueuedMessage | None:
        """The next message for this receiver; None if nothing waits for it, and then its queue is removed."""
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
