"""What the environment says about this process's place in a job.

The first of these that is recognised decides:

    stretto     STRETTO_RANK and STRETTO_WORLD_SIZE, set by `stretto run` and `stretto lab`
    torchrun    TORCHELASTIC_RUN_ID, or RANK, WORLD_SIZE and MASTER_ADDR
    slurm       SLURM_PROCID and SLURM_NTASKS
    openmpi     OMPI_COMM_WORLD_RANK
    mpich       PMI_RANK (Hydra: MPICH, Intel MPI, MVAPICH)
    torchrun    RANK, and a WORLD_SIZE above 1, without MASTER_ADDR: an error that names it
    single      none of these: a job of one

Slurm and MPI say who we are but not where to meet, so several tasks need MASTER_ADDR and MASTER_PORT (or
STRETTO_RENDEZVOUS). MASTER_PORT itself is left alone: torch's rank 0 opens its store there if the script also uses
torch.distributed. The coordinator takes MASTER_PORT + 1.

Servers on hosts of their own (`server_meeting.py`) are announced by STRETTO_SERVERS=NUMBER@HOST:PORT, under any launcher.

`detect` is a pure function of the mapping it is given; it opens no socket. Traffic is encrypted exactly if the workers
are on more than one host, and traffic to servers exactly if these may be, unless STRETTO_ENCRYPT says otherwise.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.errors import ConfigurationError, SecretError
from stretto.launching import secret as secrets
from stretto.launching.hosts import is_loopback, join_address, split_address
from stretto.timeouts import Timeouts

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DedicatedServers:
    """Servers that were started apart from the workers, who wait for them when they join the job."""

    number: int
    rendezvous: str  # where workers and servers meet
    encrypt: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's place in the job, and what it needs to find the others."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    rendezvous: str | None  # host:port of the coordinator; None until settled (torchrun), or in a job of one
    secret: bytes | None = field(repr=False)  # None in a job of one, or until settled
    encrypt: bool
    launcher: str  # "stretto", "torchrun", "slurm", "openmpi", "mpich", "single"
    timeout_s: float | None = None  # STRETTO_TIMEOUT: all deadlines follow from it
    meet_s: float | None = None  # STRETTO_MEET_TIMEOUT: how long the workers may take to meet
    interface: str | None = None  # STRETTO_INTERFACE: name or address, overrides the kernel's choice
    master: str | None = None  # MASTER_ADDR:MASTER_PORT, where torch's store is
    run: str = ""  # tells this run from an earlier one of the same name
    ledger: str | None = None  # STRETTO_LEDGER: where to write, at the end, how many bytes were sent (the lab asks)
    trace: str | None = None  # STRETTO_TRACE: the folder for this rank's trace file; None: no tracing
    progress: bool = False  # STRETTO_PROGRESS=on: rank 0 says every few seconds how training goes
    agent_store: bool = False  # torchrun's agent serves the store; otherwise rank 0 has to
    restart: int = 0  # how often the launcher has started this worker again
    strategy: str | None = None  # STRETTO_STRATEGY: for `distribute` calls that name none
    servers: DedicatedServers | None = None  # STRETTO_SERVERS
    room: int = 0  # for so many members that join later, with ranks from `world_size` on

    @property
    def one_host(self) -> bool:
        return self.local_world_size == self.world_size

    @property
    def timeouts(self) -> Timeouts:
        """The deadlines that the environment asks for; the defaults where it is silent."""
        return _timeouts(self.timeout_s, self.meet_s)


@dataclass(frozen=True, slots=True)
class _RankNumbers:
    """The four numbers every launcher gives, with the names under which it gives them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    names: tuple[str, str, str, str]

    def __post_init__(self) -> None:
        rank_name, world_name, local_rank_name, local_world_name = self.names
        _require_rank(rank_name, self.rank, world_name, self.world_size)
        _require_rank(local_rank_name, self.local_rank, local_world_name, self.local_world_size)
        if self.local_world_size > self.world_size:
            raise ConfigurationError(
                f"{local_world_name}={self.local_world_size} with {world_name}={self.world_size}: one host cannot have "
                "more workers than the whole job. Let the launcher set both, or correct one of them."
            )


def detect(environ: Environment) -> Launch:
    """Find this process's place in the job. Contradictions and nonsense are `ConfigurationError`s that name the
    variable."""
    if "STRETTO_RANK" in environ or "STRETTO_WORLD_SIZE" in environ:
        return _under_stretto(environ)
    if "TORCHELASTIC_RUN_ID" in environ or all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return _under_torchrun(environ)
    if "SLURM_PROCID" in environ and ("SLURM_NTASKS" in environ or "SLURM_STEP_NUM_TASKS" in environ):
        return _under_scheduler(environ, "slurm", _slurm_place(environ))
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _under_scheduler(environ, "openmpi", _place(environ, *_OPENMPI))
    if "PMI_RANK" in environ:
        return _under_scheduler(environ, "mpich", _place(environ, *_MPICH))
    if environ.get("RANK") and environ.get("WORLD_SIZE", "").strip() not in ("", "1"):
        # Somebody has set up a job of several by hand and forgot a part: each worker would train alone. (RANK by itself, or a
        # job of one, is what a notebook may have left behind.)
        return _under_torchrun(environ)
    return _single(environ)


def deadlines(environ: Environment) -> Timeouts:
    """Those of a process that is no worker."""
    return _timeouts(_seconds(environ, "STRETTO_TIMEOUT"), _seconds(environ, "STRETTO_MEET_TIMEOUT"))


def _timeouts(timeout_s: float | None, meet_s: float | None) -> Timeouts:
    all_of_them = Timeouts() if timeout_s is None else Timeouts.of(timeout_s)
    return all_of_them if meet_s is None else dataclasses.replace(all_of_them, meet_s=meet_s)


def detect_here() -> Launch:
    """`detect` for this process's own environment."""
    return detect(os.environ)


def own_environment() -> dict[str, str]:
    """This process's environment, for those above `job` that pass it on to processes of their own."""
    return dict(os.environ)


def has_only_global_ranks(environ: Environment) -> bool:
    """Whether somebody has set up by hand what torch's workers need to meet: `RANK` and `WORLD_SIZE`, not which share a host."""
    ours = "STRETTO_RANK" in environ or "STRETTO_WORLD_SIZE" in environ
    both = "RANK" in environ and "WORLD_SIZE" in environ
    return not ours and both and not ("LOCAL_RANK" in environ and "LOCAL_WORLD_SIZE" in environ)


def can_meet_without_torch(*, is_in_job: bool) -> bool:
    """Whether the variables are missing by which torch's workers meet, and this process has a job, or can join one, without."""
    if "RANK" in os.environ:
        return False
    try:
        return is_in_job or detect_here().launcher in ("slurm", "openmpi", "mpich")
    except ConfigurationError:
        return False


_STRETTO = ("STRETTO_RANK", "STRETTO_WORLD_SIZE", "STRETTO_LOCAL_RANK", "STRETTO_LOCAL_WORLD_SIZE")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPENMPI = (
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _under_stretto(environ: Environment) -> Launch:
    place = _place(environ, *_STRETTO)
    rendezvous = _rendezvous(environ)
    secret = secret_in(environ)
    if place.world_size > 1 and rendezvous is None:
        raise ConfigurationError(
            f"STRETTO_WORLD_SIZE={place.world_size} but STRETTO_RENDEZVOUS is not set: the workers have nowhere to "
            f"meet. Start them with `stretto run -n {place.world_size} script.py`, or set STRETTO_RENDEZVOUS=HOST:PORT."
        )
    if place.world_size > 1 and secret is None:
        raise no_secret(f"STRETTO_WORLD_SIZE={place.world_size}")
    restart = _integer(environ, "STRETTO_RESTART_COUNT", needed_with="STRETTO_RANK", default=0)
    return _launch(environ, "stretto", place, rendezvous, secret, run=rendezvous or "", restart=restart)


def _under_torchrun(environ: Environment) -> Launch:
    world_size = _integer(environ, "WORLD_SIZE", needed_with="RANK")
    master = _master(environ) if world_size > 1 else None
    if world_size > 1 and master is None:
        raise ConfigurationError(
            f"WORLD_SIZE={world_size} but MASTER_ADDR and MASTER_PORT are not both set, so there is no store to meet at. Start "
            "the script with torchrun or `stretto run`, or set both variables on every worker; to run it alone, unset RANK and "
            "WORLD_SIZE."
        )
    place = _place(environ, *_TORCHRUN)
    # As torch does: the restart count keeps a restarted group of workers away from what the last one left in the store.
    restart = _integer(environ, "TORCHELASTIC_RESTART_COUNT", needed_with="RANK", default=0)
    run = f"{environ.get('TORCHELASTIC_RUN_ID', 'none')}/{restart}"
    agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    secret = secret_in(environ) if place.world_size > 1 else None
    launch = _launch(environ, "torchrun", place, None, secret, master=master, run=run, agent_store=agent_store, restart=restart)
    if secret is None and launch.encrypt and not launch.one_host:
        raise no_secret(
            f"WORLD_SIZE={place.world_size} with {place.local_world_size} of them on this host",
            "Under torchrun it could only travel through torchrun's store, which anybody who reaches MASTER_PORT can read. ",
            "\nOr, on a network where everybody is trusted, turn encryption off: STRETTO_ENCRYPT=off, on every machine.",
        )
    return launch


def _under_scheduler(environ: Environment, launcher: str, place: _RankNumbers) -> Launch:
    """Slurm and MPI: they give ranks, the user gives the place to meet and, across machines, the secret."""
    if place.world_size == 1:
        return _launch(environ, launcher, place, None, None)
    master = _master(environ)
    rendezvous = _rendezvous(environ) or _next_port(master)
    if rendezvous is None:
        hint = ""
        if launcher == "slurm":
            hint = " If this script was meant to run alone, start it with `srun -n 1` or `env -u SLURM_PROCID`."
        raise ConfigurationError(
            f"{launcher} started {place.world_size} workers ({place.names[1]}={place.world_size}), but it does not "
            "tell them where to meet.\n"
            "Export MASTER_ADDR (the host of rank 0, as the others can reach it) and MASTER_PORT (a free port there; "
            f"the next one is used too) for every worker, or STRETTO_RENDEZVOUS=HOST:PORT.{hint}"
        )
    secret = secret_in(environ)
    if secret is None and place.local_world_size != place.world_size:
        raise no_secret(f"{place.names[1]}={place.world_size} with {place.local_world_size} of them on this host")
    run = "/".join(environ.get(name, "") for name in _RUN_NAMES)
    return _launch(environ, launcher, place, rendezvous, secret, master=master, run=run)


_RUN_NAMES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_ID_STRING")


def _single(environ: Environment) -> Launch:
    names = ("rank", "world size", "local rank", "local world size")
    return _launch(environ, "single", _RankNumbers(0, 1, 0, 1, names), None, None)


def _launch(
    environ: Environment,
    launcher: str,
    place: _RankNumbers,
    rendezvous: str | None,
    secret: bytes | None,
    *,
    master: str | None = None,
    run: str = "",
    agent_store: bool = False,
    restart: int = 0,
) -> Launch:
    several_hosts = place.local_world_size != place.world_size
    return Launch(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        rendezvous=rendezvous,
        secret=secret,
        encrypt=switch(environ, "STRETTO_ENCRYPT", default=several_hosts),
        launcher=launcher,
        timeout_s=_seconds(environ, "STRETTO_TIMEOUT"),
        meet_s=_seconds(environ, "STRETTO_MEET_TIMEOUT"),
        interface=environ.get("STRETTO_INTERFACE") or None,
        master=master,
        run=run,
        ledger=environ.get("STRETTO_LEDGER") or None,
        trace=environ.get("STRETTO_TRACE") or None,
        progress=switch(environ, "STRETTO_PROGRESS", default=False),
        agent_store=agent_store,
        restart=restart,
        strategy=environ.get("STRETTO_STRATEGY") or None,
        servers=dedicated_servers(environ, place.world_size, secret, several_hosts),
    )


def servers_elsewhere(environ: Environment) -> bool:
    """Whether the job has servers that may be on other hosts than its workers."""
    _, _, address = environ.get("STRETTO_SERVERS", "").strip().partition("@")
    return bool(address) and not is_loopback(address.rpartition(":")[0].strip("[]"))


def dedicated_servers(
    environ: Environment, num_workers: int, secret: bytes | None, several_hosts: bool
) -> DedicatedServers | None:
    text = environ.get("STRETTO_SERVERS")
    if not text:
        return None
    number, at, address = text.strip().partition("@")
    if not at or re.fullmatch(r"[1-9]\d{0,3}", number) is None:
        raise ConfigurationError(
            f"STRETTO_SERVERS={text!r} is not NUMBER@HOST:PORT. Write for instance STRETTO_SERVERS=2@node0:29500, where node0 is "
            f"the host of rank 0 and the port is free there."
        )
    rendezvous = _address("STRETTO_SERVERS", address)
    if num_workers == 1:
        raise ConfigurationError(
            f"STRETTO_SERVERS={text!r} in a job of one worker: there is nobody whose gradients a server could add to its own.\n"
            f"Start two workers or more, or leave the servers out."
        )
    if secret is None:
        raise no_secret(f"STRETTO_SERVERS={text!r}", "Servers are told from strangers by it, too. ")
    elsewhere = several_hosts or servers_elsewhere(environ)
    return DedicatedServers(int(number), rendezvous, switch(environ, "STRETTO_ENCRYPT", default=elsewhere))


def _place(environ: Environment, rank: str, world: str, local_rank: str, local_world: str) -> _RankNumbers:
    """Read four variables. The local two may be left out only in a job of one, where they say nothing."""
    world_size = _integer(environ, world, needed_with=rank)
    alone = world_size == 1
    return _RankNumbers(
        rank=_integer(environ, rank, needed_with=world),
        world_size=world_size,
        local_rank=_integer(environ, local_rank, needed_with=rank, default=0 if alone else None),
        local_world_size=_integer(environ, local_world, needed_with=rank, default=1 if alone else None),
        names=(rank, world, local_rank, local_world),
    )


def _slurm_place(environ: Environment) -> _RankNumbers:
    world = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    world_size = _integer(environ, world, needed_with="SLURM_PROCID")
    layout = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environ else "SLURM_TASKS_PER_NODE"
    local_world = _tasks_here(environ, layout, world_size)
    return _RankNumbers(
        rank=_integer(environ, "SLURM_PROCID", needed_with=world),
        world_size=world_size,
        local_rank=_integer(environ, "SLURM_LOCALID", needed_with="SLURM_PROCID", default=0 if world_size == 1 else None),
        local_world_size=local_world,
        names=("SLURM_PROCID", world, "SLURM_LOCALID", layout),
    )


def _tasks_here(environ: Environment, layout: str, world_size: int) -> int:
    """This node's entry of a list like `2(x3),1`: three nodes with two tasks, one with one."""
    if world_size == 1:
        return 1
    counts: list[int] = []
    for part in environ.get(layout, "").split(","):
        match = re.fullmatch(r"(\d{1,7})(?:\(x(\d{1,6})\))?", part.strip())
        if match is None:
            raise ConfigurationError(
                f"{layout}={environ.get(layout)!r} is not a list of task counts such as 2(x3),1, so it cannot be told "
                "how many workers share this host. Start the script with srun, which sets it."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    node = _integer(environ, "SLURM_NODEID", needed_with="SLURM_PROCID", default=0 if len(counts) == 1 else None)
    if not 0 <= node < len(counts):
        raise ConfigurationError(
            f"SLURM_NODEID={node} but {layout}={environ[layout]!r} lists {len(counts)} nodes. Start the script with "
            "srun, which sets both."
        )
    return counts[node]


def _integer(environ: Environment, name: str, *, needed_with: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        raise ConfigurationError(
            f"{needed_with}={environ.get(needed_with)!r} is set but {name} is not: one does not make sense without the "
            f"other. Let the launcher set both, or unset {needed_with} to run as a job of one."
        )
    if re.fullmatch(r"-?\d{1,9}", text.strip()) is None:
        raise ConfigurationError(f"{name}={text!r} is not a whole number. Let the launcher set it, for instance {name}=1.")
    return int(text)


def _require_rank(rank_name: str, rank: int, world_name: str, world_size: int) -> None:
    if world_size < 1:
        raise ConfigurationError(f"{world_name}={world_size}: a job has at least one worker. Set {world_name} to 1 or more.")
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"{rank_name}={rank} with {world_name}={world_size}: ranks are counted from 0 to {world_size - 1}. Correct "
            f"{rank_name}, or {world_name} if the job has more workers."
        )


def _rendezvous(environ: Environment) -> str | None:
    text = environ.get("STRETTO_RENDEZVOUS")
    return None if not text else _address("STRETTO_RENDEZVOUS", text)


def _master(environ: Environment) -> str | None:
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not host or not port:
        return None
    return _address("MASTER_ADDR:MASTER_PORT", f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def _next_port(master: str | None) -> str | None:
    if master is None:
        return None
    host, port = split_address(master)
    if port == 65535:
        raise ConfigurationError("MASTER_PORT=65535: the coordinator needs the port after it. Choose a smaller MASTER_PORT.")
    return join_address(host, port + 1)


def _address(name: str, text: str) -> str:
    try:
        host, port = split_address(text)
    except ValueError as error:
        example = "2@node0:29500" if name == "STRETTO_SERVERS" else "node0:29400"
        raise ConfigurationError(f"{name}={text!r}: {error}. Write for instance {name}={example}.") from error
    if port == 0:
        raise ConfigurationError(f"{name}={text!r}: port 0 cannot be connected to. Name the port on which rank 0's host listens.")
    return join_address(host, port)


def secret_in(environ: Environment) -> bytes | None:
    """The job's, or the file that has it."""
    if "STRETTO_SECRET" in environ:
        return secrets.parse(environ["STRETTO_SECRET"], "STRETTO_SECRET")
    if environ.get("STRETTO_SECRET_FILE"):
        return secrets.read_file(environ["STRETTO_SECRET_FILE"])
    return None


def no_secret(asked: str, why: str = "", or_else: str = "") -> SecretError:
    """What to raise where a secret is needed and there is none."""
    return SecretError(
        f"{asked}: this job needs a secret, but neither STRETTO_SECRET nor STRETTO_SECRET_FILE is set. Without one, "
        f"anybody who can reach a worker's port could join. {why}\n"
        f"{secrets.HOW_TO_MAKE_ONE}{or_else}"
    )


def switch(environ: Environment, name: str, *, default: bool) -> bool:
    """The value of a variable that is `on`, `off` or not set."""
    text = environ.get(name)
    if text is None:
        return default
    if text.strip().lower() not in ("on", "off"):
        raise ConfigurationError(f"{name}={text!r} is neither on nor off. Write {name}=on or {name}=off.")
    return text.strip().lower() == "on"


def _seconds(environ: Environment, name: str) -> float | None:
    text = environ.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigurationError(f"{name}={text!r} is not a positive number of seconds. Write for instance {name}=120.")
    return seconds
