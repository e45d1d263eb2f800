"""Training steps with servers in virtual time, where only the network counts: what order and crossing the barrier are worth."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from stretto.aggregate.parameter_server.client import ClientMachine, Enter, Pull, Push
from stretto.aggregate.parameter_server.layout import RangeLayout, ServedParameter
from stretto.aggregate.parameter_server.round_sum import RoundSum
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.collectives.urgency import Urgency
from stretto.sync.synchronous import Synchronous
from stretto.testing.network_model import ExponentialDelay, Link, NetworkModel
from stretto.testing.virtual_network import VirtualNetwork

LAYERS, RANGES, RANGE_BYTES, STEPS = 8, 4, 40_000, 3
COMPUTE_S = 1.0  # a third of it forward
LAYOUT = RangeLayout(
    [ServedParameter(f"p{layer}", RANGES * RANGE_BYTES // 4, str(layer)) for layer in range(LAYERS)], RANGE_BYTES
)
OF_LAYER = [[each.index for each in LAYOUT.ranges if each.group == str(layer)] for layer in range(LAYERS)]


class Worker:
    """Computes layer by layer; gradients leave in backward, and forward waits for what it needs, or first for everything."""

    def __init__(self, network: VirtualNetwork, rank: int, credit_bytes: int | None, crosses: bool) -> None:
        self.network, self.rank, self.credit_bytes, self.crosses = network, rank, credit_bytes, crosses
        self.clock = 0
        self.ends: list[float] = []
        self.pulls: list[list[Future[Any]]] = [[] for _ in range(LAYERS)]
        self.backward(LAYERS - 1)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.network.at(self.network.now + seconds, action)

    def backward(self, layer: int) -> None:
        self.after(2 / 3 * COMPUTE_S / LAYERS, lambda: self.has_gradients(layer))

    def has_gradients(self, layer: int) -> None:
        urgency = None if self.credit_bytes is None else Urgency(layer, self.credit_bytes)
        self.pulls[layer] = []
        for index in OF_LAYER[layer]:
            self.network.request(self.rank, Push(index, self.clock, bytes(RANGE_BYTES), {}, 0, urgency=urgency))
            pull = Pull(index, self.clock + 1, bytearray(RANGE_BYTES), urgency=urgency)
            self.pulls[layer].append(self.network.request(self.rank, pull))
        if layer > 0:
            self.backward(layer - 1)
        else:
            self.clock += 1
            self.when([] if self.crosses else sum(self.pulls, []), lambda: self.forward(0))

    def forward(self, layer: int) -> None:
        if layer < LAYERS:
            self.when(self.pulls[layer], lambda: self.after(1 / 3 * COMPUTE_S / LAYERS, lambda: self.forward(layer + 1)))
            return
        self.ends.append(self.network.now)
        if self.clock < STEPS:
            self.backward(LAYERS - 1)

    def when(self, pulls: list[Future[Any]], then: Callable[[], None]) -> None:
        missing = [pull for pull in pulls if not pull.done()]
        if not missing:
            then()
            return

        def one_has_come(pull: Future[Any]) -> None:
            missing.remove(pull)
            if not missing:
                self.after(0.0, then)

        for pull in list(missing):
            pull.add_done_callback(one_has_come)


def step_s(workers: int, num_servers: int, credit_bytes: int | None, crosses: bool) -> float:
    """A step where the busiest link takes as long as computation, rho = 1."""
    busiest = LAYERS * RANGES * RANGE_BYTES * max(1.0, workers / num_servers)
    link = Link(latency_s=1e-3, bytes_per_s=busiest / COMPUTE_S, jitter=ExponentialDelay(2e-4))
    network = VirtualNetwork(seed=1, model=NetworkModel(link), reliable=True)
    servers = list(range(100, 100 + num_servers))
    for rank in servers:
        server = ServerMachine(
            rank, LAYOUT, servers=servers, workers=range(workers), sync=Synchronous(), filled=True,
            make_values=lambda index, values: RoundSum(RANGE_BYTES // 4),
        )  # fmt: skip
        network.add(rank, server)
    for rank in range(workers):
        network.add(rank, ClientMachine(rank, LAYOUT, servers=servers))
        network.request(rank, Enter())
    network.run(1.0)
    found = [Worker(network, rank, credit_bytes, crosses) for rank in range(workers)]
    network.run(60.0)
    assert all(len(worker.ends) == STEPS for worker in found)
    ends = [max(worker.ends[step] for worker in found) for step in range(STEPS)]
    return (ends[-1] - ends[0]) / (STEPS - 1)


@pytest.mark.parametrize(("workers", "servers", "least"), [(2, 1, 1.15), (3, 2, 1.12)])
def test_the_order_of_the_forward_across_the_barrier_makes_a_step_shorter(workers: int, servers: int, least: float) -> None:
    """Order is worth nothing with the barrier, and crossing it nothing without the order: what is needed first comes last."""
    credit = 2 * RANGE_BYTES
    with_barrier = step_s(workers, servers, credit, crosses=False)
    plain = step_s(workers, servers, None, crosses=False)
    across = step_s(workers, servers, credit, crosses=True)
    assert with_barrier >= least * across and plain >= 1.08 * across
    assert abs(step_s(workers, servers, None, crosses=True) - plain) < 0.05
