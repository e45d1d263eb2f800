"""Faults injected into a virtual network, the ledger that shows they happened, and the trace of what else did.

A fault is a value: what, to whom, and when, by virtual time (`at_s`) or by count (`at_event`: right after the n-th
event). It counts as *fired* only when it had an effect: a kill took down something alive, a pause made something wait,
a cut stopped a message. A test that injects a fault ends with `assert_all_fired()`, so that a test whose fault comes
too late fails instead of passing for nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from stretto.errors import ConfigurationError
from stretto.testing.network_model import Link, NodeName


def _check_moment(fault: object, at_s: float | None, at_event: int | None, for_s: float = 1.0) -> None:
    one_moment = (at_s is None) != (at_event is None)
    if not one_moment or (at_s or 0) < 0 or (at_event or 1) < 1 or not for_s > 0:
        raise ConfigurationError(
            f"{fault}: a fault begins at one moment, given as virtual seconds or as the number of an event, and lasts "
            f"a positive time.\n"
            f"Write for instance Kill(2, at_s=1.5), Kill(2, at_event=100), or Pause(2, at_s=1.5, for_s=0.5)."
        )


@dataclass(frozen=True, slots=True)
class Kill:
    """The node ends without a word; what it had not sent entirely is not sent."""

    node: NodeName
    at_s: float | None = None
    at_event: int | None = None

    def __post_init__(self) -> None:
        _check_moment(self, self.at_s, self.at_event)


@dataclass(frozen=True, slots=True)
class Pause:
    """The node stands still (SIGSTOP, a long garbage collection) and then goes on; what comes for it waits."""

    node: NodeName
    at_s: float | None = None
    for_s: float = 1.0
    at_event: int | None = None

    def __post_init__(self) -> None:
        _check_moment(self, self.at_s, self.at_event, self.for_s)


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing passes between the nodes of `side` and the rest, either way, until it heals after `for_s`.

    With `others` the cut is only between `side` and those.
    """

    side: tuple[NodeName, ...]
    at_s: float | None = None
    for_s: float = math.inf
    others: tuple[NodeName, ...] | None = None
    at_event: int | None = None

    def __post_init__(self) -> None:
        _check_moment(self, self.at_s, self.at_event, self.for_s)

    def separates(self, a: NodeName, b: NodeName) -> bool:
        return self._from_to(a, b) or self._from_to(b, a)

    def _from_to(self, a: NodeName, b: NodeName) -> bool:
        return a in self.side and b not in self.side and (self.others is None or b in self.others)


Fault = Kill | Pause | Cut


class FaultLedger:
    """What was asked for and what happened. `fired[str(fault)]` counts effects; so do `fired["loss"]`, "duplicate",
    "reorder".
    """

    def __init__(self, faults: Iterable[Fault], links: Iterable[Link]) -> None:
        self.expected: list[str] = [str(fault) for fault in faults]
        links = list(links)
        self.expected += [kind for kind in ("loss", "duplicate", "reorder") if any(getattr(link, kind) > 0 for link in links)]
        self.fired: Counter[str] = Counter()

    def assert_all_fired(self) -> None:
        idle = [name for name in self.expected if not self.fired[name]]
        if idle:
            raise AssertionError(
                f"injected faults that had no effect: {', '.join(idle)}. The run was over, or nothing was there "
                f"to hit, when they were due; move them earlier or make the run longer. Fired: {dict(self.fired)}"
            )


class Trace:
    """A running hash of everything that happened, and the last few thousand entries to read when two runs differ."""

    def __init__(self, keep: int = 5000) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.entries: deque[tuple[float, str]] = deque(maxlen=keep)
        self._unhashed = 0

    def record(self, now: float, what: str) -> None:
        self.entries.append((now, what))
        self._unhashed += 1
        if self._unhashed == self.entries.maxlen:
            self.hexdigest()

    def hexdigest(self) -> str:
        for now, what in islice(self.entries, len(self.entries) - self._unhashed, None):
            self._hash.update(f"{now!r} {what}\n".encode())
        self._unhashed = 0
        return self._hash.hexdigest()
