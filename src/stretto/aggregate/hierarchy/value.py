"""Aggregate on two levels: first the workers of each host, over their own fabric, then the hosts, over the network."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.aggregate.all_reduce import AllReduce
from stretto.errors import ConfigurationError

INSIDE = ("native", "auto", "ring")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Workers of one host combine what they have, each of them a share of it, exchange the shares between hosts, and give them to
    each other. `compress` applies between hosts only.

    `inner`: `AllReduce("native")` or `AllReduce()`: the fastest that the workers of a host have in common, which the log names;
    `AllReduce("ring")`: our wire. `outer`: any all-reduce, among the workers with the same place on their hosts.

    Cost between h hosts of g workers, for m bytes: each host sends 2 m (h - 1)/h through its network card, where a flat ring over
    all workers sends 2 m (g h - 1)/(g h): with two hosts of two workers m instead of 1.5 m. Compressed, one worker of each host
    speaks for a parameter, so a host sends as much as one worker would in a job of h.

    Invariant: all workers end with the same bits. With hosts of different numbers of workers, as many of each host speak to the
    others as the smallest has. In a job of one host nothing is sent, and what `compress` does to gradients is done all the same.
    """

    inner: AllReduce = field(default_factory=lambda: AllReduce("native"))
    outer: AllReduce = field(default_factory=AllReduce)

    def __post_init__(self) -> None:
        for name, value in (("inner", self.inner), ("outer", self.outer)):
            if not isinstance(value, AllReduce):
                raise ConfigurationError(
                    f"Hierarchy({name}={value!r}): both levels are all-reduces today. Write {name}=AllReduce()."
                )
        if self.inner.algorithm not in INSIDE:
            raise ConfigurationError(
                f"Hierarchy(inner={self.inner!r}): inside a host, shares are summed and then given to everybody, and there is no "
                f"{self.inner.algorithm} for that.\n"
                f'Write inner=AllReduce("native"), which takes the fastest that there is, or inner=AllReduce("ring").'
            )
        if self.outer.algorithm == "native":
            raise ConfigurationError(
                f"Hierarchy(outer={self.outer!r}): torch's own all-reduce is among all workers, and hosts exchange their shares "
                f'in groups.\nWrite outer=AllReduce(), which picks by measuring, or outer=AllReduce("ring").'
            )
