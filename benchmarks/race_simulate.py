"""Step rates where a message takes 50 ms, in virtual time: `race.py --simulate` prints and writes the table.

Workers are programs on `stretto.testing.VirtualNetwork`: a step computes, and exchanges what its way of training sends, message
by message, as long as links of that latency and rate take for it. All-reduces follow the plans of `stretto.collectives`, gossip
the graphs of `stretto.aggregate.gossip`, and bytes are those that the codecs promise. What follows from the rule alone is in the
table (who waits for whom, how often, for how many bytes); processors, threads and losses are not.

    no communication    computes
    DDP                 a ring, as gloo has it, in two buckets, of which the first leaves before backward has ended
    Strategy()          the same with the all-reduce that is fastest on this network, as `auto` would choose
    local_sgd, diloco   `every` steps, then an all-reduce for which all wait; the two differ in arithmetic only
    streaming_diloco    a quarter of the model in every 25th step, in four bits, under way for 5 steps while computation goes on
    dpsgd, choco_sgd    a message to each neighbour while the step computes, after which one from each is waited for
    sgp                 a message to one worker after each step, and one from another is waited for
    overlap_sgp         the same, of the step before the last: computation goes on meanwhile

With a race's result (`--steps-of`) there is the time to its loss as well: the steps that a contender took to that in the lab, at
the rate that it has here.

Links: the rate at which DDP's bytes take ten times as long as a step (the lab's, in the race rho10), and 50 ms for every message.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import harness
import msgspec
from race_report import DDP, RaceReport, steps_to
from race_text import shown
from race_worker import PacedGpt

from stretto.aggregate.gossip.exchange import UNASKED_BYTES
from stretto.aggregate.gossip.graph import MixingGraph
from stretto.aggregate.gossip.graphs import OnePeerExponential, Ring
from stretto.bench.machine import MachineInfo, describe
from stretto.bench.turns import now
from stretto.collectives import catalogue
from stretto.collectives.plan import Kind, Plan, Recv, Send, chunk_start
from stretto.compress.layout import Layout
from stretto.compress.top_k import TopK
from stretto.protocol.machine import Actions, Machine, Reply, SendMessage
from stretto.testing.network_model import Link, NetworkModel
from stretto.testing.virtual_network import VirtualNetwork

SIZES = (4, 16)
STEP_S, RHO, LATENCY_S, STEPS, EVERY = 0.085, 10.0, 0.05, 200, 20
PERIOD, FRAGMENTS, OVERLAP, BITS = 100, 4, 5, 4  # of streaming_diloco()
FIRST_BUCKET = 1 << 20
SLICE_BYTES = 128 << 10
CLAIMS = (("streaming_diloco()", "no communication", 0.9), ("sgp()", "DDP", 1.3), ("choco_sgd(TopK(0.05))", "DDP", 4.0))
Waits = float | Future[Any] | Sequence[Future[Any]]
Program = Generator[Waits, None, None]


class Chunk(msgspec.Struct, frozen=True):
    exchange: int


class Part(NamedTuple):
    """A message to a peer of so many bytes, after the receives with these numbers; or one from it (None)."""

    peer: int
    num_bytes: int | None
    after: frozenset[int] = frozenset()


class Exchange(NamedTuple):
    """Messages of one exchange as this worker has them. Receives are numbered by their place in the list."""

    number: int
    parts: Sequence[Part]


class UnderWay:
    """What is left of an exchange: the k-th message from a peer is for the k-th receive from it."""

    def __init__(self, ticket: int, parts: Sequence[Part]) -> None:
        self.ticket = ticket
        self.sends = [part for part in parts if part.num_bytes is not None]
        self.receives: dict[int, deque[int]] = {}
        for place, part in enumerate(parts):
            if part.num_bytes is None:
                self.receives.setdefault(part.peer, deque()).append(place)
        self.came: set[int] = set()


class Exchanger(Machine):
    """Carries out exchanges: what is sent leaves when what it is made of has come."""

    header_type = Chunk

    def __init__(self) -> None:
        self._early: dict[int, list[int]] = {}  # exchange that has not begun here -> who has sent something
        self._under_way: dict[int, UnderWay] = {}

    def on_request(self, now: float, ticket: int, request: Exchange) -> Actions:
        exchange = self._under_way[request.number] = UnderWay(ticket, request.parts)
        for source in self._early.pop(request.number, []):
            exchange.came.add(exchange.receives[source].popleft())
        return self._go_on(request.number)

    def on_message(self, now: float, source: int, header: Chunk, payload: memoryview) -> Actions:
        if (exchange := self._under_way.get(header.exchange)) is None:
            self._early.setdefault(header.exchange, []).append(source)
            return ()
        exchange.came.add(exchange.receives[source].popleft())
        return self._go_on(header.exchange)

    def _go_on(self, number: int) -> Actions:
        exchange = self._under_way[number]
        ready = [part for part in exchange.sends if part.after <= exchange.came]
        exchange.sends = [part for part in exchange.sends if not part.after <= exchange.came]
        actions: list[SendMessage | Reply] = [SendMessage(part.peer, Chunk(number), bytes(part.num_bytes or 0)) for part in ready]
        if not exchange.sends and not any(exchange.receives.values()):
            del self._under_way[number]
            actions.append(Reply(exchange.ticket))
        return actions


class Worker:
    """One worker's view, for the programs below."""

    def __init__(self, network: VirtualNetwork, rank: int, size: int, num_parameters: int) -> None:
        self.network, self.rank, self.size = network, rank, size
        self.num_parameters, self.num_bytes = num_parameters, 4 * num_parameters
        self._numbers = 0
        self.steps: list[float] = []

    def stepped(self) -> None:
        self.steps.append(self.network.now)

    def all_reduce(self, algorithm: str, num_bytes: int) -> Future[Any]:
        plan = catalogue.find(Kind.ALL_REDUCE, algorithm).bind()(self.rank, self.size)
        return self._exchange(parts_of(plan, num_bytes))

    def gossip(self, graph: MixingGraph, step: int, num_bytes: int, after: Future[Any] | None) -> Future[Any]:
        """`after`: the word of the targets, before which nothing leaves. Targets share the link."""
        targets, sources = graph.targets(self.rank, self.size, step), graph.sources(self.rank, self.size, step)
        slices = [min(SLICE_BYTES, num_bytes - start) for start in range(0, num_bytes, SLICE_BYTES)]
        parts = [Part(target, length) for length in slices for target in targets]
        parts += [Part(source, None) for _ in slices for source in sources]
        if after is None:
            return self._exchange(parts)
        done: Future[Any] = Future()
        after.add_done_callback(lambda _: self._exchange(parts).add_done_callback(lambda _: done.set_result(None)))
        return done

    def ready(self, graph: MixingGraph, step: int) -> Future[Any]:
        """Tell those that will send in this step, and hear from those that will be sent to."""
        parts = [Part(source, 0) for source in graph.sources(self.rank, self.size, step)]
        return self._exchange([*parts, *(Part(target, None) for target in graph.targets(self.rank, self.size, step))])

    def _exchange(self, parts: Sequence[Part]) -> Future[Any]:
        self._numbers += 1
        return self.network.request(self.rank, Exchange(self._numbers, parts))


def parts_of(plan: Plan, num_bytes: int) -> list[Part]:
    """The plan's messages, with the bytes of their chunks. A chunk leaves when all that the plan receives into it before has
    come."""

    def until(chunk: int) -> int:
        return chunk_start(chunk, num_bytes, plan.num_chunks)

    found: list[Part] = []
    into: dict[int, set[int]] = {}  # chunk -> receives into it so far
    for operation in plan.operations:
        if isinstance(operation, Send):
            after = frozenset().union(*(into.get(chunk, ()) for chunk in range(operation.lo, operation.hi)))
            found.append(Part(operation.peer, until(operation.hi) - until(operation.lo), after))
        elif isinstance(operation, Recv):
            for chunk in range(operation.lo, operation.hi):
                into.setdefault(chunk, set()).add(len(found))
            found.append(Part(operation.peer, None))
    return found


# -- what each does in its steps --------------------------------------------------------------------------------------


def alone(worker: Worker) -> Program:
    for _ in range(STEPS):
        yield STEP_S
        worker.stepped()


def ddp(worker: Worker, algorithm: str = "ring") -> Program:
    """Two thirds of a step are backward, in which gradients come evenly."""
    first = min(FIRST_BUCKET, worker.num_bytes)
    early_s = STEP_S * (1 / 3 + 2 / 3 * first / worker.num_bytes)
    for _ in range(STEPS):
        yield early_s
        one = worker.all_reduce(algorithm, first)
        yield STEP_S - early_s
        yield [one, worker.all_reduce(algorithm, worker.num_bytes - first)]
        worker.stepped()


def local(worker: Worker, algorithm: str) -> Program:
    for step in range(STEPS):
        yield STEP_S
        if (step + 1) % EVERY == 0:
            yield worker.all_reduce(algorithm, worker.num_bytes)
        worker.stepped()


def streaming(worker: Worker, algorithm: str, overlap: int) -> Program:
    """A fragment every PERIOD / FRAGMENTS steps; what has to have come after `overlap` steps is waited for then."""
    under_way: dict[int, Future[Any]] = {}
    for step in range(STEPS):
        yield STEP_S
        if step in under_way:
            yield under_way.pop(step)
        if (step + 1) % (PERIOD // FRAGMENTS) == 0:
            under_way[step + overlap] = worker.all_reduce(algorithm, worker.num_parameters * BITS // 8 // FRAGMENTS)
        worker.stepped()


def gossip(worker: Worker, graph: MixingGraph, num_bytes: int, *, early: bool = False, late: int = 0) -> Program:
    """`early`: what is sent leaves before the step computes; `late`: for how many steps what comes may be on its way. A large
    message waits for the word that its target is done with the step before (`aggregate/gossip/exchange.py`)."""
    under_way: list[Future[Any]] = []
    word: Future[Any] | None = None
    for step in range(STEPS):
        if not early:
            yield STEP_S
        under_way.append(worker.gossip(graph, step, num_bytes, word))
        if early:
            yield STEP_S
        if len(under_way) > late:
            yield under_way.pop(0)
        worker.stepped()
        if num_bytes > UNASKED_BYTES and not late:
            word = worker.ready(graph, step + 1)


def ways(size: int) -> dict[str, Callable[[Worker], Program]]:
    """Name in the table -> the program of one worker."""
    parameters = num_parameters()
    best, best_quarter = best_algorithm(size, 4 * parameters), best_algorithm(size, parameters * BITS // 8 // FRAGMENTS)
    layout = Layout.of((name, parameter.shape) for name, parameter in PacedGpt(None).named_parameters())
    sparse = TopK(0.05).bytes_sent(layout, 0, 2, "auto")
    assert sparse is not None
    return {
        "no communication": alone,
        "DDP": ddp,
        f"Strategy(), {best}": partial(ddp, algorithm=best),
        f"local_sgd(every={EVERY}), diloco(every={EVERY})": partial(local, algorithm=best),
        "streaming_diloco()": partial(streaming, algorithm=best_quarter, overlap=OVERLAP),
        "dpsgd(), ring": partial(gossip, graph=Ring(), num_bytes=4 * parameters, early=True),
        "sgp()": partial(gossip, graph=OnePeerExponential(), num_bytes=4 * parameters),
        "overlap_sgp(), one step late": partial(gossip, graph=OnePeerExponential(), num_bytes=4 * parameters, late=1),
        "choco_sgd(TopK(0.05)), ring": partial(gossip, graph=Ring(), num_bytes=sparse, early=True),
    }


# -- running them -----------------------------------------------------------------------------------------------------


def num_parameters() -> int:
    return sum(parameter.numel() for parameter in PacedGpt(None).parameters())


def model_of(size: int) -> NetworkModel:
    """The rate is that at which DDP's bytes take RHO steps, with so many workers."""
    ddp_bytes = 2 * (size - 1) / size * 4 * num_parameters()
    return NetworkModel(Link(latency_s=LATENCY_S, bytes_per_s=ddp_bytes / (RHO * STEP_S)))


def steps_per_second(size: int, program: Callable[[Worker], Program]) -> float:
    """Of a worker in the mean, over the second half of the run."""
    network = VirtualNetwork(seed=0, model=model_of(size), reliable=True)
    workers = [Worker(network, rank, size, num_parameters()) for rank in range(size)]
    for worker in workers:
        network.add(worker.rank, Exchanger())
    for worker in workers:
        network.at(0.0, partial(_go_on, network, program(worker)))
    network.run(until_s=3600.0, max_events=10_000_000)
    assert all(len(worker.steps) == STEPS for worker in workers)
    half = STEPS // 2
    return statistics.fmean(half / (worker.steps[-1] - worker.steps[half - 1]) for worker in workers)


def _go_on(network: VirtualNetwork, program: Program) -> None:
    """Up to the program's next wait, after which it goes on."""
    wait = next(program, None)
    if isinstance(wait, float):
        network.at(network.now + wait, partial(_go_on, network, program))
    elif wait is not None:
        futures = [wait] if isinstance(wait, Future) else list(wait)
        _after_all(network, program, futures)


def _after_all(network: VirtualNetwork, program: Program, futures: list[Future[Any]]) -> None:
    if not futures:
        network.at(network.now, partial(_go_on, network, program))
        return
    futures[0].add_done_callback(lambda _: _after_all(network, program, futures[1:]))


def best_algorithm(size: int, num_bytes: int) -> str:
    """The all-reduce that is fastest on this network, tried out."""

    def seconds(algorithm: str) -> float:
        network = VirtualNetwork(seed=0, model=model_of(size), reliable=True)
        workers = [Worker(network, rank, size, num_parameters()) for rank in range(size)]
        for worker in workers:
            network.add(worker.rank, Exchanger())
        done = [worker.all_reduce(algorithm, num_bytes) for worker in workers]
        network.run_until(lambda: all(each.done() for each in done), until_s=3600.0)
        return network.now

    return min(catalogue.names(Kind.ALL_REDUCE), key=seconds)


class SimulatedRow(msgspec.Struct, frozen=True):
    way: str
    steps_per_second: float


class SimulatedRace(msgspec.Struct, frozen=True, kw_only=True):
    machine: MachineInfo
    date: str
    num_parameters: int
    workers: dict[int, list[SimulatedRow]]
    steps: dict[str, list[float | None]] = {}  # to the loss of a race, of each seed


def simulate(race: RaceReport | None) -> SimulatedRace:
    workers = {
        size: [SimulatedRow(way, round(steps_per_second(size, program), 4)) for way, program in ways(size).items()]
        for size in SIZES
    }
    steps = {} if race is None else {name: steps_to(race, name) for name in race.names}
    return SimulatedRace(machine=describe(), date=now(), num_parameters=num_parameters(), workers=workers, steps=steps)


def claims(report: SimulatedRace) -> list[str]:
    """Of four workers."""
    rates = {row.way.partition(", ")[0]: row.steps_per_second for row in report.workers[SIZES[0]]}
    lines = harness.table("claim", "target", "simulated", "verdict")
    for way, base, target in CLAIMS:
        found = rates[way] / rates[base]
        lines.append(f"| {way}: steps per second, x {base} | {target:g} | {found:.2f} | {harness.verdict(found >= target)} |")
    return lines


def as_markdown(report: SimulatedRace, command: str) -> list[str]:
    lines = [
        *harness.heading("Step rates with a latency of 50 ms, in virtual time", report.date, command, report.machine),
        f"{report.num_parameters / 1e6:.2f} M parameters; a step computes for {STEP_S * 1e3:g} ms; a message takes "
        f"{LATENCY_S * 1e3:g} ms and its bytes, over links on which DDP's bytes take {RHO:g} times as long as a step computes.",
    ]
    lines += ["", *claims(report)]
    for size, rows in report.workers.items():
        rates = {row.way: row.steps_per_second for row in rows}
        columns = harness.table(f"{size} workers", "steps/s", "x DDP", "x no communication")
        lines += ["", *columns]
        for way, rate in rates.items():
            lines.append(f"| {way} | {rate:.2f} | {rate / rates[DDP]:.2f} | {rate / rates['no communication']:.2f} |")
    return [*lines, *(_times_to_loss(report) if report.steps else [])]


def _times_to_loss(report: SimulatedRace) -> list[str]:
    """Of four workers: steps from the race, rates from the simulation."""
    rates = {row.way: row.steps_per_second for row in report.workers[SIZES[0]]}
    lines = [
        "",
        "Steps to DDP's loss as each seed took them in the lab (`race.py rho10`), at the rates of four workers here:",
        "",
    ]
    lines += harness.table("4 workers", "steps to DDP's loss", "reaches it, x sooner than DDP")
    for way, rate in rates.items():
        for name in set(way.split(", ")) & set(report.steps):
            both = list(zip(report.steps[DDP], report.steps[name], strict=True))
            sooner = [None if mine is None or ddp is None else ddp / mine * rate / rates[DDP] for ddp, mine in both]
            lines.append(f"| {name} | {shown(report.steps[name], 0)} | {shown(sooner)} |")
    return lines


def write(command: str, folder: Path, race: RaceReport | None) -> None:
    report = simulate(race)
    text = as_markdown(report, command)
    stem = harness.write("race_latency", report, text, report.date, report.machine, folder)
    harness.show(text[4:], stem)
