"""How all members of a collective that fails come to the same error: a protocol machine, without input or output.

It is told what happens to the collectives of this rank (`HasBegun`, `HasEnded`, `HasFailed`, `HeardBelief`), what peers say and
who is lost. When a collective is to fail, here and at all other members, it answers the request `HasBegun` with the error.

    peer lost               a collective fails with `PeerLost(rank)` if that peer is a member of it; others go on
    transfer failed         what the wire says; where the two sides mean different collectives, it is a dispute (`disagreement.py`)
    nothing comes           all members are asked; the one that has not begun is blamed (`inquiry.py`)
    streams never meet      `RankMismatch` for a collective and all later ones of its channel that are under way (`inquiry.py`)

Several members may find different failures at the same time: two peers die, and each is missed first by another member. So nobody
ends a collective by itself. Whoever finds a failure proposes a verdict to all members, and these settle on one of them in the order
of their ranks (Guerraoui and Rodrigues, "Introduction to Reliable and Secure Distributed Programming", 2011, hierarchical
consensus):

    a member that hears of a failure     asks all members of lower rank to settle, waits until each of them has or is gone, takes
                                         the verdict of the highest of them, or else the one it has heard of, and tells all
                                         members of higher rank

    Agreement: let c be the lowest member that stays alive. Every member above it waits for it, and takes its verdict or that of a
    member between the two, which by induction is the same. Those below it die.

A verdict is told to members that have not begun the collective yet, and ends it when they do. Those where it has ended pass it on.
The cost is a message between each two members, and as many hops, one after the other, as there are members: in failures alone.

What it needs: `left` means dead, messages are not lost, and a peer that lives answers within `ASK_S`. Where that does not hold (a
cut link, a process that holds its interpreter) members may blame different ranks; all of them end nevertheless.

Some collectives are *part of* a round of the whole job, although each has few members: workers of a host combine, then hosts do.
There the loss of any worker leaves all others waiting, one for the other. So such a collective does not fail by itself: whichever
part fails, on any rank, for whatever reason, it is the round that all ranks of the job settle on, and every part of it that is
under way or begins later fails with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from stretto.collectives.disagreement import Disagreement
from stretto.collectives.inquiry import Inquiry
from stretto.collectives.messages import Believes, Failed, Name, ProgressQuery, ProgressReport, Subject, as_error, as_failed, is_later
from stretto.collectives.recent import Recent
from stretto.collectives.whereabouts import Whereabouts
from stretto.errors import PeerLost, StrettoError
from stretto.protocol.machine import Actions, Machine, Reply, SendMessage, SetTimer
from stretto.timeouts import Timeouts
from stretto.wire.base import DigestMismatch

HISTORY: Final = 512  # how many ended collectives, and verdicts, are remembered
CHANNELS: Final = 1024  # of how many channels it is remembered how far they had come
LOOK: Final = "look"  # the one timer

log = logging.getLogger("stretto.collectives")


class Roster(Protocol):
    """Who is here, as a `Wire` says it. Only read."""

    rank: int
    world_size: int
    lost: dict[int, PeerLost]
    generation: int

    @property
    def peers(self) -> list[int]: ...
    def said_goodbye(self, rank: int) -> bool: ...
    def joined_in(self, rank: int) -> int: ...


class Named(Protocol):
    """A collective that was asked for on this rank, begun or not. `members`: None means all of the job."""

    @property
    def name(self) -> Name: ...
    @property
    def belief(self) -> str: ...
    @property
    def members(self) -> Sequence[int] | None: ...
    @property
    def part_of(self) -> Name | None: ...
    @property
    def needs_everybody(self) -> bool: ...


class Collective(Named, Protocol):
    """A collective under way on this rank."""

    failing: bool  # set by the machine: it must not end by itself any more, for a verdict will end it
    touched_at: float  # when something of it has moved last

    @property
    def watched(self) -> bool:
        """Whether silence and losses are to be noticed here. A torch backend does so by itself."""

    @property
    def generation(self) -> int: ...
    def waiting_for(self) -> list[int]: ...


class HasBegun(NamedTuple):
    """The reply is the error with which it fails; there is none if it does not."""

    collective: Collective


class HasEnded(NamedTuple):
    name: Name


class HasFailed(NamedTuple):
    """It cannot be carried out, or one of its transfers has failed."""

    collective: Named
    error: StrettoError


class HeardBelief(NamedTuple):
    """A peer has begun it, and believes it to be something else than we do."""

    name: Name
    source: int
    belief: str


@dataclass(slots=True)
class Vote:
    """A failure that the members have not settled on yet."""

    proposal: Failed
    since: float
    verdicts: dict[int, Failed] = field(default_factory=dict)  # of members of lower rank


class History(Recent[Name, str]):
    """What the last collectives that have ended were, and for each channel how far it had come before these."""

    def __init__(self) -> None:
        super().__init__(HISTORY)
        self._forgotten: Recent[int, int] = Recent(CHANNELS)

    def dropped(self, key: Name, value: str) -> None:
        if not self.had(key):
            self._forgotten[key[0]] = key[1]

    def had(self, name: Name) -> bool:
        """Whether it has ended, however long ago."""
        last = self._forgotten.get(name[0])
        return name in self or (last is not None and not is_later(name[1], last))


class FailureAgreement(Machine):
    """See the module's text. `queued`: what was started and has not begun, where a thread of ours begins it later."""

    header_type = Failed | Believes | ProgressQuery | ProgressReport

    def __init__(self, roster: Roster, timeouts: Timeouts, whereabouts: Whereabouts) -> None:
        self.roster = roster
        self.timeouts = timeouts
        self.world = range(roster.world_size)
        self.queued: Callable[[], Sequence[Named]] = tuple
        self.under_way: dict[Name, Collective] = {}
        self.history = History()
        self.disagreement = Disagreement(self)
        self.inquiry = Inquiry(self, whereabouts)
        self._tickets: dict[Name, int] = {}
        self._votes: dict[Subject, Vote] = {}
        self._doomed: Recent[Subject, Failed] = Recent(HISTORY)  # settled: for those that begin here later, and to settle it once
        self._actions: list[SendMessage | SetTimer | Reply] = []
        self._looks = False  # the timer is set

    # -- events -------------------------------------------------------------------------------------------------------

    def on_request(self, now: float, ticket: int, request: Any) -> Actions:
        match request:
            case HasBegun(collective):
                self._has_begun(now, ticket, collective)
            case HasEnded(name):
                if name in self.under_way:
                    self._forget(self.under_way[name])
            case HasFailed(collective, error):
                self._has_failed(now, collective, error)
            case HeardBelief(name, source, belief):
                self.disagreement.heard(now, source, Believes(*name, belief, None))
        return self._take_actions()

    def on_message(self, now: float, source: int, header: Any, payload: memoryview) -> Actions:
        match header:
            case Failed():
                self._heard(now, source, header)
            case Believes():
                self.disagreement.heard(now, source, header)
            case ProgressQuery(channel, sequence):
                self.send(source, self.inquiry.report((channel, sequence)))
            case ProgressReport():
                self.inquiry.heard(now, source, header)
        return self._take_actions()

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        for collective in list(self.under_way.values()):
            for rank in left if collective.watched else ():
                # A rank that left after doing its part takes nothing with it; one that died may have left any member waiting.
                concerns = rank in self.members(collective) or collective.part_of is not None
                if concerns and (not self.roster.said_goodbye(rank) or rank in collective.waiting_for()):
                    self._has_failed(now, collective, self.roster.lost[rank])
        for vote in list(self._votes.values()):
            self._try_to_settle(now, vote)
        return self._take_actions()

    def on_timer(self, now: float, name: str) -> Actions:
        self._looks = False
        for vote in list(self._votes.values()):
            self._try_to_settle(now, vote)
        for collective in list(self.under_way.values()):
            if self.disagreement.is_open(collective.name):
                self.disagreement.try_to_conclude(now, collective)
            elif collective.watched and not collective.failing:
                self.inquiry.look_at(now, collective)
        self._keep_looking()
        return self._take_actions()

    def _take_actions(self) -> Actions:
        actions, self._actions = self._actions, []
        return actions

    def _keep_looking(self) -> None:
        if not self._looks and (self.under_way or self._votes):
            self._looks = True
            every_s = min(0.25, self.timeouts.warn_s / 4, self.timeouts.arrive_s / 4)
            self._actions.append(SetTimer(LOOK, every_s))

    def look_soon(self) -> None:
        self._looks = True
        self._actions.append(SetTimer(LOOK, 0.0))

    # -- what is known ------------------------------------------------------------------------------------------------

    def members(self, collective: Named) -> Sequence[int]:
        return self.world if collective.members is None else collective.members

    def is_gone(self, rank: int) -> bool:
        return rank in self.roster.lost or self.roster.said_goodbye(rank)

    def others(self, collective: Named) -> list[int]:
        """The members that can be asked: all others that are neither lost nor have left the job."""
        return [rank for rank in self.members(collective) if rank != self.roster.rank and not self.is_gone(rank)]

    def has_begun(self, name: Name) -> bool:
        """Whether this rank has begun it, however long ago; one that waits for its data to come from a GPU counts too."""
        return name in self.under_way or self.history.had(name) or any(pending.name == name for pending in self.queued())

    def belief(self, name: Name) -> str:
        """What this rank believes that collective is; empty if it has not begun it, or has forgotten."""
        return self.under_way[name].belief if name in self.under_way else self.history.get(name, "")

    def _lost_member(self, collective: Collective) -> PeerLost | None:
        """A member that is gone, if there is one, or has been since the group was made: its rank may be another worker's now."""
        members, roster = self.members(collective), self.roster
        for rank, lost in roster.lost.items():
            # In a round of the whole job any death counts; a worker that left in order did its part of it.
            if rank in members or (collective.part_of is not None and not roster.said_goodbye(rank)):
                return lost
        if roster.generation > collective.generation:
            reason = "another worker has had its rank since the group was made. Make the group again"
            joined = (rank for rank in members if roster.joined_in(rank) > collective.generation)
            return next((PeerLost(rank, reason) for rank in joined), None)
        return None

    # -- beginning and ending -----------------------------------------------------------------------------------------

    def _has_begun(self, now: float, ticket: int, collective: Collective) -> None:
        name = collective.name
        self.under_way[name] = collective
        self._tickets[name] = ticket
        if self._doomed or self._votes or self.roster.lost or self.roster.generation or self.disagreement.is_talked_of(name):
            self._check_beginning(now, collective)
        self._keep_looking()

    def _check_beginning(self, now: float, collective: Collective) -> None:
        """It may have failed elsewhere, be about to, or have lost a member; or others have said that they disagree."""
        for subject in self._subjects(collective):
            if subject in self._doomed:
                self._end(now, collective, self._doomed[subject])
                return
            collective.failing |= subject in self._votes
        if not collective.failing:
            lost = self._lost_member(collective) if collective.watched and len(self.members(collective)) > 1 else None
            if lost is not None:
                self.found(now, collective, lost)
            else:
                self.disagreement.has_begun(now, collective)

    def _subjects(self, collective: Named) -> list[Subject]:
        """The verdicts that end it: one about itself, and one about the round that it is part of."""
        round_of = [] if collective.part_of is None else [Subject(*collective.part_of, True)]
        return [Subject(*collective.name), *round_of]

    def _forget(self, collective: Named) -> None:
        """It has ended here. What it was is kept for a while, for peers that ask."""
        self.under_way.pop(collective.name, None)
        self._tickets.pop(collective.name, None)
        self.history[collective.name] = collective.belief
        self.disagreement.forget(collective.name)
        self.inquiry.forget(collective.name)

    def _end(self, now: float, collective: Collective, verdict: Failed) -> None:
        if collective.part_of is not None and not verdict.subject.is_round:
            self.found(now, collective, as_error(verdict))  # then all of its round fails, and it with the round
            return
        if verdict.beliefs and self.roster.rank not in verdict.beliefs:  # it has begun too late to say what it believes
            mine = (collective.belief, self.inquiry.place_in(collective.name))
            verdict = msgspec.structs.replace(verdict, beliefs={**verdict.beliefs, self.roster.rank: mine})
        ticket = self._tickets[collective.name]
        self._forget(collective)
        self._actions.append(Reply(ticket, error=as_error(verdict)))

    # -- failures found here ------------------------------------------------------------------------------------------

    def _has_failed(self, now: float, collective: Named, error: StrettoError) -> None:
        mine = self.under_way.get(collective.name)
        if mine is None:
            self.found(now, collective, error)
            self._forget(collective)
        elif isinstance(error, DigestMismatch) or self.disagreement.is_open(mine.name):
            # A member that has heard from all the others raises and leaves: it is the dispute that is to be told, not the loss.
            self.disagreement.open(now, mine)
        else:
            self.found(now, mine, error)

    def found(self, now: float, collective: Named, error: StrettoError, beliefs: Mapping[int, tuple[str, str]] | None = None) -> None:
        """Propose to all members that it fails, or to all of the job that its round does."""
        subject = self._subjects(collective)[-1]
        failed = as_failed(subject, None if subject.is_round else self.as_told(self.members(collective)), error)
        if beliefs and not subject.is_round:
            failed = msgspec.structs.replace(failed, kind="mismatch", text="", beliefs=dict(beliefs))
        self._propose(now, failed)

    def fail_apart(self, now: float, streams: Mapping[Name, Sequence[int]], error: StrettoError) -> None:
        """Ranks are in these collectives of different streams, each with its members, and will never meet."""
        for name, members in streams.items():
            if name in self.under_way:
                self.found(now, self.under_way[name], error)
            else:
                self._propose(now, as_failed(Subject(*name), self.as_told(members), error))

    def as_told(self, members: Sequence[int] | None) -> list[int] | None:
        return None if members is None or len(members) == len(self.world) else list(members)

    # -- settling on a verdict ----------------------------------------------------------------------------------------

    def _propose(self, now: float, failed: Failed) -> None:
        if failed.subject not in self._votes and failed.subject not in self._doomed:
            self.tell(self._voters(failed), failed)
            self._open(now, failed)

    def _heard(self, now: float, source: int, failed: Failed) -> None:
        subject, voters, known = failed.subject, self._voters(failed), {self.roster.rank, *self.roster.peers}
        if not {source, self.roster.rank} <= set(voters) <= known | set(self.world) or subject in self._doomed:
            return
        if subject not in self._votes:
            proposal = msgspec.structs.replace(failed, settled=False)
            self.tell([rank for rank in voters if rank < self.roster.rank and rank != source], proposal)
            self._open(now, proposal)
        if failed.settled and source < self.roster.rank and subject in self._votes:
            self._votes[subject].verdicts[source] = failed
            self._try_to_settle(now, self._votes[subject])

    def _voters(self, failed: Failed) -> Sequence[int]:
        return self.world if failed.members is None else failed.members

    def _open(self, now: float, proposal: Failed) -> None:
        vote = self._votes[proposal.subject] = Vote(proposal, now)
        for collective in self._affected(proposal.subject):
            collective.failing = True
        self._keep_looking()
        self._try_to_settle(now, vote)

    def _try_to_settle(self, now: float, vote: Vote) -> None:
        subject = vote.proposal.subject
        if subject not in self._votes or any(self._is_awaited(now, vote, rank) for rank in self._voters(vote.proposal)):
            return
        del self._votes[subject]
        verdict = vote.verdicts[max(vote.verdicts)] if vote.verdicts else vote.proposal
        verdict = self._doomed[subject] = msgspec.structs.replace(verdict, settled=True)
        self.tell([rank for rank in self._voters(verdict) if rank > self.roster.rank], verdict)
        self._carry_out(now, verdict)

    def _is_awaited(self, now: float, vote: Vote, rank: int) -> bool:
        if rank >= self.roster.rank or rank in vote.verdicts or self.is_gone(rank):
            return False
        asked_at = self.inquiry.unanswered_since(vote.proposal.subject.name, rank)
        return not self.inquiry.is_over(now, vote.since if asked_at is None else min(asked_at, vote.since))

    def _affected(self, subject: Subject) -> list[Collective]:
        return [collective for collective in self.under_way.values() if subject in self._subjects(collective)]

    def _carry_out(self, now: float, verdict: Failed) -> None:
        subject = verdict.subject
        affected = self._affected(subject)
        for collective in affected:
            self._end(now, collective, verdict)
        if subject.is_round:
            return
        self.disagreement.forget(subject.name)
        if verdict.kind == "apart" and (affected or not self.history.had(subject.name)):
            self._fail_later_ones(now, verdict)
        elif verdict.beliefs and not affected and subject.name in self.history:
            self.disagreement.say_that_it_had_ended(verdict)

    def _fail_later_ones(self, now: float, verdict: Failed) -> None:
        """Ranks that are apart in one collective of a channel are so in all later ones that are under way: the buckets of one
        round leave together, and whoever gets the error waits for the rest of them. Each member adds what is under way there,
        but not where the first has ended: that rank may have gone on by then."""
        channel, sequence, _ = verdict.subject
        for later in (*self.under_way.values(), *self.queued()):
            if later.name[0] == channel and is_later(later.name[1], sequence):
                self.found(now, later, as_error(verdict))

    # -- saying -------------------------------------------------------------------------------------------------------

    def send(self, to: int, header: Any) -> None:
        self._actions.append(SendMessage(to, header))

    def tell(self, members: Iterable[int], header: Any) -> None:
        for rank in members:
            if rank != self.roster.rank and not self.is_gone(rank):
                self.send(rank, header)
