"""A worker of threads that comes back: another life of its rank on the network of peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from stretto import api
from stretto.job import Job
from stretto.launching.peers import Peer


def kill(job: Job, reason: str = "the test") -> None:
    """As if this worker's process had died: the others find its connections closed."""
    wires = of_peers(job)
    wires[job.rank].kill(reason)
    assert job.wire is not None
    job.wire.kill(reason)  # type: ignore[attr-defined]


def of_peers(job: Job) -> Any:
    assert job.more_wires is not None
    return job.more_wires("peers", job.world_size)


def come_back(job: Job, other: Job, program: Callable[[Job], Any], generation: int = 1) -> Any:
    """The next life of a worker, in the thread of the one that was killed; `other` lives. Every worker that lives has to admit
    it: `job.peer_network.admit([newcomer(job, generation)])`."""
    wire = of_peers(other)[other.rank].newcomer(job.rank, generation)
    peers = [msgspec.structs.replace(peer, generation=generation) if peer.rank == job.rank else peer for peer in job.peers]
    again = Job(job.launch, peers, None, job.timeouts)
    again.more_wires = lambda name, size: [wire] * size
    token = api._job.set(again)
    try:
        result = program(again)
    except BaseException:
        again.close(goodbye=False)
        raise
    finally:
        api._job.reset(token)
    again.close(goodbye=True)
    return result


def newcomer(job: Job, generation: int = 1) -> Peer:
    return Peer(job.rank, job.rank, "here", "", 0, generation=generation)
