"""The torch backend's own all-reduce (gloo, NCCL), in the thread that calls it and beside our wire.

All ranks meet in a barrier of ours first, whose label says what each of them is about to do. So different sizes, dtypes or
operations are a `RankMismatch` on every rank (left to itself gloo would end the process), and a rank that does not come is named.
Then the backend runs. Who is lost meanwhile is the wire's word: such a rank ends the call with `PeerLost` within the time that
the wire needs to notice, and the group with it. When one fails midway, its tensor holds neither the input nor the result.

Messages of our own plans do not go through the group. gloo's send and receive cannot be cancelled, end the process when sizes
differ and name no rank, and were slower than our sockets; NCCL's move device memory, and plans work in host memory.

gloo cannot cancel an operation, and a timed wait that expires closes every connection of the group. So a thread waits for each
operation, and what will never end is ended by that same expiring wait, used on purpose: it frees the waiting thread within
milliseconds, and leaves the group dead on this rank. (NCCL can be polled, and has an `abort` of its own.) Operations that were
given up stay referenced: gloo must not see their memory freed.

NCCL path: run with world size 1 on an H200, never with two or more ranks, and its failures never.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any, Final, NoReturn, Protocol

import torch
import torch.distributed as dist

from stretto.errors import ConfigurationError, PeerLost, StrettoError, WireError
from stretto.wire.base import Wire

GRACE_S: Final = 2.0  # for the wire to find who is lost, after the group has failed without a name
SPIN_S: Final = 2e-3
STOP_S: Final = 2.0
POISON_NUMBER: Final = (1 << 31) - 1
REDUCE_OPS: Final = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
GLOO_LACKS: Final = (torch.int16,)

log = logging.getLogger("stretto.wire")


class TorchProcessGroup(Protocol):
    """What is used of a process group: `dist.ProcessGroup`, or a bare backend such as `dist.ProcessGroupGloo`."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def name(self) -> str: ...
    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> dist.Work: ...
    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work: ...
    def abort(self) -> None: ...


class NativeGroup:
    """A process group that connects the same ranks as `wire`, which another thread drives. See the module's text."""

    def __init__(self, group: TorchProcessGroup, wire: Wire, timeout_s: float) -> None:
        if (group.rank(), group.size()) != (wire.rank, wire.world_size):
            raise ConfigurationError(
                f"rank {group.rank()} of a group of {group.size()} over a wire that is rank {wire.rank} of {wire.world_size}.\n"
                f"Both must connect the same ranks under the same numbers: make the group with torch_group()."
            )
        self.backend = group.name()
        self.broken: str | None = None  # why the group must not be used any more
        self._group = group
        self._wire = wire
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # a group that two threads use mixes up their data without an error
        self._outcome: Future[None] | None = None  # of the operation under way
        self._somebody_lost = threading.Event()
        self._kept: list[object] = []
        self._given: queue.SimpleQueue[tuple[dist.Work, Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait_for_works, name=f"stretto-torch-group-{wire.rank}", daemon=True)
        self._thread.start()
        wire.on_lost(self._on_lost)

    def all_reduce(self, tensor: torch.Tensor, op: str, what: str, meet: Callable[[], None]) -> None:
        """All-reduce in place by the backend, in the order of the current stream where the tensor is on a CUDA device.

        op: "sum", "mean", "min", "max" or "product". `meet` returns when all ranks have come to do `what`.
        """
        objection = self.objection(tensor, op)
        if objection is not None:
            raise objection
        with self._lock:
            meet()
            if tensor.numel():
                self._carry_out(what, tensor.detach(), op)

    def objection(self, tensor: torch.Tensor, op: str) -> StrettoError | None:
        """Why the backend cannot do it on this rank, found before anything is sent."""
        dtype = tensor.dtype
        if op not in REDUCE_OPS:
            return ConfigurationError(f"op={op!r} is not known. Write one of {', '.join(map(repr, REDUCE_OPS))}.")
        if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            return ConfigurationError(f"op='mean' of {dtype} tensors is not a {dtype}. Use op='sum', or a floating-point type.")
        if self.backend == "nccl" and tensor.device.type != "cuda":
            return ConfigurationError(
                f"a tensor on {tensor.device} cannot go through NCCL, which moves CUDA memory only.\n"
                f"Move it with .cuda(), or use another algorithm than 'native', or the gloo backend."
            )
        if dtype.is_complex and op in ("min", "max", "product"):
            return ConfigurationError(f"op={op!r} of {dtype}: torch backends only sum or average complex numbers.")
        if self.backend == "gloo" and dtype in GLOO_LACKS:
            return ConfigurationError(f"gloo has no collective for {dtype}. Use an algorithm of stretto's, or another dtype.")
        if self.broken is not None and not self._wire.lost:  # the barrier says who is lost
            return WireError(
                f"the {self.backend} group is broken ({self.broken}), and the backend cannot repair one.\n"
                f"Use another algorithm than 'native': it goes through stretto's own wire now. Or restart the job."
            )
        return None

    def _carry_out(self, what: str, tensor: torch.Tensor, op: str) -> None:
        flat = tensor.contiguous()
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCE_OPS[op]  # type: ignore[assignment]
        # The backend's own limit comes after ours, so that it is we who say what happened.
        options.timeout = timedelta(seconds=self._timeout_s + GRACE_S)
        outcome = self._outcome = Future()
        for error in list(self._wire.lost.values()):  # since the barrier
            self._on_lost(error)
        try:
            work = self._group.allreduce([flat], options)
            try:
                self._await(work, outcome)
            except BaseException:
                self._kept += (work, flat)
                raise
        except WireError:  # found by our wire, which knows the rank
            raise
        except RuntimeError as error:
            self._blame(what, str(error))
        except TimeoutError:
            self._break_off(problem := f"{what} did not end in time")
            raise WireError(
                f"{problem}: every rank had begun it, and {self.backend} does not say which of them holds it up.\n"
                f"Allow more time (stretto.init(timeouts=...)), or use another algorithm than 'native', which names the rank."
            ) from None
        except PeerLost as lost:
            self._break_off(str(lost))
            raise
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)

    def _await(self, work: dist.Work, outcome: Future[None]) -> None:
        """Raise what the backend raises, PeerLost as soon as a rank is lost, and TimeoutError at the deadline."""
        if self.backend == "gloo":
            self._given.put((work, outcome))
            return outcome.result(self._timeout_s)
        work.wait()  # NCCL: makes the stream wait, not us; whether it has happened can be polled
        began = time.monotonic()
        while not work.is_completed():
            waited_s = time.monotonic() - began
            if outcome.done() or waited_s > self._timeout_s:
                return outcome.result(0)
            time.sleep(0.0 if waited_s < SPIN_S else 1e-3)

    def _wait_for_works(self) -> None:
        while (given := self._given.get()) is not None:
            work, outcome = given
            try:
                work.wait(timedelta(seconds=self._timeout_s + GRACE_S))
                _end(outcome)
            except RuntimeError as error:
                _end(outcome, error)

    def _on_lost(self, error: PeerLost) -> None:
        """In the thread that drives the wire. A rank that has left in order has done its part of what is under way."""
        if not self._wire.said_goodbye(error.rank):
            self.broken = self.broken or str(error)
            if self._outcome is not None:
                _end(self._outcome, error)
        self._somebody_lost.set()

    def _blame(self, what: str, problem: str) -> NoReturn:
        """The backend has failed and names no rank: whoever the wire finds lost in the next moments is the cause."""
        self._break_off(problem)
        self._somebody_lost.wait(GRACE_S)
        for error in list(self._wire.lost.values()):
            raise error
        raise WireError(f"{what} failed in {self.backend}, and no rank is lost: {problem}")

    def _break_off(self, problem: str) -> None:
        """The group has failed or holds something that will never end: end all of it."""
        log.warning("rank %d: the %s group is broken (%s)", self._wire.rank, self.backend, problem)
        self.broken = self.broken or problem
        self._kept += end_operations(self._group)

    def stop(self) -> None:
        """End the thread, and the group if torch.distributed knows it; another's maker ends it."""
        if self._outcome is not None and not self._outcome.done():
            self._kept += end_operations(self._group)
        self._given.put(None)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            log.warning("rank %d: an operation of the %s group cannot be ended; its thread stays", self._wire.rank, self.backend)
        if isinstance(self._group, dist.ProcessGroup):
            with contextlib.suppress(ValueError, RuntimeError):
                dist.destroy_process_group(self._group)


def end_operations(group: TorchProcessGroup) -> list[object]:
    """End all that is under way in a group, which is of no use afterwards; returns what must be kept as long as the group."""
    if group.name() != "gloo":
        with contextlib.suppress(RuntimeError):
            group.abort()
        return []
    kept: list[object] = []
    for peer in (rank for rank in range(group.size()) if rank != group.rank()):
        try:
            work = group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, POISON_NUMBER)
            kept.append(work)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError:
            continue  # as it should: the wait has expired, or this connection is closed already
    return kept


def _end(outcome: Future[None], error: Exception | None = None) -> None:
    """What happens first counts."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)
