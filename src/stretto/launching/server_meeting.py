"""Servers on hosts of their own: how they and the workers of a job find each other.

    workers    STRETTO_SERVERS=2@HOST:PORT            `stretto run --servers` and `stretto lab --servers` set it
    servers    stretto serve --rendezvous HOST:PORT --workers 4 --servers 2 --number 0, and the same with --number 1

They meet when the workers join their job (`stretto.init`): a second job of P + S ranks beside the workers' own, with keys of
its own, in which the workers keep their ranks and the servers have P to P+S-1. Its coordinator is started by rank 0 of the
workers, so HOST is rank 0's host, and a server may be there before it. Everybody is waited for, as workers are: for
`Timeouts.meet_s`; then all are told who has not come.

A server that is added later (`stretto serve --add`) has a number from S on, and so a rank from P+S on. It joins when the job has
formed, as one that comes back does (`lasting_membership.py`). There is room for `MOST_ADDED` of them.

Workers and servers know the same three things: how many of each there are, where they meet, and the job's secret. Where the
rendezvous is a loopback address all are on one host, and publish that address.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from stretto.errors import ConfigurationError, JobError, SecretError
from stretto.launching import coordinator_process
from stretto.launching import secret as secrets
from stretto.launching.detect import DedicatedServers, Launch, deadlines, secret_in, switch
from stretto.launching.hosts import host_identity, is_loopback, join_address, split_address
from stretto.launching.introduction_messages import Ended
from stretto.launching.peers import ranks_text
from stretto.launching.rendezvous import start_coordinator
from stretto.timeouts import Timeouts

PURPOSE = "dedicated servers"  # of the secret that is made of the job's
MOST_ADDED = 64  # servers beyond those that a job began with


@dataclass(frozen=True, slots=True)
class JoiningServer:
    """What a server that was started apart has to know."""

    number: int
    num_servers: int
    num_workers: int
    rendezvous: str
    secret: bytes = field(repr=False)  # the job's
    encrypt: bool
    interface: str | None = None
    ledger: str | None = None  # as `Launch.ledger`
    trace: str | None = None  # the folder for its trace file, absolute
    life: int = 0  # how often it has died before
    added: bool = False  # to a job that runs, or will

    def __post_init__(self) -> None:
        if self.num_workers < 2:
            raise ConfigurationError(
                f"--workers {self.num_workers}: servers add up the gradients of several workers. Say how many the job has in "
                f"all, for instance --workers 4."
            )
        if self.added and not 1 <= self.num_servers <= self.number < self.num_servers + MOST_ADDED:
            first = max(1, self.num_servers)
            raise ConfigurationError(
                f"--add with --number {self.number} and --servers {self.num_servers}: --servers is how many the job began with, "
                f"and those that are added have the numbers after these.\n"
                f"Write --servers {first} and a --number from {first} to {first + MOST_ADDED - 1} that no other server has."
            )
        if not self.added and not 0 <= self.number < self.num_servers:
            raise ConfigurationError(
                f"--number {self.number} with --servers {self.num_servers}: servers are counted from 0. "
                f"Write --servers {max(1, self.num_servers)} and a --number from 0 to {max(0, self.num_servers - 1)}; or --add, "
                f"for a server beyond those that the job begins with."
            )

    @property
    def rank(self) -> int:
        return self.num_workers + self.number

    @property
    def launch(self) -> Launch:
        launch = _among_all(self.rank, self.num_workers + self.num_servers, self, self.secret, self.interface)
        return dataclasses.replace(launch, restart=self.life)

    def command(self) -> list[str]:
        """What runs it. The secret is not there, where others could read it: the environment has to have it."""
        return [
            sys.executable, "-u", "-m", "stretto", "serve", "--quiet",
            "--rendezvous", self.rendezvous,
            "--workers", str(self.num_workers),
            "--servers", str(self.num_servers),
            "--number", str(self.number),
            *(["--add"] if self.added else []),
            *([] if self.trace is None else ["--trace", self.trace]),
            "--encrypt" if self.encrypt else "--no-encrypt",
        ]  # fmt: skip

    def ended(self, pid: int, how: str) -> Ended:
        """What its launcher says to those who may wait for it."""
        return Ended(self.rank, 0, host_identity(), pid, 0, how)


def joining_server(
    environ: Mapping[str, str],
    *,
    number: int,
    num_servers: int,
    num_workers: int,
    rendezvous: str,
    secret_file: Path | None,
    encrypt: bool | None,
    life: int = 0,
    added: bool = False,
    trace: str | None = None,
) -> JoiningServer:
    """What `stretto serve` was asked for, checked."""
    try:
        host, port = split_address(rendezvous)
    except ValueError as problem:
        raise ConfigurationError(f"--rendezvous {rendezvous}: {problem}.\nWrite HOST:PORT, as in STRETTO_SERVERS.") from problem
    if port == 0:
        raise ConfigurationError(
            f"--rendezvous {rendezvous}: the workers could not know which port. Name one, as in STRETTO_SERVERS."
        )
    secret = secrets.read_file(secret_file) if secret_file is not None else secret_in(environ)
    if secret is None:
        raise SecretError(
            f"stretto serve without --secret-file: workers could not tell this server from a stranger.\n{secrets.HOW_TO_MAKE_ONE}"
        )
    return JoiningServer(
        number=number, num_servers=num_servers, num_workers=num_workers, rendezvous=rendezvous, secret=secret,
        encrypt=switch(environ, "STRETTO_ENCRYPT", default=not is_loopback(host)) if encrypt is None else encrypt,
        interface=environ.get("STRETTO_INTERFACE") or None, ledger=environ.get("STRETTO_LEDGER") or None,
        life=life, added=added, trace=trace,
    )  # fmt: skip


def launch_of_worker(launch: Launch) -> Launch:
    """A worker's place among workers and servers."""
    assert launch.servers is not None and launch.secret is not None
    ours = _among_all(launch.rank, launch.world_size + launch.servers.number, launch.servers, launch.secret, launch.interface)
    on_my_host = ours.world_size if ours.one_host else launch.local_world_size
    return dataclasses.replace(ours, local_rank=launch.local_rank, local_world_size=on_my_host, restart=launch.restart)


def open_rendezvous(launch: Launch, timeouts: Timeouts) -> None:
    """Rank 0 starts the coordinator. `launch`: of `launch_of_worker`."""
    assert launch.rendezvous is not None and launch.secret is not None
    if launch.rank != 0:
        return
    host, port = split_address(launch.rendezvous)
    # The name may mean a loopback address on its own host, so it listens on all; the door is shut to strangers anyway.
    bind = host if launch.one_host else ("::" if ":" in host else "0.0.0.0")
    deadline = time.monotonic() + timeouts.connect_s
    address = join_address(bind, port)
    start_coordinator(address, launch.world_size, launch.secret, launch.encrypt, deadline, outlives=True, room=launch.room)


def did_not_meet(launch: Launch, error: JobError) -> JobError:
    """For a worker: `launch` is its place in the job."""
    assert launch.servers is not None
    first, number, at = launch.world_size, launch.servers.number, launch.servers.rendezvous
    host, _ = split_address(at)
    servers = ranks_text(range(first, first + number))
    return JobError(
        f"rank {launch.rank} did not meet the job's servers (there: {servers}) at {at}: {error}\n"
        f"A server is started by stretto run --servers, or by hand, server 0 (rank {first}) for instance: stretto serve "
        f"--rendezvous {at} --secret-file job.secret --workers {first} --servers {number} --number 0. {host} has to be the host "
        f"of rank 0, as all see it."
    )


def _among_all(rank: int, size: int, at: DedicatedServers | JoiningServer, secret: bytes, interface: str | None) -> Launch:
    one_host = is_loopback(split_address(at.rendezvous)[0])
    return Launch(
        rank=rank, world_size=size, local_rank=0, local_world_size=size if one_host else 1, rendezvous=at.rendezvous,
        secret=secrets.derive(secret, PURPOSE), encrypt=at.encrypt, launcher="stretto", interface=interface, room=MOST_ADDED,
    )  # fmt: skip


def server_timeouts(environ: Mapping[str, str], timeout_s: float | None, meet_s: float | None) -> Timeouts:
    """The command line's word, else the variables that workers read."""
    said = {"STRETTO_TIMEOUT": timeout_s, "STRETTO_MEET_TIMEOUT": meet_s}
    return deadlines({**environ, **{name: f"{seconds:g}" for name, seconds in said.items() if seconds is not None}})


def check_restarts(restarts: int, forever: bool, added: bool = False) -> None:
    if added and forever:
        raise ConfigurationError(
            "--add with --forever: the next job does not know of a server that was added to this one.\nLeave --forever out; or "
            "leave --add out, and have the next job begin with one server more."
        )
    if restarts < 0 or (restarts and forever):
        raise ConfigurationError(
            f"--restarts {restarts}{' with --forever' if forever else ''}: a server that dies is started again so often in "
            f"one job, 0 times or more.\nWrite for instance --restarts 3; with --forever leave it out."
        )


def keep(
    keeper: str,
    restarts: int,
    server: JoiningServer,
    options: Mapping[str, float | None],
    quiet: bool,
    environ: Mapping[str, str],
) -> NoReturn:
    """Become the keeper of this server, who adds the number of its life to the command."""
    words = [word for name, value in options.items() if value is not None for word in (name, f"{value:g}")]
    command = [word for word in server.command() if quiet or word != "--quiet"]
    argv = [sys.executable, "-I", "-S", keeper, str(restarts), *command, *words, "--life"]
    own = {"STRETTO_SECRET": server.secret.hex()}
    os.execve(sys.executable, argv, {**coordinator_process.importing_stretto(environ), **own})
