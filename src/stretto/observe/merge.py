"""The ranks' trace files in one, for Perfetto opens one at a time; and what they add up to.

Times in the files are rank 0's already (see `clocks`), so merging is putting them into one list, shifted so that the first span
begins at 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stretto.errors import ConfigurationError
from stretto.observe.trace import TraceEvent, TraceFile
from stretto.observe.trace_files import read_trace, server_paths, trace_paths

COMPUTE = ("compute", "update")


class Total(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's trace in numbers. `training_s` is from its first forward to its last span (without a model: all of it) and
    `start_up_s` what was before, when links were measured and weights sent. `waited` and `computed` are shares of
    `training_s`, and bytes are those of the training; `start_up_bytes` is what was sent before."""

    rank: int
    start_up_s: float
    start_up_bytes: int
    training_s: float
    computed: float
    waited: float
    bytes_sent: int
    bytes_received: int
    num_dropped: int


def read(folder: Path) -> list[TraceFile]:
    """All ranks' files of one run, by rank."""
    paths = trace_paths(folder)
    files = sorted((read_trace(path) for path in paths), key=lambda file: file.otherData.rank)
    if len({(file.otherData.run, file.otherData.world_size) for file in files}) > 1:
        raise ConfigurationError(
            f"the trace files in {folder} are of different runs, so they do not belong on one time line.\n"
            f"Remove the older ones, or trace into a folder of its own: `stretto run --trace` starts with an empty one."
        )
    return files


def read_servers(folder: Path, workers: Sequence[TraceFile]) -> list[TraceFile]:
    """The files that servers of the same run have left, by number."""
    files = [read_trace(path) for path in server_paths(folder)]
    run = workers[0].otherData.run, workers[0].otherData.world_size
    return sorted(
        (file for file in files if (file.otherData.run, file.otherData.world_size) == run), key=lambda file: file.otherData.server
    )


def merge(files: Sequence[TraceFile]) -> bytes:
    """One file with every rank as a process of its own."""
    spans = [event for file in files for event in file.traceEvents if event.ph == "X"]
    first = min((event.ts for event in spans), default=0.0)
    for event in spans:
        event.ts -= first
    content = {
        "traceEvents": [event for file in files for event in file.traceEvents],
        "displayTimeUnit": "ms",
        "otherData": {"ranks": [file.otherData for file in files]},
    }
    return msgspec.json.encode(content)


def missing_ranks(files: Sequence[TraceFile]) -> list[int]:
    """Ranks that left no file: killed, or still running."""
    there = {file.otherData.rank for file in files}
    return [rank for rank in range(files[0].otherData.world_size) if rank not in there]


def total(file: TraceFile) -> Total:
    spans = [event for event in file.traceEvents if event.ph == "X"]
    first = min((event.ts for event in spans), default=0.0)
    begin = min((event.ts for event in spans if event.cat in COMPUTE), default=first)
    end = max((event.ts + (event.dur or 0.0) for event in spans), default=0.0)
    return Total(
        rank=file.otherData.rank,
        start_up_s=(begin - first) / 1e6,
        start_up_bytes=_bytes_of(spans, "send", until=begin),
        training_s=(end - begin) / 1e6,
        computed=_time_in(spans, COMPUTE, begin) / max(end - begin, 1e-9),
        waited=_time_in(spans, ("wait",), begin) / max(end - begin, 1e-9),
        bytes_sent=_bytes_of(spans, "send", since=begin),
        bytes_received=_bytes_of(spans, "receive", since=begin),
        num_dropped=file.otherData.num_dropped,
    )


def _time_in(spans: Sequence[TraceEvent], categories: tuple[str, ...], since: float) -> float:
    """Microseconds after `since` in which at least one span of these categories was open: what is nested counts once."""
    covered, until = 0.0, since
    for span in sorted((span for span in spans if span.cat in categories), key=lambda span: span.ts):
        end = span.ts + (span.dur or 0.0)
        covered += max(0.0, end - max(span.ts, until))
        until = max(until, end)
    return covered


def _bytes_of(spans: Sequence[TraceEvent], category: str, since: float = -math.inf, until: float = math.inf) -> int:
    """The bytes of the spans of a category that began between these two times."""
    return sum(int(span.args.get("bytes", 0)) for span in spans if span.cat == category and since <= span.ts < until)
