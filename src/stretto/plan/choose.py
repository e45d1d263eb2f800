"""Which all-reduce for which size: argmin over the catalogue of the predicted time.

The prediction is `costs.predict` with measured alpha, beta and gamma. Rank 0 decides and tells the others (ranks that
measured for themselves might choose differently, and hang). The choice is a short table of size limits, kept for the job.
"""

from __future__ import annotations

import bisect

import msgspec

from stretto.collectives.catalogue import names
from stretto.collectives.plan import Kind
from stretto.plan.costs import predict
from stretto.plan.network import LinkEstimate

SIZES = tuple(1 << k for k in range(6, 34))  # 64 B to 8 GiB


class Choices(msgspec.Struct, frozen=True):
    """`algorithms[i]` is for tensors of up to `limits[i]` bytes; the last one also for larger ones."""

    limits: list[int]
    algorithms: list[str]
    link: LinkEstimate

    def algorithm(self, num_bytes: int) -> str:
        return self.algorithms[min(bisect.bisect_left(self.limits, num_bytes), len(self.algorithms) - 1)]


def choose(size: int, link: LinkEstimate, segment_bytes: int, group: int = 1) -> Choices:
    """The table for `size` ranks on such links, with `group` consecutive ranks per host."""
    best = [_fastest(size, num_bytes, link, segment_bytes, group) for num_bytes in SIZES]
    limits, algorithms = [], []
    for index, algorithm in enumerate(best):
        if index + 1 == len(best) or best[index + 1] != algorithm:
            limits.append(SIZES[index])
            algorithms.append(algorithm)
    return Choices(limits, algorithms, link)


def _fastest(size: int, num_bytes: int, link: LinkEstimate, segment_bytes: int, group: int) -> str:
    def seconds(algorithm: str) -> float:
        return predict(
            Kind.ALL_REDUCE, algorithm, size, num_bytes, link.alpha, link.beta, link.gamma, segment_bytes, group=group
        )

    return min(names(Kind.ALL_REDUCE), key=seconds)  # ties go to the first in the catalogue: the ring
