"""What a graph of gossip is: who sends to whom in which step, and with which weight. And a graph of the user's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from stretto.aggregate.gossip import mixing
from stretto.aggregate.gossip.mixing import Arc, Weights
from stretto.errors import ConfigurationError


class MixingGraph(ABC):
    """Neighbours and weights for any number of workers and any step. Subclasses are frozen values."""

    __slots__ = ()
    directed: ClassVar[bool] = False  # whether some worker sends to one that does not send to it
    wants: ClassVar[str] = ""  # how many workers it wants, for messages

    @abstractmethod
    def targets(self, rank: int, size: int, step: int = 0) -> Sequence[int]:
        """To whom worker `rank` of `size` sends in a step, in the order of ranks."""

    def sources(self, rank: int, size: int, step: int = 0) -> list[int]:
        """From whom it receives."""
        if not self.directed:
            return list(self.targets(rank, size, step))
        return [other for other in range(size) if rank in self.targets(other, size, step)]

    def arcs(self, size: int, step: int = 0) -> list[Arc]:
        """All of a step, as (sender, receiver)."""
        return [(rank, target) for rank in range(size) for target in self.targets(rank, size, step)]

    def weights(self, size: int, step: int = 0) -> Weights:
        """The mixing matrix of a step: W[i, j] is the share of worker j's values that worker i takes. Metropolis weights, or, of
        a directed graph, the same share for each target and for oneself."""
        arcs = self.arcs(size, step)
        return mixing.uniform(arcs, size) if self.directed else mixing.metropolis(arcs, size)

    def period(self, size: int) -> int | None:
        """After how many steps the graph is the same again; None: never."""
        return 1

    def spectral_gap(self, size: int) -> float:
        """How much of the workers' differences disappears in a step, in the mean over a period: 1 - rho^(1/period), with rho the
        second largest eigenvalue of the product of its matrices."""
        self.check_size(size)
        return mixing.spectral_gap([self.weights(size, step) for step in range(self.period(size) or 1)])

    def fault_for(self, size: int) -> str | None:
        """Why there is no such graph of so many workers, and what there is; None if there is one."""
        return None

    def check_size(self, size: int) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigurationError(f"{self!r} of {size!r} workers: a job has 1 or more. Give their number, for instance 8.")
        if (fault := self.fault_for(size)) is not None:
            raise ConfigurationError(f"{self!r} in a job of {size} workers: {fault}")

    def describe(self, size: int) -> str:
        """In a line: neighbours, period and gap."""
        self.check_size(size)
        period = self.period(size)
        degrees = {len(self.targets(rank, size, step)) for rank in range(size) for step in range(period or 1)}
        least, most = min(degrees), max(degrees)
        neighbours = f"{most} neighbour{'s' * (most != 1)}" if least == most else f"{least} to {most} neighbours"
        again = "" if period == 1 else ", others in every step" if period is None else f", the same again after {period} steps"
        return f"{self!r} of {size} workers: {neighbours}{again}, spectral gap {self.spectral_gap(size):.3g}"


@dataclass(frozen=True, slots=True)
class Graph(MixingGraph):
    """A graph of your own: `edges` are pairs of ranks, each joined in both directions; with `one_way=True` from the first to the
    second. It is for a job of as many workers as it names, and has to be connected.

    `shares`: the weight of each edge, in the order of `edges`; what a worker gives to nobody it keeps. Without them Metropolis
    weights, 1 / (1 + the larger number of neighbours of the two), and for one-way edges 1 / (1 + the sender's targets).
    """

    edges: tuple[Arc, ...]
    one_way: bool = False
    shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "edges", _checked_edges(self.edges, self.one_way))
        groups = mixing.components(self._all_arcs(), self.size)
        if len(groups) > 1:
            raise ConfigurationError(self._not_connected(groups))
        if self.shares is not None:
            object.__setattr__(self, "shares", _checked_shares(self.shares, len(self.edges)))
            self._check_rest()

    @property
    def directed(self) -> bool:  # type: ignore[override]
        return self.one_way

    @property
    def size(self) -> int:
        return 1 + max(max(edge) for edge in self.edges)

    def targets(self, rank: int, size: int, step: int = 0) -> Sequence[int]:
        return sorted(receiver for sender, receiver in self._all_arcs() if sender == rank)

    def weights(self, size: int, step: int = 0) -> Weights:
        weights = super(Graph, self).weights(size, step)
        if self.shares is None:
            return weights
        for (sender, receiver), share in zip(self.edges, self.shares, strict=True):
            weights[receiver, sender] = share
            if not self.one_way:
                weights[sender, receiver] = share
        return mixing.with_rest_kept(weights)

    def fault_for(self, size: int) -> str | None:
        if size == self.size:
            return None
        return f"its edges join {self.size}, ranks 0 to {self.size - 1}.\nGive edges that join ranks 0 to {size - 1}."

    def _all_arcs(self) -> list[Arc]:
        return [*self.edges] if self.one_way else [*self.edges, *((b, a) for a, b in self.edges)]

    def _not_connected(self, groups: Sequence[Sequence[int]]) -> str:
        here, there = groups[0], groups[1]
        missing = (here[-1], there[0])
        if self.one_way and mixing.leads(self.edges, *missing, self.size):
            missing = missing[::-1]
        how = ", one_way=True" if self.one_way else ""
        return (
            f"Graph({len(self.edges)} edges{how}) is not connected: no path leads from worker {missing[0]} to {missing[1]}, "
            f"and it falls into {len(groups)} groups of workers, of which {_some(here)} and {_some(there)} are two. What one "
            f"learns would never come to the other.\nAdd for instance the edge {missing}."
        )

    def _check_rest(self) -> None:
        weights = self.weights(self.size)
        for rank in range(self.size):
            given = 1.0 - weights[rank, rank]
            if given > 1.0 + mixing.TOLERANCE:
                raise ConfigurationError(
                    f"Graph(shares={self.shares!r}): worker {rank} gives away {given:.4g} of its values, more than all, so the "
                    f"mixing matrix is not stochastic: it would have {1.0 - given:.4g} on its diagonal.\n"
                    f"Multiply the shares by {1.0 / given:.4g} or less, or leave them out for Metropolis weights."
                )


def _checked_edges(edges: object, one_way: bool) -> tuple[Arc, ...]:
    example = "for instance Graph(((0, 1), (1, 2), (2, 0)))"
    if not isinstance(edges, Sequence) or isinstance(edges, str) or not edges:
        raise ConfigurationError(f"Graph({edges!r}): give its edges as pairs of ranks, {example}.")
    found: list[Arc] = []
    seen: set[Arc] = set()
    for edge in edges:
        if (
            not isinstance(edge, Sequence)
            or len(edge) != 2
            or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in edge)
            or edge[0] == edge[1]
        ):
            raise ConfigurationError(f"Graph: {edge!r} is no edge. An edge is a pair of different ranks from 0 on, {example}.")
        arc = (edge[0], edge[1])
        if arc in seen:
            raise ConfigurationError(f"Graph: the edge {arc} comes twice. Name every pair once.")
        seen |= {arc} if one_way else {arc, arc[::-1]}
        found.append(arc)
    return tuple(found)


def _checked_shares(shares: Iterable[object], num_edges: int) -> tuple[float, ...]:
    found = tuple(shares)
    if len(found) != num_edges:
        raise ConfigurationError(f"Graph(shares={found!r}): {len(found)} shares for {num_edges} edges. Give one for each edge.")
    values: list[float] = []
    for share in found:
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 < share <= 1.0:
            raise ConfigurationError(
                f"Graph(shares={found!r}): {share!r} is no share. A share is a number above 0 and up to 1, and mostly "
                f"1 / (1 + the larger number of neighbours of the two): leave shares= out for that."
            )
        values.append(float(share))
    return tuple(values)


def _some(ranks: Sequence[int]) -> str:
    return f"{{{', '.join(map(str, ranks[:5]))}{', ...' if len(ranks) > 5 else ''}}}"
