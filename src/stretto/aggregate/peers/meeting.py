"""The living workers agree on who takes part, and take the mean of what they have: all of them get the same bits, or an error.

Every worker has a vector, and asks for its k-th meeting. Somebody may die at any moment; whoever lives goes on.

    everybody, to all       Present(k, what)              I have come, with a vector of that kind
    the oldest that lives   Propose(k, a, members)        all that live have come: attempt a is among these
    members, to it          Promised(k, a, prepared)      I take part in no earlier attempt any more; this one I could finish
    it, to members          Go(k, a)                      nobody can have finished an earlier one
    members                 PartOf, PartOfResult          each adds up one range, in the order of ranks, and hands it to all
    members, to it          Prepared(k, a)                I have the whole result
    it, then all to all     Commit(k, a)                  all have: take it

With "copy" the vector is that of one worker (the first member, or one that is named) instead of the mean of all.

Who dies before it was prepared leaves an attempt that cannot end, and the next one is without it. Who dies after that, the leader
too, leaves one that all others can finish: the next leader learns it from their promises, and commits that attempt if all living
members of it are prepared, or if somebody has finished it already. Otherwise nobody has and nobody can, since a member that has
promised a later attempt is not prepared for an earlier one afterwards. That is Skeen's three-phase commit with a leader that is
replaced as in Paxos.

Who leads: the worker that joined first, of these the one of the lowest rank. While two take themselves for it (they have heard of
a death at different times), the higher attempt counts; attempts of different leaders have different numbers.

A worker that has come back is expected from the meeting on that it has named (`TakePart`), and from when the leader hears of it.
A meeting that has been held without it when it gets there leaves it what it has (`Met.members` is then its own rank).

Deadline: who has waited for others for `patience_s`, and was not called to an attempt, refuses the meeting, and it fails for
all: with `MeetingLapsed`, which names those that have not come. After that only a death can delay it, and that is found out.

Cost:      of m elements n workers send 2 m (n - 1)/n each, and 4 n + n^2 short messages together; up to 4 m of memory.
Invariant: two workers that finish meeting k as members of it have the same bits and the same members. If one of them fails, no
           other member that lives finishes it.
Needs:     order; `left` means dead (or quit). Parted by silence, each side has its own meetings.
Reference: Skeen, "Nonblocking commit protocols", SIGMOD 1981; Gray and Lamport, "Consensus on transaction commit", 2006.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from stretto.aggregate.peers.attempt_sum import AttemptSum, Vector
from stretto.aggregate.peers.meeting_messages import (
    Commit,
    Entered,
    FromMember,
    Go,
    MeetingRefused,
    Over,
    PartOf,
    PartOfResult,
    Prepared,
    Present,
    Promised,
    Propose,
)
from stretto.errors import StrettoError
from stretto.launching.peers import ranks_text
from stretto.protocol.machine import Actions, Machine, Reply, SendMessage, SetTimer

log = logging.getLogger("stretto.peers")


class Meet(NamedTuple):
    """Come to the next meeting. `vector` must not change until the reply, a `Met`. `copy_of`: None for the mean; a rank, or -1
    for the first member."""

    vector: Vector
    patience_s: float
    copy_of: int | None = None
    label: str = ""


class TakePart(NamedTuple):
    """This worker has come back, and has the next meeting in this number."""

    meeting: int


class CountMeetings(NamedTuple):
    """The reply: how many this worker has come to, and whether it waits in the last one."""


class Met(NamedTuple):
    members: list[int]
    vector: Vector


class MeetingLapsed(StrettoError):
    """The meeting was not held, because somebody that lives has not come in time; that one gets this error too. The next one may
    be held."""


class Meeting(NamedTuple):
    """The one that this worker waits in."""

    number: int
    ticket: int
    call: Meet
    what: str


class MeetingMachine(Machine):
    """See the module's text. `life`: the generation in which this worker has joined. `names`: the ranks to call the workers by in
    messages, where these are not `range(size)`."""

    header_type = FromMember

    def __init__(self, rank: int, size: int, life: int = 0, names: Sequence[int] | None = None) -> None:
        self._rank, self._size = rank, size
        self._names = range(size) if names is None else names
        self._lives = {rank: life}
        self._here = set(range(size)) - {rank}
        self._waiting_room: dict[int, int] = {}  # who has come back -> from which meeting on it takes part
        self._not_entered: set[int] = set()
        self._held = 0  # the last meeting that is over, here
        self._held_in = 0  # and in which attempt
        self._refusals: dict[int, MeetingRefused] = {}  # of the last meeting, and of those that this worker has not come to yet
        self._present: dict[int, Present] = {}  # rank -> the last one of it
        self._begin_anew(None)

    def _begin_anew(self, meeting: Meeting | None) -> None:
        self._meeting = meeting
        self._promised = 0  # the highest attempt that this worker has agreed to
        self._leader = -1  # whose it is
        self._exchange: AttemptSum | None = None  # of that attempt
        self._gone = False  # it has begun
        self._done: tuple[int, AttemptSum] | None = None  # the attempt of which this worker has the result
        self._proposed: list[int] = []  # this worker leads: the members, and what they have answered
        self._answers: dict[int, Promised | Over | MeetingRefused] = {}
        self._ready: set[int] = set()

    # -- requests -----------------------------------------------------------------------------------------------------

    def on_request(self, now: float, ticket: int, request: Any) -> Actions:
        if isinstance(request, CountMeetings):
            return [Reply(ticket, (self._held + (self._meeting is not None), self._meeting is not None))]
        if isinstance(request, TakePart):
            self._held = max(self._held, request.meeting - 1)
            return [*self._to_all(Entered(request.meeting)), Reply(ticket)]
        assert isinstance(request, Meet)
        if self._meeting is not None:
            raise StrettoError("a worker is in one meeting at a time: wait for the reply of the last one")
        kind = "mean" if request.copy_of is None else f"copy of {request.copy_of}"
        what = f"{kind} of {request.vector.dtype}[{request.vector.size}]{request.label}"
        number = self._held + 1
        if number in self._refusals:  # by others, who have not waited for this worker
            return self._fail(self._refusals[number], ticket)
        self._begin_anew(Meeting(number, ticket, request, what))
        return [*self._to_all(Present(number, what)), SetTimer("patience", request.patience_s), *self._lead()]

    def _to_all(self, header: FromMember) -> list[Any]:
        return [SendMessage(to, header) for to in sorted(self._here)]

    # -- who is here --------------------------------------------------------------------------------------------------

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        actions: list[Any] = []
        for rank in left:
            self._here.discard(rank)
            self._not_entered.discard(rank)
            self._waiting_room.pop(rank, None)
            self._present.pop(rank, None)
            self._answers.pop(rank, None)
        for rank in joined:
            self._here.add(rank)
            self._lives[rank] = generation
            if generation > self._lives[self._rank]:
                self._not_entered.add(rank)
            if self._meeting is not None:
                actions.append(SendMessage(rank, Present(self._meeting.number, self._meeting.what)))
        return [*actions, *self._lead()]

    def _expected(self, meeting: int) -> list[int]:
        """Who is to come to that one, but for this worker."""
        return [rank for rank in self._here if rank not in self._not_entered and self._waiting_room.get(rank, 0) <= meeting]

    def _is_leader(self, expected: Sequence[int]) -> bool:
        oldest = min((*expected, self._rank), key=lambda rank: (self._lives.get(rank, 0), rank))
        return oldest == self._rank

    def _lead(self) -> list[Any]:
        """If this worker is the one to, and all have come: an attempt among those that live now."""
        if self._meeting is None:
            return []
        expected = self._expected(self._meeting.number)
        members = sorted((*expected, self._rank))
        if not self._is_leader(expected) or members == self._proposed:
            return []
        here = {rank: self._present[rank] for rank in expected if rank in self._present}
        here = {rank: present for rank, present in here.items() if present.meeting >= self._meeting.number}
        if len(here) < len(expected):
            if not self._promised:
                return []
            # It has begun, so all that are here from the beginning have come; who has come back since is not waited for.
            members = sorted((*here, self._rank))
            if members == self._proposed:
                return []
        for rank, present in sorted(here.items()):
            if present.meeting == self._meeting.number and present.what != self._meeting.what:
                return self._refuse(
                    f"rank {self._names[self._rank]} has come for the {self._meeting.what}, and rank {self._names[rank]} for the "
                    f"{present.what}.\n"
                    f"Call it on all workers at the same place of the program, with the same model.",
                    final=True,
                )
        attempt = (self._promised // self._size + 1) * self._size + self._rank
        self._proposed, self._answers, self._ready = members, {}, set()
        propose = Propose(self._meeting.number, attempt, members)
        return [*(SendMessage(rank, propose) for rank in members if rank != self._rank), *self._propose(self._rank, propose)]

    # -- events -------------------------------------------------------------------------------------------------------

    def on_message(self, now: float, source: int, header: FromMember, payload: memoryview) -> Actions:
        if isinstance(header, Entered):
            self._not_entered.discard(source)
            self._waiting_room[source] = header.meeting
            return self._lead()
        if isinstance(header, MeetingRefused):
            return self._hear_refusal(source, header)
        if (refusal := self._refusals.get(header.meeting)) is not None:
            return [SendMessage(source, refusal)] if isinstance(header, (Present, Propose)) else []
        if header.meeting <= self._held:
            return self._of_the_past(source, header)
        if isinstance(header, Present):
            self._not_entered.discard(source)
            self._present[source] = header
            return self._lead()
        if self._meeting is None or self._meeting.number != header.meeting:
            return []
        match header:
            case Propose():
                return self._propose(source, header)
            case Promised(attempt=attempt) if attempt == self._promised and source in self._proposed:
                return self._answered(source, header)
            case Over():
                return self._is_over(source, header)
            case Go(attempt=attempt) if attempt == self._promised and source == self._leader:
                return self._go()
            case PartOf(attempt=attempt, start=start) if attempt == self._promised:
                return self._take_part(source, start, payload)
            case PartOfResult(attempt=attempt, start=start) if attempt == self._promised:
                return self._take_result(source, start, payload)
            case Prepared(attempt=attempt) if attempt == self._promised and source in self._proposed:
                return self._is_prepared(source)
            case Commit(attempt=attempt) if self._done is not None and self._done[0] == attempt:
                return self._commit(attempt)
        return []

    def _of_the_past(self, source: int, header: FromMember) -> list[Any]:
        if isinstance(header, (Present, Propose)):
            return [SendMessage(source, Over(header.meeting, self._held_in if header.meeting == self._held else 0))]
        return []

    def on_timer(self, now: float, name: str) -> Actions:
        if self._meeting is None or self._promised:
            return []  # once all have come only a death can delay it, and that is found out
        late = [rank for rank in self._expected(self._meeting.number) if not self._has_come(rank)]
        who = ranks_text(self._names[rank] for rank in sorted(late)) if late else "the leader"
        return self._refuse(
            f"rank {self._names[self._rank]} has waited for {self._meeting.call.patience_s:g} s for the {self._meeting.what}, "
            f"and {who} did not come. All workers that live have to call it.",
            late=True,
        )

    def _has_come(self, rank: int) -> bool:
        return rank in self._present and self._meeting is not None and self._present[rank].meeting >= self._meeting.number

    # -- an attempt ---------------------------------------------------------------------------------------------------

    def _propose(self, source: int, header: Propose) -> list[Any]:
        assert self._meeting is not None
        if header.attempt <= self._promised or self._rank not in header.members:
            return []
        call = self._meeting.call
        self._promised, self._leader, self._gone = header.attempt, source, False
        if source != self._rank:
            self._proposed = []  # somebody else leads
        for rank in header.members:  # whose own word may still be on its way to this worker
            if not self._has_come(rank):
                self._present[rank] = Present(header.meeting, self._meeting.what)
        named = call.copy_of if call.copy_of is not None and call.copy_of >= 0 else None
        if named is not None and named not in header.members:
            self._exchange = None
            refusal = MeetingRefused(
                header.meeting, f"rank {self._names[named]}, whose values were asked for ({self._meeting.what}), has died or left"
            )
            return self._to(source, refusal)
        self._exchange = AttemptSum(call.vector, header.members, self._rank, call.copy_of)
        done, members = (0, list[int]()) if self._done is None else (self._done[0], self._done[1].members)
        return self._to(source, Promised(header.meeting, header.attempt, done, members))

    def _to(self, rank: int, header: Promised | Prepared | MeetingRefused) -> list[Any]:
        if rank != self._rank:
            return [SendMessage(rank, header)]
        return self._is_prepared(rank) if isinstance(header, Prepared) else self._answered(rank, header)

    def _answered(self, source: int, answer: Promised | Over | MeetingRefused) -> list[Any]:
        """This worker leads. When all have answered it is known what can have been finished."""
        self._answers[source] = answer
        if self._meeting is None or not self._proposed or not self._answers.keys() >= set(self._proposed):
            return []
        answers = self._answers
        attempts = {answer.attempt for answer in answers.values() if isinstance(answer, Over) and answer.attempt}
        prepared = {rank: answer for rank, answer in answers.items() if isinstance(answer, Promised) and answer.prepared}
        for attempt in {answer.prepared for answer in prepared.values()}:
            members = next(answer.members for answer in prepared.values() if answer.prepared == attempt)
            if all(rank in prepared and prepared[rank].prepared == attempt for rank in members if rank in self._proposed):
                attempts.add(attempt)
        if attempts:
            return self._finish(max(attempts))
        for answer in answers.values():
            if isinstance(answer, MeetingRefused):
                return self._refuse(answer.reason, late=answer.late, final=True)
        if any(isinstance(answer, Over) for answer in answers.values()):
            return self._finish(0)
        go = Go(self._meeting.number, self._promised)
        return [*(SendMessage(rank, go) for rank in self._proposed if rank != self._rank), *self._go()]

    def _finish(self, attempt: int) -> list[Any]:
        """It is over, in that attempt; who was no member of it keeps what it has."""
        assert self._meeting is not None
        over = Over(self._meeting.number, attempt)
        told = [SendMessage(rank, over) for rank in self._proposed if rank != self._rank]
        done = self._done is not None and self._done[0] == attempt
        return [*told, *(self._commit(attempt) if done else self._keep_own())]

    def _go(self) -> list[Any]:
        assert self._meeting is not None and self._exchange is not None
        self._gone, self._done = True, None
        exchange, actions = self._exchange, list[Any]()
        if self._rank in exchange.contributors:
            for member in exchange.members:
                for start, stop in exchange.pieces_of(member):
                    values = exchange.vector[start:stop]
                    if member == self._rank:
                        actions += self._add_part(self._rank, start, values)
                    else:
                        header = PartOf(self._meeting.number, self._promised, start)
                        actions.append(SendMessage(member, header, values.data))
        return [*actions, *self._look_if_complete()]

    def _take_part(self, source: int, start: int, payload: memoryview) -> list[Any]:
        if self._exchange is None or payload.nbytes % self._exchange.vector.itemsize:
            return []
        values = np.frombuffer(bytes(payload), self._exchange.vector.dtype)
        return [*self._add_part(source, start, values), *self._look_if_complete()]

    def _add_part(self, source: int, start: int, values: Vector) -> list[Any]:
        assert self._meeting is not None and self._exchange is not None
        if not self._exchange.take_part(source, start, values):
            return []
        total = self._exchange.add_up(start).data
        header = PartOfResult(self._meeting.number, self._promised, start)
        return [SendMessage(member, header, total) for member in self._exchange.members if member != self._rank]

    def _take_result(self, source: int, start: int, payload: memoryview) -> list[Any]:
        exchange = self._exchange
        if exchange is None or source not in exchange.members or payload.nbytes % exchange.vector.itemsize:
            return []
        values = np.frombuffer(payload, exchange.vector.dtype)
        if exchange.stop_of(source, start) != start + values.size:
            return []
        exchange.fill(start, values)
        return self._look_if_complete()

    def _look_if_complete(self) -> list[Any]:
        if self._meeting is None or self._exchange is None or self._exchange.missing or not self._gone or self._done is not None:
            return []
        self._done = self._promised, self._exchange
        return self._to(self._leader, Prepared(self._meeting.number, self._promised))

    def _is_prepared(self, source: int) -> list[Any]:
        self._ready.add(source)
        return self._commit(self._promised) if self._proposed and self._ready >= set(self._proposed) else []

    # -- the end of a meeting -----------------------------------------------------------------------------------------

    def _commit(self, attempt: int) -> list[Any]:
        """Everybody tells everybody: who hears of it need not hear of it from a leader that has died meanwhile."""
        assert self._meeting is not None and self._done is not None
        meeting, (_, exchange) = self._meeting, self._done
        self._close(meeting.number, attempt)
        told = self._to_all(Commit(meeting.number, attempt))
        return [*told, SetTimer("patience", None), Reply(meeting.ticket, Met(exchange.members, exchange.result))]

    def _close(self, meeting: int, attempt: int) -> None:
        """Or has failed: this worker is done with it."""
        self._held, self._held_in = meeting, attempt
        self._refusals = {number: refusal for number, refusal in self._refusals.items() if number >= meeting}
        self._begin_anew(None)

    def _is_over(self, source: int, header: Over) -> list[Any]:
        if self._done is not None and header.attempt == self._done[0]:
            return self._commit(header.attempt)
        if source in self._proposed:
            return self._answered(source, header)
        return self._keep_own() if not self._promised or source == self._leader else []

    def _keep_own(self) -> list[Any]:
        """It has been held without this worker."""
        assert self._meeting is not None
        meeting = self._meeting
        log.warning("rank %d has come too late for the %s: the others have had it without", self._names[self._rank], meeting.what)
        self._close(meeting.number, 0)
        own = Met([self._rank], meeting.call.vector.copy())
        return [SetTimer("patience", None), Reply(meeting.ticket, own)]

    def _hear_refusal(self, source: int, header: MeetingRefused) -> list[Any]:
        if header.meeting <= self._held:
            return []
        if self._meeting is None or header.meeting != self._meeting.number:
            self._refusals[header.meeting] = msgspec.structs.replace(header, final=False)
            return []
        if self._proposed:  # this worker leads, and finds out whether anybody can have finished it
            if source not in self._proposed:
                return []
            if not self._gone:
                return self._answered(source, header)
            self._proposed = []
            return self._lead()
        if self._done is None or (header.final and source == self._leader):
            return self._refuse(header.reason, late=header.late, final=header.final)
        return []

    def _refuse(self, reason: str, *, late: bool = False, final: bool = False) -> list[Any]:
        assert self._meeting is not None
        meeting = self._meeting
        refusal = self._refusals[meeting.number] = MeetingRefused(meeting.number, reason, late)
        told = self._to_all(msgspec.structs.replace(refusal, final=final))
        return [*told, SetTimer("patience", None), *self._fail(refusal, meeting.ticket)]

    def _fail(self, refusal: MeetingRefused, ticket: int) -> list[Any]:
        self._close(self._held + 1, 0)
        return [Reply(ticket, error=(MeetingLapsed if refusal.late else StrettoError)(refusal.reason))]
