"""A job's servers in figures: how busy each was, how long its queues were, and how the workers fared with them.

    busy        the share of the time, from its first push to its last, in which a server worked on pushes
    optimizer   the share in which the optimizer ran, which is part of that
    queue       gradients and pulls that wait on a server, as it noted them from time to time
    staleness   of each worker's steps: how many updates were made between what it read and what its gradient was applied to
    held        how long servers held back what a worker wanted to read, because another one was behind (`sync=` says when)

Everything but `busy`, `optimizer` and `queue` is in the files of the workers, so it is there also where servers left none.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec

from stretto.observe.trace import TraceFile
from stretto.report.intervals import covered, union
from stretto.report.steps import MICRO, interval_of, spans_of

POINTS = 200  # of a queue, in its picture


class ServerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One server. Shares are of `length_s`, from its first push to its last."""

    server: int
    host: str
    length_s: float
    busy: float
    optimizer: float
    num_pushes: int
    push_s: float  # the median of what one takes
    bytes_copied: int  # to other servers
    mean_queue: float
    longest_queue: int
    queue: tuple[tuple[float, int], ...]  # (share of the time, length), at most so many


class WorkerAtServers(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. `held_by`: the rank for which it was held back longest."""

    rank: int
    steps: int
    mean_staleness: float
    most_staleness: int
    held_s: float  # in a step, on average
    held_by: int | None
    bytes_pushed: int
    bytes_pulled: int


class ServersFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the page and the sentence know of servers. `staleness`: steps of all workers by staleness."""

    servers: tuple[ServerFigures, ...]
    workers: tuple[WorkerAtServers, ...]
    staleness: dict[int, int]


def servers_figures(files: Sequence[TraceFile], servers: Sequence[TraceFile]) -> ServersFigures | None:
    """None for a job without servers."""
    workers = tuple(_worker(file) for file in files)
    if not servers and not any(each.bytes_pushed or each.bytes_pulled for each in workers):
        return None
    staleness: Counter[int] = Counter()
    for file in files:
        staleness.update(file.otherData.staleness)
    return ServersFigures(
        servers=tuple(_server(file) for file in servers), workers=workers, staleness=dict(sorted(staleness.items()))
    )


def _worker(file: TraceFile) -> WorkerAtServers:
    about = file.otherData
    moved = Counter[str]()
    for span in spans_of(file):
        if span.cat in ("send", "receive") and span.args.get("peer", -1) >= about.world_size:
            moved[span.name.partition(" ")[0]] += span.args.get("bytes", 0)
    steps = sum(about.staleness.values())
    held = max(about.held_s.items(), key=lambda item: item[1], default=None)
    return WorkerAtServers(
        rank=about.rank,
        steps=steps,
        mean_staleness=sum(stale * count for stale, count in about.staleness.items()) / steps if steps else 0.0,
        most_staleness=max(about.staleness, default=0),
        held_s=sum(about.held_s.values()) / steps if steps else 0.0,
        held_by=None if held is None else held[0],
        bytes_pushed=moved["push"],
        bytes_pulled=moved["pull"],
    )


def _server(file: TraceFile) -> ServerFigures:
    about, spans = file.otherData, spans_of(file)
    pushes = [interval_of(span) for span in spans if span.cat == "reduce"]
    begin, end = min((first for first, _ in pushes), default=0.0), max((last for _, last in pushes), default=0.0)
    length = max(end - begin, 1e-3)
    updates = [interval_of(span) for span in spans if span.cat == "update"]
    queue = [(event.ts, sum(event.args.values())) for event in file.traceEvents if event.ph == "C" and event.name == "queue"]
    inside = [(moment, count) for moment, count in queue if begin <= moment <= end]
    return ServerFigures(
        server=about.server,
        host=about.host,
        length_s=length * MICRO,
        busy=min(1.0, covered(union(pushes), begin, end) / length),
        optimizer=min(1.0, covered(union(updates), begin, end) / length),
        num_pushes=len(pushes),
        push_s=statistics.median(last - first for first, last in pushes) * MICRO if pushes else 0.0,
        bytes_copied=sum(span.args.get("bytes", 0) for span in spans if span.cat == "send"),
        mean_queue=statistics.fmean(count for _, count in inside) if inside else 0.0,
        longest_queue=max((count for _, count in inside), default=0),
        queue=tuple(_thinned([((moment - begin) / length, count) for moment, count in sorted(inside)])),
    )


def _thinned(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most so many: of each stretch of time the longest queue, for that is what one looks for."""
    if len(points) <= POINTS:
        return list(points)
    best: dict[int, tuple[float, int]] = {}
    for moment, count in points:
        number = min(POINTS - 1, int(moment * POINTS))
        if number not in best or count > best[number][1]:
            best[number] = (moment, count)
    return [best[number] for number in sorted(best)]
