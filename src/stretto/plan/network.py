"""What the links cost: latency, seconds per byte, and seconds per added byte, from a few real messages.

    alpha    a barrier of ceil(log2 P) rounds of empty messages, divided by its rounds
    beta     a ring all-reduce of `PROBE_BYTES`, minus its latency, divided by the bytes a rank sends
    gamma    adding one array to another in memory, once

The three are what `costs.py` computes with. On one machine beta is mostly the processors' work, on a network mostly the link's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec
import torch

PROBE_BYTES = 1 << 20
PROBES = 5


class LinkEstimate(msgspec.Struct, frozen=True):
    """alpha in seconds, beta and gamma in seconds per byte."""

    alpha: float
    beta: float
    gamma: float


def measure(
    size: int,
    barrier: Callable[[], None],
    ring_all_reduce: Callable[[torch.Tensor], None],
    now: Callable[[], float] = time.perf_counter,
) -> LinkEstimate:
    """Measure with the job's own collectives; every rank must call it. `now` is the clock of the wire they run on."""
    probe = torch.ones(PROBE_BYTES // 4)
    barrier()
    alpha = min(_seconds(barrier, now) for _ in range(PROBES)) / max(1, math.ceil(math.log2(size)))
    whole = min(_seconds(lambda: ring_all_reduce(probe), now) for _ in range(PROBES))
    gamma = _seconds_per_added_byte()
    sent = 2 * PROBE_BYTES * (size - 1) / size
    beta = max(1e-12, (whole - 2 * (size - 1) * alpha - sent / 2 * gamma) / sent)
    return LinkEstimate(alpha, beta, gamma)


def slowest(estimates: list[LinkEstimate]) -> LinkEstimate:
    """A collective is as fast as its slowest member."""
    return LinkEstimate(
        max(one.alpha for one in estimates), max(one.beta for one in estimates), max(one.gamma for one in estimates)
    )


def _seconds(action: Callable[[], None], now: Callable[[], float] = time.perf_counter) -> float:
    begin = now()
    action()
    return now() - begin


def _seconds_per_added_byte() -> float:
    a, b = torch.ones(PROBE_BYTES // 4).numpy(), torch.ones(PROBE_BYTES // 4).numpy()

    def add() -> None:
        a.__iadd__(b)

    return min(_seconds(add) for _ in range(PROBES)) / PROBE_BYTES
