"""The rounds of an exchange as data: the collectives that a compression asks for, and what it needs to know of its round.

A compression is a generator that yields collectives and is sent their results; its caller decides how they are carried out.

    Sum(tensor)              -> the elementwise sum over workers, in place          any all-reduce
    Gather(row, into)        -> (P, len): row i is worker i's                        all rows have one length and dtype; `into`:
                                                                                     memory for the result, if it is there
    Transpose(rows)          -> (P, len): row i is what worker i had for me          row j of what is given goes to worker j
    SumInHops(tensor, hop)   -> the sum, in place, encoded anew at every hop         quantised ring and halving-doubling
    Serve(payloads, take)    -> nothing; each payload goes to the server of its      `take(number, reply)` is called with what the
                                part, one after the other as they are made           servers answer, once all have answered
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import Tensor

from stretto.collectives.message_codec import MessageCodec
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.state import CompressionState

if TYPE_CHECKING:
    from stretto.compress.codec import Codec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sum:
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Gather:
    row: Tensor
    into: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Transpose:
    rows: Tensor


@dataclass(frozen=True, slots=True)
class SumInHops:
    tensor: Tensor
    hop: MessageCodec


@dataclass(frozen=True, slots=True)
class Serve:
    payloads: Iterable[Tensor]
    take: Callable[[int, Tensor], None]


Collective = Sum | Gather | Transpose | SumInHops | Serve
Steps = Generator[Collective, Tensor, None]


class Share(NamedTuple):
    """The blocks that one worker, or a server, combines: elements start to stop - 1."""

    start: int
    stop: int
    blocks: Blocks


@dataclass(slots=True)
class ExchangeContext:
    """What a compression needs to know for one bucket in one round: rank and world size, its state, its random numbers."""

    layout: Layout
    state: CompressionState
    random: RandomKeys = field(default_factory=RandomKeys)
    rank: int = 0
    world_size: int = 1
    algorithm: str = "auto"  # the all-reduce that the strategy names
    kept: dict[Any, Any] = field(default_factory=dict)  # what is the same in every round of this bucket
    weight: float = 1.0  # this worker's values have been multiplied by it
    served: Callable[[Codec], Sequence[Share]] | None = None  # servers combine: the parts that each payload is of

    def keep(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` gives, made in the first round only."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]  # type: ignore[no-any-return]

    def blocks_of(self, codec: Codec) -> Blocks:
        return self.keep(codec, lambda: codec.blocks(self.layout))

    def shares_of(self, codec: Codec) -> list[Share]:
        """Whole blocks for each worker, as evenly as they can be shared out."""
        return self.keep((codec, self.world_size), lambda: share_out(self.blocks_of(codec), self.world_size))


def share_out(blocks: Blocks, world_size: int) -> list[Share]:
    bounds = blocks.bounds.tolist()
    return [Share(bounds[a], bounds[b], blocks.part(a, b)) for a, b in blocks.split(world_size)]
