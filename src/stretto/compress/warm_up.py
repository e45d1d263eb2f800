"""Uncompressed first: gradients change fastest at the beginning, and what is left over then is soon out of date.

    round < rounds     another compression, none by default
    afterwards         `codec`

Bits:      those of whichever is in force.
Invariant: all workers change over in the same round, which is part of the checkpoint.
References: Lin et al., "Deep Gradient Compression", ICLR 2018 (its own, by density: `DGC(warm_up=...)`); Vogels et al.,
            "PowerSGD", NeurIPS 2019 (their code compresses from some step on); Tang et al., "1-bit Adam", ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from stretto.compress.checks import check, is_count
from stretto.compress.codec import Compression
from stretto.compress.layout import Layout
from stretto.compress.none import NoCompression
from stretto.compress.rounds import ExchangeContext, Steps
from stretto.compress.state import CompressionState, Exported
from stretto.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class WarmUp(Compression):
    """`before` for the first `rounds` rounds of training, then `codec`."""

    rounds: int
    codec: Compression
    before: Compression = field(default_factory=NoCompression)

    def __post_init__(self) -> None:
        why = "a number of rounds is a whole number, 0 or more"
        check(is_count(self.rounds, 0), self, "rounds", why, "for instance WarmUp(100, ErrorFeedback(TopK(0.01)))")
        for part in (self.codec, self.before):
            if not isinstance(part, Compression):
                raise ConfigurationError(
                    f"WarmUp({self.rounds}, ...): {part!r} is not a compression. Write for instance ErrorFeedback(Sign())."
                )
        if self.before.remembers:
            raise ConfigurationError(
                f"{self!r}: what {self.before!r} has not said by the end of the warm-up would be lost.\n"
                f"Warm up with one that remembers nothing: NoCompression(), Float16(), Int8()."
            )
        if (self.codec.optimizer_hint, self.codec.hands_out) != (self.before.optimizer_hint, self.before.hands_out):
            raise ConfigurationError(
                f"{self!r}: one of the two keeps the momentum itself, or hands out a direction and not a mean, and the other "
                f"does not: no optimizer suits both.\n"
                f"DGC and OneBitAdam have a warm-up of their own: DGC(warm_up=...), OneBitAdam(warm_up=...)."
            )

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        return self.codec.lossless and self.before.lossless

    @property
    def optimizer_hint(self) -> str | None:  # type: ignore[override]
        return self.codec.optimizer_hint

    @property
    def wants_feedback(self) -> bool:  # type: ignore[override]
        return self.codec.wants_feedback

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return self.codec.remembers or self.before.remembers

    @property
    def hands_out(self) -> Literal["mean", "direction"]:  # type: ignore[override]
        return self.codec.hands_out

    @property
    def no_abstention(self) -> str | None:  # type: ignore[override]
        return self.codec.no_abstention or self.before.no_abstention

    @property
    def no_residual(self) -> str | None:  # type: ignore[override]
        return "a warm-up changes what is sent: write WarmUp(rounds, ErrorFeedback(...))"

    @property
    def flat_kinds(self) -> frozenset[str]:  # type: ignore[override]
        return self.codec.flat_kinds | self.before.flat_kinds

    def for_parameter(self, name: str, shape: tuple[int, ...]) -> Compression:
        codec, before = self.codec.for_parameter(name, shape), self.before.for_parameter(name, shape)
        return codec if codec == before else WarmUp(self.rounds, codec, before)

    def refusal(self, algorithm: str) -> str | None:
        return self.codec.refusal(algorithm) or self.before.refusal(algorithm)

    def exchange(self, values: Tensor, context: ExchangeContext) -> Steps:
        yield from (self.before if context.state.rounds < self.rounds else self.codec).exchange(values, context)

    def restore(self, state: CompressionState, own: Exported, shared: Exported, rank: int, world_size: int) -> None:
        (self.before if state.rounds < self.rounds else self.codec).restore(state, own, shared, rank, world_size)

    def bytes_sent(self, layout: Layout, rank: int, world_size: int, algorithm: str = "auto") -> int | None:
        """After the warm-up."""
        return self.codec.bytes_sent(layout, rank, world_size, algorithm)
