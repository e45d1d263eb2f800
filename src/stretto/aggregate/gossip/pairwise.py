"""Asynchronous pairwise averaging: a worker and one neighbour at a time become the mean of both, while both compute.

    step            x_i <- x_i + d            what its optimizer has done, computed on whatever x_i was when the step began
    average         x_i, x_j <- (x_i + x_j) / 2

    i, free                        j
    AskPair(number)         -->    free: now it belongs to i, and to nobody else       or    PairBusy: i asks another one
                            <--    PairReady
    PairValues: x_i         -->    move = (x_i - x_j) / 2,   x_j <- x_j + move,  free
                            <--    PairMove: move
    x_i <- x_i - move,  free

Both add and subtract the same numbers, so x_i + x_j changes by rounding alone, whatever steps come between: those of i while the
message is under way stay, for the move is subtracted from what x_i is then.

Who is not free says so at once. One that has asked, and has no answer yet, yields to an asker of a lower rank: it takes back its
own question (PairCancel, when the answer comes). So nobody waits for somebody who waits for it, the lowest rank of those that
have asked in a circle gets its answer, and where all ask at once about half of them succeed: no deadlock in any graph, and no
need for active and passive workers.

Deaths. A move is taken as a whole or not at all. If i dies, j has what it has heard: the mean with an x_i that is gone. If j dies
before the whole move is here, i stays as it is. The sum over those that live then changes by what the dead had, and by no more
than half of the difference of the two.

At most one averaging begins for each step of a worker, with a neighbour drawn at random, and it takes part in those of others at
any time. Staleness of a step: averagings that changed x_i between the values that it was computed on and its end.

Cost:      for each averaging m bytes each way; up to three vectors of m bytes more in each worker.
Needs:     order; `left` means dead, or finished.
Reference: Lian, Zhang, Zhang and Liu, "Asynchronous decentralized parallel stochastic gradient descent", ICML 2018.
Departs:   they make the graph bipartite, and only one side asks. The averaging and the step need no common lock: both only add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from random import Random
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.aggregate.gossip.graph import MixingGraph
from stretto.protocol.machine import Actions, Machine, Reply, SendMessage, SetTimer

PIECE_BYTES: Final = 1 << 20
AGAIN_S: Final = 0.002  # after everybody asked was busy, to twice that

Values = NDArray[np.float32]


class AskPair(msgspec.Struct, frozen=True, tag=True):
    number: int


class PairBusy(msgspec.Struct, frozen=True, tag=True):
    number: int


class PairReady(msgspec.Struct, frozen=True, tag=True):
    number: int


class PairCancel(msgspec.Struct, frozen=True, tag=True):
    """I have asked, and have been asked since: you are free."""

    number: int


class PairValues(msgspec.Struct, frozen=True, tag=True):
    number: int
    start: int


class PairMove(msgspec.Struct, frozen=True, tag=True):
    number: int
    start: int


FromPartner = AskPair | PairBusy | PairReady | PairCancel | PairValues | PairMove


class TakeStep(NamedTuple):
    """The program has moved the model by `moved`; `into` is overwritten with what it is now. The reply is the staleness.
    `ends`: a step has ended, and another averaging may begin."""

    moved: Values
    into: Values
    ends: bool = True


class SettlePairs(NamedTuple):
    """Take part in no averaging until the next step. The reply is a copy of the model, when none is under way."""


class ReplaceModel(NamedTuple):
    """After `SettlePairs`: go on from these values."""

    values: Values


class PairPart(Enum):
    """What this worker does in an averaging."""

    ASKING = "it has asked"
    GIVING = "it has sent its values"
    TAKING = "it has been asked"


class Pair:
    """The averaging that this worker belongs to."""

    def __init__(self, partner: int, number: int, part: PairPart) -> None:
        self.partner, self.number, self.part = partner, number, part
        self.arriving: Values = np.empty(0, np.float32)
        self.arrived = 0  # elements


class PairwiseAveraging(Machine):
    """See the module's text. `model` is this worker's, and the machine's own from now on. `count(peer, sent,
    received)` is told of bytes."""

    header_type = FromPartner

    def __init__(
        self,
        rank: int,
        size: int,
        graph: MixingGraph,
        model: Values,
        seed: int = 0,
        first_step: int = 0,
        count: Callable[[int, int, int], object] | None = None,
    ) -> None:
        self._rank, self._size, self._graph = rank, size, graph
        self._here = set(range(size)) - {rank}
        self.model = model
        self._count = count or (lambda peer, sent, received: None)
        self._chance = Random(f"{seed} {rank} {first_step}")
        self._steps = first_step
        self._numbers = rank  # of its questions: no other worker has the same
        self._pair: Pair | None = None
        self._is_due = False  # an averaging of ours
        self._is_open = True  # to others
        self._moves = 0  # since the last step
        self._settling: list[int] = []

    # -- the program --------------------------------------------------------------------------------------------------

    def on_request(self, now: float, ticket: int, request: Any) -> Actions:
        match request:
            case TakeStep(moved, into, ends):
                self.model += moved
                into[:] = self.model
                if not ends:
                    return [Reply(ticket, self._moves)]
                staleness, self._moves = self._moves, 0
                self._steps += 1
                self._is_due = self._is_open = True
                return [Reply(ticket, staleness), *self._ask()]
            case SettlePairs():
                self._is_due = self._is_open = False
                self._settling.append(ticket)
                return self._free() if self._pair is None else []
            case ReplaceModel(values):
                self.model[:] = values
        return [Reply(ticket)]

    def _ask(self) -> list[Any]:
        if not self._is_due or self._pair is not None:
            return []
        neighbours = [rank for rank in self._graph.targets(self._rank, self._size, self._steps) if rank in self._here]
        if not neighbours:
            return []
        self._is_due = False
        self._numbers += self._size
        self._pair = Pair(self._chance.choice(neighbours), self._numbers, PairPart.ASKING)
        return [SendMessage(self._pair.partner, AskPair(self._numbers))]

    def on_timer(self, now: float, name: str) -> Actions:
        return self._ask()

    # -- an averaging -------------------------------------------------------------------------------------------------

    def on_message(self, now: float, source: int, header: FromPartner, payload: memoryview) -> Actions:
        if isinstance(header, AskPair):
            return self._asked(source, header.number)
        pair = self._pair
        if pair is None or (pair.partner, pair.number) != (source, header.number):
            return [SendMessage(source, PairCancel(header.number))] if isinstance(header, PairReady) else []
        match header, pair.part:
            case PairBusy(), PairPart.ASKING:
                self._is_due = self._is_open
                again_s = AGAIN_S * (1 + self._chance.random())
                return [*self._free(asks=False), SetTimer("again", again_s)]
            case PairCancel(), PairPart.TAKING:
                return self._free()
            case PairReady(), PairPart.ASKING:
                pair.part = PairPart.GIVING
                self._make_room(pair)
                return self._send(pair, PairValues, self.model.copy())
            case PairValues(start=start), PairPart.TAKING if self._arrives(pair, start, payload):
                move = pair.arriving
                move -= self.model
                move *= 0.5
                self.model += move
                self._moves += 1
                return [*self._send(pair, PairMove, move), *self._free()]
            case PairMove(start=start), PairPart.GIVING if self._arrives(pair, start, payload):
                self.model -= pair.arriving
                self._moves += 1
                return self._free()
        return []

    def _asked(self, source: int, number: int) -> list[Any]:
        yields = self._pair is not None and self._pair.part is PairPart.ASKING and source < self._rank
        if not self._is_open or (self._pair is not None and not yields):
            return [SendMessage(source, PairBusy(number))]
        self._is_due |= yields
        self._pair = Pair(source, number, PairPart.TAKING)
        self._make_room(self._pair)
        return [SendMessage(source, PairReady(number))]

    def _make_room(self, pair: Pair) -> None:
        pair.arriving, pair.arrived = np.empty_like(self.model), 0

    def _arrives(self, pair: Pair, start: int, payload: memoryview) -> bool:
        """Whether all of it is here now. Pieces come in order; what does not fit is not taken."""
        numel, odd = divmod(payload.nbytes, self.model.itemsize)
        if odd or start != pair.arrived or start + numel > self.model.size:
            return False
        self._count(pair.partner, 0, payload.nbytes)
        pair.arriving[start : start + numel] = np.frombuffer(payload, np.float32)
        pair.arrived += numel
        return pair.arrived == self.model.size

    def _send(self, pair: Pair, kind: type[PairValues] | type[PairMove], values: Values) -> list[Any]:
        """`values` do not change any more."""
        self._count(pair.partner, values.nbytes, 0)
        length = PIECE_BYTES // values.itemsize
        return [
            SendMessage(pair.partner, kind(pair.number, start), values[start : start + length].data)
            for start in range(0, values.size, length)
        ]

    def _free(self, *, asks: bool = True) -> list[Any]:
        self._pair = None
        settled, self._settling = self._settling, []
        if settled:
            return [Reply(ticket, self.model.copy()) for ticket in settled]
        return self._ask() if asks else []

    # -- who is here --------------------------------------------------------------------------------------------------

    def on_view(self, now: float, joined: Sequence[int], left: Sequence[int], generation: int) -> Actions:
        self._here = (self._here | set(joined)) - set(left)
        if self._pair is not None and self._pair.partner in left:
            self._is_due |= self._is_open and self._pair.part is not PairPart.TAKING
            return self._free()
        return []
