"""What a collective costs, counted from its plan.

The model: P ranks with one full-duplex link each. A message of b bytes takes alpha + b beta, adding b bytes takes b
gamma. A plan runs round by round; messages that one rank sends (or receives) in one round follow each other on its
link:

    time to send      = sum over the rank's messages of this round (alpha + b beta); to receive likewise
    round of one rank = max(time to send, time to receive) + gamma * bytes added
    T                 = sum over rounds of the slowest rank's round

With `lanes` > 1 a rank has that many links, and the messages of a round are spread over them. Local copies are free.

Cut into k segments that follow each other, the first takes T(m/k) and each further one as long as the busiest rank is
occupied by one segment, its link and its adder working side by side:

    T_k = T(m/k) + (k-1) * max over ranks of max(time to send all, time to receive all, gamma * bytes added)

`docs/closed_forms.py` has the formulas of the literature for the same quantities; a test holds the two equal, for every
algorithm whose formula is exact. Where the textbook formula differs from what is counted:

- bidirectional ring: the usual 2(P-1) alpha + m(P-1)/P beta is for separate links per direction (`lanes=2`). On one
  link the two messages of a round follow each other, and the count is 4(P-1) alpha + 2 m(P-1)/P beta.
- segments of a reduce-then-broadcast: (2h+k-1)(alpha + (m/k)(beta + gamma)) lets the sum go back while the next segment
  comes, on another link, and charges gamma on the way back too. On one link a rank inside the chain has two messages
  per segment each way: 2(h+k-1)(alpha + (m/k) beta). With `lanes=2` and gamma = 0 the two agree.
- double binary tree: the formula is an approximation for the best k. The counted rounds never exceed its 4(h+k).

Lower bound (Ben-Nun and Hoefler, "Demystifying parallel and distributed deep learning", ACM CSUR 52(4), 2019): an
all-reduce takes at least alpha log2 P + 2 m beta (P-1)/P. No plan beats it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil

from stretto.collectives.catalogue import find
from stretto.collectives.plan import Kind, Plan, PlanMaker, Recv, Send
from stretto.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """A rank's connection: seconds per message, per byte sent, and per byte added; `lanes` links per rank. `network.py` measures
    them."""

    alpha: float
    beta: float
    gamma: float = 0.0
    lanes: int = 1

    def __post_init__(self) -> None:
        if min(self.alpha, self.beta, self.gamma) < 0 or self.lanes < 1:
            raise ConfigurationError(
                f"{self}: times cannot be negative, and a rank has at least one link. "
                f"Write for instance LinkCosts(alpha=50e-6, beta=8e-9) for 50 microseconds and 1 Gbit/s."
            )

    def transfer(self, sizes: tuple[float, ...]) -> float:
        """Seconds for messages of these many bytes from (or to) one rank."""
        if self.lanes == 1 or len(sizes) < 2:
            return len(sizes) * self.alpha + sum(sizes) * self.beta
        lanes = [0.0] * self.lanes
        for size in sorted(sizes, reverse=True):  # the longest first, each to the lane that is free first
            lanes[lanes.index(min(lanes))] += self.alpha + size * self.beta
        return max(lanes)


@dataclass(frozen=True, slots=True)
class Load:
    """What one rank does in one round, or in all of them, in bytes or in parts of the vector."""

    sent: tuple[float, ...]  # one number per message
    received: tuple[float, ...]
    added: float

    def in_turn(self, num_bytes: float, link: LinkCosts) -> float:
        """Seconds for `num_bytes` per unit when adding begins after receiving."""
        out, into = (tuple(part * num_bytes for part in parts) for parts in (self.sent, self.received))
        return max(link.transfer(out), link.transfer(into)) + self.added * num_bytes * link.gamma

    def side_by_side(self, num_bytes: float, link: LinkCosts) -> float:
        """Seconds for `num_bytes` per unit when sending, receiving and adding overlap."""
        out, into = (tuple(part * num_bytes for part in parts) for parts in (self.sent, self.received))
        return max(link.transfer(out), link.transfer(into), self.added * num_bytes * link.gamma)


@dataclass(frozen=True, slots=True)
class PlanCost:
    """A plan's cost for any length and link. Units are chunks, taken to be of equal length m / num_chunks."""

    kind: Kind
    algorithm: str
    size: int
    num_chunks: int
    rounds: tuple[tuple[Load, ...], ...]  # per round the different loads of the ranks
    totals: tuple[Load, ...]  # the different loads of the ranks over all rounds

    @property
    def num_rounds(self) -> int:
        """Rounds of one message per rank and direction: a round with several messages at one rank counts as so many."""
        return sum(max(max(len(load.sent), len(load.received)) for load in loads) for loads in self.rounds)

    @property
    def sent(self) -> Fraction:
        """What the busiest rank sends, in parts of the vector."""
        return self._part(max((sum(load.sent) for load in self.totals), default=0))

    @property
    def received(self) -> Fraction:
        return self._part(max((sum(load.received) for load in self.totals), default=0))

    @property
    def added(self) -> Fraction:
        """What is added one after the other, in parts of the vector: per round the most any rank adds."""
        return self._part(sum(max(load.added for load in loads) for loads in self.rounds))

    def _part(self, chunks: float) -> Fraction:
        return Fraction(int(chunks), self.num_chunks)

    def time(self, num_bytes: float, link: LinkCosts) -> float:
        """Seconds for a vector of `num_bytes`, sent in whole messages round by round."""
        chunk = num_bytes / self.num_chunks
        return sum(max(load.in_turn(chunk, link) for load in loads) for loads in self.rounds)

    def pipelined(self, num_bytes: float, link: LinkCosts, num_segments: int) -> float:
        """Seconds when every message is cut into `num_segments` that follow each other."""
        chunk = num_bytes / num_segments / self.num_chunks
        bottleneck = max((load.side_by_side(chunk, link) for load in self.totals), default=0.0)
        return self.time(num_bytes / num_segments, link) + (num_segments - 1) * bottleneck

    def longest_message(self, num_bytes: float) -> float:
        """Bytes of the longest single message."""
        return num_bytes / self.num_chunks * max((max(load.sent, default=0) for load in self.totals), default=0)


def count(maker: PlanMaker, size: int, *, symmetric: bool = False) -> PlanCost:
    """Count a plan's messages. `symmetric`: all ranks have the load of rank 0, so only that one is looked at."""
    plans = [maker(rank, size) for rank in range(1 if symmetric else size)]
    rounds, totals = _loads(plans)
    return PlanCost(plans[0].kind, plans[0].algorithm, size, plans[0].num_chunks, rounds, totals)


def _loads(plans: list[Plan]) -> tuple[tuple[tuple[Load, ...], ...], tuple[Load, ...]]:
    """The different loads per round, and over all rounds."""
    rounds: defaultdict[int, set[Load]] = defaultdict(set)
    totals: set[Load] = set()
    for plan in plans:
        per_step = _loads_of_rank(plan)
        for step, load in per_step.items():
            rounds[step].add(load)
        totals.add(
            Load(
                tuple(part for load in per_step.values() for part in load.sent),
                tuple(part for load in per_step.values() for part in load.received),
                sum(load.added for load in per_step.values()),
            )
        )
    return tuple(tuple(rounds[step]) for step in sorted(rounds)), tuple(totals)


def _loads_of_rank(plan: Plan) -> dict[int, Load]:
    sent: defaultdict[int, list[int]] = defaultdict(list)
    received: defaultdict[int, list[int]] = defaultdict(list)
    added: defaultdict[int, int] = defaultdict(int)
    for operation in plan.operations:
        size = operation.hi - operation.lo
        if isinstance(operation, Send):
            sent[operation.step].append(size)
        elif isinstance(operation, Recv):
            received[operation.step].append(size)
        if not isinstance(operation, Send) and operation.add:
            added[operation.step] += size
    return {
        step: Load(tuple(sent[step]), tuple(received[step]), added[step])
        for step in sorted({operation.step for operation in plan.operations})
    }


# ---------------------------------------------------------------- prediction, for the chooser


@lru_cache(maxsize=512)
def plan_cost(kind: Kind, algorithm: str, size: int, *, group: int = 1) -> PlanCost:
    """The counted cost of a plan of the catalogue, remembered."""
    entry = find(kind, algorithm)
    return count(entry.bind(group=group), size, symmetric=entry.symmetric)


def predict(
    kind: Kind, algorithm: str, size: int, num_bytes: float, link: LinkCosts, segment_bytes: float, *, group: int = 1
) -> float:
    """Seconds to expect when messages above `segment_bytes` are cut into segments that follow each other."""
    if not segment_bytes > 0:
        raise ConfigurationError(
            f"predict(segment_bytes={segment_bytes}): a segment has at least one byte, or nothing would be sent. "
            f"Write for instance segment_bytes=1 << 20, or float('inf') for whole messages."
        )
    counted = plan_cost(kind, algorithm, size, group=group)
    return counted.pipelined(num_bytes, link, max(1, ceil(counted.longest_message(num_bytes) / segment_bytes)))
