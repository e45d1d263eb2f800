"""The scheduler and the clock of a `virtual_world`: one rank runs at a time, and the clock jumps from event to event.

A rank has the *baton* until it waits, ends or is killed; the next is drawn, by the seed, among those that can go on. When nobody
can, the clock jumps to the next event. Everything is under one lock.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from stretto.errors import WireError
from stretto.testing.faults import Fault, Pause
from stretto.testing.in_process import WireKilled
from stretto.testing.network_model import NetworkModel
from stretto.testing.virtual_links import OutOfBudget, VirtualLinks

if TYPE_CHECKING:
    from stretto.testing.virtual import VirtualWire


class VirtualDeadlock(WireError):
    """Every rank waits without a timeout and nothing is left to happen."""


class Activity(enum.Enum):
    READY = "ready"
    RUNNING = "running"
    WAITING = "waiting in progress"
    COMPUTING = "computing"
    FINISHED = "finished"


class Seat:
    """What the scheduler knows of one rank, in one life."""

    def __init__(self, wire: VirtualWire, lock: threading.Lock) -> None:
        self.wire = wire
        self.baton = threading.Condition(lock)
        self.activity = Activity.READY
        self.until = math.inf  # when it goes on by itself
        self.alarm = math.inf  # the event that will see to that
        self.paused: Pause | None = None
        self.due = False  # it could go on, but for the pause

    @property
    def name(self) -> int:
        return self.wire.rank

    @property
    def blocked(self) -> bool:
        return self.activity in (Activity.WAITING, Activity.COMPUTING)

    @property
    def alive(self) -> bool:
        return not self.wire.is_killed and self.activity is not Activity.FINISHED


class VirtualSchedule(VirtualLinks[Seat]):
    """`deadline_s` (virtual) and `stall_s` (real: how long one rank may keep the baton) bound every run."""

    def __init__(self, seed: int, model: NetworkModel | None, faults: Iterable[Fault], deadline_s: float, stall_s: float) -> None:
        super().__init__(seed, model, faults)
        self.lock = threading.Lock()
        self._deadline_s = deadline_s
        self._stall_s = stall_s
        self._failure: Callable[[], Exception] | None = None  # each rank raises one of its own
        self._num_switches = 0
        self._ready: list[Seat] = []
        self._running: Seat | None = None

    def _seat(self, wires: list[VirtualWire]) -> None:
        """These ranks are here from the beginning, and the first has the baton."""
        self._nodes = {wire.rank: wire.seat for wire in wires}
        self._ready = [wire.seat for wire in wires[1:]]
        self._running = wires[0].seat
        self._running.activity = Activity.RUNNING

    @property
    def failed(self) -> bool:
        """Whether the run was ended for all ranks: deadlock, deadline, stall, `abort`."""
        return self._failure is not None

    def abort(self, reason: str) -> None:
        """End the run: every rank's current or next call raises `WireKilled`. Any thread may call it."""
        with self.lock:
            self._failure = self._failure or partial(WireKilled, -1, reason)
            for rank in self._nodes.values():
                rank.baton.notify_all()

    # The baton: one rank runs at a time ------------------------------------------------------------------------------

    def _take_baton(self, rank: Seat) -> None:
        """Wait until it is this rank's turn. It keeps its turn until it waits or ends."""
        if self._running is rank and self._failure is None:
            return
        with self.lock:
            self._await_turn(rank)

    def _await_turn(self, rank: Seat) -> None:
        seen, since = self._num_switches, time.monotonic()
        while self._running is not rank and self._failure is None and rank.activity is not Activity.FINISHED:
            rank.baton.wait(1.0)
            if seen != self._num_switches:
                seen, since = self._num_switches, time.monotonic()
            elif time.monotonic() - since > self._stall_s:
                self._failure = partial(WireError, self._stalled())
        if self._failure is not None:
            raise self._failure()
        if rank.activity is not Activity.FINISHED:
            rank.activity = Activity.RUNNING

    def _wait(self, me: Seat, seconds: float, activity: Activity) -> None:
        with self.lock:
            if activity is Activity.WAITING and me.wire._woken:  # by another thread, since the caller looked
                return
            me.activity = activity
            me.until = self.now + seconds
            self._set_alarm(me)
            self._pass_baton()
            self._await_turn(me)

    def _finish(self, me: Seat) -> None:
        with self.lock:
            if me.activity is Activity.FINISHED:
                return
            if self._failure is None:
                self._await_turn(me)
            me.activity = Activity.FINISHED
            self.trace.record(self.now, f"finish {me.name}")
            if self._running is me:
                self._pass_baton()

    def _pass_baton(self) -> None:
        """Draw who goes on, letting events happen until somebody can. Nobody: all have finished."""
        while not self._ready and self._failure is None:
            if not any(rank.blocked for rank in self._nodes.values()):
                self._running = None
                return
            self._advance()
        if self._failure is not None:
            for rank in self._nodes.values():
                rank.baton.notify_all()
            return
        chosen = self._ready.pop(self._random.randrange(len(self._ready)))
        self._running = chosen
        self._num_switches += 1
        chosen.baton.notify_all()

    def _let_go_on(self, rank: Seat) -> None:
        """A blocked rank has a reason to run."""
        if not rank.blocked:
            return
        if rank.paused is not None and not rank.wire.is_killed:
            self.ledger.fired[str(rank.paused)] += 1
            rank.due = True
            return
        rank.activity = Activity.READY
        rank.until = math.inf
        self._ready.append(rank)

    def _nudge(self, rank: Seat) -> None:
        with self.lock:
            rank.wire._woken = True
            if rank.activity is Activity.WAITING:
                self._let_go_on(rank)

    # The clock

    def _advance(self) -> None:
        if not self._events:
            self._failure = partial(VirtualDeadlock, self._deadlock())
            return
        if self._events[0][0] > self._deadline_s:
            self._failure = partial(
                OutOfBudget,
                f"virtual time passed the deadline of {self._deadline_s:g} s: {self._who_does_what()}. The program would go on "
                f"for ever, or is long: allow more with deadline_s=...",
            )
            return
        self._take_event()

    def _set_alarm(self, rank: Seat) -> None:
        """See that a blocked rank goes on at `rank.until`. One alarm each, put off as needed, keeps the heap small."""
        if rank.until < rank.alarm:
            rank.alarm = rank.until
            self.at(rank.alarm, partial(self._ring, rank, rank.alarm))

    def _ring(self, rank: Seat, alarm: float) -> bool:
        if alarm != rank.alarm:
            return False
        rank.alarm = math.inf
        if not rank.blocked:
            return False
        if rank.until > alarm:
            self._set_alarm(rank)
            return False
        self.trace.record(self.now, f"alarm {rank.name}")
        self._let_go_on(rank)
        return True

    # What to say when nothing goes on --------------------------------------------------------------------------------

    def _who_does_what(self) -> str:
        return ", ".join(f"rank {rank.name} is {rank.activity.value}" for rank in self._nodes.values())

    def _deadlock(self) -> str:
        return (
            f"at virtual time {self.now:g} s nothing is left to happen and nobody waits with a timeout: "
            f"{self._who_does_what()}.\n"
            f"Every rank waits for a message that nobody sends. Give progress a finite timeout to see whose."
        )

    def _stalled(self) -> str:
        culprit = "nobody" if self._running is None else f"rank {self._running.name}"
        return (
            f"{culprit} has run for {self._stall_s:g} s of real time without waiting on its wire, and the others with it.\n"
            f"It hangs, its thread was not started, or it ended without wire.close(). Long computations: stall_s=..."
        )
