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

log = logging.getLogger("stretto")


def choose_fabric(
    group: Group, peers: Sequence[Peer], areas: Sequence[Area], *, by_wire: bool = False, former: Fabric | None = None
) -> Fabric:
    """For these vectors. All members call it together, and all get the same kind. `by_wire`: the user wants our wire. `former`:
    what was chosen for other vectors on the same devices before, and is used on if it can be.

    The first member says in the log what was chosen, and why."""
    why_not = None if former is None else _problem_with(former, areas)
    if former is not None and why_not is None:
        return former
    devices = devices_of(areas)
    if len(devices) == 1:
        return _choose_for(group, peers, areas, devices[0], by_wire, why_not)
    parts = {device: [area for area in areas if area.device == device] for device in devices}
    return PerDevice(areas, {device: _choose_for(group, peers, part, device, by_wire, why_not) for device, part in parts.items()})


def _problem_with(former: Fabric, areas: Sequence[Area]) -> str | None:
    """Why a fabric cannot be used for these vectors; None: it is ready for them."""
    try:
        former.prepare(areas)
        return None
    except FabricUnavailable as problem:
        former.close()
        return str(problem)


def _choose_for(
    group: Group, peers: Sequence[Peer], areas: Sequence[Area], device: torch.device, by_wire: bool, why_not: str | None
) -> Fabric:
    """`why_not`: what was tried before, and failed."""
    if group.size == 1:
        return _prepared(ByWire(group), areas)
    fabric: Fabric | None = None
    why = why_not or "asked for"
    if why_not is None and not by_wire:
        try:
            fabric, why = _fastest(group, [peers[rank] for rank in group.ranks], device)
            _prepared(fabric, areas)
        except FabricUnavailable as problem:
            fabric, why = None, str(problem)
    through_host = fabric is None and device.type != "cpu" and not by_wire
    fabric = fabric or _prepared(ByWire(group), areas)
    if group.rank == 0:
        log.log(
            logging.WARNING if through_host else logging.INFO,
            "the %d workers of a host (ranks %s) combine what lies on %s through %s: %s",
            group.size, list(group.ranks), device, fabric.name, why,
        )  # fmt: skip
    return fabric


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


def _prepared(fabric: Fabric, areas: Sequence[Area]) -> Fabric:
    fabric.prepare(areas)
    return fabric
