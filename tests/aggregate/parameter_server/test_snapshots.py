"""Snapshots that are taken while training goes on, and training that goes on from them."""

from __future__ import annotations

import errno
import gc
import re
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from aggregate.parameter_server.stepping_worker import adam, mlp, sgd, strategy, train, values_of
from stretto.aggregate.hierarchy import Hierarchy
from stretto.aggregate.parameter_server import ParameterServer, snapshot, snapshots
from stretto.aggregate.parameter_server.network import ServerNetwork
from stretto.aggregate.parameter_server.snapshot import read_snapshot, write_snapshot
from stretto.aggregate.parameter_server.snapshot_content import SnapshotEnd, SnapshotHeader
from stretto.aggregate.parameter_server.snapshots import SnapshotTaker, snapshots_in
from stretto.checkpoint import Resumed, load
from stretto.compress.error_feedback import ErrorFeedback
from stretto.compress.float16 import Float16
from stretto.compress.sign import Sign
from stretto.distributing import distribute, engine_of, release
from stretto.errors import CheckpointError, ConfigurationError, PeerLost, StrettoError
from stretto.job import Job
from stretto.parsing import parse
from stretto.strategy import Strategy
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.delay_compensation import DelayCompensation
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.testing import run_jobs

PATIENCE_S = 20.0
ADAPTIVE = Asynchronous(delay_compensation=DelayCompensation(2.0, decay=0.95))


def to(folder: Path, sync: Any = None, shards: int = 2, every_s: float = 3600.0) -> Strategy:
    servers = ParameterServer(shards, snapshots=str(folder), every_s=every_s)
    return Strategy(aggregate=servers, sync=StaleSynchronous(0) if sync is None else sync)


def taker_of(model: nn.Module) -> SnapshotTaker:
    taker = engine_of(model).training._snapshots  # type: ignore[attr-defined]
    assert isinstance(taker, SnapshotTaker)
    return taker


def take(model: nn.Module) -> Path:
    """A snapshot, now, in this thread."""
    taker = taker_of(model)
    subject = taker._subject()
    assert subject is not None
    return taker.take(subject)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def kill_servers(job: Job, number: int) -> None:
    assert job.more_wires is not None
    for server in range(number):
        wire: Any = job.more_wires(f"servers {number}", job.world_size + number)[job.world_size + server]
        wire.kill("on purpose")


# -- who takes them ---------------------------------------------------------------------------------------------------


class Wire:
    """What a worker knows of the others."""

    def __init__(self, lost: set[int], came_back: dict[int, int]) -> None:
        self.lost, self._came_back = dict.fromkeys(lost), came_back

    def joined_in(self, rank: int) -> int:
        return self._came_back.get(rank, 0)


@pytest.mark.parametrize(
    ("lost", "came_back", "first"),
    [
        (set(), {}, 0),
        ({0}, {}, 1),
        (set(), {0: 5}, 1),  # those from the beginning go on
        ({2}, {0: 5, 1: 7}, 0),  # nobody is left of them
        ({0}, {1: 7, 2: 5}, 1),
    ],
)  # fmt: skip
def test_one_of_the_living_workers_takes_snapshots(lost: set[int], came_back: dict[int, int], first: int) -> None:
    class Rank:
        world_size = 3

        def __init__(self, rank: int) -> None:
            self.rank = rank

    def takes(rank: int) -> bool:
        network: Any = ServerNetwork.__new__(ServerNetwork)
        network._job, network._wire = Rank(rank), Wire(lost, came_back)
        return bool(network.is_first_worker())

    assert [rank for rank in range(3) if rank not in lost and takes(rank)] == [first]


# -- losing all servers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("then", "shards"), [(3, 1), (1, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_when_all_servers_die_the_error_names_a_snapshot_and_another_job_goes_on_from_it(
    then: int, shards: int, tmp_path: Path
) -> None:
    def before(job: Job) -> tuple[list[Tensor], str]:
        model = mlp(job.rank)
        _, optimizer = distribute(model, adam(model.parameters()), to(tmp_path), job=job)
        at_snapshot = train(job, model, optimizer, range(4))[-1]
        job.barrier()
        if job.rank == 0:
            take(model)
        job.barrier()
        train(job, model, optimizer, range(4, 6))  # is lost
        if job.rank == 0:
            kill_servers(job, 2)
        with pytest.raises(PeerLost, match=r"the last with a copy of '[02]\.(weight|bias)'") as lost:
            train(job, model, optimizer, range(6, 1000))
        return at_snapshot, str(lost.value)

    def after(job: Job, path: str) -> tuple[list[Tensor], Resumed, list[float]]:
        model = mlp(7 + job.rank)
        _, optimizer = distribute(model, adam(model.parameters()), strategy(StaleSynchronous(0), shards), job=job)
        resumed = load(path, model, optimizer, job=job)
        found = values_of(model)
        train(job, model, optimizer, range(1))
        if job.world_size > 1:
            assert not same(found, values_of(model))
        return found, resumed, [float(state["step"]) for state in optimizer.state_dict()["state"].values()]

    trained = run_jobs(2, before)
    for _, text in trained:  # of both workers
        match = re.search(r"go on from the newest snapshot, taken \d+ s ago:\nstretto.load\('(.+)', model, optimizer\)", text)
        assert match is not None, text
        path = match[1]
    for values, resumed, steps in run_jobs(then, after, path):
        assert same(values, trained[0][0])
        assert resumed.extra == {"step": 4} and resumed.world_size == 2
        assert steps == [8 + then] * 4  # two workers' gradients in each of four steps; then one of each


def test_without_a_snapshot_the_error_says_so(tmp_path: Path) -> None:
    def program(job: Job) -> None:
        model = mlp()
        _, optimizer = distribute(model, sgd(model.parameters()), to(tmp_path), job=job)
        job.barrier()
        if job.rank == 0:
            kill_servers(job, 2)
        with pytest.raises(
            PeerLost, match=f"Snapshots are written to {re.escape(str(tmp_path))} every 3600 s, and there is none"
        ):
            train(job, model, optimizer, range(1000))

    run_jobs(2, program)


# -- what they are of -------------------------------------------------------------------------------------------------


def test_a_snapshot_under_pushes_has_every_range_as_it_was_at_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gradient takes 1 from all elements. Ranges of 64 KiB; the model has five."""
    written: list[Path] = []
    monkeypatch.setattr(snapshots, "KEPT", 1000)

    def program(job: Job) -> None:
        model = nn.Linear(320, 256, bias=False)
        nn.init.zeros_(model.weight)
        _, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), to(tmp_path, StaleSynchronous(2)), job=job)
        thread = threading.Thread(target=lambda: written.extend(take(model) for _ in range(5)), daemon=True)
        if job.rank == 0:
            thread.start()
        while len(written) < 5:
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        release(model)

    run_jobs(2, program)
    assert len(written) == 5
    versions = []
    for path in written:
        with read_snapshot(path) as found:
            header = msgspec.msgpack.decode(found.header, type=SnapshotHeader)
            ranges = dict(found.ranges)
        end = msgspec.msgpack.decode(ranges["end"], type=SnapshotEnd)
        assert len(end.ranges) == len(header.ranges) == 5
        for number, clocks in enumerate(end.ranges):
            data = ranges[f"range:{number}"]
            numel = sum(each.stop - each.start for each in header.ranges[number].slices)
            values = torch.frombuffer(bytearray(data[-4 * numel :]), dtype=torch.float32)
            assert values.eq(-clocks.version).all()
            assert end.oldest <= clocks.slowest <= clocks.fastest <= end.newest
            assert 2 * clocks.slowest <= clocks.version <= 2 * clocks.fastest and clocks.fastest - clocks.slowest <= 3
            versions.append(clocks.version)
    assert max(versions) > 0  # some came after pushes


@pytest.mark.parametrize(
    ("sync", "make", "dtype"),
    [(StaleSynchronous(0), adam, torch.float32), (ADAPTIVE, sgd, torch.bfloat16), (SoftSync(1), adam, torch.float32)],
    ids=["adam", "compensated sgd in bfloat16", "softsync"],
)
def test_resuming_gives_the_same_bits_where_nobody_pushed_meanwhile(
    sync: Any, make: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    """One worker pushes alone, unless the order of pushes is fixed; the other servers are three instead of two."""
    alone = sync is ADAPTIVE

    def program(job: Job, resumes: bool) -> list[Tensor]:
        model = mlp(job.rank + 10 * resumes).to(dtype)
        shards = 3 if resumes else 2
        _, optimizer = distribute(model, make(model.parameters()), to(tmp_path / f"{resumes}", sync, shards), job=job)
        if resumes:
            load(tmp_path / "False", model, optimizer, job=job)
        else:
            train(job, model, optimizer, range(3) if job.rank == 0 or not alone else ())
            job.barrier()
            if job.rank == 0:
                take(model)
            job.barrier()
        if not isinstance(sync, SoftSync):
            train(job, model, optimizer, range(3, 6) if job.rank == 0 or not alone else ())
        return values_of(model)

    without, resumed = run_jobs(2, program, False), run_jobs(2, program, True)
    assert same(without[0], resumed[0]) or isinstance(sync, SoftSync)
    assert same(resumed[0], resumed[1]) or not isinstance(sync, SoftSync)


def test_all_reduce_goes_on_from_a_snapshot_with_buffers_options_and_the_number_of_steps(tmp_path: Path) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))

    def before(job: Job) -> tuple[list[Tensor], dict[str, Tensor]]:
        model = make()
        _, optimizer = distribute(model, sgd(model.parameters()), to(tmp_path), job=job)
        train(job, model, optimizer, range(3))
        optimizer.param_groups[0]["lr"] = 0.125
        job.barrier()
        if job.rank == 0:
            take(model)
        return values_of(model), {name: buffer.clone() for name, buffer in model.named_buffers()}

    def after(job: Job, rank_0: dict[str, Tensor]) -> tuple[list[Tensor], Resumed]:
        model = make()
        _, optimizer = distribute(model, sgd(model.parameters()), Strategy(), job=job)
        resumed = load(tmp_path, model, optimizer, job=job)
        assert optimizer.param_groups[0]["lr"] == 0.125 and len(optimizer.state) == 6
        assert all(torch.equal(buffer, rank_0[name]) for name, buffer in model.named_buffers())
        found = values_of(model)
        train(job, model, optimizer, range(1))
        return found, resumed

    ((values, buffers), _) = run_jobs(2, before)
    for found, resumed in run_jobs(2, after, buffers):
        assert same(found, values) and resumed.extra["step"] == 3
        assert any("the strategy" in each for each in resumed.lost)


def test_steps_are_counted_on_over_several_jobs(tmp_path: Path) -> None:
    def program(job: Job, number: int) -> int:
        model = mlp()
        _, optimizer = distribute(model, sgd(model.parameters()), to(tmp_path), job=job)
        step = load(tmp_path, model, optimizer, job=job).extra["step"] if number else 0
        train(job, model, optimizer, range(2))
        job.barrier()
        if job.rank == 0:
            take(model)
        return int(step)

    assert [run_jobs(2, program, number) for number in range(3)] == [[0, 0], [2, 2], [4, 4]]


# -- from time to time ------------------------------------------------------------------------------------------------


def test_they_are_taken_while_training_goes_on_and_the_newest_two_are_kept(tmp_path: Path) -> None:
    left = tmp_path / f"Sequential-1-00000001.snapshot.{'0' * 16}.part"
    left.write_bytes(b"of a worker that was killed")

    def program(job: Job) -> None:
        model = mlp()
        _, optimizer = distribute(model, sgd(model.parameters()), to(tmp_path, Asynchronous(), every_s=0.01), job=job)
        while not any(snapshots.number_of(path) >= 4 for path in snapshots_in(tmp_path)):
            train(job, model, optimizer, range(3))
        job.barrier()

    run_jobs(2, program)
    numbers = [snapshots.number_of(path) for path in snapshots_in(tmp_path)]
    assert numbers in ([max(numbers), max(numbers) - 1], [max(numbers), max(numbers) - 1, max(numbers) - 2])
    assert not left.exists() and len(list(tmp_path.iterdir())) == len(numbers)


def test_a_full_disk_is_a_warning_and_training_and_later_snapshots_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, full = snapshot._write, threading.Event()

    def write(*arguments: Any) -> None:
        if not full.is_set():
            full.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(snapshot, "_write", write)

    def program(job: Job) -> None:
        model = mlp()
        _, optimizer = distribute(model, sgd(model.parameters()), to(tmp_path, Asynchronous(), every_s=0.01), job=job)
        while not snapshots_in(tmp_path):
            train(job, model, optimizer, range(3))
        job.barrier()

    run_jobs(2, program)
    assert full.is_set() and "no snapshot this time, the next try is in 0.01 s" in caplog.text
    assert "No space left on device" in caplog.text and not list(tmp_path.glob("*.part"))


def test_a_snapshot_that_ends_with_the_job_is_no_trouble_and_the_next_worker_takes_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looked = threading.Semaphore(0)

    def program(job: Job) -> None:
        model = mlp()
        distribute(model, sgd(model.parameters()), to(tmp_path, every_s=3600.0), job=job)
        taker, is_mine = taker_of(model), taker_of(model)._is_mine
        if job.rank == 0:

            def look() -> bool:
                looked.release()
                return is_mine()

            def take(subject: Any) -> Path:
                job.closed = True  # which it is before anything is stopped
                raise StrettoError("the job was shut down")

            taker._every_s, taker._is_mine, taker.take = 0.01, look, take  # type: ignore[method-assign]
            thread = threading.Thread(target=taker._run, daemon=True)
            thread.start()
            assert all(looked.acquire(timeout=PATIENCE_S) for _ in range(4))
            assert job.closed
            taker.end()
            thread.join(PATIENCE_S)
            job.closed = False
        job.barrier()

    run_jobs(2, program)
    assert "no snapshot" not in caplog.text


def test_a_job_of_one_worker_says_that_it_takes_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def program(job: Job) -> None:
        model = mlp()
        distribute(model, sgd(model.parameters()), to(tmp_path), job=job)

    run_jobs(1, program)
    assert f"no snapshots are written to {tmp_path}" in caplog.text


def test_if_the_worker_that_takes_them_dies_the_next_one_does_also_when_it_has_come_back(tmp_path: Path) -> None:
    def program(job: Job) -> bool:
        model = mlp()
        distribute(model, sgd(model.parameters()), to(tmp_path), job=job)
        mine = taker_of(model)._is_mine
        assert mine() == (job.rank == 0)
        job.barrier()
        if job.rank == 0:
            assert job.more_wires is not None
            wire: Any = job.more_wires("servers 2", 5)[0]
            wire.kill("on purpose")
            return True
        if job.rank == 1:
            wait_until(mine)
            wire = job.server_networks[2]._wire
            del wire.lost[0]  # another life of rank 0 has joined
            wire.joined_in = lambda rank: int(rank == 0)
        return mine()

    assert run_jobs(3, program)[:2] == [True, True]


def test_a_model_that_is_dropped_or_released_has_no_thread_left(tmp_path: Path) -> None:
    def program(job: Job) -> None:
        model = mlp()
        distribute(model, sgd(model.parameters()), to(tmp_path, every_s=0.01), job=job)
        thread, gone = taker_of(model)._thread, weakref.ref(model)
        release(model)
        wait_until(lambda: not thread.is_alive())
        distribute(model, sgd(model.parameters()), to(tmp_path, every_s=0.01), job=job)
        thread = taker_of(model)._thread
        del model
        wait_until(lambda: gc.collect() >= 0 and not thread.is_alive() and gone() is None)

    run_jobs(2, program)


def test_the_optimizers_state_can_be_asked_for_while_a_snapshot_is_taken(tmp_path: Path) -> None:
    def program(job: Job) -> None:
        model = nn.Linear(512, 512)
        _, optimizer = distribute(model, adam(model.parameters()), to(tmp_path), job=job)
        if job.rank == 0:
            thread = threading.Thread(target=lambda: [take(model) for _ in range(5)], daemon=True)
            thread.start()
            while thread.is_alive():
                optimizer.state_dict()
        job.barrier()

    run_jobs(2, program)
    assert snapshots.number_of(snapshots_in(tmp_path)[0]) == 5


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("snapshots")

    def program(job: Job) -> bytes:
        model = mlp()
        _, optimizer = distribute(model, adam(model.parameters()), to(folder), job=job)
        train(job, model, optimizer, range(1))
        job.barrier()
        return take(model).read_bytes() if job.rank == 0 else b""

    content: bytes = run_jobs(2, program)[0]
    return content


def refused(path: Path, model: nn.Module | None = None, make: Any = adam) -> str:
    """What `load` says on all workers. Nothing has changed then."""

    def program(job: Job) -> str:
        mine = mlp(3) if model is None else model
        _, optimizer = distribute(mine, make(mine.parameters()), Strategy(), job=job)
        before = values_of(mine)
        with pytest.raises(CheckpointError) as error:
            load(path, mine, optimizer, job=job)
        assert same(before, values_of(mine)) and not optimizer.state
        return str(error.value)

    text: str = run_jobs(1, program)[0]
    return text


def test_another_model_or_optimizer_is_refused_with_the_first_difference(taken: bytes, tmp_path: Path) -> None:
    path = tmp_path / "Sequential-1-00000001.snapshot"
    path.write_bytes(taken)
    assert "its optimizers are ['Adam'], and here they are ['SGD']" in refused(path, make=sgd)
    wider = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))
    assert "parameter '0.weight' is float32[6, 4] in the snapshot and float32[7, 4] in this model" in refused(path, wider)
    assert "parameter '0.weight' is float32[6, 4] in the snapshot and float64" in refused(path, mlp().double())
    more = nn.Sequential(*mlp(), nn.Linear(1, 1))
    assert "parameter '3.weight' is in this model and not in the snapshot" in refused(path, more)
    normed = mlp()
    normed.register_buffer("count", torch.zeros(1))
    assert "buffer 'count' is in this model and not in the snapshot" in refused(path, normed)

    def grouped(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.Adam([{"params": [first]}, {"params": rest}])

    assert "its optimizers have [1] groups, and [2] here" in refused(path, make=grouped)
    assert "in another place of its optimizer" in refused(path, make=lambda each: adam(reversed(list(each))))


def test_a_damaged_snapshot_is_refused_and_in_a_folder_an_older_one_is_taken(
    taken: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "Sequential-1-00000002.snapshot"
    for damaged in (taken[:-1], taken[: len(taken) // 2], taken[:900] + bytes([taken[900] ^ 1]) + taken[901:], taken[:30]):
        path.write_bytes(damaged)
        assert str(path) in refused(path)
        assert "has no snapshot that is whole" in refused(tmp_path)
    (tmp_path / "Sequential-1-00000001.snapshot").write_bytes(taken)

    def program(job: Job) -> int:
        model = mlp(3)
        _, optimizer = distribute(model, adam(model.parameters()), Strategy(), job=job)
        return int(load(tmp_path, model, optimizer, job=job).extra["step"])

    assert run_jobs(2, program) == [1, 1]
    assert "Sequential-1-00000002.snapshot is left out, and an older one looked for" in caplog.text


def test_a_folder_without_snapshots_or_with_those_of_other_models_is_refused(taken: bytes, tmp_path: Path) -> None:
    assert "is a folder without snapshots" in refused(tmp_path)
    (tmp_path / "Generator-1-00000001.snapshot").write_bytes(taken)
    (tmp_path / "Critic-2-00000001.snapshot").write_bytes(taken)
    assert "has snapshots of Critic-2, Generator-1, and none is called Sequential-1" in refused(tmp_path)


def test_whoever_writes_a_snapshot_that_cannot_be_gets_an_error_and_no_memory(taken: bytes, tmp_path: Path) -> None:
    """The checksum is right in all of them."""
    path = tmp_path / "one.snapshot"
    path.write_bytes(taken)
    with read_snapshot(path) as found:
        header, ranges = msgspec.msgpack.decode(found.header), dict(found.ranges)

    def changed(change: Callable[[Any, dict[str, bytes]], None]) -> str:
        other, others = msgspec.msgpack.decode(msgspec.msgpack.encode(header)), dict(ranges)
        change(other, others)
        write_snapshot(path, msgspec.msgpack.encode(other), others.items())
        return refused(path)

    def huge(other: Any, _: Any) -> None:
        other["ranges"][0]["slices"][0][2] = 1 << 60

    def twice(other: Any, _: Any) -> None:
        other["ranges"].append(other["ranges"][0])

    def no_end(_: Any, others: dict[str, bytes]) -> None:
        del others["end"]

    def short(_: Any, others: dict[str, bytes]) -> None:
        others["range:0"] = others["range:0"][:-4]

    def bad_option(other: Any, _: Any) -> None:
        other["options"][0][0]["lr"] = "fast"

    def wild_option(other: Any, _: Any) -> None:
        other["options"][0][0]["lr"] = -1.0

    def nowhere(other: Any, _: Any) -> None:
        other["parameters"][0]["optimizer"] = 9

    def later(other: Any, _: Any) -> None:
        other["format"] = 2

    def unknown(other: Any, _: Any) -> None:
        other["code"] = "print()"

    texts = [changed(each) for each in (huge, twice, no_end, short, bad_option, wild_option, nowhere, later, unknown)]
    wanted = [
        "not next",
        "not next",
        "it has no end",
        "bytes follow",
        "Expected",
        "options do not fit",
        "another place",
        "format 2",
        "code",
    ]
    for text, part in zip(texts, wanted, strict=True):
        assert part in text and "Nothing was loaded" in text


def test_settings_that_cannot_be_are_refused_and_the_others_read_back(tmp_path: Path) -> None:
    for wrong in ({"every_s": 0}, {"every_s": -1.0}, {"every_s": True}, {"every_s": "1"}):
        with pytest.raises(ConfigurationError, match="a positive number"):
            ParameterServer(snapshots="run", **wrong)
    for folder in (3, ""):
        with pytest.raises(ConfigurationError, match="the path of a folder is a text"):
            ParameterServer(snapshots=folder)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="without snapshots="):
        ParameterServer(every_s=5.0)
    with pytest.raises(ConfigurationError, match="there the workers step and have everything"):
        Strategy(aggregate=ParameterServer(snapshots="run"))
    assert parse(repr(to(tmp_path))) == to(tmp_path)


def test_a_folder_that_cannot_be_made_is_told_when_the_model_is_distributed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def program(job: Job) -> None:
        model = mlp()
        with pytest.raises(StrettoError, match="no snapshots can be written there"):
            distribute(model, sgd(model.parameters()), to(tmp_path / "file" / "folder"), job=job)

    run_jobs(2, program)


def test_groups_of_workers_are_told_of_a_snapshot_and_go_on_from_it(tmp_path: Path) -> None:
    groups = Strategy(
        aggregate=Hierarchy(outer=ParameterServer(2, snapshots=str(tmp_path), every_s=3600.0), group_size=2),
        sync=StaleSynchronous(0),
    )

    def before(job: Job) -> tuple[list[Tensor], str]:
        model = mlp(job.rank)
        _, optimizer = distribute(model, adam(model.parameters()), groups, job=job)
        at_snapshot = train(job, model, optimizer, range(3))[-1]
        job.barrier()
        if job.rank == 0:
            take(model)
            kill_servers(job, 2)
        job.barrier()
        with pytest.raises(StrettoError) as lost:
            train(job, model, optimizer, range(3, 1000))
        return at_snapshot, str(lost.value)

    def after(job: Job) -> list[Tensor]:
        model = mlp(9)
        _, optimizer = distribute(model, adam(model.parameters()), groups, job=job)
        assert load(tmp_path, model, optimizer, job=job).extra == {"step": 3}
        found = values_of(model)
        train(job, model, optimizer, range(1))
        return found

    trained = run_jobs(4, before)
    assert all("stretto.load(" in trained[first][1] for first in (0, 2))  # of each group
    assert all(same(found, trained[0][0]) for found in run_jobs(4, after))


@pytest.mark.parametrize("codec", [ErrorFeedback(Sign()), Float16()], ids=["error feedback", "float16"])
def test_training_with_a_codec_goes_on_from_a_snapshot(codec: Any, tmp_path: Path) -> None:
    chosen = replace(to(tmp_path), compress=codec)

    def program(job: Job, resumes: bool) -> list[Tensor]:
        model = mlp(job.rank + 5 * resumes)
        _, optimizer = distribute(model, adam(model.parameters()), chosen, job=job)
        if resumes:
            resumed = load(tmp_path, model, optimizer, job=job)
            assert resumed.extra == {"step": 3}
            assert any("remembers begins anew" in each for each in resumed.lost) == codec.remembers
            return values_of(model)
        train(job, model, optimizer, range(3))
        job.barrier()
        if job.rank == 0:
            take(model)
        job.barrier()
        return values_of(model)

    before, after = run_jobs(2, program, False), run_jobs(2, program, True)
    assert same(before[0], after[0]) and same(after[0], after[1])
