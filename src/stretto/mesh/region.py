"""The part of a block that is cut: from where its input goes in to where its output comes out.

    region.enter(x)      a projection into it begins. Where several read one tensor (q, k and v; gate and up) it goes in once, and
                         so its gradient is summed over the members once, not three times.
    region.begin()       from here on random numbers are this member's own: dropout inside must drop other elements at each
    region.end()         from here on they are again the same at all members: what is outside is the same everywhere

A member's own stream is made anew each time, from a number that is drawn from the common generator, and so the same at all
members, and the member's place. Nothing is remembered between two forwards: what a checkpoint (of activations, or of training)
does to the generators is all that has to be done, and a recomputation draws what the first forward has drawn.

Where nothing drops anything no generator is touched. Cost where something does: 30 us on a CPU, for saving its state twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from stretto.mesh.crossings import enter
from stretto.mesh.mesh import Axis

ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: places far apart in the space of seeds
SEEDS = 1 << 62


class _Common(NamedTuple):
    """The state of the generators that all members have alike."""

    cpu: Tensor
    device: torch.device
    gpu: Tensor | None


class Region:
    """The cut part of one block."""

    def __init__(self, axis: Axis, block: nn.Module) -> None:
        self.axis = axis
        self._dropouts = [module for module in block.modules() if isinstance(module, _DropoutNd)]
        # A `dropout` that is a number belongs to a forward that calls F.dropout or attention with it.
        numbers = [
            (module, name)
            for module in block.modules()
            for name, value in vars(module).items()
            if "dropout" in name and isinstance(value, float)
        ]
        self._numbers = numbers
        self._entered: dict[int, tuple[Tensor, int, Tensor]] | None = None  # id of a tensor -> it, its version, what went in
        self._common: _Common | None = None  # while random numbers are this member's own

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around one forward of the block."""
        before, self._entered = self._entered, {}
        try:
            yield
        finally:
            self._entered = before
            self.end()  # after an exception inside

    def enter(self, x: Tensor) -> Tensor:
        if self._entered is None:
            return enter(x, self.axis)
        known = self._entered.get(id(x))
        if known is not None and known[0] is x and known[1] == x._version:
            return known[2]
        inside = enter(x, self.axis)
        self._entered[id(x)] = (x, x._version, inside)
        return inside

    # -- random numbers -----------------------------------------------------------------------------------------------

    def begin(self, device: torch.device, *, training: bool) -> None:
        if self.axis.size == 1 or self._common is not None or not (training and self._drops()):
            return
        seed = int(torch.randint(SEEDS, (), device="cpu"))
        on_gpu = device.type == "cuda"
        gpu = torch.cuda.get_rng_state(device) if on_gpu else None
        self._common = _Common(torch.get_rng_state(), device, gpu)
        own = (seed + (self.axis.place + 1) * ODD) % (1 << 63)
        torch.default_generator.manual_seed(own)
        if on_gpu:
            torch.cuda.default_generators[_index(device)].manual_seed(own)

    def end(self) -> None:
        if self._common is not None:
            common, self._common = self._common, None
            torch.set_rng_state(common.cpu)
            if common.gpu is not None:
                torch.cuda.set_rng_state(common.gpu, common.device)

    def _drops(self) -> bool:
        numbers = any(getattr(module, name) for module, name in self._numbers)
        return numbers or any(module.p > 0.0 for module in self._dropouts)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
