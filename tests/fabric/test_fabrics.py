"""Fabrics: sums over the workers of a host, in shares, whatever carries the bytes."""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from stretto.aggregate.all_reduce.compression_thread import CompressionThread
from stretto.collectives.group import Group
from stretto.errors import PeerLost, RankMismatch, WireError
from stretto.fabric import choose, native
from stretto.fabric import mapped as mapped_module
from stretto.fabric.base import Area, Fabric, FabricUnavailable, Steps
from stretto.fabric.by_wire import ByWire
from stretto.fabric.choose import choose_fabric
from stretto.fabric.mapped import MappedFabric
from stretto.fabric.native import NativeFabric
from stretto.fabric.per_device import PerDevice
from stretto.job import Job
from stretto.testing import run_jobs
from stretto.wire.mapping import OwnMapping, map_offered

CPU = torch.device("cpu")


def gloo(group: Group) -> NativeFabric:
    return NativeFabric(group, CPU, "gloo")


class CountedCalls:
    count = 0

    def append(self) -> None:
        self.count += 1


KINDS = [MappedFabric, ByWire, gloo]
AREAS = [
    Area(1000, torch.float32),
    Area(1000, torch.float64, owner=1),
    Area(5, torch.bfloat16),
    Area(0, torch.float32),
    Area(1, torch.complex64, owner=0),
    Area(3, torch.complex64),
]


def drive(steps: Steps) -> None:
    for pending in steps:
        pending.wait()


def values(area: Area, rank: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randint(-8, 8, (area.num_elements,), generator=generator).to(area.dtype)  # sums are exact


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_every_share_is_the_sum_and_what_is_made_of_it_reaches_everybody(kind: Callable[[Group], Fabric], size: int) -> None:
    def use(job: Job, fabric: Fabric, number: int, turn: int) -> Steps:
        area = AREAS[number]
        flat = values(area, job.rank, turn)
        total = sum((values(area, rank, turn) for rank in range(size)), torch.zeros((), dtype=area.dtype))
        start, stop = area.share(job.rank, size)
        yield from fabric.sum(number, flat, 0.5, len(AREAS) * turn + number, "")
        assert torch.equal(2 * flat[start:stop], total[start:stop])
        flat[start:stop] *= 4
        yield from fabric.share(number, flat, len(AREAS) * turn + number, "")
        assert torch.equal(flat, 2 * total)
        finished.append(turn)

    def program(job: Job) -> None:
        fabric, thread = kind(job.world), CompressionThread()
        fabric.prepare(AREAS)
        for turn in range(3):
            order = random.Random(10 * turn + job.rank).sample(range(len(AREAS)), len(AREAS))
            for exchange in [thread.submit(use(job, fabric, number, turn), CPU) for number in order]:
                exchange.wait()
        thread.stop()
        fabric.stop()

    finished: list[int] = []
    run_jobs(size, program)
    assert len(finished) == 3 * size * len(AREAS)


def test_a_worker_alone_may_use_torchs_collectives_too() -> None:
    def program(job: Job) -> None:
        fabric, areas = gloo(job.world), [AREAS[0], AREAS[4]]
        fabric.prepare(areas)
        for number, area in enumerate(areas):
            flat = values(area, 0, 0)
            drive(fabric.sum(number, flat, 2.0, number, ""))
            drive(fabric.share(number, flat, number, ""))
            assert torch.equal(flat, 2 * values(area, 0, 0))
        fabric.stop()

    run_jobs(1, program)


def test_shares_cover_an_area_once() -> None:
    for area in AREAS:
        for size in (2, 3, 7):
            shares = [area.share(member, size) for member in range(size)]
            covered = [place for start, stop in shares for place in range(start, stop)]
            assert covered == list(range(area.num_elements))


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_dies_between_the_two_halves_is_a_lost_peer(kind: Callable[[Group], Fabric]) -> None:
    area, all_have_ended_it = Area(100_000, torch.float32), threading.Barrier(3)

    def program(job: Job) -> str:
        fabric = kind(job.world)
        fabric.prepare([area])
        flat = torch.ones(area.num_elements)
        drive(fabric.sum(0, flat, 1.0, 0, ""))
        all_have_ended_it.wait(20)
        if job.rank == 2:
            assert job.wire is not None
            job.wire.abandon()
            return "died"
        with pytest.raises(PeerLost) as lost:
            drive(fabric.share(0, flat, 0, ""))
        return f"lost {lost.value.rank}"

    assert run_jobs(3, program) == ["lost 2", "lost 2", "died"]


def test_members_that_are_not_in_the_same_use_are_told() -> None:
    def program(job: Job) -> None:
        fabric = MappedFabric(job.world)
        fabric.prepare(AREAS)
        with pytest.raises(RankMismatch, match="for bucket 1"):
            drive(fabric.sum(0, values(AREAS[0], 0, 0), 1.0, 0, f" for bucket {job.rank}"))

    run_jobs(2, program)


def test_torchs_group_is_aborted_as_soon_as_a_member_is_lost_and_says_so_when_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU its operation would wait for the lost member for ever."""
    area, aborted, all_have_met = Area(1000, torch.float32), threading.Semaphore(0), threading.Barrier(3)

    def abort(fabric: NativeFabric) -> None:
        abort_group(fabric)
        aborted.release()

    abort_group = NativeFabric._abort_group
    monkeypatch.setattr(NativeFabric, "_abort_group", abort)

    def program(job: Job) -> str:
        fabric, flat = gloo(job.world), torch.ones(area.num_elements)
        fabric.prepare([area])
        steps = fabric.sum(0, flat, 1.0, 0, "")
        next(steps).wait()  # all have met, and their operations may begin
        all_have_met.wait(20)
        if job.rank == 2:
            assert job.wire is not None
            job.wire.abandon()
            return "died"
        with pytest.raises(PeerLost) as lost:
            drive(steps)
        assert aborted.acquire(timeout=20)
        with pytest.raises(WireError, match=r"(?s)cannot combine through gloo any more.*distribute"):
            drive(fabric.share(0, flat, 0, ""))
        return f"lost {lost.value.rank}"

    assert run_jobs(3, program) == ["lost 2", "lost 2", "died"]


# -- choosing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (["x", "x", "x"], "mapped device memory, they share a GPU"),
        (["x", "y", "z"], "nccl, each has a GPU of its own"),
        (["x", "x", "y"], "3 workers share 2 GPUs. Give each worker a GPU of its own, or all of them the same"),
    ],
    ids=str,
)
def test_what_is_chosen_on_gpus(gpus: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(job: Job) -> str:
        try:
            fabric, why = choose._fastest(job.world, job.peers, torch.device("cuda", job.rank))
        except FabricUnavailable as problem:
            return str(problem)
        return f"{fabric.name}, {why}"

    monkeypatch.setattr(choose, "gpu_of", lambda device: gpus[device.index])
    monkeypatch.setattr(native, "_make_and_try", lambda *arguments: None)  # there is no NCCL here
    assert run_jobs(3, program) == [expected] * 3


def test_nccl_that_does_not_connect_is_said_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(job: Job) -> str:
        with pytest.raises(FabricUnavailable) as refused:
            NativeFabric(job.world, CPU, "gloo", timeout_s=0.3 if job.rank == 1 else 20)
        over.set()
        for thread in threading.enumerate():
            if thread.name == "stretto-connect":
                thread.join(20)
        return str(refused.value)

    def hang_on_rank_1(backend: str, folder: str, group: Group, *arguments: object) -> object:
        assert over.wait(20) if group.rank == 1 else True
        return SimpleNamespace(abort=aborted.append)

    over, aborted = threading.Event(), CountedCalls()
    monkeypatch.setattr(native, "_make_and_try", hang_on_rank_1)
    texts = set(run_jobs(2, program))
    assert texts == {"gloo does not connect them (rank 1: not connected within 0.3 s)"} and aborted.count == 1


def test_vectors_on_several_devices_have_a_fabric_for_each() -> None:
    """A CPU with a number counts as another device."""
    areas = [*AREAS[:2], replace(AREAS[0], device=torch.device("cpu", 0)), AREAS[2]]

    def program(job: Job) -> str:
        fabric = choose_fabric(job.world, job.peers, areas)
        assert isinstance(fabric, PerDevice)
        for turn, which in enumerate((areas, areas[1:], areas[::-1])):
            if turn:
                assert choose_fabric(job.world, job.peers, which, former=fabric) is fabric
            for number, area in enumerate(which):
                flat = values(area, job.rank, turn)
                drive(fabric.sum(number, flat, 1.0, 10 * turn + number, ""))
                drive(fabric.share(number, flat, 10 * turn + number, ""))
                assert torch.equal(flat, values(area, 0, turn) + values(area, 1, turn))
        return fabric.name

    assert run_jobs(2, program) == ["mapped host memory"] * 2


def chosen(job: Job) -> str:
    return choose_fabric(job.world, job.peers, AREAS).name


def test_mapped_memory_is_chosen_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stretto"):
        assert run_jobs(3, chosen) == ["mapped host memory"] * 3
    (line,) = [record.getMessage() for record in caplog.records if "combine what" in record.getMessage()]
    workers = "the 3 workers of a host (ranks [0, 1, 2]) combine what lies on cpu"
    assert line == f"{workers} through mapped host memory: they see each other's memory"


def test_where_one_cannot_make_the_memory_all_use_the_wire(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fired: list[int] = []

    def refuse_once(num_bytes: int, of_all: int) -> OwnMapping:
        if not fired:
            fired.append(num_bytes)
            raise OSError(28, "No space left on device")
        return OwnMapping(num_bytes, of_all)

    monkeypatch.setattr(mapped_module, "OwnMapping", refuse_once)
    with caplog.at_level(logging.INFO, "stretto"):
        assert run_jobs(3, chosen) == ["our wire"] * 3
    assert len(fired) == 1 and "No space left" in caplog.text


def test_a_fabric_is_kept_for_other_vectors_as_long_as_they_can_be_mapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def program(job: Job) -> str:
        first = choose_fabric(job.world, job.peers, AREAS)
        assert choose_fabric(job.world, job.peers, AREAS[:2], former=first) is first
        job.barrier()
        monkeypatch.setattr(mapped_module, "OwnMapping", refuse)
        return choose_fabric(job.world, job.peers, AREAS, former=first).name

    def refuse(num_bytes: int, of_all: int) -> OwnMapping:
        raise OSError(12, "Cannot allocate memory")

    with caplog.at_level(logging.INFO, "stretto"):
        assert run_jobs(2, program) == ["our wire"] * 2
    assert "Cannot allocate memory" in caplog.text


def test_an_offer_that_cannot_be_mapped_is_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(job: Job) -> str:
        with pytest.raises(FabricUnavailable) as refused:
            MappedFabric(job.world).prepare(AREAS)
        return str(refused.value)

    monkeypatch.setattr(mapped_module, "map_offered", lambda offer, writable: map_offered(type(offer)("/etc/passwd", b"", 1)))
    texts = set(run_jobs(2, program))
    assert len(texts) == 1 and "no open file of a process" in texts.pop()


# -- the memory itself ------------------------------------------------------------------------------------------------


def test_what_one_writes_the_other_reads_also_after_the_file_is_closed() -> None:
    mine = OwnMapping(4096)
    theirs = map_offered(mine.offer)
    mine.bytes[:] = 7
    mine.close_file()
    assert theirs.min() == 7 and not theirs.flags.writeable
    with pytest.raises(OSError):
        map_offered(mine.offer)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_bytes": 4095}, "bytes long instead of"),
        ({"num_bytes": -1}, "a mapping of -1"),
        ({"cookie": bytes(64)}, "not the one that was offered"),
        ({"path": "/dev/zero"}, "no open file of a process"),
    ],
)
def test_an_offer_that_is_not_what_it_says_is_refused(change: dict[str, object], says: str) -> None:
    mine = OwnMapping(4096)
    offer = type(mine.offer)(**({"path": mine.offer.path, "cookie": mine.offer.cookie, "num_bytes": 4096} | change))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=says):
        map_offered(offer)


def test_a_file_that_can_be_shortened_is_refused() -> None:
    descriptor = os.memfd_create("open")
    os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, 64 + 100)
    mine = OwnMapping(100)
    try:
        with pytest.raises(ValueError, match="can still be shortened"):
            map_offered(type(mine.offer)(f"/proc/{os.getpid()}/fd/{descriptor}", bytes(64), 100))
    finally:
        os.close(descriptor)


def test_no_file_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="more than half"):
        OwnMapping(1 << 60)
    mine = OwnMapping(100)
    map_offered(mine.offer)
    del mine
    assert len(os.listdir("/proc/self/fd")) == before
