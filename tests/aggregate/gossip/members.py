"""Workers that gossip in virtual time: a vector each, steps that take a while, and the same arithmetic as in training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stretto.aggregate.gossip.averaging import NeighbourAverage
from stretto.aggregate.gossip.compressed import CompressedAverage
from stretto.aggregate.gossip.exchange import Arrived, EnterSteps, NeighbourExchange, Outgoing, Post, Take
from stretto.aggregate.gossip.graph import MixingGraph
from stretto.aggregate.gossip.mixing import Weights
from stretto.aggregate.gossip.push_sum import PushSum
from stretto.compress.codec import Codec
from stretto.compress.layout import Layout
from stretto.testing.virtual_network import VirtualNetwork

Pause_s = Callable[[int, int], float]  # of a worker, in a step


@dataclass
class Group:
    """All workers of one run."""

    network: VirtualNetwork
    graph: MixingGraph
    size: int
    steps: int
    numel: int
    compute_s: Pause_s
    push_sum: bool = False
    late: int = 0
    codec: Codec | None = None
    pace: float = 1.0
    rate: float = 0.0  # of the noise that stands for gradients
    workers: list[Worker] = field(default_factory=list)

    def come_back(self, rank: int, of: int) -> None:
        """A worker that was killed lives again, with the model of another one."""
        former, other = self.workers[rank], self.workers[of]
        worker = self.workers[rank] = Worker(self, rank, other.model.clone(), again=True)
        worker.noise, worker.moved, worker.seen = former.noise, former.moved, former.seen
        worker.enter(other.step + 1)

    def start(self) -> Group:
        begins = torch.Generator().manual_seed(1)
        values = torch.randn(self.size, self.numel, generator=begins)
        first = values[:1].repeat(self.size, 1) if self.codec is not None else values
        for rank in range(self.size):
            self.workers.append(Worker(self, rank, first[rank].clone()))
        for worker in self.workers:
            worker.begin()
        return self

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if self.network.is_alive(worker.rank)]

    def total(self) -> Tensor:
        """Of what the living have."""
        return torch.stack([worker.own().double() for worker in self.living]).sum(0)

    def distance(self) -> float:
        values = torch.stack([worker.model for worker in self.living])
        return float((values - values.mean(0)).norm())


class Worker:
    def __init__(self, group: Group, rank: int, values: Tensor, *, again: bool = False) -> None:
        self.group, self.rank, self.model = group, rank, values
        self.step = 0
        self.entered = 1  # the first step that it took part in
        self.noise = torch.Generator().manual_seed(rank)
        self.moved = torch.zeros(group.numel, dtype=torch.float64)  # by gradients, in all
        self.gone: frozenset[int] = frozenset()
        self.seen: list[tuple[int, int, int]] = []  # (own step, step, source) of every message
        self.models: list[Tensor] = []  # after each step
        self.begins_anew = False
        self.mixing: NeighbourAverage | CompressedAverage | PushSum
        size, graph = group.size, group.graph
        most = 4 * group.numel
        if group.push_sum:
            self.mixing = PushSum(rank, self.weights)
        elif group.codec is None:
            self.mixing = NeighbourAverage(rank, self.weights, group.pace)
        else:
            blocks = group.codec.blocks(Layout.of([("w", (group.numel,))]))
            most = group.codec.max_bytes(blocks)
            self.mixing = CompressedAverage(rank, self.weights, group.pace, group.codec, blocks, values, alone=again)
        self.machine = NeighbourExchange(
            rank, size, graph, whole_bytes=4 * group.numel, most_bytes=most, late=group.late, first_step=None if again else 0
        )
        group.network.add(rank, self.machine)

    def weights(self, step: int) -> Weights:
        return self.group.graph.weights(self.group.size, step - 1)

    def own(self) -> Tensor:
        """What it has of the sum."""
        x = self.mixing.values if isinstance(self.mixing, PushSum) else None
        return self.model if x is None else x

    @property
    def mass(self) -> float:
        return self.mixing.mass if isinstance(self.mixing, PushSum) else 1.0

    def enter(self, at_least: int) -> None:
        def entered(answer: Future[Any]) -> None:
            self.step, self.gone = answer.result().step - 1, answer.result().gone
            self.entered = self.step + 1
            self.begin()

        self.group.network.request(self.rank, EnterSteps(at_least)).add_done_callback(entered)

    # -- the loop of a step -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        if self.step >= self.group.steps:
            return
        if not isinstance(self.mixing, PushSum):
            self._send(self.mixing.leaves(self.step + 1, self.model.clone(), self.gone))
        network = self.group.network
        network.at(network.now + self.group.compute_s(self.rank, self.step), self._computed)

    def _computed(self) -> None:
        if not self.group.network.is_alive(self.rank) or self.group.workers[self.rank] is not self:
            return
        gradient = self.group.rate * torch.randn(self.group.numel, generator=self.noise)
        self.model = self.model + gradient
        self.moved += gradient.double()
        self.step += 1
        if isinstance(self.mixing, PushSum):
            self._send(self.mixing.leaves(self.step, self.model.clone(), self.gone))
        self._take(self.group.late, self._mixed)

    def settle(self) -> None:
        self._take(0, self._settled)

    def _send(self, messages: list[Outgoing]) -> None:
        self.group.network.request(self.rank, Post(self.machine.step + 1, messages))

    def _take(self, late: int, then: Callable[[list[Arrived]], None]) -> None:
        answer = self.group.network.request(self.rank, Take(self.step, late))

        def came(answer: Future[Any]) -> None:
            before, (messages, self.gone) = self.gone, answer.result()
            self.seen += [(self.step, each.step, each.source) for each in messages]
            if self.gone <= before:
                then(messages)
            else:
                self._take(0, lambda more: self._left(then, messages + more))

        answer.add_done_callback(came)

    def _left(self, then: Callable[[list[Arrived]], None], messages: list[Arrived]) -> None:
        """Somebody has."""
        self.begins_anew = True
        then(messages)

    def _mixed(self, messages: list[Arrived]) -> None:
        if isinstance(self.mixing, PushSum):
            model = self.mixing.arrives(messages)
            self.model = self.model if model is None else model
            if self.begins_anew:
                self.mixing.begin_anew()
        else:
            difference = self.mixing.difference(self.step, messages)
            self.model = self.model if difference is None else self.model + difference
        self.models.append(self.model)
        self.begins_anew = False
        self.begin()

    def _settled(self, messages: list[Arrived]) -> None:
        assert isinstance(self.mixing, PushSum)
        model = self.mixing.settles(messages)
        self.model = self.model if model is None else model
