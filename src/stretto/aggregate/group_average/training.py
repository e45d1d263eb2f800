"""Training by `GroupAverage` and `StaleSynchronous`: WAGMA. After every step workers average their models in groups.

    step            every worker's own optimizer                                  W' = W + step
    after_step      W' is contributed, and W becomes what the rule makes of the average that comes back (`rules.py`)

The machine runs in the communication thread of the workers' own network (`aggregate/peers/`), and answers for this worker
while that computes. So a step waits for messages: of its group, and in every `bound`-th round of all. It waits for a program only
there, and only if that has become slow just then (`machine.py`).

What is averaged is the parameters and, with buffers="broadcast", floating buffers (the statistics of a BatchNorm). Other buffers
and the optimizer's state are each worker's own.

Staleness in the ledger: for each step, the rounds that have ended while it was computed, at most `bound` - 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.group_average.admission import check_group_average, check_world
from stretto.aggregate.group_average.averaged import averaged_buffers
from stretto.aggregate.group_average.butterfly import Values
from stretto.aggregate.group_average.cube import num_bits
from stretto.aggregate.group_average.machine import (
    MAX_KEPT,
    Contribute,
    EnterRounds,
    Replace,
    Resume,
    RoundAverage,
    Settle,
    WaitAvoidingGroups,
)
from stretto.aggregate.group_average.rules import merge
from stretto.aggregate.group_average.value import GroupAverage
from stretto.aggregate.own_weights import admission
from stretto.aggregate.own_weights.bringing_together import OwnValues
from stretto.aggregate.own_weights.flat_weights import FlatWeights
from stretto.aggregate.own_weights.training import OwnWeights
from stretto.aggregate.peers.training import OnPeers
from stretto.engine.training import Setting
from stretto.errors import StrettoError
from stretto.job import Job
from stretto.protocol.loop import Running
from stretto.sync.stale_synchronous import StaleSynchronous

if TYPE_CHECKING:
    from stretto.strategy import Strategy


class WaitAvoidingAverage(OnPeers):
    """`GroupAverage` + `StaleSynchronous` + `Replicated`."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        assert isinstance(strategy.aggregate, GroupAverage) and isinstance(strategy.sync, StaleSynchronous)
        self._value, self._every = strategy.aggregate, strategy.sync.bound
        self._running: Running | None = None
        self._vector: FlatWeights | None = None  # parameters, and buffers that are averaged with them
        self._before: Values | None = None  # what it was when the step began
        self._round = 1  # to begin with
        self._has_entered = False  # the rounds of the others, if this worker has come back
        if self.engaged:
            self.state_text = f"aggregate={strategy.aggregate!r}, sync={strategy.sync!r}"

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        check_group_average(strategy)

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        admission.check_model(model, optimizers, strategy)
        check_world(strategy, job.world_size)

    def device_of_weights(self) -> torch.device:
        return torch.device("cpu")

    # -- rounds -------------------------------------------------------------------------------------------------------

    def begun(self) -> None:
        super().begun()
        if self._network is None:
            return
        self._end()
        self._vector = FlatWeights([*self._named, *averaged_buffers(self._setting)], self.device_of_weights())
        self._before = self._read()
        machine = WaitAvoidingGroups(
            self._job.rank, self._job.world_size,
            group_size=self._value.size, global_every=self._every, model=self._before, first_round=self._round,
            patience_s=self._value.patience_s or 0.0, count=self._count,
        )  # fmt: skip
        kept = 4 * self._vector.numel * num_bits(self._job.world_size) * MAX_KEPT
        self._running = self._network.begin(
            machine, self, about=f"{self._strategy.aggregate!r} of {self._setting.name}", unsent_bytes=kept + (64 << 20)
        )
        if self._network.life and not self._has_entered:
            self._ask(EnterRounds(), "in which round they are")
        self._has_entered = True

    def _count(self, peer: int, sent: int, received: int) -> None:
        self._job.ledger.count_message("group average", peer, sent, received)

    def _read(self) -> Values:
        assert self._vector is not None
        values: Values = self._vector.read().numpy()
        return values

    def stepped(self, step: int) -> None:
        assert self._vector is not None and self._before is not None
        stepped = self._read()
        average = self._ask(Contribute(stepped, self._before if self._value.rule == "code" else None), "for an average of models")
        assert isinstance(average, RoundAverage)
        new = merge(self._value.rule, average, self._before, stepped)
        if new is not stepped:
            self._vector.write(torch.from_numpy(new))
        self._before = new
        self._job.ledger.count_round(staleness=average.missed)
        self.is_together = average.is_global and step > 0

    def take_mean(self) -> tuple[float, OwnWeights, OwnValues]:
        """Others that step before this worker does are to average with the mean, not with what this worker had before it."""
        taken = super().take_mean()
        self._post()
        return taken

    def put_back(self, own: OwnValues) -> None:
        super().put_back(own)
        with contextlib.suppress(StrettoError):  # whatever the block has raised counts for more
            self._post()

    def _post(self) -> None:
        if self._running is not None:
            self._ask(Replace(self._read()), "to take another model")

    def moved(self) -> None:
        self._before = self._read()

    def settle(self) -> None:
        if self._running is not None:
            self._round = int(self._ask(Settle(), "to end their rounds"))

    def weighted_mean(self, values: Tensor) -> Tensor:
        """All programs are here once there is a mean, and rounds of all may wait for them again. `meet` holds another meeting
        after this one, so that nobody steps before all have resumed."""
        mean = self.average(values)
        if self._running is not None:
            self._ask(Resume(), "to go on")
        return mean

    def _ask(self, request: object, what: str) -> Any:
        assert self._network is not None and self._running is not None
        begin_ns = 0 if self._job.tracer is None else self._job.tracer.now()
        try:
            return self._network.wait_for(self._running.request(request), what)
        finally:
            if self._job.tracer is not None:
                self._job.tracer.span("wait", what, begin_ns)

    # -- what is remembered -------------------------------------------------------------------------------------------

    def own_extra(self) -> dict[str, Tensor]:
        return {"round": torch.tensor(self._round, dtype=torch.int64)}

    def load_own_extra(self, saved: Mapping[str, Tensor]) -> None:
        self._round = int(saved["round"]) if "round" in saved else 1

    def begin_anew(self) -> None:
        """All workers go on with the round that the first of them has saved."""
        loaded = self._loaded
        if not loaded:
            self._round = 1
        super().begin_anew()
        if loaded and self._named:
            number = torch.tensor(self._round, dtype=torch.int64)
            self.copy_first([number])
            self._round = int(number)
            self.begun()

    def close(self) -> None:
        self._end()
        super().close()

    def _end(self) -> None:
        """Others need what they have asked for; after that they do without this worker."""
        running, self._running = self._running, None
        if running is not None and self._network is not None and not self._job.closed:
            with contextlib.suppress(StrettoError):
                self._network.wait_for(running.request(Settle()), "for what they still need", self._job.timeouts.leave_s)
            self._network.end(running)
