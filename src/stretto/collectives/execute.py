"""The one place where collectives run: an event loop over a wire that works on many of them at once.

Each collective is a schedule (`schedule.py`) with its own tag (channel, sequence), so ranks need no common order among
collectives, and a late one blocks nothing but itself. A task starts when the tasks it waits for are done; a message that arrives
is added or copied straight from the wire's memory.

Who is ready. A rank that begins a collective of more than `EAGER_BYTES` tells the ranks it will receive from; they send only
then. So large data never arrives unasked (memory stays bounded by the caller's own tensors), and ranks that disagree find out
before any of it is sent. Smaller collectives are sent at once, at most `EAGER_AHEAD` of them ahead of a receiver; then the
sender knocks and waits until the receiver has begun. In a small broadcast or reduction some ranks only send, and would never hear
that others disagree: there the receivers tell their senders too, who send at once but return only then.

What goes wrong goes wrong everywhere. The rank that finds a failure tells all others whom it blames, so every rank raises the
same error with the same culprit:

    peer lost                every collective that involves it fails with `PeerLost(rank)`
    nothing for `arrive_s`   everybody is asked; the rank that has not begun is blamed: `WireTimeout(rank)`
    ranks disagree           everybody says what it believes it is doing; `RankMismatch` lists who said what

One thread runs the loop (`CommunicationThread`), or the waiting caller does (`Communicator` alone, in tests and virtual time).
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, TypeVar

import msgspec
import torch

from stretto.collectives.plan import Buffer, Kind, Plan
from stretto.collectives.reduction import Accumulator, check_op, dtype_code, dtype_name
from stretto.collectives.schedule import Action, Schedule, Task, check_length, compile_plan
from stretto.errors import FrameError, PeerLost, RankMismatch, StrettoError, WireError, WireTimeout
from stretto.observe.ledger import Ledger
from stretto.observe.trace import Tracer
from stretto.timeouts import Timeouts
from stretto.wire.base import Consume, DigestMismatch, Handle, Tag, Wire

EAGER_BYTES: Final = 64 << 10
EAGER_AHEAD: Final = 256
DEFAULT_SEGMENT_BYTES: Final = 2 << 20
READY_POLL_S: Final = 0.0005
ASK_S: Final = 1.0  # how long to wait for others' answers before a verdict
HISTORY: Final = 512

TOPIC_BEGUN: Final = 16
TOPIC_BELIEF: Final = 17
TOPIC_FAILED: Final = 18
TOPIC_ASK: Final = 19
TOPIC_STATE: Final = 20
TOPIC_KNOCK: Final = 21

log = logging.getLogger("stretto.collectives")
compiled = lru_cache(maxsize=1024)(compile_plan)
Name = tuple[int, int]  # channel, sequence
OnDone = Callable[[Handle], None]
T = TypeVar("T")


class Begun(msgspec.Struct, frozen=True, array_like=True):
    channel: int
    sequence: int
    belief: str


class Failed(msgspec.Struct, frozen=True, array_like=True):
    channel: int
    sequence: int
    kind: str  # "lost", "timeout" or "frame"
    rank: int
    text: str
    waited_s: float


class Ask(msgspec.Struct, frozen=True, array_like=True):
    channel: int
    sequence: int


class State(msgspec.Struct, frozen=True, array_like=True):
    channel: int
    sequence: int
    begun: bool
    waiting_for: list[int]
    belief: str  # empty: not begun


@dataclass(frozen=True, slots=True)
class Request:
    """What to run. `tensor` is contiguous, in host memory, and changed in place."""

    plan: Plan
    tensor: torch.Tensor
    op: str = "sum"
    channel: int = 0
    sequence: int = 0
    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    label: str = ""  # what the caller means by it; must be the same on all ranks, like the rest

    def __post_init__(self) -> None:
        """Refuse what cannot work in the caller's thread, before anything is sent."""
        plan = self.plan
        dtype_code(self.tensor.dtype)
        if plan.kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER):
            check_op(self.op, self.tensor.dtype)
        check_length(plan, self.tensor.numel())

    @property
    def name(self) -> Name:
        return self.channel, self.sequence

    @property
    def belief(self) -> str:
        """What this rank thinks everybody is doing; must be the same text on all ranks."""
        plan = self.plan
        what = f"{plan.kind.value}({dtype_name(self.tensor.dtype)}[{self.tensor.numel()}]"
        if plan.kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER):
            what += f", op={self.op}"
        if plan.kind in (Kind.REDUCE, Kind.BROADCAST):
            what += f", root={plan.root}"
        return f"{what}, algorithm={plan.algorithm}, world_size={plan.size}){self.label}"


class Pending:
    """A collective under way, to wait for from any thread. Its deadline is its own (`Timeouts.arrive_s` without progress)."""

    def __init__(self, request: Request, help_along: Callable[[], None] | None = None) -> None:
        self.request = request
        self.error: StrettoError | None = None
        self._finished = threading.Event()
        self.ready: Callable[[], bool] | None = None
        self.made_at = time.monotonic()
        self._help_along = help_along  # one turn of the loop, where no thread turns it
        self.on_waited: Callable[[Pending, int], None] | None = None  # told when a wait that began at a time has ended

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    def finish(self, error: StrettoError | None) -> None:
        self.error = error
        self._finished.set()

    def wait(self) -> None:
        """Return when it is done; raise what went wrong. Whoever ends the loop ends every collective in it, so this returns."""
        if not self._finished.is_set():
            begin_ns = time.perf_counter_ns()
            self._wait()
            if self.on_waited is not None:
                self.on_waited(self, begin_ns)
        if self.error is not None:
            raise self.error

    def _wait(self) -> None:
        while not self._finished.is_set():
            if self._help_along is not None:
                self._help_along()
            else:
                self._finished.wait(1.0)  # in slices, so that Ctrl-C gets through on every platform


class _Run:
    """One collective in progress on this rank."""

    __slots__ = (
        "accumulators", "answers", "asked_at", "beliefs", "belief", "code", "communicator", "confirmed", "counts", "digest",
        "disputed_at", "eager", "held", "name", "opened", "pending", "probed", "pumping", "ready", "remaining", "request",
        "schedule", "started_at", "touched_at", "warned_at",
    )  # fmt: skip

    def __init__(self, communicator: Communicator, pending: Pending, now: float) -> None:
        request = pending.request
        self.communicator = communicator
        self.pending = pending
        self.request = request
        self.name = request.name
        self.belief = request.belief
        self.digest = zlib.crc32(self.belief.encode())
        self.code = dtype_code(request.tensor.dtype)
        itemsize = request.tensor.element_size()
        self.schedule: Schedule = compiled(request.plan, request.tensor.numel(), request.segment_bytes // itemsize)
        self.eager = request.tensor.numel() * itemsize <= EAGER_BYTES
        self.confirmed = self.eager and request.plan.kind in (Kind.BROADCAST, Kind.REDUCE)
        self.counts = list(self.schedule.num_dependencies)
        self.remaining = len(self.counts)
        self.ready = deque(number for number, count in enumerate(self.counts) if count == 0)
        self.pumping = False
        self.held: dict[int, list[int]] = {}  # sends that wait for their receiver to begin
        self.opened: set[int] = set()
        self.accumulators = communicator.buffers_for(request, self.schedule)
        self.started_at = self.touched_at = self.warned_at = now
        self.asked_at: float | None = None
        self.probed = False
        self.answers: dict[int, State] = {}
        self.disputed_at: float | None = None
        self.beliefs: dict[int, str] = {}

    def pump(self) -> None:
        """Start every task that may start. Tasks that finish at once make others ready, hence the loop, not recursion."""
        if self.pumping:
            return
        self.pumping = True
        while self.ready and not self.pending.done:
            self._start(self.ready.popleft())
        self.pumping = False
        if self.remaining == 0 and not self.pending.done and self.disputed_at is None and not self.unconfirmed():
            self.communicator.completed(self)

    def _start(self, number: int) -> None:
        task = self.schedule.tasks[number]
        if task.action is Action.SEND:
            if self.communicator.may_send(self, task.peer):
                self.send(number, task)
            else:
                self.held.setdefault(task.peer, []).append(number)
        elif task.action is Action.RECEIVE:
            self._receive(number, task)
        else:
            self._work_locally_traced(task)
            self._finished(number)

    def send(self, number: int, task: Task) -> None:
        accumulator = self.accumulators[task.buffer]
        view = accumulator.bytes_of(task.start, task.stop)
        tag = Tag(*self.name, task.index, self.digest)
        on_done: OnDone = partial(self._on_done, number)
        tracer = self.communicator.tracer
        if tracer is not None:
            on_done = tracer.watch("send", task.peer, view.nbytes, self.belief, on_done)
        self.communicator.wire.send(view, task.peer, tag, self.code, on_done)

    def _receive(self, number: int, task: Task) -> None:
        num_bytes = (task.stop - task.start) * self.accumulators[task.buffer].itemsize
        tag = Tag(*self.name, task.index, self.digest)
        consume: Consume = partial(self._consume, task)
        on_done: OnDone = partial(self._on_done, number)
        tracer = self.communicator.tracer
        if tracer is not None:
            on_done = tracer.watch("receive", task.peer, num_bytes, self.belief, on_done)
            if task.add:
                consume = tracer.timed("reduce", task.peer, num_bytes, self.belief, consume)
        into = None if task.add else self.accumulators[task.buffer].bytes_of(task.start, task.stop)
        self.communicator.wire.recv(task.peer, tag, num_bytes, self.code, consume, on_done, into)

    def _consume(self, task: Task, incoming: memoryview) -> None:
        accumulator = self.accumulators[task.buffer]
        if task.add:
            # Partners that exchange their sums must compute the same expression to get the same bits: -0.0 and 0.0, or two
            # NaNs, do not commute. (Additions in WORK follow the order of ranks already.)
            lower_first = task.buffer is Buffer.DATA and task.peer < self.communicator.wire.rank
            accumulator.combine(task.start, task.stop, incoming, final=task.final, arrived_first=lower_first)
        elif incoming.nbytes:
            accumulator.copy_in(task.start, task.stop, incoming)

    def _work_locally_traced(self, task: Task) -> None:
        tracer = self.communicator.tracer
        if tracer is None or not task.add:
            self._work_locally(task)
        else:
            num_bytes = (task.stop - task.start) * self.accumulators[task.buffer].itemsize
            tracer.timed("reduce", -1, num_bytes, self.belief, self._work_locally)(task)

    def _work_locally(self, task: Task) -> None:
        target = self.accumulators[task.buffer]
        incoming = self.accumulators[task.source].bytes_of(task.start, task.stop)
        if task.add:
            target.combine(task.start, task.stop, incoming, final=task.final)
        else:
            target.copy_in(task.start, task.stop, incoming)
            if task.final:
                target.finish(task.start, task.stop)

    def _on_done(self, number: int, handle: Handle) -> None:
        if self.pending.done:
            return
        if handle.error is not None:
            self.communicator.transfer_failed(self, handle.error)
            return
        self._finished(number)
        self.pump()

    def _finished(self, number: int) -> None:
        self.remaining -= 1
        self.counts[number] = -1  # neither waiting nor ready any more: `waiting_for` must not blame anybody for it
        self.touched_at = self.communicator.wire.now()
        for successor in self.schedule.successors[number]:
            self.counts[successor] -= 1
            if self.counts[successor] == 0:
                self.ready.append(successor)

    def unconfirmed(self) -> frozenset[int]:
        """Receivers that have yet to say that they are in the same collective, where they must."""
        return self.schedule.destinations - self.opened if self.confirmed else frozenset()

    def waiting_for(self) -> list[int]:
        """Ranks from which something is due now, or that have not begun what is to be sent to them."""
        tasks, counts = self.schedule.tasks, self.counts
        missing = {peer for peer, numbers in self.held.items() if numbers} | self.unconfirmed()
        if self.remaining:
            ready = (task for task, count in zip(tasks, counts, strict=True) if count == 0)
            missing |= {task.peer for task in ready if task.action is Action.RECEIVE}
        return sorted(missing - {self.communicator.wire.rank})


class Communicator:
    """The event loop, without a thread of its own: `step` moves everything that can move."""

    def __init__(
        self,
        wire: Wire,
        timeouts: Timeouts | None = None,
        ledger: Ledger | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.wire = wire
        self.timeouts = timeouts or Timeouts()
        self.tracer = tracer  # None: not tracing
        self.ledger = ledger or Ledger()
        self._runs: dict[Name, _Run] = {}
        self._begun: dict[Name, dict[int, str]] = {}  # who has begun what we have not
        self._progress_of: dict[tuple[int, int], int] = {}  # (channel, rank) -> last collective known to have begun there
        self._history: dict[Name, str] = {}  # ended: what it was
        self._doomed: dict[Name, StrettoError] = {}  # failed elsewhere before it began here
        self._disputes: dict[Name, dict[int, str]] = {}
        self._knocks: dict[Name, set[int]] = {}
        self._work: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        self._next_check = 0.0
        for topic, listener in (
            (TOPIC_BEGUN, self._on_begun),
            (TOPIC_BELIEF, self._on_belief),
            (TOPIC_FAILED, self._on_failed),
            (TOPIC_ASK, self._on_ask),
            (TOPIC_STATE, self._on_state),
            (TOPIC_KNOCK, self._on_knock),
        ):
            wire.listen(topic, listener)
        wire.on_lost(self._on_lost)

    # -- beginning and ending -----------------------------------------------------------------------------------------

    def start(self, request: Request) -> Pending:
        """Begin a collective. Only for the thread that drives this communicator."""
        pending = Pending(request, lambda: self.step(self.patience_s()))
        pending.on_waited = self.waited
        self.begin(pending)
        return pending

    def begin(self, pending: Pending) -> None:
        request = pending.request
        name = request.name
        told = self._doomed.pop(name, None)
        doom = told or self._lost_before(request)
        if doom is not None:
            self._remember(name, request.belief)
            if told is None:
                self._tell_failed(name, doom)  # others may not have lost that peer, and would wait for us
            pending.finish(doom)
            return
        run = _Run(self, pending, self.wire.now())
        self._runs[name] = run
        self._announce(run)
        for rank, belief in self._begun.pop(name, {}).items():
            self._heard_begun(run, rank, belief)
        for rank, belief in self._disputes.pop(name, {}).items():
            self._heard_belief(run, rank, belief)
        run.pump()

    def _lost_before(self, request: Request) -> StrettoError | None:
        return next(iter(self.wire.lost.values()), None) if request.plan.size > 1 else None

    def _announce(self, run: _Run) -> None:
        listeners = set() if run.eager and not run.confirmed else set(run.schedule.sources)
        listeners |= self._knocks.pop(run.name, set())
        body = msgspec.msgpack.encode(Begun(*run.name, run.belief))
        for source in listeners:
            self.wire.post(source, TOPIC_BEGUN, body)

    def _on_knock(self, source: int, body: bytes) -> None:
        knock = _decode(source, body, Ask)
        if knock is None:
            return
        name = (knock.channel, knock.sequence)
        belief = self._runs[name].belief if name in self._runs else self._history.get(name)
        if belief is None:
            self._knocks.setdefault(name, set()).add(source)
        else:
            self.wire.post(source, TOPIC_BEGUN, msgspec.msgpack.encode(Begun(*name, belief)))

    def may_send(self, run: _Run, to: int) -> bool:
        if run.eager:
            # The first collective of a channel may be any number: ranks number alike, so "ahead" counts from where we met.
            known = self._progress_of.setdefault((run.name[0], to), run.name[1])
            if run.name[1] - known < EAGER_AHEAD:
                return True
            if to not in run.held:
                self.wire.post(to, TOPIC_KNOCK, msgspec.msgpack.encode(Ask(*run.name)))
            return False
        return to in run.opened

    def completed(self, run: _Run) -> None:
        request, schedule = run.request, run.schedule
        self.ledger.count(request.plan.kind.value, schedule.sent, schedule.received, request.tensor.element_size())
        self._end(run, None)

    def waited(self, pending: Pending, begin_ns: int) -> None:
        """Somebody waited for a collective. Called in the thread that waited."""
        self.ledger.count_wait(time.perf_counter_ns() - begin_ns)
        if self.tracer is not None:
            plan = pending.request.plan
            name = f"wait {plan.kind.value} {plan.algorithm}"
            num_bytes = pending.request.tensor.nbytes
            self.tracer.span("wait", name, begin_ns, num_bytes=num_bytes, collective=pending.request.belief)

    def _end(self, run: _Run, error: StrettoError | None) -> None:
        del self._runs[run.name]
        self._remember(run.name, run.belief)
        if error is not None:
            self.wire.cancel(*run.name)
        elif run.schedule.needs_work_buffer:
            self._give_back(run.accumulators[Buffer.WORK].flat)
        run.pending.finish(error)

    def _remember(self, name: Name, belief: str) -> None:
        """What ended here, for peers that ask later."""
        self._history[name] = belief
        while len(self._history) > HISTORY:
            oldest = next(iter(self._history))
            del self._history[oldest]
            self._disputes.pop(oldest, None)

    def buffers_for(self, request: Request, schedule: Schedule) -> list[Accumulator]:
        scale = 1.0 / request.plan.size if request.op == "mean" and request.plan.size > 1 else None
        flat = request.tensor.view(-1)
        buffers = [Accumulator(flat, request.op, scale)]
        if schedule.needs_work_buffer:
            buffers.append(Accumulator(self._scratch_like(flat), request.op, None))
        return buffers

    def _scratch_like(self, flat: torch.Tensor) -> torch.Tensor:
        kept = self._work.get((flat.dtype, flat.numel()))
        return kept.pop() if kept else torch.empty_like(flat)

    def _give_back(self, scratch: torch.Tensor) -> None:
        if len(self._work) > 16:
            self._work.clear()
        self._work.setdefault((scratch.dtype, scratch.numel()), []).append(scratch)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self, timeout_s: float) -> None:
        self.wire.progress(timeout_s)
        now = self.wire.now()
        if now >= self._next_check and self._runs:
            self._next_check = now + min(0.25, self.timeouts.warn_s / 4, self.timeouts.arrive_s / 4)
            for run in list(self._runs.values()):
                self._check_patience(run, now)

    def patience_s(self) -> float:
        """How long `step` may block without missing a deadline."""
        return max(0.001, min(1.0, self._next_check - self.wire.now())) if self._runs else 1.0

    def pending(self) -> list[Pending]:
        return [run.pending for run in self._runs.values()]

    # -- news from peers ----------------------------------------------------------------------------------------------

    def _on_begun(self, source: int, body: bytes) -> None:
        begun = _decode(source, body, Begun)
        if begun is None:
            return
        name = (begun.channel, begun.sequence)
        key = (begun.channel, source)
        self._progress_of[key] = max(begun.sequence, self._progress_of.get(key, 0))
        if name in self._runs:
            self._heard_begun(self._runs[name], source, begun.belief)
        elif name not in self._history:
            self._begun.setdefault(name, {})[source] = begun.belief
        elif self._history[name] != begun.belief:
            self._disagree_afterwards(name, source, begun.belief)
        for run in list(self._runs.values()):
            if run.eager and source in run.held:
                self._release(run, source)

    def _heard_begun(self, run: _Run, source: int, belief: str) -> None:
        if belief != run.belief:
            self._heard_belief(run, source, belief)
            return
        run.opened.add(source)
        self._release(run, source)

    def _release(self, run: _Run, to: int) -> None:
        if self.may_send(run, to):
            for number in run.held.pop(to, ()):
                run.send(number, run.schedule.tasks[number])
            run.pump()

    # -- ranks that disagree ------------------------------------------------------------------------------------------

    def _tell_everybody(self, topic: int, body: bytes) -> None:
        for rank in range(self.wire.world_size):
            if rank != self.wire.rank:
                self.wire.post(rank, topic, body)

    def _on_belief(self, source: int, body: bytes) -> None:
        news = _decode(source, body, Begun)
        if news is None:
            return
        name = (news.channel, news.sequence)
        if name in self._runs:
            self._heard_belief(self._runs[name], source, news.belief)
        elif name in self._history:
            self._disagree_afterwards(name, source, news.belief)
        else:
            self._disputes.setdefault(name, {})[source] = news.belief

    def _disagree_afterwards(self, name: Name, source: int, belief: str) -> None:
        """A dispute about what has ended here: answer each peer once. A rank that only had to send (the root of a small
        broadcast) has returned by then: all that is left is to say so."""
        heard = self._disputes.setdefault(name, {})
        if source in heard:
            return
        ours = self._history[name]
        if belief != ours and all(other == ours for other in heard.values()):  # else it was said, or raised, before
            log.error(
                "rank %d had done its part of a collective when rank %d disagreed about it:\n  rank %d: %s\n  rank %d: %s\n"
                "All ranks must make the same calls in the same order, with tensors of the same length and dtype.",
                self.wire.rank, source, self.wire.rank, ours, source, belief,
            )  # fmt: skip
        heard[source] = belief
        self.wire.post(source, TOPIC_BELIEF, msgspec.msgpack.encode(Begun(*name, ours)))

    def _heard_belief(self, run: _Run, source: int, belief: str) -> None:
        run.beliefs[source] = belief
        self._dispute(run)

    def _dispute(self, run: _Run) -> None:
        if run.disputed_at is None:
            run.disputed_at = self.wire.now()
            self._next_check = 0.0
            self._tell_everybody(TOPIC_BELIEF, msgspec.msgpack.encode(Begun(*run.name, run.belief)))
        if len(run.beliefs) >= len(self._others()):
            self._settle(run)

    def _settle(self, run: _Run) -> None:
        if run.pending.done:
            return
        said: dict[str, list[int]] = {run.belief: [self.wire.rank]}
        for rank, belief in run.beliefs.items():
            said.setdefault(belief, []).append(rank)
        lines = [f"  {_ranks(sorted(ranks))}: {belief}" for belief, ranks in sorted(said.items(), key=lambda i: min(i[1]))]
        text = (
            "ranks called different collectives, so none of them was carried out:\n"
            + "\n".join(lines)
            + "\nAll ranks must make the same calls in the same order, with tensors of the same length and dtype."
        )
        self._end(run, RankMismatch(text))
        self._disputes[run.name] = run.beliefs

    # -- failures -----------------------------------------------------------------------------------------------------

    def transfer_failed(self, run: _Run, error: WireError) -> None:
        if isinstance(error, DigestMismatch):
            self._dispute(run)
        elif isinstance(error, PeerLost):
            self._fail(run, error)
        else:
            # A wrong size or dtype where the digests agree: not a difference of opinion but a broken peer.
            self._fail(run, error)

    def _fail(self, run: _Run, error: StrettoError) -> None:
        if run.pending.done:
            return
        self._end(run, error)
        self._tell_failed(run.name, error)

    def _tell_failed(self, name: Name, error: StrettoError) -> None:
        failed = _as_failed(name, error)
        if failed is not None:
            self._tell_everybody(TOPIC_FAILED, msgspec.msgpack.encode(failed))

    def _on_failed(self, source: int, body: bytes) -> None:
        failed = _decode(source, body, Failed)
        if failed is None:
            return
        name = (failed.channel, failed.sequence)
        error = _as_error(failed)
        if name in self._runs:
            self._end(self._runs[name], error)
        elif name not in self._history:
            self._doomed[name] = error
            while len(self._doomed) > HISTORY:
                del self._doomed[next(iter(self._doomed))]

    def _on_lost(self, error: PeerLost) -> None:
        for run in list(self._runs.values()):
            # A rank that left after doing its part takes nothing with it; one that died may have left any rank waiting.
            if not self._left_cleanly(error.rank) or error.rank in run.waiting_for():
                self._fail(run, error)

    def _left_cleanly(self, rank: int) -> bool:
        return self.wire.said_goodbye(rank)

    # -- patience -----------------------------------------------------------------------------------------------------

    def _check_patience(self, run: _Run, now: float) -> None:
        if run.disputed_at is not None:
            if now - run.disputed_at > ASK_S:
                self._settle(run)
            return
        silent_s = now - run.touched_at
        if silent_s > ASK_S and not run.probed:
            run.probed = True
            self._probe(run)
        if run.asked_at is not None:
            if now - run.asked_at > ASK_S or len(run.answers) >= len(self._others()):
                self._verdict(run, silent_s)
        elif silent_s > self.timeouts.arrive_s or now - max(run.warned_at, run.touched_at) > self.timeouts.warn_s:
            self._ask(run, now)

    def _probe(self, run: _Run) -> None:
        """Ask those we wait for what they are doing. Ranks in different collectives may each wait for a message that the other
        never sends, so that no digest meets another; among ranks that agree nobody waits in a circle, so somebody who waits for
        a rank that disagrees finds out here."""
        body = msgspec.msgpack.encode(Ask(*run.name))
        for rank in run.waiting_for():
            self.wire.post(rank, TOPIC_ASK, body)

    def _ask(self, run: _Run, now: float) -> None:
        run.asked_at = now
        run.answers.clear()
        self._tell_everybody(TOPIC_ASK, msgspec.msgpack.encode(Ask(*run.name)))

    def _on_ask(self, source: int, body: bytes) -> None:
        ask = _decode(source, body, Ask)
        if ask is None:
            return
        name = (ask.channel, ask.sequence)
        run = self._runs.get(name)
        belief = run.belief if run is not None else self._history.get(name, "")
        state = State(*name, belief != "", run.waiting_for() if run is not None else [], belief)
        self.wire.post(source, TOPIC_STATE, msgspec.msgpack.encode(state))

    def _on_state(self, source: int, body: bytes) -> None:
        state = _decode(source, body, State)
        run = None if state is None else self._runs.get((state.channel, state.sequence))
        if state is None or run is None:
            return
        if state.belief not in ("", run.belief):
            self._heard_belief(run, source, state.belief)
        elif run.asked_at is not None:
            run.answers[source] = state

    def _verdict(self, run: _Run, silent_s: float) -> None:
        run.asked_at = None
        run.warned_at = self.wire.now()
        culprits = self._culprits(run)
        if silent_s > self.timeouts.arrive_s:
            self._fail(run, WireTimeout(culprits[0], run.belief, silent_s))
        else:
            log.warning(
                "rank %d: still waiting for %s in %s after %.0f s", self.wire.rank, _ranks(culprits), run.belief, silent_s
            )

    def _culprits(self, run: _Run) -> list[int]:
        """Who holds it up: ranks that have not begun; else those that do not answer; else those everybody waits for."""
        others = self._others()
        absent = [rank for rank in others if rank in run.answers and not run.answers[rank].begun]
        if absent:
            return absent
        mute = [rank for rank in others if rank not in run.answers]
        if mute:
            return mute
        return run.waiting_for() or others or [self.wire.rank]

    def _others(self) -> list[int]:
        """Who can be asked: all that are neither lost nor have left."""
        wire = self.wire
        everybody = range(wire.world_size)
        return [rank for rank in everybody if rank not in (wire.rank, *wire.lost) and not wire.said_goodbye(rank)]


def _decode(source: int, body: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as problem:
        log.warning("ignored a malformed %s from rank %d: %s", kind.__name__, source, problem)
        return None


def _as_failed(name: Name, error: StrettoError) -> Failed | None:
    if isinstance(error, PeerLost):
        return Failed(*name, "lost", error.rank, error.reason, 0.0)
    if isinstance(error, WireTimeout):
        return Failed(*name, "timeout", error.rank, error.tag, error.waited_s)
    if isinstance(error, FrameError):
        return Failed(*name, "frame", error.rank, error.problem, 0.0)
    return None


def _as_error(failed: Failed) -> StrettoError:
    if failed.kind == "timeout":
        return WireTimeout(failed.rank, failed.text, failed.waited_s)
    if failed.kind == "frame":
        return FrameError(failed.rank, failed.text)
    return PeerLost(failed.rank, failed.text)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


class _Call:
    """Something to be done in the communication thread."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self.finished = threading.Event()
        self._action = action

    def run(self) -> None:
        try:
            self._action()
        except Exception as error:  # it is the caller's: raised again where `call` waits
            self.error = error
        self.finished.set()


class CommunicationThread:
    """A communicator with a thread of its own: `start` from any thread, overlap with whatever the caller does."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._submitted: deque[Pending] = deque()
        self._calls: deque[_Call] = deque()
        self._unready: list[Pending] = []
        self._stopping = False
        self._ended = False
        self._broken: StrettoError | None = None
        self._thread = threading.Thread(target=self._run, name="stretto-communication", daemon=True)
        self._thread.start()

    def start(self, request: Request, ready: Callable[[], bool] | None = None) -> Pending:
        """Begin a collective; with `ready`, once that returns True (it is asked often, in the communication thread)."""
        pending = Pending(request)
        pending.on_waited = self.communicator.waited
        pending.ready = ready
        if self._broken is not None:
            pending.finish(self._broken)
            return pending
        self._submitted.append(pending)
        self.communicator.wire.wake()
        if self._ended and not pending.done:  # set before what is left was failed for the last time: nobody will look at it
            pending.finish(self._broken or StrettoError("the job was shut down"))
        return pending

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` in the communication thread, the only one that may touch the wire, and wait for it."""
        call = _Call(action)
        self._calls.append(call)
        self.communicator.wire.wake()
        while not call.finished.wait(1.0):
            if not self._thread.is_alive():
                raise self._broken or StrettoError("the job was shut down")
        if call.error is not None:
            raise call.error

    def stop(self, timeout_s: float) -> None:
        """End the thread; collectives still under way fail. The wire is then the caller's to close."""
        self._stopping = True
        self.communicator.wire.wake()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._begin_submitted()
                while self._calls:
                    self._calls.popleft().run()
                patience_s = READY_POLL_S if self._unready else self.communicator.patience_s()
                self.communicator.step(patience_s)
        except Exception as error:  # a bug of ours must not leave the caller waiting for ever
            log.exception("the communication thread failed")
            self._broken = StrettoError(f"the communication thread failed: {error!r}")
            self._broken.__cause__ = error
        self._ended = True
        self._fail_all(self._broken or StrettoError("the job was shut down while this collective was under way"))

    def _begin_submitted(self) -> None:
        while self._submitted:
            self._unready.append(self._submitted.popleft())
        for pending in list(self._unready):
            if self._waits_in_vain(pending):
                self._unready.remove(pending)
            elif pending.ready is None or pending.ready():
                self.communicator.begin(pending)
                self._unready.remove(pending)  # only now: if beginning it fails, it must be among those that are told so

    def _waits_in_vain(self, pending: Pending) -> bool:
        patience_s = self.communicator.timeouts.arrive_s
        late = pending.ready is not None and time.monotonic() - pending.made_at > patience_s
        if late:
            what = f"the data for {pending.request.belief} did not arrive in host memory within {patience_s:g} s"
            pending.finish(StrettoError(f"{what}: the device it comes from does not make progress."))
        return late

    def _fail_all(self, error: StrettoError) -> None:
        for pending in self.communicator.pending() + self._unready + list(self._submitted):
            if not pending.done:
                pending.finish(error)
