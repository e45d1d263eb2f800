"""What a transfer costs in this job: real all-reduces of a few sizes, and a straight line through their times.

`network.py` measures links, from which costs of plans are computed. Schedules need something simpler: seconds of a whole transfer
as `start_s + num_bytes * per_byte_s`, with the algorithm that was asked for or that `auto` would choose, on host memory. For each
size the slowest member's time counts, then the median over a few turns. There are at least two sizes, and they grow until one
takes `LONGEST_S`, so that a slow network is not kept busy for minutes: above that bytes decide, and a straight line knows those.

Seconds per byte are the slope between the two largest sizes, where bytes decide. (A line through all sizes is too flat: what fits
into the buffers of the operating system or of a switch passes faster than the link. Seen at 336 Mbit/s: 3.4e-8 with a line,
3.78e-8 between the two largest, and 3.78e-8 in transfers of 16 MiB.) Given that, `start_s` has the least sum of squares of
*relative* errors: errors of measured times are a share of them, and absolute ones would let the longest transfer decide what it
costs to start one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

import torch

from stretto.collectives import calls
from stretto.collectives.group import Group
from stretto.collectives.plan import Kind
from stretto.collectives.request import DEFAULT_SEGMENT_BYTES
from stretto.plan.auto import as_first, chosen_for
from stretto.plan.costs import predict
from stretto.plan.profile import TransferCost

SIZES: Final = tuple(1 << k for k in (12, 16, 19, 22))  # 4 KiB to 4 MiB
TURNS: Final = 6  # of each size; the first one warms up
LEAST_TURNS: Final = 4  # where each takes long: one that was held up is outvoted by the two others
LONGEST_S: Final = 0.05
LEAST_PER_BYTE_S: Final = 1e-12  # faster than any memory


def transfer_cost(group: Group, what: str, algorithm: str = "auto") -> TransferCost:
    """Measure it. All members must call it together, for one `what`, and all get the first member's result."""
    if group.size == 1:
        return TransferCost(start_s=0.0, per_byte_s=LEAST_PER_BYTE_S)
    choose = chosen_for(group, what).algorithm if algorithm == "auto" else lambda num_bytes: algorithm
    calls.start_barrier(group, f" to measure transfers for {what}").wait()
    apart = group.to_choose()

    def all_reduce(probe: torch.Tensor) -> None:
        apart.run(Kind.ALL_REDUCE, probe, choose(probe.nbytes))

    times = measured(
        lambda: calls.start_barrier(apart).wait(), all_reduce, lambda seconds: max(calls.gather_object(apart, seconds))
    )
    return as_first(apart, fitted(times), TransferCost)


def expected_cost(group: Group, what: str) -> TransferCost:
    """What `transfer_cost` would measure, by the model of costs and the links that the group has measured when it chose its
    algorithms: nothing is sent if it has. All members get the same, also in another job that has loaded these choices: so the
    length of messages, which depends on the wire, is the same in all."""
    table, size, per_host = chosen_for(group, what), group.size, group.workers_per_host

    def seconds(num_bytes: int) -> float:
        name = table.algorithm(num_bytes)
        return predict(Kind.ALL_REDUCE, name, size, num_bytes, table.link, DEFAULT_SEGMENT_BYTES, group=per_host)

    return fitted([(num_bytes, seconds(num_bytes)) for num_bytes in SIZES])


def measured(
    barrier: Callable[[], None],
    all_reduce: Callable[[torch.Tensor], None],
    slowest_of: Callable[[float], float],
    now: Callable[[], float] = time.perf_counter,
) -> list[tuple[int, float]]:
    """Sizes and seconds. `slowest_of` is the maximum over members, so that all stop at the same size; `now` is the clock of the
    wire."""
    found = []
    for num_bytes in SIZES:
        probe = torch.zeros(num_bytes // 4, dtype=torch.float32, device="cpu")
        turns: list[float] = []
        while len(turns) < TURNS and (len(turns) < LEAST_TURNS or min(turns) < LONGEST_S):
            barrier()
            begin = now()
            all_reduce(probe)
            turns.append(slowest_of(now() - begin))
        found.append((num_bytes, median(turns[1:])))
        if found[-1][1] >= LONGEST_S and len(found) > 1:
            break
    return found


def fitted(times: Sequence[tuple[int, float]]) -> TransferCost:
    """The cost that these (bytes, seconds) show, in the order of their sizes."""
    points = [(num_bytes, max(seconds, 1e-9)) for num_bytes, seconds in times]
    (n, t), (last_n, last_t) = points[max(0, len(points) - 2)], points[-1]
    if last_n == n:  # one size: all of its time is taken for that of its bytes
        return TransferCost(start_s=0.0, per_byte_s=max(last_t / last_n, LEAST_PER_BYTE_S))
    slope = max(0.0, min((last_t - t) / (last_n - n), last_t / last_n))
    weight = sum(1 / (t * t) for _, t in points)
    start = sum((t - slope * n) / (t * t) for n, t in points) / weight
    return TransferCost(start_s=max(start, 0.0), per_byte_s=max(slope, LEAST_PER_BYTE_S))
