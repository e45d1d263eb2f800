"""How many workers and servers each node of `stretto run` has: `-n 2,2,0 --servers 0,0,2`, the same words on all nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stretto.errors import ConfigurationError


def of_each_node(option: str, asked: int | str, nodes: int) -> tuple[int, ...]:
    """`2` is so many on each of them, `2,2,0` on one after the other."""
    words = str(asked).split(",")
    if not all(re.fullmatch(r"\s*-?\d{1,6}\s*", word) for word in words):
        raise ConfigurationError(
            f"{option} {asked}: this is neither a number nor one for each node. Write for instance {option} 2, or with --nodes 3 "
            f"{option} 2,2,0."
        )
    counts = tuple(int(word) for word in words)
    if len(counts) not in (1, nodes):
        raise ConfigurationError(
            f"{option} {asked} with --nodes {nodes}: {len(counts)} numbers for {nodes} node{'s' if nodes > 1 else ''}.\n"
            f"Write one number, which is for each node, or as many as there are nodes; on all of them the same."
        )
    return counts * nodes if len(counts) == 1 else counts


def check_workers(workers_of: Sequence[int]) -> None:
    if workers_of[0] < 1 or min(workers_of) < 0:
        shown = ",".join(map(str, workers_of if len(set(workers_of)) > 1 else workers_of[:1]))
        raise ConfigurationError(
            f"-n {shown}: a job needs at least one worker per node. A node that has servers may do with 0, but not node 0, "
            f"which has rank 0. Write for instance -n 2; or, where node 1 has servers only, --nodes 2 -n 2,0 --servers 0,2."
        )


def check_servers(workers_of: Sequence[int], servers_of: Sequence[int], max_restarts: int) -> None:
    shown = ",".join(map(str, servers_of if len(set(servers_of)) > 1 else servers_of[:1]))
    if min(servers_of) < 0:
        raise ConfigurationError(f"--servers {shown}: a node has no server, or some. Write for instance --servers 2.")
    idle = [node for node, counts in enumerate(zip(workers_of, servers_of, strict=True)) if counts == (0, 0)]
    if idle:
        raise ConfigurationError(
            f"-n {','.join(map(str, workers_of))} --servers {shown}: node {idle[0]} has neither workers nor servers. Give it "
            f"some, or leave it out."
        )
    if any(servers_of) and sum(workers_of) == 1:
        raise ConfigurationError(
            f"--servers {shown} with one worker: there is nobody whose gradients a server could add to its own.\n"
            f"Start two workers or more, -n 2, or leave --servers out: one worker trains by itself, whatever its strategy."
        )
    if max_restarts and 0 in workers_of:
        raise ConfigurationError(
            f"--max-restarts {max_restarts} with -n {','.join(map(str, workers_of))}: a node that has servers only cannot tell "
            f"workers that failed from a job that is over, so it does not start its servers again.\n"
            f"Give each node a worker, or start its servers with stretto serve --forever."
        )
