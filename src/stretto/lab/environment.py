"""What a command finds in its environment on each host: stretto's variables, and torch's own.

Each host runs the same number of workers (mostly one), and ranks are counted host by host. torch's rank 0 opens its store at
MASTER_ADDR:MASTER_PORT; stretto's workers meet at the coordinator (STRETTO_RENDEZVOUS). Both are on host 0, on different ports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.lab.network import address
from stretto.launching import coordinator_process
from stretto.launching.hosts import split_address
from stretto.launching.launch_plan import job_variables, threads_each

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@dataclass(frozen=True, kw_only=True)
class SharedByHosts:
    """What the hosts of one run share."""

    world_size: int
    workers: int  # of each host
    rendezvous: str | None
    secret: str = field(repr=False)
    encrypt: bool
    master_port: int
    servers: str | None = None  # as STRETTO_SERVERS has it


def host_environment(base: Mapping[str, str], run: SharedByHosts, rank: int, ledger: str) -> dict[str, str]:
    """`base` with the variables of one worker on top. Those of another launcher that mislead torch are left out."""
    environment = {name: value for name, value in base.items() if not name.startswith("TORCHELASTIC_")}
    environment.setdefault("PYTHONUNBUFFERED", "1")  # lines are shown when they are printed
    if run.world_size > 1:
        environment.setdefault("OMP_NUM_THREADS", str(threads_each(run.world_size)))  # hosts share this machine's processors
    host, port = (address(0), 0) if run.rendezvous is None else split_address(run.rendezvous)
    environment |= job_variables(
        rank=rank,
        world_size=run.world_size,
        local_rank=rank % run.workers,
        local_world_size=run.workers,
        rendezvous=(host, port),
        master_port=run.master_port,
        secret=bytes.fromhex(run.secret),
        encrypt=run.encrypt,
    )
    environment["STRETTO_SERVERS"] = run.servers or ""  # others could not be reached
    if run.rendezvous is None:
        del environment["STRETTO_RENDEZVOUS"]
    return environment | {"STRETTO_LEDGER": ledger} | dict.fromkeys(_INTERFACES, "eth0")


def server_variables(base: Mapping[str, str], secret: str, ledger: str) -> dict[str, str]:
    """The environment of a host's parameter server, which has the rest on its command line."""
    own = {"STRETTO_SECRET": secret, "STRETTO_LEDGER": ledger, "PYTHONSAFEPATH": "1"}
    return {"OMP_NUM_THREADS": "1", **coordinator_process.importing_stretto(base), **own}
