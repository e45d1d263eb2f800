"""Training by `GroupAverage` and `Synchronous`, or `LocalSGD`: Moshpit SGD. Rows of a grid of workers are averaged, then columns.

    step            every worker's own optimizer
    after_step      in round t, after every `every`-th step: the model becomes the mean over the group of axis t mod d (`grid.py`)

The members of a group meet (`peers/meeting.py`), and all that take part end with the same bits, or none has the mean; so whoever
dies is left out, and nothing half received is averaged. A member that is alive is waited for. If one has not come within
`patience_s`, the group has no average in this round, which is not counted, and its members keep their models. That holds for
lateness alone: without `patience_s`, and whatever else goes wrong, the step raises.

What is averaged is the parameters and, with buffers="broadcast", floating buffers. Staleness is 0.

Cost:  2 m (n - 1) / n bytes each way for each worker and round, in groups of n and with models of m bytes. Memory: up to four
       models more, in host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.group_average.admission import check_grid, check_grid_world
from stretto.aggregate.group_average.among import AmongMembers
from stretto.aggregate.group_average.averaged import averaged_buffers
from stretto.aggregate.group_average.grid import group_of, num_axes, rounds_on
from stretto.aggregate.group_average.value import GroupAverage
from stretto.aggregate.own_weights import admission
from stretto.aggregate.own_weights.flat_weights import FlatWeights
from stretto.aggregate.peers.living import UNSENT_BYTES
from stretto.aggregate.peers.meeting import Meet, MeetingLapsed, MeetingMachine, Met, TakePart
from stretto.aggregate.peers.training import OnPeers
from stretto.engine.training import Setting
from stretto.errors import StrettoError
from stretto.job import Job
from stretto.launching.peers import ranks_text
from stretto.protocol.loop import Running
from stretto.sync.local_sgd import LocalSGD

if TYPE_CHECKING:
    from stretto.strategy import Strategy

log = logging.getLogger("stretto.peers")


class GridAverage(OnPeers):
    """`GroupAverage` + `Synchronous` or `LocalSGD` + `Replicated`."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        assert isinstance(strategy.aggregate, GroupAverage)
        self._value = strategy.aggregate
        self._every = strategy.sync.every if isinstance(strategy.sync, LocalSGD) else 1
        axes = num_axes(self._value.size, job.world_size)
        self._groups = [group_of(job.rank, axis, self._value.size, job.world_size) for axis in range(axes)]
        self._meetings: list[Running] = []  # one for each axis
        self._vector: FlatWeights | None = None  # parameters, and buffers that are averaged with them
        self._has_warned = False  # of a round without an average
        if self.engaged:
            self.state_text = f"aggregate={strategy.aggregate!r}, sync={strategy.sync!r}"

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        check_grid(strategy)

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        admission.check_model(model, optimizers, strategy)
        check_grid_world(strategy, job.world_size)

    def device_of_weights(self) -> torch.device:
        return torch.device("cpu")

    # -- meetings -----------------------------------------------------------------------------------------------------

    def begun(self) -> None:
        super().begun()
        if self._network is None:
            return
        self._end()
        self._vector = FlatWeights([*self._named, *averaged_buffers(self._setting)], self.device_of_weights())
        for axis, members in enumerate(self._groups):
            number = members.index(self._job.rank)
            machine = AmongMembers(MeetingMachine(number, len(members), self._network.life, members), members, self._count)
            about = f"{self._strategy.aggregate!r} of {self._setting.name}, axis {axis}"
            self._meetings.append(self._network.begin(machine, self, about=about, unsent_bytes=UNSENT_BYTES))
        if self._network.life:
            self._take_up()

    def _take_up(self) -> None:
        """A worker that has come back takes part from the round on that follows those of its steps."""
        assert self._network is not None
        rounds = self.steps // self._every
        for axis, running in enumerate(self._meetings):
            enter = TakePart(rounds_on(axis, len(self._groups), rounds) + 1)
            self._network.wait_for(running.request(enter), "to let it in", self._job.timeouts.connect_s)

    def begin_anew(self) -> None:
        """Meetings are counted from the beginning of training, also after `stretto.load`."""
        loaded = self._loaded
        super().begin_anew()
        if loaded and self._named and self._network is not None:
            self.begun()
            self._take_up()

    def _count(self, peer: int, sent: int, received: int) -> None:
        self._job.ledger.count_message("group average", peer, sent, received)

    def stepped(self, step: int) -> None:
        if step % self._every:
            return
        axis = (step // self._every - 1) % len(self._groups)
        if self._vector is not None and len(self._groups[axis]) > 1:
            try:
                mean = self._mean(axis, self._vector.read())
            except MeetingLapsed as lapsed:
                self._do_without(axis, lapsed)
                return
            self._vector.write(mean)
        self._job.ledger.count_round()

    def _do_without(self, axis: int, lapsed: MeetingLapsed) -> None:
        """Somebody of the group on that axis has not come in time."""
        group = ranks_text(self._groups[axis])
        if self._value.patience_s is None:
            raise StrettoError(f"in the group of {group}: {lapsed}") from lapsed
        level = logging.INFO if self._has_warned else logging.WARNING
        self._has_warned = True
        log.log(
            level, "%s: no average in the group of %s, whose members keep their models: %s", self._setting.name, group, lapsed
        )

    def _mean(self, axis: int, values: Tensor) -> Tensor:
        """Over the group on that axis."""
        assert self._network is not None
        arrive_s = self._job.timeouts.arrive_s
        patience_s = arrive_s if self._value.patience_s is None else self._value.patience_s
        answer = self._meetings[axis].request(Meet(values.numpy(), patience_s, None, f" of {self._setting.name}"))
        begin_ns = 0 if self._job.tracer is None else self._job.tracer.now()
        try:
            # The meeting itself finds out who is late. This limit leaves time to find that a silent worker is lost.
            limit_s = max(patience_s, arrive_s) + 2 * self._job.timeouts.silence_s
            met: Met = self._network.wait_for(answer, "for their models", limit_s)
        finally:
            if self._job.tracer is not None:
                self._job.tracer.span("wait", "for the models of a group", begin_ns)
        return torch.from_numpy(met.vector)

    def close(self) -> None:
        self._end()
        super().close()

    def _end(self) -> None:
        """Others do without this worker."""
        meetings, self._meetings = self._meetings, []
        if self._network is not None and not self._job.closed:
            for running in meetings:
                self._network.end(running)
