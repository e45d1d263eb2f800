"""A worker as the others know it, and ranks as text."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Peer(msgspec.Struct, frozen=True):
    """One worker, as the others need to know it."""

    rank: int
    local_rank: int
    host: str  # same string = same machine and same network: boot id + network namespace (see launching/hosts.py)
    address: str  # "ip:port" of its one port
    pid: int
    pid_namespace: str = ""  # where `pid` means this process: containers may share a network and not their processes
    generation: int = 0  # of the view in which it joined: with the rank, it names one life of a worker

    def sees(self, other: Peer) -> bool:
        """Whether `other` is a process that can be looked up in this one's /proc."""
        return (self.host, self.pid_namespace) == (other.host, other.pid_namespace)


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 2, 3`, `ranks 1, 4-7`: short also when thousands are meant."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [", ".join(map(str, run)) if len(run) < 3 else f"{run[0]}-{run[-1]}" for run in runs]
    plural = len(runs) != 1 or len(runs[0]) != 1
    return f"rank{'s' if plural else ''} {', '.join(parts)}"
