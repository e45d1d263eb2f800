"""The contenders: each way to sum a tensor over all ranks, behind one interface.

    Ours        an algorithm of the catalogue over one of stretto's wires
    Gloo        `torch.distributed.all_reduce` of the gloo backend, the "torch backend's own"
    (BareStream in `stream.py`: not an all-reduce, but the time its bytes need on a bare TCP connection)

`run` returns when the tensor holds the sum. `start` returns at once with ways to ask whether it does and to wait, for `--busy`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from stretto.collectives.plan import Kind
from stretto.job import Job


class InFlight(NamedTuple):
    is_done: Callable[[], bool]
    wait: Callable[[], object]


class Contender(Protocol):
    name: str
    wire: str

    def run(self, tensor: torch.Tensor) -> None: ...

    def start(self, tensor: torch.Tensor) -> InFlight: ...


class Ours:
    """One algorithm over the wire of `job`."""

    def __init__(self, job: Job, algorithm: str, wire: str) -> None:
        self.name = algorithm
        self.wire = wire
        self.job = job

    def run(self, tensor: torch.Tensor) -> None:
        self.job.all_reduce(tensor, "sum", self.name)

    def start(self, tensor: torch.Tensor) -> InFlight:
        handle = self.job.start(Kind.ALL_REDUCE, tensor.view(-1), self.chosen(tensor), op="sum")
        return InFlight(lambda: handle.done, handle.wait)

    def chosen(self, tensor: torch.Tensor) -> str:
        """The algorithm that runs: for `auto`, its choice."""
        return self.job.choose(tensor.numel() * tensor.element_size()) if self.name == "auto" else self.name


class Gloo:
    """torch's gloo backend, on the addresses the launcher gave torch. `close` it before the process ends."""

    name = "gloo"
    wire = "gloo"

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=self._timeout)

    def run(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    def start(self, tensor: torch.Tensor) -> InFlight:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return InFlight(work.is_completed, lambda: work.wait(self._timeout))

    def close(self) -> None:
        dist.destroy_process_group()
