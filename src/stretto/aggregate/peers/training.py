"""The base of ways to train in which workers reach each other one to one, and go on without those that die.

It is `OwnWeights` with these differences:

    average, copy_first     among the workers that live (`living.py`): `consensus` and what needs a mean goes on without the dead
    a worker that returns   takes over the model of one that lives (`pulling.py`): weights and buffers, and the number of steps
                            that this one has ended, `job.first_step`. Its optimizer's state begins anew: momenta are few steps
                            old, and those of another worker would be as wrong
    others meanwhile        give it what they have when they end their next step

Subclasses call `begun` of this class first: on return `self.steps` is where this worker begins, and the model holds what it
begins with. `after_step` is where models are given.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from stretto.aggregate.own_weights.training import OwnWeights
from stretto.aggregate.peers.living import LivingWorkers, as_bytes, put_bytes
from stretto.aggregate.peers.network import PeerNetwork, peer_network_of
from stretto.aggregate.peers.pulling import GiveModel, PulledModel, PullMachine, PullModel
from stretto.engine.training import Setting
from stretto.engine.watch import Watch
from stretto.job import Job
from stretto.protocol.loop import Running

if TYPE_CHECKING:
    from stretto.strategy import Strategy

log = logging.getLogger("stretto.peers")


class OnPeers(OwnWeights):
    """See the module's text."""

    goes_on_without = True

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self._network: PeerNetwork | None = peer_network_of(job) if self.engaged else None
        self._living: LivingWorkers | None = None
        self._pulling: tuple[PullMachine, Running] | None = None

    def begun(self) -> None:
        if self._network is None or self._living is not None:
            return
        name = self._setting.name
        self._living = LivingWorkers(self._network, self._job, self, name)
        machine = PullMachine(self._job.rank, self._job.world_size)
        self._pulling = machine, self._network.begin(machine, self, about=f"models of {name}", unsent_bytes=1 << 40)
        if self._network.life:
            self._take_over()

    def _buffers(self) -> list[Tensor]:
        return Watch(self._setting.model).buffers()

    def _take_over(self) -> None:
        assert self._network is not None and self._living is not None and self._pulling is not None
        tensors = [*self.weights.parameters, *self._buffers()]
        asked = self._pulling[1].request(PullModel(sum(each.numel() * each.element_size() for each in tensors)))
        pulled: PulledModel = self._network.wait_for(asked, f"for the weights of {self._setting.name}")
        put_bytes(pulled.values, tensors)
        self._note_written()
        self.steps = self._job.first_step = pulled.steps
        self._ended = [self.steps] * len(self._ended)
        self._living.enter(pulled.meetings + 1)
        self.is_together = False
        log.warning(
            "rank %d goes on with the weights of rank %d after step %d of %s; its optimizer begins anew",
            self._job.rank, pulled.source, pulled.steps, self._setting.name,
        )  # fmt: skip

    def after_step(self, optimizer: Optimizer) -> None:
        before = self.steps
        super().after_step(optimizer)
        if self._pulling is not None and self._pulling[0].waiting and self.steps > before:
            assert self._living is not None
            values = as_bytes([*self.weights.parameters, *self._buffers()])
            self._pulling[1].request(GiveModel(values, self.steps, self._living.count()[0]))

    # -- among those that live ----------------------------------------------------------------------------------------

    def average(self, values: Tensor) -> Tensor:
        return values if self._living is None else self._living.mean(values)[0]

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        if self._living is not None:
            self._living.copy_first(tensors)

    def close(self) -> None:
        super().close()
        if self._network is not None and not self._job.closed:
            if self._living is not None:
                self._living.end()
            if self._pulling is not None:
                self._network.end(self._pulling[1])
        self._living = self._pulling = None
