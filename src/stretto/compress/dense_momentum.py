"""Momentum kept beside the exchange: the mean over workers, accumulated.

    g = mean_w g_w,    u <- mu u + g,   handed out: u              as torch.optim.SGD(momentum=mu)
                       u <- mu (u + g), handed out: u + g          Nesterov's, as torch.optim.SGD(momentum=mu, nesterov=True)

For the tensors that `DGC` does not cut to few values: the optimizer has no momentum then, so it must come from here.

Bits:       32 per value, summed by any all-reduce.
Memory:     8 bytes per parameter: u, and the next one until the round has ended well. It is the same on all workers.
`clip`:     the same as in `DGC`: each worker cuts each tensor's gradient to the norm clip / sqrt(P) before it is added.
Reference:  Lin et al., "Deep Gradient Compression", ICLR 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stretto.compress.checks import check, is_number
from stretto.compress.codec import Compression
from stretto.compress.exchange import bytes_of_sum
from stretto.compress.layout import Layout
from stretto.compress.rounds import ExchangeContext, Steps, Sum

VELOCITY = "velocity"
OPTIMIZER = "torch.optim.SGD(model.parameters(), lr=...)  # momentum=0: DGC keeps the momentum"


@dataclass(frozen=True, slots=True)
class DenseMomentum(Compression):
    """What `DGC` uses for biases, norm layers and small tensors."""

    momentum: float = 0.9
    nesterov: bool = False
    clip: float | None = None
    optimizer_hint: ClassVar[str | None] = OPTIMIZER
    no_abstention: ClassVar[str | None] = "what it remembers counts in the mean, also of a worker without data"
    flat_kinds: ClassVar[frozenset[str]] = frozenset((VELOCITY,))

    def __post_init__(self) -> None:
        check_momentum(self, self.momentum, self.nesterov, self.clip)

    def exchange(self, values: Tensor, context: ExchangeContext) -> Steps:
        clip_each(values, context, self.clip)
        values.mul_(1.0 / context.world_size)
        values.copy_((yield Sum(values)))
        shared = context.state.shared
        u, next_u = shared.flat(VELOCITY), shared.next_flat(VELOCITY)
        if self.nesterov:
            torch.add(u, values, out=next_u).mul_(self.momentum)
            values.add_(next_u)
        else:
            torch.mul(u, self.momentum, out=next_u).add_(values)
            values.copy_(next_u)

    def bytes_sent(self, layout: Layout, rank: int, world_size: int, algorithm: str = "auto") -> int:
        return bytes_of_sum(layout.num_elements, 4, rank, world_size, algorithm) if world_size > 1 else 0


def clip_each(values: Tensor, context: ExchangeContext, clip: float | None) -> None:
    """Cut each tensor's norm, in place, to clip / sqrt(P): the sum of P of them, in random directions, has the norm `clip`.
    Gradients come multiplied by this worker's weight, and so is the limit."""
    if clip is None:
        return
    limit = clip * (context.weight or 1.0) / math.sqrt(context.world_size)
    for place in context.layout.places:
        part = values[place.start : place.stop]
        norm = torch.linalg.vector_norm(part, dtype=torch.float64)
        part.mul_((limit / norm).clamp(max=1.0).float())


def check_momentum(asked: Compression, momentum: Any, nesterov: Any, clip: Any) -> None:
    why = "gradients would be remembered for ever, unless it is a number from 0 to below 1"
    check(is_number(momentum) and 0 <= momentum < 1, asked, "momentum", why, "momentum=0.9, or momentum=0.0 for none")
    check(isinstance(nesterov, bool), asked, "nesterov", "that is neither True nor False", "nesterov=True for Nesterov's")
    why, instead = "gradients are cut to a norm, a number above 0", "clip=1.0, or clip=None to leave gradients as they are"
    check(clip is None or (is_number(clip) and clip > 0), asked, "clip", why, instead)
