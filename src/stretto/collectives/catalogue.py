"""Every collective by name: the one table that `plan`, the chooser, the bench and the docs read.

An entry says what its plan leaves behind (`kind`), how to make it, and three facts a test holds it to:

    symmetric          every rank has the same load in every step, so the cost of one rank is the cost of all
    least_volume       for every P no rank sends or receives more than some rank must under any algorithm: 2m(P-1)/P for
                       an all-reduce, m(P-1)/P for reduce-scatter, all-gather, gather, scatter and all-to-all, m for a
                       broadcast or reduction
    segments           worth cutting into segments that follow each other (chains and trees; `plan/costs.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from stretto.collectives.all_gather_direct import all_gather_direct
from stretto.collectives.all_gather_ring import all_gather_ring
from stretto.collectives.all_to_all import all_to_all
from stretto.collectives.barrier import barrier
from stretto.collectives.bidirectional_ring import bidirectional_ring
from stretto.collectives.binomial_tree import binomial_tree
from stretto.collectives.broadcast import broadcast
from stretto.collectives.broadcast_chain import broadcast_chain
from stretto.collectives.butterfly import butterfly
from stretto.collectives.chain import chain
from stretto.collectives.direct import direct
from stretto.collectives.double_binary_tree import double_binary_tree
from stretto.collectives.gather import gather
from stretto.collectives.halving_doubling import halving_doubling
from stretto.collectives.hierarchical import hierarchical
from stretto.collectives.master_worker import master_worker
from stretto.collectives.plan import Kind, Plan, PlanMaker
from stretto.collectives.reduce import reduce
from stretto.collectives.reduce_scatter import reduce_scatter
from stretto.collectives.reduce_scatter_direct import reduce_scatter_direct
from stretto.collectives.ring import ring
from stretto.collectives.round_robin import round_robin
from stretto.collectives.scatter import scatter
from stretto.collectives.torus import torus
from stretto.collectives.transpose import transpose
from stretto.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Entry:
    """One algorithm. Exactly one of `maker`, `with_root` and `with_group` is set."""

    kind: Kind
    name: str
    summary: str
    maker: PlanMaker | None = None
    with_root: Callable[[int], PlanMaker] | None = None
    with_group: Callable[[int], PlanMaker] | None = None
    aliases: tuple[str, ...] = ()
    symmetric: bool = False
    least_volume: bool = False
    segments: bool = False

    def bind(self, *, root: int = 0, group: int = 1) -> PlanMaker:
        """The plan maker for this root (rooted kinds) or this many ranks per host (`hierarchical`)."""
        if self.with_root is not None:
            return self.with_root(root)
        if root != 0:
            raise ConfigurationError(
                f"{self.kind.value} {self.name!r} with root={root}: all ranks are alike, a root would have no meaning. "
                f"Leave root out, or ask for a broadcast, reduce, gather or scatter."
            )
        if self.with_group is not None:
            return self.with_group(group)
        assert self.maker is not None
        return self.maker


_ENTRIES = (
    Entry(Kind.ALL_REDUCE, "ring", "chunks travel a ring twice: summed, then copied", ring, symmetric=True, least_volume=True),
    Entry(
        Kind.ALL_REDUCE, "halving_doubling", "exchange halves, quarters, ... and back", halving_doubling,
        aliases=("rabenseifner", "recursive_halving_doubling"),
    ),
    Entry(
        Kind.ALL_REDUCE, "direct", "each rank is master of one chunk", direct,
        aliases=("chunked_butterfly", "butterfly_chunked", "reduce_scatter_all_gather"), symmetric=True, least_volume=True,
    ),
    Entry(
        Kind.ALL_REDUCE, "butterfly", "exchange whole accumulators with partners at distance 1, 2, 4, ...", butterfly,
        aliases=("recursive_doubling",),
    ),
    Entry(
        Kind.ALL_REDUCE, "torus", "rings along the rows, the columns and the rows of a grid", torus,
        aliases=("torus_2d", "2d_torus"), symmetric=True, least_volume=True,
    ),
    Entry(
        Kind.ALL_REDUCE, "hierarchical", "rings inside each host and, shard by shard, between hosts", with_group=hierarchical,
        aliases=("two_level",),
    ),
    Entry(
        Kind.ALL_REDUCE, "bidirectional_ring", "two opposite rings, half of the vector each", bidirectional_ring,
        symmetric=True, least_volume=True,
    ),
    Entry(
        Kind.ALL_REDUCE, "double_binary_tree", "two trees, half of the vector each; inner in one is leaf in the other",
        double_binary_tree, aliases=("double_tree", "two_tree"), segments=True,
    ),
    Entry(
        Kind.ALL_REDUCE, "binomial_tree", "summed up a tree, copied down again", binomial_tree, aliases=("tree", "binary_tree"),
        segments=True,
    ),
    Entry(
        Kind.ALL_REDUCE, "chain", "summed from rank to rank, copied back the same way", chain, aliases=("linear", "pipeline"),
        segments=True,
    ),
    Entry(
        Kind.ALL_REDUCE, "round_robin", "whole vectors to rotating peers", round_robin, aliases=("rotating_all_to_all",),
        symmetric=True,
    ),
    Entry(Kind.ALL_REDUCE, "all_to_all", "whole vectors from everyone to everyone at once", all_to_all, symmetric=True),
    Entry(
        Kind.ALL_REDUCE, "master_worker", "rank 0 adds everything and sends it back", master_worker,
        aliases=("centralised", "centralized"),
    ),
    Entry(
        Kind.REDUCE_SCATTER, "ring", "chunks travel a ring and are summed", reduce_scatter,
        aliases=("reduce_scatter", "reduce_scatter_ring"), symmetric=True, least_volume=True,
    ),
    Entry(
        Kind.REDUCE_SCATTER, "direct", "each contribution goes straight to its owner", reduce_scatter_direct,
        aliases=("reduce_scatter_direct", "pairwise"), symmetric=True, least_volume=True,
    ),
    Entry(
        Kind.ALL_GATHER, "ring", "chunks travel a ring and are copied", all_gather_ring, aliases=("all_gather_ring",),
        symmetric=True, least_volume=True,
    ),
    Entry(
        Kind.ALL_GATHER, "direct", "each chunk goes straight to everyone", all_gather_direct, aliases=("all_gather_direct",),
        symmetric=True, least_volume=True,
    ),
    Entry(
        Kind.BROADCAST, "binomial", "copied down a tree", with_root=broadcast, aliases=("broadcast", "binomial_tree", "tree"),
        segments=True,
    ),
    Entry(
        Kind.BROADCAST, "chain", "copied from rank to rank", with_root=broadcast_chain,
        aliases=("broadcast_chain", "linear", "pipeline"), least_volume=True, segments=True,
    ),
    Entry(
        Kind.REDUCE, "binomial", "summed up a tree", with_root=reduce, aliases=("reduce", "binomial_tree", "tree"),
        segments=True,
    ),
    Entry(Kind.GATHER, "direct", "each chunk goes straight to the root", with_root=gather, least_volume=True),
    Entry(Kind.SCATTER, "direct", "each chunk goes straight to its owner", with_root=scatter, least_volume=True),
    Entry(
        Kind.ALL_TO_ALL, "transpose", "chunk i of rank r becomes chunk r of rank i", transpose,
        aliases=("all_to_all", "direct", "pairwise"), symmetric=True, least_volume=True,
    ),
    Entry(
        Kind.BARRIER, "dissemination", "empty messages to rank r + 1, 2, 4, ...", barrier, aliases=("barrier",), symmetric=True,
        least_volume=True,
    ),
)  # fmt: skip

CATALOGUE: Mapping[tuple[Kind, str], Entry] = MappingProxyType({(entry.kind, entry.name): entry for entry in _ENTRIES})
_BY_ANY_NAME: Mapping[tuple[Kind, str], Entry] = MappingProxyType(
    {(entry.kind, name): entry for entry in _ENTRIES for name in (entry.name, *entry.aliases)}
)


def names(kind: Kind) -> tuple[str, ...]:
    """The algorithms of a kind, aliases left out; the first is the usual choice."""
    return tuple(entry.name for entry in _ENTRIES if entry.kind is kind)


def find(kind: Kind, algorithm: str) -> Entry:
    """The entry of that name or alias."""
    entry = _BY_ANY_NAME.get((kind, algorithm))
    if entry is None:
        others = sorted({entry.kind.value for entry in _ENTRIES if algorithm in (entry.name, *entry.aliases)})
        elsewhere = f" (that name belongs to: {', '.join(others)})" if others else ""
        raise ConfigurationError(
            f"{kind.value} by {algorithm!r}: there is no such algorithm{elsewhere}. Write one of: {', '.join(names(kind))}."
        )
    return entry


@lru_cache(maxsize=512)
def plan(kind: Kind, algorithm: str, rank: int, size: int, *, root: int = 0, group: int = 1) -> Plan:
    """One rank's plan. Pure, and remembered: asking again costs a look-up.

    `root` is for broadcast, reduce, gather and scatter. `group` is a fact about the members, the number of consecutive ones per
    host; `hierarchical` is the one plan that depends on it.
    """
    if size < 1 or not 0 <= rank < size:
        raise ConfigurationError(
            f"a plan for rank {rank} of {size}: ranks are 0 to size-1, and there is at least one. "
            f"Write a size of at least 1 and a rank below it."
        )
    return find(kind, algorithm).bind(root=root, group=group)(rank, size)
