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

One thread runs the loop (`communication.py`), or the waiting caller does (`Communicator` alone, in tests and virtual time).
"""

from __future__ import annotations

import logging
import time
from typing import Final

import msgspec
import torch

from stretto.collectives.hop import HopAccumulator
from stretto.collectives.news import (
    TOPIC_ASK,
    TOPIC_BEGUN,
    TOPIC_BELIEF,
    TOPIC_FAILED,
    TOPIC_KNOCK,
    TOPIC_STATE,
    Ask,
    Begun,
    Failed,
    Name,
    State,
    as_error,
    as_failed,
    decode,
)
from stretto.collectives.plan import Buffer
from stretto.collectives.reduction import Accumulator
from stretto.collectives.request import Pending, Request
from stretto.collectives.run import Run
from stretto.collectives.schedule import Schedule
from stretto.errors import PeerLost, StrettoError, WireError, WireTimeout
from stretto.job.membership import ranks_text
from stretto.observe.ledger import Ledger
from stretto.observe.trace import Tracer
from stretto.timeouts import Timeouts
from stretto.wire.agreement import rank_mismatch
from stretto.wire.base import DigestMismatch, Wire

EAGER_AHEAD: Final = 256
ASK_S: Final = 1.0  # how long to wait for others' answers before a verdict
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
        self._runs: dict[Name, Run] = {}
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
        run = Run(self, pending, self.wire.now())
        self._runs[name] = run
        self._announce(run)
        for rank, belief in self._begun.pop(name, {}).items():
            self._heard_begun(run, rank, belief)
        for rank, belief in self._disputes.pop(name, {}).items():
            self._heard_belief(run, rank, belief)
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
        belief = self._runs[name].belief if name in self._runs else self._history.get(name)
        if belief is None:
            self._knocks.setdefault(name, set()).add(source)
        else:
            self.wire.post(source, TOPIC_BEGUN, msgspec.msgpack.encode(Begun(*name, belief)))

    def may_send(self, run: Run, to: int) -> bool:
        if run.eager:
            # The first collective of a channel may be any number: ranks number alike, so "ahead" counts from where we met.
            known = self._progress_of.setdefault((run.name[0], to), run.name[1])
            if run.name[1] - known < EAGER_AHEAD:
                return True
            if to not in run.held:
                self.wire.post(to, TOPIC_KNOCK, msgspec.msgpack.encode(Ask(*run.name)))
            return False
        return to in run.opened

    def completed(self, run: Run) -> None:
        request, schedule = run.request, run.schedule
        itemsize = request.tensor.element_size() if request.hop is None else 1
        self.ledger.count(request.plan.kind.value, schedule.sent, schedule.received, itemsize)
        self._end(run, None)

    def waited(self, pending: Pending, begin_ns: int) -> None:
        """Somebody waited for a collective. Called in the thread that waited."""
        self.ledger.count_wait(time.perf_counter_ns() - begin_ns)
        if self.tracer is not None:
            plan = pending.request.plan
            name = f"wait {plan.kind.value} {plan.algorithm}"
            num_bytes = pending.request.tensor.nbytes
            self.tracer.span("wait", name, begin_ns, num_bytes=num_bytes, collective=pending.request.belief)

    def _end(self, run: Run, error: StrettoError | None) -> None:
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
        begun = decode(source, body, Begun)
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

    def _heard_begun(self, run: Run, source: int, belief: str) -> None:
        if belief != run.belief:
            self._heard_belief(run, source, belief)
            return
        run.opened.add(source)
        self._release(run, source)

    def _release(self, run: Run, to: int) -> None:
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
        news = decode(source, body, Begun)
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

    def _heard_belief(self, run: Run, source: int, belief: str) -> None:
        run.beliefs[source] = belief
        self._dispute(run)

    def _dispute(self, run: Run) -> None:
        if run.disputed_at is None:
            run.disputed_at = self.wire.now()
            self._next_check = 0.0
            self._tell_everybody(TOPIC_BELIEF, msgspec.msgpack.encode(Begun(*run.name, run.belief)))
        if len(run.beliefs) >= len(self._others()):
            self._settle(run)

    def _settle(self, run: Run) -> None:
        if run.pending.done:
            return
        self._end(run, rank_mismatch({**run.beliefs, self.wire.rank: run.belief}))
        self._disputes[run.name] = run.beliefs

    # -- failures -----------------------------------------------------------------------------------------------------

    def transfer_failed(self, run: Run, error: WireError) -> None:
        if isinstance(error, DigestMismatch):
            self._dispute(run)
        elif isinstance(error, PeerLost):
            self._fail(run, error)
        else:
            # A wrong size or dtype where the digests agree: not a difference of opinion but a broken peer.
            self._fail(run, error)

    def _fail(self, run: Run, error: StrettoError) -> None:
        if run.pending.done:
            return
        self._end(run, error)
        self._tell_failed(run.name, error)

    def _tell_failed(self, name: Name, error: StrettoError) -> None:
        failed = as_failed(name, error)
        if failed is not None:
            self._tell_everybody(TOPIC_FAILED, msgspec.msgpack.encode(failed))

    def _on_failed(self, source: int, body: bytes) -> None:
        failed = decode(source, body, Failed)
        if failed is None:
            return
        name = (failed.channel, failed.sequence)
        error = as_error(failed)
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

    def _check_patience(self, run: Run, now: float) -> None:
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

    def _probe(self, run: Run) -> None:
        """Ask those we wait for what they are doing. Ranks in different collectives may each wait for a message that the other
        never sends, so that no digest meets another; among ranks that agree nobody waits in a circle, so somebody who waits for
        a rank that disagrees finds out here."""
        body = msgspec.msgpack.encode(Ask(*run.name))
        for rank in run.waiting_for():
            self.wire.post(rank, TOPIC_ASK, body)

    def _ask(self, run: Run, now: float) -> None:
        run.asked_at = now
        run.answers.clear()
        self._tell_everybody(TOPIC_ASK, msgspec.msgpack.encode(Ask(*run.name)))

    def _on_ask(self, source: int, body: bytes) -> None:
        ask = decode(source, body, Ask)
        if ask is None:
            return
        name = (ask.channel, ask.sequence)
        run = self._runs.get(name)
        belief = run.belief if run is not None else self._history.get(name, "")
        state = State(*name, belief != "", run.waiting_for() if run is not None else [], belief)
        self.wire.post(source, TOPIC_STATE, msgspec.msgpack.encode(state))

    def _on_state(self, source: int, body: bytes) -> None:
        state = decode(source, body, State)
        run = None if state is None else self._runs.get((state.channel, state.sequence))
        if state is None or run is None:
            return
        if state.belief not in ("", run.belief):
            self._heard_belief(run, source, state.belief)
        elif run.asked_at is not None:
            run.answers[source] = state

    def _verdict(self, run: Run, silent_s: float) -> None:
        run.asked_at = None
        run.warned_at = self.wire.now()
        culprits = self._culprits(run)
        if silent_s > self.timeouts.arrive_s:
            self._fail(run, WireTimeout(culprits[0], run.belief, silent_s))
        else:
            log.warning(
                "rank %d: still waiting for %s in %s after %.0f s", self.wire.rank, ranks_text(culprits), run.belief, silent_s
            )

    def _culprits(self, run: Run) -> list[int]:
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
