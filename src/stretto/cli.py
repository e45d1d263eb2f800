"""The `stretto` command. Each sub-command is a thin shell around one function, which is imported when it is called.

Nothing here imports torch: `stretto run` must be at work before a worker would have finished importing it.
"""

from __future__ import annotations

import importlib
import os
import stat
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from stretto import __version__
from stretto.errors import StrettoError

app = typer.Typer(
    name="stretto",
    help="Data-parallel training for PyTorch: run a script in several workers, see where its time goes, try it on slow networks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# The first word that is no option of ours ends them: everything behind it belongs to the user's program.
PASS_THROUGH = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"stretto {__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


class Verbatim(TyperCommand):
    """A command that leaves its whole command line, `--` and `--help` included, to somebody else."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return list(args)


@app.command(context_settings=PASS_THROUGH)
def run(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script; with -m, a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments, passed on untouched.")] = None,
    workers: Annotated[
        str, typer.Option("-n", "--workers", metavar="N", help="Workers on each machine; or on one after the other: 2,2,0.")
    ] = "1",
    servers: Annotated[
        str, typer.Option("--servers", metavar="N", help="Parameter servers on each machine; or on one after the other: 0,0,2.")
    ] = "0",
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for python -m.")] = False,
    nodes: Annotated[int, typer.Option(help="How many machines, each running this command.")] = 1,
    node: Annotated[int | None, typer.Option(help="Which of them this is: 0, 1, ...")] = None,
    rendezvous: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Node 0's address; same for all.")] = None,
    secret_file: Annotated[Path | None, typer.Option(help="From `stretto secret`; same for all machines.")] = None,
    encrypt: Annotated[
        bool | None,
        typer.Option("--encrypt/--no-encrypt", help="Default: STRETTO_ENCRYPT=on|off, else between machines only."),
    ] = None,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="How long workers wait for a peer.")] = None,
    meet_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long all workers may take to meet. Default: --timeout, else 600.")
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(metavar="N", help="When a worker fails, start all again (with --min-workers: it alone), so many times."),
    ] = 0,
    min_workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="When a worker fails, go on while N of this machine are left (servers that step)."),
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The strategy of a script that gives distribute() none, such as 'ddp()'.")
    ] = None,
    prefix: Annotated[bool, typer.Option("--prefix/--no-prefix", help="Put the rank before every line of output.")] = True,
    progress: Annotated[
        bool, typer.Option("--progress", help="Every 5 s a line on how training goes: steps/s, staleness, waiting, bytes/s.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write what each worker did when to DIR; then: stretto trace DIR.")
    ] = None,
) -> None:
    """Run a script in N workers, on one machine or several.

    The job ends when all have ended. If one fails, all are ended within 5 s, its traceback is printed last and its
    exit code is ours. With --max-restarts all begin anew, and a script that loads its last checkpoint goes on from there;
    with --min-workers those that are left go on, as far as their strategy can, and the exit code at the end is 3.
    """
    from stretto.launching import launch, launch_plan, node_servers

    plan = launch_plan.make_plan(
        target,
        arguments or [],
        module=module,
        workers=workers,
        servers=servers,
        nodes=nodes,
        node=node,
        rendezvous=rendezvous,
        secret_file=secret_file,
        timeout_s=timeout,
        prefix=prefix,
        trace=trace,
        progress=progress,
        encrypt=encrypt,
        meet_s=meet_timeout,
        max_restarts=max_restarts,
        min_workers=min_workers,
        strategy=strategy,
    )
    node_servers.check_environment(plan, os.environ, secret_file)
    raise typer.Exit(launch.run(plan, os.environ))


@app.command()
def serve(
    rendezvous: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where workers and servers meet, on rank 0's host; as in STRETTO_SERVERS.")
    ],
    workers: Annotated[int, typer.Option(help="How many workers the job has, in all.")],
    servers: Annotated[int, typer.Option(help="How many servers the job has, in all.")] = 1,
    number: Annotated[int, typer.Option(help="Which of them this is: 0, 1, ...")] = 0,
    secret_file: Annotated[Path | None, typer.Option(help="From `stretto secret`; the job's.")] = None,
    encrypt: Annotated[
        bool | None, typer.Option("--encrypt/--no-encrypt", help="As the job. Default: STRETTO_ENCRYPT=on|off, else on.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="How long to wait for a peer, as the job.")] = None,
    meet_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long all may take to meet. Default: --timeout, else 600.")
    ] = None,
    add: Annotated[
        bool, typer.Option("--add", help="To a job that runs: beyond the --servers that it began with, with the next --number.")
    ] = False,
    restarts: Annotated[int, typer.Option(metavar="N", help="When it dies, start it again, so many times.")] = 0,
    life: Annotated[int, typer.Option(hidden=True, help="How often it has died before.")] = 0,
    forever: Annotated[bool, typer.Option("--forever", help="When a job has ended, wait for the next one.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write what this server did when to DIR, on this host, if the job is traced."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing while all goes well.")] = False,
) -> None:
    """Be a parameter server for a job whose workers are started elsewhere, with STRETTO_SERVERS=SERVERS@HOST:PORT. With --add: of
    one that has begun, and takes a part over while it trains.

    It ends when the last worker has left. Ctrl-C ends it at once; SIGTERM only while it waits, for it follows the workers.
    """
    from stretto.launching import launch_plan, server_meeting

    launch_plan.check_seconds("--timeout", timeout)
    launch_plan.check_seconds("--meet-timeout", meet_timeout)
    server = server_meeting.joining_server(
        os.environ, number=number, num_servers=servers, num_workers=workers, rendezvous=rendezvous, secret_file=secret_file,
        encrypt=encrypt, life=life, added=add, trace=None if trace is None else str(launch_plan.trace_folder(trace, empty=False)),
    )  # fmt: skip
    server_meeting.check_restarts(restarts, forever, add)
    if restarts:
        from stretto.aggregate.parameter_server import keeper

        options = {"--timeout": timeout, "--meet-timeout": meet_timeout}
        server_meeting.keep(keeper.__file__, restarts, server, options, quiet, os.environ)
    from stretto.aggregate.parameter_server import dedicated  # brings in torch: not for a command line that is refused

    timeouts = server_meeting.server_timeouts(os.environ, timeout, meet_timeout)
    raise typer.Exit(dedicated.run(server, timeouts, forever=forever, quiet=quiet))


@app.command()
def trace(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Given to `stretto run --trace DIR` before.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="DIR/trace.json unless given.")] = None,
) -> None:
    """Put all workers' traces into one file, which https://ui.perfetto.dev opens, and say what is in it."""
    from stretto.observe.command import show_trace

    show_trace(folder, output)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Given to `stretto run --trace DIR` before.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="DIR/report.html unless given.")] = None,
) -> None:
    """Say what holds a traced job back, and write a page with its timeline and figures, for any browser."""
    from stretto.report.command import write_report

    write_report(folder, output)


@app.command()
def doctor(json: Annotated[bool, typer.Option("--json", help="For machines.")] = False) -> None:
    """Print what to paste into a bug report: versions, devices, network, limits. Secrets are left out."""
    from stretto.launching import doctor

    findings = doctor.examine(os.environ)
    sys.stdout.write(doctor.as_json(findings) if json else doctor.as_text(findings))


@app.command()
def secret() -> None:
    """Print a new job secret. Use: stretto secret > job.secret, then copy the file to every machine of the job."""
    from stretto.launching import secret

    if stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode):
        os.fchmod(sys.stdout.fileno(), 0o600)  # the shell made the file readable to all before we were started
    sys.stdout.write(secret.generate().hex() + "\n")


@app.command()
def version() -> None:
    """Print the version."""
    sys.stdout.write(f"stretto {__version__}\n")


@app.command(cls=Verbatim)
def lab(context: typer.Context) -> None:
    """Run a command on virtual hosts joined by a network of a given speed: stretto lab --hosts 4 -- python train.py"""
    delegate("lab", context.args)


@app.command(cls=Verbatim)
def bench(context: typer.Context) -> None:
    """Measure collectives and compression on this machine or in the lab."""
    delegate("bench", context.args)


def delegate(name: str, arguments: list[str]) -> None:
    """Hand over to the `app` of `stretto.NAME.command`, a command line of its own, imported only now, with our environment."""
    command: Any = importlib.import_module(f"stretto.{name}.command")
    command.app(args=arguments, prog_name=f"stretto {name}", obj=os.environ)


def main() -> None:
    """What `stretto.__main__` calls: our own errors become a message and exit code 2, never a traceback."""
    try:
        app()
    except StrettoError as problem:
        sys.stderr.write(f"stretto: {problem}\n")
        raise SystemExit(2) from None
