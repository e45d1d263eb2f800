"""A fabric of mapped memory: what a worker has put into its own memory, the others of its host read where it lies.

    sum      copy `flat`, scaled, to my memory | meet | add up my share, reading it in everybody's memory
    share    copy my share to my memory | meet | copy the others' shares from theirs

Cost per worker and use, g workers, m bytes: 2 m copied or added by the sum, m by the sharing, and two meetings (a barrier of the
group: log2 g small messages). Memory: m and one share in each worker, mapped by all.

Two meetings are enough. What I have put in is read between my first and my second meeting, and overwritten after the second. What
I give out is read after the second, and overwritten only after the first of the next use, which nobody reaches before it has
read.

All waiting is done in meetings, which are collectives: they have the job's deadlines, a member that dies fails them with
`PeerLost`, and members that are not in the same use find out. The memory of a dead worker stays readable (`wire/mapping.py`,
`device_memory.py`), so reading it while its death is not yet known does no harm.

Vectors on a GPU are exchanged in memory of that GPU, which all members must be using. Copies and additions are queued there, and
a meeting begins when the GPU has come so far. No GPU ever waits for another worker's work: that could not be ended if the worker
died.
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
from stretto.fabric.base import Area, Fabric, FabricUnavailable, Steps
from stretto.fabric.device_memory import DeviceOffer, OwnDeviceMemory, map_device
from stretto.wire.mapping import MappingOffer, OwnMapping, map_offered

ALIGNMENT = 64
CPU = torch.device("cpu")


class MappedFabric(Fabric):
    """See the module's text."""

    def __init__(self, group: Group, device: torch.device = CPU) -> None:
        self.name = f"mapped {'host' if device.type == 'cpu' else 'device'} memory"
        self._group = group
        self._device = device
        self._channel = group.new_channel()
        self.channels = frozenset({self._channel})
        self._areas: Sequence[Area] = ()
        self._given: list[list[Tensor]] = []  # member -> area -> what it has put in
        self._made: list[list[Tensor]] = []  # member -> area -> what it has made of its share

    def prepare(self, areas: Sequence[Area]) -> None:
        self._areas = areas
        self._leave_memory()  # what there was is free before the new is made
        sizes = [_num_bytes(areas, member, self._group.size) for member in range(self._group.size)]
        memory = _map_everybody(self._group, sizes, self._device)
        cut = [_cut(bytes_, areas, member, self._group.size) for member, bytes_ in enumerate(memory)]
        self._given = [given for given, _ in cut]
        self._made = [made for _, made in cut]

    def _leave_memory(self) -> None:
        if self._given:
            mine = self._given[self._group.rank]
            self._given, self._made = [], []
            gather_object(self._group, None)  # the others have let go of it too
            del mine

    def sum(self, area: int, flat: Tensor, scale: float, number: int, label: str) -> Steps:
        torch.mul(flat, scale, out=self._given[self._group.rank][area])
        yield self._meet(2 * number, label)
        start, stop = self._share(area, self._group.rank)
        _add_up([given[area][start:stop] for given in self._given], flat[start:stop])

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
        name, label = (self._channel, sequence & 0xFFFFFFFF), f"{label}, in {self.name}"
        ready = None if self._device.type == "cpu" else torch.cuda.current_stream(self._device).record_event().query
        return self._group.start(Kind.BARRIER, nothing, "dissemination", name=name, label=label, ready=ready)


def _add_up(parts: Sequence[Tensor], out: Tensor) -> None:
    """In the order of members: the same bits whoever adds."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


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


def _map_everybody(group: Group, num_bytes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Each member's memory, by rank in the group. All members succeed, or all raise `FabricUnavailable` with what went wrong."""
    mine, problem = _make(num_bytes[group.rank], sum(num_bytes), device)
    offers = gather_object(group, None if mine is None else msgspec.to_builtins(mine.offer))
    memory: list[Tensor] = []
    if mine is not None and None not in offers:  # else the member that has none says why
        try:
            for member, offer in enumerate(offers):
                memory.append(_bytes_of(mine) if member == group.rank else _map(offer, num_bytes[member], device))
        except (OSError, ValueError, RuntimeError, msgspec.ValidationError) as error:  # RuntimeError: of torch, on a GPU
            problem = f"what rank {group.ranks[len(memory)]} offers: {error}"
    problems = gather_object(group, problem)  # also: everybody has mapped it, so the file is needed no longer
    if mine is not None and not isinstance(mine, OwnDeviceMemory):
        mine.close_file()
    for rank, said in zip(group.ranks, problems, strict=True):
        if said:
            raise FabricUnavailable(f"rank {rank} cannot map {said}")
    return memory


def _make(num_bytes: int, of_all: int, device: torch.device) -> tuple[OwnMapping | OwnDeviceMemory | None, str]:
    try:
        return OwnMapping(num_bytes, of_all) if device.type == "cpu" else OwnDeviceMemory(num_bytes, device), ""
    except (OSError, RuntimeError) as error:
        return None, f"{num_bytes} bytes of its own: {error}"


def _map(offer: object, num_bytes: int, device: torch.device) -> Tensor:
    kind: type[MappingOffer | DeviceOffer] = MappingOffer if device.type == "cpu" else DeviceOffer
    checked = msgspec.convert(offer, kind)
    if checked.num_bytes != num_bytes:
        raise ValueError(f"{checked.num_bytes} bytes where {num_bytes} are due")
    if isinstance(checked, DeviceOffer):
        return map_device(checked, device)
    return torch.from_numpy(map_offered(checked, writable=True))


def _bytes_of(mine: OwnMapping | OwnDeviceMemory) -> Tensor:
    return mine.bytes if isinstance(mine, OwnDeviceMemory) else torch.from_numpy(mine.bytes)
