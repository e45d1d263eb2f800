"""Averaging with neighbours (D-PSGD): what is sent, and what comes of it.

    x_i <- x_i + gamma sum_j W_ij (x_j - x_i)  + this step of the optimizer

All x are those of the beginning of the step, at which the gradient is taken too: so models travel while forward and backward
run, and with any optimizer. With SGD this is x_i <- sum_j W_ij x_j - eta g_i, as in the paper.

A neighbour that is gone is left out of the sum, so its weight stays with x_i: among the living W is again symmetric where it was,
and doubly stochastic, and the mean of the living stays. (In the step in which it dies some have had its model and others not.)

Invariant: sum_i x_i is changed by the optimizers alone, to the rounding of one addition.
Memory:    the model once for what is sent, and once for each neighbour's that has come.
Reference: Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NIPS 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto.aggregate.gossip.exchange import Arrived, MessageNote, Outgoing
from stretto.aggregate.gossip.mixing import Weights

WeightsOf = Callable[[int], Weights]  # of a step


class NeighbourAverage:
    """One worker's. `weights(step)`: the mixing matrix."""

    def __init__(self, rank: int, weights: WeightsOf, pace: float = 1.0) -> None:
        self._rank, self._weights, self._pace = rank, weights, pace
        self._sent: Tensor | None = None

    def leaves(self, step: int, values: Tensor, gone: frozenset[int]) -> list[Outgoing]:
        """`values` are kept, and must not change until the step has ended everywhere."""
        self._sent = values
        column = self._weights(step)[:, self._rank]
        targets = [to for to in column.nonzero()[0].tolist() if to != self._rank and to not in gone]
        return [Outgoing(to, values.numpy().data, MessageNote(whole=True)) for to in targets]

    def difference(self, step: int, messages: Sequence[Arrived]) -> Tensor | None:
        """What the model moves by, in the order of ranks; None if nobody sent anything. In memory of the first message."""
        sent, self._sent = self._sent, None
        assert sent is not None, "it has left before"
        if not messages:
            return None
        row = self._weights(step)[self._rank]
        shares = [self._pace * float(row[each.source]) for each in messages]
        moved = messages[0].payload.view(torch.float32).mul_(shares[0])
        for each, share in zip(messages[1:], shares[1:], strict=True):
            moved.add_(each.payload.view(torch.float32), alpha=share)
        return moved.sub_(sent, alpha=sum(shares))
