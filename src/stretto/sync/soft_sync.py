"""SoftSync: the server updates when it has so many gradients, whoever they are from (n-softsync).

Of P workers, with c = max(1, floor(P / n)) gradients g_l that were computed tau_l updates ago,

    w <- w - (rate_0 / c) sum_l a_l g_l,        a_l = 1 / tau_l   for tau_l > 0,   1 otherwise

Workers do not wait for each other: one may give two of the c gradients, and 1-softsync is not synchronous. n = P is
`Asynchronous` with `staleness_aware=True`.

Cost:      an update for each c pushes, so replication and the optimizer cost 1/c of what they do in `Asynchronous`.
Invariant: each update has exactly c gradients, each gradient is in one update. The mean of tau is about n; tau > 2 n is rare
           (in the paper one gradient of 10,000), and for n = 1 it is 0, 1 or 2.
Reference: Zhang, Gupta, Lian and Liu, "Staleness-aware async-SGD for distributed deep learning", IJCAI 2016, arXiv:1511.05950.
Departs:   the optimizer is given the mean of the g_l weighted by a_l, at the rate rate_0 (sum_l a_l) / c. For SGD without
           momentum that is the formula above; for Adam, which the size of a gradient does not change, it keeps its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.sync.counts import check_count


@dataclass(frozen=True, slots=True)
class SoftSync:
    """One update for each P / `n` gradients of any of P workers, each counting 1 / its staleness. A larger `n`: fewer, staler
    ones."""

    n: int

    def __post_init__(self) -> None:
        check_count(
            "SoftSync", "n", self.n,
            least=1, meaning="the number of updates for as many gradients as there are workers",
            instead="SoftSync(1) for updates from as many gradients as there are workers, SoftSync(2) for half as many",
        )  # fmt: skip
