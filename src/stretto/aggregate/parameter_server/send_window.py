"""How much a worker has under way to all servers together, where no schedule says so: what its link carries, and little more.

A worker's connections share its link, and left alone they share it unevenly: with four servers at 200 Mbit/s one has its quarter
of a model in half the time of another. A sum is complete when the last worker's part has come, so the slowest connection of all
decides when values come back, and while servers wait for it the way down is idle. With a bound on what is under way to *all* of
them none gets far ahead, and in what waits here the servers take turns (`request_order.py`).

    window = rate * (quickest + SLACK_S)

`rate` is how many bytes per second reach the servers while something is under way, on average over an *epoch*; `quickest` is the
shortest time in that epoch from a message's leaving to its receipt. The better value of the last two epochs counts. An epoch is
as many receipts as the model has ranges, so it contains the beginning of a step, when nothing else was under way.

The window follows the link by itself. Where a message takes `quickest` no matter how much is under way, the link can carry more:
the rate grows with the window, and so the window by the factor (quickest + SLACK_S) / quickest. Where messages take SLACK_S
longer, because of a queue, the factor is 1. So a fast network is never held back, and on a slow one queues are SLACK_S long:
enough that links do not run dry when a process gets its turn late.

Cost:      a few numbers.
Invariant: `least_bytes` may be under way in any case.
Reference: Cardwell et al., "BBR: congestion-based congestion control", ACM Queue 2016, for rate and quickest time.
Departs:   BBR empties the queue at times to see how quick a message can be; here steps begin with empty queues. It takes the best
           rate of short stretches: receipts come in bunches where processors are busy, so that would be several times too much.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

SLACK_S: Final = 0.04


class LinkSeen(NamedTuple):
    """What an epoch has shown of the link."""

    rate: float = 0.0  # bytes per second; 0: not known
    quickest_s: float = math.inf


class SendWindow:
    """See the module's text. Whoever uses it sets `now`, as its machine is told, before anything else in an event."""

    def __init__(self, least_bytes: int, epoch: int) -> None:
        self.now = 0.0
        self._least_bytes, self._epoch = least_bytes, epoch  # in receipts
        self._under_way: dict[int, tuple[int, float]] = {}  # by number: bytes, and when it left
        self._num_bytes = 0  # of these
        self._before = [LinkSeen(), LinkSeen()]  # the last two epochs
        self._num_receipts = self._came_bytes = 0  # in this epoch
        self._quickest_s = math.inf
        self._busy_s, self._busy_since = 0.0, 0.0

    @property
    def size(self) -> int:
        """In bytes."""
        seen = [*self._before, self._seen()]
        rate, quickest_s = max(each.rate for each in seen), min(each.quickest_s for each in seen)
        return max(self._least_bytes, int(rate * (quickest_s + SLACK_S)) if rate else 0)

    def has_room(self, num_bytes: int) -> bool:
        return not self._under_way or self._num_bytes + num_bytes <= self.size

    def left(self, number: int, num_bytes: int) -> None:
        if not self._under_way:
            self._busy_since = self.now
        self._under_way[number] = (num_bytes, self.now)
        self._num_bytes += num_bytes

    def came(self, number: int) -> None:
        """There is a receipt for it."""
        if number not in self._under_way:
            return
        num_bytes, left_at = self._under_way[number]
        self._came_bytes += num_bytes
        self._num_receipts += 1
        self._quickest_s = min(self._quickest_s, self.now - left_at)
        self.drop(number)
        if self._num_receipts == self._epoch:
            self._before = [self._before[1], self._seen()]
            self._num_receipts = self._came_bytes = 0
            self._quickest_s = math.inf
            self._busy_s, self._busy_since = 0.0, self.now

    def drop(self, number: int) -> None:
        """It is under way no longer: it has come, or never will."""
        num_bytes, _ = self._under_way.pop(number, (0, 0.0))
        self._num_bytes -= num_bytes
        if num_bytes and not self._under_way:
            self._busy_s += self.now - self._busy_since

    def _seen(self) -> LinkSeen:
        """In this epoch so far. Its rate is known only after a while, or at its end."""
        busy_s = self._busy_s + (self.now - self._busy_since if self._under_way else 0.0)
        is_known = busy_s > 0 and (busy_s >= SLACK_S or self._num_receipts == self._epoch)
        return LinkSeen(self._came_bytes / busy_s if is_known else 0.0, self._quickest_s)
