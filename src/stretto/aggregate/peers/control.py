"""Who runs what: a worker that comes back finds the channels on which its models are trained.

    a newcomer          everybody else
    WhatRuns     -->
                 <--    Runs(channels)      of those models that it takes part in
    a worker at its end
    Leaves       -->                        count me among those that are gone, in every model

Every model is begun by all workers together and gets a channel of its own, in the order in which they are begun, and a text that
says what it is. Whoever comes back has not seen the order: models were begun and ended before it came. It takes the first channel
that it has not taken yet and that runs what it wants to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from stretto.protocol.machine import Actions, Machine, Reply, SendMessage


class WhatRuns(msgspec.Struct, frozen=True, tag=True):
    """Which models do you take part in?"""

    number: int


class Runs(msgspec.Struct, frozen=True, tag=True):
    """These, by channel: what each is."""

    number: int
    channels: dict[int, str]


class Leaves(msgspec.Struct, frozen=True, tag=True):
    """I leave the job."""


class FindModels(NamedTuple):
    """What do the others take part in? The reply is a dict, channel -> what, of all that live."""


class BeginModel(NamedTuple):
    """This worker takes part in one, from now on."""

    channel: int
    about: str


class EndModel(NamedTuple):
    """And no more."""

    channel: int


class LeavePeers(NamedTuple):
    """Say that this worker leaves the job."""


class PeerControl(Machine):
    """See the module's text. `on_leaves(rank)` is called when another worker has said that it leaves."""

    header_type = WhatRuns | Runs | Leaves

    def __init__(self, rank: int, size: int, on_leaves: Callable[[int], object]) -> None:
        self._rank, self._on_leaves = rank, on_leaves
        self._here = set(range(size)) - {rank}
        self._channels: dict[int, str] = {}
        self._asked: dict[int, tuple[set[int], dict[int, str]]] = {}  # ticket -> who has not answered; what the others run

    def on_request(self, now: float, ticket: int, request: object) -> Actions:
        match request:
            case FindModels():
                self._asked[ticket] = set(self._here), {}
                return [*(SendMessage(to, WhatRuns(ticket)) for to in sorted(self._here)), *self._answered(ticket)]
            case BeginModel(channel, about):
                self._channels[channel] = about
            case EndModel(channel):
                self._channels.pop(channel, None)
            case LeavePeers():
                return [*(SendMessage(to, Leaves()) for to in sorted(self._here)), Reply(ticket)]
        return [Reply(ticket)]

    def on_message(self, now: float, source: int, header: WhatRuns | Runs | Leaves, payload: memoryview) -> Actions:
        match header:
            case WhatRuns(number):
                return [SendMessage(source, Runs(number, dict(self._channels)))]
            case Runs(number, channels):
                if number in self._asked and source in self._asked[number][0]:
                    self._asked[number][0].discard(source)
                    self._asked[number][1].update(channels)
                    return self._answered(number)
                return ()
            case Leaves():
                self._on_leaves(source)
                return self._gone([source])

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        self._here |= set(joined)
        return self._gone(left)

    def _gone(self, left: Sequence[int]) -> list[Reply]:
        self._here -= set(left)
        replies: list[Reply] = []
        for ticket in list(self._asked):
            self._asked[ticket][0].difference_update(left)
            replies += self._answered(ticket)
        return replies

    def _answered(self, ticket: int) -> list[Reply]:
        waiting, found = self._asked[ticket]
        if waiting:
            return []
        del self._asked[ticket]
        return [Reply(ticket, dict(sorted(found.items())))]
