"""The slices of some parameters, and the memory that all of their values have while they are gathered.

    whole    [ weight 0 | bias 0 | weight 1 | ... ]    its storage has 0 bytes while the parameters are free
    slice          [ this worker's part ]              always there

Every parameter is a view of `whole` for as long as it is in slices. The *storage* is what comes and goes: what autograd has saved
in forward (a parameter, or a view of one) leads to the same storage, which has the same values again when backward needs them.

What is gathered are the slices as they are, of equal length; or rows of them, where they end at blocks of the codec of their
gradients; or, with `weights=`, what a codec makes of them. Slices are then in float32 and nobody else has them unrounded, so what
is computed with is not what is stepped. Who reads or changes weights by hand gets them *exactly*. With `offload="cpu"` slices lie
in host memory.

Memory in large pieces is asked for in the size from which on glibc maps it (`MAPPED_BYTES`; only what is written becomes
resident), and goes back to the system as a whole. Asked for as it is, it would come from a heap into which small long-lived
pieces fall: resident memory is then several times what is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stretto.aggregate.all_reduce.exchange import Steps
from stretto.aggregate.zero.compressed import EncodedWeights, bounds_for
from stretto.aggregate.zero.cut.freed import ParameterInSlices
from stretto.aggregate.zero.slices import Apart, Piece, SliceBounds
from stretto.aggregate.zero.stepping import parts_of, uneven_parts_of
from stretto.compress.codec import Codec, Compression
from stretto.compress.layout import Layout
from stretto.engine.arena import MemoryKind
from stretto.engine.bucket import dimension_order, views_of
from stretto.engine.training import Named

MAPPED_BYTES = 33 << 20  # above M_MMAP_THRESHOLD's largest value, see mallopt(3)
LARGE_BYTES = 256 << 10


class SliceLayout(NamedTuple):
    """Parameters of one unit, dtype, device, optimizer and codec, and which part of them is whose."""

    named: Sequence[Named]
    layout: Layout
    shares: SliceBounds
    kind: MemoryKind  # of this worker's slice

    @property
    def length(self) -> int:
        return self.shares.stop - self.shares.start


def slice_layout(named: Sequence[Named], compress: Compression, apart: Apart | None, rank: int, size: int) -> SliceLayout:
    """`compress`: of the gradients of all of these; `apart`: where and as what slices are kept, if not as the parameters are."""
    layout = Layout.in_memory((name, p.shape, dimension_order(p)) for name, p in named)
    first = named[0][1]
    kind = MemoryKind(first.dtype, first.device)
    if apart is not None:
        kind = MemoryKind(apart.dtype or first.dtype, apart.device, pinned=apart.device.type == "cpu" and first.is_cuda)
    return SliceLayout(named, layout, bounds_for(compress, layout, rank, size), kind)


class CutMemory:
    """The memory of one `SliceLayout`. Made while the parameters have their values; they are free afterwards."""

    def __init__(self, sliced: SliceLayout, home: Tensor, weights: Codec | None = None) -> None:
        """`home`: for this worker's slice; `weights`: a codec in which slices are gathered."""
        self.sliced = sliced
        self.parameters = [parameter for _, parameter in sliced.named]
        first = self.parameters[0]
        self.is_trainable = first.requires_grad
        self.layout, self.shares = sliced.layout, sliced.shares
        self.num_elements = self.layout.num_elements
        self._encoded = None if weights is None else EncodedWeights(weights, self.layout, self.shares)
        self.loading = 0  # parameters of it that are being loaded
        self.is_gathered = False
        with torch.inference_mode(False), torch.no_grad():
            self.whole = torch.empty(0, dtype=first.dtype, device=first.device)
            self._allocate()
            self.whole.set_(self.whole.untyped_storage(), 0, (self.num_elements,), (1,))
            for parameter, view in zip(self.parameters, views_of(self.whole, self.parameters), strict=True):
                if parameter.is_contiguous():  # dimensions of one element may have any stride, by which torch chooses kernels
                    view = self.whole.as_strided(parameter.size(), parameter.stride(), view.storage_offset())
                parameter.data = view.copy_(parameter.detach())
            self.slice = home.copy_(self.own_part)
        self.is_there = True
        self.free()

    def move(self, home: Tensor) -> None:
        """The slice lies there from now on."""
        with torch.inference_mode(False), torch.no_grad():
            self.slice = home.copy_(self.slice)

    @property
    def own_part(self) -> Tensor:
        return self.whole[self.shares.start : self.shares.stop]

    def take(self) -> None:
        """Memory for all values; those of this worker's slice are in it."""
        if not self.is_there:
            self._allocate()
            self.is_there = True
        with torch.inference_mode(False), torch.no_grad():
            self.own_part.copy_(self.slice)

    @property
    def is_rounded(self) -> bool:
        """Whether what is gathered is not exactly what is in slices."""
        return self._encoded is not None

    def gather(self, drawn: int, *, exactly: bool) -> Steps:
        """Everybody's slices come into the memory. `drawn`: what a codec that draws lots begins with."""
        if self._encoded is not None and not exactly:
            return self._encoded.steps(self.slice.to(self.whole.device, torch.float32), self.whole, drawn)
        if self.shares.is_even:
            return parts_of(self._on_wire)
        return uneven_parts_of(self.whole, self.shares)

    def _allocate(self) -> None:
        num_bytes = self.num_elements * self.whole.element_size()
        is_large = self.whole.device.type == "cpu" and num_bytes >= LARGE_BYTES
        self.whole.untyped_storage().resize_(max(num_bytes, MAPPED_BYTES) if is_large else num_bytes)

    @property
    def _on_wire(self) -> Tensor:
        """The same memory, as a tensor that may be written to by whoever receives: numpy makes of a storage one that can never be
        given back, so it must not see this one."""
        if self.whole.device.type != "cpu" or self.num_elements == 0:
            return self.whole
        num_bytes = self.num_elements * self.whole.element_size()
        return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(self.whole.data_ptr()), dtype=self.whole.dtype)

    def show(self) -> None:
        """The parameters can be read and written."""
        for parameter in self.parameters:
            if type(parameter) is ParameterInSlices:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]

    def store(self) -> None:
        """What is in the parameters are the values from now on. Of a slice that is kept in more digits than they have, what was
        not changed keeps them."""
        with torch.inference_mode(False), torch.no_grad():
            now = self.own_part.to(self.slice.device)
            if now.dtype is self.slice.dtype:
                self.slice.copy_(now)
            else:
                self.slice.copy_(torch.where(now == self.slice.to(now.dtype), self.slice, now.to(self.slice.dtype)))

    def free(self) -> None:
        for parameter in self.parameters:
            parameter.__class__ = ParameterInSlices
        self.whole.untyped_storage().resize_(0)
        self.is_there = self.is_gathered = False

    def give_back(self) -> None:
        """All values are there: the parameters get memory of their own, and are plain again."""
        self.show()
        with torch.inference_mode(False), torch.no_grad():
            for parameter in self.parameters:
                parameter.data = parameter.detach().clone(memory_format=torch.preserve_format)

    def pieces(self) -> list[Piece]:
        """What this worker steps: views of its slice."""
        found = []
        for slot, (parameter, place) in enumerate(zip(self.parameters, self.layout.places, strict=True)):
            begin, end = max(self.shares.start - place.start, 0), min(self.shares.stop - place.start, place.size)
            if begin < end or (place.size == 0 and self.shares.rank == 0):
                end, start = max(begin, end), place.start + begin - self.shares.start
                part = self.slice[start : start + end - begin]
                weight = nn.Parameter(part, requires_grad=part.is_floating_point() or part.is_complex())
                found.append(Piece(slot, place.name, parameter, place, begin, end, start, weight))
        return found
