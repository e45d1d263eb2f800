"""Push-sum (SGP): every worker has values x_i and a mass w_i, gives shares of both away, and computes with z_i = x_i / w_i.

    x_i <- x_i + (this step of the optimizer, at z_i)
    send  (p_ji x_i, p_ji w_i)  to each target j of the step, and keep p_ii = p_ji of both
    x_i <- sum of what has come and was kept, w_i likewise;   z_i = x_i / w_i

Only columns of P have to add up to 1: a worker decides by itself what it gives to whom, so graphs may be one-way and change in
every step, and messages may come late (`late` > 0, overlap SGP): what is under way is missing in x and w alike.

A target that is gone gets nothing, and what it would have got is shared by the others. What it had, and what was under way to it,
is gone with it, mass and values alike, and z of the living stays a mean of what they have. But x / w would move further by the
same step of an optimizer from then on, for ever. So whoever hears of a death, or of a worker that has finished, takes all that is
under way to itself and begins anew, x = z and w = 1. Workers hear of a death at different steps, so the masses of n that live add
up to n only about: within a sixth, and with messages that come two steps late within a third, in 30 runs of 8 workers of which
two die (`test_in_virtual_time.py`). The next `stretto.consensus` makes all masses 1.

On a graph on which all have equally many sources w stays 1, until somebody leaves; then x and z are one, and nothing is divided.

Invariant: sum_i x_i and sum_i w_i, with what is under way, are changed by optimizers and deaths alone. w > 0.
Memory:    the model once for what is sent, once for each message that has come, and once for x while w is not 1.
Reference: Assran et al., "Stochastic gradient push for distributed deep learning", ICML 2019. Departs from it: any
           optimizer will do. Its momentum is each worker's own, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from stretto.aggregate.gossip.averaging import WeightsOf
from stretto.aggregate.gossip.exchange import Arrived, MessageNote, Outgoing

ONE: Final = 1e-12  # a mass that is off by no more is 1: shares of a third do not add up to it exactly


class PushSum:
    """One worker's mass, and its values where they differ from its model's."""

    def __init__(self, rank: int, weights: WeightsOf) -> None:
        self._rank, self._weights = rank, weights
        self.mass = 1.0
        self.values: Tensor | None = None  # x; None: it is z, for the mass is 1
        self._kept: tuple[Tensor, float] | None = None  # what was posted, and the share that this worker keeps

    def leaves(self, step: int, model: Tensor, gone: frozenset[int]) -> list[Outgoing]:
        """`model`: z after the optimizer's step, in memory that is kept: x then."""
        if self.values is not None:  # x + (z' - z), and z = x / w
            model.add_(self.values, alpha=1.0 - 1.0 / self.mass)
            self.values = None
        column = self._weights(step)[:, self._rank]
        targets = [to for to in column.nonzero()[0].tolist() if to != self._rank and to not in gone]
        given = {to: float(column[to]) for to in targets}
        kept = float(column[self._rank])
        whole = kept + sum(given.values())
        if not targets:
            kept = whole = 1.0  # whatever was to be given stays
        self._kept = model, kept / whole
        return [
            Outgoing(to, model.numpy().data, MessageNote(share / whole, self.mass, whole=True)) for to, share in given.items()
        ]

    def arrives(self, messages: Sequence[Arrived]) -> Tensor | None:
        """The new z, added up in the order of steps and ranks; None if nothing has changed it."""
        assert self._kept is not None, "it has left before"
        (posted, kept), self._kept = self._kept, None
        self.mass *= kept
        if kept == 1.0 and not messages:
            return None if self.mass == 1.0 else self._scaled(posted)
        return self._scaled(self._added(posted, kept, messages))

    def settles(self, messages: Sequence[Arrived]) -> Tensor | None:
        """Messages that come between steps: the new z; None if there are none."""
        if not messages:
            return None
        assert self.values is not None, "what is under way is missing here"
        return self._scaled(self._added(self.values, 1.0, messages))

    def begin_anew(self) -> None:
        """Somebody is gone with what it had, or all workers hold the same: begin from the model, with a mass of 1."""
        self.mass, self.values = 1.0, None

    def _added(self, own: Tensor, kept: float, messages: Sequence[Arrived]) -> Tensor:
        """kept * own + what has come, in memory of the first message; `own` may still be on its way to others."""
        if not messages:
            return own * kept
        first = messages[0]
        values = first.payload.view(torch.float32).mul_(first.note.share).add_(own, alpha=kept)
        for each in messages[1:]:
            values.add_(each.payload.view(torch.float32), alpha=each.note.share)
        self.mass += sum(each.note.share * each.note.mass for each in messages)
        if abs(self.mass - 1.0) <= ONE:
            self.mass = 1.0
        return values

    def _scaled(self, values: Tensor) -> Tensor:
        self.values = None if self.mass == 1.0 else values
        return values if self.values is None else values / self.mass
