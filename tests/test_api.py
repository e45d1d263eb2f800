"""The public functions: in a job of one, and in threads that each have a job."""

from __future__ import annotations

import gc
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import stretto
from forked import worker
from preloaded import Preloaded
from stretto.errors import ConfigurationError, RankMismatch, StrettoError
from stretto.job import Job
from stretto.testing import run_jobs
from stretto.timeouts import Timeouts


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


def test_every_thread_may_have_a_job_of_its_own() -> None:
    def program(job: Job) -> tuple[int, list[float]]:
        return stretto.rank(), stretto.all_reduce(torch.full((2,), float(job.rank)), algorithm="butterfly").tolist()

    assert run_jobs(3, program) == [(rank, [1.0, 1.0]) for rank in range(3)]


def test_all_errors_are_one_family() -> None:
    for name in stretto.__all__:
        value = getattr(stretto, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, StrettoError)


# One job, one process ------------------------------------------------------------------------------------------------


def test_init_again_gives_the_same_job_unless_it_asks_for_another(alone: None) -> None:
    job = stretto.init(timeouts=Timeouts(arrive_s=50.0))
    for again in (stretto.init(), stretto.init(timeouts=Timeouts(arrive_s=50.0)), stretto.init(wire="tcp")):
        assert again is job
    with pytest.raises(ConfigurationError, match=r"(?s)arrive_s=20.*joined its job before, with .*arrive_s=50.*leave them out"):
        stretto.init(timeouts=Timeouts(arrive_s=20.0))
    with pytest.raises(ConfigurationError, match="wire='gloo'.*joined its job before, with wire='auto' or wire='tcp'"):
        stretto.init(wire="gloo")
    with pytest.raises(ConfigurationError, match="wire='pigeon' is not known"):
        stretto.init(wire="pigeon")  # type: ignore[arg-type]
    stretto.shutdown()
    assert stretto.init(wire="gloo") is not job and "gloo" in stretto.init(wire="gloo").wire_names


def test_all_threads_of_a_process_are_in_its_job_and_a_thread_may_have_one_of_its_own(alone: None) -> None:
    job = stretto.init()
    seen: list[Job] = []
    thread = threading.Thread(target=lambda: seen.append(stretto.current_job()))
    thread.start()
    thread.join(20)
    assert seen == [job]
    assert run_jobs(3, lambda own: (stretto.rank(), stretto.init() is own)) == [(rank, True) for rank in range(3)]
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
    gc.collect()  # what other tests have left is not counted
    before, threads, jobs = descriptors(), threading.active_count(), weakref.WeakSet[Job]()
    for _ in range(300):
        jobs.add(stretto.init())
        stretto.shutdown()
    gc.collect()
    # Fewer is no leak: a thread that another test has left may end meanwhile. One leak in each of 300 turns would be 300 more.
    assert descriptors() <= before and threading.active_count() <= threads and len(jobs) == 0


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


# Numbers, and what autograd has saved ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "op", "result"),
    [
        (lambda rank: 1.0 + rank, "mean", 2.0),
        (lambda rank: 1.5 + rank, "sum", 7.5),
        (lambda rank: rank, "mean", 1.0),
        (lambda rank: rank, "sum", 3),
        (lambda rank: 2**62 + rank, "max", 2**62 + 2),
        (lambda rank: rank == 1, "max", True),
        (lambda rank: rank == 1, "min", False),
        (lambda rank: rank != 1, "sum", 2),
        (lambda rank: np.float32(rank), "product", 0.0),
        (lambda rank: np.int64(rank + 1), "product", 6),
        (lambda rank: np.bool_(rank == 0), "max", True),
        (lambda rank: float("nan") if rank else 0.0, "sum", pytest.approx(float("nan"), nan_ok=True)),
    ],
)  # fmt: skip
def test_numbers_are_reduced_to_numbers(value: Callable[[int], Any], op: Any, result: Any) -> None:
    for mine in run_jobs(3, lambda job: stretto.all_reduce(value(job.rank), op, "ring")):
        assert mine == result and type(mine) in (bool, int, float)
        assert isinstance(result, (bool, int, float)) <= (type(mine) is type(result))


def test_a_number_of_rank_1_is_everybodys() -> None:
    def program(job: Job) -> Any:
        assert stretto.broadcast(True if job.rank == 1 else 0, root=1) is True
        return stretto.broadcast(0.5 if job.rank == 1 else job.rank, root=1)

    assert run_jobs(3, program) == [0.5] * 3


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda anything: anything.all_reduce("1"), "all_reduce of a str: a tensor or a number is needed. .*gather_object"),
        (lambda anything: anything.all_reduce(2**63, "sum"), "whole numbers travel in 64 bits. Use float"),
        (lambda anything: anything.all_reduce(1.0, "median"), "op='median' is not known"),
        (lambda anything: anything.all_gather(1.0), "all_gather of a float: a tensor is needed. .*gather_object"),
        (lambda anything: anything.broadcast(1.0, root=7), "root=7 in a job of 1"),
    ],
)
def test_what_is_no_number_is_refused(call: Callable[[Any], Any], problem: str, alone: None) -> None:
    stretto.init()
    with pytest.raises(ConfigurationError, match=problem):
        call(stretto)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("algorithm", ["ring", "auto"])
def test_a_backward_whose_values_were_replaced_raises_and_does_not_compute_something_else(size: int, algorithm: Any) -> None:
    """exp() has saved its result for the backward; the all-reduce of what looks like a copy writes to that very memory."""

    def program(job: Job) -> float:
        x = torch.tensor([1.0 + job.rank], requires_grad=True)
        loss = x.exp()
        stretto.all_reduce(loss.detach(), algorithm=algorithm)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(loss)
        other = x.exp()
        stretto.broadcast(other.detach(), root=0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(other)
        right = x.exp()
        stretto.all_reduce(right.detach().clone(), algorithm=algorithm)
        stretto.all_gather(right.detach())
        torch.autograd.backward(right)
        assert x.grad is not None
        return x.grad.item()

    assert run_jobs(size, program) == [pytest.approx(math.exp(1.0 + rank)) for rank in range(size)]


# Rank 0 before the others ----------------------------------------------------------------------------------------------


def test_rank_0_prints(capsys: pytest.CaptureFixture[str], alone: None) -> None:
    run_jobs(3, lambda job: stretto.print("step", job.rank, sep="=", end="!"))
    stretto.print("in no job")
    assert capsys.readouterr().out == "step=0!in no job\n"


@pytest.mark.parametrize(("per_host", "first"), [(False, {0}), (True, {0, 2})])
def test_main_first(per_host: bool, first: set[int]) -> None:
    order: list[int] = []

    def program(job: Job) -> None:
        with stretto.main_first(per_host=per_host):
            if job.rank in first:
                assert set(order) <= first
            order.append(job.rank)

    run_jobs(4, program, hosts=["a", "a", "b", "b"])
    assert set(order[: len(first)]) == first and sorted(order) == [0, 1, 2, 3]


def test_an_exception_in_what_rank_0_does_first_leaves_nobody_waiting() -> None:
    """It is not told while it is on its way; but whatever rank 0 calls next does not fit what the others wait in."""

    def program(job: Job) -> str:
        if job.rank == 0:
            with pytest.raises(OSError, match="no space"), stretto.main_first():
                raise OSError("no space")
            with pytest.raises(RankMismatch) as caught:
                job.barrier()
        else:
            with pytest.raises(RankMismatch) as caught, stretto.main_first():
                raise AssertionError("it does not get here")
        return str(caught.value)

    for text in run_jobs(3, program):
        assert "ranks 1, 2: barrier(" in text and "of main_first()" in text
