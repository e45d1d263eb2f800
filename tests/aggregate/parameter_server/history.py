"""One history of workers and servers in virtual time, from a seed: who trains how, who dies when; and what must hold.

Values are counts. The gradient of one worker's step has a single element that is not zero, in a place of its own, and to apply it
is to add one there: so what was lost, or applied twice, is seen exactly, whatever weights and rates the rule has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.aggregate.parameter_server.answers import OwnCopies, answer_codecs
from stretto.aggregate.parameter_server.client import ClientMachine, Enter, Pull, Push, Quit
from stretto.aggregate.parameter_server.consistency import SyncAnswer
from stretto.aggregate.parameter_server.head import UpdateRecord
from stretto.aggregate.parameter_server.layout import RangeLayout, ServedParameter
from stretto.aggregate.parameter_server.messages import DifferenceTo, InstallRange, PullValues, PushGradient, PushTaken
from stretto.aggregate.parameter_server.server import ServerMachine
from stretto.collectives.urgency import Urgency
from stretto.errors import PeerLost
from stretto.protocol.machine import Payload
from stretto.sync.asynchronous import Asynchronous
from stretto.sync.backup_workers import BackupWorkers
from stretto.sync.delay_compensation import DelayCompensation
from stretto.sync.soft_sync import SoftSync
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.sync.synchronous import Synchronous
from stretto.testing.faults import Fault, Kill, Pause
from stretto.testing.network_model import ExponentialDelay, Link, NetworkModel
from stretto.testing.virtual_network import VirtualNetwork

STEPS = 4
PROGRAMS = 12  # lives of workers that a history has room for
PLACES = PROGRAMS * STEPS
MODEL = NetworkModel(Link(latency_s=1e-3, jitter=ExponentialDelay(4e-3), loss=0.02, retransmit_s=0.05), detect_s=0.02)
ENDED_S = 30.0  # by then whatever has begun has ended
FIRST_SERVER = 100


class Counts:
    """The values of a range, as an integer for each gradient that there can be. What is read: these, or the last sum."""

    def __init__(self, sums: bool) -> None:
        self.sums = sums
        self.counts: NDArray[np.float32] = np.zeros(PLACES, np.float32)
        self.last: NDArray[np.float32] = np.zeros(PLACES, np.float32)
        self.readers: dict[int, bytes] = {}

    def apply(
        self, gradient: NDArray[np.float32], options: Mapping[str, Any], *, lr_scale: float = 1.0, worker: int | None = None
    ) -> None:
        assert 0 < lr_scale <= 1
        self.counts = self.counts + (gradient != 0)
        self.last = gradient.copy()

    def value(self) -> bytes:
        return (self.last if self.sums else self.counts).tobytes()

    def pulled_by(self, worker: int) -> None:
        self.readers[worker] = self.value()

    def forget(self, worker: int) -> None:
        self.readers.pop(worker, None)

    def export(self) -> bytes:
        readers = b"".join(worker.to_bytes(4, "little") + value for worker, value in self.readers.items())
        return self.counts.tobytes() + self.last.tobytes() + readers

    def install(self, data: memoryview) -> None:
        size, entry = 4 * PLACES, 4 + 4 * PLACES
        self.counts = np.frombuffer(data[:size], np.float32).copy()
        self.last = np.frombuffer(data[size : 2 * size], np.float32).copy()
        rest = bytes(data[2 * size :])
        entries = [rest[begin : begin + entry] for begin in range(0, len(rest), entry)]
        self.readers = {int.from_bytes(each[:4], "little"): each[4:] for each in entries}


@dataclass(eq=False)
class Program:
    """One life of a worker: so many steps, each of which pulls all ranges, computes for a while and pushes all of them."""

    history: History
    rank: int
    number: int  # of all programs: it says which places are its own
    clock: int = -1  # steps that it has pushed, from the clock on that it entered with; -1: it has not entered
    began: int = -1
    found: int = 0  # the lowest version of a range when it began
    versions: dict[int, int] = field(default_factory=dict)  # of the ranges, as it has read them
    pushes: dict[tuple[int, int], Future[PushTaken]] = field(default_factory=dict)  # by range and clock
    ended: bool = False
    quits: Future[Any] | None = None
    dead: bool = False
    error: BaseException | None = None
    differing: set[int] = field(default_factory=set)  # ranges whose values have been asked for as a difference

    def __post_init__(self) -> None:
        self.copies = OwnCopies(self.history.answer_codec_of)
        self.held = [torch.zeros(PLACES) for _ in self.history.layout.ranges]

    def start(self) -> None:
        self._when_done([self.history.network.request(self.rank, Enter())], self._entered)

    def _when_done(self, futures: list[Future[Any]], then: Callable[[], None]) -> None:
        self.waits_for = futures
        left = len(futures)

        def one_is_done(future: Future[Any]) -> None:
            nonlocal left
            left -= 1
            if self.error is None and (error := future.exception()) is not None:
                self.error = error
                self.history.network.request(self.rank, Quit())  # as a program that ends: others must not wait for it
            if left == 0 and self.error is None:
                try:
                    then()
                except AssertionError as failure:  # a future would only log it
                    self.history.failures.append(failure)

        for future in futures:
            future.add_done_callback(one_is_done)

    def _entered(self) -> None:
        self.began = self.clock = self.waits_for[0].result()
        self._pull()

    def _pull(self) -> None:
        self.history.check_that_nobody_is_too_far_ahead(self, asked=True)
        self.values = [np.zeros(PLACES, np.float32) for _ in self.history.layout.ranges]
        pulls: list[Future[Any]] = []
        self.differing.clear()
        for index, into in enumerate(self.values):
            newer_than = self._steps_before_the_last() if isinstance(self.history.sync, BackupWorkers) else -1
            urgency, difference = self.history.some_urgency(), self.history.some_difference(self, index)
            memory = into if difference is None else None
            pull = Pull(index, self.clock, memory, newer_than, urgency, difference)
            answer = self.history.network.request(self.rank, pull)
            if difference is not None:
                self.differing.add(index)
                answer = self.copies.into(self.history.layout.ranges[index], answer, self.held[index], difference.draw)
            pulls.append(answer)
        self._when_done(pulls, self._pulled)

    def _steps_before_the_last(self) -> int:
        """Counted from the lowest version that it found when it entered, as workers do (`stepping.py`)."""
        return -1 if self.clock == self.began else self.found + self.clock - self.began - 1

    def _pulled(self) -> None:
        for index, future in enumerate(self.waits_for):
            self.versions[index] = future.result().version
            if index in self.differing:
                self.values[index] = self.held[index].numpy().copy()
                self.history.kinds["difference" if future.result().since is not None else "whole"] += 1
            self.history.check_what_was_read(self, index, self.values[index])
        if self.clock == self.began:
            self.found = min(self.versions.values())
        self.history.check_that_nobody_is_too_far_ahead(self)
        self.history.after(self.history.computing_s(self.rank), self, self._push)

    def _push(self) -> None:
        if self.clock - self.began == STEPS:
            self.ended = True
            self.quits = self.history.network.request(self.rank, Quit())
            self.quits.add_done_callback(self._has_quit)
            return
        gradient = np.zeros(PLACES, np.float32)
        gradient[self.place(self.clock)] = 1
        for index in range(len(self.history.layout)):
            urgency = self.history.some_urgency()
            push = Push(index, self.clock, gradient.tobytes(), {"lr": 0.1}, self.versions[index], urgency=urgency)
            self.pushes[index, self.clock] = self.history.network.request(self.rank, push)
        self.clock += 1
        self._pull()

    def _has_quit(self, future: Future[Any]) -> None:
        self.error = self.error or future.exception()

    def place(self, clock: int) -> int:
        """Where the gradient of that clock counts."""
        assert 0 <= clock - self.began < STEPS
        return self.number * STEPS + clock - self.began

    def clock_of(self, place: int) -> int:
        return self.began + place - self.number * STEPS

    @property
    def counts(self) -> bool:
        """Whether others have to wait for it."""
        return not self.dead and not self.ended and self.clock >= 0


class History:
    """See the module's text."""

    def __init__(
        self,
        seed: int,
        sync: SyncAnswer | None = None,
        *,
        has_faults: bool = True,
        more_kills: Sequence[Kill] = (),
        added: int = 0,
    ) -> None:
        """`added`: so many servers join, whatever else happens."""
        self.chance = chance = Random(seed)
        self.orders = Random(f"order {seed}")  # of requests: half of the histories have one
        self.has_order = self.orders.random() < 0.5
        self.num_workers = chance.choice([1, 2, 3, 4, 7])
        self.num_servers = chance.choice([1, 2, 2, 3, 3, 4])
        self.replicas = chance.choice([0, 1, 1, 1, 2])
        self.differences = Random(f"difference {seed}")  # half of the histories have them
        some_sync = self._some_sync()
        self.sync = sync or some_sync
        self.layout = RangeLayout([ServedParameter(f"p{i}", PLACES) for i in range(chance.choice([1, 2, 3]))], 4 * PLACES)
        self.has_differences = self.differences.random() < 0.5 and not isinstance(self.sync, Synchronous)
        served = [ServedParameter(f"p{each.index}", PLACES) for each in self.layout.ranges]
        self.answer_codec_of = answer_codecs(self.layout.ranges, served, "Float16()")  # which is exact for small counts
        self.servers = [FIRST_SERVER + number for number in range(self.num_servers)]
        self.workers = list(range(self.num_workers))
        self.faults: list[Fault] = []
        self.comebacks: list[tuple[float, int]] = []
        self.kinds: Counter[str] = Counter()
        if has_faults:
            self._plan_faults()
        self.faults += more_kills
        times = Random(f"added {seed}")
        self.added = [FIRST_SERVER + 20 + number for number in range(added)]
        self.comebacks += [(times.uniform(0.01, 0.15), rank) for rank in self.added]
        self.network = VirtualNetwork(seed=seed, model=MODEL, faults=self.faults, reliable=True)
        self.machines: dict[int, ServerMachine] = {}
        self.records: dict[int, list[UpdateRecord]] = {}
        self.programs: list[Program] = []
        self.lives: dict[int, int] = {}  # of nodes that have joined
        self.sums: dict[tuple[int, int], bytes] = {}
        self.reads: dict[tuple[int, int, int], set[int]] = {}  # by worker, range and clock: which gradients
        self.failures: list[AssertionError] = []
        self.moments: list[tuple[float, int]] = []  # when a server has told another one of a new chain
        self.slow = chance.choice([None, *self.workers])
        self.doubles = has_faults and chance.random() < 0.2
        for rank in self.servers:
            self._add_server(rank, life=0)
        for rank in self.workers:
            self._add_worker(rank, life=0)
        for at_s, rank in self.comebacks:
            self.network.at(at_s, lambda rank=rank: self._come(rank))  # type: ignore[misc]

    def _some_sync(self) -> SyncAnswer:
        answers: list[SyncAnswer] = [
            Synchronous(),
            *(StaleSynchronous(bound) for bound in (0, 1, 3)),
            Asynchronous(),
            Asynchronous(staleness_aware=True, delay_compensation=DelayCompensation(0.04)),
            SoftSync(1),
            SoftSync(2),
        ]
        return self.chance.choice([*answers, BackupWorkers(1)] if self.num_workers > 1 else answers)

    # -- the order of requests ----------------------------------------------------------------------------------------

    def some_urgency(self) -> Urgency | None:
        """Requests with and without one, and windows of one range and of several."""
        if not self.has_order or self.orders.random() < 0.1:
            return None
        self.kinds["urgency"] += 1
        return Urgency(self.orders.randrange(3), self.orders.choice([1, 4 * PLACES, 8 * PLACES]))

    # -- what is asked for --------------------------------------------------------------------------------------------

    def some_difference(self, program: Program, index: int) -> DifferenceTo | None:
        """Most of the time; values as a worker without a copy is sent them, sometimes."""
        if not self.has_differences or self.differences.random() < 0.1:
            return None
        return program.copies.wanted(index, program.clock, whole=self.differences.random() < 0.1)

    # -- what happens -------------------------------------------------------------------------------------------------

    def _plan_faults(self) -> None:
        """All but one of the servers may die, mostly one after the other; workers too; some come back; one node stands still."""
        chance = self.chance
        at_s = chance.uniform(0.01, 0.1)
        for rank in chance.sample(self.servers, chance.choice([0, 1, 1, 2, 3]) % self.num_servers):
            self.faults.append(Kill(rank, at_s=at_s))
            if chance.random() < 0.5:
                self.comebacks.append((at_s + chance.uniform(0.01, 0.2), rank))
            at_s += chance.choice([chance.uniform(0, 0.02), chance.uniform(0.05, 0.3)])
        for rank in chance.sample(self.workers, chance.choice([0, 0, 1, 2]) % self.num_workers):
            at_s = chance.uniform(0.005, 0.3)
            self.faults.append(Kill(rank, at_s=at_s))
            if chance.random() < 0.5:
                self.comebacks.append((at_s + chance.uniform(0.01, 0.2), rank))
        if chance.random() < 0.3:
            self.comebacks.append((chance.uniform(0.01, 0.3), FIRST_SERVER + 10))
        if chance.random() < 0.3:
            self.comebacks.append((chance.uniform(0.01, 0.3), self.num_workers))
        if chance.random() < 0.5:
            node = chance.choice([*self.servers, *self.workers])
            self.faults.append(Pause(node, at_s=chance.uniform(0, 0.2), for_s=chance.uniform(0.01, 0.2)))

    def _come(self, rank: int) -> None:
        """A node that has died comes back, or one that was never there comes."""
        if self.network.is_alive(rank):
            return
        self.lives[rank] = self.network.generation + 1
        what = "server" if rank >= FIRST_SERVER else "worker"
        self.kinds[f"{what} {'joins' if rank not in (*self.servers, *self.workers) else 'comes back'}"] += 1
        if rank >= FIRST_SERVER:
            self._add_server(rank, life=self.lives[rank])
        else:
            self._add_worker(rank, life=self.lives[rank])

    def _add_server(self, rank: int, life: int) -> None:
        self.records[rank] = []
        machine = self.machines[rank] = ServerMachine(
            rank,
            self.layout,
            servers=self.servers,
            workers=self.workers,
            sync=self.sync,
            make_values=lambda index, values: Counts(isinstance(self.sync, Synchronous)),
            replicas=self.replicas,
            filled=True,
            life=life,
            lives=self.lives,
            others=[other for other in self.machines if self.network.is_alive(other)] if life else [],
            on_update=self.records[rank].append,
            answer_codec_of=self.answer_codec_of,
        )
        send = machine._send

        def watched(to: int, header: Any, payload: Payload = b"") -> None:
            if isinstance(header, InstallRange):
                self.moments += [(self.network.now, rank), (self.network.now, to)]
            send(to, header, payload)

        machine.chains._send = watched  # type: ignore[method-assign]
        self.network.add(rank, machine)

    def _add_worker(self, rank: int, life: int) -> None:
        for program in self.programs:
            program.dead |= program.rank == rank
        machine = ClientMachine(rank, self.layout, servers=self.servers, replicas=self.replicas, life=life, lives=self.lives)
        if self.doubles:
            self._double_requests_of(machine)
        self.network.add(rank, machine)
        program = Program(self, rank, len(self.programs))
        self.programs.append(program)
        self.after(0.0, program, program.start)

    def _double_requests_of(self, machine: ClientMachine) -> None:
        send = machine._send

        def twice(to: int, header: Any, payload: Payload = b"") -> None:
            send(to, header, payload)
            if isinstance(header, PushGradient):
                self.kinds["push twice"] += 1
                send(to, header, payload)
            elif isinstance(header, PullValues) and header.difference is not None:
                send(to, header, payload)  # the server's idea of the copy moves on, and the second answer is not used

        machine._send = twice  # type: ignore[method-assign]

    def after(self, seconds: float, program: Program, action: Callable[[], None]) -> None:
        def act() -> None:
            if self._is_alive(program):
                action()

        self.network.at(self.network.now + seconds, act)

    def _is_alive(self, program: Program) -> bool:
        program.dead |= not self.network.is_alive(program.rank)
        return not program.dead

    def computing_s(self, rank: int) -> float:
        return self.chance.expovariate(1 / 0.02) * (4 if rank == self.slow else 1)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def living_programs(self) -> list[Program]:
        return [program for program in self.programs if self._is_alive(program)]

    def check_that_nobody_is_too_far_ahead(self, program: Program, asked: bool = False) -> None:
        """One that has read, and computes now, is at most `bound` clocks ahead of the slowest; one that asks, one more."""
        if isinstance(self.sync, StaleSynchronous):
            slowest = min(other.clock for other in self.living_programs() if other.counts)
            assert program.clock - slowest <= self.sync.bound + asked, f"clock {program.clock}, the slowest has {slowest}"

    def check_what_was_read(self, program: Program, index: int, values: NDArray[np.float32]) -> None:
        read = {int(place) for place in np.flatnonzero(values)}
        own = {program.place(clock) for clock in range(program.began, program.clock)}
        self.reads[program.rank, index, program.clock] = read
        clocks = {place: self.programs[place // STEPS].clock_of(place) for place in read}
        match self.sync:
            case Synchronous():
                if program.clock > program.began:
                    assert self.sums.setdefault((index, program.clock), values.tobytes()) == values.tobytes()
                    assert set(clocks.values()) == {program.clock - 1} and own & read
            case StaleSynchronous(bound):
                assert own <= read and self._pushed_before(program.clock - bound) <= read
                assert bound > 0 or max(clocks.values(), default=-1) < program.clock
            case Asynchronous():
                assert own <= read
        assert isinstance(self.sync, Synchronous) or values.max(initial=0) <= 1

    def _pushed_before(self, clock: int) -> set[int]:
        """The places of all steps of earlier clocks by workers that live."""
        return {
            program.place(earlier)
            for program in self.living_programs()
            if program.counts
            for earlier in range(program.began, min(clock, program.clock))
        }

    def check_heads(self) -> None:
        """Of the servers that live, at most one serves a range."""
        heads = [index for machine in self._living_servers() for index in machine.served()]
        assert len(heads) == len(set(heads)), f"ranges that are served twice, of {sorted(heads)}"

    def run(self) -> None:
        self.network.run_until(self._check_heads_and_go_on, until_s=ENDED_S)
        lost = self._lost_ranges()
        for program in self.living_programs():
            self._check_program(program, lost)
        for index in set(range(len(self.layout))) - lost:
            self._check_range(index)
        self._check_records()
        if lost:
            self.kinds["lost"] += 1

    def seen(self) -> Counter[str]:
        """What has happened to whom."""
        return Counter({*self.kinds, *(fault.partition("(")[0] for fault in self.network.fired)})

    def kills_in_the_middle(self) -> list[Kill]:
        """Of a server that has just told another one of a new chain, or is being told, if one other at least stays alive."""
        dying = {fault.node for fault in self.faults if isinstance(fault, Kill)}
        spared = [moment for moment in self.moments if moment[1] not in dying and len(dying) + 1 < self.num_servers]
        return [Kill(rank, at_s=at_s + 1e-9) for at_s, rank in self.chance.sample(spared, min(1, len(spared)))]

    def kill_while_ranges_move_to_what_was_added(self) -> list[Kill]:
        """Of a server that has just told an added one of a range, or was told by it; or of the added one."""
        told = [
            pair for pair in zip(self.moments[::2], self.moments[1::2], strict=True) if {each[1] for each in pair} & {*self.added}
        ]
        return [Kill(rank, at_s=at_s + 1e-9) for at_s, rank in self.chance.sample([each for pair in told for each in pair], 1)]

    def _check_heads_and_go_on(self) -> bool:
        if self.failures:
            raise self.failures[0]
        self.check_heads()
        return False

    def _living_servers(self) -> list[ServerMachine]:
        return [machine for rank, machine in self.machines.items() if self.network.is_alive(rank)]

    def _lost_ranges(self) -> set[int]:
        held = {index for machine in self._living_servers() for index in machine.chains.holdings}
        return set(range(len(self.layout))) - held

    def _check_program(self, program: Program, lost: set[int]) -> None:
        """All that a living worker has asked for was answered; if not as it wanted, then because ranges were lost."""
        if lost:
            assert program.error is None or isinstance(program.error, PeerLost), program.error
            assert program.error is not None or program.ended
        else:
            assert program.error is None and program.ended and program.quits is not None and program.quits.done(), program
            assert all(push.done() for push in program.pushes.values()), f"pushes without an answer: {program.pushes}"
            assert all(push.exception() is None for push in program.pushes.values())

    def _check_range(self, index: int) -> None:
        """All servers of a range have the same, and each gradient that was acknowledged is in it, once."""
        holdings = [machine.chains.holdings[index] for machine in self._living_servers() if index in machine.chains.holdings]
        (head,) = [holding for holding in holdings if holding.head is not None]
        assert head.active and len(head.members) == min(self.replicas + 1, len(self._living_servers()))
        assert len(holdings) == len(head.members)
        for holding in holdings:
            assert holding.replica.header() == head.replica.header()
            assert holding.replica.values.export() == head.replica.values.export()
        values: Any = head.replica.values
        assert values.counts.max() <= 1
        for program in self.programs:
            for (pushed, clock), future in program.pushes.items():
                if pushed == index and future.done() and future.exception() is None:
                    taken, count = future.result(), values.counts[program.place(clock)]
                    assert count == taken.applied or taken.applied is None, f"{taken} of {program} was applied {count} times"
                    assert taken.applied is not None or count == 1 or isinstance(self.sync, (BackupWorkers, Synchronous))

    def _check_records(self) -> None:
        """What the rule says of updates."""
        for records in self.records.values():
            for _, version, parts in records:
                assert all(part.version_read <= version for part in parts)
                if isinstance(self.sync, BackupWorkers):
                    assert {part.version_read for part in parts} == {version}
                    assert len({(part.worker, part.life) for part in parts}) == len(parts) <= self.num_workers - self.sync.spare
                elif isinstance(self.sync, Synchronous):
                    assert len({part.clock for part in parts}) == 1
                elif not isinstance(self.sync, SoftSync):
                    assert len(parts) == 1
