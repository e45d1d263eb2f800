"""Memory for what is kept from a forward to its backward, all of it in one piece.

    arena    [ kept | kept | gap | kept | gap ........ ]      for one dtype and device

What is kept is laid into the first gap that is long enough, and leaves a gap when it is let go of. How long the arena has to be
is known from the pass before, where a *pass* lasts from when something is kept to when nothing is: as long as the most that was
kept at once. In a pipeline with 1F1B these are K - k micro-batches, however many a step has. Between two passes the arena is
made anew if it was too short, or more than twice too long. What does not fit has memory of its own, as all of the first pass.

Memory:     at most twice what was kept at once in the pass before, and beside it what does not fit there.
Reference:  M_D of ZeRO-R: Rajbhandari et al., "ZeRO", arXiv:1910.02054, section 6.3.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections import deque

from torch import Tensor

from stretto.engine.arena import ALIGNED_BYTES, MemoryKind, laid_out

OUTSIDE = -1  # where a piece begins that did not fit


class KeptPiece:
    """Memory that is its owner's until this object is gone: then others write there, so keep it for as long as you read."""

    __slots__ = ("__weakref__", "values")

    def __init__(self, values: Tensor) -> None:
        self.values = values


class KeptArena:
    """An arena. See the module's text."""

    def __init__(self, kind: MemoryKind) -> None:
        self._kind = kind
        self._step = max(1, ALIGNED_BYTES // kind.dtype.itemsize)
        self._memory = laid_out([(kind, 0)])[0]
        self._gaps: list[tuple[int, int]] = []  # from where to where, in order
        self._let_go: deque[tuple[int, int]] = deque()  # where, and how long: pieces end in any thread, at any moment
        self._kept = self._most = 0  # elements: now, and at once in this pass

    @property
    def length(self) -> int:
        """How many elements the arena has, used or not."""
        return len(self._memory)

    def take(self, length: int) -> KeptPiece:
        if not length:  # nothing is kept, so no pass begins
            return KeptPiece(laid_out([(self._kind, 0)])[0])
        self._close_gaps()
        if not self._kept:
            self._begin_pass()
        room = -(-length // self._step) * self._step
        self._kept += room
        self._most = max(self._most, self._kept)
        start = self._start_of_gap(room)
        inside = start != OUTSIDE
        piece = KeptPiece(self._memory[start : start + length] if inside else laid_out([(self._kind, length)])[0])
        weakref.finalize(piece, self._let_go.append, (start, room)).atexit = False
        return piece

    def _begin_pass(self) -> None:
        if self._most > self.length or 2 * self._most < self.length:
            self._memory = laid_out([(self._kind, 0)])[0]  # before there is another one
            self._memory = laid_out([(self._kind, self._most)])[0]
            self._gaps = [(0, self._most)]
        self._most = 0

    def _start_of_gap(self, room: int) -> int:
        for number, (start, end) in enumerate(self._gaps):
            if end - start >= room:
                self._gaps[number : number + 1] = [(start + room, end)] if end - start > room else []
                return start
        return OUTSIDE

    def _close_gaps(self) -> None:
        while self._let_go:
            start, room = self._let_go.popleft()
            self._kept -= room
            if start != OUTSIDE:
                insort(self._gaps, (start, start + room))
        joined: list[tuple[int, int]] = []
        for start, end in self._gaps:
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, end))
        self._gaps = joined
