"""Aggregate by mixing with a few neighbours after each step."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.aggregate.gossip.graph import MixingGraph
from stretto.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Gossip:
    """Every worker trains its own copy of the model and mixes it with those of its neighbours in `graph`. No worker waits for
    more than its neighbours, and what it sends does not grow with the size of the job. `stretto.consensus(model)` gives the mean.

        Gossip(Ring())                                  D-PSGD: models travel while forward and backward run
        Gossip(OnePeerExponential(), push_sum=True)     SGP: half of the stepped model goes to one worker; with
                                                        `sync=StaleSynchronous(bound)` it may come `bound` steps late
        Gossip(Ring(), pull=0.1), compress=TopK(0.05)   CHOCO: what travels is compressed

    `push_sum`: a mass travels with the values, so that any one-way graph will do, also one whose weights alone do not keep the
    mean. `pull`: how far a worker moves towards its neighbours in a step, above 0 and up to 1; with a codec, the less is sent
    the smaller.

    Cost of a step, for m bytes of float32 weights: m bytes, or their compressed size, to each target; `optimizer.step()` waits
    for messages that have not arrived yet.

    Invariant: mixing never changes the mean over all workers (with push-sum, sum of values / sum of masses), to rounding.
    Failure:   a worker that dies or finishes is left out from the next step on, and all others go on.
    """

    graph: MixingGraph
    push_sum: bool = False
    pull: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.graph, MixingGraph):
            hint = " with parentheses" if isinstance(self.graph, type) and issubclass(self.graph, MixingGraph) else ""
            raise ConfigurationError(
                f"Gossip({self.graph!r}): that is no graph. Write for instance Gossip(Ring()){hint}, or a graph of your own: "
                f"Gossip(Graph(((0, 1), (1, 2), (2, 0))))."
            )
        if not isinstance(self.push_sum, bool):
            raise ConfigurationError(f"Gossip(push_sum={self.push_sum!r}): that is True or False.")
        if isinstance(self.pull, bool) or not isinstance(self.pull, (int, float)) or not 0.0 < self.pull <= 1.0:
            raise ConfigurationError(
                f"Gossip(pull={self.pull!r}): that is how far a worker moves towards its neighbours in a step, above 0 and up to "
                f"1; beyond that differences may grow.\nWrite pull=1.0, or with compress= less, for instance pull=0.1."
            )
        if self.push_sum and self.pull != 1.0:
            raise ConfigurationError(
                f"Gossip(push_sum=True, pull={self.pull!r}): in push-sum a worker gives shares away, and does not move towards "
                f"anybody.\nLeave pull= out."
            )
        object.__setattr__(self, "pull", float(self.pull))

    @property
    def variant(self) -> str:
        """What the way of training depends on."""
        return f"push_sum={self.push_sum}"
