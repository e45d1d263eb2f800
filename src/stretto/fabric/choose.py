"""Which fabric the workers of a host use: the fastest that all of them can.

mapped host memory    every worker can look the others up (one PID namespace), and the system gives the memory
our wire              otherwise: sockets, and shared memory for messages where that can be had
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from stretto.collectives.group import Group
from stretto.fabric.base import Area, Fabric
from stretto.fabric.by_wire import ByWire
from stretto.fabric.mapped import CannotMap, MappedFabric
from stretto.launching.peers import Peer

log = logging.getLogger("stretto")


def choose_fabric(
    group: Group, peers: Sequence[Peer], areas: Sequence[Area], *, mapped: bool = True, former: Fabric | None = None
) -> Fabric:
    """For these vectors. All members call it together, and all get the same kind. `mapped`: try mapped memory at all. `former`:
    what was chosen for other vectors before, and is used on if it can be.

    The first member says in the log what was chosen, and why."""
    why_not = None if former is None else _problem_with(former, areas)
    if former is not None and why_not is None:
        return former
    if group.size == 1:
        return _prepared(ByWire(group), areas)
    members = [peers[rank] for rank in group.ranks]
    fabric: Fabric | None = None
    why = "asked for"
    if why_not is not None:
        why = why_not
    elif mapped:
        fabric, why = _try_mapped(group, members, areas)
    fabric = fabric or _prepared(ByWire(group), areas)
    if group.rank == 0:
        log.info("the %d workers of a host (ranks %s) combine through %s: %s", group.size, list(group.ranks), fabric.name, why)
    return fabric


def _problem_with(former: Fabric, areas: Sequence[Area]) -> str | None:
    """Why a fabric cannot be used for these vectors; None: it is ready for them."""
    try:
        former.prepare(areas)
        return None
    except CannotMap as problem:
        return str(problem)


def _try_mapped(group: Group, members: Sequence[Peer], areas: Sequence[Area]) -> tuple[Fabric | None, str]:
    apart = [peer.rank for peer in members if not members[0].sees(peer)]
    if apart:
        return None, f"rank {apart[0]} is in another PID namespace than rank {members[0].rank}, so its memory cannot be found"
    try:
        return _prepared(MappedFabric(group), areas), "they see each other's memory"
    except CannotMap as problem:
        return None, str(problem)


def _prepared(fabric: Fabric, areas: Sequence[Area]) -> Fabric:
    fabric.prepare(areas)
    return fabric
