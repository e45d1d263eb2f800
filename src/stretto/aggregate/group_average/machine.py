"""The machine of WAGMA: groups average their models in rounds, and nobody's computation is waited for but now and then.

    running = loop.start(WaitAvoidingGroups(rank, P, group_size=4, global_every=10, model=x), channel)
    average = running.request(Contribute(x)).result(timeout_s)              a `RoundAverage`, for the rule of the value to use
    running.request(Settle()).result(timeout_s)                             nothing is under way here
    running.request(EnterRounds()).result(timeout_s)                              before all that, in a worker that has come back

Round t is idle here, or active. A worker whose program contributes a model while its round is idle activates it: everybody is
told, along a tree, in which nobody tells of the same round twice. Who is told begins as well, with the model that its program
has contributed last, though that be computing; where the program has contributed in time, that is what it has just computed.
Both then form the sum of their group (`butterfly.py`). So a round takes what messages take.

    on time      the program has contributed to this round: it gets the sum when the round ends, and its model is in it
    late         rounds have ended without the program: it gets the sum of the last of them, at once, and its model is not in it
    almost late  the round was active already: it gets the sum when the round ends, and its model is not in it

Rounds come in the order of their numbers, for all: one that begins while the last is active is begun when that has ended. Who
is late takes up the round that has come meanwhile, and does not make up for those that it has missed.

Every `global_every`-th round is of all workers, and does not begin without the program: there everybody waits for everybody, and
all end with the same bits. A program that has missed k rounds with its last step would be waited for there if fewer than k are
left; it waits itself instead, and begins no step before (`WaitsForAll`; where all wait so, they go to that round right away).
So a worker that is always slow holds up nobody, and no model is older than global_every - 1 rounds.

A program that has settled (it saves, or waits in `stretto.consensus` for those that take longer) is not waited for: its last
model goes into global rounds too, and it keeps that model. It says so by a `WaitsForAll` that never ends.

That all have the same bits needs agreement, for somebody may die and be in some of the sums only. Each tells all of whose models
its sum is made. If these are the same for all that live, the attempt counts; otherwise there is another one. An attempt may
count for a worker that another one, which saw a death later, gives up: there everybody that lives is known to have had the same
sum, so whoever is asked for a further attempt says that this one counts, and those who ask still have its result.

A worker that comes back asks one of the others for its round, takes part from the next one on, and tells everybody. Whoever has
not heard of it goes on without it: in groups that does no harm, and in a global round those that have heard try again until all
have.

Always holds: a model that was handed over is never written to; a sum is of whole models, each in it once; at most one round is
              active, and one more known to have begun; after a global round the same bits, for all that live.
Memory:       the sums of the active round and of those that others have yet to ask for, no more than `MAX_KEPT`. Nothing is sent
              that was not asked for.
Relies on:    messages that come once and in order, and `left` meaning dead. A peer whose process stands still is waited for until
              the wire gives it up.
Departs:      from the paper in the rounds that a late worker does not make up for; in waiting before the global round instead of
              being waited for; in asking for sums, instead of sending them, so that somebody else can be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from stretto.aggregate.group_average.butterfly import ButterflySum, RoundName, Values
from stretto.aggregate.group_average.cube import Cube
from stretto.aggregate.group_average.messages import (
    ActivateRound,
    AskRound,
    NoSum,
    PartialSum,
    RoundIs,
    SumCommitted,
    SumFinished,
    TakesPart,
    ToGroupMember,
    WaitsForAll,
    WantSum,
    bits_of,
    ranks_of,
)
from stretto.errors import FrameError, StrettoError
from stretto.protocol.machine import Actions, Machine, Payload, Reply, SendMessage, SetTimer

MAX_KEPT: Final = 8  # rounds whose sums are kept for those that have yet to ask
FOREVER: Final = 1 << 62  # no round has that number
ASK_S: Final = 1.0  # for how long `Settle` waits for them: who has heard of other deaths and returns may have asked others
PATIENCE: Final = "patience"
SETTLING: Final = "settling"


class Contribute(NamedTuple):
    """A step has ended with this model. Nobody may write to it any more. The reply is a `RoundAverage`.

    `in_groups`: what goes into groups instead, the model from before the step, say."""

    model: Values
    in_groups: Values | None = None


class EnterRounds(NamedTuple):
    """For a worker that has come back. The reply is the round from which on it takes part."""


class Replace(NamedTuple):
    """Give others this model, until the next is contributed. Nobody may write to it any more."""

    model: Values


class Settle(NamedTuple):
    """The reply is the number of the next round, when none is active and the others have all that they need of the last. From
    then until `Resume`, or the next `Contribute`, the program does not step: nobody waits for it, in global rounds either."""


class Resume(NamedTuple):
    """The program will step again: global rounds wait for it as before."""


class RoundAverage(NamedTuple):
    """What has come of a round, the last one that has ended."""

    total: Values  # the sum of the models of a group; in a global round their mean. Not to be written to
    contributors: frozenset[int]
    is_included: bool  # whether what the program has just contributed is in it
    is_global: bool
    round: int
    missed: int  # rounds that have ended while the program computed, with its model of before


class Caller(NamedTuple):
    """The program waits for the end of a round."""

    ticket: int
    round: int
    missed: int


def nothing_counted(peer: int, sent: int, received: int) -> None:
    """Where nobody keeps books."""


class WaitAvoidingGroups(Machine):
    """See the module's text. All workers begin with the same `model` and `first_round`; `patience_s`: for how long a round that
    others have begun waits for this worker's program. `count` is told of the bytes of models."""

    header_type = ToGroupMember

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        group_size: int,
        global_every: int,
        model: Values,
        first_round: int = 1,
        patience_s: float = 0.0,
        count: Callable[[int, int, int], None] = nothing_counted,
    ) -> None:
        self.rank, self._group_size = rank, group_size
        self._global_every, self._patience_s, self._count = global_every, patience_s, count
        self._cube = Cube(world_size)
        self._others = set(range(world_size)) - {rank}  # that take part, as far as is known
        self._from_round: dict[int, int] = {}  # who has come back takes part from here on
        self._entering: tuple[int, set[int]] | None = None  # ticket, and who has yet to be asked; the lowest of them is
        self.round = self._began = first_round  # the one that is active, or the next; the one for which the program computes
        self.attempt = 0
        self.had_to_try_again = False  # in some global round
        self._active: ButterflySum | None = None
        self._kept: dict[RoundName, ButterflySum] = {}
        self._wanted: dict[tuple[int, int], RoundName] = {}  # (rank, stage) -> of the one round in which it can be
        self._called = 0  # the last round that somebody has begun
        self._told: dict[int, int] = {}  # round -> the dimensions that were told of it, from this one on
        self._patient_in = self._out_of_patience = 0  # the round that waits for this program, and the one that does so no longer
        self._posted = self._at_global = model
        self._caller: Caller | None = None
        self._last: RoundAverage | None = None  # of a round that has ended while the program computed
        self._finished: dict[int, tuple[RoundName, frozenset[int]]] = {}  # rank -> the last global sum that it has, and of whom
        self._waiting: dict[int, int] = {}  # rank -> the global round before which it begins no step
        self._committed = RoundName(0)
        self._settling: list[int] = []  # tickets
        self._is_settled = False  # the program does not step
        self._last_call = False  # `Settle` waits for those that have yet to ask
        self._actions: list[SendMessage | SetTimer | Reply] = []

    # -- events -------------------------------------------------------------------------------------------------------

    def on_request(self, now: float, ticket: int, request: Contribute | Replace | Settle | Resume | EnterRounds) -> Actions:
        match request:
            case EnterRounds():
                self._entering = ticket, set(self._others)
                self._ask_round()
            case Contribute(model, in_groups):
                self._contribute(ticket, model, model if in_groups is None else in_groups)
            case Replace(model):
                self._posted = self._at_global = model
                self._actions.append(Reply(ticket))
            case Settle():
                self._settling.append(ticket)
            case Resume():
                self._stands_still(False)
                self._actions.append(Reply(ticket))
        return self._advance()

    def on_message(self, now: float, source: int, header: ToGroupMember, payload: memoryview) -> Actions:
        if isinstance(header, AskRound):
            known = 0 if self._entering is not None else self.round + 1
            if known:
                self._count_in(source, known)
            return [SendMessage(source, RoundIs(known))]
        if isinstance(header, TakesPart):
            self._count_in(source, header.round)
            if self._is_settled:
                self._send(source, WaitsForAll(FOREVER))
        elif source not in self._others:
            return ()  # it has quit, or is yet to say that it takes part
        match header:
            case RoundIs(number):
                self._on_round(source, number)
            case ActivateRound(number, above):
                self._hear_of(number)
                self._tell(number, above)
            case WantSum(number, attempt, stage):
                self._hear_of(number)
                self._wanted[source, stage] = RoundName(number, attempt)
                for name, each in self._kept.items():
                    if name < (number, attempt):
                        each.needs_no_more(source)
            case PartialSum(number, attempt, stage, start, contributors):
                self._take(source, RoundName(number, attempt), stage, start, contributors, payload)
            case NoSum(number, attempt, stage):
                if self._active is not None and self._active.name == (number, attempt):
                    self._active.give_up(source, stage)
            case SumFinished(number, attempt, contributors):
                self._finished[source] = RoundName(number, attempt), ranks_of(contributors)
                if number == self._committed.number and attempt > self._committed.attempt:
                    self._send(source, SumCommitted(*self._committed))
            case SumCommitted(number, attempt):
                if RoundName(number, attempt) in self._kept and number == self.round:
                    self._commit(RoundName(number, attempt))
            case WaitsForAll(number):
                self._waiting[source] = number
        return self._advance()

    def on_timer(self, now: float, name: str) -> Actions:
        if name == SETTLING:
            self._kept = {name: each for name, each in self._kept.items() if name.number == self.round}
        else:
            self._out_of_patience = self._patient_in
        return self._advance()

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        self._lose(left)
        if self._entering is not None:
            asked = min(self._entering[1], default=None)
            self._entering[1].difference_update(left)
            if asked in left:
                self._ask_round()
        return self._advance()

    def _count_in(self, rank: int, number: int) -> None:
        self._others.add(rank)
        self._from_round[rank] = number
        self._finished.pop(rank, None)

    def _ask_round(self) -> None:
        assert self._entering is not None
        ticket, left = self._entering
        if left:
            self._send(min(left), AskRound())
        else:
            self._enter(ticket, self.round)

    def _on_round(self, source: int, number: int) -> None:
        if self._entering is not None and source in self._entering[1]:
            if number:
                self._enter(self._entering[0], number)
            else:
                self._entering[1].discard(source)
                self._ask_round()

    def _enter(self, ticket: int, number: int) -> None:
        self._entering = None
        self.round = self._began = number
        self._actions.append(Reply(ticket, number))
        for rank in self._others:
            self._send(rank, TakesPart(number))

    def _members(self, number: int) -> set[int]:
        """The others that take part in a round."""
        return {rank for rank in self._others if self._from_round.get(rank, 0) <= number}

    def _lose(self, ranks: Iterable[int]) -> None:
        for rank in self._others & set(ranks):
            self._others.discard(rank)
            self._from_round.pop(rank, None)
            self._finished.pop(rank, None)
            self._waiting.pop(rank, None)
            for each in (self._active, *self._kept.values()):
                if each is not None:
                    each.lose(rank)
            self._wanted = {key: name for key, name in self._wanted.items() if key[0] != rank}

    def _send(self, to: int, header: ToGroupMember, payload: Payload = b"") -> None:
        self._actions.append(SendMessage(to, header, payload))

    # -- the program --------------------------------------------------------------------------------------------------

    def _contribute(self, ticket: int, model: Values, in_groups: Values) -> None:
        if self._caller is not None:
            raise StrettoError("Contribute while another one waits for its average: one model, one program. Wait for the reply.")
        if model.shape != self._posted.shape or in_groups.shape != self._posted.shape:
            raise StrettoError(f"Contribute: a model of {model.size} elements, where it had {self._posted.size}.")
        self._stands_still(False)
        self._posted, self._at_global = in_groups, model
        missed, due = self.round - self._began, self._next_global
        if self._active is not None and self._is_global(self.round):  # begun while the program was settled, with its last model
            self._caller = Caller(ticket, self.round + 1, missed)
        elif self.round < due < self.round + missed:  # another step like the last would end too late
            self._tell_wait(due)
            self._caller = Caller(ticket, due, missed)
        elif self.round == due or self._last is None:
            self._caller = Caller(ticket, self.round, missed)
        else:
            self._answer(ticket, self._last._replace(missed=missed))

    def _stands_still(self, is_settled: bool) -> None:
        """Whether the program does, which the others are told: who has waited long enough goes to the global round then."""
        if self._is_settled != is_settled:
            self._is_settled = is_settled
            self._tell_wait(FOREVER if is_settled else 0)

    def _tell_wait(self, number: int) -> None:
        for rank in self._others:
            self._send(rank, WaitsForAll(number))

    def _answer(self, ticket: int, average: RoundAverage) -> None:
        self._caller = self._last = None
        self._began = self.round
        self._actions.append(Reply(ticket, average))

    def _is_global(self, number: int) -> bool:
        return number % self._global_every == 0

    @property
    def _next_global(self) -> int:
        return -(-self.round // self._global_every) * self._global_every

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _hear_of(self, number: int) -> None:
        self._called = max(self._called, number)

    def _advance(self) -> Actions:
        """Whatever can happen now, until nothing more can."""
        while self._step():
            pass
        self._serve()
        if self._settle():
            return self._advance()  # a global round that waited for the program does no longer
        actions, self._actions = self._actions, []
        return actions

    def _step(self) -> bool:
        active = self._active
        if active is None:
            return self._may_begin() and self._begin()
        for source, stage in active.ask():
            self._send(source, WantSum(*active.name, stage))
        if not active.is_finished:
            return False
        return self._agree(active) if self._is_global(self.round) else self._end(active)

    def _may_begin(self) -> bool:
        if self._entering is not None:
            return False
        if self._caller is not None:
            if self._caller.round == self.round:
                return True
            due = self._caller.round
            if all(self._waiting.get(rank, 0) >= due for rank in self._members(due)):  # nobody will begin those between
                self.round = due
                return True
        if self._called < self.round or (self._is_global(self.round) and not self._is_settled):
            return False
        waits = self._patience_s and self._caller is None and not self._settling and not self._is_settled
        if waits and self.round > self._out_of_patience:
            if self._patient_in != self.round:
                self._patient_in = self.round
                self._actions.append(SetTimer(PATIENCE, self._patience_s))
            return False
        return True

    def _begin(self) -> bool:
        number, is_global = self.round, self._is_global(self.round)
        bits = self._cube.all_bits() if is_global else self._cube.bits_of_round(number, self._group_size)
        own = self._at_global if is_global else self._posted
        self._active = ButterflySum(self._cube, self.rank, RoundName(number, self.attempt), bits, own, self._members(number))
        if self._patience_s:
            self._actions.append(SetTimer(PATIENCE, None))
        if self._called < number and not is_global:
            self._hear_of(number)
            self._tell(number, 0)
        return True

    def _end(self, active: ButterflySum) -> bool:
        """A round of groups has ended here; others may have yet to ask for its sums."""
        caller, self._active = self._caller, None
        self._keep(active)
        is_included = caller is not None and active.own is self._posted
        average = RoundAverage(active.total, active.contributors[-1], is_included, False, self.round, 0)
        self._go_to_next()
        if caller is None:
            self._last = average
        elif caller.round == average.round:
            self._answer(caller.ticket, average._replace(missed=caller.missed))
        return True

    def _go_to_next(self) -> None:
        self.round, self.attempt = self.round + 1, 0
        self._told = {number: above for number, above in self._told.items() if number >= self.round}

    def _keep(self, ended: ButterflySum) -> None:
        self._kept[ended.name] = ended
        while len(self._kept) > MAX_KEPT:
            del self._kept[min(self._kept)]

    # -- who begins ---------------------------------------------------------------------------------------------------

    def _tell(self, number: int, above: int) -> None:
        """Pass on that a round has begun, to those that this worker has not told yet. If somebody dies that should have passed it
        on, those behind it may not hear of it so; who needs them in that round asks them for a sum."""
        below = self._told.get(number, self._cube.dimensions)
        if number >= self.round and above < below:
            self._told[number] = above
            for rank, its_above in self._cube.told_by(self.rank, above, below, self._others):
                self._send(rank, ActivateRound(number, its_above))

    # -- sums ---------------------------------------------------------------------------------------------------------

    def _take(self, source: int, name: RoundName, stage: int, start: int, contributors: bytes, payload: memoryview) -> None:
        self._count(source, 0, payload.nbytes)
        if self._active is not None and self._active.name == name:
            fault = self._active.take(source, stage, start, ranks_of(contributors), payload)
            if fault is not None:
                raise FrameError(source, f"a sum for round {name.number}, stage {stage}: {fault}")

    def _serve(self) -> None:
        """Give what was asked for, and can be given or never will be."""
        for (taker, stage), name in list(self._wanted.items()):
            of = self._active if self._active is not None and self._active.name == name else self._kept.get(name)
            if of is not None and of.can_give(stage):
                self._give(taker, of, stage)
            elif name.number == self._committed.number and name.attempt > self._committed.attempt:
                self._send(taker, SumCommitted(*self._committed))
            elif of is None and name < (self.round, self.attempt):
                self._send(taker, NoSum(*name, stage))
            else:
                continue
            del self._wanted[taker, stage]
        self._kept = {name: each for name, each in self._kept.items() if name.number == self.round or each.is_awaited}

    def _give(self, taker: int, of: ButterflySum, stage: int) -> None:
        of.served(stage, taker)
        contributors = bits_of(of.contributors[stage])
        for start, piece in of.pieces(stage):
            self._count(taker, piece.nbytes, 0)
            self._send(taker, PartialSum(*of.name, stage, start, contributors), piece)

    # -- global rounds ------------------------------------------------------------------------------------------------

    def _agree(self, active: ButterflySum) -> bool:
        """This worker has a sum of all. Does everybody have the same?"""
        mine = active.name, active.contributors[-1]
        if self._finished.get(self.rank) != mine:
            self._finished[self.rank] = mine
            for rank in self._members(self.round):
                self._send(rank, SumFinished(*active.name, bits_of(mine[1])))
        theirs = [self._finished.get(rank, (RoundName(0), frozenset())) for rank in self._members(self.round)]
        if any(name < active.name for name, _ in theirs):
            return False
        self._keep(active)
        if all(each == mine for each in theirs):
            self._commit(active.name)
        else:
            self._active, self.attempt, self.had_to_try_again = None, self.attempt + 1, True
        return True

    def _commit(self, name: RoundName) -> None:
        """All that live had the same sum in that attempt, and this worker has it."""
        ended, caller = self._kept[name], self._caller
        self._active, self._committed = None, name
        self._kept = {other: each for other, each in self._kept.items() if other.number != name.number}
        self._go_to_next()
        if caller is None or caller.round != name.number:  # it has begun while the program was settled, which keeps its model
            self._began = self.round
            return
        mean = ended.total / np.float32(len(ended.contributors[-1]))
        self._posted = self._at_global = mean
        self._answer(caller.ticket, RoundAverage(mean, ended.contributors[-1], True, True, name.number, caller.missed))

    # -- the end ------------------------------------------------------------------------------------------------------

    def _settle(self) -> bool:
        """Whether the program has just been told that it may stand still."""
        if not self._settling or self._active is not None or (self._called >= self.round and not self._is_global(self.round)):
            return False
        if self._kept:
            if not self._last_call:
                self._actions.append(SetTimer(SETTLING, ASK_S))
            self._last_call = True
            return False
        self._actions += [SetTimer(SETTLING, None), *(Reply(ticket, self.round) for ticket in self._settling)]
        self._settling.clear()
        self._last_call = False
        self._stands_still(True)
        return True
