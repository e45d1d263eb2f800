"""BackupWorkers: the first N gradients of N + b workers make the step; those that come later are thrown away.

Every gradient carries the step t it was computed in. The server updates with the first N of step t,

    w_(t+1) = U(w_t, (1/N) sum of the first N gradients of step t),        N = P - b,   b = spare

and discards what is late or of an older step; its sender is told to go on with step t + 1.

Cost:      a step takes as long as the N-th fastest of P workers in it, instead of the slowest; b / P of all gradients are
           computed in vain.
Invariant: each update is the mean of exactly N gradients, all of one step: staleness 0, as in `Synchronous` with N workers.
Reference: Chen, Pan, Monga, Bengio and Jozefowicz, "Revisiting distributed synchronous SGD", arXiv:1604.00981. It has b at about
           4 to 5 % of the workers.
Departs:   a worker takes as many steps as its loop says, where theirs go on until the model has had so many. One that has fallen
           behind goes on from the current version without waiting; of two gradients for one version the second is discarded.
Limits:    a worker that is always late never counts, and neither does its data: let every worker draw from all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.sync.counts import check_count


@dataclass(frozen=True, slots=True)
class BackupWorkers:
    """Synchronous steps that do not wait for the `spare` slowest workers of each."""

    spare: int

    def __post_init__(self) -> None:
        check_count(
            "BackupWorkers", "spare", self.spare,
            least=1, meaning="the number of workers that a step does not wait for",
            instead="for instance BackupWorkers(1); Synchronous() waits for all workers",
        )  # fmt: skip
