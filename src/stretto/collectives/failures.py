"""How all members of a collective that fails come to the same error: a protocol machine, without input or output.

It is told what happens to the collectives of this rank (`HasBegun`, `HasEnded`, `HasFailed`), what peers say and who is lost.
When a collective is to fail, here and at all other members, it answers the request `HasBegun` with the error.

    peer lost               a collective fails with `PeerLost(rank)` if that peer is a member of it; others go on
    transfer failed         what the wire says; where the two sides mean different collectives: a dispute (`disagreement.py`)
    nothing comes           all members are asked; the one that has not begun is blamed: `WireTimeout(rank)` (`inquiry.py`)
    streams never meet      `RankMismatch` for a collective and all later ones of its channel that are under way (`inquiry.py`)

Members may find different failures at the same time: two peers die, and each is missed first by another member. So nobody ends a
collective by itself. Whoever finds a failure proposes a verdict to all members, and these settle on one in the order of their
ranks ("hierarchical consensus" in Guerraoui and Rodrigues, Introduction to Reliable and Secure Distributed Programming, 2011):

    A member that hears of a failure asks all members of lower rank to settle, and waits until each of them has or is gone. It
    takes the verdict of the highest of them, or else the one that it has heard of, and tells all members of higher rank.

    Agreement. Let c be the lowest member that stays alive. Every member above c waits for it, and takes its verdict or that of a
    member between the two, which by induction is the same. Those below c die.

Members that have not begun the collective take part too: the verdict ends it when they do. So do those where it has ended. It
costs a message or two between each two members and, one after the other, as many hops as there are members: in failures alone.

What it needs: `left` means dead, messages are not lost, and a peer that lives answers within `ASK_S`, and `ASK_S` more for each
member below it, which it may itself be waiting for. Where that does not hold (a cut link, a process that holds its interpreter)
members may blame different ranks; all of them end nevertheless.

Some collectives are *part of* a round of the whole job, although each has few members: workers of a host combine, then hosts do.
There the loss of any worker leaves all others waiting, one for the other. So such a collective does not fail by itself: whichever
part fails, on any rank, for whatever reason, all ranks of the job settle that the round does, and every part of it that is under
way or begins later fails with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import msgspec

from stretto.collectives.disagreement import Disagreement
from stretto.collectives.inquiry import ASK_S, Inquiry
from stretto.collectives.messages import ROUNDS, Believes, Failed, FailureMessage, Name, as_error, as_failed, is_later
from stretto.collectives.recent import Recent
from stretto.collectives.request import OngoingCollective, Request
from stretto.collectives.whereabouts import Whereabouts
from stretto.errors import PeerLost, RankMismatch, StrettoError
from stretto.protocol.machine import Actions, Machine, Reply, SendMessage, SetTimer
from stretto.timeouts import Timeouts
from stretto.wire.base import DigestMismatch

HISTORY: Final = 512  # how many ended collectives, and verdicts, are remembered
CHANNELS: Final = 1024  # for how many channels it is remembered how far they had come before these
Beliefs = dict[int, tuple[str, str]]


class Roster(Protocol):
    """The workers of the job, as its `Wire` knows them. The machine only reads it."""

    rank: int
    world_size: int
    lost: dict[int, PeerLost]
    generation: int

    @property
    def peers(self) -> list[int]: ...
    def said_goodbye(self, rank: int) -> bool: ...
    def joined_in(self, rank: int) -> int: ...


class HasBegun(NamedTuple):
    collective: OngoingCollective


class HasEnded(NamedTuple):
    collective: OngoingCollective


class HasFailed(NamedTuple):
    collective: Request
    error: StrettoError


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
        channel, sequence = key
        if channel not in self._forgotten or is_later(sequence, self._forgotten[channel]):
            self._forgotten[channel] = sequence

    def had(self, name: Name) -> bool:
        """Whether it has ended, however long ago."""
        last = self._forgotten.get(name[0])
        return name in self or (last is not None and not is_later(name[1], last))


class FailureAgreement(Machine):
    """See the module's text. `queued`: what was started and has not begun, where a thread of ours begins it later."""

    header_type = FailureMessage

    def __init__(self, roster: Roster, timeouts: Timeouts, whereabouts: Whereabouts) -> None:
        self.roster = roster
        self.timeouts = timeouts
        self.world = range(roster.world_size)
        self.queued: Callable[[], Sequence[Request]] = tuple
        self.under_way: dict[Name, OngoingCollective] = {}
        self.history = History()
        self.disagreement = Disagreement(self)
        self.inquiry = Inquiry(self, whereabouts)
        self._votes: dict[Name, Vote] = {}
        self._doomed: Recent[Name, Failed] = Recent(HISTORY)  # settled; it may begin here later, or be proposed again
        self._actions: list[SendMessage | SetTimer | Reply] = []
        self._looks = False  # the timer is set

    # -- events -------------------------------------------------------------------------------------------------------

    def on_request(self, now: float, ticket: int, request: HasBegun | HasEnded | HasFailed) -> Actions:
        if isinstance(request, HasBegun):
            collective = self.under_way[request.collective.name] = request.collective
            collective.ticket = ticket
            self._check_beginning(now, collective)
        elif isinstance(request, HasEnded):
            self._forget(request.collective)
        else:
            self._has_failed(now, request.collective, request.error)
        return self._take_actions()

    def on_message(self, now: float, source: int, header: FailureMessage, payload: memoryview) -> Actions:
        match header:
            case Failed():
                self._heard(now, source, header)
            case Believes():
                self.disagreement.heard(now, source, header)
            case _:
                self.inquiry.heard(now, source, header)
        return self._take_actions()

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        for collective in list(self.under_way.values()):
            for rank in left:
                # A rank that left after doing its part takes nothing with it; one that died may have left any member waiting.
                concerns = rank in self.members(collective.request) or collective.request.part_of is not None
                if concerns and (not self.roster.said_goodbye(rank) or rank in collective.waiting_for()):
                    self._has_failed(now, collective.request, self.roster.lost[rank])
        self._try_to_settle_all(now)
        return self._take_actions()

    def on_timer(self, now: float, name: str) -> Actions:
        self._looks = False
        self._try_to_settle_all(now)
        for collective in list(self.under_way.values()):
            if self.disagreement.is_open(collective.name):
                self.disagreement.try_to_conclude(now, collective)
            elif not collective.failing:
                self.inquiry.look_at(now, collective)
        return self._take_actions()

    def _take_actions(self) -> Actions:
        if not self._looks and (self.under_way or self._votes):
            self.look_in(min(0.25, self.timeouts.warn_s / 4, self.timeouts.arrive_s / 4))
        actions, self._actions = self._actions, []
        return actions

    def look_in(self, seconds: float) -> None:
        self._looks = True
        self._actions.append(SetTimer("look", seconds))

    def send(self, to: int, header: FailureMessage) -> None:
        self._actions.append(SendMessage(to, header))

    def tell(self, members: Iterable[int], header: FailureMessage) -> None:
        for rank in members:
            if rank != self.roster.rank and not self.is_gone(rank):
                self.send(rank, header)

    # -- what is known ------------------------------------------------------------------------------------------------

    def members(self, request: Request | Failed) -> Sequence[int]:
        return self.world if request.members is None else request.members

    def as_told(self, members: Sequence[int] | None) -> list[int] | None:
        """How a message names the members; None: all workers that the job was formed with."""
        return None if members is None or set(members) == set(self.world) else list(members)

    def is_gone(self, rank: int) -> bool:
        return rank in self.roster.lost or self.roster.said_goodbye(rank)

    def others(self, request: Request) -> set[int]:
        """The members that can be asked: all others that are neither lost nor have left the job."""
        return {rank for rank in self.members(request) if rank != self.roster.rank and not self.is_gone(rank)}

    def has_begun(self, name: Name) -> bool:
        """Whether this rank has begun it, however long ago; one that waits for its data to come from a GPU counts too."""
        return name in self.under_way or self.history.had(name) or any(request.name == name for request in self.queued())

    def belief(self, name: Name) -> str:
        """What this rank believes that collective is; empty if it has not begun it, or has forgotten."""
        return self.under_way[name].belief if name in self.under_way else self.history.get(name, "")

    def _subjects(self, request: Request) -> list[Name]:
        """What verdicts that end it are about: itself, or the round that it is part of."""
        part_of = request.part_of
        return [request.name] if part_of is None else [request.name, (ROUNDS | part_of[0], part_of[1])]

    # -- beginning and ending -----------------------------------------------------------------------------------------

    def _check_beginning(self, now: float, collective: OngoingCollective) -> None:
        """It may have failed elsewhere, be about to, or have lost a member; or others have said that they disagree."""
        for subject in self._subjects(collective.request) if self._doomed or self._votes else ():
            if subject in self._doomed:
                self._end(now, collective, self._doomed[subject])
                return
            collective.failing |= subject in self._votes
        lost = self._lost_member(collective.request)
        if lost is not None:
            self.found(now, collective.request, lost)
        elif not collective.failing:
            self.disagreement.has_begun(now, collective)

    def is_doomed(self, request: Request) -> bool:
        """Whether a collective that has not begun here can only fail."""
        known = any(subject in self._doomed or subject in self._votes for subject in self._subjects(request))
        return known or self._lost_member(request) is not None

    def _lost_member(self, request: Request) -> PeerLost | None:
        """A member that is gone, if there is one, or has been since the group was made: its rank may be another worker's now."""
        members, roster = self.members(request), self.roster
        if len(members) == 1:
            return None
        for rank, lost in roster.lost.items():
            # In a round of the whole job any death counts; a worker that left in order did its part of it.
            if rank in members or (request.part_of is not None and not roster.said_goodbye(rank)):
                return lost
        if roster.generation > request.generation:
            reason = "another worker has had its rank since the group was made. Make the group again"
            joined = (rank for rank in members if roster.joined_in(rank) > request.generation)
            return next((PeerLost(rank, reason) for rank in joined), None)
        return None

    def _end(self, now: float, collective: OngoingCollective, verdict: Failed) -> None:
        subject = self._subjects(collective.request)[-1]
        if subject not in self._doomed:
            collective.failing = True
            self.found(now, collective.request, as_error(verdict))  # then all of its round fails, and it with the round
            return
        verdict = self._doomed[subject]
        if verdict.beliefs and self.roster.rank not in verdict.beliefs:  # it has begun too late to say what it believes
            mine = (collective.belief, self.inquiry.place_in(collective.name))
            verdict = msgspec.structs.replace(verdict, beliefs={**verdict.beliefs, self.roster.rank: mine})
        self._actions.append(Reply(collective.ticket, error=as_error(verdict)))
        self._forget(collective)

    def _forget(self, collective: OngoingCollective | Request) -> None:
        """It has ended here. What it was is kept for a while, for peers that ask."""
        name = collective.name
        self.under_way.pop(name, None)
        self.history[name] = collective.belief
        self.disagreement.forget(name)
        self.inquiry.forget(name)

    # -- failures found here ------------------------------------------------------------------------------------------

    def _has_failed(self, now: float, request: Request, error: StrettoError) -> None:
        mine = self.under_way.get(request.name)
        if mine is None:
            self.found(now, request, error)
            self._forget(request)
        elif isinstance(error, DigestMismatch) or self.disagreement.is_open(mine.name):
            # A member that has heard from all the others raises and leaves: it is the dispute that is to be told, not the loss.
            self.disagreement.open(now, mine)
        else:
            self.found(now, request, error)

    def found(self, now: float, request: Request, error: StrettoError, beliefs: Beliefs | None = None) -> None:
        """Propose to all members that it fails, or to all of the job that its round does."""
        if request.part_of is not None:
            self.propose(now, as_failed(self._subjects(request)[-1], None, error))
        else:
            failed = as_failed(request.name, self.as_told(request.members), error)
            self.propose(now, msgspec.structs.replace(failed, beliefs=beliefs or {}))

    # -- settling on a verdict ----------------------------------------------------------------------------------------

    def propose(self, now: float, failed: Failed) -> None:
        """Tell all members of a failure, unless they have been told of one."""
        if failed.name not in self._votes and failed.name not in self._doomed:
            self.tell(self.members(failed), failed)
            self._open(now, failed)

    def _heard(self, now: float, source: int, failed: Failed) -> None:
        subject, members, me = failed.name, self.members(failed), self.roster.rank
        if subject in self._doomed or source not in members or not self._is_about_us(failed):
            return
        if subject not in self._votes:
            proposal = msgspec.structs.replace(failed, settled=False)
            self.tell([rank for rank in members if rank < me and rank != source], proposal)
            self._open(now, proposal)
        if failed.settled and source < me and subject in self._votes:
            self._votes[subject].verdicts[source] = failed
            self._try_to_settle(now, self._votes[subject])

    def _is_about_us(self, failed: Failed) -> bool:
        """Whether this rank is a member, and all members are ranks that there are: it was written by a peer."""
        return {self.roster.rank} <= set(self.members(failed)) <= {*self.world, *self.roster.peers}

    def _open(self, now: float, proposal: Failed) -> None:
        vote = self._votes[proposal.name] = Vote(proposal, now)
        for collective in self._affected(proposal):
            collective.failing = True
        self._try_to_settle(now, vote)

    def _try_to_settle_all(self, now: float) -> None:
        for vote in list(self._votes.values()):
            self._try_to_settle(now, vote)

    def _try_to_settle(self, now: float, vote: Vote) -> None:
        subject, members = vote.proposal.name, self.members(vote.proposal)
        if subject not in self._votes or any(self._is_awaited(now, vote, rank) for rank in members):
            return
        del self._votes[subject]
        verdict = vote.verdicts[max(vote.verdicts)] if vote.verdicts else vote.proposal
        verdict = self._doomed[subject] = msgspec.structs.replace(verdict, settled=True)
        self.tell([rank for rank in members if rank > self.roster.rank], verdict)
        self._carry_out(now, verdict)

    def _is_awaited(self, now: float, vote: Vote, rank: int) -> bool:
        if rank >= self.roster.rank or rank in vote.verdicts or self.is_gone(rank):
            return False
        # A member that waits for a mute rank settles `ASK_S` late. Members of higher rank must wait for it that much longer, or
        # they would settle without it.
        below = sum(other < rank and not self.is_gone(other) for other in self.members(vote.proposal))
        since = self.inquiry.unanswered_since(vote.proposal.name, rank, vote.since)
        return not self.inquiry.is_over(now, since + below * ASK_S)

    def _affected(self, failed: Failed) -> list[OngoingCollective]:
        return [collective for collective in self.under_way.values() if failed.name in self._subjects(collective.request)]

    def _carry_out(self, now: float, verdict: Failed) -> None:
        affected = self._affected(verdict)
        for collective in affected:
            self._end(now, collective, verdict)
        self.disagreement.forget(verdict.name)
        if verdict.beliefs:
            if not affected and verdict.name in self.history:
                self.disagreement.say_that_it_had_ended(verdict)
        elif verdict.kind == RankMismatch.__name__ and (affected or not self.history.had(verdict.name)):
            self._fail_later_ones(now, verdict)

    def _fail_later_ones(self, now: float, verdict: Failed) -> None:
        """Ranks that are apart in one collective of a channel are so in all later ones that are under way: the buckets of one
        round leave together, and whoever gets the error waits for the rest of them. Each member adds what is under way there,
        but not where the first has ended: that rank may have gone on by then."""
        for later in (*(collective.request for collective in self.under_way.values()), *self.queued()):
            if later.name[0] == verdict.channel and is_later(later.name[1], verdict.sequence):
                self.found(now, later, as_error(verdict))
