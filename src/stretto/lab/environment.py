"""What a command finds in its environment on each host: stretto's variables, and torch's own.

Each host runs the same number of workers (mostly one), and ranks are counted host by host. torch's rank 0 opens its store at
MASTER_ADDR:MASTER_PORT; stretto's workers meet at the coordinator (STRETTO_RENDEZVOUS). Both are on host 0, on different ports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.lab.network import address
from stretto.launching.launch_plan import threads_each


@dataclass(frozen=True, kw_only=True)
class SharedByHosts:
    """What the hosts of one run share."""

    world_size: int
    workers: int  # of each host
    rendezvous: str | None
    secret: str = field(repr=False)
    encrypt: bool
    master_port: int


def host_environment(base: Mapping[str, str], run: SharedByHosts, rank: int, ledger: str) -> dict[str, str]:
    """`base` with the variables of one worker on top. Those of another launcher that mislead torch are left out."""
    environment = {name: value for name, value in base.items() if not name.startswith("TORCHELASTIC_")}
    environment.setdefault("PYTHONUNBUFFERED", "1")  # lines are shown when they are printed
    if run.world_size > 1:
        environment.setdefault("OMP_NUM_THREADS", str(threads_each(run.world_size)))  # hosts share this machine's processors
    environment |= _ranks("STRETTO_", run, rank) | _ranks("", run, rank)
    environment |= {
        "STRETTO_SECRET": run.secret,
        "STRETTO_ENCRYPT": "on" if run.encrypt else "off",
        "STRETTO_LEDGER": ledger,
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(run.master_port),
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
    }
    environment.pop("STRETTO_RENDEZVOUS", None)
    if run.rendezvous is not None:
        environment["STRETTO_RENDEZVOUS"] = run.rendezvous
    return environment


def _ranks(prefix: str, run: SharedByHosts, rank: int) -> dict[str, str]:
    return {
        f"{prefix}RANK": str(rank),
        f"{prefix}WORLD_SIZE": str(run.world_size),
        f"{prefix}LOCAL_RANK": str(rank % run.workers),
        f"{prefix}LOCAL_WORLD_SIZE": str(run.workers),
    }
