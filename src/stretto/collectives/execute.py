"""The one place where collectives run: an event loop over a wire that works on many of them at once.

Each collective is a schedule (`schedule.py`) with its own tag (channel, sequence), so ranks need no common order among
collectives, and a late one blocks nothing but itself. A task starts when the tasks it waits for are done; a message that arrives
is added or copied straight from the wire's memory.

Readiness. A rank that begins a collective of more than `EAGER_BYTES` tells the ranks it will receive from. Until they have
heard it they send no more than `UNASKED_BYTES` to one rank, over all such collectives: enough not to wait for that word where all
begin at about the same time, and memory stays bounded. Smaller collectives are sent at once, at most `EAGER_AHEAD` of them ahead
of a receiver; then the sender knocks and waits until the receiver has begun. In a broadcast or reduction some ranks only send,
and would never hear that others disagree: there the receivers tell their senders in any case, and the senders return only then.

What goes wrong goes wrong at all members of a collective, and at nobody else. The member that finds a failure tells all others
whom it blames, so all raise the same error with the same culprit:

    peer lost                every collective that it is a member of fails with `PeerLost(rank)` (`failures.py`)
    nothing for `arrive_s`   all members are asked; the one that has not begun is blamed: `WireTimeout(rank)` (`inquiry.py`)
    members disagree         each says what it believes it is doing; `RankMismatch` lists who said what (`disagreement.py`).
                             Members that are in different streams of collectives are found out by asking (`inquiry.py`)

One thread runs the loop (`communication.py`), or the waiting caller does (`Communicator` alone, in tests and virtual time).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
import torch

from stretto.collectives.disagreement import Disagreement
from stretto.collectives.failures import HISTORY, Failures
from stretto.collectives.inquiry import ASK_S, Inquiry
from stretto.collectives.message_codec import EncodedAccumulator
from stretto.collectives.messages import TOPIC_BEGUN, TOPIC_KNOCK, Begun, Name, ProgressQuery, decode, is_later
from stretto.collectives.plan import Buffer
from stretto.collectives.reduction import Accumulator
from stretto.collectives.request import Outside, Pending, Request
from stretto.collectives.run import CollectiveRun
from stretto.collectives.schedule import Schedule
from stretto.collectives.whereabouts import Whereabouts
from stretto.errors import StrettoError, WireError
from stretto.observe.ledger import Ledger
from stretto.observe.trace import Tracer
from stretto.timeouts import Timeouts
from stretto.wire.base import Wire

EAGER_AHEAD: Final = 256
UNASKED_BYTES: Final = 1 << 20

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
        self.world = range(wire.world_size)
        self.runs: dict[Name, CollectiveRun] = {}
        self.queued: Callable[[], list[Pending]] = list  # started, and not begun: where a thread of ours begins them
        self.carried_outside: dict[Name, Outside] = {}
        self.history: dict[Name, str] = {}  # ended: what it was
        self._begun: dict[Name, dict[int, str]] = {}  # who has begun what we have not
        self._progress_of: dict[tuple[int, int], int] = {}  # (channel, rank) -> last collective known to have begun there
        self._forgotten: dict[int, int] = {}  # channel -> the last collective that has ended and is no longer in the history
        self._knocks: dict[Name, set[int]] = {}
        self._unasked: Counter[int] = Counter()  # rank -> bytes on their way to it, of collectives that it has not begun yet
        self._work: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        self._next_check = 0.0
        wire.listen(TOPIC_BEGUN, self._on_begun)
        wire.listen(TOPIC_KNOCK, self._on_knock)
        self.failures = Failures(self)
        self.disagreement = Disagreement(self)
        self.inquiry = Inquiry(self)

    def members(self, request: Request) -> Sequence[int]:
        """The ranks of the job that take part in a collective."""
        return self.world if request.members is None else request.members

    def tell(self, members: Sequence[int], topic: int, body: bytes) -> None:
        for rank in members:
            if rank != self.wire.rank:
                self.wire.post(rank, topic, body)

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
        log.error("rank %d could not carry out %s", self.wire.rank, pending.belief, exc_info=error)
        failure = WireError(
            f"rank {self.wire.rank} could not carry out {pending.belief}: {type(error).__name__}: {error}.\n"
            f"It was not foreseen, and ends this collective alone. The log of rank {self.wire.rank} has the traceback: report it."
        )
        failure.__cause__ = error
        if pending.name in self.runs:
            self.failures.fail(self.runs[pending.name], failure)
        elif not pending.done:
            self._remember(pending.name, pending.belief)
            self.failures.tell(self.members(pending.request), pending.name, failure)
            pending.finish(failure)

    def _begin(self, pending: Pending) -> None:
        request = pending.request
        name = request.name
        doom = self.failures.refuse(request)
        if doom is not None:
            self._remember(name, request.belief)
            pending.finish(doom)
            return
        run = CollectiveRun(self, pending, self.wire.now())
        self.runs[name] = run
        self._announce(run)
        for rank, belief in self._begun.pop(name, {}).items():
            self._heard_begun(run, rank, belief)
        self.disagreement.has_begun(run)
        run.pump()

    def _announce(self, run: CollectiveRun) -> None:
        listeners = set() if run.eager and not run.confirmed else set(run.schedule.sources)
        listeners |= self._knocks.pop(run.name, set())
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
        known = self._progress_of.setdefault((run.name[0], to), run.name[1])
        return run.name[1] - known < EAGER_AHEAD

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

    @contextmanager
    def outside(self, other: Outside) -> Iterator[None]:
        """Around a collective that is carried out elsewhere, under a number of this communicator's and in its thread."""
        name = other.name
        self.carried_outside[name] = other
        other.error = self.failures.doom_of(name)
        for rank, belief in self._begun.pop(name, {}).items():
            self.disagreement.heard_outside(other, rank, belief)
        self.disagreement.has_begun_outside(other)
        try:
            yield
        finally:
            other.done = True
            del self.carried_outside[name]
            self._remember(name, other.belief)

    def end(self, run: CollectiveRun, error: StrettoError | None) -> None:
        del self.runs[run.name]
        for rank in list(run.unasked):
            self._asked(run, rank)
        self._remember(run.name, run.belief)
        if error is not None:
            self.wire.cancel(*run.name)
        elif run.schedule.needs_work_buffer:
            self._give_back(run.accumulators[Buffer.WORK].flat)
        run.pending.finish(error)
        if error is not None and run.request.part_of is not None:
            self.failures.fail_round(run.request.part_of, error)

    def _remember(self, name: Name, belief: str) -> None:
        """What ended here, for peers that ask later."""
        self.history[name] = belief
        while len(self.history) > HISTORY:
            oldest = next(iter(self.history))
            del self.history[oldest]
            self.disagreement.forget(oldest)
            channel, sequence = oldest
            if not self.is_forgotten(oldest):
                self._forgotten[channel] = sequence

    def has_begun(self, name: Name) -> bool:
        """Whether this rank has begun it, however long ago; one that waits for its data to come from a GPU counts too."""
        known = name in self.runs or name in self.history or name in self.carried_outside
        return known or self.is_forgotten(name) or any(pending.name == name for pending in self.queued())

    def is_forgotten(self, name: Name) -> bool:
        channel, sequence = name
        last = self._forgotten.get(channel)
        return last is not None and not is_later(sequence, last)

    def belief(self, name: Name) -> str:
        """What this rank believes that collective is; empty if it has not begun it, or has forgotten."""
        if name in self.runs:
            return self.runs[name].belief
        return self.carried_outside[name].belief if name in self.carried_outside else self.history.get(name, "")

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
        now = self.wire.now()
        if now >= self._next_check and self.runs:
            self._next_check = now + min(0.25, self.timeouts.warn_s / 4, self.timeouts.arrive_s / 4)
            for run in list(self.runs.values()):
                if run.disputed_at is None:
                    self.inquiry.look_at(run, now)
                elif now - run.disputed_at > ASK_S:
                    self.disagreement.conclude(run)

    def patience_s(self) -> float:
        """How long `step` may block without missing a deadline."""
        return max(0.001, min(1.0, self._next_check - self.wire.now())) if self.runs else 1.0

    def check_soon(self) -> None:
        self._next_check = 0.0

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
        elif name not in self.history:
            self._begun.setdefault(name, {})[source] = begun.belief
        elif self.history[name] != begun.belief:
            self.disagreement.heard_afterwards(name, source, begun.belief)
        for run in list(self.runs.values()):
            if run.eager and source in run.held and self._is_near(run, source):
                self._release(run, source)

    def _heard_begun(self, run: CollectiveRun, source: int, belief: str) -> None:
        if belief != run.belief:
            self.disagreement.heard_belief(run, source, belief)
            return
        run.opened.add(source)
        self._asked(run, source)
        self._release(run, source)

    def _release(self, run: CollectiveRun, to: int) -> None:
        """Send what was held back."""
        run.ready.extend(run.held.pop(to, ()))
        run.pump()
