"""Operations of several collectives, one after the other: a thread of the group takes them from one to the next.

The thread is one of those that carry compressed gradients, and the collectives are asked for as data (`compress/rounds.py`). It
runs no code of users, so that a callback of a future may wait for such an operation too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stretto.aggregate.all_reduce.compression_thread import CompressionThread, ThreadedExchange
from stretto.aggregate.all_reduce.exchange import ExchangeDriver, Sending, UnderWay
from stretto.collectives.group import Group
from stretto.collectives.messages import Name
from stretto.compress.rounds import Steps
from stretto.job import Job
from stretto.torch_backend.naming import part_of


class Exchanges:
    """Runs the exchanges of one process group. The thread starts with the first operation that needs it."""

    def __init__(self, job: Job, group: Group) -> None:
        self.job = job
        self.group = group
        self._thread: CompressionThread | None = None

    def drive(self, steps: Steps, name: Name, algorithm: str, label: str) -> UnderWay:
        """The collectives of an operation of that name."""
        channel, number = part_of(name, 0)
        return ExchangeDriver(self.job, self.group, channel, algorithm).drive(steps, number, label, Sending())

    def submit(self, under_way: Callable[[], UnderWay], device: torch.device) -> ThreadedExchange:
        """Begin an operation."""
        if self._thread is None:
            self._thread = CompressionThread()
            self.job.threads.add(self._thread)
        return self._thread.submit(torch.no_grad()(under_way)(), device)

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()
