"""Gradients that are combined together, and the notes that ride with them.

    [ gradient | gradient | ... | weight | late | failed | present | infinite | used 0, used 1, ... ]

Every bucket that is not compressed carries the notes of its own parameters: this worker's `weight`; whether a gradient came
`late`, after its bucket had left; whether this worker's backward `failed`; whether it is `present` or has run out of data; and
for each parameter whether it was `used` here. The mean over workers is above zero if anybody said so. With them a bucket says by
itself what its gradients are, and costs no further message. What an early bucket cannot know (that backward will fail, that a
gradient will come late) the *closing* bucket says, which leaves last and is always in float32 or better.

In less precise buckets a sum of weights would be rounded: there `weight` only tells whether anybody's is not 1, and where one is,
the closing bucket has the mean. Compressed payloads carry nothing beside them: the closing bucket has the notes of all
parameters then, and no gradients; `infinite` says whether one that was to be compressed was not finite.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from stretto.aggregate.all_reduce.exchange import Sending
from stretto.compress.buffer_pool import BufferPool
from stretto.compress.codec import Compression
from stretto.compress.layout import Layout
from stretto.compress.none import NoCompression
from stretto.compress.rounds import ExchangeContext
from stretto.compress.state import CompressionState
from stretto.engine.bucket import Bucket, dimension_order, gradient_dtype
from stretto.engine.training import Named
from stretto.plan.transfers import Gradient, TransferPlan

PRECISE = (torch.float32, torch.float64)


class Notes(NamedTuple):
    """What a worker says about itself; on return, the mean over all of them."""

    weight: float
    late: float = 0.0
    failed: float = 0.0
    present: float = 1.0
    infinite: float = 0.0


NUM_NOTES = len(Notes._fields)
INFINITE = Notes._fields.index("infinite")


class Exchange(Protocol):
    """A bucket on its way."""

    @property
    def arrived(self) -> bool:
        """Whether everything has come."""

    def wait(self) -> None:
        """Return when it has ended; raise what went wrong."""


class ReducedBucket(Bucket):
    """A bucket, its compression and its notes: of so many parameters as `noted` says, or none if that is None."""

    def __init__(
        self,
        members: Sequence[Named],
        dtype: torch.dtype,
        device: torch.device,
        compression: Compression,
        *,
        noted: int | None,
        early: bool = False,
        notes_on_host: bool = False,
    ) -> None:
        tail = 0 if noted is None else NUM_NOTES + noted
        self.notes_on_host = notes_on_host and tail > 0
        super().__init__(members, dtype, device, early=early, tail=tail, tail_on_host=self.notes_on_host)
        self.has_notes = noted is not None
        self.is_precise = dtype in PRECISE
        self.compression = compression
        self.layout = Layout.in_memory((name, p.shape, dimension_order(p)) for name, p in members)
        self.state = None if compression.lossless else CompressionState(self.layout, device)
        self.closes = False  # whether it is the closing bucket of its arrangement
        self.turn: ExchangeContext | None = None  # in this round, if it is compressed
        self.exchange: Exchange | None = None  # in this round, once it has left
        self.sending = Sending()  # among other buckets
        self.kept: dict[Any, Any] = {}  # what is the same in every round
        self._said: tuple[Notes, tuple[bool, ...]] | None = None
        self._template: Tensor | None = None

    def write(self, notes: Notes, used: Sequence[bool]) -> None:
        """What this worker has to say."""
        said = (notes, tuple(used))
        if self._template is None or self._said != said:  # else as in the last round
            weight = notes.weight if self.is_precise else float(notes.weight != 1.0)
            values = [weight, *notes[1:], *map(float, used)]
            self._template = torch.tensor(values, dtype=self.tail.dtype, device=self.tail.device)
            self._said = said
        self.tail.copy_(self._template)

    def read(self) -> tuple[Notes, list[float]]:
        """What all workers have said, and for each parameter which share of them has a gradient."""
        values = (self.tail.real if self.tail.is_complex() else self.tail).tolist()
        return Notes(*values[:NUM_NOTES]), values[NUM_NOTES:]

    def needs_closing(self) -> bool:
        """Whether only the closing bucket says what this one's gradients are. To be asked once it has arrived."""
        if not self.has_notes:
            return True
        return not self.is_precise and (self.notes_on_host or bool(self.tail[0] != 0))

    def in_float32(self) -> Tensor:
        """The gradients themselves, or a copy in memory that is kept with the bucket."""
        gradients = self.gradients
        if gradients.dtype is torch.float32:
            return gradients
        memory: BufferPool = self.kept.setdefault(BufferPool, BufferPool())
        return memory.empty(len(gradients), torch.float32, gradients.device).copy_(gradients)

    def add(self, slot: int, gradient: Tensor) -> None:
        """Add to one of the combined gradients."""
        self.views[slot].add_(gradient)

    def land(self) -> None:
        """It has arrived: `gradients` are what the exchange has left for this worker."""

    def forget(self) -> None:
        """Begin anew with what its compression remembers."""
        if self.state is not None:
            self.state = CompressionState(self.layout, self.flat.device)


OwnerOf = Callable[[str], int | None]


def no_owner(name: str) -> None:
    """All workers have the same part in every parameter."""


def gradients_of(named: Sequence[Named], compress: Compression, owner_of: OwnerOf = no_owner) -> list[Gradient]:
    """What a schedule plans with. Gradients of different dtypes, devices, compressions or owners travel apart."""
    return [
        Gradient(name, parameter.numel() * gradient_dtype(parameter).itemsize, _kind(name, parameter, compress, owner_of))
        for name, parameter in named
    ]


def _kind(name: str, parameter: Tensor, compress: Compression, owner_of: OwnerOf) -> str:
    answer = compress.for_parameter(name, tuple(parameter.shape))
    return f"{gradient_dtype(parameter)} {parameter.device} {answer!r} {owner_of(name)}"


def make_buckets(
    named: Sequence[Named],
    plan: TransferPlan,
    compress: Compression,
    native_on: torch.device | None = None,
    *,
    apart: bool = False,
    kind: type[ReducedBucket] | None = None,
) -> list[ReducedBucket]:
    """The buckets in the order in which they are expected, the closing one last.

    `apart`: the closing bucket has the notes of all parameters and no gradients, as it always has beside compressed ones.
    `kind`: of all buckets but that one. `native_on`: the device where torch's own all-reduce wants all that it sends. It needs
    one order of buckets on all workers, so none leaves early."""
    parameters = dict(named)
    groups = [[(name, parameters[name]) for name in transfer.parameters] for transfer in plan.transfers]
    precise = [number for number, group in enumerate(groups) if gradient_dtype(group[0][1]) in PRECISE]
    apart |= not compress.lossless
    last = None if apart or not precise else precise[-1]
    early = plan.early and native_on is None
    buckets = [
        _bucket(kind or ReducedBucket, group, compress, early and number != last, noted=not apart, on_host=native_on is None)
        for number, group in enumerate(groups)
    ]
    for bucket, transfer in zip(buckets, plan.transfers, strict=True):
        bucket.sending = Sending.of(transfer.priority, transfer.part_bytes, plan.credit_bytes)
    if last is None:
        noted = len(named) if apart else 0
        closing = ReducedBucket([], torch.float32, native_on or torch.device("cpu"), NoCompression(), noted=noted)
        closing.sending = Sending.of(-1, None, plan.credit_bytes)  # everybody waits for its word
        buckets.append(closing)
    else:
        buckets.append(buckets.pop(last))
    for number, bucket in enumerate(buckets):
        bucket.number = number
    buckets[-1].closes = True
    return buckets


def _bucket(
    kind: type[ReducedBucket], group: Sequence[Named], compress: Compression, early: bool, *, noted: bool, on_host: bool
) -> ReducedBucket:
    name, parameter = group[0]
    answer, dtype = compress.for_parameter(name, tuple(parameter.shape)), gradient_dtype(parameter)
    notes_on_host = on_host and parameter.device.type == "cuda"
    return kind(
        group, dtype, parameter.device, answer, noted=len(group) if noted else None, early=early, notes_on_host=notes_on_host
    )


def layout_digest(buckets: Sequence[ReducedBucket], sparse: Sequence[Named]) -> int:
    """A checksum of which parameter lies where: workers with different layouts must not add one's gradients to another's."""
    places = [f"{bucket.number} {place.name} {place.shape} {place.order}" for bucket in buckets for place in bucket.layout.places]
    return zlib.crc32("\n".join([*places, *(name for name, _ in sparse)]).encode())
