"""No compression: gradients travel as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from stretto.compress.codec import Compression
from stretto.compress.exchange import bytes_of_sum
from stretto.compress.layout import Layout
from stretto.compress.rounds import ExchangeContext, Steps, Sum


@dataclass(frozen=True, slots=True)
class NoCompression(Compression):
    """Every element in its own type: 8 * itemsize bits each. Lossless, and payloads add up, so any all-reduce may carry them."""

    lossless: ClassVar[bool] = True

    def exchange(self, values: Tensor, context: ExchangeContext) -> Steps:
        values.copy_((yield Sum(values)))
        values.mul_(1.0 / context.world_size)

    def bytes_sent(self, layout: Layout, rank: int, world_size: int, algorithm: str = "auto") -> int:
        return bytes_of_sum(layout.num_elements, 4, rank, world_size, algorithm) if world_size > 1 else 0
