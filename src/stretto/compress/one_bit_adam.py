"""1-bit Adam: Adam whose variance is settled after a warm-up, and whose momentum then travels compressed.

    t <= warm_up   g = mean of the gradients, uncompressed; m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2: Adam itself
    t > warm_up    v stays. Worker i: m_i = b1 m + (1 - b1) g_i; m = mean of C(m_i), with error feedback
    handed out     (m / (1 - b1^t)) / (sqrt(v / (1 - b2^min(t, warm_up))) + eps)         t = 1, 2, ...

Adam itself cannot be compressed like SGD, since it is not linear in the gradient; with v fixed it is.

Bytes:      in the warm-up 4 per parameter, summed; then those of the codec: 1/8 for `Sign`, in two phases 2 (P - 1) / P times.
Invariant:  error feedback's conservation, of momenta: m and what the residuals gained is the mean of m_i. All workers hold the
            same bits of m and v. Within the warm-up this is torch.optim.Adam, up to rounding.
Zeros:      where v = 0, no gradient came in the whole warm-up. `Sign` has no zero, so m is not zero there, and dividing by eps
            would blow it up: such entries get 0, for good. So the warm-up must be long enough to meet all that is to be trained.
            (The paper: until v is stable, 15 to 25 % of all steps.)
Memory:     24 bytes per parameter (m, v, the residual, each with a successor until the round has ended well); two-phase: 8 / P
            more. 5 that are kept for what a round computes.
Optimizer:  SGD without momentum: it applies the direction. Its weight decay is then decoupled, as AdamW's is.
Reference:  Tang et al., "1-bit Adam", ICML 2021 (arXiv:2102.02888). Departs from it: both moments keep their bias correction (v
            that of the warm-up's last round), so nothing jumps when compression begins, however short the warm-up; scales are
            those of the codec, mean magnitudes per block, a contraction also where values are sparse, which their norms are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from stretto.compress.buffer_pool import BufferPool
from stretto.compress.checks import check, is_count, is_number
from stretto.compress.codec import Codec, Compression
from stretto.compress.error_feedback import RESIDUAL, restore_feedback
from stretto.compress.exchange import exchange, feedback_of, refusal_with_feedback
from stretto.compress.layout import Layout
from stretto.compress.rounds import ExchangeContext, Steps, Sum
from stretto.compress.sign import Sign
from stretto.compress.state import SERVER, CompressionState, Exported
from stretto.errors import ConfigurationError

M, V = "m", "v"


@dataclass(frozen=True, slots=True)
class OneBitAdam(Compression):
    """`warm_up`: rounds of uncompressed Adam. `betas`, `eps`: Adam's. `codec`: how momentum travels after that."""

    warm_up: int
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    codec: Codec = field(default_factory=Sign)
    hands_out: ClassVar[Literal["mean", "direction"]] = "direction"
    no_abstention: ClassVar[str | None] = "what it remembers counts in the mean, also of a worker without data"
    optimizer_hint: ClassVar[str | None] = (
        "torch.optim.SGD(model.parameters(), lr=...)  "
        "# OneBitAdam hands out Adam's direction; weight_decay here is decoupled, as in AdamW"
    )
    flat_kinds: ClassVar[frozenset[str]] = frozenset((M, V, RESIDUAL, SERVER))

    def __post_init__(self) -> None:
        why = "without a round of Adam before it there is no variance to freeze"
        check(is_count(self.warm_up), self, "warm_up", why, "a number of rounds, 15 to 25 % of all: OneBitAdam(warm_up=1000)")
        betas = isinstance(self.betas, tuple) and len(self.betas) == 2 and all(is_number(b) and 0 <= b < 1 for b in self.betas)
        check(betas, self, "betas", "two numbers from 0 to below 1 are needed", "betas=(0.9, 0.999)")
        check(is_number(self.eps) and self.eps > 0, self, "eps", "a finite number above 0 is needed", "eps=1e-8")
        if isinstance(self.codec, Codec) and (reason := self.codec.no_residual or self.codec.no_contraction) is not None:
            raise ConfigurationError(
                f"OneBitAdam(codec={self.codec!r}): {reason}.\nWrite a contraction, whose error is fed back here: codec=Sign()."
            )
        if not isinstance(self.codec, Codec) or self.codec.lossless:
            raise ConfigurationError(
                f"OneBitAdam(codec={self.codec!r}): the momentum is sent by a lossy codec, whose error is fed back here.\n"
                f"Write codec=Sign(), without ErrorFeedback; to compress nothing, take torch.optim.Adam and NoCompression()."
            )

    def refusal(self, algorithm: str) -> str | None:
        return refusal_with_feedback(self.codec, algorithm)

    def exchange(self, values: Tensor, context: ExchangeContext) -> Steps:
        if context.state.rounds < self.warm_up:
            yield from self._adam(values, context)
        else:
            yield from self._compressed(values, context)
        self._direct(values, context)

    def _adam(self, values: Tensor, context: ExchangeContext) -> Steps:
        shared, (b1, b2) = context.state.shared, self.betas
        values.copy_((yield Sum(values)))
        values.mul_(1.0 / context.world_size)
        # Products are rounded before they are added: what is fused differs from one kind of processor to another.
        product = self._pool(context).empty(len(values), values.dtype, values.device)
        torch.mul(shared.flat(M), b1, out=shared.next_flat(M)).add_(torch.mul(values, 1 - b1, out=product))
        torch.mul(values, values, out=product).mul_(1 - b2)
        variance = torch.mul(shared.flat(V), b2, out=shared.next_flat(V)).add_(product)
        variance.clamp_(max=torch.finfo(torch.float32).max)  # the square of a large gradient is infinite

    def _compressed(self, values: Tensor, context: ExchangeContext) -> Steps:
        own, shared, b1 = context.state.own, context.state.shared, self.betas[0]
        residual = torch.add(own.flat(RESIDUAL), shared.flat(M), alpha=b1, out=own.next_flat(RESIDUAL)).add_(values, alpha=1 - b1)
        yield from exchange(self.codec, values, context, feedback_of(self.codec, residual, context))
        shared.next_flat(M).copy_(values)

    def _direct(self, values: Tensor, context: ExchangeContext) -> None:
        """values = the direction, from the moments that this round proposes."""
        shared, (b1, b2), t, pool = context.state.shared, self.betas, context.state.rounds + 1, self._pool(context)
        variance = shared.next_flat(V) if t <= self.warm_up else shared.flat(V)
        scale = torch.sqrt(variance, out=pool.empty(len(values), values.dtype, values.device))
        scale.div_(math.sqrt(1 - b2 ** min(t, self.warm_up))).add_(self.eps)
        torch.div(shared.next_flat(M), scale, out=values).div_(1 - b1**t)
        values.masked_fill_(torch.eq(variance, 0.0, out=pool.empty(len(values), torch.bool, values.device)), 0.0)

    def _pool(self, context: ExchangeContext) -> BufferPool:
        return context.blocks_of(self.codec).pool

    def restore(self, state: CompressionState, own: Exported, shared: Exported, rank: int, world_size: int) -> None:
        new = [place.name for place in state.layout.places if V not in shared.get(place.name, {})]
        if new and shared and state.rounds >= self.warm_up:
            raise ConfigurationError(
                f"parameter {new[0]} wants a gradient after the warm-up of {self!r}: its variance was never measured, so it "
                f"would not be trained.\nUnfreeze it within the first {self.warm_up} rounds, or warm up for longer."
            )
        restore_feedback(self.codec, state, own, rank, world_size)
        state.shared.restore(shared, self.flat_kinds)

    def bytes_sent(self, layout: Layout, rank: int, world_size: int, algorithm: str = "auto") -> int | None:
        """After the warm-up; in it, those of `NoCompression`."""
        return self.codec.bytes_sent(layout, rank, world_size, algorithm)
