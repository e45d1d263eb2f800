"""Which all-reduce for which size: predicted for every algorithm, then tried out for the best of them.

1. `costs.predict` with measured alpha, beta and gamma ranks the whole catalogue for a size.
2. For the sizes at which a trial is cheap (`TRIAL_S`), the best `FINALISTS` of the ranking and a ring run for real, in turns,
   and the fastest wins: the model knows nothing of caches, of threads that share a processor, or of what a copy costs.
3. Between the sizes tried the nearest one decides; above them all, the prediction (there the bytes decide, and it knows those).
4. Whatever is at most `MARGIN` slower than the best is as good. A few trials on machines that do other things too say no more
   than that, and the prediction overrates latency: alpha has the processors' work in it, which overlaps with the transfer of
   anything large. Among these a ring is taken for what is large, else the first of the ranking. The times are those of one
   all-reduce that has the network to itself, but a training step has several buckets under way. A ring's ranks all send to one
   neighbour at any time, however many rings run; halving and doubling meets another partner in each round, and several at once
   wait for each other's partners. Seen on four lab hosts at 28 Mbit/s, 12.6 MB of gradients in buckets of 4 MiB, as a multiple
   of the time the bytes need: ring 1.08, halving and doubling 1.23; one bucket of 4 MiB by itself: 1.08 and 1.10
   (benchmarks/results/buckets_at_once_*.md).

Rank 0 decides and tells the others: ranks that chose for themselves might choose differently, and hang. The choice is a
short table of size limits, kept for the job.
"""

from __future__ import annotations

import bisect

import msgspec

from stretto.collectives.catalogue import names
from stretto.collectives.plan import Kind
from stretto.plan.costs import LinkCosts, predict

SIZES = tuple(1 << k for k in range(6, 34))  # 64 B to 8 GiB
TRIAL_SIZES = tuple(1 << k for k in (12, 15, 18, 20, 22))  # 4 KiB to 4 MiB
TRIAL_S = 0.015
FINALISTS = 3
MARGIN = 0.2
RING_FROM_BYTES = 1 << 18


class Trial(msgspec.Struct, frozen=True):
    num_bytes: int
    algorithm: str


class Choices(msgspec.Struct, frozen=True):
    """`algorithms[i]` is for tensors of up to `limits[i]` bytes; the last one also for larger ones."""

    limits: list[int]
    algorithms: list[str]
    link: LinkCosts

    def algorithm(self, num_bytes: int) -> str:
        return self.algorithms[min(bisect.bisect_left(self.limits, num_bytes), len(self.algorithms) - 1)]


def ranking(size: int, num_bytes: int, link: LinkCosts, segment_bytes: int, group: int) -> list[tuple[float, str]]:
    """(predicted seconds, algorithm), fastest first; ties in the catalogue's order."""
    predicted = [
        (predict(Kind.ALL_REDUCE, name, size, num_bytes, link, segment_bytes, group=group), name)
        for name in names(Kind.ALL_REDUCE)
    ]
    return sorted(predicted, key=lambda pair: pair[0])


def trials(size: int, link: LinkCosts, segment_bytes: int, group: int = 1) -> list[Trial]:
    """What is worth trying out, in the order in which all ranks do it."""
    wanted = []
    for num_bytes in TRIAL_SIZES:
        predicted = ranking(size, num_bytes, link, segment_bytes, group)
        if predicted[0][0] < TRIAL_S:
            finalists = [name for _, name in predicted[:FINALISTS]]
            wanted += [Trial(num_bytes, name) for name in dict.fromkeys([*finalists, "ring"])]
    return wanted


def choose(
    size: int,
    link: LinkCosts,
    segment_bytes: int,
    group: int = 1,
    tried: dict[Trial, float] | None = None,
) -> Choices:
    """The table for `size` ranks on such links, with `group` consecutive ranks per host."""
    best = [_fastest(size, num_bytes, link, segment_bytes, group, tried or {}) for num_bytes in SIZES]
    limits, algorithms = [], []
    for index, algorithm in enumerate(best):
        if index + 1 == len(best) or best[index + 1] != algorithm:
            limits.append(SIZES[index])
            algorithms.append(algorithm)
    return Choices(limits, algorithms, link)


def _fastest(size: int, num_bytes: int, link: LinkCosts, segment_bytes: int, group: int, tried: dict[Trial, float]) -> str:
    near = [trial for trial in tried if trial.num_bytes == _nearest(num_bytes, tried)]  # in the order of the prediction
    if near and num_bytes <= 2 * near[0].num_bytes:
        return _good_enough(num_bytes, [(tried[trial], trial.algorithm) for trial in near])
    return _good_enough(num_bytes, ranking(size, num_bytes, link, segment_bytes, group))


def _good_enough(num_bytes: int, times: list[tuple[float, str]]) -> str:
    """Among those that are hardly slower than the fastest: a ring for what is large, else the first of (seconds, algorithm)."""
    limit = (1 + MARGIN) * min(seconds for seconds, _ in times)
    good = [name for seconds, name in times if seconds <= limit]
    return "ring" if "ring" in good and num_bytes >= RING_FROM_BYTES else good[0]


def _nearest(num_bytes: int, tried: dict[Trial, float]) -> int | None:
    """The tried size closest in ratio."""
    sizes = sorted({trial.num_bytes for trial in tried})
    return min(sizes, key=lambda tried_bytes: max(tried_bytes / num_bytes, num_bytes / tried_bytes), default=None)
