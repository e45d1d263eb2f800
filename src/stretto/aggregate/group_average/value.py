"""Aggregate by averaging models in groups, other groups each time: nobody waits for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stretto.errors import ConfigurationError
from stretto.sync.counts import check_count

Rule = Literal["paper", "code"]


@dataclass(frozen=True, slots=True)
class GroupAverage:
    """Every worker trains its own copy of the model, and after each step averages it with `size` - 1 others, different ones each
    time.

    With `sync=StaleSynchronous(bound)` it is WAGMA: a group does not wait for members that are still computing, but uses the last
    models that they have posted. Group sizes are powers of two; every `bound`-th round is of all workers, which then have the
    same model. W' = W + step is a worker's model after its step, and Sum the sum over its group:

        in time        W <- Sum / n                     Sum is of n models, W' among them
        late           W <- (Sum + W') / (n + 1)        Sum has an older model of this worker instead of W'
        every `bound`  W <- the mean of all W'

    With `sync=Synchronous()` or `LocalSGD(every)` it is Moshpit SGD: workers form a grid with sides of `size`, which may be any
    number, and are averaged along one of its axes, then along the next. A group waits for all members that are alive.

    `rule`: "paper" is the above. "code" is what was released with the paper: the model from before the step goes into Sum and is
    added once more, W <- (Sum + W) / (n + 1) + step, in time or late. `patience_s`: how long a group waits for a member that is
    still computing. WAGMA then goes on without that member's new model; the default is 0, as in the paper, and with a few
    milliseconds workers of equal speed are mostly in time. On a grid the group then has no average in this round; without
    `patience_s` a member that has not come within `Timeouts.arrive_s` is an error.

    Cost of WAGMA: log2(size) m bytes each way for each worker and round, for a model of m bytes, and log2(P) m every `bound`
    rounds; less than twice that where the number of workers P is no power of two. Memory: 2 + log2(size) models more. On a grid,
    2 (size - 1) / size m bytes in each round.

    References: Li et al., "Breaking (global) barriers in parallel stochastic optimization with wait-avoiding group averaging",
    IEEE TPDS 2021, arXiv:2005.00124; Ryabinin et al., "Moshpit SGD", NeurIPS 2021, arXiv:2103.03239.
    Departs from them: a late worker continues with the round that the others are in, and does not make up for those that it has
    missed, so it takes fewer steps instead of being waited for. One that would be late for the average of all waits for that
    instead of starting another step. The places of workers on the grid never change.
    """

    size: int
    rule: Rule = "paper"
    patience_s: float | None = None

    def __post_init__(self) -> None:
        check_count(
            "GroupAverage", "size", self.size,
            least=2, meaning="the number of workers in a group", instead="for instance GroupAverage(4)",
        )  # fmt: skip
        if self.rule not in ("paper", "code"):
            raise ConfigurationError(
                f"GroupAverage(rule={self.rule!r}): what a late worker's model weighs is one of two rules.\n"
                f'Write "paper" or "code".'
            )
        if self.patience_s is None:
            return
        if isinstance(self.patience_s, bool) or not isinstance(self.patience_s, int | float) or not 0 <= self.patience_s < 60:
            raise ConfigurationError(
                f"GroupAverage(patience_s={self.patience_s!r}): that is for how many seconds a group waits for a member that "
                f"still computes.\nWrite a number from 0, nobody waits, to less than 60, or leave it out."
            )
