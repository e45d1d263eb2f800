"""What `stretto run` was asked for, checked before anything starts, and the environment of each worker.

Ranks are counted node by node: with `-n 2,2,0` node 0 has ranks 0 and 1, node 1 has 2 and 3, node 2 none; so are servers. All
nodes are told the same counts, so that each knows everybody's.

Ports: on one node the coordinator picks a free one on the loopback address, `MASTER_PORT` is another free one, and where workers
and servers meet a third. Between nodes all must agree beforehand: the coordinator has the rendezvous port p, torch's own store
(hosted by rank 0) gets p+1, and p+2 is where workers and servers meet.

Where node 0 listens: a name may mean another address on every machine, and on its own machine it is often a loopback
address (Debian writes `127.0.1.1 name` into /etc/hosts). So a rendezvous given by name is listened to on all addresses;
the coordinator turns strangers away wherever they come from. One given as an address is listened to there alone.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import itertools
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stretto.errors import ConfigurationError, RendezvousError, SecretError
from stretto.launching import hosts, secret
from stretto.launching.detect import deadlines, servers_elsewhere, switch
from stretto.launching.node_counts import check_servers, check_workers, of_each_node

LOOPBACK = "127.0.0.1"
LONGEST_S = 1e6  # the coordinator takes no longer patience
BACK_S = 30.0  # for a worker that is started again, alone, to reach the job that it comes back to
LONGEST_STRATEGY = 4096  # characters, as `stretto.parse` has it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One node's part of a job. `command` follows `python -u`."""

    command: tuple[str, ...]
    workers_of: tuple[int, ...]  # each node
    servers_of: tuple[int, ...] = ()
    node: int = 0
    rendezvous: tuple[str, int] | None = None  # None: one node, loopback, any free port
    secret: bytes = field(repr=False)
    encrypt: bool | None = None  # None: STRETTO_ENCRYPT, or by the number of nodes
    timeout_s: float | None = None
    meet_s: float | None = None  # None: as `timeout_s` has it, or the default of `Timeouts`
    prefix: bool = True
    trace: Path | None = None  # the folder, absolute: workers may change theirs
    progress: bool = False  # rank 0 says every few seconds how training goes
    strategy: str | None = None  # for `distribute` calls that name none
    max_restarts: int = 0  # how often all workers are started again after one has failed; if it `goes_on`, that one alone
    min_workers: int | None = None  # of this node, with which the job goes on; None: with all of them

    @property
    def nodes(self) -> int:
        return len(self.workers_of)

    @property
    def workers(self) -> int:
        """The number of workers that this node starts."""
        return self.workers_of[self.node]

    @property
    def world_size(self) -> int:
        return sum(self.workers_of)

    @property
    def goes_on(self) -> bool:
        """Whether it may lose workers, and they may come back."""
        return self.min_workers is not None

    def rank(self, local_rank: int) -> int:
        return sum(self.workers_of[: self.node]) + local_rank

    def node_of(self, rank: int) -> int:
        return next(node for node, upto in enumerate(itertools.accumulate(self.workers_of)) if rank < upto)

    @property
    def num_servers(self) -> int:
        return sum(self.servers_of)

    @property
    def my_servers(self) -> range:
        """The numbers of this node's servers."""
        first = sum(self.servers_of[: self.node])
        return range(first, first + (self.servers_of[self.node] if self.servers_of else 0))


def make_plan(
    target: str,
    arguments: list[str],
    *,
    module: bool,
    workers: int | str,
    nodes: int,
    node: int | None,
    rendezvous: str | None,
    secret_file: Path | None,
    timeout_s: float | None,
    prefix: bool,
    trace: Path | None = None,
    progress: bool = False,
    encrypt: bool | None = None,
    meet_s: float | None = None,
    strategy: str | None = None,
    max_restarts: int = 0,
    min_workers: int | None = None,
    servers: int | str = 0,
) -> RunPlan:
    """Check every value of the command line and put them together. `workers`, `servers`: of each node, or of all, one by one."""
    check_counts(nodes, node, max_restarts)
    workers_of, servers_of = of_each_node("-n", workers, nodes), of_each_node("--servers", servers, nodes)
    check_workers(workers_of)
    check_servers(workers_of, servers_of, max_restarts if min_workers is None else 0)
    if not module and workers_of[node or 0]:
        check_script(target)
    check_min_workers(min_workers, workers_of[node or 0])
    check_seconds("--timeout", timeout_s)
    check_seconds("--meet-timeout", meet_s)
    if strategy is not None:
        check_strategy(strategy)
    return RunPlan(
        command=("-m", target, *arguments) if module else (target, *arguments),
        workers_of=workers_of,
        servers_of=servers_of,
        node=node or 0,
        rendezvous=meeting_place(nodes, rendezvous),
        secret=job_secret(nodes, secret_file),
        encrypt=encrypt,
        timeout_s=timeout_s,
        meet_s=meet_s,
        prefix=prefix,
        trace=None if trace is None else trace_folder(trace),
        progress=progress,
        strategy=strategy,
        max_restarts=max_restarts,
        min_workers=min_workers,
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


def check_counts(nodes: int, node: int | None, max_restarts: int) -> None:
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
    if max_restarts < 0:
        raise ConfigurationError(
            f"--max-restarts {max_restarts}: workers are started again 0 times or more. Write for instance --max-restarts 3."
        )


def check_min_workers(min_workers: int | None, workers: int) -> None:
    if min_workers is not None and not 1 <= min_workers <= workers:
        raise ConfigurationError(
            f"--min-workers {min_workers} with -n {workers}: a job that loses workers goes on while so many of this machine's "
            f"are left, 1 to {workers}.\nWrite for instance --min-workers 1."
        )


def check_seconds(option: str, seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds < LONGEST_S:
        raise ConfigurationError(
            f"{option} {seconds:g}: a timeout is a positive number of seconds below {LONGEST_S:g}, and nothing in stretto waits "
            f"for ever.\nWrite for instance {option} 60; for a very long wait, {option} 100000."
        )


def check_strategy(text: str) -> None:
    """Only that it reads like a strategy: which names there are is known to the workers, who have loaded torch."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body if len(text) <= LONGEST_STRATEGY else None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        tree = None
    if not isinstance(tree, (ast.Call, ast.Name)):
        raise ConfigurationError(
            f"--strategy {text[:200]!r}: this does not read like a strategy, which is a call or the name of a recipe, in at most "
            f"{LONGEST_STRATEGY} characters.\n"
            f"Write for instance --strategy 'Strategy(compress=ErrorFeedback(Sign()))', or --strategy ddp."
        )


def trace_folder(folder: Path, *, empty: bool = True) -> Path:
    """The folder, made if need be, without the files of earlier runs: ranks that this run does not have would stay. Not `empty`:
    where others of this run may have written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        old_files = (*folder.glob("trace-rank*.json"), *folder.glob("trace-server*.json"), folder / "plan.json")
        for old in old_files if empty else ():
            old.unlink(missing_ok=True)
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
    _try_to_bind(shown, family, ip, port)
    if plan.nodes == 1 or not hosts.is_name(host):
        return ip, port
    everywhere = "::" if family is socket.AF_INET6 else "0.0.0.0"
    _try_to_bind(shown, family, everywhere, port)
    return everywhere, port


def _try_to_bind(shown: str, family: socket.AddressFamily, ip: str, port: int) -> None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((ip, port))
    except PermissionError as problem:
        raise RendezvousError(
            f"--rendezvous {shown}: this user may not listen on port {port}.\n"
            f"Ports from 1024 on are open to all: take for instance port 29400 on all nodes."
        ) from problem
    except OSError as problem:
        raise RendezvousError(bind_problem(shown, ip, port, problem)) from problem


def bind_problem(shown: str, ip: str, port: int, problem: OSError) -> str:
    if problem.errno == errno.EADDRNOTAVAIL:
        return (
            f"--rendezvous {shown}: this machine does not have the address {ip}; it has {known_addresses()}.\n"
            f"Node 0 must run on the machine of the rendezvous: start it there, or name an address of this "
            f"one on all nodes."
        )
    if problem.errno == errno.EADDRINUSE:
        return (
            f"--rendezvous {shown}: port {port} is in use on this machine by another program, perhaps an earlier job.\n"
            f"Find it with `ss -ltnp 'sport = :{port}'` and end it, or choose another port on all nodes."
        )
    return (
        f"--rendezvous {shown}: this machine cannot listen on {ip} ({problem.strerror}).\n"
        f"Name another of its addresses on all nodes; it has {known_addresses()}."
    )


def where_node_0_is(plan: RunPlan, bind: tuple[str, int], environ: Mapping[str, str]) -> str | None:
    """What a person should know if the rendezvous is a loopback address on its own machine; None if it is not."""
    if plan.rendezvous is None or plan.rendezvous == bind or plan.nodes == 1:
        return None
    _, ip = hosts.resolve(*plan.rendezvous)
    if not hosts.is_loopback(ip):
        return None
    said = (
        f"stretto: on this machine {plan.rendezvous[0]} means {ip}, which no other machine can reach; node 0 listens on all of "
        f"its addresses"
    )
    with contextlib.suppress(RendezvousError):  # the workers will say why they do not know which address to publish
        interface = environ.get("STRETTO_INTERFACE")
        published = hosts.address_of(interface) if interface else hosts.address_for_others(*plan.rendezvous)
        said += f", and its workers publish {published} ({hosts.interface_of(published)}; STRETTO_INTERFACE changes that)"
    return said


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
    plan: RunPlan,
    local_rank: int,
    rendezvous: tuple[str, int],
    master_port: int,
    environ: Mapping[str, str],
    restart: int = 0,
    servers_at: str | None = None,
) -> dict[str, str]:
    """The whole environment of one worker. `restart`: how often the job was started again before. `servers_at`: where it meets
    the servers of the job, if `stretto run` starts some."""
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
    own["STRETTO_RESTART_COUNT"] = str(restart)
    if (meet_s := meet_timeout(plan, restart, environ)) is not None:
        own["STRETTO_MEET_TIMEOUT"] = f"{meet_s:g}"
    if plan.trace is not None:
        own["STRETTO_TRACE"] = str(plan.trace)
    if plan.progress:
        own["STRETTO_PROGRESS"] = "on"
    if plan.strategy is not None:
        own["STRETTO_STRATEGY"] = plan.strategy
    if servers_at is not None:
        own["STRETTO_SERVERS"] = f"{plan.num_servers}@{servers_at}"
    interface = gloo_interface(None if plan.nodes == 1 else rendezvous, environ)
    return {**torch_defaults(plan.workers, interface), **environ, **own}


def meet_timeout(plan: RunPlan, restart: int, environ: Mapping[str, str]) -> float | None:
    """For how long a worker looks for the others. One that is started again, alone, finds the coordinator of a job that goes on
    at once; if it does not, the job has ended meanwhile, and there is nothing to wait for."""
    if not plan.goes_on or not restart:
        return plan.meet_s
    wanted = plan.meet_s if plan.meet_s is not None else deadlines(environ).meet_s
    return min(wanted, BACK_S)


def encrypted(plan: RunPlan, environ: Mapping[str, str]) -> bool:
    """The command line's word, else STRETTO_ENCRYPT, else: between machines, also where only servers are on other ones."""
    if plan.encrypt is not None:
        return plan.encrypt
    return switch(environ, "STRETTO_ENCRYPT", default=plan.nodes > 1 or servers_elsewhere(environ))


def torch_defaults(workers: int, interface: str | None) -> dict[str, str]:
    """What torch should find unless the user has said otherwise."""
    defaults = {"GLOO_SOCKET_IFNAME": interface} if interface is not None else {}
    if workers > 1:
        defaults["OMP_NUM_THREADS"] = str(threads_each(workers))
    return defaults


def threads_each(workers: int) -> int:
    """Threads for each of several workers of this machine: with one per processor each, they would fight over processors."""
    return max(1, hosts.usable_processors() // workers)


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
