"""TIC and TAC: in which order to receive parameters, so that computation waits as little as possible.

A graph has receives r, which take Time(r) on one link, and compute operations, each of which needs the receives that it reads and
those of all operations before it. For the outstanding receives R let

    M(op) = sum of Time(r) over r in needs(op) & R             what has to be received before op can run; of a receive, Time(r)
    P(r)  = sum of Time(op) over op with needs(op) & R = {r}   the computation that r alone sets free
    M+(r) = min of M(op) over op with r in needs(op) and more than one outstanding receive    the next that r helps to set free

TAC compares two receives by the time that both take in either order, with computation under the second one's transfer:

    A before B   iff   M(A) + max(P(A), M(B)) + P(B)  <  M(B) + max(P(B), M(A)) + P(A)
                 iff   min(P(B), M(A))  <  min(P(A), M(B));    if equal, iff M+(A) < M+(B)

It picks a receive that is before the others, removes it from R, and computes the three quantities anew. TIC knows no times: each
receive counts 1, computation 0, and receives are sorted once by M+.

Cost:      TAC is O(|R| |ops| |R|), TIC O(|ops| |R|).
Invariant: a pure function of the graph: the same order on all workers. For two receives TAC is optimal. For a chain of
           operations, each of which reads parameters of its own, both give the order of the chain.
Reference: Hashemi, Jyothi and Campbell, "TicTac: Accelerating distributed deep learning with communication scheduling", MLSys
           2019.
Departure: TAC's comparison is no order once ties occur: (M, P, M+) = (3, 4, 7), (5, 3, 2), (1, 1, 6) are before each other in a
           circle, and what a sort makes of that depends on the sort. Here a single scan keeps the best so far, and the smaller
           number wins ties, also in TIC, where the paper leaves receives with the same M+ unordered.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class ComputeOp:
    """A computation of `seconds` that reads the receives `reads` and runs after the operations `after`, both by their numbers."""

    seconds: float
    reads: frozenset[int]
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReceiveGraph:
    """What is received, in seconds on the link, and what is computed with it. Operations come after those that they run after."""

    receive_s: tuple[float, ...]
    operations: tuple[ComputeOp, ...]

    def needs(self) -> list[frozenset[int]]:
        """For each operation the receives that it needs, those of the operations before it included."""
        needs: list[frozenset[int]] = []
        for number, operation in enumerate(self.operations):
            assert all(earlier < number for earlier in operation.after), "operations are not in topological order"
            needs.append(operation.reads.union(*(needs[earlier] for earlier in operation.after)))
        return needs


@dataclass(frozen=True, slots=True)
class ReceiveMeasures:
    """M, P and M+ of one receive."""

    receive_s: float
    frees_s: float
    next_s: float

    def is_before(self, other: ReceiveMeasures) -> bool:
        mine, others = min(other.frees_s, self.receive_s), min(self.frees_s, other.receive_s)
        return mine < others if mine != others else self.next_s < other.next_s


def tac_order(graph: ReceiveGraph) -> list[int]:
    """The receives, the one to be received first in front."""
    open_needs = [set(needed) for needed in graph.needs()]
    wait_s = [sum(graph.receive_s[number] for number in sorted(needed)) for needed in open_needs]  # M of each operation
    left, order = list(range(len(graph.receive_s))), []
    while left:
        measures = measure_receives(graph, open_needs, wait_s, left)
        picked = left.pop(first_of(measures))
        order.append(picked)
        for number, needed in enumerate(open_needs):
            if picked in needed:
                needed.remove(picked)
                wait_s[number] -= graph.receive_s[picked]
    return order


def tic_order(graph: ReceiveGraph) -> list[int]:
    """The receives by M+, where each counts 1; those with the same M+ by their numbers."""
    next_count: dict[int, float] = {}
    for needed in graph.needs():
        if len(needed) > 1:
            for number in needed:
                next_count[number] = min(next_count.get(number, inf), len(needed))
    return sorted(range(len(graph.receive_s)), key=lambda number: next_count.get(number, inf))


def first_of(measures: Sequence[ReceiveMeasures]) -> int:
    """The position of the winner of one scan from the left, which a later one has to beat."""
    best = 0
    for position in range(1, len(measures)):
        if measures[position].is_before(measures[best]):
            best = position
    return best


def measure_receives(
    graph: ReceiveGraph, open_needs: Sequence[Set[int]], wait_s: Sequence[float], outstanding: Sequence[int]
) -> list[ReceiveMeasures]:
    """M, P and M+ of the receives that are outstanding; for each operation, `open_needs` are those among them that it needs, and
    `wait_s` is its M."""
    frees_s = dict.fromkeys(outstanding, 0.0)
    next_s = dict.fromkeys(outstanding, inf)
    waiting = []
    for number, needed in enumerate(open_needs):
        if len(needed) == 1:
            frees_s[next(iter(needed))] += graph.operations[number].seconds
        elif needed:
            waiting.append(number)
    unseen = set(outstanding)
    for number in sorted(waiting, key=lambda number: wait_s[number]):  # so the first that has a receive is its minimum
        fresh = open_needs[number] & unseen
        unseen -= fresh
        next_s.update(dict.fromkeys(fresh, wait_s[number]))
    return [ReceiveMeasures(receive_s=graph.receive_s[n], frees_s=frees_s[n], next_s=next_s[n]) for n in outstanding]
