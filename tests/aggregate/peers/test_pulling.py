"""One that comes back takes over the model of one that lives, whoever dies meanwhile."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from random import Random
from typing import Any

import numpy as np
import pytest

from stretto.aggregate.peers import pulling
from stretto.aggregate.peers.pulling import GiveModel, ModelIs, PartOfModel, PullMachine, PullModel
from stretto.aggregate.peers.until_quit import PeerSays, QuitPeers, UntilQuit
from stretto.errors import StrettoError
from stretto.testing.faults import Fault, Kill, Pause
from stretto.testing.network_model import ExponentialDelay, Link, NetworkModel
from stretto.testing.virtual_network import VirtualNetwork

MODEL = NetworkModel(Link(latency_s=0.01, jitter=ExponentialDelay(0.02), loss=0.05), detect_s=0.05)
NUMEL = 10


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "PIECE_BYTES", 3)


def model_of(rank: int, step: int) -> Any:
    return np.array([rank, step % 256] * (NUMEL // 2), np.uint8)


def train(network: VirtualNetwork, rank: int, machine: PullMachine, every_s: float, steps: int) -> None:
    """Ends a step every so often; at the end it finishes."""

    def end(step: int) -> None:
        if not network.is_alive(rank):
            return
        if step > steps:
            network.request(rank, QuitPeers())
            return
        if machine.waiting:
            network.request(rank, GiveModel(model_of(rank, step), step, 7))
        network.at(network.now + every_s, lambda: end(step + 1))

    network.at(network.now + every_s, lambda: end(1))


def start(size: int, seed: int, faults: list[Fault], chance: Random, steps: int) -> VirtualNetwork:
    network = VirtualNetwork(seed=seed, model=MODEL, faults=faults, reliable=True)
    for rank in range(1, size):
        machine = PullMachine(rank, size)
        network.add(rank, UntilQuit(machine, rank, size))
        train(network, rank, machine, chance.choice([0.05, 0.3, 5.0]), steps)
    network.add(0, UntilQuit(PullMachine(0, size), 0, size))
    return network


def run_pull(seed: int) -> Counter[str]:
    chance = Random(seed)
    size = chance.choice([2, 3, 4, 7])
    dying = chance.sample(range(1, size), chance.randint(0, size - 1))
    faults: list[Fault] = [Kill(rank, at_s=chance.uniform(0, 1)) for rank in dying]
    faults.append(Pause(chance.randrange(size), at_s=chance.uniform(0, 0.5), for_s=0.3))
    network = start(size, seed, faults, chance, steps=chance.choice([1, 1000]))
    network.run(0.05)
    reply = network.request(0, PullModel(NUMEL))
    network.run(100)
    assert reply.done(), f"seed {seed}"
    if reply.exception() is None:
        pulled = reply.result(0)
        assert np.array_equal(pulled.values, model_of(pulled.source, pulled.steps)) and pulled.meetings == 7
        fired = ["next"] if pulled.source != 1 else []
    else:
        assert "nobody is left who trains this model" in str(reply.exception())
        fired = ["nobody"]
    return Counter({name.partition("(")[0] for name in network.fired}) + Counter(fired)


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 5000), marks=pytest.mark.slow)], ids=str)
def test_it_has_the_model_of_one_worker_at_one_step_or_an_error(seeds: range) -> None:
    fired: Counter[str] = Counter()
    for seed in seeds:
        fired += run_pull(seed)
    assert fired.keys() == {"loss", "Kill", "Pause", "next", "nobody"} and min(fired.values()) > len(seeds) / 15, fired


def pull(num_bytes: int, steps: int = 100) -> tuple[VirtualNetwork, Future[Any]]:
    network = start(3, 1, [], Random(1), steps)
    network.run(0.05)
    return network, network.request(0, PullModel(num_bytes))


def test_a_model_of_another_length_is_refused_with_both() -> None:
    network, reply = pull(NUMEL + 2)
    network.run(20)
    with pytest.raises(StrettoError, match="a model of 10 bytes with its buffers, and that of rank 0 has 12"):
        reply.result(0)


def test_parts_that_nobody_announced_or_that_do_not_fit_are_not_taken() -> None:
    network, reply = pull(NUMEL, steps=0)  # the others end no step
    for header in (PartOfModel(1, 0), ModelIs(9, 3, 0, NUMEL), PartOfModel(9, 0), ModelIs(1, 3, 0, NUMEL), PartOfModel(1, 8)):
        network.send(2, 0, PeerSays(header), b"xyz")
    network.run(0.06)
    assert not reply.done()
    network.send(2, 0, PeerSays(PartOfModel(1, 0)), b"0123456789")
    network.run(0.5)
    assert reply.done() and (reply.exception() or bytes(reply.result(0).values) == b"0123456789")
