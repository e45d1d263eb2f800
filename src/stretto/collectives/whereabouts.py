"""Which threads of this process use which streams of collectives, what each of them waits for, and where in the program it is.

A channel is a stream of collectives: the public functions have one, every model has one. Collectives of different streams need no
common order, so a rank that waits in one of them cannot tell by its messages whether the others will ever come. What can be told
is which threads would have to begin it there:

    the threads that began the channel's last collectives; or, where it was never used, every thread that has used any channel

A thread tells by `claim` that it uses a channel, and by `waiting` that it is blocked until a collective (or all that is under way
in a channel) has ended. Both cost a few dictionary operations; stacks are only looked at when another rank asks (`place`).

Two things are done in other threads than the one they are done for. On a GPU the end of a backward runs in a thread of
autograd's: such a thread never owns a channel, it acts for the thread that does. And a compression carries a bucket through
several collectives in a thread of its own, while the training thread may wait for something else: as long as it does
(`carrying`), nobody can say that the next collective of that channel will not begin.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NamedTuple

from stretto.collectives.recent import Recent
from stretto.collectives.request import Pending

REMEMBERED: Final = 8  # how many of a channel's last collectives say whose it is
CHANNELS: Final = 1024  # of how many channels it is known; any other may be any thread's
LONGEST_PATH: Final = 120
OURS: Final = frozenset({"stretto", "torch"})


class Wait(NamedTuple):
    """A thread is blocked until `pending` has ended; or, without one, until all that is under way in the channel has."""

    thread: int
    channel: int
    pending: Pending | None
    before: Wait | None  # a signal handler may wait while its thread waits


class Whereabouts:
    """Written by any thread, read by the one that answers other ranks' questions."""

    def __init__(self) -> None:
        self._home = threading.get_ident()
        self._users: Recent[int, deque[int]] = Recent(CHANNELS)
        self._waits: dict[int, Wait] = {}
        self._carried: Counter[int] = Counter()
        self._lock = threading.RLock()  # a signal handler may use a channel while its thread is about to

    # -- told by the threads ------------------------------------------------------------------------------------------

    def claim(self, channel: int) -> int | None:
        """The calling thread uses this channel. Returns the thread that does: another one, if the calling thread only acts for
        it; None where it is not certain for which."""
        if _acts_for_another():
            users = self._users_of(channel, sys._current_frames())
            return next(iter(users)) if len(users) == 1 else None
        thread = threading.get_ident()
        with self._lock:
            if channel in self._users:
                self._users.move_to_end(channel)
            else:
                self._users[channel] = deque(maxlen=REMEMBERED)
            self._users[channel].append(thread)
        return thread

    def begin_wait(self, channel: int, pending: Pending | None = None) -> Wait | None:
        """The calling thread is blocked from now on, until `pending`, or all that is under way in the channel, has ended."""
        thread = self.claim(channel)
        if thread is None:
            return None
        wait = self._waits[thread] = Wait(thread, channel, pending, self._waits.get(thread))
        return wait

    def end_wait(self, wait: Wait | None) -> None:
        if wait is None or self._waits.get(wait.thread) is not wait:
            return  # two threads of autograd's may wait for one thread, and end in any order
        before = wait.before
        if before is None or (before.pending is not None and before.pending.done):
            del self._waits[wait.thread]
        else:
            self._waits[wait.thread] = before

    @contextmanager
    def waiting(self, channel: int, pending: Pending | None = None) -> Iterator[None]:
        wait = self.begin_wait(channel, pending)
        try:
            yield
        finally:
            self.end_wait(wait)

    def carrying(self, channel: int, exchanges: int) -> None:
        """So many more (or fewer) exchanges are carried on in this channel, whatever the thread that began them does."""
        with self._lock:  # the thread that begins them and the one that carries them
            self._carried[channel] += exchanges
            if not self._carried[channel]:
                del self._carried[channel]

    # -- asked for another rank ---------------------------------------------------------------------------------------

    def blocking(self, channel: int) -> list[Wait]:
        """What keeps the next collective of this channel from beginning: what all the threads that could begin it wait for.

        Empty if one of them is free, or if there is none.
        """
        users = self._users_of(channel, sys._current_frames())
        waits = [wait for wait in map(self._waits.get, users) if wait is not None]
        return waits if len(waits) == len(users) and not self._carried[channel] else []

    def waits(self) -> list[Wait]:
        return list(self._waits.values())

    def place(self, channel: int) -> str:
        """Where the thread is that uses this channel (one that does not wait, if there is one)."""
        frames = sys._current_frames()
        users = sorted(self._users_of(channel, frames) or {self._home}, key=lambda thread: thread in self._waits)
        return place_of(frames.get(users[0]))

    def place_of_thread(self, thread: int) -> str:
        return place_of(sys._current_frames().get(thread))

    def _users_of(self, channel: int, alive: dict[int, FrameType]) -> set[int]:
        with self._lock:
            users = alive.keys() & set(self._users.get(channel, ()))
            return users or alive.keys() & {thread for threads in self._users.values() for thread in threads}


def place_of(frame: FrameType | None) -> str:
    """The innermost line of the user's program: neither ours nor torch's nor of the standard library."""
    innermost = None
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module not in OURS:
            innermost = innermost or frame
            if module not in sys.stdlib_module_names:
                return _written(frame)
        frame = frame.f_back
    return "an unknown place" if innermost is None else _written(innermost)


def _written(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    if len(path) > LONGEST_PATH:
        path = f"...{path[-LONGEST_PATH:]}"
    return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"


def _acts_for_another() -> bool:
    """Whether Python has not started this thread: autograd's threads run hooks of a backward that another thread has called."""
    return isinstance(threading.current_thread(), threading._DummyThread)
