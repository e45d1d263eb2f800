"""A traced server that was started apart learns from the workers what its clock is to theirs, and of which run it is.

    server                              worker that is traced
    AskClock(at)                 -->
                                 <--    ClockIs(at, now, offset and uncertainty against rank 0, run)
    AskClock(at)                 -->    ... `ROUNDS` times

A worker reads its clock between the moments at which the server asks and is answered. With s, t these moments and w what was
read, the server's clock less the worker's lies between s - w and t - w. The best bounds of several rounds enclose it, as with
barriers among workers (`observe/clocks.py`). The first round may take until the worker has its first model, which does no harm.

Cost:      where a server is traced, `ROUNDS` small messages each way with every worker.
Invariant: what is estimated is wrong by its uncertainty at most, if clocks run equally fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from stretto.aggregate.parameter_server.server_trace import ServerTrace
from stretto.observe.clocks import middle_of
from stretto.protocol.machine import Actions, Machine, SendMessage

CLOCK_CHANNEL: Final = 0
ROUNDS: Final = 8


class AskClock(msgspec.Struct, frozen=True, tag=True):
    at_ns: int  # of the server


class ClockIs(msgspec.Struct, frozen=True, tag=True):
    """`offset_ns`: of this worker's clock against rank 0's."""

    asked_ns: int
    now_ns: int
    offset_ns: int
    uncertainty_ns: int
    run: str


class ClockTeller(Machine):
    """A traced worker's side."""

    header_type = AskClock

    def __init__(self, now: Callable[[], int], clock: tuple[int, int], run: str) -> None:
        self._now, self._clock, self._run = now, clock, run

    def on_message(self, now: float, source: int, header: AskClock, payload: memoryview) -> Actions:
        return [SendMessage(source, ClockIs(header.at_ns, self._now(), *self._clock, self._run))]


class ClockAsker(Machine):
    """A server's side."""

    header_type = ClockIs

    def __init__(self, workers: Iterable[int], now: Callable[[], int] = time.perf_counter_ns) -> None:
        self._workers, self._now = list(workers), now
        self._told: dict[int, list[tuple[int, int, ClockIs]]] = {}  # worker -> bounds of the difference, and what it has said

    def on_start(self, now: float) -> Actions:
        return [SendMessage(worker, AskClock(self._now())) for worker in self._workers]

    def on_message(self, now: float, source: int, header: ClockIs, payload: memoryview) -> Actions:
        if source not in self._workers or len(told := self._told.setdefault(source, [])) == ROUNDS:
            return ()
        told.append((header.asked_ns - header.now_ns, self._now() - header.now_ns, header))
        return [SendMessage(source, AskClock(self._now()))] if len(told) < ROUNDS else ()

    def compared(self, trace: ServerTrace) -> ServerTrace | None:
        """`trace` with what the worker says that bounds it best; None: no worker has said anything, so none is traced. For when
        the machine has ended."""
        found = []
        for told in self._told.values():
            to_worker, uncertainty_ns = middle_of(max(low for low, _, _ in told), min(high for _, high, _ in told))
            last = told[-1][2]
            found.append((uncertainty_ns + last.uncertainty_ns, to_worker + last.offset_ns, last.run))
        if not found:
            return None
        uncertainty_ns, offset_ns, run = min(found)
        return msgspec.structs.replace(trace, run=run, clock_offset_ns=offset_ns, clock_uncertainty_ns=uncertainty_ns)
