"""In which order buckets leave, where all workers need the same: at stage 2, where memory is waited for.

A bucket that is full leaves when all before it have left. So an order that is not that in which they fill keeps gradients whole,
and nothing overlaps: a layer that no backward reaches, a hook of the user's that has to see gradients, or layers that are
registered in another order than they are called in. So the order is learned:

    round 1                     buckets leave by their numbers: the last parameters first
    after rounds 1, 2, 4, 8...  rank 0 tells the others in which order its own were full; those that were not come last

Cost:      8 bytes for each bucket, at the ends of those rounds.
Invariant: all workers have the same order in the same round. Which rounds these are follows from their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from stretto.aggregate.zero.bucket import SlicedBucket
from stretto.errors import RankMismatch


class Turns:
    """The order in which the buckets of one model leave. `give` replaces a tensor by rank 0's, on all workers together."""

    def __init__(self, give: Callable[[Tensor], Tensor]) -> None:
        self._give = give
        self.arrange([])

    def arrange(self, buckets: Sequence[SlicedBucket]) -> None:
        """These are the buckets from now on."""
        self._buckets = list(buckets)
        self.order = list(buckets)
        self._rounds = 0  # that all workers have closed since
        self.begin()

    def begin(self) -> None:
        """A round begins."""
        self._filled: dict[SlicedBucket, None] = {}  # in the order in which they were full
        self._num_left = 0

    def after(self, bucket: SlicedBucket) -> Iterator[SlicedBucket]:
        """The buckets whose turn it is, now that this one is full."""
        self._filled[bucket] = None
        while self._num_left < len(self.order) and self.order[self._num_left] in self._filled:
            self._num_left += 1
            yield self.order[self._num_left - 1]

    def round_ended(self) -> None:
        """All workers have closed a round, and call this."""
        self._rounds += 1
        if len(self.order) > 1 and self._rounds & (self._rounds - 1) == 0:
            place = {bucket: number for number, bucket in enumerate(self._buckets)}
            mine = [*self._filled, *(bucket for bucket in self.order if bucket not in self._filled)]
            numbers = self._give(torch.tensor([place[bucket] for bucket in mine], dtype=torch.int64, device="cpu")).tolist()
            if sorted(numbers) != list(range(len(numbers))):
                raise RankMismatch(
                    "rank 0 has told an order of buckets that is none. All workers need the same version of stretto."
                )
            self.order = [self._buckets[number] for number in numbers]
        self.begin()
