"""Compressed averaging with neighbours (CHOCO-SGD): what is sent, and what comes of it.

Everybody has a *public copy* x^_i, which all neighbours know, and sends what changes in it:

    q_i = Q(x_i - x^_i)                           any codec, without error feedback: what q leaves out is in x - x^ next time
    x^_j <- x^_j + q_j                            for oneself and all neighbours
    x_i <- x_i + (this step of the optimizer) + gamma sum_j W_ij (x^_j - x^_i)

Nobody keeps the copies of its neighbours. The sum s_i = sum_j W_ij x^_j is enough, of which sum_j W_ij q_j is the change, so
there are two more vectors, whatever the number of neighbours (one more for each further weight that differs among a worker's
neighbours: equal weights share a sum, to which payloads are added as they are).

When a neighbour leaves, its copy has to leave s_i, and nobody has kept it. The step after, everybody who has lost one asks, and
its neighbours send their public copies whole, of which the sum is made anew. So nobody is drawn to what the dead had, and W among
the living is as in `averaging.py`.

The order is that of the released code, and of the ICLR paper: gradient, mixing with what is known, then q of the result. So q
travels while the next forward and backward run, and with Q = identity and gamma = 1 this is `averaging.py`, step by step. The
ICML paper sends before it mixes: one exchange fresher, and in everybody's way.

Copies begin with the values that all workers begin with, where the papers begin with 0 and first have to catch up.

Invariant: sum_i x_i is changed by the optimizers alone, to rounding, whatever Q is: W is symmetric, and x^_j the same for all.
           (In the steps between a death and the sums made anew, by the difference of the copies from the dead's as well.)
Converges: for Q with E|Q(x) - x|^2 <= (1 - omega) |x|^2, W with gap delta and beta = |I - W|, proven for

    gamma = delta^2 omega / (16 delta + delta^2 + 4 beta^2 + 2 delta beta^2 - 8 delta omega)

           which is small (`proven_step`); in practice gamma between 0.05 and 1 works, the smaller the less is sent.
References: Koloskova, Stich and Jaggi, ICML 2019; Koloskova, Lin, Stich and Jaggi, ICLR 2020.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from stretto.aggregate.gossip.averaging import WeightsOf
from stretto.aggregate.gossip.exchange import Arrived, MessageNote, Outgoing
from stretto.aggregate.gossip.graph import MixingGraph
from stretto.compress.codec import Codec
from stretto.compress.exchange import blamed_on
from stretto.compress.layout import Blocks
from stretto.compress.random_numbers import RandomKeys

COPY: Final = "public copy"
SUM: Final = "sum of public copies"


def proven_step(graph: MixingGraph, size: int, omega: float) -> float:
    """The gamma of the theorem, for a codec that keeps a share omega of the squared length, `TopK(omega)` say."""
    delta = graph.spectral_gap(size)
    beta = float(np.linalg.norm(np.eye(size) - graph.weights(size), 2))
    return delta**2 * omega / (16 * delta + delta**2 + 4 * beta**2 + 2 * delta * beta**2 - 8 * delta * omega)


class CompressedAverage:
    """One worker's. `first`: the values that all workers begin with; `alone`: only this one does, which has come back."""

    def __init__(
        self, rank: int, weights: WeightsOf, pace: float, codec: Codec, blocks: Blocks, first: Tensor, *, alone: bool = False
    ) -> None:
        self._rank, self._pace = rank, pace
        self._codec, self._blocks = codec, blocks
        row = weights(1)[rank]
        self._weights = {j: float(row[j]) for j in row.nonzero()[0].tolist() if j != rank}  # of neighbours
        self._copy = first.clone()
        self._known = frozenset(() if alone else self._weights)  # whose copies are in the sums
        self._sums = {weight: first * count for weight, count in self._counts().items()}  # of copies with equal weights
        self._wants_whole: frozenset[int] = frozenset()  # who has asked
        self._asked = False  # this worker, in the last step: what comes now is whole
        self._asks = False  # and in this one
        self._leaving: tuple[Tensor, Tensor] | None = None  # this step's q, and room for a vector

    def _counts(self) -> dict[float, int]:
        """For each weight, how many neighbours have it whose copies are known."""
        counts = {weight: 0 for weight in sorted({*self._weights.values()})}
        for neighbour in self._known:
            counts[self._weights[neighbour]] += 1
        return counts

    def leaves(self, step: int, values: Tensor, gone: frozenset[int]) -> list[Outgoing]:
        """`values` are overwritten. Nothing that is remembered changes before the step ends, so it can be saved at any time."""
        here = self._weights.keys() - gone
        self._asks = self._known != here and not self._asked
        payload = self._codec.encode(values.sub_(self._copy), self._blocks, self._random(step, self._rank))
        self._leaving = payload, values
        whole = self._copy.clone() if here & self._wants_whole else None
        if whole is not None:
            self._codec.add_decoded(payload, self._blocks, self._random(step, self._rank), whole)
        note, messages = MessageNote(asks=self._asks), []
        for to in sorted(here):
            if whole is not None and to in self._wants_whole:
                messages.append(Outgoing(to, whole.numpy().data, MessageNote(whole=True, asks=self._asks)))
            else:
                messages.append(Outgoing(to, payload.numpy().data, note))
        return messages

    def difference(self, step: int, messages: Sequence[Arrived]) -> Tensor | None:
        """What the model moves by; None where there is no neighbour left. Valid until the next step begins."""
        assert self._leaving is not None, "it has left before"
        (payload, moved), self._leaving = self._leaving, None
        self._codec.add_decoded(payload, self._blocks, self._random(step, self._rank), self._copy)
        self._wants_whole = frozenset(each.source for each in messages if each.note.asks)
        if self._asked:
            messages = [each for each in messages if each.note.whole]
            self._known = frozenset(each.source for each in messages)
            for total in self._sums.values():
                total.zero_()
        for each in messages:
            if each.source in self._known:  # one that has come back is known when it has sent its copy whole
                self._add(step, each)
        self._asked = self._asks
        moved.zero_()
        for weight, count in self._counts().items():
            moved.add_(self._sums[weight], alpha=self._pace * weight).sub_(self._copy, alpha=self._pace * weight * count)
        return moved if self._known else None

    @staticmethod
    def _random(step: int, rank: int) -> RandomKeys:
        return RandomKeys.of_round(step, rank)

    def _add(self, step: int, message: Arrived) -> None:
        total = self._sums[self._weights[message.source]]
        if message.note.whole:
            total.add_(message.payload.view(torch.float32))
            return
        with blamed_on(message.source, repr(self._codec)):
            self._codec.add_decoded(message.payload, self._blocks, self._random(step, message.source), total)

    # -- what is remembered -------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        return {COPY: self._copy, **{f"{SUM} {number}": total for number, total in enumerate(self._sums.values())}}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        self._copy.copy_(saved[COPY])
        for number, total in enumerate(self._sums.values()):
            total.copy_(saved[f"{SUM} {number}"])
