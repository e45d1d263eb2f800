"""A network of a job beside the workers' own, to whose members whoever dies comes back.

On the job's own wire a lost worker fails all collectives for good. What goes on without it meets on a second one: a world of its
own, with keys made of the job's, at a coordinator that rank 0 starts and that outlives it. Its address is among the notes of the
job (`leave_note`), where a worker that comes back finds it.

    launch = place_in(job, "peers", size, "peers")      on all workers together;  place_again(...) for one that has come back
    wire = join_network(launch, timeouts)
    watch = admit_newcomers(launch, communication)

Members meet as workers do (`launching/introduce.py`), and the coordinator stays: a member that has died comes back as another
life, and everybody admits it to the wire as soon as it is heard of (`collectives/newcomers.py`).
"""

from __future__ import annotations

import dataclasses
import time

from stretto.errors import JobError
from stretto.job import Job, meet
from stretto.launching import secret as secrets
from stretto.launching.detect import Launch
from stretto.launching.hosts import join_address
from stretto.launching.introduce import leave_note, local_address
from stretto.launching.rendezvous import start_coordinator
from stretto.timeouts import Timeouts
from stretto.wire.base import Wire


def place_in(job: Job, name: str, size: int, who: str) -> Launch:
    """This worker's place in the job's network `name` of `size` members. Rank 0 starts the coordinator; all workers call it
    together. `who` meets there, for messages."""
    secret, address, problem = _secret_of(job, name), "", ""
    if job.rank == 0:
        try:
            ip, _ = local_address(job.launch)
            deadline = time.monotonic() + job.timeouts.connect_s
            address = start_coordinator(join_address(ip, 0), size, secret, job.launch.encrypt, deadline, outlives=True)
        except (JobError, OSError) as error:
            problem = f"rank 0 could not start the coordinator at which {who} meet: {error}"
    address, problem = job.gather_object([address, problem])[0]
    if problem:
        raise JobError(problem)
    if job.rank == 0:
        leave_note(job.launch, name, address)
    return _place_at(job, size, address, secret)


def place_again(job: Job, name: str, size: int) -> Launch | None:
    """The same for a worker that has come back; None if there was no such network when it died."""
    return None if name not in job.notes else _place_at(job, size, job.notes[name], _secret_of(job, name))


def _secret_of(job: Job, name: str) -> bytes:
    assert job.launch.secret is not None, "a job of several workers has a secret"
    return secrets.derive(job.launch.secret, name)


def _place_at(job: Job, size: int, address: str, secret: bytes) -> Launch:
    on_one_host = len({peer.host for peer in job.peers}) == 1
    return dataclasses.replace(
        job.launch, world_size=size, local_world_size=size if on_one_host else job.launch.local_world_size, rendezvous=address,
        secret=secret, launcher="stretto", trace=None, ledger=None, restart=job.life,
    )  # fmt: skip


def join_network(launch: Launch, timeouts: Timeouts) -> Wire:
    """Meet the others, or, in a later life (`launch.restart`), those that are there."""
    return meet(launch, timeouts, accept_later=True)
