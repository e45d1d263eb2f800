"""A second wire between the workers of a job, so that plain and encrypted can take turns in one run.

The job's own wire is used for whichever it is; the other is made here: new sockets, addresses exchanged over the first, and a
`Job` of its own around it, with its own communication thread, its own measured links and so its own choice for "auto".
"""

from __future__ import annotations

import secrets
from dataclasses import replace

import msgspec

from stretto.errors import ConfigurationError
from stretto.job import Job, make_wire


def job_over(job: Job, wire: str) -> Job:
    """`job` itself if its wire is the one asked for ("plain" or "encrypted"), or a second one beside it. Collective."""
    if (wire == "encrypted") == job.launch.encrypt:
        return job
    return _beside(job, encrypt=wire == "encrypted")


def _beside(job: Job, *, encrypt: bool) -> Job:
    launch = replace(job.launch, encrypt=encrypt)
    if launch.secret is None:
        raise ConfigurationError(
            "a second wire in a job without a secret: its workers could not be told from strangers. "
            "Start the benchmark with `stretto bench`, `stretto run` or `stretto lab`."
        )
    wire = make_wire(launch, job.timeouts, "auto")
    said = job.gather_object([wire.address, secrets.token_bytes(32)])
    peers = [msgspec.structs.replace(peer, address=str(address)) for peer, (address, _) in zip(job.peers, said, strict=True)]
    try:
        wire.connect(peers, said[0][1])
    except BaseException:
        wire.abandon()
        raise
    # Without a rendezvous its `close` says goodbye to the peers only: the coordinator hears it from the first job.
    return Job(replace(launch, rendezvous=None, trace=None), peers, wire, job.timeouts)
