"""A plan made ready to run: cut into messages, with the order that its data needs and no other.

Each operation covers a contiguous range of elements. A range longer than a segment is cut at multiples of the segment length
(counted from element 0, so both ends of a message cut alike), and every piece becomes one task. Task b waits for task a when a
comes first in program order, both touch a common element of the same buffer, and at least one of them writes it:

    send   reads   its range          add    reads and writes its range
    copy   writes  its range          local  reads one buffer, writes the other

That is all the order there is. Segments of a later round therefore travel while earlier rounds are still under way (pipelining),
with no barrier between rounds. Only an empty vector has no elements to order it: its messages, empty too, are sent all the same
and go round by round, as a barrier's do, so that a rank whose tensor is empty while the others' are not is found out.
Compiled once per (plan, length, item size, segment), kept, and only read while running.

With a codec for messages (`message_codec.py`) the plan is cut and ordered in units in place of elements: no message cuts a unit.
"""

from __future__ import annotations

import bisect
import enum
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from stretto.collectives.plan import Buffer, Kind, Local, Operation, Plan, Recv, Send, chunk_start
from stretto.errors import ConfigurationError

if TYPE_CHECKING:
    from stretto.collectives.message_codec import MessageCodec


class Action(enum.IntEnum):
    SEND = 0
    RECEIVE = 1
    LOCAL = 2


@dataclass(frozen=True, slots=True)
class Task:
    """One message, or one piece of local work."""

    action: Action
    peer: int  # SEND: to, RECEIVE: from
    index: int  # counts the messages between these two ranks in this direction
    buffer: Buffer  # SEND: read; RECEIVE, LOCAL: written
    source: Buffer  # LOCAL: read
    start: int
    stop: int
    add: bool
    arrived_first: bool = False  # an addition in which what arrives is the first operand
    final: bool = False  # this write completes the result: a mean is scaled here


@dataclass(frozen=True, slots=True)
class Schedule:
    tasks: tuple[Task, ...]
    num_dependencies: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]
    sources: frozenset[int]
    destinations: frozenset[int]
    needs_work_buffer: bool
    # (peer, elements; with a codec: bytes) over all messages: the ledger's
    sent: tuple[tuple[int, int], ...] = ()
    received: tuple[tuple[int, int], ...] = ()

    def among(self, members: tuple[int, ...]) -> Schedule:
        """The same schedule with every peer, which is a place in the plan, replaced by the member at that place."""
        return replace(
            self,
            tasks=tuple(task if task.action is Action.LOCAL else replace(task, peer=members[task.peer]) for task in self.tasks),
            sources=frozenset(members[place] for place in self.sources),
            destinations=frozenset(members[place] for place in self.destinations),
            sent=tuple((members[place], amount) for place, amount in self.sent),
            received=tuple((members[place], amount) for place, amount in self.received),
        )


def compile_plan(plan: Plan, num_elements: int, segment_elements: int) -> Schedule:
    """Cut `plan` for a vector of `num_elements` into messages of at most `segment_elements`, and order them."""
    check_length(plan, num_elements)
    tasks = _cut(plan, num_elements, max(1, segment_elements))
    if plan.kind is Kind.BARRIER or num_elements == 0:
        edges = _round_by_round(plan)
    else:
        tasks, edges = _mark_final(plan, tasks, num_elements), _data_dependencies(tasks)
    successors: list[list[int]] = [[] for _ in tasks]
    for before, after in edges:
        successors[before].append(after)
    counts = [0] * len(tasks)
    for _, after in edges:
        counts[after] += 1
    return Schedule(
        tasks=tuple(tasks),
        num_dependencies=tuple(counts),
        successors=tuple(tuple(after) for after in successors),
        sources=frozenset(task.peer for task in tasks if task.action is Action.RECEIVE),
        destinations=frozenset(task.peer for task in tasks if task.action is Action.SEND),
        needs_work_buffer=plan.needs_work_buffer,
        sent=_totals_by_peer(tasks, Action.SEND),
        received=_totals_by_peer(tasks, Action.RECEIVE),
    )


def compile_encoded(plan: Plan, num_elements: int, segment_bytes: int, codec: MessageCodec) -> Schedule:
    """Cut and order `plan` in units of `codec`, with messages of at most `segment_bytes` (and at least one unit) when encoded.

    The tasks' ranges are elements again; the ledger's numbers are bytes, exact for a last unit that is shorter.
    """
    unit = codec.unit
    in_units = compile_plan(plan, -(-num_elements // unit), segment_bytes // codec.num_bytes(unit))
    tasks = [replace(task, start=task.start * unit, stop=min(task.stop * unit, num_elements)) for task in in_units.tasks]
    return replace(
        in_units,
        tasks=tuple(tasks),
        sent=_totals_by_peer(tasks, Action.SEND, codec.num_bytes),
        received=_totals_by_peer(tasks, Action.RECEIVE, codec.num_bytes),
    )


def _totals_by_peer(tasks: list[Task], action: Action, size: Callable[[int], int] = int) -> tuple[tuple[int, int], ...]:
    totals: dict[int, int] = defaultdict(int)
    for task in tasks:
        if task.action is action:
            totals[task.peer] += size(task.stop - task.start)
    return tuple(totals.items())


def check_length(plan: Plan, num_elements: int) -> None:
    """Refuse a vector that this plan cannot cut."""
    if plan.kind is Kind.ALL_TO_ALL and num_elements % plan.num_chunks:
        raise ConfigurationError(
            f"{plan.kind.value} of {num_elements} elements among {plan.size} ranks: every rank gives every other an equal part, "
            f"and {num_elements} is not a multiple of {plan.size}.\n"
            f"Pad the tensor to {-(-num_elements // plan.size) * plan.size} elements."
        )


def _cut(plan: Plan, num_elements: int, segment: int) -> list[Task]:
    tasks: list[Task] = []
    counters: dict[tuple[type, int], int] = defaultdict(int)
    for operation in plan.operations:
        start = chunk_start(operation.lo, num_elements, plan.num_chunks)
        stop = chunk_start(operation.hi, num_elements, plan.num_chunks)
        if start == stop and num_elements and plan.kind is not Kind.BARRIER:
            continue  # an empty chunk: neither side sends it
        # A transposition receives a chunk at another place than it was sent from: there both ends count from its start.
        origin = start if plan.kind is Kind.ALL_TO_ALL else 0
        for first, last in pairwise(_cut_points(start, stop, segment, origin)):
            peer, index = -1, 0
            if not isinstance(operation, Local):
                peer = operation.peer
                key = (type(operation), peer)
                index = counters[key]
                counters[key] += 1
            tasks.append(_task(operation, plan.rank, peer, index, first, last))
    return tasks


def _cut_points(start: int, stop: int, segment: int, origin: int) -> list[int]:
    if stop - start <= segment:
        return [start, stop]
    return [start, *range(origin + ((start - origin) // segment + 1) * segment, stop, segment), stop]


def _task(operation: Operation, rank: int, peer: int, index: int, start: int, stop: int) -> Task:
    if isinstance(operation, Send):
        return Task(Action.SEND, peer, index, operation.buffer, operation.buffer, start, stop, False)
    if isinstance(operation, Recv):
        # Partners that exchange their sums must compute the same expression to get the same bits: -0.0 and 0.0, or two NaNs, do
        # not commute. So the lower place in the plan comes first. (Additions in WORK follow the order of places already.)
        first = operation.add and operation.buffer is Buffer.DATA and peer < rank
        return Task(Action.RECEIVE, peer, index, operation.buffer, operation.buffer, start, stop, operation.add, first)
    return Task(Action.LOCAL, peer, index, operation.target, operation.source, start, stop, operation.add)


def _round_by_round(plan: Plan) -> list[tuple[int, int]]:
    """A barrier moves no data, so its order is the rounds' own: everything of a round waits for all earlier rounds."""
    steps = [operation.step for operation in plan.operations]
    return [(i, j) for j, later in enumerate(steps) for i, earlier in enumerate(steps) if earlier < later]


def _data_dependencies(tasks: list[Task]) -> list[tuple[int, int]]:
    """(a, b) for all tasks a before b with a common element that at least one of them writes."""
    points = sorted({point for task in tasks for point in (task.start, task.stop)})
    last_write: dict[tuple[Buffer, int], int] = {}
    reads_since: dict[tuple[Buffer, int], list[int]] = defaultdict(list)
    edges: set[tuple[int, int]] = set()
    for number, task in enumerate(tasks):
        cells = range(bisect.bisect_left(points, task.start), bisect.bisect_left(points, task.stop))
        for buffer in _read_buffers(task):
            for cell in cells:
                if (buffer, cell) in last_write:
                    edges.add((last_write[buffer, cell], number))
        if task.action is not Action.SEND:
            for cell in cells:
                place = (task.buffer, cell)
                if place in last_write:
                    edges.add((last_write[place], number))
                edges.update((reader, number) for reader in reads_since.pop(place, ()))
                last_write[place] = number
        for buffer in _read_buffers(task):
            if task.action is Action.SEND or buffer is not task.buffer:
                for cell in cells:
                    reads_since[buffer, cell].append(number)
    return sorted(edges)


def _read_buffers(task: Task) -> tuple[Buffer, ...]:
    if task.action is Action.SEND:
        return (task.buffer,)
    if task.action is Action.LOCAL:
        return (task.source, task.buffer) if task.add else (task.source,)
    return (task.buffer,) if task.add else ()


def _mark_final(plan: Plan, tasks: list[Task], num_elements: int) -> list[Task]:
    """Mark the writes that complete the result on this rank: the last one to an element of DATA, if it is not a copy of
    what another rank has completed. (What a rank copies in was completed, and so scaled, by its sender.)"""
    low, high = _owned(plan, num_elements)
    points = sorted({point for task in tasks for point in (task.start, task.stop)} | {low, high})
    done: set[int] = set()
    marked = list(tasks)
    for number in range(len(tasks) - 1, -1, -1):
        task = tasks[number]
        if task.action is Action.SEND or task.buffer is not Buffer.DATA:
            continue
        cells = set(range(bisect.bisect_left(points, task.start), bisect.bisect_left(points, task.stop)))
        fresh = cells - done
        done |= cells
        completes = task.add or task.action is Action.LOCAL
        if completes and fresh and low <= task.start and task.stop <= high:
            assert fresh == cells, "a plan completes part of a message: it cannot be scaled in one go"
            marked[number] = replace(task, final=True)
    return marked


def _owned(plan: Plan, num_elements: int) -> tuple[int, int]:
    """The elements that this rank ends up completing or copying in: all of them, its own chunk, or none."""
    if plan.kind is Kind.ALL_REDUCE or (plan.kind is Kind.REDUCE and plan.rank == plan.root):
        return 0, num_elements
    if plan.kind is Kind.REDUCE_SCATTER:
        return (
            chunk_start(plan.rank, num_elements, plan.num_chunks),
            chunk_start(plan.rank + 1, num_elements, plan.num_chunks),
        )
    return 0, 0
