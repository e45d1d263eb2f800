"""The machines of virtual time, unchanged, on wires, with the values and optimizers that they are for; one server is killed."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from protocol.test_on_wires import DEADLINE_S, World, world
from stretto.aggregate.parameter_server.client import ClientMachine, Enter, Fill, Pull, Push, Quit
from stretto.aggregate.parameter_server.hash_ring import HashRing
from stretto.aggregate.parameter_server.layout import RangeLayout, ServedParameter
from stretto.aggregate.parameter_server.messages import PushTaken
from stretto.aggregate.parameter_server.range_state import RangeState
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.aggregate.parameter_server.shard_optimizer import OptimizerSpec
from stretto.protocol.machine import Machine
from stretto.sync.stale_synchronous import StaleSynchronous

LAYOUT = RangeLayout([ServedParameter("embedding", 60_000), ServedParameter("bias", 10), ServedParameter("norm", 7)], 1 << 16)
SGD = OptimizerSpec("SGD", {"lr": 1.0})
WORKERS, SERVERS = [0, 1], [2, 3, 4]
STEPS = 6


def values_of(index: int, values: memoryview | None) -> RangeState:
    begin = np.zeros(LAYOUT.ranges[index].numel, np.float32) if values is None else np.frombuffer(values, np.float32).copy()
    return RangeState(torch.from_numpy(begin), SGD)


def machine(rank: int, size: int) -> Machine:
    if rank in WORKERS:
        return ClientMachine(rank, LAYOUT, servers=SERVERS, replicas=1)
    return ServerMachine(
        rank, LAYOUT, servers=SERVERS, workers=WORKERS, sync=StaleSynchronous(1), replicas=1,
        make_values=values_of, fault_in=SGD.fault_in,
    )  # fmt: skip


def pull_all(servers: World, rank: int, clock: int) -> tuple[list[np.ndarray[Any, Any]], list[int]]:
    values = [np.empty(each.numel, np.float32) for each in LAYOUT.ranges]
    pulls = [servers.running[rank].request(Pull(index, clock, into)) for index, into in enumerate(values)]
    return values, [pull.result(DEADLINE_S).version for pull in pulls]


@pytest.mark.parametrize("kind", ["threads", "tcp", "zeromq"])
def test_workers_train_through_the_death_of_a_server(kind: str) -> None:
    """Each step of each worker takes one from every value."""
    placed = HashRing(SERVERS).place(LAYOUT.ranges)
    assert set(placed.values()) == set(SERVERS)
    pushes: list[Future[PushTaken]] = []
    with world(kind, len(WORKERS) + len(SERVERS), machine) as servers:
        for index, each in enumerate(LAYOUT.ranges):
            servers.request(0, Fill(index, np.full(each.numel, 100, np.float32).tobytes()))
        assert [servers.request(rank, Enter()) for rank in WORKERS] == [0, 0]
        for clock in range(STEPS):
            for rank in WORKERS:
                values, versions = pull_all(servers, rank, clock)
                for index, version in enumerate(versions):
                    gradient = np.ones_like(values[index]).tobytes()
                    pushes.append(servers.running[rank].request(Push(index, clock, gradient, {"lr": 1.0}, version)))
            if clock == STEPS // 2:
                servers.kill(placed[0])
        assert all(push.result(DEADLINE_S).applied is not False for push in pushes)
        for rank in WORKERS:
            values, _ = pull_all(servers, rank, STEPS)
            assert all((each == 100 - len(WORKERS) * STEPS).all() for each in values)
        assert [servers.request(rank, Quit()) for rank in WORKERS] == [None, None]


@pytest.mark.parametrize("kind", ["tcp", "zeromq"])
def test_the_memory_of_arrays_travels_as_bytes(kind: str) -> None:
    """More than a socket takes at once: a wire that counted floats would lose its place in the stream."""
    layout = RangeLayout([ServedParameter("w", 16 << 20 >> 2)])

    def make(rank: int, size: int) -> Machine:
        if rank == 0:
            return ClientMachine(0, layout, servers=[1])
        return ServerMachine(
            1, layout, servers=[1], workers=[0], sync=StaleSynchronous(1),
            make_values=lambda index, values: RangeState(
                torch.zeros(layout.ranges[index].numel)
                if values is None
                else torch.from_numpy(np.frombuffer(values, np.float32).copy()),
                SGD,
            ),
        )  # fmt: skip

    begin = np.arange(sum(each.numel for each in layout.ranges), dtype=np.float32)
    found, step = np.empty_like(begin), layout.ranges[0].numel
    with world(kind, 2, make) as servers:
        for request in (Fill, lambda index, part: Push(index, 0, part, {"lr": 1.0}, 0)):
            parts = [begin[each.index * step : (each.index + 1) * step].data for each in layout.ranges]
            answers = [servers.running[0].request(request(index, part)) for index, part in enumerate(parts)]
            assert all(answer.result(DEADLINE_S) for answer in answers)
        pulls = [
            servers.running[0].request(Pull(each.index, 1, found[each.index * step : (each.index + 1) * step].data))
            for each in layout.ranges
        ]
        assert all(pull.result(DEADLINE_S) for pull in pulls)
    assert not found.any()
