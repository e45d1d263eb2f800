"""Aggregate by all-reduce: every worker ends with the same sum of everybody's gradients, and there is no server."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.collectives import catalogue
from stretto.collectives.plan import Kind


@dataclass(frozen=True, slots=True)
class AllReduce:
    """`algorithm`: a name of the catalogue (docs/collectives.md), "auto" (measured, by size) or "native" (torch's own).

    Cost and bytes are the algorithm's. Invariant: all workers end with the same bits.
    """

    algorithm: str = "auto"

    def __post_init__(self) -> None:
        if self.algorithm not in ("auto", "native"):
            catalogue.find(Kind.ALL_REDUCE, self.algorithm)
