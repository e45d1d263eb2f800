"""What the links cost: latency, seconds per byte, and seconds per added byte, from a few real messages.

    alpha    a barrier of ceil(log2 P) rounds of empty messages, divided by its rounds
    beta     a ring all-reduce, minus its latency, divided by the bytes a rank sends; it grows from `LEAST_BYTES` until it takes
             `PROBE_S` or has `PROBE_BYTES`, so that a slow link is not kept busy for minutes
    gamma    adding one array to another in memory, once

The three are what `costs.py` computes with. On one machine beta is mostly the processors' work, on a network mostly the link's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch

from stretto.plan.costs import LinkCosts

LEAST_BYTES = 1 << 14
PROBE_BYTES = 1 << 20
PROBE_S = 0.02
PROBES = 4


def measure(
    size: int,
    barrier: Callable[[], None],
    ring_all_reduce: Callable[[torch.Tensor], None],
    slowest_of: Callable[[float], float],
    now: Callable[[], float] = time.perf_counter,
) -> LinkCosts:
    """Measure with the job's own collectives; every rank must call it.

    `slowest_of` is the maximum over ranks (all must agree on when to stop); `now` is the clock of the wire they run on.
    """
    barrier()
    alpha = min(_seconds(barrier, now) for _ in range(PROBES)) / max(1, math.ceil(math.log2(size)))
    num_bytes, whole = LEAST_BYTES, 0.0
    while whole < PROBE_S:
        probe = torch.ones(num_bytes // 4, dtype=torch.float32, device="cpu")
        times = [slowest_of(_seconds(lambda probe=probe: ring_all_reduce(probe), now))]  # type: ignore[misc]
        if times[0] < PROBE_S:
            times += [_seconds(lambda probe=probe: ring_all_reduce(probe), now) for _ in range(PROBES - 1)]  # type: ignore[misc]
        whole = slowest_of(min(times))
        if num_bytes >= PROBE_BYTES:
            break
        num_bytes *= 8
    gamma = _seconds_per_added_byte()
    sent = 2 * probe.numel() * 4 * (size - 1) / size
    beta = max(1e-12, (whole - 2 * (size - 1) * alpha - sent / 2 * gamma) / sent)
    return LinkCosts(alpha, beta, gamma)


def slowest(estimates: list[LinkCosts]) -> LinkCosts:
    """A collective is as fast as its slowest member."""
    return LinkCosts(max(one.alpha for one in estimates), max(one.beta for one in estimates), max(one.gamma for one in estimates))


def _seconds(action: Callable[[], None], now: Callable[[], float] = time.perf_counter) -> float:
    begin = now()
    action()
    return now() - begin


def _seconds_per_added_byte() -> float:
    a, b = np.ones(PROBE_BYTES // 4, np.float32), np.ones(PROBE_BYTES // 4, np.float32)

    def add() -> None:
        a.__iadd__(b)

    return min(_seconds(add) for _ in range(PROBES)) / PROBE_BYTES
