"""Which fabric the workers of a host use: the fastest that all of them can, for each device that the vectors lie on.

NCCL                    every worker computes on a GPU of its own
mapped device memory    all of them share a GPU, on which NCCL refuses to work
mapped host memory      vectors on the CPU, of workers that can look each other up (one PID namespace)
our wire                otherwise: sockets, and shared memory for messages where that can be had; from a GPU through pinned memory
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from stretto.collectives.calls import gather_object
from stretto.collectives.group import Group
from stretto.fabric.base import Area, Fabric, FabricUnavailable
from stretto.fabric.by_wire import ByWire
from stretto.fabric.device_memory import gpu_of
from stretto.fabric.mapped import MappedFabric
from stretto.fabric.native import NativeFabric
from stretto.fabric.per_device import PerDevice, devices_of
from stretto.launching.peers import Peer

ASKED_FOR = "asked for"

log = logging.getLogger("stretto")


def choose_fabric(
    group: Group, peers: Sequence[Peer], areas: Sequence[Area], *, why_wire: str | None = None, former: Fabric | None = None
) -> Fabric:
    """For these vectors. All members call it together, and all get the same kind. `why_wire`: why it must be our wire.
    `former`: what was chosen for other vectors on the same devices before, and is used on if it can be.

    The first member says in the log what was chosen, and why."""
    if former is not None:
        try:
            former.prepare(areas)
            return former
        except FabricUnavailable as problem:
            former.stop()
            why_wire = str(problem)
    devices = devices_of(areas)
    if group.size == 1 or why_wire is not None:
        return _by_wire(group, areas, devices, why_wire)
    if len(devices) == 1:
        return _choose_for(group, peers, areas, devices[0])
    parts = {device: [area for area in areas if area.device == device] for device in devices}
    return PerDevice(areas, {device: _choose_for(group, peers, part, device) for device, part in parts.items()})


def _choose_for(group: Group, peers: Sequence[Peer], areas: Sequence[Area], device: torch.device) -> Fabric:
    try:
        fabric, why = _fastest(group, [peers[rank] for rank in group.ranks], device)
        fabric.prepare(areas)
    except FabricUnavailable as problem:
        return _by_wire(group, areas, [device], str(problem))
    _say(logging.INFO, group, [device], fabric, why)
    return fabric


def _by_wire(group: Group, areas: Sequence[Area], devices: Sequence[torch.device], why: str | None) -> Fabric:
    fabric = ByWire(group)
    fabric.prepare(areas)
    if why is not None:
        through_host = why != ASKED_FOR and any(device.type != "cpu" for device in devices)
        _say(logging.WARNING if through_host else logging.INFO, group, devices, fabric, why)
    return fabric


def _say(level: int, group: Group, devices: Sequence[torch.device], fabric: Fabric, why: str) -> None:
    if group.rank == 0 and group.size > 1:
        workers, where = f"the {group.size} workers of a host (ranks {list(group.ranks)})", " and ".join(map(str, devices))
        log.log(level, "%s combine what lies on %s through %s: %s", workers, where, fabric.name, why)


def _fastest(group: Group, members: Sequence[Peer], device: torch.device) -> tuple[Fabric, str]:
    """The fabric that these workers should be able to use, and why that one; it is found out when it is prepared."""
    if device.type == "cpu":
        apart = [peer.rank for peer in members if not members[0].sees(peer)]
        if apart:
            raise FabricUnavailable(
                f"rank {apart[0]} is in another PID namespace than rank {members[0].rank}, so its memory cannot be found"
            )
        return MappedFabric(group), "they see each other's memory"
    gpus = gather_object(group, gpu_of(device) if device.type == "cuda" else "")
    if not all(gpus):
        raise FabricUnavailable(f"there is no faster way between devices of the kind {device.type!r}")
    if len(set(gpus)) == 1:
        return MappedFabric(group, device), "they share a GPU"
    if len(set(gpus)) == len(gpus):
        return NativeFabric(group, device), "each has a GPU of its own"
    raise FabricUnavailable(
        f"{len(gpus)} workers share {len(set(gpus))} GPUs. Give each worker a GPU of its own, or all of them the same"
    )
