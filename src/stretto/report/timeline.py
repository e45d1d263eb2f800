"""The spans that the page draws, in rows, and no more of them than a browser likes: the last whole steps.

Each rank has, from above: its threads, with what is nested below what contains it, then what is in flight, which overlaps freely
and so gets the first lane that is free. All of it becomes one object of plain lists, a column for each property of a span, which
is about 40 bytes a span as JSON; names are said once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import msgspec

from stretto.observe.trace import TraceEvent, TraceFile
from stretto.report.shown import shown
from stretto.report.steps import IN_FLIGHT, interval_of, spans_of, step_begins

CATEGORIES = ("compute", "module", "update", "wait", "reduce", "transfer", "send", "receive", "other")
MAX_SPANS = 20_000
DEEPEST = 4  # rows for what is nested, and lanes for what is in flight; what needs more is drawn in the last
FIRST_VIEW = 3  # steps
ROUNDING_US = 0.01  # a span that begins as another ends may seem to begin just before


class TimelineRow(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    label: str  # empty below the first row of a kind


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """What timeline.js draws. Times are microseconds since `begin_us` of the trace; equal indices are the same span."""

    rows: list[TimelineRow]
    hosts: dict[str, str]
    servers: dict[str, int]  # their numbers, by rank
    names: list[str]
    categories: tuple[str, ...]
    row: list[int]
    begin: list[float]
    length: list[float]
    name: list[int]
    category: list[int]
    bytes: list[int]
    collective: list[int]
    steps: list[float]
    view: tuple[float, float]
    begin_us: float
    num_spans: int  # that the files have

    @property
    def num_drawn(self) -> int:
        return len(self.row)


def make_timeline(files: Sequence[TraceFile], limit: int = MAX_SPANS) -> Timeline:
    spans = {file.otherData.rank: spans_of(file) for file in files}
    begins = sorted({begin for each in spans.values() for begin in step_begins(each)[:1]})
    marks = step_begins(next(iter(spans.values())))
    since = window_begin([span.ts for each in spans.values() for span in each], marks, limit)
    if begins and since < begins[0] and _count(spans.values(), begins[0]):
        since = begins[0]  # the start-up would be most of the picture; `stretto trace` shows it
    drawing = _Drawing(since)
    for file in files:
        kept = [span for span in spans[file.otherData.rank] if span.ts >= since]
        drawing.add_rank(file.otherData.rank, kept)
    marks = [round(mark - since, 1) for mark in marks if mark >= since]
    end = max((begin + length for begin, length in zip(drawing.begin, drawing.length, strict=True)), default=1.0)
    first = marks[-1 - FIRST_VIEW] if len(marks) > FIRST_VIEW else 0.0
    return Timeline(
        rows=drawing.rows,
        hosts={str(file.otherData.rank): shown(file.otherData.host) for file in files},
        servers={str(file.otherData.rank): file.otherData.server for file in files if file.otherData.server >= 0},
        names=list(drawing.names),
        categories=CATEGORIES,
        row=drawing.row,
        begin=drawing.begin,
        length=drawing.length,
        name=drawing.name,
        category=drawing.category,
        bytes=drawing.bytes,
        collective=drawing.collective,
        steps=marks,
        view=(first, max(marks[-1] if len(marks) > FIRST_VIEW else end, first + 1.0)),
        begin_us=since,
        num_spans=sum(map(len, spans.values())),
    )


def window_begin(moments: Sequence[float], steps: Sequence[float], limit: int) -> float:
    """From when on spans are drawn, so that at most `limit` are: from the beginning of a step, if one of them leaves any."""
    ordered = sorted(moments)
    if len(ordered) <= limit:
        return ordered[0] if ordered else 0.0
    earliest = ordered[-limit]
    if ordered[-limit - 1] == earliest:  # spans of one moment are all in or all out
        earliest = next((moment for moment in ordered[-limit:] if moment > earliest), float("inf"))
    return next((step for step in steps if step >= earliest), earliest)


def _count(spans: Iterable[Sequence[TraceEvent]], since: float) -> int:
    return sum(span.ts >= since for each in spans for span in each)


class _Drawing:
    """The columns, while they are filled."""

    def __init__(self, since: float) -> None:
        self._since = since
        self.rows: list[TimelineRow] = []
        self.names: dict[str, int] = {"": 0}
        self._numbers: dict[str, int] = {}  # by the name as it is in the trace
        self.row: list[int] = []
        self.begin: list[float] = []
        self.length: list[float] = []
        self.name: list[int] = []
        self.category: list[int] = []
        self.bytes: list[int] = []
        self.collective: list[int] = []

    def add_rank(self, rank: int, spans: Sequence[TraceEvent]) -> None:
        threads: dict[int, list[TraceEvent]] = {}
        for span in spans:
            if span.cat not in IN_FLIGHT:
                threads.setdefault(span.tid, []).append(span)
        tracks = [(_kind_of(each), each, True) for each in threads.values()]
        tracks.sort(key=lambda track: CATEGORIES.index(track[0]))
        for category in IN_FLIGHT:
            flying = [span for span in spans if span.cat == category]
            if flying:
                tracks.append((category, flying, False))
        if not tracks:
            self.rows.append(TimelineRow(rank, "nothing"))
        for label, each, nesting in tracks:
            self._add_track(rank, label, each, nesting)

    def _add_track(self, rank: int, label: str, spans: Sequence[TraceEvent], nesting: bool) -> None:
        first = len(self.rows)
        used = 0
        ordered = sorted(spans, key=lambda span: (span.ts, -(span.dur or 0.0)))
        for span, level in zip(ordered, depths(ordered) if nesting else lanes(ordered), strict=True):
            used = max(used, level + 1)
            self._add_span(first + level, span)
        self.rows.extend(TimelineRow(rank, label if level == 0 else "") for level in range(used))

    def _add_span(self, row: int, span: TraceEvent) -> None:
        self.row.append(row)
        self.begin.append(round(span.ts - self._since, 1))
        self.length.append(round(span.dur or 0.0, 1))
        self.name.append(self._number(span.name))
        self.category.append(CATEGORIES.index(span.cat if span.cat in CATEGORIES else "other"))
        self.bytes.append(span.args.get("bytes", 0))
        self.collective.append(self._number(span.args.get("collective", "")))

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = self.names.setdefault(shown(name), len(self.names))
        return self._numbers[name]


def _kind_of(spans: Sequence[TraceEvent]) -> str:
    """A thread is called by the first category that it has any span of."""
    there = {span.cat for span in spans}
    return next((category for category in CATEGORIES if category in there), "other")


def depths(spans: Sequence[TraceEvent]) -> list[int]:
    """For spans by their beginning: how many of those before are still open."""
    made: list[int] = []
    open_ends: list[float] = []
    for begin, end in map(interval_of, spans):
        while open_ends and open_ends[0] <= begin + ROUNDING_US:
            heapq.heappop(open_ends)
        made.append(min(len(open_ends), DEEPEST - 1))
        heapq.heappush(open_ends, end)
    return made


def lanes(spans: Sequence[TraceEvent]) -> list[int]:
    """For spans by their beginning: the first lane that is free, else the last."""
    made: list[int] = []
    until = [float("-inf")] * DEEPEST
    for begin, end in map(interval_of, spans):
        lane = next((number for number, busy in enumerate(until) if busy <= begin + ROUNDING_US), DEEPEST - 1)
        until[lane] = max(until[lane], end)
        made.append(lane)
    return made
