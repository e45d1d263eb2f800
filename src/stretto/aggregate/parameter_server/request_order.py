"""The most urgent request first: what a worker pushes to each server, or pulls from it, waits in a queue by priority, and few
bytes are under way.

What has been handed to a wire cannot be overtaken any more. So requests wait here, and leave while what is *under way* to their
server has room for them in their credit: pushes until the server says that they have come (`PushReceived`), pulls until they are
answered. Of those that wait the smallest priority goes first, and among equals the one that has waited longest. A request that is
larger than its credit leaves when nothing else is under way. There is one lane for pushes and one for pulls, because a link
carries both ways at once.

Nothing starves: a request that has seen `patience` others leave since it came is the next one, whatever its priority. That is
more than a model has ranges, so within a step priorities alone decide.

Cost:      a push and a pop of a heap for each request, and one short message for each push.
Invariant: per server, what is under way is at most the credit of the last request that left, or that request alone. Pushes of one
           range leave in the order in which they were made.
Reference: Peng et al., "A generic communication scheduler for distributed DNN training acceleration" (ByteScheduler), SOSP 2019,
           for the credit; Hashemi, Jyothi and Campbell, "TicTac", MLSys 2019, for the order of pulls.
Departs:   the credit counts until the other side has the bytes, not until this side has sent them: so it bounds the queues of
           the network too, in which the answers of several servers meet.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from typing import NamedTuple

from stretto.collectives.urgency import Urgency

Key = tuple[int, int]  # range, and the clock of a push or -1


class WaitingRequest(NamedTuple):
    """Ordered by urgency, then by age; no two have the same `number`."""

    priority: int
    number: int
    key: Key
    server: int
    num_bytes: int
    credit_bytes: int
    due: int  # when so many have left for that server it is the next one


class RequestLane:
    """One worker's requests of one direction, for all servers."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._waiting: dict[int, dict[Key, WaitingRequest]] = {}  # by range
        self._by_urgency: defaultdict[int, list[WaitingRequest]] = defaultdict(list)  # by server; also some that wait no longer
        self._by_age: defaultdict[int, deque[WaitingRequest]] = defaultdict(deque)
        self._num_left: Counter[int] = Counter()  # by server
        self._under_way: dict[Key, tuple[int, int]] = {}  # the server, and how many bytes
        self._in_window: Counter[int] = Counter()  # by server
        self._count = 0

    def wait(self, key: Key, server: int, num_bytes: int, urgency: Urgency) -> None:
        """This request is to be sent to that server, and to no other any more."""
        self.end(key)
        self._count += 1
        of_range = self._waiting.setdefault(key[0], {})
        priority = max((urgency.priority, *(each.priority for each in of_range.values())))
        due = self._num_left[server] + self._patience
        request = WaitingRequest(priority, self._count, key, server, num_bytes, urgency.credit_bytes, due)
        of_range[key] = request
        heapq.heappush(self._by_urgency[server], request)
        self._by_age[server].append(request)

    def waits(self, index: int) -> bool:
        """Whether a request of that range has not left."""
        return index in self._waiting

    def has(self, key: Key) -> bool:
        """Whether it waits, or is under way."""
        return key in self._under_way or key in self._waiting.get(key[0], {})

    def end(self, key: Key) -> None:
        """It has come, was answered, or is not to be sent there."""
        self._take_out(key)
        if key in self._under_way:
            server, num_bytes = self._under_way.pop(key)
            self._in_window[server] -= num_bytes

    def lose(self, server: int) -> None:
        """Nothing goes to it any more."""
        for request in self._by_age.get(server, ()):
            if self._is_current(request):
                self._take_out(request.key)
        for key in [key for key, (to, _) in self._under_way.items() if to == server]:
            self.end(key)
        self._by_urgency.pop(server, None)
        self._by_age.pop(server, None)

    def leave(self, *, all_of_them: bool = False) -> list[tuple[Key, int]]:
        """Those that leave now, and to which server, in their order. `all_of_them`: whatever is under way."""
        left = []
        for server in list(self._by_urgency):
            while (request := self._next(server)) is not None and (all_of_them or self._has_room(request)):
                self._take_out(request.key)
                self._num_left[server] += 1
                self._under_way[request.key] = (server, request.num_bytes)
                self._in_window[server] += request.num_bytes
                left.append((request.key, server))
        return left

    def _has_room(self, request: WaitingRequest) -> bool:
        under_way = self._in_window[request.server]
        return under_way == 0 or under_way + request.num_bytes <= request.credit_bytes

    def _next(self, server: int) -> WaitingRequest | None:
        """The one whose turn it is; None, and no queue for that server, if nothing waits for it."""
        by_urgency, by_age = self._by_urgency[server], self._by_age[server]
        while by_urgency and not self._is_current(by_urgency[0]):
            heapq.heappop(by_urgency)
        while by_age and not self._is_current(by_age[0]):
            by_age.popleft()
        if not by_age:
            del self._by_urgency[server], self._by_age[server]
            return None
        oldest = by_age[0]
        return oldest if self._num_left[server] >= oldest.due else by_urgency[0]

    def _is_current(self, request: WaitingRequest) -> bool:
        return self._waiting.get(request.key[0], {}).get(request.key) is request

    def _take_out(self, key: Key) -> None:
        of_range = self._waiting.get(key[0], {})
        of_range.pop(key, None)
        if not of_range:
            self._waiting.pop(key[0], None)
