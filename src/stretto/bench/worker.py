"""One worker of a benchmark: `python -m stretto.bench.worker SETTINGS FILE`, started once per rank by `start.py`.

SETTINGS is the JSON of `Settings`; rank 0 writes the JSON of the `AllReduceReport` to FILE. Where `stretto bench` runs inside a
job, it calls `take_part` itself.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

import stretto
from stretto.bench.contenders import Contender, Gloo, Ours
from stretto.bench.machine import describe
from stretto.bench.measure import measure_size
from stretto.bench.results import AllReduceReport, AllReduceRow
from stretto.bench.second_wire import job_over
from stretto.bench.settings import Settings, show_size
from stretto.bench.stream import BareStream
from stretto.bench.turns import check_device, now
from stretto.errors import ConfigurationError
from stretto.job import Job


def take_part(settings: Settings) -> tuple[int, AllReduceReport]:
    """Join the job, measure, leave. Every rank gets the same report; the first value is the rank."""
    check_device(settings.device)
    job = stretto.init()
    report = _measure(job, settings)
    stretto.shutdown()  # not after an exception: the others must see that this rank is lost
    return job.rank, report


def _measure(job: Job, settings: Settings) -> AllReduceReport:
    rows: list[AllReduceRow] = []
    with _jobs(job, settings.wires) as jobs, _contenders(job, jobs, settings) as contenders:
        links = {wire: each.choices for wire, each in jobs.items() if each.choose(1) and each.choices is not None}
        for number, size in enumerate(settings.sizes, 1):
            rows += measure_size(job, settings, size, contenders)
            if job.rank == 0:
                print(f"measured {show_size(size)} ({number} of {len(settings.sizes)})", file=sys.stderr, flush=True)
    return AllReduceReport(
        settings=settings,
        machine=describe(),
        date=now(),
        links={wire: choices.link for wire, choices in links.items()},
        rows=rows,
    )


@contextlib.contextmanager
def _jobs(job: Job, wires: list[str]) -> Iterator[dict[str, Job]]:
    """The job of each wire; those that were made for the benchmark are left again, unless an exception is in flight."""
    jobs = {wire: job_over(job, wire) for wire in wires}
    made = [each for each in jobs.values() if each is not job]
    try:
        yield jobs
    except BaseException:
        for each in made:
            each.close(goodbye=False)
        raise
    for each in made:
        each.close(goodbye=True)


@contextlib.contextmanager
def _contenders(job: Job, jobs: dict[str, Job], settings: Settings) -> Iterator[list[Contender]]:
    stream = BareStream(job)
    ours = [Ours(each, algorithm, wire) for wire, each in jobs.items() for algorithm in settings.algorithms]
    peers = [Gloo(job.rank, job.world_size, job.timeouts.arrive_s)] if settings.peer == "gloo" else []
    try:
        yield [*ours, *peers, stream]
    finally:
        stream.close()
        for peer in peers:
            peer.close()


def main(arguments: list[str]) -> None:
    settings = msgspec.json.decode(arguments[0], type=Settings)
    try:
        rank, report = take_part(settings)
    except ConfigurationError as problem:
        raise SystemExit(f"stretto: {problem}") from None
    if rank == 0:
        Path(arguments[1]).write_bytes(msgspec.json.encode(report))


if __name__ == "__main__":
    main(sys.argv[1:])
