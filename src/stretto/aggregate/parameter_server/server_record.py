"""What a server does, counted: a machine around a server's machine that passes everything on and notes what it sees.

    per worker      bytes in and out, gradients applied and discarded, their staleness, for how long its pulls were held back
    per kind        seconds in which the server worked on pushes, pulls, copies for other servers, and the rest
    queues          gradients held and gathered, pulls parked: now, on average over events, and at most
    updates         of all its ranges

A worker asks for these figures (`LedgerQuery`) on the channel of its model and gets a `ServerLedger`. They are of bounded size:
staleness above `MOST_STALE` counts as that.

Into the answers of the server it writes for how long the server kept each request (`kept_us`), and for a pull that the rule held
back which worker was the slowest: so a worker knows what of its waiting is the network's, and for whom it waited.

With a tracer it notes spans as well: what is done with each push, the optimizer in it, copies on their way down the chain.

Cost:      a few dictionary entries for each message, and no lock: all of it happens in the thread of the machine.
Invariant: the machine inside gets the same events and does the same as without it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.aggregate.parameter_server.head import RangeQueue, UpdateRecord
from stretto.aggregate.parameter_server.messages import (
    Discarded,
    EntryStored,
    LogEntry,
    NotHead,
    PullValues,
    PushGradient,
    PushTaken,
    ToServer,
    ValuesPulled,
)
from stretto.aggregate.parameter_server.range_state import RangeState
from stretto.aggregate.parameter_server.replica import MakeValues, RangeValues
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.aggregate.parameter_server.shard_optimizer import OptionValue
from stretto.observe.trace import Tracer
from stretto.protocol.machine import Actions, Machine, SendMessage

MOST_STALE: Final = 255
MOST_KEPT: Final = 1 << 20  # requests whose arrival is remembered: a worker has one for each range under way, and a few
KINDS: Final[dict[type, str]] = {PushGradient: "push", PullValues: "pull", LogEntry: "copy", EntryStored: "copy"}
SAMPLE_NS: Final = 5_000_000


class LedgerQuery(msgspec.Struct, frozen=True, tag=True):
    """A worker wants to know what this server has counted of this model."""

    number: int


class WorkerAccount(msgspec.Struct):
    """What a server has seen of one worker. Gradients are of ranges: a step has one for each. `held_s`: its pulls together."""

    bytes_in: int = 0
    bytes_out: int = 0
    applied: int = 0
    discarded: int = 0
    held_s: float = 0.0
    staleness: dict[int, int] = {}


class ServerLedger(msgspec.Struct, tag=True):
    """What a server has counted of one model since it serves it. See the module's text."""

    number: int = 0
    since_s: float = 0.0
    updates: int = 0
    busy_s: dict[str, float] = {}
    workers: dict[int, WorkerAccount] = {}
    held: int = 0
    gathered: int = 0
    parked: int = 0
    mean_queue: float = 0.0
    longest_queue: int = 0

    @property
    def busy(self) -> float:
        """The share of the time in which it worked."""
        return min(1.0, sum(self.busy_s.values()) / self.since_s) if self.since_s > 0 else 0.0


class RecordedServer(Machine):
    """See the module's text. `machine` is a server's, made with `on_update=record.on_update` where `record` is this."""

    header_type = ToServer | LedgerQuery

    def __init__(self, tracer: Tracer | None = None, first_server: int = 0) -> None:
        self.machine: ServerMachine | None = None
        self._tracer, self._first_server = tracer, first_server
        self._begun_ns = time.perf_counter_ns()
        self._updates = self._events = self._sum_of_queues = self._longest = 0
        self._busy_ns: Counter[str] = Counter()
        self._accounts: dict[int, WorkerAccount] = {}
        self._queues: dict[int, RangeQueue] = {}  # by range
        self._total = RangeQueue(0, 0, 0)
        self._came_ns: dict[tuple[int, str, int, int], int] = {}  # worker, kind, range, clock of a push
        self._slowest: dict[tuple[int, int], int] = {}  # worker and range of a pull that is held back -> whom it waits for
        self._copies: dict[tuple[int, int], tuple[int, int, int]] = {}  # range, sequence -> when, to whom, bytes
        self._sampled_ns = 0

    def on_update(self, record: UpdateRecord) -> None:
        """An update that a head has made."""
        self._updates += 1
        for worker, _, _, version_read in record.parts:
            account = self._account(worker)
            stale = min(MOST_STALE, max(0, record.version_applied - version_read))
            account.applied += 1
            account.staleness[stale] = account.staleness.get(stale, 0) + 1

    def timed(self, make: MakeValues) -> MakeValues:
        """`make`, whose values note how long their optimizer takes; as it is where nothing is traced."""
        tracer = self._tracer
        if tracer is None:
            return make

        def made(index: int, values: memoryview | None) -> RangeValues:
            found = make(index, values)
            return _TimedValues(found, tracer) if isinstance(found, RangeState) else found

        return made

    # -- events -------------------------------------------------------------------------------------------------------

    def on_start(self, now: float) -> Actions:
        return self._inside().on_start(now)

    def on_message(self, now: float, source: int, header: Any, payload: memoryview) -> Actions:
        if isinstance(header, LedgerQuery):
            return [SendMessage(source, self.ledger(header.number))]
        begin_ns = time.perf_counter_ns()
        self._before(begin_ns, source, header, payload)
        actions = list(self._inside().on_message(now, source, header, payload))
        end_ns = time.perf_counter_ns()
        self._after(begin_ns, end_ns, source, header)
        return [self._noted(end_ns, action) for action in actions]

    def on_sent(self, now: float, token: int) -> Actions:
        actions, now_ns = self._inside().on_sent(now, token), time.perf_counter_ns()
        return [self._noted(now_ns, action) for action in actions]

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        for rank in left:
            self._came_ns = {key: value for key, value in self._came_ns.items() if key[0] != rank}
            self._slowest = {key: value for key, value in self._slowest.items() if key[0] != rank}
            self._copies = {key: value for key, value in self._copies.items() if value[1] != rank}
        actions, now_ns = self._inside().on_view(now, joined, left, generation), time.perf_counter_ns()
        for index in list(self._queues):
            self._look_at(index)
        return [self._noted(now_ns, action) for action in actions]

    def _inside(self) -> ServerMachine:
        assert self.machine is not None
        return self.machine

    # -- what is noted ------------------------------------------------------------------------------------------------

    def _before(self, now_ns: int, source: int, header: Any, payload: memoryview) -> None:
        match header:
            case PushGradient():
                self._account(source).bytes_in += payload.nbytes
                self._came(now_ns, (source, "push", header.range, header.clock))
            case PullValues():
                self._came(now_ns, (source, "pull", header.range, -1))
            case EntryStored() if (copy := self._copies.pop((header.range, header.sequence), None)) is not None:
                began_ns, to, num_bytes = copy
                if self._tracer is not None:
                    name = f"copy to server {to - self._first_server}"
                    self._tracer.span("send", name, began_ns, end_ns=now_ns, num_bytes=num_bytes, peer=to)

    def _came(self, now_ns: int, request: tuple[int, str, int, int]) -> None:
        if len(self._came_ns) < MOST_KEPT:
            self._came_ns.setdefault(request, now_ns)

    def _after(self, begin_ns: int, end_ns: int, source: int, header: Any) -> None:
        kind = KINDS.get(type(header), "other")
        self._busy_ns[kind] += end_ns - begin_ns
        if kind == "push" and self._tracer is not None:
            self._tracer.span("reduce", f"push of rank {source}", begin_ns, end_ns=end_ns, peer=source)
        index = getattr(header, "range", None)
        if kind in ("push", "pull") and index is not None:
            self._look_at(index)
            head = self._head(index)
            if kind == "pull" and head is not None and (slowest := head.holds_back(source)) is not None:
                self._slowest[source, index] = slowest
        self._events += 1
        self._sum_of_queues += sum(self._total)
        self._sample(end_ns)

    def _head(self, index: int) -> Any:
        holding = self._inside().chains.holdings.get(index)
        return None if holding is None else holding.head

    def _look_at(self, index: int) -> None:
        """The queue of a range may have changed."""
        head, before = self._head(index), self._queues.get(index, RangeQueue(0, 0, 0))
        now = RangeQueue(0, 0, 0) if head is None else head.queue()
        self._queues[index] = now
        self._total = RangeQueue(*(total + new - old for total, new, old in zip(self._total, now, before, strict=True)))
        self._longest = max(self._longest, sum(self._total))

    def _sample(self, now_ns: int) -> None:
        if self._tracer is not None and now_ns - self._sampled_ns >= SAMPLE_NS:
            self._sampled_ns = now_ns
            self._tracer.sample("queue", now_ns, self._total._asdict())

    def _noted(self, now_ns: int, action: Any) -> Any:
        """The action, with what this has to add to it."""
        if not isinstance(action, SendMessage):
            return action
        to, header, payload, _ = action
        match header:
            case PushTaken(range=index, clock=clock):
                kept = self._kept_us(now_ns, (int(to), "push", index, clock))
                if header.applied is False:
                    self._account(int(to)).discarded += 1
                return action._replace(header=msgspec.structs.replace(header, kept_us=kept))
            case ValuesPulled(range=index):
                kept = self._kept_us(now_ns, (int(to), "pull", index, -1))
                slowest = self._slowest.pop((int(to), index), None)
                account = self._account(int(to))
                account.bytes_out += memoryview(payload).nbytes
                if slowest is not None:
                    account.held_s += kept / 1e6
                self._look_at(index)
                added = {"kept_us": kept, "waited_for": -1 if slowest is None else slowest}
                return action._replace(header=msgspec.structs.replace(header, **added))
            case NotHead():
                self._forget_requests(int(to), header.chain.range)
                self._look_at(header.chain.range)
            case LogEntry(range=index, sequence=sequence) if not isinstance(header.change, Discarded):
                num_bytes = memoryview(payload).nbytes
                if num_bytes and len(self._copies) < MOST_KEPT:
                    self._copies[index, sequence] = now_ns, int(to), num_bytes
        return action

    def _forget_requests(self, worker: int, index: int) -> None:
        """It asks another server, which answers. What it asks here later has come later."""
        self._came_ns = {key: value for key, value in self._came_ns.items() if (key[0], key[2]) != (worker, index)}
        self._slowest.pop((worker, index), None)

    def _kept_us(self, now_ns: int, request: tuple[int, str, int, int]) -> int:
        return (now_ns - self._came_ns.pop(request, now_ns)) // 1000

    def _account(self, worker: int) -> WorkerAccount:
        if worker not in self._accounts:
            self._accounts[worker] = WorkerAccount(staleness={})
        return self._accounts[worker]

    def ledger(self, number: int = 0) -> ServerLedger:
        """All of it, as it is now."""
        return ServerLedger(
            number=number,
            since_s=(time.perf_counter_ns() - self._begun_ns) / 1e9,
            updates=self._updates,
            busy_s={kind: value / 1e9 for kind, value in self._busy_ns.items()},
            workers=self._accounts,
            held=self._total.held,
            gathered=self._total.gathered,
            parked=self._total.parked,
            mean_queue=self._sum_of_queues / self._events if self._events else 0.0,
            longest_queue=self._longest,
        )


class _TimedValues:
    """Values whose updates are spans of a trace."""

    def __init__(self, values: RangeValues, tracer: Tracer) -> None:
        self._values, self._tracer = values, tracer
        self.value, self.pulled_by, self.forget = values.value, values.pulled_by, values.forget
        self.export, self.install = values.export, values.install

    def apply(
        self,
        gradient: NDArray[np.float32],
        options: Mapping[str, OptionValue],
        *,
        lr_scale: float = 1.0,
        worker: int | None = None,
    ) -> None:
        begin_ns = self._tracer.now()
        self._values.apply(gradient, options, lr_scale=lr_scale, worker=worker)
        self._tracer.span("update", "update", begin_ns)


def total_staleness(ledgers: Iterable[ServerLedger]) -> Counter[int]:
    """How many gradients had which staleness, over all ranges that these servers have updated."""
    found: Counter[int] = Counter()
    for ledger in ledgers:
        for account in ledger.workers.values():
            found.update(account.staleness)
    return found
