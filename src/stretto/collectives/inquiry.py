"""What a rank does about a collective that makes no progress: it asks the other members where they are, and judges if waiting
helps. Workers that are no members of the collective are neither asked nor blamed.

    after a second of silence     those one waits for are asked what they believe this collective is; if a thread is blocked in
                                  it, everybody is asked where they are, after 1, 2, 4, ... seconds of silence
    every `warn_s`                the log says who is waited for, and what that rank does instead
    after `arrive_s`              `WireTimeout`, which says the same

Ranks in different streams. The answer of a rank that has not begun the collective says what its threads are blocked in instead.
Rank A concludes that ranks disagree, and that no patience will help, when for some rank B

    1. A waits in X, which cannot end on A before B has begun it;
    2. B has not begun X, and each of B's threads that could begin it is blocked in some Y,
       which cannot end on B before A has begun it;
    3. A has not begun any of these Y, and each of A's threads that could begin one of them is blocked in X.

Proof that none of these can end by itself. Suppose that some do, and take the first one to end. If it is X, on A, then B had
begun X (1), so a thread of B that could begin X had left its Y before, and that Y had ended earlier (2). If it is a Y, on B, then
A had begun it (2), so a thread of A had left X before, and X had ended earlier (3). Either contradicts "the first". There is no
clock in the argument, so a slow machine raises no alarm. Nor does it matter that B's answer is older than A's judgement: B's
threads can have left Y since then only if A had begun Y.

What it takes for granted: that a stream is begun by the threads that have begun its last collectives (`whereabouts.py`). Today
every collective but the rooted ones ends nowhere before all ranks have begun it. For a broadcast or a reduction, where some ranks
only send, it is the ranks that one waits for now that must begin it. Circles of more than two threads are not looked for:
`WireTimeout` ends them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from stretto.collectives.messages import TOPIC_QUERY, TOPIC_REPORT, Elsewhere, Name, ProgressQuery, ProgressReport, decode
from stretto.collectives.request import Outside, Pending
from stretto.collectives.run import CollectiveRun
from stretto.collectives.whereabouts import Wait
from stretto.errors import RankMismatch, WireTimeout
from stretto.launching.peers import ranks_text

if TYPE_CHECKING:
    from stretto.collectives.execute import Communicator

ASK_S: Final = 1.0  # how long to be silent before asking, and to wait for others' answers before a verdict
MOST_LINES: Final = 16  # of different things that ranks do, in one message

log = logging.getLogger("stretto.collectives")


class Inquiry:
    """Asks and answers for one communicator, in the thread that drives it."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._wire = communicator.wire
        self._timeouts = communicator.timeouts
        self._whereabouts = communicator.whereabouts
        self._wire.listen(TOPIC_QUERY, self._on_ask)
        self._wire.listen(TOPIC_REPORT, self._on_state)

    # -- asking -------------------------------------------------------------------------------------------------------

    def look_at(self, run: CollectiveRun, now: float) -> None:
        """Called for every collective under way, a few times a second."""
        silent_s = now - run.touched_at
        if run.asked_at is not None:
            if now - run.asked_at > ASK_S or run.answers.keys() >= set(self.others(run)):
                self._conclude(run, silent_s)
        elif self._is_due(run, now, silent_s):
            self._ask_everybody(run, now, silent_s)
        elif silent_s > ASK_S and not run.probed:
            self._probe(run)

    def _is_due(self, run: CollectiveRun, now: float, silent_s: float) -> bool:
        if silent_s > self._timeouts.arrive_s or self._is_time_to_warn(run, now):
            return True
        return silent_s > (run.ask_after_s if run.asked_since == run.touched_at else ASK_S) and self._is_awaited(run)

    def _is_time_to_warn(self, run: CollectiveRun, now: float) -> bool:
        return now - max(run.warned_at, run.touched_at) > self._timeouts.warn_s

    def _is_awaited(self, run: CollectiveRun) -> bool:
        """Whether a thread is blocked in it. Where many are under way, those that nobody waits for yet can be left alone."""
        return any(self._blocks(wait) is run.pending for wait in self._whereabouts.waits())

    def _blocks(self, wait: Wait) -> Pending | Outside | None:
        """The collective that a thread cannot go on without; None if that has ended and the thread is about to."""
        if wait.pending is None:
            runs = self._communicator.runs.values()
            return next((run.pending for run in runs if run.name[0] == wait.channel), None)
        return None if wait.pending.done else wait.pending

    def _probe(self, run: CollectiveRun) -> None:
        """Ask those we wait for what they are doing. Ranks in different collectives may each wait for a message that the other
        never sends, so that no digest meets another; among ranks that agree nobody waits in a circle, so somebody who waits for
        a rank that disagrees finds out here."""
        run.probed = True
        body = msgspec.msgpack.encode(ProgressQuery(*run.name))
        for rank in run.waiting_for():
            self._wire.post(rank, TOPIC_QUERY, body)

    def _ask_everybody(self, run: CollectiveRun, now: float, silent_s: float) -> None:
        run.probed = True
        run.asked_at, run.asked_since = now, run.touched_at
        run.ask_after_s = silent_s + min(max(silent_s, ASK_S), self._timeouts.warn_s)
        run.answers.clear()
        self._communicator.tell(run.members, TOPIC_QUERY, msgspec.msgpack.encode(ProgressQuery(*run.name)))

    def others(self, run: CollectiveRun) -> list[int]:
        """The members that can be asked: all others that are neither lost nor have left the job."""
        wire = self._wire
        return [rank for rank in run.members if rank not in (wire.rank, *wire.lost) and not wire.said_goodbye(rank)]

    # -- answering ----------------------------------------------------------------------------------------------------

    def _on_ask(self, source: int, body: bytes) -> None:
        ask = decode(source, body, ProgressQuery)
        if ask is not None:
            state = self._state_of((ask.channel, ask.sequence))
            self._wire.post(source, TOPIC_REPORT, msgspec.msgpack.encode(state))

    def _state_of(self, name: Name) -> ProgressReport:
        communicator = self._communicator
        run = communicator.runs.get(name)
        begun = communicator.has_begun(name)
        waiting_for = [] if run is None else run.waiting_for()
        instead = [] if begun else self._instead_of(name)
        place = self.place_in(run.pending) if run is not None else self._whereabouts.place(name[0])
        return ProgressReport(*name, begun, waiting_for, communicator.belief(name), place, instead)

    def _instead_of(self, name: Name) -> list[Elsewhere]:
        found = []
        for wait in self._whereabouts.blocking(name[0]):
            pending = self._blocks(wait)
            if pending is None:
                return []
            place = self._whereabouts.place_of_thread(wait.thread)
            members = None if pending.members is None else list(pending.members)
            found.append(Elsewhere(*pending.name, pending.belief, place, self._needs(pending), members))
        return found

    def _needs(self, pending: Pending | Outside) -> list[int] | None:
        """The ranks that must begin this collective before it can end here; None means all of the job."""
        if pending.needs_everybody:
            return None if pending.members is None else list(pending.members)
        run = self._communicator.runs.get(pending.name)
        return [] if run is None else run.waiting_for()

    def place_in(self, pending: Pending) -> str:
        """Where the thread is that is blocked in it."""
        for wait in self._whereabouts.waits():
            if self._blocks(wait) is pending:
                return self._whereabouts.place_of_thread(wait.thread)
        return self._whereabouts.place(pending.name[0])

    # -- judging ------------------------------------------------------------------------------------------------------

    def _on_state(self, source: int, body: bytes) -> None:
        state = decode(source, body, ProgressReport)
        run = None if state is None else self._communicator.runs.get((state.channel, state.sequence))
        if state is None or run is None or source not in run.members:
            return
        if state.belief not in ("", run.belief):
            self._communicator.disagreement.heard_belief(run, source, state.belief)
        elif run.asked_at is not None:
            run.answers[source] = state
            if run.answers.keys() >= set(self.others(run)):
                self._communicator.check_soon()

    def _conclude(self, run: CollectiveRun, silent_s: float) -> None:
        run.asked_at = None
        hopeless = self._hopeless(run)
        culprits = self._culprits(run)
        if hopeless:
            self._communicator.failures.fail_streams({run.name: run.members, **hopeless}, self._mismatch(run))
        elif silent_s > self._timeouts.arrive_s:
            doing = self._explained(run, culprits[0])
            self._communicator.failures.fail(run, WireTimeout(culprits[0], run.belief, silent_s, doing))
        elif self._is_time_to_warn(run, self._wire.now()):
            run.warned_at = self._wire.now()
            doing = "; ".join(f"{ranks}: {what}" for ranks, what in self._who_does_what(run, culprits))
            log.warning(
                "rank %d: still waiting for %s in %s after %.0f s, at %s. %s.",
                self._wire.rank, ranks_text(culprits), run.belief, silent_s, self.place_in(run.pending), doing,
            )  # fmt: skip

    def _hopeless(self, run: CollectiveRun) -> dict[Name, Sequence[int]]:
        """The collectives that other ranks are blocked in and that, like this one, can never end (see the module's text), with
        their members."""
        needs, world, known = self._needs(run.pending), self._communicator.world, set(self._wire.peers)
        found: dict[Name, Sequence[int]] = {}
        for rank, state in run.answers.items():
            needed = needs is None or rank in needs
            if needed and state.instead and all(self._is_circle(run, other) for other in state.instead):
                for other in state.instead:
                    members = world if other.members is None else [rank for rank in other.members if rank in known]
                    found[other.channel, other.sequence] = members
        return found

    def _is_circle(self, run: CollectiveRun, other: Elsewhere) -> bool:
        """Whether `other` waits for this rank, whose threads cannot begin it before `run` has ended."""
        waits_for_us = other.needs is None or self._wire.rank in other.needs
        if not waits_for_us or self._communicator.has_begun((other.channel, other.sequence)):
            return False
        ours = self._whereabouts.blocking(other.channel)
        return bool(ours) and all(self._blocks(wait) is run.pending for wait in ours)

    def _mismatch(self, run: CollectiveRun) -> RankMismatch:
        lines = [f"  {ranks}: {what}" for ranks, what in self._who_does_what(run, sorted(run.members))]
        return RankMismatch(
            "ranks are in different collectives and wait for each other, so none of these can ever end:\n"
            + "\n".join(lines)
            + "\nAll ranks must make the same calls in the same order. Look at these places for what only some ranks do: a "
            "branch on the rank, one batch less, models in another order, an exception that one rank catches."
        )

    def _culprits(self, run: CollectiveRun) -> list[int]:
        """The ranks that hold the collective up: those that have not begun it. If all have, those that do not answer; if all
        answer, those that everybody waits for."""
        others = self.others(run)
        absent = [rank for rank in others if rank in run.answers and not run.answers[rank].begun]
        if absent:
            return absent
        mute = [rank for rank in others if rank not in run.answers]
        if mute:
            return mute
        return run.waiting_for() or others or [self._wire.rank]

    # -- in words -----------------------------------------------------------------------------------------------------

    def _who_does_what(self, run: CollectiveRun, ranks: Iterable[int]) -> list[tuple[str, str]]:
        """Ranks that do the same at the same place are named together."""
        doing: dict[str, list[int]] = {}
        for rank in ranks:
            doing.setdefault(self._doing(run, rank), []).append(rank)
        lines = [(ranks_text(group), what) for what, group in doing.items()]
        if len(lines) > MOST_LINES:
            rest = [rank for group in list(doing.values())[MOST_LINES - 1 :] for rank in group]
            lines = [*lines[: MOST_LINES - 1], (ranks_text(rest), "elsewhere, each at a place of its own")]
        return lines

    def _doing(self, run: CollectiveRun, rank: int) -> str:
        if rank == self._wire.rank:
            return f"{run.belief}, called at {self.place_in(run.pending)}"
        state = run.answers.get(rank)
        if state is None:
            return "has left the job" if self._wire.said_goodbye(rank) else "does not answer"
        if state.begun:
            return f"{run.belief}, called at {state.place}"
        if state.instead:
            return " and ".join(f"{other.belief}, called at {other.place}" for other in state.instead)
        return f"in no collective, at {state.place}"

    def _explained(self, run: CollectiveRun, rank: int) -> str:
        """What the rank that is to blame at the deadline does instead, and what follows from it."""
        state = run.answers.get(rank)
        if state is None:
            return (
                f"Its process answers heartbeats, but no questions: something holds its interpreter (py-spy dump shows what).\n"
                f"If rank {rank} only needs longer, allow more time: stretto.init(timeouts=Timeouts(arrive_s=...))."
            )
        if state.begun:
            waits = f" and waits for {ranks_text(state.waiting_for)}" if state.waiting_for else ""
            return (
                f"It has begun it too{waits}, at {state.place}, but nothing has moved.\n"
                f"Look for a network that drops or delays data between these ranks."
            )
        if state.instead:
            return (
                f"It is in {self._doing(run, rank)}.\n"
                f"All ranks must make the same calls in the same order: look at that place for what only rank {rank} does."
            )
        return (
            f"It is in no collective, at {state.place}.\n"
            f"If it needs longer there, allow more time: stretto.init(timeouts=Timeouts(arrive_s=...)). If it should have come, "
            f"look at that place for what keeps it."
        )
