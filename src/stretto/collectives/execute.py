"""The one place where collectives run: an event loop over a wire that works on many of them at once.

Each collective is a schedule (`schedule.py`) with its own tag (channel, sequence), so ranks need no common order among
collectives, and a late one blocks nothing but itself. A task starts when the tasks it waits for are done; a message that arrives
is added or copied straight from the wire's memory.

Who is ready. A rank that begins a collective of more than `EAGER_BYTES` tells the ranks it will receive from. Until they have
heard it they send no more than `UNASKED_BYTES` to one rank, over all such collectives: enough not to wait for that word where all
begin at about the same time, and memory stays bounded. Smaller collectives are sent at once, at most `EAGER_AHEAD` of them ahead
of a receiver; then the sender knocks and waits until the receiver has begun. In a broadcast or reduction some ranks only send,
and would never hear that others disagree: there the receivers tell their senders in any case, who return only then.

What goes wrong goes wrong everywhere. The rank that finds a failure tells all others whom it blames, so every rank raises the
same error with the same culprit:

    peer lost                every collective that involves it fails with `PeerLost(rank)`
    nothing for `arrive_s`   everybody is asked; the rank that has not begun is blamed: `WireTimeout(rank)`
    ranks disagree           everybody says what it believes it is doing; `RankMismatch` lists who said what. Ranks that are in
                             different streams of collectives are found out by asking (`inquiry.py`)

One thread runs the loop (`communication.py`), or the waiting caller does (`Communicator` alone, in tests and virtual time).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import torch

from stretto.collectives.hop import HopAccumulator
from stretto.collectives.inquiry import ASK_S, Inquiry
from stretto.collectives.messages import (
    TOPIC_BEGUN,
    TOPIC_BELIEF,
    TOPIC_FAILED,
    TOPIC_KNOCK,
    Ask,
    Begun,
    Failed,
    Name,
    as_error,
    as_failed,
    decode,
    is_later,
)
from stretto.collectives.plan import Buffer
from stretto.collectives.reduction import Accumulator
from stretto.collectives.request import Outside, Pending, Request
from stretto.collectives.run import Run
from stretto.collectives.schedule import Schedule
from stretto.collectives.whereabouts import Whereabouts
from stretto.errors import PeerLost, RankMismatch, StrettoError, WireError
from stretto.observe.ledger import Ledger
from stretto.observe.trace import Tracer
from stretto.timeouts import Timeouts
from stretto.wire.agreement import rank_mismatch
from stretto.wire.base import DigestMismatch, Wire

EAGER_AHEAD: Final = 256
UNASKED_BYTES: Final = 1 << 20
HISTORY: Final = 512

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
        self.runs: dict[Name, Run] = {}
        self.queued: Callable[[], list[Pending]] = list  # started, and not begun: where a thread of ours begins them
        self._outside: dict[Name, Outside] = {}
        self._begun: dict[Name, dict[int, str]] = {}  # who has begun what we have not
        self._progress_of: dict[tuple[int, int], int] = {}  # (channel, rank) -> last collective known to have begun there
        self._history: dict[Name, str] = {}  # ended: what it was
        self._forgotten: dict[int, int] = {}  # channel -> the last collective that has ended and is no longer in the history
        self._doomed: list[Failed] = []  # failed elsewhere before it began here
        self._disputes: dict[Name, dict[int, Begun]] = {}
        self._knocks: dict[Name, set[int]] = {}
        self._unasked: Counter[int] = Counter()  # rank -> bytes on their way to it, of collectives that it has not begun yet
        self._work: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        self._next_check = 0.0
        for topic, listener in (
            (TOPIC_BEGUN, self._on_begun),
            (TOPIC_BELIEF, self._on_belief),
            (TOPIC_FAILED, self._on_failed),
            (TOPIC_KNOCK, self._on_knock),
        ):
            wire.listen(topic, listener)
        wire.on_lost(self._on_lost)
        self._inquiry = Inquiry(self)

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
            self.fail(self.runs[pending.name], failure)
        elif not pending.done:
            self._remember(pending.name, pending.belief)
            self._tell_failed(pending.name, failure)
            pending.finish(failure)

    def _begin(self, pending: Pending) -> None:
        request = pending.request
        name = request.name
        told = self._doom_of(name)
        doom = told or self._lost_before(request)
        if doom is not None:
            self._remember(name, request.belief)
            if told is None:
                self._tell_failed(name, doom)  # others may not have lost that peer, and would wait for us
            pending.finish(doom)
            return
        run = Run(self, pending, self.wire.now())
        self.runs[name] = run
        self._announce(run)
        for rank, belief in self._begun.pop(name, {}).items():
            self._heard_begun(run, rank, belief)
        for rank, news in self._disputes.pop(name, {}).items():
            self.heard_belief(run, rank, news.belief, news.place)
        run.pump()

    def _lost_before(self, request: Request) -> StrettoError | None:
        return next(iter(self.wire.lost.values()), None) if request.plan.size > 1 else None

    def _announce(self, run: Run) -> None:
        listeners = set() if run.eager and not run.confirmed else set(run.schedule.sources)
        listeners |= self._knocks.pop(run.name, set())
        body = msgspec.msgpack.encode(Begun(*run.name, run.belief))
        for source in listeners:
            self.wire.post(source, TOPIC_BEGUN, body)

    def _on_knock(self, source: int, body: bytes) -> None:
        knock = decode(source, body, Ask)
        if knock is None:
            return
        name = (knock.channel, knock.sequence)
        belief = self.belief(name)
        if not belief:
            self._knocks.setdefault(name, set()).add(source)
        else:
            self.wire.post(source, TOPIC_BEGUN, msgspec.msgpack.encode(Begun(*name, belief)))

    def may_send(self, run: Run, to: int, num_bytes: int) -> bool:
        if run.eager:
            if self._is_near(run, to):
                return True
            if to not in run.held:
                self.wire.post(to, TOPIC_KNOCK, msgspec.msgpack.encode(Ask(*run.name)))
            return False
        if to in run.opened:
            return True
        if self._unasked[to] + num_bytes > UNASKED_BYTES:
            return False
        self._unasked[to] += num_bytes
        run.unasked[to] += num_bytes
        return True

    def _is_near(self, run: Run, to: int) -> bool:
        # The first collective of a channel may be any number: ranks number alike, so "ahead" counts from where we met.
        known = self._progress_of.setdefault((run.name[0], to), run.name[1])
        return run.name[1] - known < EAGER_AHEAD

    def _asked(self, run: Run, to: int) -> None:
        """It has begun this collective, or this has ended: what was sent before counts no longer."""
        self._unasked[to] -= run.unasked.pop(to, 0)

    def completed(self, run: Run) -> None:
        request, schedule = run.request, run.schedule
        itemsize = request.tensor.element_size() if request.hop is None else 1
        self.ledger.count(request.plan.kind.value, schedule.sent, schedule.received, itemsize)
        self._end(run, None)

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
        self._outside[name] = other
        other.error = self._doom_of(name)
        disputes = {rank: news.belief for rank, news in self._disputes.pop(name, {}).items()}
        for rank, belief in (*self._begun.pop(name, {}).items(), *disputes.items()):
            self._disagree_outside(other, rank, belief)
        try:
            yield
        finally:
            other.done = True
            del self._outside[name]
            self._remember(name, other.belief)

    def _end(self, run: Run, error: StrettoError | None) -> None:
        del self.runs[run.name]
        for rank in list(run.unasked):
            self._asked(run, rank)
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
            channel, sequence = oldest
            if not self._is_forgotten(oldest):
                self._forgotten[channel] = sequence

    def has_begun(self, name: Name) -> bool:
        """Whether this rank has begun it, however long ago; one that waits for its data to come from a GPU counts too."""
        known = name in self.runs or name in self._history or name in self._outside
        return known or self._is_forgotten(name) or any(pending.name == name for pending in self.queued())

    def _is_forgotten(self, name: Name) -> bool:
        channel, sequence = name
        last = self._forgotten.get(channel)
        return last is not None and not is_later(sequence, last)

    def belief(self, name: Name) -> str:
        """What this rank believes that collective is; empty if it has not begun it, or has forgotten."""
        if name in self.runs:
            return self.runs[name].belief
        return self._outside[name].belief if name in self._outside else self._history.get(name, "")

    def buffers_for(self, request: Request, schedule: Schedule) -> list[Accumulator]:
        scale = 1.0 / request.plan.size if request.op == "mean" and request.plan.size > 1 else None
        flat = request.tensor.view(-1)
        if request.hop is not None:
            return [HopAccumulator(flat, request.op, scale, request.hop)]  # no plan that hops may be part of needs WORK
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
                    self._inquiry.look_at(run, now)
                elif now - run.disputed_at > ASK_S:
                    self._settle(run)

    def patience_s(self) -> float:
        """How long `step` may block without missing a deadline."""
        return max(0.001, min(1.0, self._next_check - self.wire.now())) if self.runs else 1.0

    def check_soon(self) -> None:
        self._next_check = 0.0

    def pending(self) -> list[Pending]:
        return [run.pending for run in self.runs.values()]

    # -- news from peers ----------------------------------------------------------------------------------------------

    def _on_begun(self, source: int, body: bytes) -> None:
        begun = decode(source, body, Begun)
        if begun is None:
            return
        name = (begun.channel, begun.sequence)
        key = (begun.channel, source)
        self._progress_of[key] = max(begun.sequence, self._progress_of.get(key, 0))
        if name in self.runs:
            self._heard_begun(self.runs[name], source, begun.belief)
        elif name not in self._history:
            self._begun.setdefault(name, {})[source] = begun.belief
        elif self._history[name] != begun.belief:
            self._disagree_afterwards(name, source, begun.belief)
        for run in list(self.runs.values()):
            if run.eager and source in run.held and self._is_near(run, source):
                self._release(run, source)

    def _heard_begun(self, run: Run, source: int, belief: str) -> None:
        if belief != run.belief:
            self.heard_belief(run, source, belief)
            return
        run.opened.add(source)
        self._asked(run, source)
        self._release(run, source)

    def _release(self, run: Run, to: int) -> None:
        """Send what was held back."""
        run.ready.extend(run.held.pop(to, ()))
        run.pump()

    # -- ranks that disagree ------------------------------------------------------------------------------------------

    def tell_everybody(self, topic: int, body: bytes) -> None:
        for rank in range(self.wire.world_size):
            if rank != self.wire.rank:
                self.wire.post(rank, topic, body)

    def _on_belief(self, source: int, body: bytes) -> None:
        news = decode(source, body, Begun)
        if news is None:
            return
        name = (news.channel, news.sequence)
        if name in self.runs:
            self.heard_belief(self.runs[name], source, news.belief, news.place)
        elif name in self._outside:
            self._disagree_outside(self._outside[name], source, news.belief)
        elif name in self._history:
            self._disagree_afterwards(name, source, news.belief)
        else:
            self._disputes.setdefault(name, {})[source] = news

    def _disagree_afterwards(self, name: Name, source: int, belief: str) -> None:
        """A dispute about what has ended here: answer each peer once. A rank that only had to send (the root of a small
        broadcast) has returned by then: all that is left is to say so."""
        heard = self._disputes.setdefault(name, {})
        if source in heard:
            return
        ours = self._history[name]
        if belief != ours and all(other.belief == ours for other in heard.values()):  # else it was said, or raised, before
            log.error(
                "rank %d had done its part of a collective when rank %d disagreed about it:\n  rank %d: %s\n  rank %d: %s\n"
                "All ranks must make the same calls in the same order, with tensors of the same length and dtype.",
                self.wire.rank, source, self.wire.rank, ours, source, belief,
            )  # fmt: skip
        heard[source] = Begun(*name, belief)
        mine = heard.get(self.wire.rank, Begun(*name, ours))
        self.wire.post(source, TOPIC_BELIEF, msgspec.msgpack.encode(mine))

    def _disagree_outside(self, other: Outside, source: int, belief: str) -> None:
        if other.error is None and belief != other.belief:
            other.error = rank_mismatch({self.wire.rank: other.belief, source: belief})
            self.tell_everybody(TOPIC_BELIEF, msgspec.msgpack.encode(Begun(*other.name, other.belief)))

    def heard_belief(self, run: Run, source: int, belief: str, place: str | None = None) -> None:
        """A rank believes this collective to be something. With a place it has heard of the dispute, and says it to everybody."""
        run.beliefs[source] = belief
        if place is not None:
            run.places[source] = place
        self._dispute(run)

    def _dispute(self, run: Run) -> None:
        if run.disputed_at is None:
            run.disputed_at = self.wire.now()
            place = run.places[self.wire.rank] = self._inquiry.place_in(run.pending)
            self.check_soon()
            self.tell_everybody(TOPIC_BELIEF, msgspec.msgpack.encode(Begun(*run.name, run.belief, place)))
        if run.places.keys() >= set(self._inquiry.others()):
            self._settle(run)

    def _settle(self, run: Run) -> None:
        if run.pending.done:
            return
        beliefs = {**run.beliefs, self.wire.rank: run.belief}
        self._end(run, rank_mismatch(beliefs, run.places))
        self._disputes[run.name] = {rank: Begun(*run.name, what, run.places.get(rank, "")) for rank, what in beliefs.items()}

    # -- failures -----------------------------------------------------------------------------------------------------

    def transfer_failed(self, run: Run, error: WireError) -> None:
        if isinstance(error, DigestMismatch):
            self._dispute(run)
        elif isinstance(error, PeerLost):
            self._fail_by_loss(run, error)
        else:
            # A wrong size or dtype where the digests agree: not a difference of opinion but a broken peer.
            self.fail(run, error)

    def _fail_by_loss(self, run: Run, error: PeerLost) -> None:
        if run.disputed_at is None:
            self.fail(run, error)
        else:
            self._dispute(run)  # a peer that has heard everybody raises and leaves: it is the dispute that is to be told

    def fail(self, run: Run, error: StrettoError) -> None:
        """End it here and, by telling them, on all other ranks."""
        if run.pending.done:
            return
        self._end(run, error)
        self._tell_failed(run.name, error)

    def fail_streams(self, names: list[Name], error: RankMismatch) -> None:
        """Ranks are in these collectives of different streams and will never meet: end the streams there, on all ranks."""
        for name in names:
            self._end_stream(as_failed(name, error), found_here=True)

    def _end_stream(self, failed: Failed, *, found_here: bool = False) -> None:
        """End a collective, now or when it begins here, and with it all later ones of its channel that are under way on any rank:
        the buckets of one round leave together, and whoever gets the error waits for the rest of them.

        Several ranks may come to the same conclusion, and each adds what is under way there. What is heard later about something
        that has ended here adds nothing of ours: this rank may have gone on by then."""
        name = (failed.channel, failed.sequence)
        if self._doom_of(name) is None:
            if name in self._history or self._is_forgotten(name):
                return
            for pending in (*self.pending(), *self.queued()):
                if pending.name[0] == failed.channel and is_later(pending.name[1], failed.last):
                    failed, found_here = msgspec.structs.replace(failed, last=pending.name[1]), True
            if found_here:
                self.tell_everybody(TOPIC_FAILED, msgspec.msgpack.encode(failed))
        self._doom(failed)
        for other in self._outside.values():
            if failed.includes(other.name):
                other.error = as_error(failed)
        for run in list(self.runs.values()):
            if failed.includes(run.name):
                self._end(run, as_error(failed))

    def _doom(self, failed: Failed) -> None:
        self._doomed.append(failed)
        del self._doomed[:-HISTORY]

    def _doom_of(self, name: Name) -> StrettoError | None:
        """Why it failed elsewhere before it began here, if it has."""
        return next((as_error(failed) for failed in self._doomed if failed.includes(name)), None)

    def _tell_failed(self, name: Name, error: StrettoError) -> None:
        self.tell_everybody(TOPIC_FAILED, msgspec.msgpack.encode(as_failed(name, error)))

    def _on_failed(self, source: int, body: bytes) -> None:
        failed = decode(source, body, Failed)
        if failed is None:
            return
        name = (failed.channel, failed.sequence)
        if failed.kind == "mismatch":
            self._end_stream(failed)
        elif name in self.runs:
            self._end(self.runs[name], as_error(failed))
        elif name in self._outside:
            self._outside[name].error = as_error(failed)
        elif name not in self._history:
            self._doom(failed)

    def _on_lost(self, error: PeerLost) -> None:
        for run in list(self.runs.values()):
            # A rank that left after doing its part takes nothing with it; one that died may have left any rank waiting.
            if not self._left_cleanly(error.rank) or error.rank in run.waiting_for():
                self._fail_by_loss(run, error)

    def _left_cleanly(self, rank: int) -> bool:
        return self.wire.said_goodbye(rank)
