"""The chains of ranges, as one server sees them: how they begin, break, are mended, lengthened and handed over.

Each range has a *chain* of servers, its members. The first, the head, serves it; each passes every change on to the next; the
last one reports to the head that all have it (`head.py`). A chain has an *epoch*; a server takes part in one epoch of a range
at a time.

**A server dies.** Everybody takes it out of the chains that they know. Who is first now is the head. It begins a new epoch:

    InstallRange passes down the *path*: the members in the order of the chain, then those that shall drop the range. A server
    that may not have all changes gets a copy with it. The last one of the path reports to the head. The epoch is *active* then:
    changes are known to be stored, answers leave, and everybody is told of the chain. Until then the head takes requests and
    answers none.

**Lengthened.** A head whose chain is shorter than it should be adds the next servers of the ring, at the end.

**Handed over.** When a server has joined, the ranges that it has on the new ring become its own. The head adds it at the end of
the chain; when that epoch is active it begins another one in which the newcomer is first. Its path is the old chain, the
newcomer last, who begins to serve when it gets there, and drops the surplus member in an epoch of its own.

Why no change that was acknowledged is lost, and no range has two heads:

    Copies and changes come from the member before, or from one before that if it has died. So what a member has is a beginning of
    what each member before it has, and whoever becomes first has everything that was stored by all.
    A server learns of a new chain after all those that came before it in the old one, and only they could serve while it does not
    know. If they die, the new chain is known to nobody, and the old one still holds. The newcomer that becomes first is last to
    learn. A member that shall drop the range must have heard of it before anything is stored without it.
    So of the servers that live at most one believes that it is first, and epochs that were active have different numbers.

Which server a range goes to is computed by its head alone, from the servers that it knows to live. Others may compute something
else; that costs a useless move at most.

Cost:      an epoch is as many small messages as the path has servers, and a copy for each that needs one: after the death of
           one of two servers, one copy of each range that it had. At most `MAX_INSTALLING` ranges of a head are on their way at
           a time, so that copies do not fill its memory.
Needs:     messages of one peer come in order until it has left. A server that has left is dead: it serves nobody any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from stretto.aggregate.parameter_server.hash_ring import HashRing
from stretto.aggregate.parameter_server.head import RangeHead, Terms
from stretto.aggregate.parameter_server.layout import RangeLayout
from stretto.aggregate.parameter_server.messages import (
    Change,
    EntryStored,
    InstallRange,
    LogEntry,
    NotHead,
    RangeChain,
    RangeInstalled,
    RangeReport,
)
from stretto.aggregate.parameter_server.replica import RangeReplica
from stretto.errors import MalformedPayload, WireError
from stretto.protocol.machine import Payload

MAX_INSTALLING: Final = 8

log = logging.getLogger("stretto.parameter_server")


@dataclass(eq=False)
class Holding:
    """A range that this server has a replica of, and its place in the chain."""

    index: int
    replica: RangeReplica
    members: list[int]
    path: list[int]
    epoch: int = 0
    active: bool = True
    level: set[int] = field(default_factory=set)  # those that have, or will have by what is on its way, all that this server has
    tail_sequence: int = 0  # what the last member of this epoch has, as far as the head knows
    head: RangeHead | None = None

    def chain(self) -> RangeChain:
        return RangeChain(self.index, self.epoch, self.members)


class Chains:
    """See the module's text. `tell(chain)`: everybody shall know of it; `step_down(range)`: this server serves it no more."""

    def __init__(
        self,
        rank: int,
        life: int,
        layout: RangeLayout,
        servers: Sequence[int],
        replicas: int,
        terms: Terms,
        make_replica: Callable[[int], RangeReplica],
        tell: Callable[[RangeChain], None],
        step_down: Callable[[int], None],
    ) -> None:
        self.rank = rank
        self.life = life
        self.servers = {*servers, rank}  # that live
        self.newcomers: set[int] = set()
        self.holdings: dict[int, Holding] = {}
        self._layout = layout
        self._length = replicas + 1
        self._terms = terms
        self._make_replica = make_replica
        self._tell = tell
        self._step_down = step_down
        self._waiting: dict[int, None] = {}  # ranges that may need a new epoch, in order
        self._installing: set[int] = set()
        self._dropped: dict[int, int] = {}  # range -> the epoch in which this server has dropped it
        self._ring = HashRing(servers)
        self._placed = self._ring.place(layout.ranges)
        self.known = {index: self._first_chain(index) for index in self._placed}  # the last active ones that were heard of

    def _first_chain(self, index: int) -> RangeChain:
        return RangeChain(index, 0, self._ring.chain(index, self._placed[index], self._length))

    def begin(self) -> None:
        """The job begins: all servers make their ranges, alike."""
        for index, _, members in self.known.values():
            if self.rank in members:
                holding = self.holdings[index] = Holding(index, self._make_replica(index), members, members)
                holding.level = set(members)
                if members[0] == self.rank:
                    self._become_head(holding)
                    self._store(holding)

    # -- servers come and go ------------------------------------------------------------------------------------------

    def left(self, gone: set[int]) -> None:
        self.servers -= gone
        self.newcomers -= gone
        for holding in list(self.holdings.values()):
            holding.level -= gone
            if gone & {*holding.members, *holding.path}:
                self._take_out(holding, gone)

    def _take_out(self, holding: Holding, gone: set[int]) -> None:
        before = self._after_me(holding.path)
        holding.members = [rank for rank in holding.members if rank not in gone]
        holding.path = [rank for rank in holding.path if rank not in gone]
        if holding.members[0] == self.rank:
            self._take_over(holding)
        elif not holding.active and self._after_me(holding.path) != before:
            self._pass_on(holding)  # the one to which it was passed may not have passed it on

    def joined(self, server: int) -> None:
        """A server that has nothing."""
        self.servers.add(server)
        self.newcomers.add(server)
        self._waiting |= {index: None for index, holding in self.holdings.items() if holding.head is not None}

    def heard_of(self, chain: RangeChain) -> None:
        """An active chain."""
        if chain.epoch > self.known[chain.range].epoch:
            self.known[chain.range] = chain
        holding = self.holdings.get(chain.range)
        if holding is not None and holding.epoch == chain.epoch:
            holding.active = True

    def advance(self) -> None:
        """Begin the epochs that are due, a few at a time."""
        while self._waiting and len(self._installing) < MAX_INSTALLING:
            index = next(iter(self._waiting))
            del self._waiting[index]
            holding = self.holdings.get(index)
            if holding is not None and holding.head is not None and index not in self._installing:
                self._improve(holding)

    def _improve(self, holding: Holding) -> None:
        """Begin the epoch that brings this range nearer to where it should be, if one does."""
        members = holding.members
        surplus = [rank for rank in holding.path if rank not in members]
        heir = self._place(holding.index)
        if not holding.active:
            self._begin_epoch(holding, members[: self._length], [*members, *surplus])
        elif heir in self.newcomers and heir not in members:
            self._begin_epoch(holding, [*members, heir], [*members, heir])
        elif heir in self.newcomers and heir == members[-1] != self.rank:
            self._begin_epoch(holding, [heir, *members[:-1]], members)
        elif len(members) > self._length:
            self._begin_epoch(holding, members[: self._length], members)
        elif len(members) < min(self._length, len(self.servers)):
            others = [rank for rank in self._ring.preferences(holding.index) if rank not in members]
            longer = [*members, *others][: self._length]
            self._begin_epoch(holding, longer, longer)

    def _place(self, index: int) -> int:
        """Where a range belongs, now that these servers live."""
        if set(self._ring.servers) != self.servers:
            self._ring = HashRing(self.servers)
            self._placed = self._ring.place(self._layout.ranges)
        return self._placed[index]

    # -- epochs -------------------------------------------------------------------------------------------------------

    def _take_over(self, holding: Holding) -> None:
        """This server is first, and the chain is not what it was."""
        self._deactivate(holding)
        if holding.head is None:
            self._become_head(holding)
        self._installing.discard(holding.index)
        if len(holding.path) == 1:
            self._begin_epoch(holding, holding.members, holding.path)
        else:
            self._waiting[holding.index] = None

    def _become_head(self, holding: Holding) -> None:
        parameters = self._layout.ranges[holding.index]
        head = holding.head = RangeHead(parameters, holding.replica, self._terms, partial(self._log, holding))
        for worker, clock in list(holding.replica.workers.items()):
            if clock.counts and self._terms.lives.has_ended(worker, clock.life):
                head.forget(worker)

    def _deactivate(self, holding: Holding) -> None:
        holding.active = False
        holding.tail_sequence = -1
        if holding.head is not None:
            holding.head.stored = -1

    def _begin_epoch(self, holding: Holding, members: list[int], path: list[int]) -> None:
        holding.epoch += 1
        holding.members, holding.path = list(members), list(path)
        self._deactivate(holding)
        if members[0] == self.rank:
            self._installing.add(holding.index)
        else:
            self._end_as_head(holding)
        self._pass_on(holding)

    def _end_as_head(self, holding: Holding) -> None:
        holding.head = None
        self._installing.discard(holding.index)
        self._step_down(holding.index)

    def _after_me(self, ranks: list[int]) -> int | None:
        place = ranks.index(self.rank)
        return ranks[place + 1] if place + 1 < len(ranks) else None

    def _pass_on(self, holding: Holding) -> None:
        """Tell the next server of the path, and send a copy along if it may not have every change."""
        following = self._after_me(holding.path)
        if following is None:
            self._end_of_path(holding)
            return
        takes_part = following in holding.members
        copy = holding.replica.values.export() if takes_part and following not in holding.level else b""
        holding.level = {following} if takes_part else set()
        lives = {rank: self._life_of(rank) for rank in holding.path}
        header = InstallRange(holding.index, holding.epoch, holding.members, holding.path, lives, holding.replica.header())
        self._send(following, header, copy)

    def _end_of_path(self, holding: Holding) -> None:
        if holding.members[0] != self.rank:
            self._send(holding.members[0], RangeInstalled(holding.index, holding.epoch, holding.replica.sequence))
        elif holding.head is not None:
            self._store(holding)
            self._activate(holding)
        else:  # it was handed over to this server, and all others know
            holding.level = set(holding.path)
            self._take_over(holding)

    def install(self, header: InstallRange, payload: memoryview) -> None:
        """A new epoch, from the server before this one; or a copy in the same one, if a server between them has died."""
        index, holding = header.range, self.holdings.get(header.range)
        path = [rank for rank in header.path if not self._has_ended(rank, header.lives.get(rank, 0))]
        if self.rank not in path or not self._is_news(holding, header, payload):
            return
        members = [rank for rank in header.members if rank in path]
        if self.rank not in members:
            if members or holding is None:
                self._drop(header, members, path)
            else:  # all that shall have the range have died, and those before this server on the path have dropped it
                holding.epoch, holding.members, holding.path = header.epoch, [self.rank], path[path.index(self.rank) :]
                self._take_over(holding)
            return
        try:
            replica = self._installed(holding, header, payload)
        except MalformedPayload as problem:
            log.error("range %d was sent to rank %d in a form that cannot be read: %s", index, self.rank, problem)
            return
        if holding is not None and holding.head is not None:
            self._end_as_head(holding)
        level = set() if holding is None or payload.nbytes else holding.level & set(members)
        holding = self.holdings[index] = Holding(index, replica, members, path, header.epoch, False, level, -1)
        if members[0] == self.rank != header.members[0]:
            self._take_over(holding)
        else:
            self._pass_on(holding)

    def _is_news(self, holding: Holding | None, header: InstallRange, payload: memoryview) -> bool:
        if holding is None:
            return header.epoch > max(self.known[header.range].epoch, self._dropped.get(header.range, 0))
        if header.epoch == holding.epoch:
            return holding.head is None and payload.nbytes > 0 and header.replica.sequence >= holding.replica.sequence
        return header.epoch > holding.epoch

    def _life_of(self, rank: int) -> int:
        return self.life if rank == self.rank else self._terms.lives.current(rank)

    def _has_ended(self, rank: int, life: int) -> bool:
        return life != self.life if rank == self.rank else self._terms.lives.has_ended(rank, life)

    def _installed(self, holding: Holding | None, header: InstallRange, payload: memoryview) -> RangeReplica:
        if payload.nbytes:
            replica = self._make_replica(header.range) if holding is None else holding.replica
            replica.install(header.replica, payload)
            return replica
        if holding is None or holding.replica.sequence != header.replica.sequence:
            had = None if holding is None else holding.replica.sequence
            raise WireError(
                f"rank {self.rank} was told to go on with range {header.range} at sequence {header.replica.sequence}, and is at "
                f"{had}.\n"
                f"Messages between servers were lost or came out of order: run them on a wire that does not do that."
            )
        return holding.replica

    def _drop(self, header: InstallRange, members: list[int], path: list[int]) -> None:
        """Others have this range from now on."""
        self._dropped[header.range] = header.epoch
        self._installing.discard(header.range)
        self.holdings.pop(header.range, None)
        self._step_down(header.range)
        following = self._after_me(path)
        if following is not None:
            self._send(following, header)
        elif members:
            self._send(members[0], RangeInstalled(header.range, header.epoch, header.replica.sequence))

    def on_installed(self, header: RangeInstalled) -> None:
        holding = self._headed(header.range, header.epoch)
        if holding is not None and not holding.active:
            holding.tail_sequence = max(holding.tail_sequence, header.sequence)
            self._activate(holding)

    def _activate(self, holding: Holding) -> None:
        holding.active = True
        self._installing.discard(holding.index)
        self.known[holding.index] = holding.chain()
        self._tell(holding.chain())
        self._release(holding)
        self._waiting[holding.index] = None

    # -- changes ------------------------------------------------------------------------------------------------------

    def _log(self, holding: Holding, change: Change, payload: Payload) -> None:
        """A change that was made here goes on to the next member, who may read it later than this."""
        following = self._after_me(holding.members)
        if following is None:
            self._store(holding)
            return
        holding.level &= {following}
        entry = LogEntry(holding.index, holding.epoch, holding.replica.sequence, change)
        self._send(following, entry, bytes(payload))

    def on_entry(self, entry: LogEntry, payload: memoryview) -> None:
        holding = self.holdings.get(entry.range)
        if holding is None or holding.head is not None or holding.epoch != entry.epoch:
            return
        if entry.sequence != holding.replica.sequence + 1:
            return
        holding.replica.take(entry.change, payload)
        following = self._after_me(holding.members)
        if following is None:
            self._send(holding.members[0], EntryStored(entry.range, entry.epoch, entry.sequence))
        else:
            holding.level &= {following}
            self._send(following, entry, bytes(payload))

    def on_stored(self, header: EntryStored) -> None:
        holding = self._headed(header.range, header.epoch)
        if holding is not None:
            holding.tail_sequence = max(holding.tail_sequence, header.sequence)
            self._release(holding)

    def _store(self, holding: Holding) -> None:
        """There is no other member."""
        holding.tail_sequence = holding.replica.sequence
        self._release(holding)

    def _release(self, holding: Holding) -> None:
        if holding.active and holding.head is not None:
            holding.head.stored = holding.tail_sequence
            holding.head.release()

    def _headed(self, index: int, epoch: int) -> Holding | None:
        holding = self.holdings.get(index)
        return holding if holding is not None and holding.head is not None and holding.epoch == epoch else None

    # -- what others want to know -------------------------------------------------------------------------------------

    def served_here_and_changed(self) -> list[RangeChain]:
        """Everybody computes the first chains alike."""
        return [each.chain() for each in self.holdings.values() if each.active and each.head is not None and each.epoch]

    def report(self, index: int) -> RangeReport:
        return RangeReport(self.known[index], index in self.holdings)

    def not_head(self, index: int, attempt: int) -> NotHead:
        return NotHead(self.known[index], index in self.holdings, attempt)

    def _send(self, to: int, header: Any, payload: Payload = b"") -> None:
        self._terms.send(to, header, payload)
