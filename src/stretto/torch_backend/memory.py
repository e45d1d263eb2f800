"""Flat host memory for the tensors of a collective, and the way back.

A wire works on flat host memory; torch gives tensors on any device, in any layout, as one or as a list. So a collective is
described by what goes where: `inputs` are tensors with the place at which their values belong in the flat vector, `outputs`
tensors with the place from which theirs come. Where a tensor *is* such a vector already (`whole`: contiguous, on the CPU) nothing
is copied: it is sent from, and received into, where it lies. From a GPU, values are copied into pinned memory on a stream of
their own, without the host waiting, and back when the collective has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.collectives.staging import Staging
from stretto.wire.frames import DTYPE_NAMES

KEPT_BUFFERS = 32
Placed = Sequence[tuple[int, Tensor]]  # (first element, values)
_ON_WIRE = {getattr(torch, name) for name in DTYPE_NAMES[1:]}


class Lent(NamedTuple):
    """`flat`: the vector, in host memory. `ready`: whether it holds the inputs (None: it does). `finish`: fills the outputs."""

    flat: Tensor
    ready: Callable[[], bool] | None
    finish: Callable[[], None] | None


class Memory:
    """The memory that the operations of one process group work on. See the module's text."""

    def __init__(self) -> None:
        self._staging = Staging(kept_buffers=KEPT_BUFFERS)
        self._lock = threading.Lock()

    def lend(self, length: int, like: Tensor, inputs: Placed, outputs: Placed, whole: Tensor | None = None) -> Lent:
        """So many elements of the dtype of `like`, which is on the device of all tensors."""
        if like.device.type == "cuda":
            return self._lend_for_cuda(length, like, inputs, outputs)
        if whole is not None and is_flat(whole):
            flat = whole.detach().view(-1)
            outputs = ()
        else:
            flat = torch.empty(length, dtype=like.dtype, device="cpu")
        for start, tensor in inputs:
            place = flat[start : start + tensor.numel()]
            if place.data_ptr() != tensor.data_ptr() or not is_flat(tensor):
                is_inside = place.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                _copy(place.view(tensor.shape), tensor.detach().clone() if is_inside else tensor)
        return Lent(flat, None, _filling(flat, outputs) if outputs else None)

    def fill_at_once(self, length: int, like: Tensor, inputs: Placed, outputs: Placed) -> None:
        """Where nothing travels: inputs are the outputs, wherever they are."""
        flat = torch.empty(length, dtype=like.dtype, device=like.device)
        for start, tensor in inputs:
            _copy(flat[start : start + tensor.numel()].view(tensor.shape), tensor)
        _filling(flat, outputs)()

    def _lend_for_cuda(self, length: int, like: Tensor, inputs: Placed, outputs: Placed) -> Lent:
        with self._lock:
            return Lent(*self._staging.lend_places(length, like, inputs, outputs))


def is_flat(tensor: Tensor) -> bool:
    """Whether a wire can use it where it lies."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def as_on_wire(tensor: Tensor) -> Tensor:
    """The tensor itself, or its bytes where its dtype is none that travels under its name (float8, uint16, ...)."""
    if tensor.dtype in _ON_WIRE:
        return tensor
    return tensor.detach().view(torch.uint8) if tensor.dim() else tensor.detach().view(1).view(torch.uint8)


def _copy(to: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        to.copy_(values.detach())


def _filling(flat: Tensor, outputs: Placed) -> Callable[[], None]:
    def fill() -> None:
        for start, tensor in outputs:
            _copy(tensor.detach(), flat[start : start + tensor.numel()].view(tensor.shape))

    return fill
