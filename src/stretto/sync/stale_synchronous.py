"""StaleSynchronous: nobody computes more than `bound` clocks ahead of the slowest worker (SSP).

Worker w has a clock c_w that begins at 0 and counts its finished steps. A read at clock c waits until

    min_w c_w >= c - s                s = bound

and sees the updates u of all workers v with these timestamps t:

    all        t <= c - s - 1         the window before that is guaranteed
    own        t <= c - 1             read-my-writes
    some       c - s <= t             whatever has arrived, of anybody

so the model that a gradient is computed on lacks at most s steps of each other worker. s = 0 is `Synchronous`: a step sees all
steps before it. Without a bound it is `Asynchronous`.

That is with servers. With all-reduce the average of a step is applied exactly `bound` steps later
(`aggregate/all_reduce/pipelined.py`), and nobody is ahead of anybody by more than that either.

Cost:      pushes and pulls as for any server; the wait is that of the slowest worker over s + 1 steps instead of over each one.
           It evens out workers that are slow in turn. One that is slow all the time holds up everybody, s steps later.
Invariant: no worker *computes* at a clock more than s ahead of the slowest. It blocks when it reads, not when it ends a step, so
           the counters themselves may be s + 1 apart while one waits.
           Convex problems: regret / T <= 4 F L sqrt(2 (s + 1) P / T) for P workers and T updates.
Reference: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013.
Departs:   updates are steps of an optimizer on the server, in the order of their arrival, where the paper's are sums of
           increments that commute. A worker's own steps are read from the server too, so a read also waits for those to have been
           applied.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.sync.counts import check_count


@dataclass(frozen=True, slots=True)
class StaleSynchronous:
    """A worker reads a model that has all steps of all workers but the last `bound` ones, and all its own. Typical: 1 to 10.

    With all-reduce: the average of a step is applied `bound` steps later, and travels meanwhile. Typical: 1."""

    bound: int

    def __post_init__(self) -> None:
        check_count(
            "StaleSynchronous", "bound", self.bound,
            least=0, meaning="the number of clocks that a worker may be ahead of the slowest",
            instead="for instance StaleSynchronous(3); Asynchronous() has no bound",
        )  # fmt: skip
