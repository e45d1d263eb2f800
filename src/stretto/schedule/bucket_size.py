"""How many bytes to put into a bucket, from what transfers cost and before any step has been timed.

Few large buckets pay few start-ups; many small ones begin earlier and leave a shorter tail behind backward. By the recurrence of
`merge.py`, with a bucket sent when its last gradient is ready and the link is free, the step of each size can be computed once it
is known when gradients are ready. That is not known here, so it is assumed that they become ready in proportion to their bytes,
in a backward that takes half, once and twice as long as the transfers: beyond that range hardly anything can be gained or lost,
because one of the two hides the other. The size with the least sum of the three steps, each over what computation and transfers
take one after the other, is taken.

Only powers of two are considered. So two measurements of the same network nearly always give the same size, hence the same order
of additions and the same bits.

Cost: a pass over the parameters for each size and backward, some 40 in all.
Departure from DDP, which fills 25 MiB whatever the network: the same where that is best.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stretto.plan.profile import TransferCost
from stretto.plan.transfers import Gradient
from stretto.schedule.readiness import UNPROFILED_FIRST_BYTES, fill_buckets, total_bytes

LEAST_BYTES, LARGEST_BYTES = 1 << 18, 1 << 27
RHOS: Final = (0.5, 1.0, 2.0)  # communication over backward


def bucket_bytes(gradients: Sequence[Gradient], cost: TransferCost, first_bytes: int | None = None) -> int:
    """The size of all buckets but the first, which has `first_bytes`, or at most 1 MiB if that is None."""
    total = total_bytes(gradients)
    if total == 0 or cost.per_byte_s == 0:  # then nothing can overlap
        return LARGEST_BYTES
    sizes = [LEAST_BYTES]
    while sizes[-1] < min(total, LARGEST_BYTES):
        sizes.append(2 * sizes[-1])
    first = UNPROFILED_FIRST_BYTES if first_bytes is None else first_bytes
    return min(sizes, key=lambda size: (round(_three_steps(gradients, min(first, size), size, cost, total), 6), -size))


def _three_steps(gradients: Sequence[Gradient], first_bytes: int, size: int, cost: TransferCost, total: int) -> float:
    buckets = [total_bytes(bucket) for bucket in fill_buckets(gradients, first_bytes, size)]
    transfers_s = cost.per_byte_s * total
    return sum(_end(buckets, transfers_s / rho, cost) / (transfers_s + transfers_s / rho) for rho in RHOS)


def _end(buckets: Sequence[int], backward_s: float, cost: TransferCost) -> float:
    """When the last bucket has arrived, if gradients become ready in proportion to their bytes."""
    end, ready, total = 0.0, 0, max(1, sum(buckets))
    for num_bytes in buckets:
        ready += num_bytes
        end = max(end, backward_s * ready / total) + cost.seconds(num_bytes)
    return end
