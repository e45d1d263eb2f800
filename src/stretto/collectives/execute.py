"""The one place where collectives run: an event loop over a wire that works on many of them at once.

Each collective is a schedule (`schedule.py`) with its own tag (channel, sequence), so ranks need no common order among
collectives, and a late one blocks nothing but itself. A task starts when the tasks it waits for are done; a message that arrives
is added or copied straight from the wire's memory.

Readiness. A rank that begins a collective of more than `EAGER_BYTES` tells the ranks it will receive from. Until they have
heard it they send no more than `UNASKED_BYTES` to one rank, over all such collectives: enough not to wait for that word where all
begin at about the same time, and memory stays bounded. Smaller collectives are sent at once, at most `EAGER_AHEAD` of them ahead
of a receiver; then the sender knocks and waits until the receiver has begun. In a broadcast or reduction some ranks only send,
and would never hear that others disagree: there the receivers tell their senders in any case, and the senders return only then.

What goes wrong goes wrong at all members of a collective, and at nobody else: a protocol machine (`failures.py`), which is told
here what happens and sends what it says by `wire.post`, sees to it that all of them raise the same error with the same culprit.

One thread runs the loop (`communication.py`), or the waiting caller does (`Communicator` alone, in tests and virtual time).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch

from stretto.collectives.failures import FailureAgreement, HasBegun, HasEnded, HasFailed
from stretto.collectives.message_codec import EncodedAccumulator
from stretto.collectives.messages import TOPIC_BEGUN, TOPIC_FAILURES, TOPIC_KNOCK, Begun, Believes, Name, ProgressQuery, decode
from stretto.collectives.plan import Buffer
from stretto.collectives.recent import Recent
from stretto.collectives.reduction import Accumulator
from stretto.collectives.request import Pending, Request
from stretto.collectives.run import CollectiveRun
from stretto.collectives.schedule import Schedule
from stretto.collectives.urgency import SendQueue
from stretto.collectives.whereabouts import Whereabouts
from stretto.errors import StrettoError, WireError
from stretto.observe.ledger import Ledger
from stretto.observe.trace import Tracer
from stretto.protocol.machine import Actions, HeaderReader, Reply, SendMessage, SetTimer
from stretto.protocol.timers import Timers
from stretto.timeouts import Timeouts
from stretto.wire.base import Wire

EAGER_AHEAD: Final = 256
UNASKED_BYTES: Final = 1 << 20
STREAMS: Final = 4096  # for how many channels and ranks it is remembered how far a rank has come

log = logging.getLogger("stretto.collectives")


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
        self.whereabouts = Whereabouts()
        self.runs: dict[Name, CollectiveRun] = {}
        self.failures = FailureAgreement(wire, self.timeouts, self.whereabouts)
        self.has_begun, self.belief = self.failures.has_begun, self.failures.belief  # of a collective, by its name
        self._begun: dict[Name, dict[int, str]] = {}  # who has begun what we have not
        self._progress_of: Recent[tuple[int, int], int] = Recent(STREAMS)  # (channel, rank) -> last collective begun there
        self._knocks: dict[Name, set[int]] = {}
        self._unasked: Counter[int] = Counter()  # rank -> bytes on their way to it, of collectives that it has not begun yet
        self._work: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        self.queue = SendQueue()
        self._timers: Timers[str] = Timers()
        reader = HeaderReader(self.failures)
        wire.listen(TOPIC_BEGUN, self._on_begun)
        wire.listen(TOPIC_KNOCK, self._on_knock)
        wire.listen(TOPIC_FAILURES, lambda source, body: self._heard(source, reader.read(source, body)))
        wire.on_lost(lambda lost: self._perform(self.failures.on_view(wire.now(), [], [lost.rank], wire.generation)))

    # -- driving the machine ------------------------------------------------------------------------------------------

    def tell(self, request: HasBegun | HasEnded | HasFailed) -> None:
        """Tell the machine what happened to a collective; its name is the ticket of the reply."""
        channel, sequence = request.collective.name
        self._perform(self.failures.on_request(self.wire.now(), channel << 32 | sequence, request))

    def _heard(self, source: int, header: Any) -> None:
        if header is not None:
            self._perform(self.failures.on_message(self.wire.now(), source, header, memoryview(b"")))

    def _perform(self, actions: Actions) -> None:
        """An action may lead to the next event. The machine has come to its end of this one, and does not mind the order."""
        for action in actions:
            match action:
                case SendMessage(int(to), header):
                    self.wire.post(to, TOPIC_FAILURES, msgspec.msgpack.encode(header))
                case SetTimer(timer, float(after_s)):
                    self._timers.set(timer, self.wire.now() + after_s)
                case Reply(ticket, error=error):
                    name = ticket >> 32, ticket & 0xFFFFFFFF
                    if name in self.runs:
                        self.end(self.runs[name], error)

    # -- beginning and ending -----------------------------------------------------------------------------------------

    def start(self, request: Request) -> Pending:
        """Begin a collective. Only for the thread that drives this communicator."""
        self.whereabouts.claim(request.channel)
        pending = Pending(request, lambda: self.step(self.patience_s()), self.watch)
        self.begin(pending)
        return pending

    def begin(self, pending: Pending) -> None:
        try:
            self._begin(pending)
        except WireError:
            raise
        except Exception as error:
            self.broke(pending, error)

    def broke(self, pending: Pending, error: Exception) -> None:
        """Something unforeseen about one collective ends that one, on all ranks, and not the thread that all of them need."""
        request = pending.request
        log.error("rank %d could not carry out %s", self.wire.rank, request.belief, exc_info=error)
        failure = WireError(
            f"rank {self.wire.rank} could not carry out {request.belief}: {type(error).__name__}: {error}.\n"
            f"It was not foreseen, and ends this collective alone. The log of rank {self.wire.rank} has the traceback: report it."
        )
        failure.__cause__ = error
        self.tell(HasFailed(request, failure))
        if request.name not in self.runs and not pending.done:
            pending.finish(failure)

    def _begin(self, pending: Pending) -> None:
        name = pending.request.name
        run = CollectiveRun(self, pending, self.wire.now())
        self.runs[name] = run
        if run.request.urgency is not None:
            self.wire.keep_queues_short()
        self.tell(HasBegun(run))
        begun, knocks = self._begun.pop(name, {}), self._knocks.pop(name, set())
        if run.failing or pending.done:
            return
        self._announce(run, knocks)
        for rank, belief in begun.items():
            self._heard_begun(run, rank, belief)
        run.pump()

    def _announce(self, run: CollectiveRun, knocks: set[int]) -> None:
        listeners = knocks if run.eager and not run.confirmed else knocks | run.schedule.sources
        body = msgspec.msgpack.encode(Begun(*run.name, run.belief))
        for source in listeners:
            self.wire.post(source, TOPIC_BEGUN, body)

    def _on_knock(self, source: int, body: bytes) -> None:
        knock = decode(source, body, ProgressQuery)
        if knock is None:
            return
        name = (knock.channel, knock.sequence)
        belief = self.belief(name)
        if not belief:
            self._knocks.setdefault(name, set()).add(source)
        else:
            self.wire.post(source, TOPIC_BEGUN, msgspec.msgpack.encode(Begun(*name, belief)))

    def may_send(self, run: CollectiveRun, to: int, num_bytes: int) -> bool:
        if run.eager:
            if self._is_near(run, to):
                return True
            if to not in run.held:
                self.wire.post(to, TOPIC_KNOCK, msgspec.msgpack.encode(ProgressQuery(*run.name)))
            return False
        if to in run.opened:
            return True
        if self._unasked[to] + num_bytes > UNASKED_BYTES:
            return False
        self._unasked[to] += num_bytes
        run.unasked[to] += num_bytes
        return True

    def _is_near(self, run: CollectiveRun, to: int) -> bool:
        # The first collective of a channel may be any number: ranks number alike, so "ahead" counts from where we met.
        channel, sequence = run.name
        known = self._progress_of.get((channel, to))
        if known is None:
            known = self._progress_of[channel, to] = sequence
        return sequence - known < EAGER_AHEAD

    def _asked(self, run: CollectiveRun, to: int) -> None:
        """It has begun this collective, or this has ended: what was sent before counts no longer."""
        self._unasked[to] -= run.unasked.pop(to, 0)

    def completed(self, run: CollectiveRun) -> None:
        request, schedule = run.request, run.schedule
        itemsize = request.tensor.element_size() if request.message_codec is None else 1
        self.ledger.count(request.plan.kind.value, schedule.sent, schedule.received, itemsize)
        self.end(run, None)

    def watch(self, pending: Pending, wait: Callable[[], None]) -> None:
        """Make the calling thread wait for a collective, and note that it does."""
        begin_ns = time.perf_counter_ns()
        blocked = self.whereabouts.begin_wait(pending.request.channel, pending)
        try:
            wait()
        finally:
            self.whereabouts.end_wait(blocked)
        self.ledger.count_wait(time.perf_counter_ns() - begin_ns)
        if self.tracer is not None:
            plan = pending.request.plan
            name = f"wait {plan.kind.value} {plan.algorithm}"
            num_bytes = pending.request.tensor.nbytes
            self.tracer.span("wait", name, begin_ns, num_bytes=num_bytes, collective=pending.request.belief)

    def end(self, run: CollectiveRun, error: StrettoError | None) -> None:
        del self.runs[run.name]
        for rank in list(run.unasked):
            self._asked(run, rank)
        if error is not None:
            self.wire.cancel(*run.name)
        else:
            self.tell(HasEnded(run))
            if run.schedule.needs_work_buffer:
                self._give_back(run.accumulators[Buffer.WORK].flat)
        self.queue.forget(run)
        run.pending.finish(error)

    def buffers_for(self, request: Request, schedule: Schedule) -> list[Accumulator]:
        scale = 1.0 / request.plan.size if request.op == "mean" and request.plan.size > 1 else None
        flat = request.tensor.view(-1)
        if request.message_codec is not None:
            return [EncodedAccumulator(flat, request.op, scale, request.message_codec)]  # none of its plans needs WORK
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
        self.look_at_the_clock()

    def look_at_the_clock(self) -> None:
        self._timers.fire(self.wire.now(), lambda timer: self._perform(self.failures.on_timer(self.wire.now(), timer)))

    def patience_s(self) -> float:
        """How long `step` may block without missing a deadline."""
        return max(0.001, min(1.0, self._timers.next_at() - self.wire.now()))

    def pending(self) -> list[Pending]:
        return [run.pending for run in self.runs.values()]

    # -- said by peers ------------------------------------------------------------------------------------------------

    def _on_begun(self, source: int, body: bytes) -> None:
        begun = decode(source, body, Begun)
        if begun is None:
            return
        name = (begun.channel, begun.sequence)
        key = (begun.channel, source)
        self._progress_of[key] = max(begun.sequence, self._progress_of.get(key, 0))
        if name in self.runs:
            self._heard_begun(self.runs[name], source, begun.belief)
        elif not self.belief(name):
            self._begun.setdefault(name, {})[source] = begun.belief
        elif self.belief(name) != begun.belief:
            self._heard(source, Believes(*name, begun.belief, None))
        for run in list(self.runs.values()):
            if run.eager and source in run.held and self._is_near(run, source):
                self._release(run, source)

    def _heard_begun(self, run: CollectiveRun, source: int, belief: str) -> None:
        if belief != run.belief:
            self._heard(source, Believes(*run.name, belief, None))
            return
        run.opened.add(source)
        self._asked(run, source)
        self._release(run, source)

    def _release(self, run: CollectiveRun, to: int) -> None:
        """Send what was held back."""
        run.ready.extend(run.held.pop(to, ()))
        run.pump()
