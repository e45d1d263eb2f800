"""Named timers: set, replaced, taken back, and fired in the order of their times."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

TimerName = TypeVar("TimerName", bound=Hashable)


class Timers(Generic[TimerName]):
    """At most one timer for each name. They are few, so looking through all of them is cheaper than keeping them sorted."""

    def __init__(self) -> None:
        self._times: dict[TimerName, tuple[float, int]] = {}  # when, and the number of the setting: equal times fire in order
        self._num_settings = 0
        self._next_at: float | None = math.inf  # None: to be looked for again

    def set(self, name: TimerName, at: float | None) -> None:
        """Fire at that time, at once if it is over; None takes the timer back."""
        if at is not None and not -math.inf < at < math.inf:
            raise ValueError(f"timer {name!r} at {at}: give a finite number of seconds, or None to take a timer back")
        self._times.pop(name, None)
        self._next_at = None
        if at is not None:
            self._num_settings += 1
            self._times[name] = (at, self._num_settings)

    def forget(self, which: Callable[[TimerName], bool]) -> None:
        for name in [name for name in self._times if which(name)]:
            self.set(name, None)

    def next_at(self) -> float:
        """When the next timer is due; infinity if none is set."""
        if self._next_at is None:
            self._next_at = min((at for at, _ in self._times.values()), default=math.inf)
        return self._next_at

    def fire(self, now: float, ring: Callable[[TimerName], None]) -> None:
        """Ring whatever is due. A timer that is set meanwhile waits for the next call, so that this one ends."""
        newest = self._num_settings
        while self.next_at() <= now:
            due = [(at, number, name) for name, (at, number) in self._times.items() if at <= now and number <= newest]
            if not due:
                return
            name = min(due, key=lambda timer: timer[:2])[2]
            self.set(name, None)
            ring(name)
