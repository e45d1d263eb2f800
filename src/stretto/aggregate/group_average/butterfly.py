"""The sum of one round, as one worker forms it: a butterfly in which everybody asks for what it lacks.

    stage k = 0, 1, ...      s_0 = x_r,      s_(k+1) = s_k + (s_k of the partner, which differs in bit k of the round)

After stage k all that differ in the first k bits hold the same sum. So if a partner is gone, any other of its side will do: it
is asked in its place, and where the whole side is gone there is nothing to add. That is how a group is completed without the
dead, and how empty corners of the cube are stepped over: all that are left get the sum of all that are left, however many die
between rounds. If somebody dies in the middle of one, some of the others may have it in their sums and some not. Each knows
whose models its sum is made of (`contributors`), so each has the mean of whole models, but not all the same one.

A sum that has come in part is in memory of its own, and is forgotten when its sender is: nothing half received is ever used.

Cost:      every worker sends log2(S) m bytes and takes as many, in groups of S and of models of m bytes. If corners are empty, it
           sends a sum once for each that asks: less than twice that. Where workers have died, more.
           Memory: m for each stage, until all that are going to ask have been served.
Invariant: of the same contributors everybody gets the same bits. A sum is of two halves of a cube, whose sums are likewise, and
           a + b = b + a; a half of which there is nobody changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.aggregate.group_average.cube import Cube

Values = NDArray[np.float32]
PIECE: Final = 1 << 20  # elements in a message: 4 MiB


class RoundName(NamedTuple):
    number: int
    attempt: int = 0


class PartnerSum:
    """What a partner sends of its sum, with ours added as soon as it is known."""

    def __init__(self, source: int, num_elements: int) -> None:
        self.source = source
        self.contributors: frozenset[int] | None = None
        self.values = np.empty(num_elements, np.float32)
        self.missing = set(range(0, max(num_elements, 1), PIECE))
        self._bare: list[slice] = []  # to which ours has yet to be added

    def take(self, start: int, piece: Values, ours: Values | None) -> None:
        span = slice(start, start + len(piece))
        self.missing.discard(start)
        if ours is None:
            self.values[span] = piece
            self._bare.append(span)
        else:
            np.add(piece, ours[span], out=self.values[span])

    def add(self, ours: Values) -> None:
        for span in self._bare:
            self.values[span] += ours[span]
        self._bare = []


class ButterflySum:
    """See the module's text. `living`: who can be asked, as far as is known."""

    def __init__(self, cube: Cube, rank: int, name: RoundName, bits: Sequence[int], own: Values, living: Set[int]) -> None:
        self.name, self.bits = name, tuple(bits)
        self._sides = [cube.side(rank, bits, stage) for stage in range(len(bits))]
        self.own = own
        self._sums: list[Values] = [own]
        self.contributors: list[frozenset[int]] = [frozenset((rank,))]
        self._left = [[other for other in side if other in living] for side in self._sides]
        self._incoming: list[PartnerSum | None] = [None] * len(bits)
        self._unserved = {(k, taker) for k in range(len(bits)) for taker in cube.takers(rank, bits, k, living | {rank})}

    # -- what is asked ------------------------------------------------------------------------------------------------

    def ask(self) -> Iterator[tuple[int, int]]:
        """Whom to ask, for which stage, that has not been asked yet."""
        for stage in range(self.stage, len(self.bits)):
            if self._incoming[stage] is None and self._left[stage]:
                source = self._left[stage][0]
                self._incoming[stage] = PartnerSum(source, len(self.own))
                yield source, stage

    def take(self, source: int, stage: int, start: int, contributors: frozenset[int], payload: memoryview) -> str | None:
        """A piece has come. Returns what is wrong with it, if something is."""
        incoming = self._incoming[stage] if stage in range(len(self.bits)) else None
        if incoming is None or incoming.source != source:
            return None  # of somebody who was given up
        expected = min(PIECE, len(self.own) - start)
        side = self._sides[stage]
        if start not in incoming.missing or payload.nbytes != 4 * expected:
            return f"{payload.nbytes} bytes from element {start} on, of {len(self.own)} elements"
        if not contributors <= set(side) or source not in contributors or incoming.contributors not in (None, contributors):
            return f"a sum of the models of ranks {sorted(contributors)}, where those of {side} are due"
        incoming.contributors = contributors
        incoming.take(start, np.frombuffer(payload, np.float32), self._sums[stage] if stage <= self.stage else None)
        self._go_on()
        return None

    def give_up(self, source: int, only: int | None = None) -> None:
        """It is gone, or has nothing to give (in one stage): ask others for what it has not sent entirely."""
        for stage in range(len(self.bits)) if only is None else (only,):
            if source in self._left[stage]:
                self._left[stage].remove(source)
            incoming = self._incoming[stage]
            if stage >= self.stage and incoming is not None and incoming.source == source and incoming.missing:
                self._incoming[stage] = None
        self._go_on()

    def _go_on(self) -> None:
        while self.stage < len(self.bits):
            stage, ours = self.stage, self._sums[-1]
            incoming = self._incoming[stage]
            if incoming is None and not self._left[stage]:
                self._sums.append(ours)
                self.contributors.append(self.contributors[-1])
                continue
            if incoming is None:
                return
            incoming.add(ours)
            if incoming.missing:
                return
            assert incoming.contributors is not None
            self._sums.append(incoming.values)
            self.contributors.append(self.contributors[-1] | incoming.contributors)

    @property
    def stage(self) -> int:
        """How many stages have ended."""
        return len(self._sums) - 1

    @property
    def is_finished(self) -> bool:
        self._go_on()
        return self.stage == len(self.bits)

    @property
    def total(self) -> Values:
        return self._sums[-1]

    # -- what is given ------------------------------------------------------------------------------------------------

    def can_give(self, stage: int) -> bool:
        """Whether the sum after so many stages is known. The last one nobody needs."""
        return 0 <= stage <= min(self.stage, len(self.bits) - 1)

    def pieces(self, stage: int) -> Iterator[tuple[int, memoryview]]:
        """A sum that is known, as it is sent: where each piece begins, and its bytes."""
        total = self._sums[stage]
        for start in range(0, max(total.size, 1), PIECE):
            piece = total[start : start + PIECE]
            yield start, piece.data.cast("B") if piece.size else memoryview(b"")

    def served(self, stage: int, taker: int) -> None:
        self._unserved.discard((stage, taker))

    def needs_no_more(self, taker: int) -> None:
        """It has gone on to another round, or is gone."""
        self._unserved = {each for each in self._unserved if each[1] != taker}

    def lose(self, rank: int) -> None:
        """It died or left: it neither gives nor takes."""
        self.needs_no_more(rank)
        self.give_up(rank)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody will yet ask for one of these sums, as far as is known."""
        return bool(self._unserved)
