"""Parameters that travel together: one flat buffer, with gradients as views of it.

    [ gradient | gradient | ... | tail ]

The *tail* is room for whatever a Training sends along with the gradients; the bucket itself never reads it. It is for the host:
beside a buffer on a GPU it may lie in host memory, so that neither writing nor reading it waits for the GPU.

The memory is used again in the next round. A program that keeps a gradient beyond that (`kept.append(p.grad)`, as methods that
compare the gradients of several losses do) expects it to stay as it was: before a round writes to a bucket of which somebody
else still holds a part, the bucket takes new memory and leaves the old to its holder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from stretto.errors import ConfigurationError

LARGE_BYTES = 64 << 10  # from here on a gradient is copied as soon as it is there: while it is in the cache, and to free it

_HAS_GRAPH = attrgetter("requires_grad")  # asked of every gradient in every round: without a Python frame for each
_IS_SPARSE = attrgetter("is_sparse")


class Bucket:
    """One flat buffer and how far it is in this round. `early`: it may leave as soon as its last gradient is there."""

    def __init__(
        self,
        members: Sequence[tuple[str, Tensor]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        early: bool = True,
        tail: int = 0,
        tail_on_host: bool = False,
    ) -> None:
        self.number = 0  # its place in the arrangement
        self.names = [name for name, _ in members]
        self.parameters = [parameter for _, parameter in members]
        self.num_gradient_elements = sum(parameter.numel() for parameter in self.parameters)
        self.early = early
        self._tail_elements, self._tail_on_host = tail, tail_on_host
        self._take_memory(dtype, device)
        self.large = [view.nbytes >= LARGE_BYTES for view in self.views]
        self.used = [True] * len(members)
        self.leaves_early = early  # in this round
        self.reset()

    def _take_memory(self, dtype: torch.dtype, device: torch.device) -> None:
        count, tail = self.num_gradient_elements, self._tail_elements
        self.flat = torch.zeros(count + tail, dtype=dtype, device=device)
        self.views = views_of(self.flat, self.parameters)
        self.tail = self.flat[count:]
        if self._tail_on_host:
            self.tail = torch.zeros(tail, dtype=dtype, device="cpu", pin_memory=True)
        self.on_wire = alias_of(self.flat)
        self._references = list(map(sys.getrefcount, self.views))
        self._addresses = list(map(Tensor.data_ptr, self.views))
        self._users = num_users(self.flat)

    @property
    def is_held(self) -> bool:
        """Whether somebody else holds a gradient that lies here, or a view of one, or has moved one away: `model.double()` gives
        the very tensors that are gradients other memory. To be asked while no round is under way."""
        if list(map(Tensor.data_ptr, self.views)) != self._addresses:
            return True
        if num_users(self.flat) > self._users:
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
        """No parameter has a gradient."""
        for parameter in self.parameters:
            parameter.grad = None

    def hand_out(self, used: Sequence[bool]) -> None:
        """Every parameter's gradient lies here from now on; one that nobody has used has none."""
        for parameter, view, somewhere in zip(self.parameters, self.views, used, strict=True):
            parameter.grad = view if somewhere else None

    def reset(self) -> None:
        """The next round may begin."""
        self.fired = [False] * len(self.parameters)
        self.missing = len(self.parameters)
        self.sent = False


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """What its gradient is kept in: `p.grad_dtype` where somebody has set it, which torch then insists on."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def alias_of(flat: Tensor) -> Tensor:
    """The same memory as a tensor of its own for the wire, whose views do not count among the users of `flat`: the communication
    thread may keep one for a moment after a collective has ended. What lies on a GPU is copied by whatever sends it."""
    if flat.device.type != "cpu" or flat.numel() == 0:  # a parameter without elements may have a bucket to itself
        return flat
    return torch.from_numpy(flat.view(torch.uint8).numpy()).view(flat.dtype)


def num_users(flat: Tensor) -> int:
    """How many tensors there are on this memory."""
    count: int = torch._C._storage_Use_Count(flat.untyped_storage()._cdata)
    return count


def is_only_here(holder: list[Tensor | None]) -> bool:
    """Whether the first tensor of a list is nobody else's, nor its memory: neither the program's nor autograd's."""
    fresh: list[Tensor | None] = [torch.empty(1, dtype=torch.uint8, device="cpu")]
    mine, like = holder[0], fresh[0]
    assert mine is not None and like is not None
    return num_users(mine) <= num_users(like) and sys.getrefcount(mine) <= sys.getrefcount(like)


def refuse_graph(gradient: Tensor) -> None:
    """What is combined is a copy in a bucket, without the graph that leads to it."""
    if gradient.requires_grad:
        raise ConfigurationError(
            "backward(create_graph=True) of a distributed model: p.grad becomes the mean over all workers, which has no graph: "
            "second derivatives through it would be wrong.\n"
            "Use torch.autograd.grad(loss, parameters, create_graph=True) for the inner derivative, and a plain backward() for "
            "the loss that is made of it."
        )


def views_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
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


def dimension_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Its dimensions as its gradient lies in memory, the outermost first, where that is not their own order; see `views_of`."""
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
