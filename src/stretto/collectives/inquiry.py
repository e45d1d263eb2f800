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
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from stretto.collectives.messages import Believes, Elsewhere, Name, ProgressQuery, ProgressReport, as_failed
from stretto.collectives.request import OngoingCollective, Request
from stretto.collectives.whereabouts import Wait, Whereabouts
from stretto.errors import RankMismatch, WireTimeout
from stretto.launching.peers import ranks_text

if TYPE_CHECKING:
    from stretto.collectives.failures import FailureAgreement

ASK_S: Final = 1.0  # how long to be silent before asking, and to wait for others' answers before a verdict
MOST_LINES: Final = 16  # of different things that ranks do, in one message

log = logging.getLogger("stretto.collectives")


@dataclass(slots=True)
class Silence:
    """What was asked about one collective that makes no progress, and answered."""

    since: float
    warned_at: float
    ask_after_s: float  # how long it must have lasted before everybody is asked, again
    asked_at: float | None = None  # everybody was asked then, and the verdict is out
    probed: bool = False
    answers: dict[int, ProgressReport] = field(default_factory=dict)


class Inquiry:
    """Asks and answers: a part of the machine of one rank."""

    def __init__(self, machine: FailureAgreement, whereabouts: Whereabouts) -> None:
        self._machine = machine
        self._roster = machine.roster
        self._timeouts = machine.timeouts
        self._whereabouts = whereabouts
        self._silences: dict[Name, Silence] = {}

    def is_over(self, now: float, since: float) -> bool:
        """Whether others have had time enough to say something."""
        return now - since > ASK_S

    def unanswered_since(self, name: Name, rank: int, since: float) -> float:
        """When this rank, which has been waited for since then, was asked about a collective, if it has not answered that."""
        silence = self._silences.get(name)
        return since if silence is None or silence.asked_at is None or rank in silence.answers else min(since, silence.asked_at)

    def forget(self, name: Name) -> None:
        self._silences.pop(name, None)

    # -- asking -------------------------------------------------------------------------------------------------------

    def look_at(self, now: float, run: OngoingCollective) -> None:
        """Called for every collective under way, a few times a second."""
        silence = self._silences.get(run.name)
        if silence is None or silence.since != run.touched_at:
            silence = self._silences[run.name] = Silence(run.touched_at, run.touched_at, ASK_S)
        if silence.asked_at is not None:
            if self.is_over(now, silence.asked_at) or self._all_have_answered(run, silence):
                self._conclude(now, run, silence)
        elif self._is_due(now, run, silence):
            self._ask_everybody(now, run, silence)
        elif now - silence.since > ASK_S and not silence.probed:
            self._probe(run, silence)

    def _all_have_answered(self, run: OngoingCollective, silence: Silence) -> bool:
        return silence.asked_at is not None and silence.answers.keys() >= self._machine.others(run.request)

    def _is_due(self, now: float, run: OngoingCollective, silence: Silence) -> bool:
        silent_s = now - silence.since
        if silent_s > self._patience_s(run) or now - silence.warned_at > self._timeouts.warn_s:
            return True
        # Where many are under way, those that no thread is blocked in can be left alone.
        waits = self._whereabouts.waits() if silent_s > silence.ask_after_s else ()
        return any(self._is_blocked_in(wait, run.name) for wait in waits)

    def _patience_s(self, run: OngoingCollective) -> float:
        return self._timeouts.arrive_s if run.request.arrive_s is None else run.request.arrive_s

    def _is_blocked_in(self, wait: Wait, name: Name) -> bool:
        blocks = self._blocks(wait)
        return blocks is not None and blocks.name == name

    def _blocks(self, wait: Wait) -> Request | None:
        """The collective that a thread cannot go on without; None if that has ended and the thread is about to."""
        if wait.pending is None:
            return next((run.request for run in self._machine.under_way.values() if run.name[0] == wait.channel), None)
        return None if wait.pending.done else wait.pending.request

    def _probe(self, run: OngoingCollective, silence: Silence) -> None:
        """Ask those we wait for what they are doing. Ranks in different collectives may each wait for a message that the other
        never sends, so that no digest meets another; among ranks that agree nobody waits in a circle, so somebody who waits for
        a rank that disagrees finds out here."""
        silence.probed = True
        self._machine.tell(run.waiting_for(), ProgressQuery(*run.name))

    def _ask_everybody(self, now: float, run: OngoingCollective, silence: Silence) -> None:
        silent_s = now - silence.since
        silence.probed = True
        silence.asked_at = now
        silence.ask_after_s = silent_s + min(max(silent_s, ASK_S), self._timeouts.warn_s)
        silence.answers.clear()
        self._machine.tell(self._machine.members(run.request), ProgressQuery(*run.name))

    # -- answering ----------------------------------------------------------------------------------------------------

    def _report(self, name: Name) -> ProgressReport:
        machine = self._machine
        run = machine.under_way.get(name)
        begun = machine.has_begun(name)
        waiting_for = [] if run is None else run.waiting_for()
        instead = [] if begun else self._instead_of(name)
        return ProgressReport(*name, begun, waiting_for, machine.belief(name), self.place_in(name), instead)

    def _instead_of(self, name: Name) -> list[Elsewhere]:
        found = []
        for wait in self._whereabouts.blocking(name[0]):
            pending = self._blocks(wait)
            if pending is None:
                return []
            place = self._whereabouts.place_of_thread(wait.thread)
            members = self._machine.as_told(pending.members)
            found.append(Elsewhere(*pending.name, pending.belief, place, self._needs(pending), members))
        return found

    def _needs(self, pending: Request) -> list[int] | None:
        """The ranks that must begin this collective before it can end here; None means all of the job."""
        if pending.needs_everybody:
            return self._machine.as_told(pending.members)
        run = self._machine.under_way.get(pending.name)
        return [] if run is None else run.waiting_for()

    def place_in(self, name: Name) -> str:
        """Where the thread is that is blocked in it, or else one that uses its channel."""
        for wait in self._whereabouts.waits():
            if self._is_blocked_in(wait, name):
                return self._whereabouts.place_of_thread(wait.thread)
        return self._whereabouts.place(name[0])

    # -- judging ------------------------------------------------------------------------------------------------------

    def heard(self, now: float, source: int, said: ProgressQuery | ProgressReport) -> None:
        name = said.channel, said.sequence
        run, silence = self._machine.under_way.get(name), self._silences.get(name)
        if isinstance(said, ProgressQuery):
            self._machine.send(source, self._report(name))
        elif run is not None and said.belief not in ("", run.belief):
            self._machine.disagreement.heard(now, source, Believes(*name, said.belief, None))
        elif run is not None and silence is not None and source in self._machine.others(run.request):
            silence.answers[source] = said
            if self._all_have_answered(run, silence):
                self._machine.look_in(0.0)

    def _conclude(self, now: float, run: OngoingCollective, silence: Silence) -> None:
        silent_s = now - silence.since
        hopeless = self._hopeless(run, silence)
        culprits = self._culprits(run, silence)
        if hopeless:
            error = self._mismatch(run, silence)
            self._machine.found(now, run.request, error)
            for name, members in hopeless.items():
                self._machine.propose(now, as_failed(name, members, error))
        elif silent_s > self._patience_s(run):
            doing = self._explained(run, silence, culprits[0])
            self._machine.found(now, run.request, WireTimeout(culprits[0], run.belief, silent_s, doing))
        elif now - silence.warned_at > self._timeouts.warn_s:
            silence.warned_at = now
            doing = "; ".join(f"{ranks}: {what}" for ranks, what in self._who_does_what(run, silence, culprits))
            log.warning(
                "rank %d: still waiting for %s in %s after %.0f s, at %s. %s.",
                self._roster.rank, ranks_text(culprits), run.belief, silent_s, self.place_in(run.name), doing,
            )  # fmt: skip
        if not run.failing:
            silence.asked_at = None

    def _hopeless(self, run: OngoingCollective, silence: Silence) -> dict[Name, list[int] | None]:
        """The collectives that other ranks are blocked in and that, like this one, can never end (see the module's text), with
        their members."""
        needs = self._needs(run.request)
        found: dict[Name, list[int] | None] = {}
        for rank, state in silence.answers.items():
            needed = needs is None or rank in needs
            if needed and state.instead and all(self._is_circle(run, other) for other in state.instead):
                found |= {(other.channel, other.sequence): other.members for other in state.instead}
        return found

    def _is_circle(self, run: OngoingCollective, other: Elsewhere) -> bool:
        """Whether `other` waits for this rank, whose threads cannot begin it before `run` has ended."""
        waits_for_us = other.needs is None or self._roster.rank in other.needs
        if not waits_for_us or self._machine.has_begun((other.channel, other.sequence)):
            return False
        ours = self._whereabouts.blocking(other.channel)
        return bool(ours) and all(self._is_blocked_in(wait, run.name) for wait in ours)

    def _mismatch(self, run: OngoingCollective, silence: Silence) -> RankMismatch:
        members = sorted(self._machine.members(run.request))
        lines = [f"  {ranks}: {what}" for ranks, what in self._who_does_what(run, silence, members)]
        return RankMismatch(
            "ranks are in different collectives and wait for each other, so none of these can ever end:\n"
            + "\n".join(lines)
            + "\nAll ranks must make the same calls in the same order. Look at these places for what only some ranks do: a "
            "branch on the rank, one batch less, models in another order, an exception that one rank catches."
        )

    def _culprits(self, run: OngoingCollective, silence: Silence) -> list[int]:
        """The ranks that hold the collective up: those that have not begun it. If all have, those that do not answer; if all
        answer, those that everybody waits for."""
        others, answers = sorted(self._machine.others(run.request)), silence.answers
        absent = [rank for rank in others if rank in answers and not answers[rank].begun]
        if absent:
            return absent
        mute = [rank for rank in others if rank not in answers]
        if mute:
            return mute
        return run.waiting_for() or others or [self._roster.rank]

    # -- in words -----------------------------------------------------------------------------------------------------

    def _who_does_what(self, run: OngoingCollective, silence: Silence, ranks: Iterable[int]) -> list[tuple[str, str]]:
        """Ranks that do the same at the same place are named together."""
        doing: dict[str, list[int]] = {}
        for rank in ranks:
            doing.setdefault(self._doing(run, silence, rank), []).append(rank)
        lines = [(ranks_text(group), what) for what, group in doing.items()]
        if len(lines) > MOST_LINES:
            rest = [rank for group in list(doing.values())[MOST_LINES - 1 :] for rank in group]
            lines = [*lines[: MOST_LINES - 1], (ranks_text(rest), "elsewhere, each at a place of its own")]
        return lines

    def _doing(self, run: OngoingCollective, silence: Silence, rank: int) -> str:
        if rank == self._roster.rank:
            return f"{run.belief}, called at {self.place_in(run.name)}"
        state = silence.answers.get(rank)
        if state is None:
            return "has left the job" if self._roster.said_goodbye(rank) else "does not answer"
        if state.begun:
            return f"{run.belief}, called at {state.place}"
        if state.instead:
            return " and ".join(f"{other.belief}, called at {other.place}" for other in state.instead)
        return f"in no collective, at {state.place}"

    def _explained(self, run: OngoingCollective, silence: Silence, rank: int) -> str:
        """What the rank that is to blame at the deadline does instead, and what follows from it."""
        state = silence.answers.get(rank)
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
                f"It is in {self._doing(run, silence, rank)}.\n"
                f"All ranks must make the same calls in the same order: look at that place for what only rank {rank} does."
            )
        return (
            f"It is in no collective, at {state.place}.\n"
            f"If it needs longer there, allow more time: stretto.init(timeouts=Timeouts(arrive_s=...)). If it should have come, "
            f"look at that place for what keeps it."
        )
