"""Buffers, where every worker has its own: they become the mean of all when weights do.

Floating buffers (the statistics of a BatchNorm) are averaged, in float32, or in float64 if they are that precise; others
(counters, index tables) are the first worker's. A variance that is averaged so leaves out how far the workers' means are apart,
which is little while their weights are close.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto.engine.state import distinct_elements, write_buffer
from stretto.engine.watch import Watch

Average = Callable[[Tensor], Tensor]
CopyFirst = Callable[[Sequence[Tensor]], None]


class FlatBuffers:
    """Some floating buffers as one vector of that dtype, where the first of them is."""

    def __init__(self, watch: Watch, buffers: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._watch, self._buffers, self._dtype = watch, buffers, dtype
        self.numel = sum(distinct_elements(buffer).numel() for buffer in buffers)

    def read(self) -> Tensor:
        """A copy of what they hold now."""
        device = self._buffers[0].device
        parts = (distinct_elements(buffer).reshape(-1) for buffer in self._buffers)
        return torch.cat([part.to(device=device, dtype=self._dtype) for part in parts])

    def write(self, values: Tensor) -> None:
        statistics, stop = self._watch.statistics(), 0
        for buffer in self._buffers:
            shape = distinct_elements(buffer).shape
            start, stop = stop, stop + shape.numel()
            value = values[start:stop].view(shape).to(device=buffer.device, dtype=buffer.dtype)
            write_buffer(self._watch, buffer, value, hidden=id(buffer) in statistics, saved=False)


def floating_buffers(watch: Watch) -> FlatBuffers | None:
    """All that are floating, in float64 if one of them is that precise; None if there are none."""
    found = [buffer for buffer in watch.buffers() if buffer.numel() and buffer.is_floating_point()]
    wide = any(buffer.dtype is torch.float64 for buffer in found)
    return FlatBuffers(watch, found, torch.float64 if wide else torch.float32) if found else None


def average_buffers(watch: Watch, average: Average, copy_first: CopyFirst) -> None:
    """On all workers. `average` gives the mean of a vector over them, `copy_first` overwrites tensors by the first worker's."""
    buffers = [buffer for buffer in watch.buffers() if buffer.numel()]
    counted = [buffer for buffer in buffers if not buffer.is_floating_point()]
    for wide in (False, True):
        group = [buffer for buffer in buffers if buffer.is_floating_point() and (buffer.dtype is torch.float64) == wide]
        if group:
            flat = FlatBuffers(watch, group, torch.float64 if wide else torch.float32)
            flat.write(average(flat.read()))
    if counted:
        copy_first(counted)
