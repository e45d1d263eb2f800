"""What this worker did, and when: spans that Perfetto can draw.

    compute    forward, backward         the training thread (observe/compute.py sets the hooks, only while tracing)
    module     inside these, each module that has parameters
    update     optimizer.step
    wait       in a collective's wait    the thread that waits
    reduce     adding what arrived       the communication thread
    send       handed to the wire .. its memory is free again       in flight: one track per peer
    receive    asked for .. arrived and added or copied
    transfer   a bucket of gradients: handed over .. everything of it has arrived

Servers have a file of their own, in which `reduce` is what is done with a push, `update` the optimizer in it, and `send` a copy
on its way to the next server. Beside spans it has samples: how long its queues were, as counters (`ph: C`).

Off by default, and free when off: there is no tracer object then, and the hot paths ask `tracer is None` once per message.

Memory is bounded: the last `limit` spans are kept, and the file says how many older ones were dropped. Times are those of
`time.perf_counter_ns`; `clock_offset` (clocks.py) brings the clocks of several machines together when the file is written, so the
files of all ranks can be laid side by side as they are.

File: the Trace Event Format of Chrome, which https://ui.perfetto.dev opens: complete events (`ph: X`) with `ts` and `dur` in
microseconds, `pid` = rank. Invariant: on each `tid`, two spans are either disjoint or one contains the other. Spans in flight
overlap freely, so each gets the first lane of its track that is free; that is decided when the file is written.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from stretto.errors import ConfigurationError

DEFAULT_LIMIT: Final = 1 << 17
MOST_SAMPLES: Final = 1 << 15
IN_FLIGHT: Final = ("send", "receive", "transfer")

T = TypeVar("T")


class Span(NamedTuple):
    """One thing that took time. `peer` is -1 and `collective` empty where there is none."""

    category: str
    name: str
    thread: int  # that did it; for what is in flight, that asked for it
    begin_ns: int
    end_ns: int
    num_bytes: int = 0
    peer: int = -1
    collective: str = ""


class Sample(NamedTuple):
    """What something was at a moment: the lengths of queues, how far apart the workers' models are."""

    name: str
    at_ns: int
    values: Mapping[str, float]


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says about itself, under `otherData`. Offset and its uncertainty: of this clock against rank 0's."""

    rank: int
    world_size: int
    run: str
    host: str
    num_spans: int
    num_dropped: int
    clock_offset_ns: int
    clock_uncertainty_ns: int
    server: int = -1  # its number, of a server; its rank then comes after those of all workers
    staleness: dict[int, int] = {}  # of a worker's steps
    held_s: dict[int, float] = {}  # for how long servers held this worker back, by the rank that was behind


class TraceEvent(msgspec.Struct, omit_defaults=True):
    ph: str
    name: str
    pid: int
    tid: int
    ts: float
    dur: float | None = None
    cat: str = ""
    args: dict[str, Any] = {}


class TraceFile(msgspec.Struct):
    traceEvents: list[TraceEvent]
    otherData: About
    displayTimeUnit: str = "ms"


class Tracer:
    """Collects spans from any thread."""

    def __init__(self, limit: int = DEFAULT_LIMIT, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self.now = now
        self.num_recorded = 0
        self.threads: dict[int, str] = {}
        self._kept: deque[Span] = deque(maxlen=limit)
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)

    def span(
        self,
        category: str,
        name: str,
        begin_ns: int,
        *,
        end_ns: int | None = None,
        num_bytes: int = 0,
        peer: int = -1,
        collective: str = "",
        thread: int | None = None,
    ) -> None:
        """Note what began at `begin_ns` and has ended at `end_ns`, or ends now."""
        if thread is None:
            thread = threading.get_ident()
        if thread not in self.threads:
            self.threads[thread] = threading.current_thread().name
        self.num_recorded += 1
        end = self.now() if end_ns is None else end_ns
        self._kept.append(Span(category, name, thread, begin_ns, end, num_bytes, peer, collective))

    def sample(self, name: str, at_ns: int, values: Mapping[str, float]) -> None:
        """Note numbers that change with time. The last ones are kept; not those that a file cannot hold."""
        if all(map(math.isfinite, values.values())):
            self._samples.append(Sample(name, at_ns, values))

    def watch(self, category: str, peer: int, num_bytes: int, collective: str, then: Callable[[T], None]) -> Callable[[T], None]:
        """`then`, noting that something was in flight from now until it is called."""
        begin_ns, thread = self.now(), threading.get_ident()
        name = f"{category} {'to' if category == 'send' else 'from'} {peer}"

        def ended(value: T) -> None:
            self.span(category, name, begin_ns, num_bytes=num_bytes, peer=peer, collective=collective, thread=thread)
            then(value)

        return ended

    def timed(self, category: str, peer: int, num_bytes: int, collective: str, work: Callable[[T], None]) -> Callable[[T], None]:
        """`work`, noting how long each call takes."""

        def timing(value: T) -> None:
            begin_ns = self.now()
            work(value)
            self.span(category, category, begin_ns, num_bytes=num_bytes, peer=peer, collective=collective)

        return timing

    @property
    def spans(self) -> list[Span]:
        return list(self._kept)

    @property
    def samples(self) -> list[Sample]:
        return list(self._samples)

    @property
    def num_dropped(self) -> int:
        return self.num_recorded - len(self._kept)


# -- the file ---------------------------------------------------------------------------------------------------------


def file_of(folder: str | Path, rank: int, server: int = -1) -> Path:
    return Path(folder) / (f"trace-server{server}.json" if server >= 0 else f"trace-rank{rank}.json")


def prepare(folder: str | Path) -> None:
    """Make the folder now: hours later, at the end of the job, would be too late to find out that it cannot be made."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigurationError(
            f"trace folder {folder}: it cannot be made ({problem.strerror}). Name a folder that you may write to."
        ) from problem


def write(folder: str | Path, tracer: Tracer, about: About) -> Path:
    """Write this rank's file, whole or not at all."""
    path = file_of(folder, about.rank, about.server)
    partial = path.with_suffix(".part")
    partial.write_bytes(msgspec.json.encode(TraceFile(events(tracer, about), about)))
    partial.replace(path)
    return path


def events(tracer: Tracer, about: About) -> list[TraceEvent]:
    """Everything as trace events: names first, then the spans by track."""
    tracks: dict[str, list[Span]] = {}
    for span in tracer.spans:
        tracks.setdefault(_track(span, tracer.threads), []).append(span)
    title = f"{f'server {about.server}' if about.server >= 0 else f'rank {about.rank}'} ({about.host})"
    made = [_note("process_name", about.rank, 0, name=title), _note("process_sort_index", about.rank, 0, sort_index=about.rank)]
    tid = 0
    for track, spans in sorted(tracks.items(), key=lambda item: (item[1][0].category in IN_FLIGHT, item[0])):
        for number, lane in enumerate(lanes(spans, nesting=spans[0].category not in IN_FLIGHT)):
            tid += 1
            made.append(_note("thread_name", about.rank, tid, name=track if number == 0 else f"{track} ({number + 1})"))
            made.append(_note("thread_sort_index", about.rank, tid, sort_index=tid))
            made.extend(_event(span, about, tid) for span in lane)
    for name, at_ns, values in tracer.samples:
        made.append(TraceEvent("C", name, about.rank, 0, (at_ns - about.clock_offset_ns) / 1000, args=dict(values)))
    return made


def lanes(spans: Sequence[Span], *, nesting: bool) -> list[list[Span]]:
    """Spread spans over as few lanes as need be, so that on each they are disjoint or (`nesting`) inside one another."""
    made: list[list[Span]] = []
    open_spans: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.begin_ns, -span.end_ns)):
        number = next((index for index, stack in enumerate(open_spans) if _fits(span, stack, nesting)), len(made))
        if number == len(made):
            made.append([])
            open_spans.append([])
        made[number].append(span)
        open_spans[number].append(span)
    return made


def _fits(span: Span, stack: list[Span], nesting: bool) -> bool:
    while stack and stack[-1].end_ns <= span.begin_ns:
        stack.pop()
    return not stack or (nesting and span.end_ns <= stack[-1].end_ns)


def _track(span: Span, threads: dict[int, str]) -> str:
    if span.category == "transfer":
        return "transfers"
    return span.name if span.category in IN_FLIGHT else f"{threads[span.thread]} [{span.thread & 0xFFFF:04x}]"


def _event(span: Span, about: About, tid: int) -> TraceEvent:
    begin_us, length_us = (span.begin_ns - about.clock_offset_ns) / 1000, (span.end_ns - span.begin_ns) / 1000
    return TraceEvent("X", span.name, about.rank, tid, begin_us, length_us, span.category, dict(_arguments(span)))


def _arguments(span: Span) -> Iterator[tuple[str, Any]]:
    if span.peer >= 0:
        yield "peer", span.peer
    if span.num_bytes:
        yield "bytes", span.num_bytes
    if span.collective:
        yield "collective", span.collective


def _note(what: str, pid: int, tid: int, **args: Any) -> TraceEvent:
    return TraceEvent("M", what, pid, tid, 0.0, args=args)
