"""A job whose workers know each other only by a store of torch's: `init_process_group(backend, store=..., rank=, world_size=)`.

Everybody leaves its host's identity in the store; from all of them follow the numbers that a launcher would have given. Then rank
0 starts the coordinator, as under torchrun (`rendezvous.py`), with the same rule for the secret: on one host it travels through a
file that only this user can read; between hosts it is given by the environment, or the network was declared trusted.
"""

from __future__ import annotations

import os
import secrets as random_bytes
import time
from typing import TYPE_CHECKING

from stretto.errors import JobError, RendezvousError
from stretto.launching.detect import Launch, no_secret, secret_in, switch
from stretto.launching.hosts import ELSEWHERE, host_identity, join_address
from stretto.launching.peers import ranks_text
from stretto.launching.rendezvous import MAX_BYTES, POLL_S, learn, publish
from stretto.timeouts import Timeouts

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


def launch_through(store: Store, rank: int, world_size: int, timeouts: Timeouts) -> Launch:
    """This worker's place in the job, with rendezvous and secret. All workers call it."""
    deadline = time.monotonic() + timeouts.meet_s
    try:
        return _launch_through(store, rank, world_size, deadline)
    except RuntimeError as error:  # torch's DistError and its kin
        problem = str(error).partition("\n")[0]
        raise RendezvousError(
            f"rank {rank} of {world_size} cannot use the store that the workers were to meet at: {problem}.\n"
            f"Check that the process that serves it is alive and can be reached."
        ) from error


def _launch_through(store: Store, rank: int, world_size: int, deadline: float) -> Launch:
    joins = store.add(f"stretto/joins/{rank}", 1)  # the same store may serve one job after the other
    prefix = f"stretto/{joins}"
    own = f"{host_identity()}\n{random_bytes.token_hex(8)}"
    store.set(f"{prefix}/worker/{rank}", own)
    said = _read_all(store, [f"{prefix}/worker/{other}" for other in range(world_size)], deadline)
    hosts = [text.partition("\n")[0] for text in said]
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    several_hosts = len(here) != world_size
    secret = secret_in(os.environ) if world_size > 1 else None
    launch = Launch(
        rank=rank,
        world_size=world_size,
        local_rank=here.index(rank),
        local_world_size=len(here),
        rendezvous=None,
        secret=secret,
        encrypt=switch(os.environ, "STRETTO_ENCRYPT", default=several_hosts),
        launcher="store",
        interface=os.environ.get("STRETTO_INTERFACE") or None,
        master=_address_of(store),
        run=said[0].partition("\n")[2],
        agent_store=True,
    )
    if world_size == 1:
        return launch
    if several_hosts and launch.encrypt and secret is None:
        raise no_secret(
            f"{world_size} workers that meet at a store, {len(here)} of them on this host",
            "It could only travel through the store, which anybody who reaches it can read. ",
            "\nOr, on a network where everybody is trusted, turn encryption off: STRETTO_ENCRYPT=off, on every machine.",
        )
    key = f"{prefix}/coordinator"
    return publish(launch, store, key, deadline) if rank == 0 else learn(launch, store, key, deadline)


def _read_all(store: Store, keys: list[str], deadline: float) -> list[str]:
    missing = list(range(len(keys)))
    while missing := [rank for rank in missing if not store.check([keys[rank]])]:
        if time.monotonic() > deadline:
            raise JobError(
                f"{ranks_text(missing).capitalize()} of {len(keys)} did not come to the store at which the workers meet.\n"
                f"Read the output of the missing workers; all of them call init_process_group with the same store."
            )
        time.sleep(POLL_S)
    return [store.get(key)[:MAX_BYTES].decode(errors="replace") for key in keys]


def _address_of(store: Store) -> str:
    """Somewhere in the direction of the other hosts: where the store is served, if that can be told."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", ELSEWHERE[0]), getattr(store, "port", 9)
    return join_address(host, port)
