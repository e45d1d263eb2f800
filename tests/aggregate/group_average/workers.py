"""Workers of a group average in virtual time: programs that compute, contribute and go on from what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random

import numpy as np

from stretto.aggregate.group_average.butterfly import Values
from stretto.aggregate.group_average.machine import Contribute, EnterRounds, RoundAverage, Settle, WaitAvoidingGroups
from stretto.aggregate.group_average.rules import merge
from stretto.aggregate.peers.until_quit import QuitPeers, UntilQuit
from stretto.testing.faults import Fault
from stretto.testing.network_model import Link, NetworkModel
from stretto.testing.virtual_network import VirtualNetwork

LAN = NetworkModel(Link(latency_s=1e-3), detect_s=0.3)


@dataclass(eq=False)
class Program:
    """The training loop of one worker: a step takes `step_s()`, and adds `progress` to the model."""

    world: World
    rank: int
    step_s: Callable[[], float]
    num_steps: int
    progress: Callable[[int], float]
    model: Values
    averages: list[RoundAverage] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    models: dict[int, Values] = field(default_factory=dict)  # after each global round
    settled: bool = False
    quit: Future[object] | None = None

    def step(self) -> None:
        network = self.world.network
        self.began.append(network.now)
        network.at(network.now + self.step_s(), self.contribute)

    def contribute(self) -> None:
        network = self.world.network
        if not network.is_alive(self.rank) or self.world.programs[self.rank] is not self:
            return  # it was killed
        since, number = network.now, len(self.averages)
        before, stepped = self.model, self.model + np.float32(self.progress(number))
        reply = network.request(self.rank, Contribute(stepped.copy()))

        def take(reply: Future[RoundAverage]) -> None:
            average = reply.result(0)
            self.averages.append(average)
            self.waited.append(network.now - since)
            self.model = merge("paper", average, before, stepped)
            if average.is_global:
                self.models[average.round] = self.model
            if len(self.averages) < self.num_steps:
                self.step()
            else:
                network.request(self.rank, Settle()).add_done_callback(lambda _: self.leave())

        reply.add_done_callback(take)

    def leave(self) -> None:
        self.settled = True
        if self.world.meets and not all(program.settled for program in self.world.living):
            return
        for program in self.world.living if self.world.meets else [self]:
            program.say_goodbye()

    def say_goodbye(self) -> None:
        self.quit = self.world.network.request(self.rank, QuitPeers())


class World:
    """All workers, each with a machine and a program."""

    def __init__(
        self,
        size: int,
        group_size: int,
        *,
        seed: int = 0,
        every: int = 10,
        num_steps: int = 20,
        step_s: Callable[[int, Random], float] = lambda rank, chance: 1.0,
        progress: Callable[[int, int], float] = lambda rank, step: 0.0,
        model: Callable[[int], Iterable[float]] = lambda rank: (1.0, 2.0, 3.0, 4.0, 5.0),
        patience_s: float = 0.0,
        network: NetworkModel = LAN,
        faults: Iterable[Fault] = (),
        meets: bool = False,
    ) -> None:
        """`meets`: programs that have ended their steps settle and wait for all others, as in `stretto.consensus`."""
        chance = Random(seed)
        self.group_size, self.every, self.meets = group_size, every, meets

        def program_of(rank: int, own: Values) -> Program:
            return Program(self, rank, lambda: step_s(rank, chance), num_steps, lambda step: progress(rank, step), own)

        self.network = VirtualNetwork(seed=seed, model=network, faults=faults, reliable=True)
        self.machines, self.programs = [], []
        for rank in range(size):
            own = np.array([*model(rank)], np.float32)
            machine = WaitAvoidingGroups(
                rank, size, group_size=group_size, global_every=every, model=own.copy(), patience_s=patience_s
            )
            self.network.add(rank, UntilQuit(machine, rank, size))
            self.machines.append(machine)
            program = program_of(rank, own)
            self.programs.append(program)
            self.network.at(0.0, program.step)

    def run(self, until_s: float = 10_000.0) -> World:
        self.network.run(until_s)
        return self

    def come_back(self, rank: int) -> None:
        """A worker that was killed is here again, with a model of one that lives."""
        others = [program for program in self.living if program.rank != rank and len(program.averages) < program.num_steps]
        if not others:
            return  # they have finished
        other, former = others[0], self.programs[rank]
        machine = WaitAvoidingGroups(
            rank, len(self.programs), group_size=self.group_size, global_every=self.every, model=other.model.copy()
        )
        self.network.add(rank, UntilQuit(machine, rank, len(self.programs)))
        self.machines[rank] = machine
        program = Program(self, rank, former.step_s, former.num_steps, former.progress, other.model.copy())
        self.programs[rank] = program
        self.network.request(rank, EnterRounds()).add_done_callback(lambda _: program.step())

    @property
    def living(self) -> list[Program]:
        return [program for program in self.programs if self.network.is_alive(program.rank)]
