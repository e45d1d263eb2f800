"""Error feedback: what a payload leaves out is sent later.

    p = g + e            what is to be sent: this round's gradient and what is left from before
    send C(p)            combined over workers by whatever exchange suits C
    e = p - C(p)         stays here

Invariant (conservation): the sum of everything sent plus the residual is the sum of all gradients, per worker, whatever C is.
            In a two-phase exchange the worker that combines a block keeps a second residual, of the means that it encodes.
Units:      of the gradient, not of the update: the learning rate may change freely. (With weights, of weight times gradient; with
            a `GradScaler` given to `distribute(scaler=...)`, unscaled.)
Memory:     8 bytes per parameter (the residual, and the next one until the round has ended well everywhere); two-phase: 8/P more.
Converges for any contraction C, E|C(x) - x|^2 <= (1 - delta) |x|^2, with the rate of plain SGD up to higher-order terms. What is
            none is refused (`no_contraction`), so a second residual, too, is only ever kept of contractions.
References: Seide et al., "1-Bit SGD", Interspeech 2014; Stich et al., "Sparsified SGD with Memory", NeurIPS 2018; Karimireddy et
            al., ICML 2019. Departs from the last: the learning rate stays outside of the residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stretto.compress.codec import Codec, Compression
from stretto.compress.exchange import combines_blocks, exchange, feedback_of, refusal_with_feedback
from stretto.compress.layout import Layout
from stretto.compress.none import NoCompression
from stretto.compress.rounds import ExchangeContext, Steps, share_out
from stretto.compress.state import SERVER, CompressionState, Exported
from stretto.errors import ConfigurationError

RESIDUAL = "residual"


@dataclass(frozen=True, slots=True)
class ErrorFeedback(Compression):
    """`codec`: any contraction. One that keeps a residual by itself (`DGC`, `DeMo`, `OneBitAdam`) needs no other."""

    codec: Compression
    remembers: ClassVar[bool] = True
    flat_kinds: ClassVar[frozenset[str]] = frozenset((RESIDUAL, SERVER))

    def __post_init__(self) -> None:
        if (reason := _why_not(self.codec)) is not None:
            raise ConfigurationError(
                f"ErrorFeedback({self.codec!r}): {reason}.\n"
                f"Write it around a lossy codec: ErrorFeedback(Sign()), ErrorFeedback(TopK(0.01)), ErrorFeedback(PowerSGD(4))."
            )
        if (reason := self.codec.no_contraction) is not None:
            raise ConfigurationError(
                f"ErrorFeedback({self.codec!r}): {reason}.\n"
                f"Write {self.codec!r} alone: what is right on average needs no error feedback. Or take a contraction: "
                f"ErrorFeedback(OneBit()), ErrorFeedback(Sign()), ErrorFeedback(QSGD(8))."
            )

    def for_parameter(self, name: str, shape: tuple[int, ...]) -> Compression:
        inner = self.codec.for_parameter(name, shape)
        return inner if isinstance(inner, NoCompression) or inner.lossless else ErrorFeedback(inner)

    @property
    def no_abstention(self) -> str | None:  # type: ignore[override]
        if isinstance(self.codec, Codec):
            return self.codec.no_abstention
        return "its residuals compare with the mean over all workers, also those without data"

    def refusal(self, algorithm: str) -> str | None:
        return refusal_with_feedback(self.codec, algorithm) if isinstance(self.codec, Codec) else self.codec.refusal(algorithm)

    def exchange(self, values: Tensor, context: ExchangeContext) -> Steps:
        own = context.state.own
        residual = torch.add(values, own.flat(RESIDUAL), out=own.next_flat(RESIDUAL))
        if not isinstance(self.codec, Codec):
            yield from _around(self.codec, values, residual, context)
            return
        yield from exchange(self.codec, values, context, feedback_of(self.codec, residual, context))

    def restore(self, state: CompressionState, own: Exported, shared: Exported, rank: int, world_size: int) -> None:
        if isinstance(self.codec, Codec):
            restore_feedback(self.codec, state, own, rank, world_size)
        else:
            state.own.restore(own, self.flat_kinds)
        state.shared.restore(shared, self.codec.flat_kinds)

    def bytes_sent(self, layout: Layout, rank: int, world_size: int, algorithm: str = "auto") -> int | None:
        return self.codec.bytes_sent(layout, rank, world_size, algorithm)


def _why_not(codec: object) -> str | None:
    """Why there is nothing that this could do for it, or None."""
    if not isinstance(codec, Compression):
        return "that is not a compression"
    if codec.lossless:
        return "nothing is lost, so there is no error to feed back"
    if codec.optimizer_hint is not None or codec.remembers:
        return "it remembers what it has not said by itself"
    return codec.no_residual


def _around(codec: Compression, values: Tensor, residual: Tensor, context: ExchangeContext) -> Steps:
    """For a codec that drives its own rounds (PowerSGD): what was sent is what all of them combined, so the mean is conserved."""
    values.copy_(residual)
    yield from codec.exchange(values, context)
    residual.sub_(values)


def restore_feedback(
    codec: Codec,
    state: CompressionState,
    own: Exported,
    rank: int,
    world_size: int,
    flat_kinds: frozenset[str] = ErrorFeedback.flat_kinds,
    to: str = RESIDUAL,
    times: int | None = None,
) -> None:
    """Take up what was this worker's own. Blocks of the second residual that it no longer combines become part of its own
    residual (or of whatever kind `to` is), P times, for a P-th of that reaches the mean."""
    first, last = 0, 0
    if combines_blocks(codec, world_size):
        mine = share_out(codec.blocks(state.layout), world_size)[rank]
        first, last = mine.start, mine.stop
        state.own.flat(SERVER, first, last)
    kept = {name: dict(own[name]) for name in (place.name for place in state.layout.places) if name in own}
    for place in state.layout.places:
        server = kept.get(place.name, {}).get(SERVER)
        if server is None:
            continue
        foreign = place.as_vector(server).clone()
        foreign[max(0, first - place.start) : max(0, last - place.start)] = 0.0
        if bool(foreign.any()):
            before = kept[place.name].get(to, torch.zeros_like(server))
            kept[place.name][to] = before + (world_size if times is None else times) * place.as_tensor(foreign)
        if first == last:
            del kept[place.name][SERVER]
    state.own.restore(kept, flat_kinds)
