"""What `stretto run` was asked for, checked before anything starts, and the environment of each worker.

Ranks: node k of M with N workers each holds ranks kN .. kN+N-1.

Ports: on one node the coordinator picks a free one on the loopback address and `MASTER_PORT` is another free one.
Between nodes all must agree beforehand: the coordinator has the rendezvous port p, and torch's own store (hosted by
rank 0) gets p+1.
"""

from __future__ import annotations

import contextlib
import math
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import ConfigurationError, RendezvousError, SecretError
from stretto.job import hosts, secret
from stretto.job.detect import switch

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One node's part of a job. `command` follows `python -u`."""

    command: tuple[str, ...]
    workers: int
    nodes: int = 1
    node: int = 0
    rendezvous: tuple[str, int] | None = None  # None: one node, loopback, any free port
    secret: bytes
    encrypt: bool | None = None  # None: STRETTO_ENCRYPT, or by the number of nodes
    timeout_s: float | None = None
    prefix: bool = True
    trace: Path | None = None  # the folder, absolute: workers may change theirs

    @property
    def world_size(self) -> int:
        return self.workers * self.nodes

    def rank(self, local_rank: int) -> int:
        return self.node * self.workers + local_rank


def make_plan(
    target: str,
    arguments: list[str],
    *,
    module: bool,
    workers: int,
    nodes: int,
    node: int | None,
    rendezvous: str | None,
    secret_file: Path | None,
    timeout_s: float | None,
    prefix: bool,
    trace: Path | None = None,
    encrypt: bool | None = None,
) -> RunPlan:
    """Check every value of the command line and put them together."""
    if not module:
        check_script(target)
    check_counts(workers, nodes, node, timeout_s)
    return RunPlan(
        command=("-m", target, *arguments) if module else (target, *arguments),
        workers=workers,
        nodes=nodes,
        node=node or 0,
        rendezvous=meeting_place(nodes, rendezvous),
        secret=job_secret(nodes, secret_file),
        encrypt=encrypt,
        timeout_s=timeout_s,
        prefix=prefix,
        trace=None if trace is None else trace_folder(trace),
    )


def check_script(target: str) -> None:
    path = Path(target)
    if path.is_file() or (path.is_dir() and (path / "__main__.py").is_file()):
        return
    if path.is_dir():
        why = "it is a directory without a __main__.py, so there is nothing to run in it"
    else:
        why = f"there is no such file in {Path.cwd()}"
    raise ConfigurationError(
        f"stretto run {target}: {why}.\nGive the path of a Python script, or a module: stretto run -n 2 -m package.module"
    )


def check_counts(workers: int, nodes: int, node: int | None, timeout_s: float | None) -> None:
    if workers < 1:
        raise ConfigurationError(f"-n {workers}: a job needs at least one worker per node. Write for instance -n 2.")
    if nodes < 1:
        raise ConfigurationError(f"--nodes {nodes}: a job has at least one node. Leave --nodes out for one machine.")
    if nodes > 1 and node is None:
        raise ConfigurationError(
            f"--nodes {nodes} without --node: each machine must say which of the {nodes} it is, or two would claim "
            f"the same ranks.\n"
            f"Add --node 0 on the machine of the rendezvous, and --node 1 to --node {nodes - 1} on the others."
        )
    if node is not None and not 0 <= node < nodes:
        raise ConfigurationError(
            f"--node {node} with --nodes {nodes}: nodes are counted from 0, so this one does not exist.\n"
            f"Use --node 0 to --node {nodes - 1}, or a larger --nodes."
        )
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise ConfigurationError(
            f"--timeout {timeout_s:g}: a timeout is a positive number of seconds, and nothing in stretto waits for ever.\n"
            f"Write for instance --timeout 60; for a very long wait, --timeout 1e6."
        )


def trace_folder(folder: Path) -> Path:
    """The folder, made if need be, without the files of earlier runs: ranks that this run does not have would stay."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("trace-rank*.json"):
            old.unlink()
    except OSError as problem:
        raise ConfigurationError(
            f"--trace {folder}: nothing can be written there ({problem.strerror}).\n"
            f"Name a folder of yours, for instance --trace traces; it is made if it does not exist."
        ) from problem
    return folder.absolute()


def meeting_place(nodes: int, rendezvous: str | None) -> tuple[str, int] | None:
    if rendezvous is None:
        if nodes == 1:
            return None
        raise ConfigurationError(
            f"--nodes {nodes} without --rendezvous: the machines have no place to meet.\n"
            f"Give all of them the same --rendezvous HOST:PORT, where HOST is node 0's name or address as the others "
            f"see it and PORT is free there, for instance --rendezvous {socket.gethostname()}:29400."
        )
    try:
        host, port = hosts.split_address(rendezvous)
    except ValueError as problem:
        raise ConfigurationError(
            f"--rendezvous {rendezvous}: {problem}.\nWrite HOST:PORT, for instance --rendezvous {LOOPBACK}:29400."
        ) from problem
    if port == 0 and nodes > 1:
        raise ConfigurationError(
            f"--rendezvous {rendezvous} with --nodes {nodes}: port 0 means any free port, and the other nodes could "
            f"not know which one that is.\nName one, for instance --rendezvous {hosts.join_address(host, 29400)}."
        )
    return host, port


def job_secret(nodes: int, secret_file: Path | None) -> bytes:
    if secret_file is not None:
        return secret.read_file(secret_file)
    if nodes == 1:
        return secret.generate()
    raise SecretError(
        f"--nodes {nodes} without --secret-file: workers on other machines could not be told from strangers, "
        f"so joining without a secret is refused.\n{secret.HOW_TO_MAKE_ONE}"
    )


def bind_address(plan: RunPlan) -> tuple[str, int]:
    """Where node 0's coordinator listens: tried here first, because here we can say what to do about it."""
    host, port = plan.rendezvous or (LOOPBACK, 0)
    shown = hosts.join_address(host, port)
    try:
        family, ip = hosts.resolve(host, port)
    except OSError as problem:
        raise RendezvousError(
            f"--rendezvous {shown}: the name {host} has no address ({problem.strerror}).\n"
            f"Write an address of this machine; it has {known_addresses()}."
        ) from problem
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((ip, port))
    except PermissionError as problem:
        raise RendezvousError(
            f"--rendezvous {shown}: this user may not listen on port {port}.\n"
            f"Ports from 1024 on are open to all: take for instance {hosts.join_address(host, 29400)} on all nodes."
        ) from problem
    except OSError as problem:
        raise RendezvousError(bind_problem(shown, ip, port)) from problem
    return ip, port


def bind_problem(shown: str, ip: str, port: int) -> str:
    if hosts.interface_of(ip) is None and not hosts.is_loopback(ip):
        return (
            f"--rendezvous {shown}: this machine does not have the address {ip}; it has {known_addresses()}.\n"
            f"Node 0 must run on the machine of the rendezvous: start it there, or name an address of this "
            f"one on all nodes."
        )
    return (
        f"--rendezvous {shown}: port {port} is in use on this machine by another program, perhaps an earlier job.\n"
        f"Find it with `ss -ltnp 'sport = :{port}'` and end it, or choose another port on all nodes."
    )


def known_addresses() -> str:
    return ", ".join(f"{ip} ({name})" for name, ip in hosts.interfaces()) or "none"


def free_port() -> int:
    """A port nobody has now. (Torch's rank 0 binds it a moment later; no interface exists to hand it over held.)"""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def torch_port(plan: RunPlan) -> int:
    if plan.rendezvous is None or plan.nodes == 1:
        return free_port()
    port = plan.rendezvous[1]
    return port + 1 if port < 65535 else port - 1


def worker_argv(plan: RunPlan) -> list[str]:
    return [sys.executable, "-u", *plan.command]


def worker_environment(
    plan: RunPlan, local_rank: int, rendezvous: tuple[str, int], master_port: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """The whole environment of one worker."""
    own = job_variables(
        rank=plan.rank(local_rank),
        world_size=plan.world_size,
        local_rank=local_rank,
        local_world_size=plan.workers,
        rendezvous=rendezvous,
        master_port=master_port,
        secret=plan.secret,
        encrypt=encrypted(plan, environ),
        timeout_s=plan.timeout_s,
    )
    if plan.trace is not None:
        own["STRETTO_TRACE"] = str(plan.trace)
    interface = gloo_interface(None if plan.nodes == 1 else rendezvous, environ)
    return {**torch_defaults(plan.workers, interface), **environ, **own}


def encrypted(plan: RunPlan, environ: Mapping[str, str]) -> bool:
    """The command line's word, else STRETTO_ENCRYPT, else: between machines."""
    if plan.encrypt is not None:
        return plan.encrypt
    return switch(environ, "STRETTO_ENCRYPT", default=plan.nodes > 1)


def torch_defaults(workers: int, interface: str | None) -> dict[str, str]:
    """What torch should find unless the user has said otherwise."""
    defaults = {"GLOO_SOCKET_IFNAME": interface} if interface is not None else {}
    if workers > 1:
        defaults["OMP_NUM_THREADS"] = "1"  # N workers with a thread per core each would fight over the cores
    return defaults


def gloo_interface(rendezvous: tuple[str, int] | None, environ: Mapping[str, str]) -> str | None:
    """Where gloo should listen, which would otherwise ask for the address of this host's name, often a useless one.

    Without a rendezvous (one machine): the loopback interface. None if there is no route: the workers will say why.
    """
    with contextlib.suppress(RendezvousError):
        if environ.get("STRETTO_INTERFACE"):
            return hosts.interface_of(hosts.address_of(environ["STRETTO_INTERFACE"]))
        return hosts.interface_of(LOOPBACK if rendezvous is None else hosts.address_for_others(*rendezvous))
    return None


def job_variables(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    rendezvous: tuple[str, int],
    master_port: int,
    secret: bytes,
    encrypt: bool,
    timeout_s: float | None = None,
) -> dict[str, str]:
    """The variables that tell a worker its place: ours (read by `detect`) and the ones torch reads."""
    place = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
    }
    variables = {name: str(value) for name, value in place.items()}
    variables |= {f"STRETTO_{name}": str(value) for name, value in place.items()}
    variables |= {
        "STRETTO_RENDEZVOUS": hosts.join_address(*rendezvous),
        "STRETTO_SECRET": secret.hex(),
        "STRETTO_ENCRYPT": "on" if encrypt else "off",
        "MASTER_ADDR": rendezvous[0],
        "MASTER_PORT": str(master_port),
    }
    if timeout_s is not None:
        variables["STRETTO_TIMEOUT"] = f"{timeout_s:g}"
    return variables
