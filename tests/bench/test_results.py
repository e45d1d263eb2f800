"""What is computed from times, and how it is written."""

from __future__ import annotations

import io

import msgspec
import pytest

from stretto.bench.machine import describe
from stretto.bench.results import AllReduceReport, Times, as_json, make_rows
from stretto.bench.settings import Settings
from stretto.bench.show import show
from stretto.bench.table_text import bandwidth, seconds
from stretto.bench.turns import quartiles

TIMES = [
    Times(contender="auto", wire="plain", chosen="ring", seconds=[0.5, 0.4, 0.6]),
    Times(contender="gloo", wire="gloo", chosen="gloo", seconds=[1.0, 1.0, 1.0]),
    Times(contender="bare TCP", wire="tcp", chosen="bare TCP", seconds=[0.25, 0.25, 0.25]),
]


def report(busy: bool = False) -> AllReduceReport:
    settings = Settings(sizes=[8000], algorithms=["auto"], workers=4, busy=busy)
    rows = make_rows(8000, "idle", 4, TIMES, stream_s=0.25)
    return AllReduceReport(settings=settings, machine=describe(), date="2026-01-01T00:00:00+00:00", links={}, rows=rows)


def test_a_row_has_the_bandwidths_and_ratios_of_its_median() -> None:
    ours, gloo, stream = make_rows(8000, "idle", 4, TIMES, stream_s=0.25)

    assert ours.median == 0.5 and ours.algorithm_bandwidth == 16000
    assert ours.bus_bandwidth == pytest.approx(1.5 * 16000)
    assert ours.share_of_tcp == 0.5 and ours.times_gloo == 2.0
    assert gloo.times_gloo == 1.0 and stream.share_of_tcp == 1.0 and stream.times_gloo is None


def test_without_a_stream_or_gloo_there_is_no_ratio() -> None:
    (ours,) = make_rows(8000, "python", 4, TIMES[:1], stream_s=None)

    assert ours.share_of_tcp is None and ours.times_gloo is None


def test_quartiles_of_one_time_are_that_time() -> None:
    assert quartiles([0.5]) == (0.5, 0.5)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)


def test_the_table_is_whole_even_where_it_is_written_to_a_narrow_place() -> None:
    written = io.StringIO()
    show(report(), written)

    line = next(line for line in written.getvalue().splitlines() if "auto (ring)" in line)
    assert line.split() == ["auto", "(ring)", "plain", "500", "ms", "450", "ms", "-", "550", "ms", "0.02", "0.02", "50%", "2.00"]


def test_json_has_every_round_the_versions_and_the_machine() -> None:
    written = msgspec.json.decode(as_json(report()))

    assert written["rows"][0]["seconds"] == [0.5, 0.4, 0.6]
    assert written["machine"]["processor"] and written["machine"]["cores"] >= 1
    assert {"stretto", "torch", "python", "pyzmq", "libzmq", "numba"} <= set(written["machine"]["versions"])
    assert msgspec.json.decode(as_json(report()), type=AllReduceReport) == report()


@pytest.mark.parametrize(
    ("value", "text"), [(1.5, "1.50 s"), (0.0123, "12.3 ms"), (0.4321, "432 ms"), (2.5e-5, "25.0 µs"), (1e-7, "0.10 µs")]
)
def test_times_have_three_digits_and_a_unit(value: float, text: str) -> None:
    assert seconds(value) == text


def test_bandwidths_are_in_millions_of_bytes() -> None:
    assert bandwidth(1_234_000_000) == "1,234" and bandwidth(2_500_000) == "2.50"
