"""The contract of compressions: between codecs, what is put around them, and the engine.

`Compression` is what `Strategy(compress=...)` holds: a frozen, printable value. Given a bucket's gradients it drives the rounds
that turn them into the mean over all workers, as a generator that yields collectives as data (`rounds.py`). It does no I/O of its
own: the engine runs it over a wire, tests run all workers' generators side by side.

`Codec` is a compression that consists of two pure functions:

    encode(values, blocks, random)    float32 vector -> bytes (uint8 vector, on the same device)
    decode(payload, blocks, random)   bytes -> float32 vector; raises `MalformedPayload` for what no encoder writes

A payload is laid out byte for byte as the codec's docstring describes, and `num_bytes(blocks)` long. Results may lie in memory
from `blocks.pool`, which is used again when nothing refers to it any more. How payloads are combined (`exchange.py`) follows
from the codec's attributes:

    payload_dtype   payloads, seen as this dtype, may be added                                        summed
    splits          every block stands for itself, so blocks may be shared out among workers          two-phase
    hop()           how to send one unit through a ring or halving-doubling, where it is asked for     in hops
    none of these   every worker gets every payload                                                   gathered

`KernelCodec` is a codec that has kernels for CPUs or GPUs beside its functions in torch (`backend.py`).

Reference: Xu et al., "GRACE: A Compressed Communication Framework", ICDCS 2021, which has codecs and a memory beside them.
Departs from it: a codec declares how its payloads may be combined, and the exchange follows from that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from stretto.collectives.message_codec import MessageCodec
from stretto.compress import exchange
from stretto.compress.backend import Backend
from stretto.compress.layout import Blocks, Layout
from stretto.compress.random_numbers import RandomKeys
from stretto.compress.rounds import ExchangeContext, Steps
from stretto.compress.state import CompressionState, Exported


class Compression(ABC):
    """An answer to `compress=`."""

    __slots__ = ()
    lossless: ClassVar[bool] = False
    optimizer_hint: ClassVar[str | None] = None  # for one that brings its own momentum: the optimizer to write instead
    remembers: ClassVar[bool] = False  # keeps what it has not sent, so error feedback around it makes no sense
    no_abstention: ClassVar[str | None] = None  # why the mean is wrong when a worker without data takes part, if so
    no_residual: ClassVar[str | None] = None  # why its result cannot be compared with what it was given, if so
    no_contraction: ClassVar[str | None] = None  # why the residual of error feedback may grow from round to round, if so
    wants_feedback: ClassVar[bool] = False  # what it leaves out is much and systematic: without error feedback it is lost
    hands_out: ClassVar[Literal["mean", "direction"]] = "mean"  # a direction grows with neither gradients nor weights
    flat_kinds: ClassVar[frozenset[str]] = frozenset()  # the kinds of its state that are vectors as long as the bucket

    def for_parameter(self, name: str, shape: tuple[int, ...]) -> Compression:
        """What this parameter is compressed with. Parameters with equal answers share buckets."""
        return self

    def refusal(self, algorithm: str) -> str | None:
        """Why this all-reduce (a name of the catalogue) cannot combine its payloads, or None. "auto" suits every compression."""
        return None

    def restore(self, state: CompressionState, own: Exported, shared: Exported, rank: int, world_size: int) -> None:
        """Fill `state` with what a state of the same compression has exported, perhaps for other buckets."""
        state.own.restore(own, self.flat_kinds)
        state.shared.restore(shared, self.flat_kinds)

    @abstractmethod
    def exchange(self, values: Tensor, context: ExchangeContext) -> Steps:
        """Replace `values` (float32, flat, finite: this worker's) by the mean over all workers."""

    @abstractmethod
    def bytes_sent(self, layout: Layout, rank: int, world_size: int, algorithm: str = "auto") -> int | None:
        """Payload bytes that this worker sends in a round, or None if it depends on the values."""


class Codec(Compression):
    """A pair of pure functions. Subclasses are frozen dataclasses."""

    __slots__ = ()
    payload_dtype: ClassVar[torch.dtype | None] = None
    splits: ClassVar[bool] = False

    @abstractmethod
    def blocks(self, layout: Layout) -> Blocks:
        """How this codec cuts tensors."""

    @abstractmethod
    def num_bytes(self, blocks: Blocks) -> int | None:
        """The length of a payload; None if it depends on the values."""

    def max_bytes(self, blocks: Blocks) -> int:
        """The longest payload that can come."""
        length = self.num_bytes(blocks)
        assert length is not None, f"{type(self).__name__} must override max_bytes"
        return length

    def among(self, world_size: int) -> Codec:
        """The codec to use where so many payloads are added up, such that their sum cannot overflow."""
        return self

    def hop(self) -> MessageCodec | None:
        """How a ring carries sums encoded, if it can."""
        return None

    @abstractmethod
    def encode(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        """`values` is float32, flat, contiguous and finite, on any device; it is not changed."""

    @abstractmethod
    def decode(self, payload: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        """The reverse, on the payload's device. Only `random.shared` is the same as the encoder's."""

    def encode_residual(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        """Encode, and leave the residual in `values`: values - decode(payload). Kernels need one pass."""
        payload = self.encode(values, blocks, random)
        values.sub_(self.decode(payload, blocks, random))
        return payload

    def add_decoded(self, payload: Tensor, blocks: Blocks, random: RandomKeys, total: Tensor) -> None:
        """total += decode(payload). Kernels need one pass."""
        total.add_(self.decode(payload, blocks, random))

    def exchange(self, values: Tensor, context: ExchangeContext) -> Steps:
        yield from exchange.exchange(self, values, context)

    def bytes_sent(self, layout: Layout, rank: int, world_size: int, algorithm: str = "auto") -> int | None:
        return exchange.bytes_sent(self, self.blocks(layout), rank, world_size, algorithm)

    def refusal(self, algorithm: str) -> str | None:
        if self.payload_dtype is not None or (self.hop() is not None and algorithm in exchange.HOP_ALGORITHMS):
            return None
        return f"the payloads of {self!r} do not add up, and {algorithm!r} adds what it carries"


# codec, values, blocks, random, whether to leave in `values` what the payload leaves out
Encoder = Backend[[Any, Tensor, Blocks, RandomKeys, bool], Tensor]
# codec, payload, blocks, out, whether to add to it or replace it. On a GPU it waits for the device, to judge the payload
Decoder = Backend[[Any, Tensor, Blocks, Tensor, bool], None]


class KernelCodec(Codec):
    """A codec that has kernels. Most subclasses write `encoder, decoder = with_kernels("name_cpu", "name_cuda")`."""

    __slots__ = ()
    encoder: ClassVar[Encoder]
    decoder: ClassVar[Decoder]

    def encode(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        return self.encoder.on(values.device)(self, values, blocks, random, False)

    def encode_residual(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        return self.encoder.on(values.device)(self, values, blocks, random, True)

    def decode(self, payload: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor:
        out = blocks.pool.empty(blocks.num_elements, torch.float32, payload.device)
        self.decoder.on(payload.device)(self, payload, blocks, out, False)
        return out

    def add_decoded(self, payload: Tensor, blocks: Blocks, random: RandomKeys, total: Tensor) -> None:
        self.decoder.on(payload.device)(self, payload, blocks, total, True)


class InTorch(Protocol):
    """The two functions of a codec in plain torch: what its kernels are compared with."""

    def encode_in_torch(self, values: Tensor, blocks: Blocks, random: RandomKeys) -> Tensor: ...

    def decode_in_torch(self, payload: Tensor, blocks: Blocks) -> Tensor: ...


def with_kernels(cpu: str, cuda: str) -> tuple[Encoder, Decoder]:
    """For a codec that is `InTorch`: its own functions, and `encode` and `decode` of these two files in `kernels/`."""
    return (
        Backend(encode_by_torch, f"{cpu}.encode", f"{cuda}.encode"),
        Backend(decode_by_torch, f"{cpu}.decode", f"{cuda}.decode"),
    )


def encode_by_torch(codec: InTorch, values: Tensor, blocks: Blocks, random: RandomKeys, residual: bool) -> Tensor:
    payload = codec.encode_in_torch(values, blocks, random)
    if residual:
        values.sub_(codec.decode_in_torch(payload, blocks))
    return payload


def decode_by_torch(codec: InTorch, payload: Tensor, blocks: Blocks, out: Tensor, adding: bool) -> None:
    decoded = codec.decode_in_torch(payload, blocks)
    if adding:
        out.add_(decoded)
    else:
        out.copy_(decoded)
