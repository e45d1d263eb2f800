"""EF21: workers send how their gradient differs from what the others already believe it to be.

    c_i = C(g_i - e_i)           worker i: its gradient, less the estimate of it that all could have put together
    e_i = e_i + c_i
    e   = e + mean of c_i        the same on all workers; handed out

On a fixed point e_i goes to g_i geometrically, at the contraction's rate, where plain error feedback keeps circling: what is
compressed becomes small by itself.

Invariant:  e = mean of e_i over the workers, up to rounding. In a two-phase exchange (a codec that splits, P > 2) the means are
            compressed too, and the worker that combines a block keeps s, what they left out: e + s = mean of e_i. That is
            EF21-BC, compressed in both directions, and costs no more than error feedback does.
Bytes:      as the codec alone: gathered (P - 1) L, two-phase 2 L (P - 1) / P for payloads of L bytes.
Memory:     16 bytes per parameter (e_i and e, each with its successor until the round has ended well everywhere), two-phase
            8 / P more, with `momentum` 8 more; 4 that are kept for what a round computes.
Options:    `momentum` = eta: v_i = (1 - eta) v_i + eta g_i is estimated in place of g_i, v_i = g_i in the first round; batches
            may then be small (EF21-SGDM).
            `participation` = p: a worker takes part in a round with probability p, else it says that nothing has changed, and its
            e_i and v_i stay (EF21-PP). Saying so takes as many bytes as anything else (payloads of varying length are padded to
            the longest), and the worker has computed its gradient: p < 1 is there to study, not to save time.
            Heavy ball (EF21-HB) is `torch.optim.SGD(momentum=...)`.
References: Richtarik, Sokolov, Fatkhullin, "EF21", NeurIPS 2021 (arXiv:2106.05203); Fatkhullin et al., "EF21 with Bells &
            Whistles", arXiv:2110.03294; Fatkhullin, Tyurin, Richtarik, "Momentum Provably Improves Error Feedback!", NeurIPS 2023
            (arXiv:2305.15155). Departs from them: no server, the means are combined by all workers, each for some blocks; e_i
            begins as C(g_i), of the ways they name.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stretto.compress.checks import check, is_number
from stretto.compress.codec import Codec, Compression
from stretto.compress.error_feedback import restore_feedback
from stretto.compress.exchange import exchange, feedback_of, refusal_with_feedback
from stretto.compress.layout import Layout
from stretto.compress.random_numbers import mix
from stretto.compress.rounds import ExchangeContext, Steps
from stretto.compress.state import SERVER, CompressionState, Exported
from stretto.errors import ConfigurationError

ESTIMATE, VELOCITY, MEAN = "estimate", "velocity", "mean_estimate"
COIN = 0x45463231  # so that whether a worker takes part does not depend on what it draws for its values


@dataclass(frozen=True, slots=True)
class EF21(Compression):
    """`codec`: a contraction, such as `TopK` and `Sign`. `momentum`: eta in (0, 1]. `participation`: a probability in (0, 1]."""

    codec: Codec
    momentum: float | None = None
    participation: float = 1.0
    remembers: ClassVar[bool] = True
    no_abstention: ClassVar[str | None] = "what it remembers counts in the mean, also of a worker without data"
    flat_kinds: ClassVar[frozenset[str]] = frozenset((ESTIMATE, VELOCITY, SERVER, MEAN))

    def __post_init__(self) -> None:
        if (problem := _no_contraction(self.codec)) is not None:
            raise ConfigurationError(f"EF21({self.codec!r}): {problem}")
        for name, value in (("momentum", self.momentum), ("participation", self.participation)):
            is_right = (is_number(value) and 0 < value <= 1) or (value is None and name == "momentum")  # type: ignore[operator]
            instead = f"EF21({self.codec!r}, {name}=0.5), or leave it out"
            check(is_right, self, name, "a number above 0, at most 1, is needed", instead)

    def for_parameter(self, name: str, shape: tuple[int, ...]) -> Compression:
        inner = self.codec.for_parameter(name, shape)
        return dataclasses.replace(self, codec=inner) if isinstance(inner, Codec) and not inner.lossless else inner

    def refusal(self, algorithm: str) -> str | None:
        return refusal_with_feedback(self.codec, algorithm)

    def exchange(self, values: Tensor, context: ExchangeContext) -> Steps:
        own, shared = context.state.own, context.state.shared
        estimate, mean = own.flat(ESTIMATE), shared.flat(MEAN)
        target = own.next_flat(ESTIMATE).copy_(self._target(values, context))
        pool = context.blocks_of(self.codec).pool
        residual = torch.sub(target, estimate, out=pool.empty(len(target), torch.float32, target.device))
        yield from exchange(self.codec, values, context, feedback_of(self.codec, residual, context))
        target.sub_(residual)  # what remains is e_i + c_i
        values.copy_(torch.add(mean, values, out=shared.next_flat(MEAN)))

    def _target(self, values: Tensor, context: ExchangeContext) -> Tensor:
        """What the estimate is to become: the gradient, or its running mean; or what it is, if this worker does not take part."""
        own = context.state.own
        if mix(context.random.own ^ COIN) >= self.participation * 2**32:
            return own.flat(ESTIMATE)
        if self.momentum is None:
            return values
        weight = self.momentum if bool(own.flat(VELOCITY).any()) else 1.0  # the first one that this worker has
        return torch.lerp(own.flat(VELOCITY), values, weight, out=own.next_flat(VELOCITY))

    def restore(self, state: CompressionState, own: Exported, shared: Exported, rank: int, world_size: int) -> None:
        """The second residual of blocks that this worker no longer combines is taken off its own estimate, P times, for a P-th of
        that reaches the mean. Then it is sent as part of the next difference."""
        restore_feedback(self.codec, state, own, rank, world_size, self.flat_kinds, ESTIMATE, -world_size)
        state.shared.restore(shared, self.flat_kinds)

    def bytes_sent(self, layout: Layout, rank: int, world_size: int, algorithm: str = "auto") -> int | None:
        return self.codec.bytes_sent(layout, rank, world_size, algorithm)


def _no_contraction(codec: object) -> str | None:
    if not isinstance(codec, Codec) or codec.lossless:
        return (
            "there is nothing to correct, or it is no plain codec.\n"
            "Write it around a lossy codec: EF21(TopK(0.01)), EF21(Sign()); to choose by name, ByParameter(('*.bias', "
            "NoCompression()), ('*', EF21(Sign())))."
        )
    if (reason := codec.no_residual or codec.no_contraction) is not None:  # a vote; TernGrad, clipped or not
        return f"{reason}.\nWrite {codec!r} alone, or EF21 around a contraction: EF21(TopK(0.01)), EF21(Sign())."
    if codec.payload_dtype in (torch.float16, torch.bfloat16):
        return (
            "its payloads are added in half precision, and what such a sum loses would stay in the mean for ever.\n"
            f"Write {codec!r} alone, or EF21 around a codec that saves more: EF21(TopK(0.01)), EF21(Sign())."
        )
    return None
