"""A membership that goes on when the job has formed: a member that has died comes back, and the others hear of it.

    member               coordinator                              other members
    ... it dies
    Join (restart + 1) -->  another life: the next generation  --> News (its peer entry)
                       <--  Table (everybody as last heard of)
    WatchReturns (generation) -->  who has come since then, now and later <-- WatchReturns

Where there is `room`, others come that were not there when the job formed, under ranks from `world_size` on. They are let in like
those that come back; one that is too early waits until the job has formed.

A rank comes back when its starter says so, by a higher `restart`, or when its process is known to have ended. Generations are
counted here, so they are the same everywhere, and a later one means that it joined later: with the rank, they name one life
(`Wire.admit`). The coordinator does not know who is dead: a table has everybody's last life, and whoever cannot reach one takes
it for lost.

Members watch for as long as they take part, say so every `WATCH_EVERY_S`, and say when they leave, so the coordinator needs no
parent: where it is asked to (`lonely_s`) it ends when the last one that lives has left, or nobody has watched for so long.
"""

from __future__ import annotations

from typing import Final

from stretto.launching.introduction_messages import (
    Checked,
    Ended,
    FromWorker,
    Join,
    Leave,
    News,
    Note,
    Refusal,
    Table,
    WatchReturns,
)
from stretto.launching.membership import Member, Membership, Phase, rank_taken
from stretto.protocol.machine import Actions, Node, SendMessage, SetTimer

WATCH_EVERY_S: Final = 1.0
LONELY_S: Final = 30.0
MOST_NOTES: Final = 64
NOTE_CHARS: Final = 512
DEAD_S: Final = 3.0  # a watcher of which nothing has come for so long does not keep the coordinator when others leave


class LastingMembership(Membership):
    """See the module's text. `lonely_s`: how long it lasts without anybody who watches; None: until all have left. `room`: for so
    many members more."""

    def __init__(
        self, world_size: int, host: str, *, encrypted: bool, nonce: bytes, lonely_s: float | None = None, room: int = 0
    ) -> None:
        super().__init__(world_size, host, encrypted=encrypted, nonce=nonce)
        self._most = world_size + room
        self._early: dict[int, Member] = {}  # who is to be let in when the job has formed
        self._lonely_s = lonely_s
        self._lonely = False
        self._generation = 0
        self._notes: dict[str, str] = {}
        self._watching: dict[int, Node] = {}
        self._seen: dict[int, float] = {}  # when each watcher has said so

    def on_message(self, now: float, source: Node, header: FromWorker | Checked | Refusal, payload: memoryview) -> Actions:
        if isinstance(header, Note):
            if len(header.key) + len(header.value) <= NOTE_CHARS and (header.key in self._notes or len(self._notes) < MOST_NOTES):
                self._notes[header.key] = header.value
            return ()
        if not isinstance(header, WatchReturns):
            formed = self.phase is Phase.FORMED
            actions = super().on_message(now, source, header, payload)
            if isinstance(header, Leave):
                self._forget_early(header)
                self._stops_watching(now, header)
            if formed or self.phase is not Phase.FORMED:
                return [*actions, *self._turn_away_early()]
            return [*actions, *self._wait_for_watchers(), *self._let_in_early()]
        if self.phase is not Phase.FORMED or not 0 <= header.rank < self._most:
            return ()
        self._watching[header.rank], self._seen[header.rank] = source, now
        news = [peer for peer in self._peers() if peer.generation > header.generation and peer.rank != header.rank]
        return [*([SendMessage(source, News(news))] if news else []), *self._wait_for_watchers()]

    def on_timer(self, now: float, name: str) -> Actions:
        if name == "lonely":
            self._lonely = True
            return ()
        return [*super().on_timer(now, name), *self._turn_away_early()]

    @property
    def finished(self) -> bool:
        return self._lonely or super().finished

    @property
    def needs_parent(self) -> bool:
        return self._lonely_s is None or self.phase is not Phase.FORMED

    def _stops_watching(self, now: float, message: Leave) -> None:
        """If it is this life of the member that leaves, not an earlier one that was late to."""
        member = self._members.get(message.rank)
        if member is None or (member.join.host, member.join.pid) != (message.host, message.pid):
            return
        if self._seen.pop(message.rank, None) is not None and self._lonely_s is not None:
            self._lonely |= all(now - seen > DEAD_S for seen in self._seen.values())

    def _wait_for_watchers(self) -> Actions:
        return [] if self._lonely_s is None else [SetTimer("lonely", self._lonely_s)]

    def _ended_elsewhere(self, message: Ended) -> Actions:
        member = self._members.get(message.rank)
        if self.phase is Phase.FORMED and member is not None:
            member.left |= (member.join.host, member.join.pid) == (message.host, message.pid)
        return super()._ended_elsewhere(message)

    @property
    def _num_ranks(self) -> int:
        return self._most

    def _join(self, sender: Node, message: Join, now: float) -> Actions:
        """A member beyond those with which the job forms never keeps it from forming."""
        if message.rank < self.world_size or (message.rank in self._members and self.phase is Phase.FORMED):
            return super()._join(sender, message, now)
        if (problem := self._problem_with(message)) is not None:
            return [SendMessage(sender, problem)]
        if self.phase is Phase.FORMED:
            return self._come_back(sender, message)
        before = self._early.get(message.rank)
        if before is not None and before.join.token != message.token and not self._may_come_back(before, message):
            return [SendMessage(sender, rank_taken(message, before))]
        self._early[message.rank] = Member(sender, message, 0.0)
        return [SendMessage(sender, self._waiting()), *self._turn_away_early()]

    def _let_in_early(self) -> list[SendMessage]:
        early, self._early = self._early, {}
        return [action for _, each in sorted(early.items()) for action in self._come_back(each.sender, each.join)]

    def _forget_early(self, message: Leave) -> None:
        waits = self._early.get(message.rank)
        if waits is not None and (waits.join.host, waits.join.pid) == (message.host, message.pid):
            del self._early[message.rank]

    def _turn_away_early(self) -> list[SendMessage]:
        """They wait for a job that could not be formed."""
        if self.phase is not Phase.FAILED:
            return []
        early, self._early = self._early, {}
        return [SendMessage(each.sender, self._failure) for each in early.values()]

    def _may_come_back(self, member: Member, message: Join) -> bool:
        return member.left or message.restart > member.join.restart

    def _table(self) -> Table:
        return Table(self._peers(), self._nonce, self._notes)

    def _come_back(self, sender: Node, message: Join) -> list[SendMessage]:
        self._generation += 1
        self._watching.pop(message.rank, None)
        self._members[message.rank] = Member(sender, message, 0.0, answers=True, generation=self._generation)
        table = self._table()
        news = News([peer for peer in table.peers if peer.rank == message.rank])
        return [SendMessage(sender, table), *(SendMessage(watcher, news) for watcher in self._watching.values())]
