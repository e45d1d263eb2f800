"""Around a peer's machine: one that has finished says so, and counts as gone for those that go on.

A worker that has left its loop, released its model or left the job is not dead, and the others must not wait for it. So what is
said between peers is either the inner machine's or, once, *Quit*. Whoever hears it tells the machine inside that this peer has
left, as if it had died, and nothing of it reaches that machine any more until the rank joins in another life.

    PeerSays(header)     for the machine inside
    PeerSays(None)       I have finished, and take no part any more: also to a peer that comes back later

One that has quit goes on as an empty shell, which tells newcomers. Requests that waited for a reply fail then.

Peers that joined in later lives are told to the machine inside as `joined`, right after `on_start`, whenever they joined.

Cost:      a few bytes a message.
Invariant: as long as nobody quits, the machine inside gets the same events and does the same as without it.
Needs:     order. A Quit comes after all that was sent before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from stretto.errors import StrettoError
from stretto.protocol.machine import Actions, Machine, Reply, SendMessage

H = TypeVar("H")


class PeerSays(msgspec.Struct, Generic[H], frozen=True, array_like=True):
    """A message of the machine inside, or that this peer quits."""

    header: H | None


class QuitPeers(NamedTuple):
    """Take part no more. Answered at once, when it has been said to everybody."""


class PeerQuits(NamedTuple):
    """Another worker has left the job, as it has said elsewhere."""

    rank: int


class UntilQuit(Machine):
    """See the module's text. `lives`: asked at the beginning, who joined after the others, and in which generation."""

    def __init__(
        self, machine: Machine, rank: int, size: int, lives: Callable[[], Mapping[int, int]] = dict, name: str = ""
    ) -> None:
        said: Any = PeerSays
        self.header_type = said[machine.header_type]  # type: ignore[misc]  # it depends on the machine inside
        self.machine: Machine | None = machine
        self.name = name or type(machine).__name__
        self._rank, self._size, self._lives = rank, size, lives
        self._known: dict[int, int] = {}  # rank -> life that the machine inside knows
        self._gone: set[int] = set()  # who has died, or quit
        self._open: set[int] = set()  # tickets without a reply

    def on_start(self, now: float) -> Actions:
        assert self.machine is not None
        actions = self._from_inside(self.machine.on_start(now))
        for rank, life in sorted(self._lives().items()):
            if rank != self._rank:
                actions += self._joined(now, rank, life)
        return actions

    def on_message(self, now: float, source: int, header: PeerSays[Any], payload: memoryview) -> Actions:
        if header.header is None:
            return self._left(now, [source])
        if self.machine is None or source in self._gone:
            return ()
        return self._from_inside(self.machine.on_message(now, source, header.header, payload))

    def on_timer(self, now: float, name: str) -> Actions:
        return () if self.machine is None else self._from_inside(self.machine.on_timer(now, name))

    def on_sent(self, now: float, token: int) -> Actions:
        return () if self.machine is None else self._from_inside(self.machine.on_sent(now, token))

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        actions = self._left(now, left)
        for rank in joined:
            actions += self._joined(now, rank, generation)
        return actions

    def on_request(self, now: float, ticket: int, request: Any) -> Actions:
        if isinstance(request, QuitPeers):
            return [*self._quit(), Reply(ticket)]
        if isinstance(request, PeerQuits):
            return [*self._left(now, [request.rank]), Reply(ticket)]
        if self.machine is None:
            raise StrettoError(f"{self.name} has quit, and was asked for {type(request).__name__}.")
        self._open.add(ticket)
        return self._from_inside(self.machine.on_request(now, ticket, request))

    def _joined(self, now: float, rank: int, life: int) -> list[Any]:
        if self._known.get(rank, 0) >= life:
            return []
        self._known[rank] = life
        self._gone.discard(rank)
        if self.machine is None:
            return [SendMessage(rank, PeerSays(None))]
        return self._from_inside(self.machine.on_view(now, [rank], [], life))

    def _left(self, now: float, left: Sequence[int]) -> list[Any]:
        news = [rank for rank in left if rank not in self._gone]
        self._gone.update(news)
        if self.machine is None or not news:
            return []
        return self._from_inside(self.machine.on_view(now, [], news, max(self._known.values(), default=0)))

    def _quit(self) -> list[Any]:
        if self.machine is None:
            return []
        self.machine = None
        failed = [Reply(ticket, error=StrettoError(f"{self.name} was stopped")) for ticket in sorted(self._open)]
        self._open.clear()
        return [*failed, *(SendMessage(to, PeerSays(None)) for to in range(self._size) if to not in {*self._gone, self._rank})]

    def _from_inside(self, actions: Actions) -> list[Any]:
        out: list[Any] = []
        for action in actions:
            if isinstance(action, SendMessage):
                if action.to in self._gone:
                    continue
                action = action._replace(header=PeerSays(action.header))  # noqa: PLW2901
            elif isinstance(action, Reply):
                self._open.discard(action.ticket)
            out.append(action)
        return out
