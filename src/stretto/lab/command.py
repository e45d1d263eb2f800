"""`stretto lab`: run a command on virtual hosts, and change the links of a running lab.

    stretto lab --hosts 4 --rate 1gbit --slow 1=4x -- python train.py
    stretto lab cut 1 | restore 1 | rate 1 100mbit

The first word decides: `cut`, `restore` and `rate` speak to a running lab, anything else starts one.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from stretto.lab import control, messages
from stretto.lab.lab import Lab, LabJob
from stretto.lab.ledger import Traffic, excess, warning
from stretto.lab.rates import describe_rate, parse_rate
from stretto.lab.slow import parse_slow
from stretto.launching.detect import switch
from stretto.launching.launch_plan import trace_folder
from stretto.launching.launch_report import Failure
from stretto.launching.ledger_file import WireCount
from stretto.launching.output import STDOUT, Lines, Screen, prefix_of, wants_colour

_OVERDUE_S = 0.5
_FLUSH_S = 2.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PLAIN = {"no_args_is_help": True, "add_completion": False, "pretty_exceptions_enable": False}
_hosts = typer.Typer(**_PLAIN)  # type: ignore[arg-type]
_links = typer.Typer(help="Change a link of a running lab.", **_PLAIN)  # type: ignore[arg-type]

HostArgument = Annotated[int, typer.Argument(metavar="HOST", help="Which host, counted from 0.")]
NameOption = Annotated[str | None, typer.Option("--name", help="Which lab, when several are running.")]


def app(args: list[str], prog_name: str, obj: Mapping[str, str]) -> None:
    """The command line behind `stretto lab`, in the environment `obj`. Ends the process as any command does, by `SystemExit`."""
    speaks_to_running = bool(args) and args[0] in ("cut", "restore", "rate")
    (_links if speaks_to_running else _hosts)(args=args, prog_name=prog_name, obj=obj)


@_hosts.command(context_settings={"allow_interspersed_args": False})
def lab(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND [ARGS]...", help="Runs on every host.")],
    hosts: Annotated[int, typer.Option(help="How many virtual hosts run it.")] = 2,
    servers: Annotated[int, typer.Option(help="So many hosts more, each with a parameter server.")] = 0,
    workers: Annotated[int, typer.Option("--workers", "-n", help="How often it runs on each host, as one rank each.")] = 1,
    rate: Annotated[str | None, typer.Option(help="Speed of links, both ways: 1gbit, 100mbit. Default: full.")] = None,
    slow: Annotated[list[str] | None, typer.Option(help="1=4x: host 1 runs 4 times slower. May be repeated.")] = None,
    encrypt: Annotated[
        bool | None, typer.Option("--encrypt/--no-encrypt", help="Encrypt stretto's wire, as between real hosts. Default: no.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="For stretto lab cut --name, when several labs run.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write what each worker did when to DIR; then: stretto trace DIR.")
    ] = None,
) -> None:
    """Run a command on virtual hosts joined by a network of a given speed.

    While it runs, from another terminal: stretto lab cut HOST, stretto lab restore HOST, stretto lab rate HOST RATE.
    """
    factors = dict(parse_slow(text) for text in slow or [])
    environ: Mapping[str, str] = context.obj
    if trace is not None:
        environ = {**environ, "STRETTO_TRACE": str(trace_folder(trace))}
    asked = switch(environ, "STRETTO_ENCRYPT", default=False) if encrypt is None else encrypt
    with _signals_raise(), Lab(hosts, rate, servers=servers, slow=factors, encrypt=asked, name=name, environ=environ) as made:
        _say(_greeting(made, rate, factors))
        output = _HostOutput(made, workers, colour=wants_colour(sys.stdout, environ))
        code = _run(made, command, workers, output)
    raise typer.Exit(code)


@_links.command()
def cut(host: HostArgument, name: NameOption = None) -> None:
    """Let every packet from and to HOST vanish, without a word to anybody."""
    control.ask(name, messages.CutHost(host))


@_links.command()
def restore(host: HostArgument, name: NameOption = None) -> None:
    """Mend the cut link of HOST."""
    control.ask(name, messages.Restore(host))


@_links.command("rate")
def set_rate(
    host: HostArgument,
    rate: Annotated[str, typer.Argument(metavar="RATE", help="1gbit, 100mbit, 500kbit; or full.")],
    name: NameOption = None,
) -> None:
    """Change the speed of HOST's link, both ways, while it is in use."""
    control.ask(name, messages.SetRate(host, None if rate == "full" else parse_rate(rate)))


def _run(made: Lab, command: list[str], workers: int, output: _HostOutput) -> int:
    """Run to the end; the exit code of the worker that failed first."""
    before = made.counters()
    try:
        with _signals_noted() as asked:  # what is half started could not be asked to end
            job = made.start(command, workers=workers, sink=output)
        if asked:
            raise _AskedToEnd(asked[0])
        while not job.over_within(_OVERDUE_S):
            output.show_overdue()
            if output.unread:
                raise _AskedToEnd(signal.SIGTERM)
        results = job.wait()
        code = 0 if job.first_failure is None else results[job.first_failure].returncode
        output.close(patience_s=float("inf"))
    except _AskedToEnd as ended:
        job.stop(ended.signum)
        code = -ended.signum
        output.close(patience_s=_FLUSH_S)
    _report(job, [after.since(first) for after, first in zip(made.counters(), before, strict=True)], code)
    return code if code >= 0 else 128 - code


class _AskedToEnd(Exception):
    """The user or the system asked us to end."""

    def __init__(self, signum: int) -> None:
        self.signum = signum


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP become `_AskedToEnd`; a second one while we end closes the lab at once."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise _AskedToEnd(signum)

    try:
        with _handled_by(end):
            yield
    except _AskedToEnd as ended:
        raise typer.Exit(128 + ended.signum) from None


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """They interrupt nothing meanwhile; which ones have come."""
    asked: list[int] = []
    with _handled_by(lambda signum, frame: asked.append(signum)):
        yield asked


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = [signal.signal(signum, handler) for signum in _ENDING]
    try:
        yield
    finally:
        for signum, former in zip(_ENDING, before, strict=True):
            signal.signal(signum, former)


class _HostOutput:
    """What hosts write, as whole lines with the host in front; fed by the lab's thread, timed by the main one."""

    def __init__(self, made: Lab, workers: int, *, colour: bool) -> None:
        names = [_name(rank, workers) for rank in range(made.worker_hosts * workers)]
        names += [f"host {host}, server" for host in range(made.worker_hosts, made.hosts)]
        width = max(map(len, names))
        self._lines = [Lines(prefix_of(name, width, rank if colour else None)) for rank, name in enumerate(names)]
        self._lock = threading.Lock()
        self._screen = Screen()
        self._screen.start()

    def write(self, number: int, data: bytes) -> None:
        with self._lock:
            self._screen.write(STDOUT, self._lines[number].feed(data, time.monotonic()))

    @property
    def congested(self) -> bool:
        return self._screen.congested

    def show_overdue(self) -> None:
        with self._lock:
            for lines in self._lines:
                self._screen.write(STDOUT, lines.overdue(time.monotonic()))

    @property
    def unread(self) -> bool:
        """Whoever read our output has gone (`| head`)."""
        return self._screen.broken

    def close(self, patience_s: float) -> None:
        """Write what is left; a reader that pauses is waited for so long."""
        with self._lock:
            for lines in self._lines:
                self._screen.write(STDOUT, lines.close())
        give_up_at = time.monotonic() + patience_s
        self._screen.close(give_up=lambda: time.monotonic() > give_up_at)


def _name(rank: int, workers: int) -> str:
    return f"host {rank}" if workers == 1 else f"host {rank // workers}, rank {rank}"


def _say(text: str) -> None:
    with suppress(OSError):  # a full disk under our standard error is no reason to end the job
        print(text, file=sys.stderr, flush=True)


def _greeting(made: Lab, rate: str | None, factors: dict[int, float]) -> str:
    slow = "".join(f", host {host} {factor:g} times slower" for host, factor in factors.items())
    wire = "encrypted" if made.encrypt else "not encrypted (--encrypt)"
    number = made.hosts - made.worker_hosts
    servers = f" and {number} with a server each" if number else ""
    return (
        f"stretto lab {made.name}: {made.worker_hosts} hosts{servers}, links {describe_rate(parse_rate(rate))}{slow}, "
        f"stretto's wire {wire}. Cut a link from another terminal: stretto lab cut 0"
    )


def _report(job: LabJob, traffic: list[Traffic], code: int) -> None:
    """What went through each interface, beside what the workers' wires counted; then who failed."""
    from rich.console import Console
    from rich.table import Table

    ledgers = _by_host(job, len(traffic) - len(job.servers))
    workers = len(job.processes) // (len(traffic) - len(job.servers))
    table = Table("host", "sent", "received", title="bytes through the interfaces")
    if any(ledger is not None for ledger in ledgers):
        table.add_column("sent by stretto's count")
        table.add_column("interface over count")
    for column in table.columns[1:]:
        column.justify = "right"
    for host, (each, ledger) in enumerate(zip(traffic, ledgers, strict=True)):
        table.add_row(str(host), f"{each.sent:,}", f"{each.received:,}", *_counted(each, ledger))
    with suppress(OSError):
        Console(stderr=True).print(table)
    if code == 0:  # of a job that was broken off, what was queued may not have been sent
        for said in _warnings(traffic, ledgers):
            _say(f"stretto lab: warning: {said}")
    if job.first_failure is not None:
        how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        _say(f"stretto lab: {_name(job.first_failure, workers)} failed first ({how}){_accusation(job)}; the others were ended.")


def _by_host(job: LabJob, hosts: int) -> list[WireCount | None]:
    """What the wires of each host's workers counted together, then those of servers; None where one of them left no count."""
    ledgers = job.ledgers()
    workers = len(ledgers) // hosts
    return [_total(ledgers[host * workers : (host + 1) * workers]) for host in range(hosts)] + job.server_ledgers()


def _total(ledgers: list[WireCount | None]) -> WireCount | None:
    counts = [ledger.bytes_sent for ledger in ledgers if ledger is not None]
    return WireCount(sum(counts)) if len(counts) == len(ledgers) else None


def _accusation(job: LabJob) -> str:
    """The rank that the last words of the first failed one blame; it may not have failed itself (it was stopped, say)."""
    first = job.processes[job.first_failure or 0]
    accused = Failure(first.number, 0, first.returncode or 0, 0.0, first.output.encode()).accused
    return "" if accused is None else f", having lost rank {accused}"


def _warnings(traffic: list[Traffic], ledgers: list[WireCount | None]) -> Iterator[str]:
    for host, (each, ledger) in enumerate(zip(traffic, ledgers, strict=True)):
        said = None if ledger is None else warning(host, each, ledger)
        if said is not None:
            yield said


def _counted(traffic: Traffic, ledger: WireCount | None) -> list[str]:
    return [] if ledger is None else [f"{ledger.bytes_sent:,}", f"{excess(traffic, ledger):+.1%}"]
