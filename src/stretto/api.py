"""The public functions: join the job, ask who we are, move tensors.

The job lives in a context variable: it belongs to the thread (or task) that called `init`, and to whatever runs in a copy of its
context. There is no module-level group.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from multiprocessing.util import Finalize
from typing import Any, Literal

import torch

from stretto.collectives.reduction import Op
from stretto.errors import ConfigurationError
from stretto.job.detect import detect_here
from stretto.observe.termination import before_termination
from stretto.session import Job, WireName, join
from stretto.timeouts import Timeouts

Algorithm = Literal[
    "auto", "native", "ring", "halving_doubling", "direct", "butterfly", "torus", "double_binary_tree", "binomial_tree",
    "bidirectional_ring", "hierarchical", "chain", "master_worker", "all_to_all", "round_robin",
]  # fmt: skip

_job: ContextVar[Job | None] = ContextVar("stretto_job", default=None)
_left: ContextVar[bool] = ContextVar("stretto_left", default=False)


def init(*, timeouts: Timeouts | None = None, wire: WireName = "auto") -> Job:
    """Join the job this process was started for, and return it; without a launcher, a job of one.

    `timeouts` beats STRETTO_TIMEOUT. `wire`: "auto" is plain TCP (and shared memory) within one host and encrypted ZeroMQ
    between hosts; "gloo" and "nccl" move tensors through torch.distributed and allow algorithm="native".
    """
    if _job.get() is not None:
        raise ConfigurationError(
            "stretto.init() was called before: a process joins one job, once. Call it at the beginning of the program only."
        )
    launch = detect_here()
    if _left.get() and launch.world_size > 1:
        raise ConfigurationError(
            "this worker has left its job (stretto.shutdown), and a job is joined once. Call stretto.shutdown() only at the end, "
            "or start another job."
        )
    if timeouts is None:
        timeouts = launch.timeouts
    job = join(launch, timeouts, wire)
    # Not atexit: that would also run in forked children, and say goodbye in our name. This belongs to this process alone, and
    # also runs at the end of processes that multiprocessing made.
    job.at_exit = Finalize(job, _leave_at_exit, (job,), exitpriority=100)
    _job.set(job)
    if job.tracer is not None:
        job.begin_trace()
        before_termination(job.write_trace)
    return job


def _leave_at_exit(job: Job) -> None:
    """A program that ends in order says goodbye; one that ends with an exception is lost, and its peers are told at once."""
    job.close(goodbye=getattr(sys, "last_value", None) is None)


def shutdown() -> None:
    """Leave the job: say goodbye to every peer, so that a clean exit is not taken for a lost worker. Bounded in time."""
    job = _job.get()
    if job is not None:
        job.close(goodbye=sys.exc_info()[0] is None)  # called while an exception is on its way, this is no clean exit
        if job.at_exit is not None:
            job.at_exit.cancel()
        _job.set(None)
        _left.set(True)


def current_job() -> Job:
    """The job that `init` joined in this context."""
    job = _job.get()
    if job is None:
        raise ConfigurationError(
            "there is no job in this thread. Call stretto.init() first; in another thread than the one that called it, "
            "run your function in a copy of the context: contextvars.copy_context().run(function)."
        )
    return job


def is_initialized() -> bool:
    """Whether `init` was called in this context (and `shutdown` was not)."""
    return _job.get() is not None


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


def all_reduce(tensor: torch.Tensor, op: Op = "mean", algorithm: Algorithm = "auto") -> torch.Tensor:
    """Replace `tensor`, in place, by its mean (sum, min, max, product) over all workers; returns it. All end with the same bits.

    Every worker must call it with a tensor of the same length and dtype. CPU or CUDA, contiguous or not.
    """
    return current_job().all_reduce(tensor, op, algorithm)


def broadcast(tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Replace `tensor`, in place, by the one of rank `root`; returns it."""
    return current_job().broadcast(tensor, root)


def all_gather(tensor: torch.Tensor) -> torch.Tensor:
    """Every worker's tensor, stacked by rank: shape (world_size, *tensor.shape). All must have the same shape."""
    return current_job().all_gather(tensor)


def gather_object(value: Any) -> list[Any]:
    """Every worker's value by rank, on every worker: anything made of None, bool, int, float, str, bytes, list and dict."""
    return current_job().gather_object(value)


def barrier() -> None:
    """Return when every worker has called it."""
    current_job().barrier()
