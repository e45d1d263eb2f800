"""A job as one worker sees it: several in one process, each in a thread with a wire of its own; and a job of one."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
import stretto.testing
from stretto.collectives.calls import LARGE_BYTES
from stretto.collectives.plan import Kind
from stretto.errors import ConfigurationError, PeerLost, RankMismatch
from stretto.job import Job, join, was_made
from stretto.launching.detect import Launch
from stretto.launching.peers import Peer
from stretto.plan.choose import Choices, Trial
from stretto.plan.costs import LinkCosts
from stretto.testing import run_threads
from stretto.testing.threads import threads_world
from stretto.timeouts import Timeouts
from stretto.wire.base import Wire

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


@pytest.mark.usefixtures("measured_links")
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


def test_an_unknown_wire_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="wire='carrier pigeon' is not known. Write one of 'auto', 'tcp'"):
        join(launch_of(0, 1), TIMEOUTS, "carrier pigeon")  # type: ignore[arg-type]


@pytest.mark.usefixtures("measured_links")
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


@pytest.mark.parametrize(
    ("size", "trains", "use", "said"),
    [
        (1, True, lambda job: None, 0),
        (2, True, lambda job: None, 1),
        (2, False, lambda job: None, 0),  # a function that computes something needs no others
        (3, True, lambda job: job.begin_trace(), 1),  # compares clocks, which nobody asked for
        (3, True, lambda job: job.barrier(), 0),
        (2, True, lambda job: job.close(goodbye=False), 0),  # it fails: there is more to say
    ],
)
def test_a_job_whose_workers_train_and_never_do_anything_together_says_so_once(
    size: int,
    trains: bool,
    use: Callable[[Job], Any],
    said: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stretto.job.was_made", lambda kind: trains)  # other tests of this process make optimizers

    def program(wire: Wire) -> None:
        launch = dataclasses.replace(launch_of(wire.rank, size), trace=str(tmp_path))
        job = Job(launch, peers_on(["a"] * size), wire if size > 1 else None, TIMEOUTS)
        use(job)
        job.close(goodbye=True)

    with caplog.at_level(logging.WARNING, "stretto"):
        run_threads(size, program, wires=threads_world(size, check=True))
    found = [record.getMessage() for record in caplog.records if "distribute()" in record.getMessage()]
    assert len(found) == said and all(f"this job of {size} workers" in text for text in found)


def test_whether_an_optimizer_was_ever_made_is_known() -> None:
    class Kind(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    class Special(Kind):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    assert not was_made(Kind)
    Special([torch.nn.Parameter(torch.ones(1))])
    assert was_made(Kind) and was_made(torch.optim.Optimizer)


@pytest.mark.usefixtures("measured_links")
def test_rank_0_decides_what_auto_takes_however_others_have_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements are shared, but a rounding may differ between machines: here every rank comes to a conclusion of its own."""
    link = LinkCosts(1e-4, 1e-9, 1e-10)

    def trials(*_: Any) -> list[Trial]:
        return [Trial(4096 << stretto.rank(), ("ring", "direct", "butterfly")[stretto.rank()])]

    def choose(*_: Any) -> Choices:
        return Choices([1 << stretto.rank()], ["ring", ("direct", "butterfly", "chain")[stretto.rank()]], link)

    monkeypatch.setattr("stretto.plan.auto.trials", trials)
    monkeypatch.setattr("stretto.plan.auto.choose", choose)

    def program(job: Job) -> Choices | None:
        assert job.all_reduce(torch.ones(100), "sum").tolist() == [3.0] * 100
        return job.choices

    assert stretto.testing.run_jobs(3, program) == [Choices([1], ["ring", "direct"], link)] * 3


@pytest.mark.parametrize(
    "lazy", [lambda x: x.conj(), lambda x: x.conj().imag, lambda x: x.conj().real.t()], ids=["conj", "neg", "t"]
)
def test_a_lazy_view_on_one_rank_is_sent_as_the_values_that_it_stands_for(lazy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """On all ranks alike it would make no difference: a sum of conjugates is the conjugate of a sum."""
    values = torch.complex(torch.arange(6.0).view(2, 3), torch.ones(2, 3))

    def program(job: Job) -> None:
        def mine(rank: int) -> torch.Tensor:
            return lazy(values * (1 + rank)) if rank == 1 else lazy(values * (1 + rank)).resolve_conj().resolve_neg().contiguous()

        expected = torch.stack([mine(rank).resolve_conj().resolve_neg() for rank in range(3)])
        for algorithm in ("ring", "all_to_all"):
            total = job.all_reduce(mine(job.rank), "sum", algorithm)
            assert torch.equal(total.resolve_conj().resolve_neg(), expected.sum(0))
        for root in range(3):
            assert torch.equal(job.broadcast(mine(job.rank), root).resolve_conj().resolve_neg(), expected[root])
        assert torch.equal(job.all_gather(mine(job.rank)), expected)

    run_jobs(3, program)
