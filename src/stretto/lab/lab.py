"""A network of virtual hosts on one machine, to try a job on links of a given speed, with slow hosts and cut links.

    with Lab(hosts=4, rate="1gbit") as lab:
        for result in lab.run([sys.executable, "train.py"], timeout_s=600):
            print(result.returncode, result.output)

Each host is a network namespace with an `eth0` of its own (see `network`); everything is held by one supervisor process
(see `supervisor`) and gone when it ends. The `Lab` object may be used from any thread.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from stretto.errors import ConfigurationError, JobError
from stretto.lab import messages
from stretto.lab.connection import LabConnection, LabProcess, Sink
from stretto.lab.control import LabFolder
from stretto.lab.environment import SharedByHosts, host_environment, server_variables
from stretto.lab.ledger import Traffic
from stretto.lab.network import MAX_HOSTS, address
from stretto.lab.rates import parse_rate
from stretto.lab.slow import check_factor
from stretto.launching import coordinator_process
from stretto.launching.detect import own_environment
from stretto.launching.ledger_file import WireCount, read_ledger
from stretto.launching.server_meeting import JoiningServer

_FIRST_MASTER_PORT = 29500
_FIRST_SERVER_PORT = 30500
_READY_S = 30.0
_TERMINATE_S = 3.0
_KILL_S = 10.0  # what is killed ends at once, unless the machine stalls
_CLOSE_S = 5.0
_TCP_STREAM = str(Path(__file__).with_name("tcp_stream.py"))


@dataclass(frozen=True)
class Result:
    """How a command ended on one host."""

    returncode: int  # negative: ended by that signal
    output: str  # stdout and stderr, as they came


class Lab:
    """Virtual hosts; a context manager. See the module's text.

    `servers`: so many hosts more, each for a parameter server instead of workers. `rate` shapes every link both ways, None leaves
    links as fast as the machine. `slow` maps hosts to how many times
    slower they run. `encrypt` turns encryption of stretto's wire on. `name` is for `stretto lab cut --name`;
    `environ` replaces the environment that commands inherit.
    """

    def __init__(
        self,
        hosts: int,
        rate: str | None = None,
        *,
        servers: int = 0,
        slow: Mapping[int, float] | None = None,
        encrypt: bool = False,
        name: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        _check_hosts(hosts, servers)
        _check_pyroute2()
        self.worker_hosts = hosts
        self.hosts = hosts = hosts + servers
        self.encrypt = encrypt
        self._environ = own_environment() if environ is None else dict(environ)
        setup = messages.Setup([parse_rate(rate)] * hosts, _factors(hosts, slow or {}))
        self._jobs = 0
        self._place = LabFolder(name)
        self.name = self._place.name
        self._closed = threading.Lock()
        try:
            self._link, self._supervisor = self._start_supervisor()
        except BaseException:
            self._place.listener.close()
            self._place.remove()
            raise
        try:
            self._link.request(setup)
        except BaseException:
            self.close()
            raise

    def _start_supervisor(self) -> tuple[LabConnection, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptors = {"--control": theirs.fileno(), "--listener": self._place.listener.fileno()}
        command = [sys.executable, "-m", "stretto.lab.supervisor", "--maker", str(os.getpid())]
        command += ["--directory", str(self._place.path)]
        for option, descriptor in descriptors.items():
            command += [option, str(descriptor)]
        with theirs:
            supervisor = subprocess.Popen(
                command,
                env=coordinator_process.importing_stretto(self._environ),
                cwd="/",  # -m puts it first on the import path: nothing there hides a module
                pass_fds=[*descriptors.values(), self._place.lock],  # the lock is held as long as the supervisor lives
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return LabConnection(ours), supervisor

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs in the lab, at once. May be called again."""
        if not self._closed.acquire(blocking=False):
            return
        self._link.close()
        try:
            self._supervisor.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()  # the kernel then kills its child, and with that all the rest
            self._supervisor.wait(_CLOSE_S)
        self._place.listener.close()
        self._place.remove()

    def address(self, host: int) -> str:
        """The host's address inside the lab."""
        self._check(host)
        return address(host)

    def spawn(self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None) -> LabProcess:
        """Start one command on one host, with `env` over the inherited environment; no variables of a job are set."""
        return self._spawn(host, argv, self._environ | dict(env or {}))

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        workers: int = 1,
        coordinator: bool = True,
        sink: Sink | None = None,
    ) -> LabJob:
        """Start the command `workers` times on every host, as ranks of one job, with its variables. `env` goes on top. The hosts
        behind those of the workers run a parameter server each, if there are any, which follows the workers.

        Without a coordinator stretto's workers cannot meet; torch's own can.
        """
        _check_argv(argv)
        _check_workers(workers, self)
        self._jobs += 1
        port = _FIRST_MASTER_PORT + self._jobs % 1000  # a job before this one may not have let go of its port
        secret = secrets.token_hex(32)
        world_size = self.worker_hosts * workers
        servers = self._servers(world_size, bytes.fromhex(secret)) if coordinator else []
        service, rendezvous = self._start_coordinator(secret, world_size) if coordinator else (None, None)
        run = SharedByHosts(
            world_size=world_size,
            workers=workers,
            rendezvous=rendezvous,
            secret=secret,
            encrypt=self.encrypt,
            master_port=port,
            servers=f"{len(servers)}@{servers[0].rendezvous}" if servers else None,
        )
        job = LabJob(self, service)
        for rank in range(world_size):
            ledger = self._place.ledger / f"{self._jobs}-{rank}.json"
            variables = host_environment(self._environ, run, rank, str(ledger)) | dict(env or {})
            job.processes.append(self._spawn(rank // workers, argv, variables, sink=sink, number=rank))
            job.ledger_files.append(ledger)
        for server in servers:
            ledger = self._place.ledger / f"{self._jobs}-server-{server.number}.json"
            variables = server_variables(self._environ, secret, str(ledger))
            host = self.worker_hosts + server.number
            job.servers.append(self._spawn(host, server.command(), variables, sink=sink, number=world_size + server.number))
            job.server_ledger_files.append(ledger)
        return job

    def _servers(self, num_workers: int, secret: bytes) -> list[JoiningServer]:
        number, at = self.hosts - self.worker_hosts, f"{address(0)}:{_FIRST_SERVER_PORT + self._jobs % 1000}"
        return [
            JoiningServer(
                number=each,
                num_servers=number,
                num_workers=num_workers,
                rendezvous=at,
                secret=secret,
                encrypt=self.encrypt,
                trace=self._environ.get("STRETTO_TRACE"),
            )  # fmt: skip
            for each in range(number)
        ]

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        *,
        workers: int = 1,
        coordinator: bool = True,
        keep_going: bool = False,
    ) -> list[Result]:
        """Run the command on every host to its end. When one fails the others are ended too, unless `keep_going`."""
        return self.start(argv, env, workers=workers, coordinator=coordinator).wait(timeout_s, keep_going=keep_going)

    def _start_coordinator(self, secret: str, world_size: int) -> tuple[LabProcess, str]:
        reading, writing = os.pipe()
        argv = coordinator_process.argv(f"{address(0)}:0", world_size, 3, encrypted=self.encrypt)
        environment = coordinator_process.environment(bytes.fromhex(secret), self._environ)
        try:
            process = self._spawn(0, argv, environment, directory="/", extra=[writing], service=True)
        finally:
            os.close(writing)
        with open(reading):
            rendezvous = coordinator_process.read_address(reading, time.monotonic() + _READY_S)
        if rendezvous is None:
            process.kill()
            self._link.wait_for(lambda: process.finished, _KILL_S)
            raise JobError(f"the coordinator did not start on host 0 within {_READY_S:g} s. It said:\n{process.output}")
        return process, rendezvous

    def _spawn(
        self,
        host: int,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        directory: str | None = None,
        extra: Sequence[int] = (),
        service: bool = False,
        sink: Sink | None = None,
        number: int | None = None,
    ) -> LabProcess:
        self._check(host)
        _check_argv(argv)
        command = messages.Command(
            argv=[os.fsencode(word) for word in argv],
            environment={name: os.fsencode(value) for name, value in environment.items()},
            directory=os.fsencode(directory or os.getcwd()),
        )
        file = messages.write_command(command)
        try:
            return self._link.start(messages.Spawn(host, service), file, extra, sink, host if number is None else number)
        finally:
            os.close(file)

    def cut(self, host: int) -> None:
        """Let every packet from and to the host vanish, silently: its interface stays up, nobody gets an error."""
        self._link.request(messages.CutHost(self._check(host)))

    def restore(self, host: int) -> None:
        """Mend a cut link."""
        self._link.request(messages.Restore(self._check(host)))

    def set_rate(self, host: int, rate: str | None) -> None:
        """Change the speed of a host's link, both ways, while it is in use."""
        self._link.request(messages.SetRate(self._check(host), parse_rate(rate)))

    def set_slow(self, host: int, factor: float) -> None:
        """Make a host run `factor` times slower from now on; 1 is full speed."""
        self._link.request(messages.SetSlow(self._check(host), check_factor(factor)))

    def counters(self) -> list[Traffic]:
        """Bytes each host's interface has sent and received since the lab was made."""
        reply = self._link.request(messages.Count())
        assert isinstance(reply, messages.Counted)
        return [Traffic(*pair) for pair in reply.traffic]

    def measure_tcp(self, sender: int, receiver: int, num_bytes: int, timeout_s: float = 60.0) -> float:
        """Seconds that a bare TCP stream of so many bytes takes from one host to another."""
        command = [sys.executable, "-I", "-S", _TCP_STREAM, self.address(receiver), str(num_bytes), str(timeout_s)]
        processes = [self._spawn(self._check(receiver), command, self._environ, service=True)]
        try:
            self._link.wait_for(lambda: "\n" in processes[0].output or processes[0].finished, timeout_s + _READY_S)
            port = next(iter(processes[0].output.split()), "")
            if port.isdigit():  # otherwise it has said what went wrong
                processes.append(self._spawn(self._check(sender), [*command, port], self._environ, service=True))
            if processes[0].wait(2 * timeout_s + 5.0) == 0:
                return float(processes[0].output.split()[1])
        finally:
            for process in processes:
                process.kill()
        said = "\n".join(process.output.strip() for process in processes)
        raise JobError(f"a stream of {num_bytes} bytes from host {sender} to host {receiver} failed:\n{said}")

    def _check(self, host: int) -> int:
        if not 0 <= host < self.hosts:
            raise ConfigurationError(f"there is no host {host} in this lab. Name one from 0 to {self.hosts - 1}.")
        return host


class LabJob:
    """One command running on every host, once or several times: `processes[rank]`. `servers` follow it to its end."""

    def __init__(self, lab: Lab, coordinator: LabProcess | None) -> None:
        self.processes: list[LabProcess] = []
        self.ledger_files: list[Path] = []
        self.servers: list[LabProcess] = []
        self.server_ledger_files: list[Path] = []
        self.first_failure: int | None = None  # the rank that failed first, once `wait` has seen it
        self._lab = lab
        self._coordinator = coordinator

    def wait(self, timeout_s: float | None = None, *, keep_going: bool = False) -> list[Result]:
        """How each command ended, by rank. None waits as long as the commands run.

        When one fails the others are ended within 5 s, unless `keep_going`. When the time is over all are ended and
        `JobError` shows what they had written.
        """
        in_time = self.over_within(timeout_s, keep_going=keep_going)
        self.first_failure = self._failed()
        self.stop()
        if not in_time:
            raise JobError(self._late(timeout_s or 0.0))
        return [Result(_code(each), each.output) for each in self.processes]

    def over_within(self, timeout_s: float | None, *, keep_going: bool = False) -> bool:
        """Wait until every command has ended or one has failed; False when neither happened in time. Ends nothing."""

        def over() -> bool:
            return self._ended() or (not keep_going and self._failed() is not None)

        return self._lab._link.wait_for(over, timeout_s)

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """End what still runs: first politely, 3 s later by force."""
        self._signal(signum)
        if not self._lab._link.wait_for(self._ended_with_servers, _TERMINATE_S):
            self._signal(signal.SIGKILL)
            self._lab._link.wait_for(self._ended_with_servers, _KILL_S)
        if self._coordinator is not None:
            self._coordinator.kill()

    def ledgers(self) -> list[WireCount | None]:
        """What each worker's wire counted; None where it left no count."""
        return [read_ledger(path) for path in self.ledger_files]

    def server_ledgers(self) -> list[WireCount | None]:
        """The same, of each server."""
        return [read_ledger(path) for path in self.server_ledger_files]

    def _ended(self) -> bool:
        return all(each.finished for each in self.processes)

    def _ended_with_servers(self) -> bool:
        return self._ended() and all(each.finished for each in self.servers)

    def _signal(self, signum: int) -> None:
        for each in (*self.processes, *self.servers):
            each.send_signal(signum)

    def _failed(self) -> int | None:
        failed = [each for each in self.processes if each.returncode not in (None, 0)]
        return min(failed, key=lambda each: each.ended_at).number if failed else None

    def _late(self, timeout_s: float) -> str:
        said = "\n".join(f"--- host {each.host}, rank {each.number}:\n{each.output[-2000:].rstrip()}" for each in self.processes)
        return f"the command did not end on every host within {timeout_s:g} s, and was ended. It had written:\n{said}"


def lab_available() -> str | None:
    """None where labs can run; otherwise why not and what to do. Tries it, in a third of a second."""
    try:
        Lab(hosts=1, rate="1gbit").close()
        return None
    except (JobError, ConfigurationError) as error:
        return str(error)


def _code(process: LabProcess) -> int:
    return -signal.SIGKILL if process.returncode is None else process.returncode


def _check_hosts(hosts: int, servers: int) -> None:
    if servers < 0:
        raise ConfigurationError(f"servers={servers}: a lab has 0 or more hosts for servers. Write for instance servers=4.")
    if hosts < 1 or hosts + servers > MAX_HOSTS:
        more = f" and servers={servers}" if servers else ""
        raise ConfigurationError(
            f"hosts={hosts}{more}: a lab has from 1 to {MAX_HOSTS} hosts, as many as 10.81.0.0/24 has addresses.\n"
            f"Write for instance hosts=4."
        )


def _check_workers(workers: int, lab: Lab) -> None:
    if workers == lab.worker_hosts == 1 < lab.hosts:
        raise ConfigurationError(
            f"servers={lab.hosts - 1} and one worker: there is nobody whose gradients a server could add to its own.\n"
            f"Write hosts=2 or more, or leave servers= out."
        )
    if workers < 1:
        raise ConfigurationError(
            f"workers={workers}: a host of a lab runs the command once or more. Write for instance workers=2."
        )


def _check_argv(argv: Sequence[str]) -> None:
    if isinstance(argv, (str, bytes)) or not argv:
        raise ConfigurationError(
            f"argv={argv!r}: a command is a list of words, the program first; no shell takes it apart.\n"
            f'Write for instance ["python", "train.py"].'
        )


def _check_pyroute2() -> None:
    if find_spec("pyroute2") is None:
        raise ConfigurationError(
            "the lab sets up its network with pyroute2, which is not installed.\nInstall it: pip install pyroute2"
        )


def _factors(hosts: int, slow: Mapping[int, float]) -> list[float]:
    for host, factor in slow.items():
        check_factor(factor)
        if not 0 <= host < hosts:
            raise ConfigurationError(
                f"slow={dict(slow)} names host {host}, but the lab has hosts 0 to {hosts - 1}. Name one of those."
            )
    return [float(slow.get(host, 1.0)) for host in range(hosts)]
