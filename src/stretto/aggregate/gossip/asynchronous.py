"""Training by asynchronous gossip (AD-PSGD): while a worker computes, its model is averaged with those of its neighbours.

    forward, step    on the values that the model held when the last step ended                      p -> p + d
    after_step       x <- x + d, in the machine; the model becomes x, which has been averaged meanwhile (`pairwise.py`)

The machine runs in the communication thread of the workers' own network, and answers neighbours while this worker computes, or
stands still. A step waits only for that thread, never for another worker: a slow one slows nobody down.

What the program writes into the model between two steps is part of d. Buffers (the statistics of a BatchNorm) are each worker's
own until `stretto.consensus`. Optimizer state is each worker's own.

Saving, `stretto.consensus` and releasing settle first: a worker takes part in no averaging from then to its next step, so the
mean of what workers have then is the mean of what they had.

A worker that comes back takes over the model of one that lives, and is averaged with from then on.

Staleness in the ledger: for each step the averagings that changed x while it was computed.

Cost: in each step two passes over the model more than `pairwise.py` says, and in all six vectors of m bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.gossip import admission
from stretto.aggregate.gossip.pairwise import PairwiseAveraging, ReplaceModel, SettlePairs, TakeStep
from stretto.aggregate.peers.training import OnPeers
from stretto.engine.training import Setting
from stretto.job import Job
from stretto.protocol.loop import Running

if TYPE_CHECKING:
    from stretto.strategy import Strategy

CPU = torch.device("cpu")


class AsynchronousGossip(OnPeers):
    """`Gossip` + `Asynchronous` + `Replicated`."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self._graph = admission.gossip_of(strategy).graph
        self._running: Running | None = None
        self.state_text = f"aggregate={strategy.aggregate!r}, sync={strategy.sync!r}" if self.engaged else None

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        admission.check_asynchronous(strategy)

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        super().check(model, optimizers, strategy, job)
        admission.check_graph(admission.gossip_of(strategy), job.world_size)

    def device_of_weights(self) -> torch.device:
        return CPU

    # -- steps --------------------------------------------------------------------------------------------------------

    def begun(self) -> None:
        super().begun()
        self._begin_averaging()

    def _begin_averaging(self) -> None:
        """On all workers together: what was under way among them is forgotten."""
        if self._network is None:
            return
        if self._running is not None:
            self._network.end(self._running)
        ledger = self._job.ledger
        self._before = self.weights.read()
        self._after = self.weights.empty()
        self._is_rounded = any(parameter.dtype is not torch.float32 for parameter in self.weights.parameters)
        machine = PairwiseAveraging(
            self._job.rank, self._job.world_size, self._graph, self._before.numpy().copy(), self._network.life, self.steps,
            lambda peer, sent, received: ledger.count_message("gossip", peer, sent, received),
        )  # fmt: skip
        about = f"{self._setting.name} by {self._strategy.aggregate!r}, asynchronously"
        unsent_bytes = 8 * self.weights.numel + (64 << 20)
        self._running = self._network.begin(machine, self, about=about, unsent_bytes=unsent_bytes)

    def stepped(self, step: int) -> None:
        moved = self.weights.read(self._after).sub_(self._before)
        staleness = self._ask(TakeStep(moved.numpy(), self._before.numpy()), "to take a step")
        self._hold(self._before)
        self._job.ledger.count_round(staleness=staleness)

    def _hold(self, values: Tensor) -> None:
        self.weights.write(values)
        if self._is_rounded:
            self.weights.read(self._before)

    def _ask(self, request: object, what: str) -> Any:
        assert self._network is not None and self._running is not None
        return self._network.wait_for(self._running.request(request), what)

    # -- between steps ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Averagings that began after the last step are in the model then."""
        if self._running is None:
            return
        written = self.weights.read(self._after).sub_(self._before)  # by the program, since the last step
        self._ask(TakeStep(written.numpy(), self._before.numpy(), ends=False), "to take what was written")
        self._before.copy_(torch.from_numpy(self._ask(SettlePairs(), "to end its averaging")))
        self._hold(self._before)

    def moved(self) -> None:
        """The mean of all is where the next step begins."""
        self.weights.read(self._before)
        self._ask(ReplaceModel(self._before.numpy().copy()), "to go on from the mean")

    def begin_anew(self) -> None:
        loaded = self._loaded
        super().begin_anew()
        if loaded and self._named:
            self._begin_averaging()

    def close(self) -> None:
        super().close()
        if self._network is not None and self._running is not None and not self._job.closed:
            self._network.end(self._running)
        self._running = None
