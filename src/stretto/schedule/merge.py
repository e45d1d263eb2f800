"""Which gradients to merge into one transfer, so that the last transfer ends as early as possible.

Gradients i = 1..L in the order in which they become ready, at r_1 <= ... <= r_L, with p_i bytes. One link; a transfer of p bytes
takes a + b p and begins when its last gradient is ready and the link is free. Merging saves start-ups (a) and costs waiting. With
S_i = p_1 + ... + p_i and F_i the earliest end of a plan for the first i gradients,

    F_0 = 0,    F_i = min over j < i of  max(F_j, r_i) + a + b (S_i - S_j)

because the last group of such a plan is j+1..i for some j, it cannot begin before r_i, and whatever comes before it should simply
end early. `exact_merge` computes this.

Several kinds: gradients of different kinds cannot share a transfer, but may be interleaved in the order of readiness. A group
then is a *wave*, which sends one transfer for each of its kinds and pays as many start-ups. With one kind this is the formula
above; with more it is the best plan among those in waves, and an upper bound on the end: the transfer of a kind that is complete
before its wave leaves before it.

Cost:      O(L^2) time, in L operations on whole arrays; O(L) memory.
Invariant: never later than `greedy_merge`, than no merging, or than a single group. Ties are broken for fewer, larger groups.
Reference: Shi, Chu and Li, "MG-WFBP: Efficient data communication for distributed synchronous SGD algorithms", INFOCOM 2019.
Departure: the paper calls its rule, `greedy_merge`, optimal, and it is not. Layers 4 to 1, ready at 0.275, 2.045, 3.235 and
           4.755, with 9.23, 0.0014, 1.73 and 0.024 bytes, a = 2 and b = 0.3: it merges everything and ends at 10.05, where {4},
           {3, 2, 1} ends at 7.57. It is kept here as the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stretto.plan.profile import TransferCost


def exact_merge(
    ready_s: Sequence[float], num_bytes: Sequence[float], cost: TransferCost, kinds: Sequence[str] | None = None
) -> list[range]:
    """Contiguous groups of 0..L-1 whose last transfer ends first. `ready_s` must not decrease. `kinds`: one for each gradient;
    None: all are of one kind."""
    count = len(ready_s)
    kinds = [""] * count if kinds is None else kinds
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(num_bytes, dtype=np.float64))])
    end_s = np.zeros(count + 1)  # F
    begins = [0] * (count + 1)  # where the last group of the best plan for the first i gradients begins
    num_kinds = np.zeros(count)  # at j: of a group that begins there and ends here
    last_of_kind: dict[str, int] = {}
    for i in range(1, count + 1):
        num_kinds[last_of_kind.get(kinds[i - 1], -1) + 1 : i] += 1
        last_of_kind[kinds[i - 1]] = i - 1
        begin = np.maximum(end_s[:i], ready_s[i - 1])
        ends = begin + num_kinds[:i] * cost.start_s + cost.per_byte_s * (sums[i] - sums[:i])
        begins[i] = int(ends.argmin())  # the first of several: the larger group
        end_s[i] = ends[begins[i]]
    groups = []
    while count > 0:
        groups.append(range(begins[count], count))
        count = begins[count]
    return groups[::-1]


def greedy_merge(ready_s: Sequence[float], num_bytes: Sequence[float], cost: TransferCost) -> list[range]:
    """The paper's rule: a group that could begin at s takes the next gradient too if that is ready before s + a, because waiting
    for it costs less than another start-up. One pass suffices, since a merge only changes when later groups begin."""
    groups, begin, link_free = [], 0, 0.0
    for i in range(len(ready_s)):
        start = max(link_free, ready_s[i])
        if i + 1 < len(ready_s) and ready_s[i + 1] - start < cost.start_s:
            continue
        groups.append(range(begin, i + 1))
        link_free = start + cost.seconds(sum(num_bytes[begin : i + 1]))
        begin = i + 1
    return groups


def last_end(
    groups: Sequence[range],
    ready_s: Sequence[float],
    num_bytes: Sequence[float],
    cost: TransferCost,
    kinds: Sequence[str] | None = None,
) -> float:
    """When the last transfer ends, in seconds from the beginning of backward."""
    end = 0.0
    for group in groups:
        num_kinds = 1 if kinds is None else len({kinds[i] for i in group})
        begin = max(end, ready_s[group[-1]])
        end = begin + num_kinds * cost.start_s + cost.per_byte_s * sum(num_bytes[i] for i in group)
    return end
