"""`stretto bench compress`: what may be asked, what is measured, what is computed from it, and how it is called."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import msgspec
import pytest
import torch

from preloaded import Preloaded
from stretto.bench.command import app
from stretto.bench.compress_measure import Vectors, measure, turns_of
from stretto.bench.compress_results import CompressReport, CompressRow, Timing, break_even_mbit, paying, timing
from stretto.bench.compress_settings import DEFAULT_CODECS, CompressSettings, check, compression_of, parse_codecs, parse_rates
from stretto.bench.compress_show import link, rate, show
from stretto.bench.machine import describe
from stretto.bench.results import as_json
from stretto.compress import buffer_pool
from stretto.compress.buffer_pool import BufferPool
from stretto.compress.int8 import Int8
from stretto.compress.kernels.compiling import has_numba
from stretto.errors import ConfigurationError

LIMIT_S = 90
CALLS = {"encode", "decode", "encode_residual", "add_decoded", "encode_new", "decode_new"}


# -- what may be asked ------------------------------------------------------------------------------------------------


def test_codecs_are_separated_at_the_outer_commas_and_come_once() -> None:
    text = "Int8(), ErrorFeedback(TopK(0.01)),ByParameter(('*.a[,(]', NoCompression()), ('*', Sign())), Int8()"

    assert parse_codecs(text) == [
        "Int8()",
        "ErrorFeedback(TopK(0.01))",
        "ByParameter(('*.a[,(]', NoCompression()), ('*', Sign()))",
    ]
    assert parse_codecs("QSGD(bits=4)") == ["QSGD(bits=4)"] and compression_of("Int8(block=64)") == Int8(block=64)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a list of codecs"),
        ("Int8(", "not a list of codecs"),
        ("Int8()),Sign(", "not a list of codecs"),
        ("Int8(), aggregate=AllReduce()", "not a list of codecs"),
        ("Int9()", "'Int9' is not known"),
        ("Int8", "'Int8' is not understood"),
        ("TopK(2)", "TopK"),
        ("Int8(), __import__('os')", "'__import__' is not known"),
        ("Buckets()", "not an answer"),
        ("(" * 3000, "not a list of codecs"),
        ("Int8()," * 1000, "at most"),
    ],
)
def test_what_is_no_codec_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as problem:
        parse_codecs(text)
    assert said in str(problem.value) and str(problem.value).startswith("--codecs")


def test_all_is_the_default_list() -> None:
    assert parse_codecs("all") == list(DEFAULT_CODECS)


@pytest.mark.parametrize("text", ["", "fast", "0", "-5", "100,,1", "inf", "nan"])
def test_rates_are_numbers(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--rates 100,1000,10000"):
        parse_rates(text)


@pytest.mark.parametrize(
    ("changed", "said"), [({"workers": 1}, "2 workers or more"), ({"rounds": 0}, "at least 1"), ({"limit_s": 0.0}, "--limit 60")]
)
def test_settings_that_cannot_work_are_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check(CompressSettings(sizes=[4096], codecs=["Int8()"], **changed))  # type: ignore[arg-type]


# -- what is measured -------------------------------------------------------------------------------------------------


def test_every_codec_has_a_row_with_all_that_it_can_do() -> None:
    threads = torch.get_num_threads()
    settings = CompressSettings(sizes=[4, 36 << 10], codecs=[*DEFAULT_CODECS, "Sign(vote=True)"], workers=3, rounds=2)
    report = measure(settings)

    assert [(row.size, row.codec) for row in report.rows] == [(size, word) for size in settings.sizes for word in settings.codecs]
    assert torch.get_num_threads() == threads
    rows = {row.codec: row for row in report.rows if row.size == 36 << 10}
    for row in report.rows:
        for times in (row.copy, row.clone, row.exchange, *row.calls.values()):
            assert len(times.seconds) == 2 and min(times.seconds) > 0
    assert set(rows["Int8()"].calls) == CALLS and set(rows["Sign(vote=True)"].calls) == CALLS - {"encode_residual"}
    assert not rows["PowerSGD(4)"].calls and not rows["ErrorFeedback(Sign())"].calls
    without_quality = {word for word, row in rows.items() if not row.quality}
    assert without_quality == {"DGC(0.001)", "DeMo()", "OneBitAdam(1000)", "Sign(vote=True)"}
    assert rows["Float16()"].bits_per_value == 16 and rows["Float16()"].quality["gaussian"].relative_error < 1e-3
    assert rows["Sign()"].quality["gaussian"].contraction == pytest.approx(2 / torch.pi, abs=0.02)
    assert rows["Sign()"].quality["gradient-like"].contraction < 0.6
    assert rows["ErrorFeedback(Sign())"].payload_bytes == rows["Sign()"].payload_bytes


@pytest.mark.skipif(not has_numba(), reason="torch takes memory of its own")
def test_codecs_write_to_memory_that_is_there_except_where_it_says_new(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    real = BufferPool._take

    def take(memory: BufferPool, num_units: int) -> torch.Tensor:
        taken.extend([num_units] * (not memory._free.get(num_units)))
        return real(memory, num_units)

    monkeypatch.setattr(buffer_pool, "UNIT_BYTES", 1024)
    monkeypatch.setattr(BufferPool, "_take", take)
    vectors = Vectors(16 << 10, CompressSettings(sizes=[16 << 10], codecs=[]), torch.device("cpu"))
    turns = turns_of(Int8(), vectors)
    takes = set()
    for name, turn in turns.items():
        for _ in range(2):
            taken.clear()
            turn()
        takes |= {name} if taken else set()

    assert turns.keys() == CALLS and takes == {"encode_new", "decode_new"}


def test_where_rounds_would_take_too_long_there_are_fewer() -> None:
    (only,) = measure(CompressSettings(sizes=[4096], codecs=["Int8()"], rounds=5, limit_s=1e-9)).rows

    assert {len(times.seconds) for times in (only.copy, only.exchange, *only.calls.values())} == {1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_too() -> None:
    report = measure(CompressSettings(sizes=[1 << 20], codecs=list(DEFAULT_CODECS), device="cuda", workers=3, rounds=2))

    assert {row.codec for row in report.rows} == set(DEFAULT_CODECS) and "triton" in report.machine.versions


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="sees no GPU"):
        measure(CompressSettings(sizes=[4096], codecs=["Int8()"], device="cuda"))


# -- what is computed -------------------------------------------------------------------------------------------------


def row(codec: str, sent: int, exchange_s: float, size: int = 8_000_000) -> CompressRow:
    """With 4 workers: uncompressed 1.5 times the size."""

    def of(*seconds: float) -> Timing:
        return timing(size, list(seconds), copy_s=0.001)

    uncompressed = size * 3 // 2
    return CompressRow(
        size=size,
        codec=codec,
        payload_bytes=1000,
        bits_per_value=0.004,
        bytes_sent=sent,
        bytes_uncompressed=uncompressed,
        copy=of(0.001),
        clone=of(0.002),
        calls={"encode": of(0.001, 0.003, 0.005), "decode": of(0.001)},
        exchange=of(exchange_s),
        quality={},
        break_even_mbit=break_even_mbit(uncompressed, sent, exchange_s),
    )


def report(*rows: CompressRow) -> CompressReport:
    sizes = list(dict.fromkeys(each.size for each in rows))
    settings = CompressSettings(sizes=sizes, codecs=[each.codec for each in rows])
    return CompressReport(settings=settings, machine=describe(), date="2026-01-01T00:00:00+00:00", rows=list(rows))


def test_break_even_is_where_both_take_as_long() -> None:
    half = row("half", 6_000_000, 0.03)

    assert half.break_even_mbit == pytest.approx(1600)  # 6 MB saved in 30 ms
    assert half.speed_up(1600) == pytest.approx(1) and half.round_seconds(1600) == pytest.approx(0.06)
    assert half.speed_up(100) > 1 > half.speed_up(3200)
    assert half.pays(1599) and not half.pays(1601)


def test_what_sends_no_less_never_pays() -> None:
    assert row("none", 12_000_000, 0.001).break_even_mbit is None and row("more", 13_000_000, 0.001).break_even_mbit is None
    assert paying([row("none", 12_000_000, 1e-9)], 0.001) == []


def test_those_that_pay_come_fastest_first() -> None:
    slow_small, quick_large = row("slow, small", 100_000, 0.1), row("quick, large", 6_000_000, 0.01)
    rows = [slow_small, row("never", 12_000_000, 0.1), quick_large]

    assert paying(rows, 10) == [slow_small, quick_large]  # 9.6 s uncompressed: bytes decide
    assert paying(rows, 900) == [quick_large, slow_small]  # slow_small: up to 952
    assert paying(rows, 1000) == [quick_large] and paying(rows, 10_000) == []


def test_rates_are_bytes_of_the_values_over_time_with_the_middle_half() -> None:
    one = row("one", 0, 1.0)

    assert one.calls["encode"].gb_per_s == pytest.approx(8e6 / 0.003 / 1e9)
    assert rate(one.calls["encode"]) == "2.67 (2.00-4.00)" and rate(None) == ""
    assert one.of_copy("encode", "decode") == pytest.approx(0.25) and one.of_copy("encode", "add_decoded") is None
    assert link(99.5) == "99.5 Mbit/s" and link(12_345) == "12.3 Gbit/s"


def test_the_tables_are_whole_in_a_narrow_place_and_json_reads_back() -> None:
    found = report(row("ErrorFeedback(PowerSGD(4))", 6_000_000, 0.03), row("Nothing()", 12_000_000, 0.001))
    written = io.StringIO()
    show(found, written)
    lines = [line.split() for line in written.getvalue().splitlines() if "ErrorFeedback(PowerSGD(4))" in line]

    assert lines[2][:5] == ["ErrorFeedback(PowerSGD(4))", "6,000,000", "2.0", "30.0", "ms"]
    assert lines[2][-6:] == ["1.6", "Gbit/s", "1.88", "1.23", "0.28", "!"]
    assert "at 10 Gbit/s these pay: none" in written.getvalue() and "never" in written.getvalue()
    assert msgspec.json.decode(as_json(found), type=CompressReport) == found


# -- how it is called -------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_the_command_prints_tables_and_writes_json(tmp_path: Path, preloaded: Preloaded) -> None:
    options = [
        "--sizes",
        "16K",
        "--codecs",
        "Int8(), PowerSGD(2)",
        "-n",
        "2",
        "--rates",
        "50",
        "--rounds",
        "2",
        "--json",
        "out.json",
    ]
    command = shlex.join(["stretto", "bench", "compress", *options])
    done = preloaded.shell(command, folder=tmp_path, timeout_s=LIMIT_S)

    assert done.returncode == 0, done.stderr
    assert "pays below" in done.stdout and "at 50 Mbit/s these pay" in done.stdout and "encode_residual" in done.stdout
    found = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=CompressReport)
    assert [(each.size, each.codec) for each in found.rows] == [(16384, "Int8()"), (16384, "PowerSGD(2)")]
    assert found.settings.command.startswith("stretto bench compress --sizes 16K") and found.settings.rates == (50.0,)
    assert {"torch", "stretto", "python", "numba"} <= set(found.machine.versions)


INSIDE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
INSIDE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


@pytest.mark.parametrize(
    ("options", "environ", "said"),
    [
        (["--codecs", "Int9()"], {}, "'Int9' is not known"),
        (["--sizes", "3"], {}, "--sizes 3"),
        (["--workers", "1"], {}, "2 workers or more"),
        (["--json", "nowhere/out.json"], {}, "there is no folder nowhere"),
        ([], INSIDE, "inside a job"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(options: list[str], environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError) as problem:
        app(args=["compress", *options], obj=environ)
    assert said in str(problem.value)
