"""A worker that comes back takes over the model of one that lives: weights, buffers, and how far that one has come.

    newcomer                          a worker that lives
    AskModel(number)        -->       when its program has ended a step: a copy of what it has then
                            <--       ModelIs(number, steps, ..., num_bytes), then PartOfModel(number, start) ...

It asks the next rank after its own, and every `NEXT_S` in which nothing has begun to come, one more; it takes what begins first.
If that one dies or finishes before all is here, it asks again, from all that live. So what it has in the end is of one worker and
of one step, or it has an error: that nobody lives who could have sent it.

The program is asked between steps (`waiting`), since only then the model is whole; the thread that drives machines copies
nothing.

Cost:   m bytes, once; the sender keeps a copy of m bytes until they have left.
Needs:  order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.protocol.machine import Actions, Machine, Reply, SendMessage, SetTimer

PIECE_BYTES: Final = 1 << 20
NEXT_S: Final = 2.0
Bytes = NDArray[np.uint8]


class AskModel(msgspec.Struct, frozen=True, tag=True):
    number: int


class ModelIs(msgspec.Struct, frozen=True, tag=True):
    """What follows, and where its sender stands: steps that have ended, meetings that it has come to (`meeting.py`)."""

    number: int
    steps: int
    meetings: int
    num_bytes: int


class PartOfModel(msgspec.Struct, frozen=True, tag=True):
    number: int
    start: int


class PullModel(NamedTuple):
    """Ask for a model of so many bytes. The reply is a `PulledModel`."""

    num_bytes: int


class GiveModel(NamedTuple):
    """The program has ended a step: this is what it has, for whoever has asked."""

    values: Bytes
    steps: int
    meetings: int


class PulledModel(NamedTuple):
    source: int
    values: Bytes
    steps: int
    meetings: int


class PullMachine(Machine):
    """See the module's text."""

    header_type = AskModel | ModelIs | PartOfModel

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._here = set(range(size)) - {rank}
        self.waiting: dict[int, int] = {}  # who has asked this worker -> the number; read by the program's thread as well
        self._ticket: int | None = None
        self._number = 0
        self._num_bytes = 0
        self._asked: set[int] = set()
        self._source: tuple[int, ModelIs] | None = None
        self._values: Bytes = np.empty(0, np.uint8)
        self._missing = 0

    # -- the newcomer -------------------------------------------------------------------------------------------------

    def on_request(self, now: float, ticket: int, request: Any) -> Actions:
        if isinstance(request, GiveModel):
            return [*self._give(request), Reply(ticket)]
        assert isinstance(request, PullModel)
        self._ticket, self._num_bytes = ticket, request.num_bytes
        return self._ask_anew()

    def _ask_anew(self) -> list[Any]:
        self._number += 1
        self._asked, self._source = set(), None
        return self._ask_next()

    def _ask_next(self) -> list[Any]:
        assert self._ticket is not None
        order = sorted(self._here - self._asked, key=lambda rank: (rank - self._rank) % self._size)
        if not self._here:
            ticket, self._ticket = self._ticket, None
            why = f"rank {self._rank} has come back, and nobody is left who trains this model and could give it the weights"
            return [Reply(ticket, error=StrettoError(why)), SetTimer("next", None)]
        if not order:
            return []
        self._asked.add(order[0])
        return [SendMessage(order[0], AskModel(self._number)), SetTimer("next", NEXT_S)]

    def on_timer(self, now: float, name: str) -> Actions:
        return self._ask_next() if self._ticket is not None and self._source is None else []

    def on_message(self, now: float, source: int, header: AskModel | ModelIs | PartOfModel, payload: memoryview) -> Actions:
        if isinstance(header, AskModel):
            self.waiting[source] = header.number
            return []
        if self._ticket is None or header.number != self._number:
            return []
        if isinstance(header, ModelIs):
            return self._begins(source, header) if self._source is None else []
        if self._source is None or self._source[0] != source or header.start + payload.nbytes > self._values.size:
            return []
        self._values[header.start : header.start + payload.nbytes] = np.frombuffer(payload, np.uint8)
        self._missing -= payload.nbytes
        return self._look_if_complete()

    def _begins(self, source: int, header: ModelIs) -> list[Any]:
        if header.num_bytes != self._num_bytes:
            assert self._ticket is not None
            ticket, self._ticket = self._ticket, None
            why = (
                f"rank {source} trains a model of {header.num_bytes} bytes with its buffers, and that of rank {self._rank} has "
                f"{self._num_bytes}.\nBuild the model as the others have built theirs."
            )
            return [Reply(ticket, error=StrettoError(why)), SetTimer("next", None)]
        self._source = source, header
        self._values = np.empty(self._num_bytes, np.uint8)
        self._missing = self._num_bytes
        return self._look_if_complete()

    def _look_if_complete(self) -> list[Any]:
        if self._missing:
            return []
        assert self._ticket is not None and self._source is not None
        ticket, self._ticket = self._ticket, None
        source, header = self._source
        values, self._values = self._values, np.empty(0, np.uint8)
        return [Reply(ticket, PulledModel(source, values, header.steps, header.meetings)), SetTimer("next", None)]

    # -- the others ---------------------------------------------------------------------------------------------------

    def _give(self, model: GiveModel) -> list[Any]:
        actions: list[Any] = []
        for to, number in sorted(self.waiting.items()):
            actions.append(SendMessage(to, ModelIs(number, model.steps, model.meetings, model.values.size)))
            for start in range(0, model.values.size, PIECE_BYTES):
                part = model.values[start : start + PIECE_BYTES]
                actions.append(SendMessage(to, PartOfModel(number, start), part.data))
        self.waiting.clear()
        return actions

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        actions: list[Any] = []
        for rank in left:
            self._here.discard(rank)
            self.waiting.pop(rank, None)
        self._here |= set(joined)
        if self._ticket is not None:
            if self._source is not None and self._source[0] in left:
                actions = self._ask_anew()
            elif self._source is None and (self._asked & set(left) or not self._here):
                actions = self._ask_next()
        return actions
