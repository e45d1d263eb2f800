"""A fabric of mapped memory: what a worker has put into its own memory, the others of its host read where it lies.

    sum      copy `flat`, scaled, to my memory | meet | add up my share, reading it in everybody's memory
    share    copy my share to my memory | meet | copy the others' shares from theirs

Cost per worker and use, g workers, m bytes: 2 m copied or added by the sum, m by the sharing, and two meetings (a barrier of the
group: log2 g small messages). Memory: m and one share in each worker, mapped by all.

Two meetings are enough. What I have put in is read between my first and my second meeting, and overwritten after the second. What
I give out is read after the second, and overwritten only after the first of the next use, which nobody reaches before it has
read.

All waiting is done in meetings, which are collectives: they have the job's deadlines, a member that dies fails them with
`PeerLost`, and members that are not in the same use find out. The memory of a dead worker stays readable (`wire/mapping.py`), so
reading it while its death is not yet known does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec
import torch
from torch import Tensor

from stretto.collectives.calls import gather_object
from stretto.collectives.group import Group
from stretto.collectives.plan import Kind
from stretto.collectives.request import Pending
from stretto.errors import StrettoError
from stretto.fabric.base import Area, Fabric, Steps
from stretto.wire.mapping import MappingOffer, OwnMapping, map_offered

ALIGNMENT = 64


class CannotMap(StrettoError):
    """The workers of a host do not see each other's memory; the text says why. Raised on all of them."""


class MappedFabric(Fabric):
    """See the module's text."""

    name = "mapped host memory"

    def __init__(self, group: Group) -> None:
        self._group = group
        self._channel = group.new_channel()
        self.channels = frozenset({self._channel})
        self._areas: Sequence[Area] = ()
        self._given: list[list[Tensor]] = []  # member -> area -> what it has put in
        self._made: list[list[Tensor]] = []  # member -> area -> what it has made of its share

    def prepare(self, areas: Sequence[Area]) -> None:
        self._areas = areas
        self._given, self._made = [], []  # what there was is free before the new is made
        memory = _map_everybody(self._group, [_num_bytes(areas, member, self._group.size) for member in range(self._group.size)])
        cut = [_cut(bytes_, areas, member, self._group.size) for member, bytes_ in enumerate(memory)]
        self._given = [given for given, _ in cut]
        self._made = [made for _, made in cut]

    def sum(self, area: int, flat: Tensor, scale: float, number: int, label: str) -> Steps:
        _put(flat, scale, self._given[self._group.rank][area])
        yield self._meet(2 * number, label)
        start, stop = self._share(area, self._group.rank)
        parts = [given[area][start:stop] for given in self._given]
        if flat.is_cpu:
            _add_up(parts, flat[start:stop])
        else:  # in this worker's own memory, where nobody else reads its share any more
            flat[start:stop].copy_(_add_up(parts, self._made[self._group.rank][area]))

    def share(self, area: int, flat: Tensor, number: int, label: str) -> Steps:
        start, stop = self._share(area, self._group.rank)
        self._made[self._group.rank][area].copy_(flat[start:stop])
        yield self._meet(2 * number + 1, label)
        for member in range(self._group.size):
            if member != self._group.rank:
                start, stop = self._share(area, member)
                flat[start:stop].copy_(self._made[member][area])

    def _share(self, area: int, member: int) -> tuple[int, int]:
        return self._areas[area].share(member, self._group.size)

    def _meet(self, sequence: int, label: str) -> Pending:
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        name = (self._channel, sequence & 0xFFFFFFFF)
        return self._group.start(Kind.BARRIER, nothing, "dissemination", name=name, label=f"{label}, in {self.name}")


def _put(flat: Tensor, scale: float, memory: Tensor) -> None:
    if flat.is_cpu:
        torch.mul(flat, scale, out=memory)
    else:
        memory.copy_(flat).mul_(scale)


def _add_up(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """In the order of members: the same bits whoever adds."""
    if len(parts) == 1:
        return out.copy_(parts[0])
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
    return out


def _num_bytes(areas: Sequence[Area], member: int, size: int) -> int:
    return sum(_lengths(areas, member, size))


def _lengths(areas: Sequence[Area], member: int, size: int) -> list[int]:
    """Bytes of each piece of a member's memory: what it gives for each area, then what it makes of its share of each."""
    shares = [area.share(member, size) for area in areas]
    made = [(stop - start) * area.dtype.itemsize for area, (start, stop) in zip(areas, shares, strict=True)]
    return [-(-length // ALIGNMENT) * ALIGNMENT for length in (*(area.num_bytes for area in areas), *made)]


def _cut(memory: Tensor, areas: Sequence[Area], member: int, size: int) -> tuple[list[Tensor], list[Tensor]]:
    begins = [0, *accumulate(_lengths(areas, member, size))]
    given, made = [], []
    for number, area in enumerate(areas):
        start, stop = area.share(member, size)
        given.append(_view(memory, begins[number], area.num_elements, area.dtype))
        made.append(_view(memory, begins[len(areas) + number], stop - start, area.dtype))
    return given, made


def _view(memory: Tensor, begin: int, count: int, dtype: torch.dtype) -> Tensor:
    return memory[begin : begin + count * dtype.itemsize].view(dtype)


def _map_everybody(group: Group, num_bytes: Sequence[int]) -> list[Tensor]:
    """Each member's memory, by rank in the group. All members succeed, or all raise `CannotMap` with what went wrong first."""
    mine, problem = _make(num_bytes[group.rank], sum(num_bytes))
    offers = gather_object(group, None if mine is None else msgspec.to_builtins(mine.offer))
    memory: list[Tensor] = []
    if mine is not None and None not in offers:  # else the member that has none says why
        try:
            for member, offer in enumerate(offers):
                memory.append(_bytes_of(mine) if member == group.rank else _map(offer, num_bytes[member]))
        except (OSError, ValueError, msgspec.ValidationError) as error:
            problem = f"what rank {group.ranks[len(memory)]} offers: {error}"
    problems = gather_object(group, problem)  # also: everybody has mapped it, so the file is needed no longer
    if mine is not None:
        mine.close_file()
    for rank, said in zip(group.ranks, problems, strict=True):
        if said:
            raise CannotMap(f"rank {rank} cannot map {said}")
    return memory


def _make(num_bytes: int, of_all: int) -> tuple[OwnMapping | None, str]:
    try:
        return OwnMapping(num_bytes, of_all), ""
    except OSError as error:
        return None, f"{num_bytes} bytes of its own: {error}"


def _map(offer: object, num_bytes: int) -> Tensor:
    checked = msgspec.convert(offer, MappingOffer)
    if checked.num_bytes != num_bytes:
        raise ValueError(f"{checked.num_bytes} bytes where {num_bytes} are due")
    return torch.from_numpy(map_offered(checked, writable=True))


def _bytes_of(mine: OwnMapping) -> Tensor:
    return torch.from_numpy(mine.bytes)
