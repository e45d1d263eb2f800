"""What a compression is: the contract between codecs, what surrounds them, and the engine.

`Compression` is what `Strategy(compress=...)` holds: a frozen, printable value. Given a bucket's gradients it drives the rounds
that turn them into the mean over all workers, as a generator that yields collectives as data (`rounds.py`). It does no I/O of its
own: the engine runs it over a wire, tests run all workers' generators side by side.

`Codec` is a compression that is a pair of pure functions:

    encode(values, blocks, draw)    float32 vector -> bytes (uint8 vector, on the same device)
    decode(payload, blocks, draw)   bytes -> float32 vector; raises `MalformedPayload` for what no encoder writes

byte-exact as its docstring says, `num_bytes(blocks)` long. What they return lies in `blocks.memory`, if they like: it is used
again when nobody sees it any more. Every exchange, and whoever else sends values, uses the same two functions. How payloads meet
(`exchange.py`) follows from what the codec says of itself:

    payload_dtype   payloads, seen as this dtype, may be added                                        summed
    splits          every block stands for itself, so blocks may be shared out among workers          two-phase
    hop()           how to send one unit through a ring or halving-doubling, where it is asked for     in hops
    none of these   everybody gets everybody's payload                                                gathered

Reference: Xu et al., "GRACE: A Compressed Communication Framework", ICDCS 2021, for codecs beside a memory. Departs from it: a
codec says how its payloads may be combined, and the exchange follows from that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from stretto.collectives.message_codec import MessageCodec
from stretto.compress import exchange
from stretto.compress.draw import Draw
from stretto.compress.layout import Blocks, Layout
from stretto.compress.rounds import Steps, Turn
from stretto.compress.state import Exported, State


class Compression(ABC):
    """An answer to `compress=`."""

    __slots__ = ()
    lossless: ClassVar[bool] = False
    optimizer_hint: ClassVar[str | None] = None  # of one that brings its own momentum: the optimizer to write instead
    remembers: ClassVar[bool] = False  # what it has not said, by itself: then error feedback around it makes no sense
    no_abstention: ClassVar[str | None] = None  # why a worker without data cannot leave its say to the others, if so
    no_residual: ClassVar[str | None] = None  # why what it says and what it is given cannot be compared, if so
    no_contraction: ClassVar[str | None] = None  # why what it leaves unsaid may grow from round to round, if so
    wants_feedback: ClassVar[bool] = False  # what it leaves out is much and always the same side: lost for good, by itself
    hands_out: ClassVar[Literal["mean", "direction"]] = "mean"  # a direction does not grow with the gradients, nor with weights
    flat_kinds: ClassVar[frozenset[str]] = frozenset()  # of its state: the kinds that are vectors as long as the bucket

    def for_parameter(self, name: str, shape: tuple[int, ...]) -> Compression:
        """What this parameter is compressed with. Parameters with equal answers share buckets."""
        return self

    def refusal(self, algorithm: str) -> str | None:
        """Why its payloads cannot be combined by this all-reduce (a name of the catalogue), or None. "auto" suits everybody."""
        return None

    def restore(self, state: State, own: Exported, shared: Exported, rank: int, world_size: int) -> None:
        """Take up what a state of the same compression has exported, perhaps in other buckets."""
        state.own.restore(own, self.flat_kinds)
        state.shared.restore(shared, self.flat_kinds)

    @abstractmethod
    def exchange(self, values: Tensor, turn: Turn) -> Steps:
        """Replace `values` (float32, flat, finite: this worker's) by the mean over all workers."""

    @abstractmethod
    def bytes_sent(self, layout: Layout, rank: int, world_size: int, algorithm: str = "auto") -> int | None:
        """Payload bytes that this worker sends in a round, or None if it depends on the values."""


class Codec(Compression):
    """A pair of pure functions. Subclasses are frozen dataclasses."""

    __slots__ = ()
    payload_dtype: ClassVar[torch.dtype | None] = None
    splits: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False  # E[decode(encode(x))] = x

    @abstractmethod
    def blocks(self, layout: Layout) -> Blocks:
        """How this codec cuts tensors."""

    @abstractmethod
    def num_bytes(self, blocks: Blocks) -> int | None:
        """The length of a payload; None if it depends on the values."""

    def max_bytes(self, blocks: Blocks) -> int:
        """The longest payload that can come."""
        length = self.num_bytes(blocks)
        assert length is not None, f"{type(self).__name__} says how long its payloads may be"
        return length

    def among(self, world_size: int) -> Codec:
        """The codec of one payload of several that are to be added up: such that their sum cannot overflow."""
        return self

    def hop(self) -> MessageCodec | None:
        """How a ring may carry it encoded, if one may."""
        return None

    @abstractmethod
    def encode(self, values: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        """`values` is float32, flat, contiguous and finite, on any device; it is not changed."""

    @abstractmethod
    def decode(self, payload: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        """The reverse, on the payload's device. Of `draw` only `shared` is the encoder's."""

    def encode_residual(self, values: Tensor, blocks: Blocks, draw: Draw) -> Tensor:
        """Encode, and leave in `values` what the payload does not say: values - decode(payload). Fast codecs need one pass."""
        payload = self.encode(values, blocks, draw)
        values.sub_(self.decode(payload, blocks, draw))
        return payload

    def add_decoded(self, payload: Tensor, blocks: Blocks, draw: Draw, total: Tensor) -> None:
        """total += decode(payload). Fast codecs do it in one pass."""
        total.add_(self.decode(payload, blocks, draw))

    def exchange(self, values: Tensor, turn: Turn) -> Steps:
        yield from exchange.exchange(self, values, turn)

    def bytes_sent(self, layout: Layout, rank: int, world_size: int, algorithm: str = "auto") -> int | None:
        return exchange.bytes_sent(self, self.blocks(layout), rank, world_size, algorithm)

    def refusal(self, algorithm: str) -> str | None:
        if self.payload_dtype is not None or (self.hop() is not None and algorithm in exchange.HOP_ALGORITHMS):
            return None
        return f"the payloads of {self!r} do not add up, and {algorithm!r} adds what it carries"
