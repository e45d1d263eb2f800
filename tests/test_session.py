"""A job as one worker sees it: several in one process, each in a thread with a wire of its own; and a job of one."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import stretto
import stretto.testing
from forked import worker
from preloaded import Preloaded
from stretto import api
from stretto.collectives.plan import Kind
from stretto.errors import ConfigurationError, PeerLost, RankMismatch, StrettoError
from stretto.job.detect import Launch
from stretto.job.membership import Peer
from stretto.session import LARGE_BYTES, Job, join
from stretto.testing import run_threads
from stretto.timeouts import Timeouts
from stretto.wire.base import Wire
from stretto.wire.threads import threads_world

TIMEOUTS = Timeouts(arrive_s=30.0)


def launch_of(rank: int, size: int) -> Launch:
    return Launch(
        rank=rank, world_size=size, local_rank=rank, local_world_size=size, rendezvous=None, secret=None, encrypt=False,
        launcher="stretto",
    )  # fmt: skip


def peers_on(hosts: list[str]) -> list[Peer]:
    return [Peer(rank, hosts[:rank].count(host), host, "127.0.0.1:1", 1) for rank, host in enumerate(hosts)]


@contextmanager
def job_on(wire: Wire, hosts: list[str] | None = None) -> Iterator[Job]:
    job = Job(launch_of(wire.rank, wire.world_size), peers_on(hosts or ["a"] * wire.world_size), wire, TIMEOUTS)
    try:
        yield job
    finally:
        job.close(goodbye=True)


def run_jobs(size: int, program: Callable[[Job], Any], hosts: list[str] | None = None) -> list[Any]:
    def on_wire(wire: Wire) -> Any:
        with job_on(wire, hosts) as job:
            return program(job)

    return run_threads(size, on_wire, wires=threads_world(size, check=True))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_collectives_of_a_job(size: int) -> None:
    def program(job: Job) -> None:
        mean = job.all_reduce(torch.full((2, 3), float(job.rank)), algorithm="ring")
        assert torch.equal(mean, torch.full((2, 3), (size - 1) / 2))
        large = torch.arange(LARGE_BYTES // 4, dtype=torch.float32) + job.rank
        assert torch.equal(job.broadcast(large, root=size - 1), torch.arange(LARGE_BYTES // 4) + size - 1.0)
        assert job.broadcast(torch.tensor(job.rank), root=1) == 1
        rows = job.all_gather(torch.tensor([[job.rank, 10 * job.rank]]))
        assert rows.tolist() == [[[rank, 10 * rank]] for rank in range(size)]
        assert job.all_gather(torch.empty(0, 3)).shape == (size, 0, 3)
        gathered = job.gather_object({"rank": job.rank, "words": ["x"] * job.rank, "none": None, "bytes": b"\0"})
        assert gathered == [{"rank": r, "words": ["x"] * r, "none": None, "bytes": b"\0"} for r in range(size)]
        job.barrier()

    run_jobs(size, program)


def test_auto_chooses_alike_everywhere_and_is_right() -> None:
    def program(job: Job) -> Any:
        for length in (0, 1, 1000, 300_000):
            tensor = job.all_reduce(torch.full((length,), job.rank + 1.0), op="sum")
            assert torch.equal(tensor, torch.full((length,), 6.0))
        return job.choices

    choices = run_jobs(3, program)
    assert choices[0] is not None and choices[0] == choices[1] == choices[2]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x.clone().requires_grad_(),
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: torch.nn.Parameter(x),
        lambda x: x.sum(),
        lambda x: x[:0],
    ],
    ids=["transposed", "strided", "with gradient", "conjugated", "negated", "parameter", "a number", "empty"],
)
def test_tensors_of_any_layout_are_changed_in_place(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    inputs = [torch.arange(12.0).view(3, 4) + 100 * rank for rank in range(3)]
    plain = torch.stack([make(x.clone()).detach().resolve_conj().resolve_neg() for x in inputs]).sum(0)

    def program(job: Job) -> None:
        tensor = make(inputs[job.rank].clone())
        assert job.all_reduce(tensor, "sum", "ring") is tensor
        assert torch.equal(tensor.detach().resolve_conj().resolve_neg(), plain)

    run_jobs(3, program)


def test_elements_outside_a_strided_tensor_stay_as_they_are() -> None:
    def program(job: Job) -> None:
        whole = torch.ones(4, 4)
        job.all_reduce(whole[:, ::2], "sum", "direct")
        assert torch.equal(whole, torch.tensor([[3.0, 1.0, 3.0, 1.0]] * 4))

    run_jobs(3, program)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda job: job.all_reduce(torch.ones(2, dtype=torch.int32)), "the mean of torch.int32"),
        (lambda job: job.all_reduce(torch.ones(2), op="median"), "op='median' is not known. Write one of 'sum'"),
        (lambda job: job.all_reduce(torch.ones(2), algorithm="star"), "there is no such algorithm. Write one of: ring"),
        (lambda job: job.all_reduce(torch.ones(2), algorithm="native"), 'Start it with stretto.init.wire="gloo"'),
        (lambda job: job.all_reduce(torch.ones(2).to(torch.float8_e5m2), "sum"), "cannot travel"),
        (lambda job: job.broadcast(torch.ones(2), root=3), "root=3 in a job of 3: ranks are 0 to 2"),
        (lambda job: job.broadcast(torch.ones(2), root=-1), "root=-1"),
        (lambda job: job.run(Kind.ALL_TO_ALL, torch.ones(4), "transpose"), "4 is not a multiple of 3"),
        (lambda job: job.gather_object(object()), "gather_object of a .*object.*None, bool, int"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sent(call: Callable[[Job], Any], problem: str) -> None:
    def program(job: Job) -> int:
        with pytest.raises(ConfigurationError, match=problem):
            call(job)
        assert job.wire is not None
        sent = job.wire.bytes_sent
        job.barrier()
        return sent

    assert run_jobs(3, program) == [0, 0, 0]


def test_a_mismatch_leaves_the_job_usable() -> None:
    def program(job: Job) -> str:
        with pytest.raises(RankMismatch) as caught:
            job.all_reduce(torch.ones(3 + job.rank), "sum", "ring")
        assert job.all_reduce(torch.ones(2), "sum", "ring").tolist() == [3.0, 3.0]
        return str(caught.value)

    for text in run_jobs(3, program):
        assert all(f"rank {rank}: all_reduce(float32[{3 + rank}]" in text for rank in range(3))


def test_a_worker_that_ends_with_an_exception_is_lost_and_one_that_ends_in_order_has_left() -> None:
    wires = threads_world(3)
    abandoned = threading.Event()

    def program(wire: Wire) -> Any:
        job = Job(launch_of(wire.rank, 3), peers_on(["a"] * 3), wire, TIMEOUTS)
        try:
            if wire.rank == 1:
                job.close(goodbye=False)
                abandoned.set()
                return None
            assert abandoned.wait(20)
            with pytest.raises(PeerLost, match="rank 1 is lost: it ended without a goodbye") as caught:
                job.barrier()
            return caught.value.rank
        finally:
            job.close(goodbye=True)

    assert run_threads(3, program, wires=wires) == [1, None, 1]
    assert not wires[0].said_goodbye(1) and wires[0].lost[1].rank == 1


def test_a_job_that_was_left_takes_no_more_calls() -> None:
    def program(job: Job) -> None:
        job.barrier()
        job.close(goodbye=True)
        job.close(goodbye=True)
        for call in (job.barrier, lambda: job.broadcast(torch.ones(2)), lambda: job.all_reduce(torch.ones(2), "sum", "ring")):
            with pytest.raises(ConfigurationError, match="this job was shut down"):
                call()

    run_jobs(2, program)


@pytest.mark.parametrize(
    ("hosts", "group"),
    [("aabb", 2), ("aaaa", 4), ("abab", 1), ("aaab", 1), ("abcd", 1), ("aabbcc", 2)],
)
def test_hosts_of_equal_and_consecutive_ranks_make_groups(hosts: str, group: int) -> None:
    wire = threads_world(len(hosts))[0]
    with job_on(wire, list(hosts)) as job:
        assert job.workers_per_host == group


def test_hierarchical_works_on_two_hosts() -> None:
    def program(job: Job) -> None:
        assert torch.equal(job.all_reduce(torch.arange(50.0), "sum", "hierarchical"), torch.arange(50.0) * 4)

    run_jobs(4, program, list("aabb"))


# The public functions ----------------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher's variables, and no job left behind."""
    for name in list(os.environ):
        if name.startswith(("STRETTO_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    stretto.shutdown()


def test_without_a_launcher_there_is_a_job_of_one(alone: None) -> None:
    job = stretto.init()
    assert stretto.is_initialized() and stretto.current_job() is job
    assert (stretto.rank(), stretto.local_rank(), stretto.world_size()) == (0, 0, 1)
    tensor = torch.arange(3.0)
    assert stretto.all_reduce(tensor) is tensor and tensor.tolist() == [0.0, 1.0, 2.0]
    assert stretto.broadcast(tensor) is tensor
    assert stretto.all_gather(tensor).tolist() == [[0.0, 1.0, 2.0]]
    assert stretto.gather_object("x") == ["x"]
    assert stretto.device().type in ("cpu", "cuda")
    stretto.barrier()
    assert stretto.init() is job
    with pytest.raises(ConfigurationError, match="the mean of"):
        stretto.all_reduce(torch.ones(2, dtype=torch.int64))
    stretto.shutdown()
    assert not stretto.is_initialized()
    stretto.shutdown()


def test_before_init_every_call_says_what_to_do(alone: None) -> None:
    for call in (stretto.rank, stretto.barrier, stretto.current_job, lambda: stretto.all_reduce(torch.ones(1))):
        with pytest.raises(ConfigurationError, match="Call stretto.init.. first"):
            call()


def test_an_unknown_wire_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="wire='carrier pigeon' is not known. Write one of 'auto', 'tcp'"):
        join(launch_of(0, 1), TIMEOUTS, "carrier pigeon")  # type: ignore[arg-type]


def test_every_thread_has_a_job_of_its_own() -> None:
    def program(wire: Wire) -> tuple[int, list[float]]:
        with job_on(wire) as job:
            token = api._job.set(job)
            try:
                return stretto.rank(), stretto.all_reduce(torch.full((2,), float(job.rank)), algorithm="butterfly").tolist()
            finally:
                api._job.reset(token)

    assert run_threads(3, program, wires=threads_world(3)) == [(rank, [1.0, 1.0]) for rank in range(3)]


def test_all_errors_are_one_family() -> None:
    for name in stretto.__all__:
        value = getattr(stretto, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, StrettoError)


def test_the_first_auto_all_reduce_does_not_hide_that_ranks_disagree() -> None:
    """Its measurements are collectives too: they must not meet another rank's barrier."""

    def call(job: Job) -> str:
        try:
            if job.rank == 1:
                job.barrier()
            else:
                job.all_reduce(torch.ones(4))
        except RankMismatch as error:
            return str(error)
        return "no error"

    for text in run_jobs(3, call):
        assert "rank 1: barrier" in text
        assert "all_reduce(float32[4], op=mean, algorithm=auto)" in text


# One job, one process ------------------------------------------------------------------------------------------------


def test_init_again_gives_the_same_job_unless_it_asks_for_another(alone: None) -> None:
    job = stretto.init(timeouts=Timeouts(arrive_s=50.0))
    for again in (stretto.init(), stretto.init(timeouts=Timeouts(arrive_s=50.0)), stretto.init(wire="tcp")):
        assert again is job
    with pytest.raises(ConfigurationError, match=r"(?s)arrive_s=20.*joined its job before, with .*arrive_s=50.*leave them out"):
        stretto.init(timeouts=Timeouts(arrive_s=20.0))
    with pytest.raises(ConfigurationError, match="wire='gloo'.*joined its job before, with wire='auto' or wire='tcp'"):
        stretto.init(wire="gloo")
    stretto.shutdown()
    assert stretto.init(wire="gloo") is not job and stretto.init(wire="gloo").backend == "gloo"


def test_all_threads_of_a_process_are_in_its_job_and_a_thread_may_have_one_of_its_own(alone: None) -> None:
    job = stretto.init()
    seen: list[Job] = []
    thread = threading.Thread(target=lambda: seen.append(stretto.current_job()))
    thread.start()
    thread.join(20)
    assert seen == [job]
    assert stretto.testing.run_jobs(3, lambda own: (stretto.rank(), stretto.init() is own)) == [(rank, True) for rank in range(3)]
    assert stretto.current_job() is job
    stretto.shutdown()
    thread = threading.Thread(target=lambda: seen.append(stretto.is_initialized()))  # type: ignore[arg-type]
    thread.start()
    thread.join(20)
    assert seen == [job, False]


def test_nothing_is_left_of_jobs_that_were_left(alone: None) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    stretto.init()
    stretto.shutdown()
    before, threads, jobs = descriptors(), threading.active_count(), weakref.WeakSet[Job]()
    for _ in range(300):
        jobs.add(stretto.init())
        stretto.shutdown()
    gc.collect()
    assert (descriptors(), threading.active_count(), len(jobs)) == (before, threads, 0)


@pytest.mark.processes
@pytest.mark.parametrize("wire", ["tcp", "zeromq"])
def test_a_forked_child_is_no_worker_and_leaves_its_parent_alone(wire: str, preloaded: Preloaded) -> None:
    reports = preloaded.launch(worker, 2, wire, timeout_s=60)
    for rank, report in enumerate(reports):
        refusals = [*report["child"]["refusals"], *(report["loader"]["refusals"] if wire == "tcp" else ())]
        for text in refusals:
            assert f"forked from rank {rank} (process {report['pid']}) and is no worker of the job" in text
            assert "not in a DataLoader worker" in text
        if wire == "tcp":
            assert report["loader"]["pid"] != report["pid"] and report["loader"]["place"] == [rank, 2, True]
        assert report["child"]["place"] == [0, 1, 3.0] and not report["child"]["left"] and not report["left in a child"]
        assert report["sums"] == [3.0]
