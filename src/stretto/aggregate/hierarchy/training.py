"""Synchronous training on two levels.

A bucket's exchange has three parts: the workers of a host sum it up, each its share (`fabric/`); each worker combines its share
with those of the workers in the same place on the other hosts, compressed if the strategy says so; and the workers of a host give
each other what came of it. Everything else (rounds, notes, late gradients, failures) is that of synchronous all-reduce.

What is not compressed is shared out in equal parts, in pieces of a few megabytes. What is compressed belongs to one worker of
each host as a whole, parameter by parameter: codecs keep residuals and matrices by parameter, and work on whole ones. Which
worker that is depends on the parameters of the model alone, shared out evenly by bytes, and does not change when others are
frozen or added.

Codecs give the mean over those that take part in an exchange. So with h hosts and P workers, what is to be compressed is scaled
by h / P before a host adds it up: the mean over hosts is then the mean over all workers, also where hosts have different numbers
of them.

A residual belongs to a host, not to a worker: a worker that has run out of data (`join`) goes on to speak for its host.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.all_reduce import AllReduce, compression_state
from stretto.aggregate.all_reduce.admission import check_compression, check_crossing, check_payloads
from stretto.aggregate.all_reduce.bucket import ReducedBucket, make_buckets
from stretto.aggregate.all_reduce.exchange import MOST, Steps, UnderWay, side_by_side
from stretto.aggregate.all_reduce.training import SynchronousAllReduce
from stretto.aggregate.hierarchy.hosts import Hosts
from stretto.aggregate.hierarchy.value import Hierarchy
from stretto.collectives.group import Group
from stretto.collectives.plan import Kind
from stretto.collectives.request import Pending
from stretto.compress.rounds import ExchangeContext, Sum
from stretto.compress.state import CompressionState
from stretto.engine.training import Named, Participation, Setting, TensorsByName, TrainingState
from stretto.errors import WireError
from stretto.fabric.base import Area, Fabric
from stretto.fabric.choose import ASKED_FOR, choose_fabric
from stretto.fabric.per_device import devices_of
from stretto.job import Job

if TYPE_CHECKING:
    from stretto.strategy import Strategy

PIECE_BYTES = 4 << 20  # of the sizes tried (2 to 25 MiB, two hosts of two workers, 1 Gbit/s) the largest that costs nothing
OWN, SHARED = "own ", "shared "  # in front of the kinds of a saved state


class SynchronousHierarchy(SynchronousAllReduce):
    """`Hierarchy` + `Synchronous` + `Replicated`."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        self._hosts = Hosts(job, _hierarchy_of(strategy).group_size)
        self._owners: dict[str, int] = {}  # parameter -> the place on each host of the worker that speaks for it
        self._fabric: Fabric | None = None
        self._devices: set[torch.device] = set()  # that the fabric was chosen for
        self._alike = True  # all workers have their buckets on the same kinds of devices
        self._pieces: dict[ReducedBucket, list[tuple[int, Area]]] = {}
        self._first_area: dict[ReducedBucket, int] = {}
        self._meeting: Pending | None = None  # of all workers, in the round under way
        self._cause: Exception | None = None  # what this worker has made the round fail with
        super().__init__(strategy, job, setting)
        if self.state_text is not None:
            self.state_text += " between hosts"
        if self._crossing is None:
            self.no_join = None

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        check_payloads(strategy, _outer_of(strategy), "outer")

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        check_compression(model, optimizers, strategy)
        check_crossing(optimizers, strategy)

    def _find_group(self) -> tuple[Group, str]:
        return self._hosts.across, _outer_of(self._strategy).algorithm

    def _make_channel(self) -> int:
        return self._group.new_channel()

    @property
    def _computes(self) -> bool:
        return True

    # -- parameters ---------------------------------------------------------------------------------------------------

    def arrange(self, dense: Sequence[Named], sparse: Sequence[Named]) -> Sequence[ReducedBucket]:
        buckets = super().arrange(dense, sparse)
        self.placement = f"hosts {self._hosts.numbers}, owners {zlib.crc32(repr(sorted(self._owners.items())).encode()):08x}"
        if self.engaged and self._job.world_size > 1:
            self._broadcast(f" to arrange them{self._label}", torch.zeros(1, device="cpu"))  # all have the same, or find out
            kinds = self._kinds_of_devices(buckets)
            self._alike = all(theirs == kinds for theirs in self._job.gather_object(kinds))
            self._pieces = {bucket: self._cut(bucket) for bucket in buckets}
            self._first_area = dict(zip(buckets, accumulate([0, *map(len, self._pieces.values())]), strict=False))
            self._choose_fabric([area for pieces in self._pieces.values() for _, area in pieces])
        return buckets

    def _kinds_of_devices(self, buckets: Sequence[ReducedBucket]) -> list[str]:
        return [bucket.flat.device.type for bucket in buckets]

    def _choose_fabric(self, areas: Sequence[Area]) -> None:
        devices = set(devices_of(areas))
        if self._fabric is not None and devices != self._devices:
            self._fabric.stop()
            self._fabric = None
        self._devices, why_wire = devices, None
        if _hierarchy_of(self._strategy).inner.algorithm == "ring":
            why_wire = ASKED_FOR
        elif not self._alike:
            why_wire = "some workers of the job have on a GPU what others have on the CPU"
        self._fabric = choose_fabric(self._hosts.within, self._job.all_peers, areas, why_wire=why_wire, former=self._fabric)
        self._job.threads.add(self._fabric)
        self._channels |= self._fabric.channels

    def _make_buckets(self, dense: Sequence[Named]) -> list[ReducedBucket]:
        self._share_out(dense)
        return make_buckets(dense, self._plan(dense, self._owner_of), self._strategy.compress, apart=self._closing_notes_all)

    def _share_out(self, dense: Sequence[Named]) -> None:
        """Give every parameter that has none an owner: the largest first, each to the one that has least."""
        loads = dict.fromkeys(range(self._hosts.num_speakers), 0)
        sizes = {name: parameter.numel() for name, parameter in self._setting.model.named_parameters()}
        for name, owner in self._owners.items():
            loads[owner] += sizes.get(name, 0)
        new = [(name, parameter.numel()) for name, parameter in dense if name not in self._owners]
        for name, size in sorted(new, key=lambda one: -one[1]):
            owner = min(loads, key=lambda place: (loads[place], place))
            self._owners[name] = owner
            loads[owner] += size

    def _owner_of(self, name: str) -> int | None:
        return None if self._in_equal_parts else self._owners[name]

    @property
    def _in_equal_parts(self) -> bool:
        return not self._is_lossy and self._hosts.are_even

    def _owner(self, bucket: ReducedBucket) -> int | None:
        """The place on each host of the worker that combines the whole bucket; None: each combines an equal part."""
        if self._in_equal_parts:
            return None
        return self._owners[bucket.names[0]] if bucket.names else 0

    def _cut(self, bucket: ReducedBucket) -> list[tuple[int, Area]]:
        """The pieces of a bucket that go their ways side by side, so that one is added up while another is on the network: where
        each begins, and how it is shared out. What is compressed stays in one piece, and so does what lies on a GPU, which adds
        it up in no time but takes a meeting for each piece."""
        owner, device = self._owner(bucket), bucket.flat.device
        if bucket.state is not None:
            return [(0, Area(bucket.num_gradient_elements, torch.float32, owner, device))]
        count, dtype = len(bucket.on_wire), bucket.on_wire.dtype
        whole = self._alike and device.type != "cpu"
        most = max(1, count) if whole else max(PIECE_BYTES // dtype.itemsize, -(-count // MOST))
        begins = range(0, max(1, count), most)
        return [(begin, Area(min(most, count - begin), dtype, owner, device)) for begin in begins]

    def _is_mine(self, bucket: ReducedBucket) -> bool:
        return self._owner(bucket) == self._hosts.within.rank

    def _begin(self, bucket: ReducedBucket, under_way: UnderWay) -> None:
        if self._meeting is None and self._job.world_size > 1:
            self._begin_round()
        super()._begin(bucket, under_way)

    def _begin_round(self) -> None:
        """All workers meet, while they exchange. Groups alone would not find out that a worker of another one is elsewhere: in
        another round, with other parameters, or in another collective."""
        channel, nothing = self._setting.channel, torch.empty(0, dtype=torch.uint8, device="cpu")
        this_round, name = (channel, self._round & 0xFFFFFFFF), (channel, self._sequence & 0xFFFFFFFF)
        self._hosts.within.part_of = self._hosts.across.part_of = this_round
        self._meeting = self._job.world.start(
            Kind.BARRIER, nothing, "dissemination", name=name, label=self._label, part_of=this_round
        )

    def _wait(self, buckets: Sequence[ReducedBucket]) -> None:
        try:
            super()._wait(buckets)
            if self._meeting is not None:
                self._meeting.wait()
            for device in {bucket.flat.device for bucket in buckets if bucket.notes_on_host}:
                torch.cuda.current_stream(device).synchronize()
        except WireError:
            if self._cause is not None:
                raise self._cause from None  # that is why
            raise

    def round_begins(self) -> None:
        super().round_begins()
        self._meeting = self._cause = None

    def close(self) -> None:
        super().close()
        if self._fabric is not None:
            self._fabric.stop()

    # -- exchanges ----------------------------------------------------------------------------------------------------

    def _turn(
        self, bucket: ReducedBucket, state: CompressionState, participation: Participation, weight: float
    ) -> ExchangeContext | None:
        return super()._turn(bucket, state, Participation.WORKING, 1.0) if self._is_mine(bucket) else None

    def _combine(self, bucket: ReducedBucket, values: Tensor, number: int, label: str) -> UnderWay:
        fabric, notes = self._fabric, bucket.notes_on_host and values is bucket.on_wire
        if fabric is None:  # a job of one
            yield from self._driver.drive(self._steps(bucket, values), number, label, bucket.sending)
            return
        if notes:
            values[-len(bucket.tail) :].copy_(bucket.tail, non_blocking=True)
        yield from side_by_side(
            self._combine_piece(fabric, bucket, values[begin : begin + area.num_elements], area, piece, number, label)
            for piece, (begin, area) in enumerate(self._pieces[bucket])
        )
        if notes:
            bucket.tail.copy_(values[-len(bucket.tail) :], non_blocking=True)  # `_receive` waits for it

    def _combine_piece(
        self, fabric: Fabric, bucket: ReducedBucket, values: Tensor, area: Area, piece: int, number: int, label: str
    ) -> UnderWay:
        place, number = self._first_area[bucket] + piece, number + piece
        scale = 1.0 if bucket.state is None else self._hosts.num_hosts / self._job.world_size
        try:
            yield from fabric.sum(place, values, scale, number, label)
            start, stop = area.share(self._hosts.within.rank, self._hosts.within.size)
            if start < stop:
                yield from self._driver.drive(self._steps(bucket, values[start:stop]), number, label, bucket.sending)
            yield from fabric.share(place, values, number, label)
        except WireError:
            raise  # all workers know
        except Exception as error:
            self._fail_round(error)
            raise

    def _fail_round(self, error: Exception) -> None:
        """A codec's error, say: the other workers of the host wait for this one's share, and some fabrics with all they do."""
        self._cause = self._cause or error
        if self._meeting is not None:
            text = f"rank {self._job.rank} could not combine gradients: {type(error).__name__}: {error}"
            self._job.world.fail(self._meeting, WireError(text))

    def _steps(self, bucket: ReducedBucket, share: Tensor) -> Steps:
        """Between hosts: the mean over all workers, of their sum over each host."""
        if bucket.turn is not None:
            yield from bucket.compression.exchange(share, bucket.turn)
        else:
            yield Sum(share)
            share.mul_(1.0 / self._job.world_size)

    def _end_exchange(self, bucket: ReducedBucket, *, good: bool) -> None:
        super()._end_exchange(bucket, good=good)
        if good and bucket.state is not None and bucket.turn is None:
            bucket.state.rounds += 1  # as it does where the bucket is spoken for

    # -- what compressions remember -----------------------------------------------------------------------------------

    def state(self) -> TrainingState:
        """All of it is this worker's own: other workers of its host have none of it, not even of what all hosts share."""
        state = super().state()
        return state._replace(own=_put_together(state.own, state.shared), shared={})

    def check_state(self, saved: Mapping[str, Mapping[str, Any]]) -> str | None:
        own, shared = _take_apart(saved)
        return super().check_state(own) or super().check_state(shared)

    def _restore(self, state: TrainingState) -> None:
        own, shared = _take_apart(state.own)
        others = {name for bucket in self.buckets if not self._is_mine(bucket) for name in bucket.names}
        own, shared = ({name: kinds for name, kinds in part.items() if name not in others} for part in (own, shared))
        super()._restore(state._replace(own=own, shared=shared))

    def shared_out(self, everybody: Sequence[TensorsByName]) -> TensorsByName:
        """Every host takes the mean of what all hosts had."""
        out: TensorsByName = {}
        for name in dict.fromkeys(name for saved in everybody for name in saved):
            apart = [_take_apart({name: saved[name]}) for saved in everybody if name in saved]
            mean = compression_state.mean_of([own for own, _ in apart], self._group.size)
            out |= _put_together(mean, apart[0][1])
        return out


def _hierarchy_of(strategy: Strategy) -> Hierarchy:
    assert isinstance(strategy.aggregate, Hierarchy), "another way of training"
    return strategy.aggregate


def _outer_of(strategy: Strategy) -> AllReduce:
    outer = _hierarchy_of(strategy).outer
    assert isinstance(outer, AllReduce), "another way of training"
    return outer


def _put_together(own: TensorsByName, shared: TensorsByName) -> TensorsByName:
    out: TensorsByName = {}
    for front, part in ((OWN, own), (SHARED, shared)):
        for name, kinds in part.items():
            out.setdefault(name, {}).update({front + kind: value for kind, value in kinds.items()})
    return out


def _take_apart(saved: Mapping[str, Mapping[str, Any]]) -> tuple[TensorsByName, TensorsByName]:
    return _with_front(saved, OWN), _with_front(saved, SHARED)


def _with_front(saved: Mapping[str, Mapping[str, Any]], front: str) -> TensorsByName:
    return {
        name: {kind.removeprefix(front): value for kind, value in kinds.items() if kind.startswith(front)}
        for name, kinds in saved.items()
    }
