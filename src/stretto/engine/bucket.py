"""Parameters that travel together: one flat buffer, with gradients as views of it.

    an ordinary bucket     [ gradient | gradient | ... ]
    the closing bucket     [ gradient | gradient | ... | weight | late | failed | present | infinite | used 0, used 1, ... ]

The closing bucket leaves last, when backward has ended, and carries what is known only then, in float32 or better: this
worker's `weight`; whether any gradient came `late` (after its bucket had left); whether its backward `failed`; whether it is
`present` or has run out of data; whether a gradient that was to be compressed was `infinite` (or not a number); and for every
parameter of the model whether it was `used`. The mean over workers is above zero if anybody said so. All of it rides along in a
message that goes anyway; where gradients are compressed, what must be exact has a message of its own.

Notes are for the host: beside a buffer on a GPU they lie in host memory, where the whole buffer travels from, and neither writing
nor reading them waits for the GPU.

The memory is used again in the next round. A program that keeps a gradient beyond that (`kept.append(p.grad)`, as methods that
compare the gradients of several losses do) expects it to stay as it was: before a round writes to a bucket of which somebody
else still holds a part, the bucket takes new memory and leaves the old to whoever holds it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.collectives.request import Pending
from stretto.compress.codec import Compression
from stretto.compress.layout import Layout
from stretto.compress.none import NoCompression
from stretto.compress.rounds import ExchangeContext
from stretto.compress.state import CompressionState
from stretto.engine.lane import Errand
from stretto.errors import ConfigurationError
from stretto.schedule.orders import Schedule

PRECISE = (torch.float32, torch.float64)
LARGE_BYTES = 64 << 10  # from here on a gradient is copied as soon as it is there: while it is in the cache, and to free it

_HAS_GRAPH = attrgetter("requires_grad")  # asked of every gradient in every round: without a Python frame for each
_IS_SPARSE = attrgetter("is_sparse")


class Notes(NamedTuple):
    """What every worker says about itself in the closing bucket; on return, the mean over all of them."""

    weight: float
    late: float
    failed: float
    present: float
    infinite: float = 0.0


NUM_NOTES = len(Notes._fields)


class Bucket:
    """One flat buffer and how far it is in this round."""

    def __init__(
        self,
        members: Sequence[tuple[str, Tensor]],
        dtype: torch.dtype,
        device: torch.device,
        num_notes: int = 0,
        compression: Compression | None = None,
        *,
        notes_apart: bool = False,
    ) -> None:
        self.number = 0
        self.names = [name for name, _ in members]
        self.parameters = [parameter for _, parameter in members]
        self.num_gradient_elements = sum(parameter.numel() for parameter in self.parameters)
        self._num_notes, self._notes_apart = num_notes, notes_apart
        self._take_memory(dtype, device)
        self.large = [view.nbytes >= LARGE_BYTES for view in self.views]
        self.fired = [False] * len(members)
        self.used = [True] * len(members)
        self.missing = len(members)
        self.sent = False
        self.waits = False  # for the end of backward, although it may be full before
        self.pending: Pending | None = None
        self.bring_back: Callable[[], None] | None = None
        self.compression = compression or NoCompression()
        self.layout = Layout.in_memory((name, parameter.shape, _order(parameter)) for name, parameter in members)
        self.state = None if self.compression.lossless else CompressionState(self.layout, device)
        self.turn: ExchangeContext | None = None  # in this round, if it is compressed
        self.errand: Errand | None = None
        self.kept: dict[Any, Any] = {}

    def _take_memory(self, dtype: torch.dtype, device: torch.device) -> None:
        count = self.num_gradient_elements
        self.flat = torch.zeros(count + self._num_notes, dtype=dtype, device=device)
        self.views = _views(self.flat, self.parameters)
        apart = torch.zeros(self._num_notes, dtype=dtype, device="cpu") if self._notes_apart else None
        self.notes = self.flat[count:] if apart is None else apart
        self.on_wire = _alias(self.flat)
        self._references = list(map(sys.getrefcount, self.views))
        self._users = _num_users(self.flat)

    @property
    def is_held(self) -> bool:
        """Whether somebody else holds a gradient that lies here, or a view of one. To be asked while no round is under way."""
        if _num_users(self.flat) > self._users:
            return True
        counts = list(map(sys.getrefcount, self.views))
        if counts == self._references:
            return False
        # A gradient that still is its parameter's own is added to in place, by torch as by us, whoever else holds it.
        held = (now > before for now, before in zip(counts, self._references, strict=True))
        return any(more and p.grad is not view for more, p, view in zip(held, self.parameters, self.views, strict=True))

    def leave_memory(self) -> None:
        """Take new memory. Parameters whose gradient lies in the old one get a copy of it, so that autograd adds to that."""
        old = self.views
        self._take_memory(self.flat.dtype, self.flat.device)
        for parameter, before, view in zip(self.parameters, old, self.views, strict=True):
            if parameter.grad is before:
                view.copy_(before)
                parameter.grad = view

    @property
    def num_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    @property
    def gradients(self) -> Tensor:
        return self.flat[: self.num_gradient_elements]

    @property
    def named_views(self) -> list[tuple[str, Tensor]]:
        return list(zip(self.names, self.views, strict=True))

    def put(self, slot: int) -> None:
        """Copy one gradient to its place, which is its parameter's gradient from then on."""
        view, gradient = self.views[slot], self.parameters[slot].grad
        assert gradient is not None
        if gradient is not view:
            refuse_graph(gradient)
            with torch.no_grad():
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            self.parameters[slot].grad = view

    def collect(self) -> None:
        """Copy every gradient that is not in its place yet, all in one call; where there is none, zeros."""
        gradients = [parameter.grad for parameter in self.parameters]
        self.used = [gradient is not None for gradient in gradients]
        absent = [view for view, gradient in zip(self.views, gradients, strict=True) if gradient is None]
        targets = [view for view, g in zip(self.views, gradients, strict=True) if g is not None and g is not view]
        sources = [g for view, g in zip(self.views, gradients, strict=True) if g is not None and g is not view]
        if any(map(_HAS_GRAPH, sources)):
            refuse_graph(next(filter(_HAS_GRAPH, sources)))
        if any(map(_IS_SPARSE, sources)):
            sources = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in sources]
        with torch.no_grad():
            if absent:
                torch._foreach_zero_(absent)
            if targets:
                torch._foreach_copy_(targets, sources)

    def let_go(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def write(self, notes: Notes, used: Sequence[bool]) -> None:
        """Of the closing bucket: what this worker has to say."""
        self.notes.fill_(1.0)
        self.notes[:NUM_NOTES].copy_(torch.tensor(notes, dtype=self.notes.dtype, device="cpu"))
        if not all(used):
            self.notes[NUM_NOTES:].copy_(torch.tensor(used, dtype=self.notes.dtype, device="cpu"))

    def read(self) -> tuple[Notes, list[float]]:
        """Of the closing bucket: what all workers have said, and for each parameter which share of them has a gradient."""
        values = self.notes.tolist()
        return Notes(*values[:NUM_NOTES]), values[NUM_NOTES:]

    def forget(self) -> None:
        """What its compression remembers."""
        if self.state is not None:
            self.state = CompressionState(self.layout, self.flat.device)

    def reset(self) -> None:
        self.fired = [False] * len(self.parameters)
        self.missing = len(self.parameters)
        self.sent = False
        self.pending = None
        self.bring_back = None
        self.turn = None
        self.errand = None


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """What its gradient is kept in: `p.grad_dtype` where somebody has set it, which torch then insists on."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _alias(flat: Tensor) -> Tensor:
    """The same memory as a tensor of its own for the wire, whose views do not count among the users of `flat`: the communication
    thread may keep one for a moment after a collective has ended. A GPU's memory goes through a copy in any case."""
    if flat.device.type != "cpu" or flat.numel() == 0:  # a parameter without elements may have a bucket to itself
        return flat
    return torch.from_numpy(flat.view(torch.uint8).numpy()).view(flat.dtype)


def _num_users(flat: Tensor) -> int:
    """How many tensors there are on this memory."""
    count: int = torch._C._storage_Use_Count(flat.untyped_storage()._cdata)
    return count


def refuse_graph(gradient: Tensor) -> None:
    """What is combined is a copy in a bucket, without the graph that leads to it."""
    if gradient.requires_grad:
        raise ConfigurationError(
            "backward(create_graph=True) of a distributed model: p.grad becomes the mean over all workers, which has no graph: "
            "second derivatives through it would be wrong.\n"
            "Use torch.autograd.grad(loss, parameters, create_graph=True) for the inner derivative, and a plain backward() for "
            "the loss that is made of it."
        )


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Each parameter's part of `flat`, in the parameter's own memory layout where it is dense (channels-last stays so)."""
    views, start = [], 0
    for parameter in parameters:
        part = flat[start : start + parameter.numel()]
        if parameter.is_contiguous() or not _is_dense(parameter):
            views.append(part.view(parameter.shape))
        else:
            views.append(part.as_strided(parameter.size(), parameter.stride(), part.storage_offset()))
        start += parameter.numel()
    return views


def _order(tensor: Tensor) -> tuple[int, ...] | None:
    """Of its dimensions in memory, the outermost first, where that is not their own; see `_views`."""
    if tensor.is_contiguous() or not _is_dense(tensor):
        return None
    return tuple(sorted(range(tensor.dim()), key=lambda dimension: tensor.stride()[dimension], reverse=True))


def _is_dense(tensor: Tensor) -> bool:
    """Whether its strides fill one stretch of memory without gaps or overlap."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


Key = tuple[torch.dtype, torch.device, Compression]


def make_buckets(
    named: Sequence[tuple[str, Tensor]], schedule: Schedule, device: torch.device, compress: Compression | None = None
) -> list[Bucket]:
    """Group parameters, in reverse order of registration (the order in which gradients come), one dtype, device and compression
    to a bucket. The last one returned is the closing bucket; with a lossy compression it holds no gradients.

    `device`: where the notes are to lie.
    """
    compress = compress or NoCompression()
    groups = _group(named, schedule, compress)
    precise = (group for group in reversed(groups) if gradient_dtype(group[0][1]) in PRECISE)
    closing = next(precise, None) if compress.lossless else None
    buckets = [_bucket(group, compress) for group in groups if group is not closing]
    num_notes = NUM_NOTES + len(named)
    if closing is None:
        buckets.append(Bucket([], torch.float32, device, num_notes))
    else:
        dtype, theirs = gradient_dtype(closing[0][1]), closing[0][1].device
        buckets.append(Bucket(closing, dtype, theirs, num_notes, notes_apart=theirs.type == "cuda" and device.type == "cpu"))
    for number, bucket in enumerate(buckets):
        bucket.number = number
    return buckets


def _bucket(group: list[tuple[str, Tensor]], compress: Compression) -> Bucket:
    name, parameter = group[0]
    answer = compress.for_parameter(name, tuple(parameter.shape))
    return Bucket(group, gradient_dtype(parameter), parameter.device, compression=answer)


def _group(named: Sequence[tuple[str, Tensor]], schedule: Schedule, compress: Compression) -> list[list[tuple[str, Tensor]]]:
    filling: dict[Key, list[tuple[str, Tensor]]] = {}
    sizes: dict[Key, int] = {}
    groups: list[list[tuple[str, Tensor]]] = []
    limit = schedule.first_bucket_bytes
    for name, parameter in reversed(named):
        key = (gradient_dtype(parameter), parameter.device, compress.for_parameter(name, tuple(parameter.shape)))
        filling.setdefault(key, []).append((name, parameter))
        sizes[key] = sizes.get(key, 0) + parameter.numel() * key[0].itemsize
        if limit is not None and sizes[key] >= limit:
            groups.append(filling.pop(key))
            sizes[key] = 0
            limit = schedule.bucket_bytes
    return groups + list(filling.values())
