"""The public functions about the job: join it, ask who we are, leave. Those that move tensors are in `collective_api.py`.

A process is in one job, the one that `init` joined: it is the same in all threads. A context variable overrides it where several
ranks live in one process, each in a thread (`stretto.testing`). A forked child finds its parent's job and may ask who it is; to
move tensors it needs a job of its own.
"""

from __future__ import annotations

import builtins
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing.util import Finalize
from typing import Literal, TextIO

import torch

from stretto.errors import ConfigurationError, StrettoError
from stretto.job import Job, WireName, check_wire, join
from stretto.launching.detect import Launch, detect_here
from stretto.observe.progress import Progress
from stretto.observe.termination import before_termination
from stretto.timeouts import Timeouts

Algorithm = Literal[
    "auto", "native", "ring", "halving_doubling", "direct", "butterfly", "torus", "double_binary_tree", "binomial_tree",
    "bidirectional_ring", "hierarchical", "chain", "master_worker", "all_to_all", "round_robin",
]  # fmt: skip

_job: ContextVar[Job | None] = ContextVar("stretto_job", default=None)

log = logging.getLogger("stretto")


class _ThisProcess:
    """What belongs to this process: the job that it is in. `left_in`: the process that was in one before and has left it."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.left_in: int | None = None
        self.joining = threading.RLock()


_process = _ThisProcess()


def _find_job() -> Job | None:
    return _job.get() or _process.job


def init(*, timeouts: Timeouts | None = None, wire: WireName = "auto") -> Job:
    """Join the job this process was started for, and return it; without a launcher, a job of one.

    `timeouts` beats STRETTO_TIMEOUT. `wire`: "auto" is plain TCP (and shared memory) within one host and encrypted ZeroMQ
    between hosts; "gloo" and "nccl" add a process group of torch's, for algorithm="native".

    Called again, it returns the job that the process is in. In a forked child it joins anew.
    """
    with _process.joining:
        job = _find_job()
        if job is not None and job.is_here:
            _check_same(job, timeouts, wire)
            return job
        _job.set(None)
        _process.job = job = _join_anew(timeouts, wire)
    if job.tracer is not None:
        job.begin_trace()
        before_termination(job.write_trace)
    if job.launch.progress:
        progress()
    return job


def init_as(launch: Launch, timeouts: Timeouts) -> Job:
    """Join a job that no launcher has described, as the worker that `launch` says. The process must be in none."""
    with _process.joining:
        job = _find_job()
        assert job is None or not job.is_here, "whoever calls this has looked"
        _job.set(None)
        _process.job = job = _joined(launch, timeouts, "auto")
    return job


def job_here() -> Job | None:
    """The job that this process has joined itself, if it is in one."""
    job = _find_job()
    return job if job is not None and job.is_here and not job.closed else None


def _check_same(job: Job, timeouts: Timeouts | None, wire: str) -> None:
    """A cell of a notebook that is run again, or a library that calls init too, gets the same job, unless it asks for another."""
    if timeouts is not None and timeouts != job.timeouts:
        raise ConfigurationError(
            f"init(timeouts={timeouts!r}): this process has joined its job before, with {job.timeouts!r}, and joins once.\n"
            f"Give them in the first call of init, or leave them out here."
        )
    check_wire(wire)
    if wire not in job.wire_names:
        raise ConfigurationError(
            f"init(wire={wire!r}): this process has joined its job before, with {_wires_text(job)}, and joins once.\n"
            f"Give it in the first call of init, or leave it out here."
        )


def _wires_text(job: Job) -> str:
    return " or ".join(f"wire={name!r}" for name in sorted(job.wire_names))


def _join_anew(timeouts: Timeouts | None, wire: WireName) -> Job:
    launch = detect_here()
    if _process.left_in == os.getpid() and launch.world_size > 1:
        raise ConfigurationError(
            "this worker has left its job (stretto.shutdown), and a job is joined once. Call stretto.shutdown() only at the end, "
            "or start another job."
        )
    return _joined(launch, launch.timeouts if timeouts is None else timeouts, wire)


def _joined(launch: Launch, timeouts: Timeouts, wire: WireName) -> Job:
    job = join(launch, timeouts, wire)
    # Not atexit: that would also run in forked children, and say goodbye in our name. This belongs to this process alone, and
    # also runs at the end of processes that multiprocessing made.
    job.at_exit = Finalize(job, _leave_at_exit, (job,), exitpriority=100)
    return job


def _leave_at_exit(job: Job) -> None:
    """A program that ends in order says goodbye; one that ends with an exception is lost, and its peers are told at once."""
    clean = getattr(sys, "last_value", None) is None
    if clean:
        try:
            _settle(job)
        except StrettoError as problem:
            log.error("rank %d: what its last step had left under way did not arrive: %s", job.rank, problem)
    job.close(goodbye=clean)


def _settle(job: Job) -> None:
    """Wait for what the last step has left under way: others may need it from this worker too."""
    if not job.closed and job.is_here:
        for engine in list(job.engines):
            engine.settle()


def shutdown() -> None:
    """Leave the job: say goodbye to every peer, so that a clean exit is not taken for a lost worker. Bounded in time."""
    job = _find_job()
    if job is None:
        return
    clean = sys.exc_info()[0] is None  # called while an exception is on its way, this is no clean exit
    if clean:
        _settle(job)
    job.close(goodbye=clean)
    if job.at_exit is not None:
        job.at_exit.cancel()
    if job is _process.job:
        _process.job = None
        _process.left_in = os.getpid() if job.is_here else None
    _job.set(None)


def current_job() -> Job:
    """The job that this process is in."""
    job = _find_job()
    if job is None:
        raise ConfigurationError("this process is in no job. Call stretto.init() first, once.")
    return job


def is_initialized() -> bool:
    """Whether `init` was called (and `shutdown` was not)."""
    return _find_job() is not None


def rank() -> int:
    """This worker's number, 0 .. world_size() - 1."""
    return current_job().rank


def local_rank() -> int:
    """This worker's number among those of its host."""
    return current_job().local_rank


def world_size() -> int:
    """How many workers the job has."""
    return current_job().world_size


def device() -> torch.device:
    """The device for this worker: its GPU by local rank, or the CPU."""
    return current_job().device


def print(
    *values: object, sep: str | None = " ", end: str | None = "\n", file: TextIO | None = None, flush: bool = False
) -> None:
    """As Python's own, on rank 0 only. A process that is in no job prints for itself."""
    job = _find_job()
    if job is None or job.rank == 0:
        builtins.print(*values, sep=sep, end=end, file=file, flush=flush)


def progress(every_s: float | None = 5.0) -> None:
    """From now on, rank 0 writes a line on how training goes to its stderr, every so many seconds; None: no more.

    It has the worker's steps and, of the last seconds, steps per second, staleness (with servers), the share of waiting, and
    bytes sent per second. `stretto run --progress` does the same without a change to the script.
    """
    job = current_job()
    if every_s is not None and not 0 < every_s < 1e9:
        raise ConfigurationError(
            f"progress(every_s={every_s!r}): seconds between two lines, a positive number, or None for none."
        )
    if job.progress is not None:
        job.progress.stop()
        job.progress = None
    if every_s is not None and job.rank == 0:
        job.progress = Progress(job.ledger, job.world_size, every_s, sys.stderr)
        job.threads.add(job.progress)


@contextmanager
def main_first(*, per_host: bool = False) -> Iterator[None]:
    """Let rank 0 run the block before the others do: it downloads or prepares what they then find. All workers enter it.

    `per_host`: the first worker of every host goes first, where hosts have disks of their own. An exception in the block leaves
    it without a word to those who wait; they are told when that worker ends, or calls another collective. What takes longer than
    `Timeouts.arrive_s` needs a larger one.
    """
    job = current_job()
    job.check_usable()
    first = (job.local_rank if per_host else job.rank) == 0
    label = f" of main_first({'per_host=True' if per_host else ''})"
    if not first:
        job.barrier(label)
    yield
    if first:
        job.barrier(label)
