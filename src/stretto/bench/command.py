"""`stretto bench`: measure collectives and codecs where you are.

    stretto bench allreduce -n 4                           four workers on this machine
    stretto bench allreduce --hosts 4 --rate 1gbit         four lab hosts
    stretto run -n 2 --nodes 2 ... -m stretto bench allreduce     inside a job, on real machines
    stretto bench compress                                 every codec, in this process

The third form is recognised by the job's variables: the command is then one of the workers.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stretto.bench.settings import DeviceChoice, PeerChoice, Settings, WireChoice, check, parse_algorithms, parse_sizes
from stretto.bench.start import run_workers
from stretto.errors import ConfigurationError
from stretto.launching.detect import detect

if TYPE_CHECKING:
    from stretto.bench.results import AllReduceReport

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def bench() -> None:
    """Measure collectives on this machine, in the lab, or inside a running job; and codecs on this machine."""


@app.command()
def allreduce(
    context: typer.Context,
    sizes: Annotated[str, typer.Option(metavar="SIZES", help="Bytes per tensor; K, M, G are powers of 1024.")] = "4K,1M,32M",
    algorithms: Annotated[str, typer.Option(metavar="NAMES", help="Of the catalogue, with commas; or: all.")] = "auto,ring",
    workers: Annotated[int | None, typer.Option("-n", "--workers", help="Workers on this machine; 4 unless given.")] = None,
    hosts: Annotated[int | None, typer.Option(help="Use so many lab hosts instead.")] = None,
    rate: Annotated[str | None, typer.Option(help="Speed of the lab's links: 1gbit, 100mbit.")] = None,
    wire: Annotated[WireChoice, typer.Option(help="Which of stretto's wires.")] = "both",
    device: Annotated[DeviceChoice, typer.Option(help="Where the tensors are; several workers may share a GPU.")] = "cpu",
    peer: Annotated[PeerChoice, typer.Option(help="Whose all-reduce takes turns with ours.")] = "gloo",
    busy: Annotated[bool, typer.Option("--busy", help="Also with the main thread in pure Python and in torch.")] = False,
    repeat: Annotated[int, typer.Option(help="Rounds that count; two more go before them.")] = 11,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every time, versions and machine.")] = None,
) -> None:
    """Time all-reduce algorithms beside torch's own and a bare TCP stream, taking turns in one run."""
    _check_writable(json)
    launched = detect(context.obj)
    inside = launched.launcher != "single"
    settings = check(
        Settings(
            sizes=parse_sizes(sizes),
            algorithms=parse_algorithms(algorithms),
            wire=wire,
            device=device,
            peer=peer,
            busy=busy,
            repeat=repeat,
            workers=launched.world_size if inside else _count(workers, hosts),
            lab=hosts is not None,
            rate=rate,
            command=shlex.join(["stretto", *sys.argv[1:]]),
        )
    )
    if inside:
        _refuse_own_workers(workers, hosts)
        _take_part(settings, json)
    else:
        _show(measured(settings, context.obj), json)


@app.command()
def compress(
    context: typer.Context,
    sizes: Annotated[str, typer.Option(metavar="SIZES", help="Bytes of gradients; K, M, G are powers of 1024.")] = "1M,64M",
    codecs: Annotated[str, typer.Option(metavar="CODECS", help='With commas: "Int8(), ErrorFeedback(Sign())"; or: all.')] = "all",
    device: Annotated[DeviceChoice, typer.Option(help="Where the values are.")] = "cpu",
    workers: Annotated[int, typer.Option("-n", "--workers", help="How many take part in an exchange.")] = 4,
    rates: Annotated[str, typer.Option(metavar="MBIT", help="Link speeds to judge for, in Mbit/s.")] = "100,1000,10000",
    rounds: Annotated[int, typer.Option(help="Rounds that count; two more go before them.")] = 11,
    limit: Annotated[float, typer.Option(metavar="SECONDS", help="For a codec and size; then there are fewer rounds.")] = 60.0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every time, versions and machine.")] = None,
) -> None:
    """Time codecs beside a copy, and say what they lose and below which link speed each pays for itself."""
    from stretto.bench.compress_measure import measure
    from stretto.bench.compress_settings import CompressSettings, parse_codecs, parse_rates
    from stretto.bench.compress_settings import check as check_compress
    from stretto.bench.compress_show import show

    _check_writable(json)
    if detect(context.obj).launcher != "single":
        raise ConfigurationError(
            "`stretto bench compress` inside a job: it measures one process by itself, and every worker would do so at once. "
            "Run it on its own: stretto bench compress."
        )
    settings = CompressSettings(
        sizes=list(dict.fromkeys(parse_sizes(sizes))),
        codecs=parse_codecs(codecs),
        device=device,
        workers=workers,
        rates=parse_rates(rates),
        rounds=rounds,
        limit_s=limit,
        command=shlex.join(["stretto", *sys.argv[1:]]),
    )
    report = measure(check_compress(settings))
    show(report)
    _write(report, json)


def _check_writable(json: Path | None) -> None:
    """Now, not after minutes of measuring."""
    if json is not None and not json.parent.is_dir():
        raise ConfigurationError(f"--json {json}: there is no folder {json.parent}. Make it first, or name another file.")


def _count(workers: int | None, hosts: int | None) -> int:
    if workers is not None and hosts is not None:
        raise ConfigurationError(
            f"-n {workers} with --hosts {hosts}: a lab host has one worker, so the number is given twice. Leave one of them out."
        )
    return next((number for number in (hosts, workers) if number is not None), 4)


def _refuse_own_workers(workers: int | None, hosts: int | None) -> None:
    if workers is not None or hosts is not None:
        raise ConfigurationError(
            "-n or --hosts inside a job: this process is already one of its workers, and measures between those. "
            "Leave the option out here, or run `stretto bench` by itself."
        )


def _take_part(settings: Settings, json: Path | None) -> None:
    from stretto.bench.worker import take_part

    rank, report = take_part(settings)
    if rank == 0:
        _show(report, json)


def measured(settings: Settings, environ: Mapping[str, str]) -> AllReduceReport:
    """Run the benchmark in workers of its own."""
    answer = run_workers(
        "stretto.bench.worker", settings, environ, workers=settings.workers, lab=settings.lab, rate=settings.rate
    )
    from stretto.bench.results import AllReduceReport  # brings in torch: not before the workers had the machine to themselves

    return msgspec.json.decode(answer, type=AllReduceReport)


def _show(report: AllReduceReport, json: Path | None) -> None:
    from stretto.bench.show import show

    show(report)
    _write(report, json)


def _write(report: object, json: Path | None) -> None:
    from stretto.bench.results import as_json

    if json is not None:
        json.write_bytes(as_json(report))
