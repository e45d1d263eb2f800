"""Carrying out the collectives that a compression asks for, over a job's wire.

Each has a name of its own: the bucket's first number in the engine's stream of collectives, and the how-manieth of the bucket in
this round. Several workers then need no common order among buckets. From a GPU, payloads go through pinned host memory.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

import torch
from torch import Tensor

from stretto.collectives.message_codec import MessageCodec
from stretto.collectives.plan import Kind
from stretto.collectives.request import Pending
from stretto.collectives.staging import Staging
from stretto.compress.rounds import Collective, Gather, Steps, Sum, SumInHops, Transpose
from stretto.engine.lane import Course
from stretto.job import Job

MOST: Final = 8  # collectives of one bucket in one round
LARGE_BYTES: Final = 1 << 20  # from here on an all-gather goes round the ring, where everybody sends to one neighbour only

Carried = Generator[Pending, None, Tensor]


class Carrier:
    """Runs exchanges of one engine in its job."""

    def __init__(self, job: Job, channel: int, algorithm: str) -> None:
        self._job = job
        self._channel = channel
        self._algorithm = algorithm
        self._staging = Staging(kept_buffers=256)

    def carry(self, steps: Steps, sequence: int, label: str) -> Course:
        """Drive `steps` to its end, each collective with the next number from `sequence` on."""
        result: Tensor | None = None
        for number in range(sequence, sequence + MOST + 1):
            try:
                asked = next(steps) if result is None else steps.send(result)
            except StopIteration:
                return
            result = yield from self._carry_one(asked, (self._channel, number & 0xFFFFFFFF), label)
        raise AssertionError(f"an exchange of more than {MOST} collectives")

    def _carry_one(self, asked: Collective, name: tuple[int, int], label: str) -> Carried:
        if isinstance(asked, Gather):
            return (yield from self._gather(asked, name, label))
        if isinstance(asked, Transpose):
            return (yield from self._run(Kind.ALL_TO_ALL, asked.rows, "pairwise", name, label))
        if isinstance(asked, SumInHops):
            return (yield from self._run(Kind.ALL_REDUCE, asked.tensor, self._algorithm, name, label, asked.hop))
        assert isinstance(asked, Sum)
        return (yield from self._sum(asked.tensor, name, label))

    def _sum(self, tensor: Tensor, name: tuple[int, int], label: str) -> Carried:
        if self._algorithm == "native":
            return self._job.all_reduce(tensor, "sum", "native", label=label)
        algorithm = self._algorithm
        if algorithm == "auto" and self._job.world_size > 1:
            algorithm = self._job.choose(tensor.nbytes)
        return (yield from self._run(Kind.ALL_REDUCE, tensor, algorithm, name, label))

    def _gather(self, asked: Gather, name: tuple[int, int], label: str) -> Carried:
        row, table = asked.row, asked.into
        if table is None:
            table = torch.empty((self._job.world_size, *row.shape), dtype=row.dtype, device=row.device)
        table[self._job.rank] = row
        return (yield from self._run(Kind.ALL_GATHER, table, "ring" if table.nbytes >= LARGE_BYTES else "direct", name, label))

    def _run(
        self, kind: Kind, tensor: Tensor, algorithm: str, name: tuple[int, int], label: str, hop: MessageCodec | None = None
    ) -> Carried:
        if self._job.world_size > 1:
            flat, ready, bring_back = self._staging.lend(tensor.view(-1))
            yield self._job.start(kind, flat, algorithm, name=name, ready=ready, label=label, message_codec=hop)
            if bring_back is not None:
                bring_back()
        return tensor
