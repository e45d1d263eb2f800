"""About the k largest of n values, by a threshold that is estimated from a sample.

Sorting a million magnitudes to find a thousand costs more than sending them. So: look at every s-th value from a random start
(1 % of them, but 1024 or more, and as many as have 8 above the threshold on average), take the threshold that the same share of
the sample exceeds, and collect what reaches it. If that is less than 0.8 k, lower the threshold by a fifth and collect again, at
most 10 times; if it is more than k, take the k largest of what was collected.

s is odd: an even one would meet the same columns of a matrix again and again.
Few values (half of them or more would be sampled) are sorted.

Invariant: at most k positions, ascending; every value collected is at least as large as every value left behind, except that
           among equals any may be taken. Zeros are never selected.
Reference: Lin et al., "Deep Gradient Compression", ICLR 2018, section 5. Departs from it: the threshold is lowered as in the
           authors' code, of which the paper says nothing; and k is a bound, not an aim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.compress.backend import accelerated
from stretto.compress.random_numbers import mix

SAMPLED, LEAST, LEAST_ABOVE = 0.01, 1024, 8
ENOUGH, LOWER, TRIES = 0.8, 0.8, 10


def select_largest(values: Tensor, k: int, key: int) -> Tensor:
    """Positions in `values` (float32, flat). `key`: a random number, for the start of the sample."""
    wanted = max(SAMPLED * len(values), LEAST, LEAST_ABOVE * len(values) / k)
    if 2 * wanted >= len(values):
        return _largest_of(values, reaching(values, values.new_zeros(1)), k)
    stride = int(len(values) / wanted) | 1
    sample = values[mix(key) % stride :: stride].abs()
    above = -(-len(sample) * k // len(values))
    threshold = torch.topk(sample, above).values[-1:]
    return _largest_of(values, _enough_reaching(values, threshold, ENOUGH * k), k)


def _enough_reaching(values: Tensor, threshold: Tensor, enough: float) -> Tensor:
    for _ in range(TRIES):
        if threshold == 0 or count_reaching(values, threshold) >= enough:
            break
        threshold = threshold * LOWER
    return reaching(values, threshold)


def _largest_of(values: Tensor, positions: Tensor, k: int) -> Tensor:
    if len(positions) <= k:
        return positions
    return positions[torch.topk(values[positions].abs(), k, sorted=False).indices.sort().values]


@accelerated(cpu="top_k_cpu.count_reaching")
def count_reaching(values: Tensor, threshold: Tensor) -> int:
    return int(torch.count_nonzero((values.abs() >= threshold) & (values != 0)))


@accelerated(cpu="top_k_cpu.reaching")
def reaching(values: Tensor, threshold: Tensor) -> Tensor:
    """Where |value| >= threshold and the value is not zero."""
    return ((values.abs() >= threshold) & (values != 0)).nonzero().flatten()
