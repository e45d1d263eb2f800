"""N ranks in one process, one thread each: the wire for tests of everything above it.

    wires = threads_world(3)          # wires[r] is driven by the thread of rank r

The receiver reads the sender's memory when *it* makes progress, never earlier (see `in_process.py`); only then is the
send done. A message that comes before its `recv` is read and parked (`eager=True`, like sockets, whose buffers take it)
or stays in the sender's memory until somebody asks for it (`eager=False`, like NCCL and gloo: a program that counts on
buffers hangs there, and a sender that reuses memory too early is always caught). `check=True` turns such a violation
into `BufferChanged`.

    newcomer = wires[0].newcomer(rank=3, generation=1)      # the others let it in by wire.admit(newcomer.peer)

Each wire has one condition: its inbox is filled under it, by the sender's thread, and `progress` waits on it. No thread
ever holds two of them, so there is no order of locks to get wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from stretto.errors import ConfigurationError
from stretto.testing.envelopes import Arrival, Envelope, Gone, Goodbye, Item, Knock, Posted, Sent
from stretto.testing.in_process import InProcessWire
from stretto.wire.handshake import Life


class ThreadsWire(InProcessWire):
    """One rank of a `threads_world`."""

    def __init__(
        self,
        rank: int,
        world: dict[int, ThreadsWire],
        world_size: int,
        check: bool,
        eager: bool,
        generation: int = 0,
        members: Iterable[Life] = (),
    ) -> None:
        super().__init__(rank, world_size, check, generation, members)
        self._world = world
        self._eager = eager
        self._condition = threading.Condition()
        self._woken = False

    def newcomer(self, rank: int, generation: int) -> ThreadsWire:
        """The wire of a rank that joins this rank's view, or comes back to it under a later generation."""
        made = ThreadsWire(rank, self._world, self.world_size, self._check, self._eager, generation, self.members())
        self._world[rank] = made
        made._tell_others(Knock(made.life))
        return made

    def progress(self, timeout_s: float) -> None:
        self._enter()
        with self._condition:
            self._condition.wait_for(self._may_return, timeout_s)
            self._woken = False
        self._enter()
        self._drain()

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    def now(self) -> float:
        return time.monotonic()

    def kill(self, reason: str = "its process died") -> None:
        with self._condition:
            if self._closed or self._killed is not None:
                return
            self._killed = reason
            self._condition.notify_all()
        self._tell_others(Gone(self.life, reason))

    def close(self) -> None:
        with self._condition:
            if self._closed or self._killed is not None:
                return
            self._closed = True
        self._release()
        self._tell_others(Goodbye(self.life))

    def _may_return(self) -> bool:
        return self._woken or self._has_news() or self._killed is not None

    def _push(self, item: Item) -> None:
        """Called by other ranks' threads. What comes for a rank that is gone is dropped; its senders are told
        otherwise.
        """
        with self._condition:
            if not self._closed and self._killed is None:
                self._inbox.append(item)
                self._condition.notify_all()

    def _tell_others(self, item: Item) -> None:
        for wire in list(self._world.values()):
            if wire is not self:
                wire._push(item)

    def _push_to(self, rank: int, item: Item) -> None:
        target = self._world[rank]
        if target._born == self._lives[rank]:  # else another has come in its place
            target._push(item)

    def _transmit(self, envelope: Envelope) -> None:
        self._push_to(envelope.target, Arrival(envelope))

    def _transmit_post(self, to: int, posted: Posted) -> None:
        self._push_to(to, posted)

    def _part_from(self, rank: int, generation: int) -> None:
        self._left.add(rank)
        self._push_to(rank, Goodbye(self.life, generation))

    def _acknowledge(self, envelope: Envelope) -> None:
        if envelope.origin.generation == self._lives[envelope.source]:
            self._push_to(envelope.source, Sent(envelope))

    def _may_keep_parked(self, envelope: Envelope) -> bool:
        return not self._eager


def threads_world(size: int, *, check: bool = False, eager: bool = True) -> list[ThreadsWire]:
    """The wires of a world of `size` ranks in this process. The module's text says what `check` and `eager` do."""
    if size < 1:
        raise ConfigurationError(f"threads_world({size}): a world has at least one rank. Write threads_world(1) or more.")
    world: dict[int, ThreadsWire] = {}
    world.update({rank: ThreadsWire(rank, world, size, check, eager) for rank in range(size)})
    return list(world.values())
