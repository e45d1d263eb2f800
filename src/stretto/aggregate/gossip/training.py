"""Training by gossip: every worker steps a copy of its own, and each step ends with what its neighbours have sent.

    `NeighbourGossip`    before a step's forward its weights leave; after the step x_i += sum_j W_ij (x_j - x_i) of those weights;
                         compressed: the same with public copies
    `PushSumGossip`      after a step its weights leave; the step ends with what has come, which the next forward reads

What is computed is in `averaging.py`, `compressed.py` and `push_sum.py`, in the thread that trains; `exchange.py` moves it.

A forward that a backward may follow lets weights leave; where the model's forward is not called, the step does, and nothing
overlaps. Values that the program writes into the model between the two are part of this step, and travel in the next one.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.aggregate.gossip import admission
from stretto.aggregate.gossip.averaging import NeighbourAverage
from stretto.aggregate.gossip.compressed import CompressedAverage
from stretto.aggregate.gossip.exchange import (
    Arrived,
    EnteredSteps,
    EnterSteps,
    Missing,
    NeighbourExchange,
    Outgoing,
    Post,
    Take,
    Taken,
)
from stretto.aggregate.gossip.mixing import Weights
from stretto.aggregate.gossip.push_sum import PushSum
from stretto.aggregate.peers.training import OnPeers
from stretto.compress.buffer_pool import BufferPool
from stretto.compress.codec import Codec
from stretto.compress.layout import Blocks, Layout
from stretto.engine.training import Setting
from stretto.engine.watch import Watch
from stretto.errors import WireTimeout
from stretto.job import Job
from stretto.protocol.loop import Running
from stretto.sync.stale_synchronous import StaleSynchronous

if TYPE_CHECKING:
    from stretto.strategy import Strategy

log = logging.getLogger("stretto.gossip")

CPU = torch.device("cpu")
MASS = "mass"
VALUES = "push-sum values"


class GossipTraining(OnPeers):
    """What its two kinds have in common: the graph, the exchange, and waiting."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self._gossip = admission.gossip_of(strategy)
        self._codec = strategy.compress if isinstance(strategy.compress, Codec) else None
        self._late = strategy.sync.bound if isinstance(strategy.sync, StaleSynchronous) else 0
        self.state_text = f"aggregate={strategy.aggregate!r}, compress={strategy.compress!r}" if self.engaged else None
        self._exchange: Running | None = None
        self._gone: frozenset[int] = frozenset()
        self._left = 0  # the step whose weights have left last
        self._pool = BufferPool()
        self._last_weights: tuple[int, Weights] | None = None  # of a step

    @classmethod
    def check_strategy(cls, strategy: Strategy) -> None:
        admission.check_answers(strategy)

    @classmethod
    def check(cls, model: nn.Module, optimizers: Sequence[Optimizer], strategy: Strategy, job: Job) -> None:
        super().check(model, optimizers, strategy, job)
        admission.check_graph(admission.gossip_of(strategy), job.world_size)

    def device_of_weights(self) -> torch.device | None:
        return CPU

    def mixing_weights(self, step: int) -> Weights:
        """Steps count from 1, those of graphs from 0."""
        graph, size = self._gossip.graph, self._job.world_size
        period = graph.period(size)
        place = step - 1 if period is None else (step - 1) % period
        if self._last_weights is None or self._last_weights[0] != place:
            self._last_weights = place, graph.weights(size, place)
        return self._last_weights[1]

    # -- the exchange -------------------------------------------------------------------------------------------------

    def begun(self) -> None:
        super().begun()
        self._begin_mixing()
        self._begin_exchange()

    def begin_anew(self) -> None:
        loaded = self._loaded
        super().begin_anew()
        if loaded and self._named:
            self._begin_exchange()

    @abstractmethod
    def _begin_mixing(self) -> None:
        """All workers hold the same values: begin from there."""

    def _begin_exchange(self) -> None:
        """On all workers together, with nothing on its way that anybody waits for."""
        if self._network is None:
            return
        if self._exchange is not None:
            self._network.end(self._exchange)
        whole, longest = 4 * self.weights.numel, self._longest_message()
        machine = NeighbourExchange(
            self._job.rank, self._job.world_size, self._gossip.graph,
            whole_bytes=whole, most_bytes=longest, late=self._late, first_step=None if self._has_returned else self.steps,
        )  # fmt: skip
        about = f"{self._setting.name} by {self._strategy.aggregate!r}"
        unsent = (machine.window + 2) * (max(whole, longest) + (1 << 20))
        self._exchange = self._network.begin(machine, self, about=about, unsent_bytes=unsent)
        self._gone = frozenset()
        if self._has_returned:
            entered: EnteredSteps = self._network.wait_for(
                self._exchange.request(EnterSteps(self.steps + 1)), "to count with it again"
            )
            self.steps, self._gone = entered.step - 1, entered.gone
            self._ended = [self.steps] * len(self._ended)
            self._job.first_step = self.steps
        self._left = self.steps

    @property
    def _has_returned(self) -> bool:
        """Whether the others have begun without this worker: it holds the weights of one of them."""
        return self._network is not None and self._network.life > 0

    def _longest_message(self) -> int:
        return 4 * self.weights.numel

    def _leave(self, messages: Sequence[Outgoing]) -> None:
        """The messages of the next step."""
        assert self._exchange is not None
        self._left += 1
        self._exchange.request(Post(self._left, messages))
        for each in messages:
            self._job.ledger.count_message("gossip", each.to, sent=memoryview(each.payload).nbytes)

    def _end(self, step: int, late: int) -> list[Arrived]:
        """Wait for what is due in this step. From now on those that are gone are left out."""
        assert self._exchange is not None
        begin, begin_ns = time.perf_counter_ns(), None if self._job.tracer is None else self._job.tracer.now()
        taken = self._wait(step, late)
        self._job.ledger.count_wait(time.perf_counter_ns() - begin)
        if self._job.tracer is not None and begin_ns is not None:
            self._job.tracer.span("wait", f"for neighbours of {self._setting.name}", begin_ns)
        for each in taken.messages:
            self._job.ledger.count_message("gossip", each.source, received=each.payload.numel())
        self._gone = taken.gone
        return taken.messages

    def _wait(self, step: int, late: int) -> Taken:
        assert self._exchange is not None
        answer, timeouts = self._exchange.request(Take(step, late)), self._job.timeouts
        waited = 0.0
        while True:
            patience_s = min(timeouts.warn_s, timeouts.arrive_s - waited)
            try:
                taken: Taken = answer.result(patience_s)
                return taken
            except TimeoutError:
                waited += patience_s
            missing = self._exchange.request(Missing()).result(timeouts.connect_s)
            if not missing:
                continue
            if waited >= timeouts.arrive_s:
                raise WireTimeout(missing[0], f"step {step} of {self._setting.name}", waited)
            where = f"step {step} of {self._setting.name}"
            log.warning("rank %d: still waiting for rank %d in %s", self._job.rank, missing[0], where)

    def _snapshot(self) -> Tensor:
        return self.weights.read(self._pool.empty(self.weights.numel, torch.float32, CPU))

    def close(self) -> None:
        super().close()
        if self._network is not None and self._exchange is not None and not self._job.closed:
            self._network.end(self._exchange)
        self._exchange = None


class NeighbourGossip(GossipTraining):
    """`Gossip` + `Synchronous` + `Replicated`: D-PSGD, and with a lossy codec CHOCO-SGD."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self._mixing: NeighbourAverage | CompressedAverage | None = None

    def _begin_mixing(self) -> None:
        pace = self._gossip.pull
        if self._codec is None:
            self._mixing = NeighbourAverage(self._job.rank, self.mixing_weights, pace)
        else:
            blocks = self._blocks(self._codec)
            self._mixing = CompressedAverage(
                self._job.rank, self.mixing_weights, pace, self._codec, blocks, self.weights.read(), alone=self._has_returned
            )

    def _blocks(self, codec: Codec) -> Blocks:
        return codec.blocks(Layout.of((name, tuple(parameter.shape)) for name, parameter in self._named))

    def _longest_message(self) -> int:
        return super()._longest_message() if self._codec is None else self._codec.max_bytes(self._blocks(self._codec))

    def before_forward(self, buffers: Watch | None, *, saved: bool) -> None:
        if self._own is None:
            self._let_weights_leave()

    def before_step(self, optimizer: Optimizer) -> Set[Tensor] | None:
        who = super().before_step(optimizer)
        self._let_weights_leave()
        return who

    def _let_weights_leave(self) -> None:
        """Once for each step, as they are at its beginning."""
        if self._exchange is not None and self._left == self.steps and self.steps == max(self._ended, default=0):
            assert self._mixing is not None
            self._leave(self._mixing.leaves(self._left + 1, self._snapshot(), self._gone))

    def stepped(self, step: int) -> None:
        assert self._mixing is not None
        difference = self._mixing.difference(step, self._end(step, 0))
        if difference is not None:
            self.weights.add(difference)
        self._job.ledger.count_round()

    def own_extra(self) -> dict[str, Tensor]:
        return self._mixing.state() if isinstance(self._mixing, CompressedAverage) else {}

    def load_own_extra(self, saved: Mapping[str, Tensor]) -> None:
        self._begin_mixing()
        if isinstance(self._mixing, CompressedAverage) and saved:
            self._mixing.load(saved)


class PushSumGossip(GossipTraining):
    """`Gossip(push_sum=True)` + `Synchronous` or `StaleSynchronous` + `Replicated`: SGP and overlap SGP."""

    def __init__(self, strategy: Strategy, job: Job, setting: Setting) -> None:
        super().__init__(strategy, job, setting)
        self._mixing = PushSum(job.rank, self.mixing_weights)

    def _begin_mixing(self) -> None:
        self._mixing = PushSum(self._job.rank, self.mixing_weights)

    @property
    def mass(self) -> float:
        """This worker's: 1 / P of all, in the mean."""
        return self._mixing.mass

    def stepped(self, step: int) -> None:
        self._leave(self._mixing.leaves(step, self._snapshot(), self._gone))
        before = self._gone
        messages = self._end(step, self._late)
        somebody_left = not self._gone <= before
        if somebody_left and self._late:
            messages += self._end(step, 0)
        self._write(self._mixing.arrives(messages))
        if somebody_left:
            self._mixing.begin_anew()
        oldest = min((each.step for each in messages), default=step)
        self._job.ledger.count_round(staleness=step - oldest)

    def settle(self) -> None:
        if self._late and self._exchange is not None:
            self._write(self._mixing.settles(self._end(self.steps, 0)))

    def moved(self) -> None:
        """All workers hold the mean, and nothing is under way: all masses are 1 again, whatever deaths have made of them."""
        self._mixing.begin_anew()

    def _write(self, model: Tensor | None) -> None:
        if model is not None:
            self.weights.write(model)
            self._note_written()

    def weighted_mean(self, values: Tensor) -> Tensor:
        """Sum of x / sum of w. Both are averaged in one vector: of two means the second may be of fewer workers."""
        mass = values.new_tensor([self.mass])
        mean = self.average(torch.cat([values.mul_(self.mass), mass]))
        return mean[:-1].div_(mean[-1])

    def own_extra(self) -> dict[str, Tensor]:
        extra = {MASS: torch.tensor([self.mass], dtype=torch.float64)}
        return extra if self._mixing.values is None else {**extra, VALUES: self._mixing.values}

    def load_own_extra(self, saved: Mapping[str, Tensor]) -> None:
        self._begin_mixing()
        if saved:
            self._mixing.mass, self._mixing.values = float(saved[MASS][0]), saved.get(VALUES)
