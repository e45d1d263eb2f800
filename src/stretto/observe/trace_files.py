"""Reading trace files as what they may be: truncated, another program's, or made to do harm.

Whoever has read a file through here may rely on it: times are finite and not negative, `bytes` and `peer` are whole numbers in
their range, the rank is one of the job. The size is looked at before the file is read, and nothing but a regular file is opened.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import msgspec

from stretto.errors import ConfigurationError
from stretto.observe.trace import TraceEvent, TraceFile, file_of

NAME: Final = re.compile(r"trace-rank\d{1,9}\.json")
SERVER_NAME: Final = re.compile(r"trace-server\d{1,9}\.json")
MOST_COUNTS: Final = 8  # numbers in one sample
MAX_FILE_BYTES: Final = 128 << 20  # the tracer keeps 131,072 spans, about 35 MB
MAX_FOLDER_BYTES: Final = 1 << 30  # read, it takes about five times as much memory
MAX_RANKS: Final = 1 << 20
LONGEST_US: Final = 1e15  # 31 years: more than a clock has run, with any offset
WHOLE: Final = 1 << 53


def trace_paths(folder: Path) -> list[Path]:
    """The trace files of a folder, which must be there and not be more than can be read."""
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is no folder, so nothing was traced into it.\n"
            f"Name one that `stretto run --trace DIR` was given, or trace now: `stretto run --trace {folder} -n 2 train.py`."
        )
    paths = [path for path in folder.glob("trace-rank*.json") if NAME.fullmatch(path.name)]
    if not paths:
        raise ConfigurationError(
            f"{folder} has no trace-rank*.json: nothing was traced into it.\n"
            f"Write one with `stretto run --trace {folder} -n 2 train.py`; the script must call stretto.init()."
        )
    together = sum(path.stat().st_size for path in paths if path.is_file())
    if together > MAX_FOLDER_BYTES:
        raise ConfigurationError(
            f"the {len(paths)} trace files in {folder} have {together >> 20:,} MiB together, and at most "
            f"{MAX_FOLDER_BYTES >> 20:,} are read at once.\n"
            f"Copy those of a few ranks into a folder of their own, or trace a shorter run."
        )
    return paths


def server_paths(folder: Path) -> list[Path]:
    """Those of servers: there need not be any."""
    paths = [path for path in folder.glob("trace-server*.json") if SERVER_NAME.fullmatch(path.name)]
    if sum(path.stat().st_size for path in paths if path.is_file()) > MAX_FOLDER_BYTES:
        raise ConfigurationError(
            f"the {len(paths)} trace files of servers in {folder} have more than {MAX_FOLDER_BYTES >> 20:,} MiB together, "
            f"which is more than is read at once.\nRemove them, or trace a shorter run."
        )
    return paths


def read_trace(path: Path) -> TraceFile:
    try:
        if not path.is_file():
            raise _refused(path, "it is no regular file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _refused(path, f"it has more than {MAX_FILE_BYTES >> 20} MiB")
        file = msgspec.json.decode(path.read_bytes(), type=TraceFile)
    except (msgspec.MsgspecError, RecursionError, OSError) as problem:
        raise _refused(path, str(problem)) from problem
    wrong = _nonsense(path, file)
    if wrong is not None:
        raise _refused(path, wrong)
    return file


def _nonsense(path: Path, file: TraceFile) -> str | None:
    """What is JSON of the right form, and still cannot be."""
    about = file.otherData
    if about.server >= 0:
        if not 1 <= about.world_size <= about.rank <= MAX_RANKS:
            return f"rank {about.rank} of a server beside {about.world_size} workers cannot be"
    elif not 0 <= about.rank < about.world_size <= MAX_RANKS:
        return f"rank {about.rank} of {about.world_size} workers cannot be"
    if path.name != file_of(path.parent, about.rank, about.server).name:
        return f"it says that it is of {'rank' if about.server < 0 else 'server'} {max(about.rank, about.server)}"
    if not all(_is_whole(number, WHOLE) for pair in about.staleness.items() for number in pair):
        return "it has a staleness that cannot be"
    if not all(0 <= rank < MAX_RANKS and 0.0 <= seconds < LONGEST_US for rank, seconds in about.held_s.items()):
        return "it was held back for a time, or by a rank, that cannot be"
    if not (0 <= about.num_dropped < WHOLE and 0 <= about.clock_uncertainty_ns < WHOLE):
        return "it has a negative or huge number of dropped spans, or clock uncertainty"
    for number, event in enumerate(file.traceEvents):
        if not _is_sane(event):
            return f"event {number} has a time, a peer or a number of bytes that cannot be"
    return None


def _is_sane(event: TraceEvent) -> bool:
    """Comparisons with NaN are false, so it is refused too. (JSON has no NaN, but who writes files may.)"""
    if event.ph == "C":
        values = event.args.values()
        could_be = _is_whole if event.name == "queue" else _is_amount  # the lengths of queues are added up
        return -LONGEST_US < event.ts < LONGEST_US and len(values) <= MOST_COUNTS and all(could_be(n, WHOLE) for n in values)
    if event.ph != "X":
        return True
    return (
        -LONGEST_US < event.ts < LONGEST_US
        and event.dur is not None
        and 0.0 <= event.dur < LONGEST_US
        and _is_whole(event.args.get("bytes", 0), WHOLE)
        and _is_whole(event.args.get("peer", 0), MAX_RANKS)
        and isinstance(event.args.get("collective", ""), str)
    )


def _is_whole(value: Any, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit


def _is_amount(value: Any, limit: int) -> bool:
    return type(value) in (int, float) and 0 <= value < limit


def _refused(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(f"{path} is not a trace that stretto wrote ({why}). Remove it, or run the job again with --trace.")
