"""The token ring and the register over many seeds: what always holds, whatever is lost, doubled, late, paused, cut or killed."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Any

import pytest

from protocol.machines import Disk, Read, Register, Stamp, TokenRing, Write
from stretto.testing.faults import Cut, Fault, Kill, Pause
from stretto.testing.network_model import ExponentialDelay, Link, NetworkModel
from stretto.testing.virtual_network import VirtualNetwork

STORMY = Link(latency_s=0.02, jitter=ExponentialDelay(0.05), loss=0.1, duplicate=0.1, reorder=0.1, hold_s=0.5)
STORM = NetworkModel(STORMY, detect_s=0.3)
SLOW = pytest.param(range(300, 3000), marks=pytest.mark.slow)  # these protocols are examples: of those that are used, 10,000
SEEDS = pytest.mark.parametrize("seeds", [range(300), SLOW], ids=str)
KINDS = {"loss", "duplicate", "reorder", "Kill", "Pause", "Cut"}


def some_faults(chance: Random, size: int, until_s: float) -> tuple[list[Fault], list[int]]:
    """Fewer than half of the nodes die, one of the rest stands still, one is cut off for a while; and who dies."""
    dying = chance.sample(range(size), chance.randint(0, (size - 1) // 2))
    living = [rank for rank in range(size) if rank not in dying]
    kills: list[Fault] = [Kill(rank, at_s=chance.uniform(0, until_s)) for rank in dying]
    pause = Pause(chance.choice(living), at_s=chance.uniform(0, until_s), for_s=chance.uniform(0.1, 3))
    cut = Cut((chance.choice(living),), at_s=chance.uniform(0, until_s), for_s=chance.uniform(0.1, 3))
    return [*kills, pause, cut], dying


def by_kind(fired: dict[str, int]) -> Counter[str]:
    return Counter({name.partition("(")[0] for name in fired})


def run_tokens(seed: int) -> Counter[str]:
    chance = Random(seed)
    size = chance.choice([1, 2, 3, 4, 7])
    faults, dying = some_faults(chance, size, until_s=5)
    network = VirtualNetwork(seed=seed, model=STORM, faults=faults)
    nodes = {rank: TokenRing(rank, size) for rank in range(size)}
    for rank, node in nodes.items():
        network.add(rank, node)

    def two_hold_it() -> bool:
        return sum(node.holding is not None for rank, node in nodes.items() if network.is_alive(rank)) > 1

    assert not network.run_until(two_hold_it, until_s=12), f"seed {seed}: {network.trace.entries}"
    living = [node for rank, node in nodes.items() if rank not in dying]
    before = [node.turns for node in living]

    def it_went_round() -> bool:
        return all(node.turns > turns for node, turns in zip(living, before, strict=True))

    assert network.run_until(lambda: two_hold_it() or it_went_round(), until_s=60) and not two_hold_it(), f"seed {seed}"
    return by_kind(network.fired)


@SEEDS
def test_at_most_one_living_node_holds_the_token_and_it_goes_round_among_those_that_live(seeds: range) -> None:
    fired: Counter[str] = Counter()
    for seed in seeds:
        fired += run_tokens(seed)
    assert fired.keys() == KINDS and min(fired.values()) > len(seeds) / 3


@dataclass
class Call:
    began: float
    write: bytes | None
    reply: Future[Any]
    ended: float = 0.0


class Clients:
    """Each node of a register makes one call after the other; those of a node that is killed are never answered."""

    def __init__(self, network: VirtualNetwork, size: int, num_calls: int, chance: Random) -> None:
        self.network, self.chance = network, chance
        self.calls: list[Call] = []
        for rank in range(size):
            self.go_on(rank, num_calls)

    def go_on(self, rank: int, num_left: int) -> None:
        if num_left == 0:
            return
        value = None if self.chance.random() < 0.5 else b"%d of %d" % (num_left, rank)
        call = Call(self.network.now, value, self.network.request(rank, Read() if value is None else Write(value)))
        self.calls.append(call)

        def answered(reply: Future[Any]) -> None:
            call.ended = self.network.now
            self.network.at(self.network.now + self.chance.uniform(0, 0.02), lambda: self.go_on(rank, num_left - 1))

        call.reply.add_done_callback(answered)


def check_history(calls: list[Call]) -> None:
    """Every call takes effect at one moment between its beginning and its end: the order of the stamps is such an order."""
    done = [(call, *call.reply.result(0)) for call in calls if call.reply.done()]
    written = {call.write for call in calls} | {b""}
    stamps = [stamp for call, stamp, _ in done if call.write is not None]
    assert len(set(stamps)) == len(stamps)
    of_stamp: dict[Stamp, bytes] = {}
    for call, stamp, value in done:
        assert value in written and call.write in (None, value)
        assert of_stamp.setdefault(stamp, value) == value
    for (one, first, _), (other, second, _) in combinations(done, 2):
        for earlier, a, later, b in ((one, first, other, second), (other, second, one, first)):
            if earlier.ended < later.began:
                assert a < b if later.write is not None else a <= b


def run_register(seed: int) -> Counter[str]:
    chance = Random(seed)
    size = chance.choice([1, 2, 3, 4, 7])
    faults, dying = some_faults(chance, size, until_s=2)
    parted = chance.random() < 0.2  # now and then, who is silent for a second is given up
    model = NetworkModel(STORMY, detect_s=0.3, silence_s=1.0 if parted else 30.0)
    network = VirtualNetwork(seed=seed, model=model, faults=faults)
    disks = [Disk() for _ in range(size)]
    for rank in range(size):
        network.add(rank, Register(rank, size, disks[rank]))
    for rank in dying:
        if chance.random() < 0.5:
            network.at(2.5, lambda rank=rank: network.add(rank, Register(rank, size, disks[rank])))  # type: ignore[misc]
    clients = Clients(network, size, 6, chance)
    network.run(until_s=60)
    check_history(clients.calls)
    answered = sum(call.reply.done() for call in clients.calls)
    assert parted or answered >= 6 * (size - len(dying)), f"seed {seed}: {answered} answers"
    return by_kind(network.fired)


@SEEDS
def test_the_register_is_linearizable_and_a_majority_is_enough(seeds: range) -> None:
    fired: Counter[str] = Counter()
    for seed in seeds:
        fired += run_register(seed)
    assert fired.keys() == KINDS and min(fired.values()) > len(seeds) / 3
