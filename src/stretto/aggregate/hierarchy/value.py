"""Aggregate on two levels: first the workers of each group, over their own fabric, then the groups, over the network."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.aggregate.all_reduce import AllReduce
from stretto.aggregate.hierarchy.elastic import Elastic
from stretto.aggregate.parameter_server.value import ParameterServer
from stretto.errors import ConfigurationError

INSIDE = ("native", "auto", "ring")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Workers of one host combine what they have, each of them a share of it, exchange the shares between hosts, and give them to
    each other. `compress` applies between hosts only.

    `inner`: `AllReduce("native")` or `AllReduce()`: the fastest that the workers of a host have in common, which the log names;
    `AllReduce("ring")`: our wire. `outer`: any all-reduce, among the workers with the same place on their hosts; or
    `ParameterServer()`: the first worker of each host pushes and pulls for all of them. `group_size`: combine so many workers
    that follow each other instead of those of a host. `elastic`: groups train by themselves, and are drawn to a center on the
    servers.

    Cost between h hosts of g workers, for m bytes: each host sends 2 m (h - 1)/h through its network card, where a flat ring over
    all workers sends 2 m (g h - 1)/(g h): with two hosts of two workers m instead of 1.5 m. Compressed, one worker of each host
    speaks for a parameter, so a host sends as much as one worker would in a job of h. With servers each host sends m and receives
    m, and servers have h clients instead of g h.

    Invariant: all workers end with the same bits, with servers that step those of a group. With hosts of different numbers of
    workers, as many of each host speak to the others as the smallest has. In a job of one host nothing is sent, and what
    `compress` does to gradients is done all the same.

    Reference, for servers: Mamidala et al., "MXNET-MPI: embedding MPI parallelism in parameter server task model", 2018,
    arXiv:1801.03855.
    """

    inner: AllReduce = field(default_factory=lambda: AllReduce("native"))
    outer: AllReduce | ParameterServer = field(default_factory=AllReduce)
    group_size: int | None = None
    elastic: Elastic | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.inner, AllReduce):
            raise ConfigurationError(
                f"Hierarchy(inner={self.inner!r}): the workers of a group combine by an all-reduce. Write inner=AllReduce()."
            )
        if not isinstance(self.outer, (AllReduce, ParameterServer)):
            raise ConfigurationError(
                f"Hierarchy(outer={self.outer!r}): groups combine by an all-reduce, or by servers. Write outer=AllReduce() or "
                f"outer=ParameterServer()."
            )
        if self.inner.algorithm not in INSIDE:
            raise ConfigurationError(
                f"Hierarchy(inner={self.inner!r}): inside a host, shares are summed and then given to everybody, and there is no "
                f"{self.inner.algorithm} for that.\n"
                f'Write inner=AllReduce("native"), which takes the fastest that there is, or inner=AllReduce("ring").'
            )
        if self.outer == AllReduce("native"):
            raise ConfigurationError(
                f"Hierarchy(outer={self.outer!r}): torch's own all-reduce is among all workers, and hosts exchange their shares "
                f'in groups.\nWrite outer=AllReduce(), which picks by measuring, or outer=AllReduce("ring").'
            )
        if isinstance(self.outer, ParameterServer) and self.outer.answers is not None:
            raise ConfigurationError(
                f"Hierarchy(outer={self.outer!r}): a group passes on what its first worker has pulled, and codecs are for "
                f"workers that pull by themselves.\nLeave answers= out, or write aggregate={self.outer!r}."
            )
        self._check_elastic()
        size = self.group_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigurationError(
                f"Hierarchy(group_size={size!r}): a group has one or more workers. Write for instance group_size=2, or leave it "
                f"out for the workers of each host."
            )

    def _check_elastic(self) -> None:
        if self.elastic is None:
            return
        if not isinstance(self.elastic, Elastic):
            raise ConfigurationError(
                f"Hierarchy(elastic={self.elastic!r}): that is not an Elastic. Write elastic=Elastic(every=4), or leave it out."
            )
        if not isinstance(self.outer, ParameterServer):
            raise ConfigurationError(
                f"Hierarchy(outer={self.outer!r}, elastic={self.elastic!r}): the center lies on servers.\n"
                f"Write outer=ParameterServer()."
            )
        if self.outer.snapshots is not None:
            raise ConfigurationError(
                f"Hierarchy(outer={self.outer!r}, elastic={self.elastic!r}): snapshots are of models whose optimizer is on the "
                f"servers, and here it is on the workers.\nLeave snapshots= out, and call stretto.save."
            )

    @property
    def variant(self) -> str:
        """What the way of training depends on."""
        return f"outer={type(self.outer).__name__}" + ("" if self.elastic is None else ", elastic=Elastic")
