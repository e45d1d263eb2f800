"""consensus(): the mean of what workers have of their own, in the model of each of them."""

from __future__ import annotations

from types import TracebackType

from torch import nn

from stretto.aggregate.own_weights.bringing_together import OwnValues
from stretto.aggregate.own_weights.training import OwnWeights
from stretto.distributing import engine_of
from stretto.errors import ConfigurationError


class Consensus:
    """What `consensus` gives. `distance` says how far apart the workers' weights were: sqrt(mean_i |x_i - mean|^2)."""

    def __init__(self, distance: float, training: OwnWeights | None, own: OwnValues | None) -> None:
        self.distance = distance
        self._training, self._own = training, own

    def __enter__(self) -> Consensus:
        if self._training is not None:
            if self._own is None or not self._training.holds_mean:
                raise ConfigurationError(
                    "with a Consensus that is over, or after a step: the mean is not in the model any more.\n"
                    "Write `with stretto.consensus(model): ...`, a new one for each block."
                )
            self._training.lend(self._own)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._training is not None and self._own is not None:
            self._training.put_back(self._own)
            self._own = None

    def __repr__(self) -> str:
        return f"Consensus(distance={self.distance:g})"


def consensus(model: nn.Module) -> Consensus:
    """Put the mean of all workers' weights into the model, on every worker. All workers call it, between steps.

    For ways to train in which each worker has weights of its own, such as `sync=LocalSGD(16)`. Floating buffers are averaged too,
    unless the model was distributed with buffers="local". Called plainly the mean stays, which is how training ends, and a step
    that follows begins there. In a `with` block each worker gets its own weights back at the end, which is how one evaluates:

    with stretto.consensus(model) as mean:
        evaluate(model)
    print(mean.distance)             # how far apart they are: sqrt(mean_i |x_i - mean|^2); also stretto.init().ledger has it

    Where replicas are equal, as in synchronous training, nothing is done, and the distance is 0. `stretto.save` needs none: the
    model in a checkpoint is the mean, with each worker's own weights beside it. `stretto.distribute` on a model that is
    distributed begins from the mean as well; `stretto.release`, which sends nothing, leaves each worker's own weights in it.

    Cost: an all-reduce of the weights; memory for three copies of them meanwhile, of which one stays for a `with` block.
    """
    engine = engine_of(model)
    if engine.joining:
        raise ConfigurationError(
            "consensus inside join: a worker that has run out of data does not get here, and the others would wait for it.\n"
            "Call it after the join."
        )
    training = engine.training
    if training.goes_on_without and not isinstance(training, OwnWeights):
        raise ConfigurationError(
            f"consensus of {engine.name}, which trains with {engine.strategy!r}: the model is on the servers, or in memory "
            f"that the workers share, and not the mean of what workers have.\nstretto.save writes what is there."
        )
    engine.flush()
    engine.settle()
    if not engine.engaged or not isinstance(training, OwnWeights) or not training.replicas_differ:
        return Consensus(0.0, None, None)
    return Consensus(*training.take_mean())
