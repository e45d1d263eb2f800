"""What the tests of the executor share: one collective on one rank, and the vectors that ranks start with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from stretto.collectives import catalogue
from stretto.collectives.execute import Communicator
from stretto.collectives.plan import Kind
from stretto.collectives.request import DEFAULT_SEGMENT_BYTES, Pending, Request
from stretto.testing import run_threads
from stretto.testing.threads import threads_world
from stretto.timeouts import Timeouts
from stretto.wire.base import Wire

ALL_REDUCES = catalogue.names(Kind.ALL_REDUCE)
PATIENT = Timeouts(arrive_s=30.0)


class Rank:
    """A communicator driven by the caller, with collectives numbered as they are called."""

    def __init__(self, wire: Wire, timeouts: Timeouts = PATIENT, channel: int = 1) -> None:
        self.wire = wire
        self.rank, self.size = wire.rank, wire.world_size
        self.communicator = Communicator(wire, timeouts)
        self.channel = channel
        self.sequences: Counter[int] = Counter()

    def start(
        self,
        kind: Kind,
        algorithm: str,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        root: int = 0,
        group: int = 1,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        sequence: int | None = None,
        channel: int | None = None,
    ) -> Pending:
        plan = catalogue.plan(kind, algorithm, self.rank, self.size, root=root, group=group)
        channel = self.channel if channel is None else channel
        if sequence is None:
            sequence = self.sequences[channel]
            self.sequences[channel] += 1
        return self.communicator.start(Request(plan, tensor, op, channel, sequence, segment_bytes))

    def run(self, kind: Kind, algorithm: str, tensor: torch.Tensor, op: str = "sum", **options: Any) -> torch.Tensor:
        self.start(kind, algorithm, tensor, op, **options).wait()
        return tensor

    def all_reduce(self, algorithm: str, tensor: torch.Tensor, op: str = "sum", **options: Any) -> torch.Tensor:
        return self.run(Kind.ALL_REDUCE, algorithm, tensor, op, **options)

    def barrier(self) -> None:
        self.run(Kind.BARRIER, "dissemination", torch.empty(0, dtype=torch.uint8))


def run_ranks(size: int, program: Callable[[Rank], Any], *, eager: bool = True, timeouts: Timeouts = PATIENT) -> list[Any]:
    """`program(rank)` on the threads wire, with every buffer checked. Wires are closed as ranks return."""
    wires = threads_world(size, check=True, eager=eager)

    def on_wire(wire: Wire) -> Any:
        try:
            return program(Rank(wire, timeouts))
        finally:
            wire.close()

    return run_threads(size, on_wire, wires=wires)


def integers(rank: int, length: int) -> torch.Tensor:
    """Small whole numbers: any order of addition gives the same float."""
    return ((torch.arange(length) * 7 + rank * 13) % 101 - 50).to(torch.float32)


def floats(rank: int, length: int, seed: int = 0) -> torch.Tensor:
    """Numbers of very different size: every order of addition gives other last bits."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randn(length, generator=generator)
    return values * torch.exp2(torch.randint(-12, 12, (length,), generator=generator).float())


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()) if tensor.numel() else b""
