"""A process group as operations that can be waited for from an event loop, and ended.

gloo cannot cancel an operation, and a timed wait that expires closes every connection of the group. So one thread waits for
operations in the order in which they were given, and `collect` hands the outcomes to the loop. What will never end is ended by
that same expiring wait, used on purpose (`end_all`): it frees the waiting thread within milliseconds, and leaves the group
dead on this rank. (NCCL can be polled, and has an `abort` of its own.)

Operations that were given up stay referenced: gloo must not see their memory freed. A group that broke stays broken.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

STOP_S: Final = 2.0
POISON_NUMBER: Final = (1 << 31) - 1

log = logging.getLogger("stretto.wire")


class TorchProcessGroup(Protocol):
    """What is used of a process group: `dist.ProcessGroup`, or a bare backend such as `dist.ProcessGroupGloo`."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> dist.Work: ...
    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work: ...
    def abort(self) -> None: ...


OnWork = Callable[[str | None], None]  # told what went wrong, or None


class GroupWorks:
    """See the module's text."""

    def __init__(self, group: TorchProcessGroup, wake: Callable[[], None], limit_s: float) -> None:
        self.group = group
        self.backend = _backend_of(group)
        self.broken: str | None = None  # why the group must not be used any more
        self.rank = group.rank()
        self._wake = wake
        self._limit = timedelta(seconds=limit_s)
        self._kept: list[object] = []
        self._num_watched = 0
        self._finished: deque[tuple[OnWork, str | None]] = deque()
        self._given: queue.SimpleQueue[tuple[dist.Work, OnWork] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"stretto-torch-group-{self.rank}", daemon=True)
        self._thread.start()

    def watch(self, work: dist.Work, on_work: OnWork) -> None:
        """Have `on_work` called from `collect` once the operation has ended."""
        self._num_watched += 1
        self._given.put((work, on_work))

    def collect(self) -> bool:
        """Tell of what has ended; whether there was anything."""
        something = bool(self._finished)
        while self._finished:
            on_work, problem = self._finished.popleft()
            self._num_watched -= 1
            on_work(problem)
        return something

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            work, on_work = given
            problem: str | None = None
            try:
                work.wait(self._limit)
            except RuntimeError as error:
                problem = str(error)
            self._finished.append((on_work, problem))
            self._wake()

    def keep(self, *operations: object) -> None:
        self._kept.extend(operations)

    def break_off(self, problem: str) -> None:
        """The group has failed or holds something that will never end: end all of it."""
        if self.broken is None:
            log.warning("rank %d: the %s group is broken (%s)", self.rank, self.backend, problem)
            self.broken = problem
        self.end_all()

    def end_all(self) -> None:
        if self.backend != "gloo":
            with contextlib.suppress(RuntimeError):
                self.group.abort()
            return
        for peer in (rank for rank in range(self.group.size()) if rank != self.rank):
            try:
                work = self.group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, POISON_NUMBER)
                self.keep(work)
                work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue  # as it should: the wait has expired, or this connection is closed already

    def stop(self) -> None:
        """End the thread, and the group if torch.distributed knows it; another's maker ends it."""
        if self._num_watched:
            self.end_all()
        self._given.put(None)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            log.warning("rank %d: an operation of the %s group cannot be ended; its thread stays", self.rank, self.backend)
        if isinstance(self.group, dist.ProcessGroup):
            with contextlib.suppress(ValueError, RuntimeError):
                dist.destroy_process_group(self.group)


def _backend_of(group: TorchProcessGroup) -> str:
    name = getattr(group, "name", None)  # a method, of a group and of a bare backend
    return str(name()) if callable(name) else str(name)
