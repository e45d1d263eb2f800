"""A fabric of torch's own collectives: NCCL, where every worker of a host has a GPU of its own.

equal parts      reduce-scatter, all-gather
unequal parts    all-reduce, twice: the second time with zeros in place of the others' shares
an owner         reduce to it, broadcast from it

gloo, which runs the same code on CPUs, cannot be asked whether a reduce-scatter has ended; there it is an all-reduce.

torch's collectives have no names: members must begin them in one order, while buckets are full in any. So an operation waits in
line: all sums of a round in the order of their areas, then all shares. Within a host sharing is fast, and little is lost by
beginning it when backward has ended.

Members meet before each operation and after it: the second meeting begins when the operation has ended here. torch does not say
which peer was lost, and on a GPU waits for a lost one for ever, while one that is only late must be waited for as long as the job
allows. Meetings have the job's deadlines, and fail with `PeerLost`; then the group is aborted, which ends what the GPU waits for.

Every model has a process group of its own. NCCL asks that operations of several groups are under way at once only if all members
begin them in one order: train models on the same GPUs one after the other.

NCCL was run with one worker on an H200, where two cannot have a GPU each; gloo with up to seven. What NCCL does when a member is
killed has not been seen.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, FileStore

from stretto.collectives.calls import gather_object
from stretto.collectives.group import Group
from stretto.collectives.plan import Kind
from stretto.collectives.request import Pending
from stretto.errors import WireError
from stretto.fabric.base import Area, Fabric, FabricUnavailable, Steps
from stretto.wire.torch_native import end_operations

BACKENDS = {"nccl": "ProcessGroupNCCL", "gloo": "ProcessGroupGloo"}


class NativeFabric(Fabric):
    """See the module's text. All members make it together; raises `FabricUnavailable` on all if one cannot."""

    def __init__(self, group: Group, device: torch.device, backend: str = "nccl", timeout_s: float = 60.0) -> None:
        self.name = backend
        self._group = group
        self._device = device
        self._channel = group.new_channel()
        self.channels = frozenset({self._channel})
        self._torch, folder = _connect(group, device, backend, timedelta(seconds=timeout_s))
        if group.rank == 0:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)  # torch may look into it until the end
        self._broken: BaseException | None = None
        self._kept: list[object] = []
        self._under_way: set[_Operation] = set()  # torch must not see their memory freed, also when they are given up
        self._areas: Sequence[Area] = ()
        self._in_line: dict[int, _Operation] = {}  # by place: its area for a sum, behind all areas for a share
        self._next = 0

    def prepare(self, areas: Sequence[Area]) -> None:
        if any(gather_object(self._group, self._broken is not None)):
            raise FabricUnavailable(f"{self.name} was given up when a round failed")
        self._areas, self._in_line, self._next = areas, {}, 0

    def sum(self, area: int, flat: Tensor, scale: float, number: int, label: str) -> Steps:
        if scale != 1.0:
            flat.mul_(scale)
        mine = _real(flat[slice(*self._areas[area].share(self._group.rank, self._group.size))])
        whole, owner, out = _real(flat), self._areas[area].owner, None
        if owner is not None:
            begin = partial(self._torch.reduce, [whole], _root(dist.ReduceOptions(), owner))
        elif len(flat) % self._group.size or not flat.is_cuda:
            begin = partial(self._torch.allreduce, [whole])
        else:
            out = torch.empty_like(mine)
            begin = partial(self._torch._reduce_scatter_base, out, whole, dist.ReduceScatterOptions())
        yield from self._run(area, begin, 4 * number, label)
        if out is not None:
            mine.copy_(out)

    def share(self, area: int, flat: Tensor, number: int, label: str) -> Steps:
        start, stop = self._areas[area].share(self._group.rank, self._group.size)
        whole, owner = _real(flat), self._areas[area].owner
        if owner is not None:
            begin = partial(self._torch.broadcast, [whole], _root(dist.BroadcastOptions(), owner))
        elif len(flat) % self._group.size:
            flat[:start].zero_()
            flat[stop:].zero_()
            begin = partial(self._torch.allreduce, [whole])
        else:
            begin = partial(self._torch._allgather_base, whole, _real(flat[start:stop]).clone(), AllgatherOptions())
        yield from self._run(len(self._areas) + area, begin, 4 * number + 2, label)

    def stop(self) -> None:
        if self._broken is None:
            self._broken = WireError("the job has left it")
            with contextlib.suppress(RuntimeError):
                self._torch.shutdown()

    def _run(self, place: int, begin: Callable[[], dist.Work], sequence: int, label: str) -> Steps:
        if self._broken is not None:
            raise WireError(
                f"the workers of this host cannot combine through {self.name} any more, since a round has failed "
                f"({self._broken}).\nCall distribute() again on all workers, or start the job again."
            )
        operation = _Operation(begin, self._device)
        if self._group.size == 1:
            operation.start()
            operation.check()
            return
        try:
            yield self._meet(sequence, label)
            self._in_line[place] = operation
            while self._next in self._in_line:
                self._under_way.add(self._in_line[self._next])
                self._in_line.pop(self._next).start()
                self._next = (self._next + 1) % (2 * len(self._areas))
            yield self._meet(sequence + 1, label, operation.has_ended)
            operation.check()
            self._under_way.discard(operation)
        except BaseException as error:
            self._abort(error)
            if isinstance(error, RuntimeError) and not isinstance(error, WireError):  # torch's
                raise WireError(f"{self.name} could not combine{label}: {error}") from error
            raise

    def _meet(self, sequence: int, label: str, ready: Callable[[], bool] | None = None) -> Pending:
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        name, label = (self._channel, sequence & 0xFFFFFFFF), f"{label}, in {self.name}"
        meeting = self._group.start(Kind.BARRIER, nothing, "dissemination", name=name, label=label, ready=ready)
        meeting.when_done(lambda: self._has_ended(meeting))
        return meeting

    def _has_ended(self, meeting: Pending) -> None:
        """At once, and not when the exchange is resumed: the thread that resumes it may itself wait for the GPU."""
        if meeting.error is not None:
            self._abort(meeting.error)

    def _abort(self, error: BaseException) -> None:
        if self._broken is None:
            self._broken = error
            threading.Thread(target=self._abort_group, name="stretto-abort", daemon=True).start()  # it may take its time

    def _abort_group(self) -> None:
        self._kept = end_operations(self._torch)


class _Operation:
    """One collective of torch's: `begin` begins it, when it is its turn."""

    def __init__(self, begin: Callable[[], dist.Work], device: torch.device) -> None:
        self._begin = begin
        self._device = device
        self._is_done: Callable[[], bool] | None = None
        self._work: dist.Work | None = None

    def start(self) -> None:
        self._work = self._begin()
        if self._device.type == "cuda":
            self._work.wait()  # the stream waits, not this thread
            self._is_done = torch.cuda.current_stream(self._device).record_event().query
        else:
            self._is_done = self._work.is_completed

    def has_ended(self) -> bool:
        return self._is_done is not None and self._is_done()

    def check(self) -> None:
        """Raise what went wrong, once it has ended: torch counts a failed operation as completed."""
        assert self._work is not None
        self._work.wait()


def _connect(group: Group, device: torch.device, backend: str, timeout: timedelta) -> tuple[Any, Path]:
    """A process group of these workers only, which torch.distributed does not know of: the program's own groups are not touched,
    and no other worker has to take part. It has been used once, so that all members know that it works.

    Members find each other through a file in a folder that only this user may enter. (NCCL's own connections are not
    authenticated.)"""
    folder = gather_object(group, _make_folder() if group.rank == 0 else "")[0]
    problem, made = "", None
    try:
        _check_folder(folder)
        made = _in_time(timeout, partial(_make_and_try, backend, folder, group, device, timeout))
    except (RuntimeError, OSError, ValueError, AttributeError) as error:  # torch without the backend has no such class
        problem = f"rank {group.ranks[group.rank]}: {error}"
    problems = [said for said in gather_object(group, problem) if said]
    if problems:
        if made is not None:
            made.abort()
        raise FabricUnavailable(f"{backend} does not connect them ({problems[0]})")
    return made, Path(folder)


def _make_folder() -> str:
    try:
        return tempfile.mkdtemp(prefix="stretto-")
    except OSError:
        return ""  # the check says so on all members


def _check_folder(folder: object) -> None:
    if not isinstance(folder, str) or not folder:
        raise ValueError("there is no folder for temporary files")
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise ValueError(f"{folder} is no folder of this user alone")


def _in_time(timeout: timedelta, make: Callable[[], Any]) -> Any:
    """What `make` returns. NCCL connects without a deadline: if it takes longer, its thread is left behind."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:  # the caller's to raise
            future.set_exception(error)

    threading.Thread(target=run, name="stretto-connect", daemon=True).start()
    try:
        return future.result(timeout.total_seconds())
    except TimeoutError:
        raise RuntimeError(f"not connected within {timeout.total_seconds():g} s") from None


def _make_and_try(backend: str, folder: str, group: Group, device: torch.device, timeout: timedelta) -> Any:
    kind: Any = getattr(dist, BACKENDS[backend])
    store = FileStore(os.path.join(folder, "store"), group.size)
    if backend == "gloo":
        made = kind(store, group.rank, group.size, timeout=timeout)
    else:
        torch.cuda.set_device(device)  # of this thread
        options = kind.Options()
        options._timeout = timedelta(days=1)  # torch ends the process after it: our own deadlines come first
        made = kind(store, group.rank, group.size, options)
    made.allreduce([torch.ones(1, device=device)]).wait()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return made


def _root(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


def _real(flat: Tensor) -> Tensor:
    """Complex numbers as twice as many real ones, which every backend adds."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
