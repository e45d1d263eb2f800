"""A fabric of our own collectives: for workers of one host that cannot map each other's memory, or were told not to.

equal parts    ring reduce-scatter, ring all-gather        2 m (g - 1)/g bytes sent by each of g workers, for m bytes
an owner       reduction to it, broadcast from it          m each, along binomial trees
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stretto.collectives.group import Group
from stretto.collectives.plan import Kind
from stretto.collectives.staging import Staging
from stretto.fabric.base import Area, Fabric, Steps


class ByWire(Fabric):
    """See the module's text."""

    name = "our wire"

    def __init__(self, group: Group) -> None:
        self._group = group
        self._channel = group.new_channel()
        self.channels = frozenset({self._channel})
        self._staging = Staging(kept_buffers=256)
        self._areas: Sequence[Area] = ()

    def prepare(self, areas: Sequence[Area]) -> None:
        self._areas = areas

    def sum(self, area: int, flat: Tensor, scale: float, number: int, label: str) -> Steps:
        if scale != 1.0:
            flat.mul_(scale)
        if self._areas[area].owner is None:
            return self._run(Kind.REDUCE_SCATTER, "ring", area, flat, 2 * number, label)
        return self._run(Kind.REDUCE, "binomial", area, flat, 2 * number, label)

    def share(self, area: int, flat: Tensor, number: int, label: str) -> Steps:
        if self._areas[area].owner is None:
            return self._run(Kind.ALL_GATHER, "ring", area, flat, 2 * number + 1, label)
        return self._run(Kind.BROADCAST, "binomial", area, flat, 2 * number + 1, label)

    def _run(self, kind: Kind, algorithm: str, area: int, flat: Tensor, sequence: int, label: str) -> Steps:
        if self._group.size == 1:
            return
        root = self._areas[area].owner or 0
        name = (self._channel, sequence & 0xFFFFFFFF)
        memory, ready, bring_back = self._staging.lend(flat)
        yield self._group.start(kind, memory, algorithm, root=root, name=name, ready=ready, label=label)
        if bring_back is not None:
            bring_back()
