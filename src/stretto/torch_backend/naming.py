"""What a collective is called that a callback has started.

A group's collectives are numbered in the order in which its members start them, which must be the same on all. Where a callback
of a future starts one (PowerSGD's comm hook starts two for each bucket), that order is nobody's: each worker runs its callbacks
when its own transfers end, in a thread of its own, while the training thread starts others. So such a collective does not take
part in the count. Its name is made of the name of the operation whose future was completed, which of that future's callbacks it
is in, and how many the callback has started in the group before: the same on all members whenever it runs, and no other's.

Some callbacks have no name that all members know: those of sends and receives, of which each member has its own; those of an
operation in a group of one; and those of futures that torch has made of ours in C++. A collective that is started there is
refused. Sends and receives may be started there, as anywhere.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from stretto.collectives.endpoint import digest_name
from stretto.collectives.group import Group
from stretto.collectives.messages import Name
from stretto.errors import ConfigurationError

Path = tuple[int, ...]


class CallbackScope:
    """One run of one callback. `path`: the operation's name, and which callback of which future it is; None: it has no name."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._counts: Counter[int] = Counter()
        self._lock = threading.Lock()

    def next_name(self, channel: int) -> Name:
        if self.path is None:
            raise ConfigurationError(
                "a collective in the callback of a send or a receive, of an operation in a group of one, or of a future that "
                "torch combines of such: members run these in no common order, so it could meet another collective.\n"
                "Wait for the future, then call it."
            )
        with self._lock:
            number = self._counts[channel]
            self._counts[channel] += 1
        return digest_name(["callback", *self.path, channel, number])


_scope: ContextVar[CallbackScope | None] = ContextVar("stretto_callback_scope", default=None)


@contextmanager
def in_callback(path: Path | None) -> Iterator[None]:
    """What the calling thread starts meanwhile is started by this callback. None: no collectives are."""
    before = _scope.set(CallbackScope(path))
    try:
        yield
    finally:
        _scope.reset(before)


def next_name(group: Group) -> Name:
    """The name of the collective that the calling thread starts now in a group."""
    scope = _scope.get()
    return group.next_name(group.channel) if scope is None else scope.next_name(group.channel)


def part_of(name: Name, *which: int) -> Name:
    """The name of one of several transfers that make up an operation."""
    return digest_name(["part", *name, *which])
