"""What came out: one row per size, contender and load, with everything that is computed from the times.

For P ranks and m bytes, t the median over rounds of the slowest rank's time:

    algorithm bandwidth   m / t
    bus bandwidth         2(P-1)/P * m / t      what each rank's link carried, were the volume the least possible
    share of bare TCP     t_stream / t          1 = as fast as the bytes alone
    x gloo                t_gloo / t            above 1 = faster than gloo
"""

from __future__ import annotations

import statistics

import msgspec

from stretto.bench.machine import MachineInfo
from stretto.bench.settings import Settings
from stretto.bench.turns import quartiles
from stretto.plan.costs import LinkCosts


class AllReduceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. `seconds` has every round, slowest rank each; `chosen` is what "auto" stood for."""

    size: int
    contender: str
    wire: str
    load: str
    chosen: str
    seconds: list[float]
    median: float
    quartiles: tuple[float, float]
    algorithm_bandwidth: float
    bus_bandwidth: float
    share_of_tcp: float | None
    times_gloo: float | None


class AllReduceReport(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings
    machine: MachineInfo
    date: str
    links: dict[str, LinkCosts]  # measured alpha, beta, gamma of each wire
    rows: list[AllReduceRow]


def as_json(report: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """What one contender took at one size under one load."""

    contender: str
    wire: str
    chosen: str
    seconds: list[float]


def make_rows(size: int, load: str, world_size: int, measured: list[Times], stream_s: float | None) -> list[AllReduceRow]:
    """Rows of one size and load; `stream_s` is the bare stream's median, measured with an idle main thread."""
    gloo = next((statistics.median(each.seconds) for each in measured if each.wire == "gloo"), None)
    return [_row(size, load, world_size, each, stream_s, gloo) for each in measured]


def _row(size: int, load: str, world_size: int, times: Times, stream_s: float | None, gloo_s: float | None) -> AllReduceRow:
    median = statistics.median(times.seconds)
    return AllReduceRow(
        size=size,
        contender=times.contender,
        wire=times.wire,
        load=load,
        chosen=times.chosen,
        seconds=times.seconds,
        median=median,
        quartiles=quartiles(times.seconds),
        algorithm_bandwidth=size / median,
        bus_bandwidth=2 * (world_size - 1) / world_size * size / median,
        share_of_tcp=None if stream_s is None else stream_s / median,
        times_gloo=None if gloo_s is None or times.wire == "tcp" else gloo_s / median,
    )
