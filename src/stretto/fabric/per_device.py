"""Vectors on several devices: for each device the fabric that is fastest there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stretto.fabric.base import Area, Fabric, Steps


def devices_of(areas: Sequence[Area]) -> list[torch.device]:
    """Where these vectors lie, in the order in which they come: the same on workers whose GPUs have other numbers."""
    return list(dict.fromkeys(area.device for area in areas)) or [torch.device("cpu")]


class PerDevice(Fabric):
    """See the module's text. The fabrics are prepared already."""

    def __init__(self, areas: Sequence[Area], fabrics: Mapping[torch.device, Fabric]) -> None:
        self._fabrics = fabrics
        self.name = " and ".join(dict.fromkeys(fabric.name for fabric in fabrics.values()))
        self.channels = frozenset().union(*(fabric.channels for fabric in fabrics.values()))
        self._places = _places(areas)

    def prepare(self, areas: Sequence[Area]) -> None:
        for device, fabric in self._fabrics.items():
            fabric.prepare([area for area in areas if area.device == device])
        self._places = _places(areas)

    def sum(self, area: int, flat: Tensor, scale: float, number: int, label: str) -> Steps:
        device, place = self._places[area]
        return self._fabrics[device].sum(place, flat, scale, number, label)

    def share(self, area: int, flat: Tensor, number: int, label: str) -> Steps:
        device, place = self._places[area]
        return self._fabrics[device].share(place, flat, number, label)

    def stop(self) -> None:
        for fabric in self._fabrics.values():
            fabric.stop()


def _places(areas: Sequence[Area]) -> list[tuple[torch.device, int]]:
    """Each area's device, and its place among the areas there."""
    counts: dict[torch.device, int] = {}
    places = []
    for area in areas:
        place = counts.get(area.device, 0)
        places.append((area.device, place))
        counts[area.device] = place + 1
    return places
