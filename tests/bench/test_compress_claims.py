"""`benchmarks/compress.py`: it runs, judges its claims round by round, and writes what it measured."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from stretto.bench.compress_results import CompressReport, CompressRow, timing
from stretto.bench.compress_settings import DEFAULT_CODECS, CompressSettings

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compress.py"
NAME = "compress_benchmark"  # not `compress`: tests have a folder of that name
SIZE = 64 << 20


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location(NAME, SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, NAME, module)  # where its dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def row(copy: list[float], encode: list[float], decode: list[float]) -> CompressRow:
    def of(seconds: list[float]) -> object:
        return timing(SIZE, seconds, copy_s=0.001)

    fields = {
        "size": SIZE,
        "codec": "Int8()",
        "payload_bytes": 1,
        "bits_per_value": 8.0,
        "bytes_sent": 1,
        "bytes_uncompressed": 2,
        "copy": of(copy),
        "clone": of(copy),
        "calls": {"encode": of(encode), "decode": of(decode)},
        "exchange": of(copy),
        "quality": {},
        "break_even_mbit": None,
    }
    return CompressRow(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("encode_s", "decode_s", "claimed", "verdict"),
    [
        (0.9, 1.0, SIZE, "met"),
        (1.1, 1.0, SIZE, "**missed**"),
        (0.9, 1.0, 2 * SIZE, "not judged: the claim is about 128 MB"),
        (0.9, 1.0, None, "no claim"),
    ],
)
def test_a_claim_is_judged_by_encoding_and_decoding_against_a_copy(
    script: ModuleType, encode_s: float, decode_s: float, claimed: int | None, verdict: str
) -> None:
    drift = [1.0, 5.0, 2.0, 3.0, 1.0, 4.0, 2.0, 1.0]  # of the machine: hits all calls of a round alike
    measured = row([1.0 * x for x in drift], [encode_s * x for x in drift], [decode_s * x for x in drift])
    line = script.judged(script.SpeedClaim("Int8()", ("encode", "decode"), 0.5), measured, claimed)

    assert line.endswith(f"| {verdict} |") and f"| {1 / (encode_s + decode_s):.2f} (" in line


def test_a_quick_run_writes_both_files_with_all_claims(script: ModuleType, tmp_path: Path) -> None:
    script.main(["--quick", "--sizes", "16K", "--codecs", "Int8(), Sign(), BFloat16()", "--output", str(tmp_path)])

    (written,) = tmp_path.glob("compress_*.json")
    found = msgspec.json.decode(written.read_bytes(), type=CompressReport)
    assert [each.codec for each in found.rows] == ["Int8()", "Sign()", "BFloat16()"]
    text = written.with_suffix(".md").read_text()
    for codec in ("Int8()", "Sign()", "BFloat16()"):
        assert f"| {codec}, encode + decode: x a copy's rate, at least | 16 KB | 0.50 |" in text
        assert f"| {codec}, encode_new + decode_new: x a copy's rate, at least | 16 KB | 0.50 |" in text
    assert "the claim is about 64 MB" in text and "when it pays" in text and "at 100 Mbit/s these pay" in text


def test_on_a_gpu_the_largest_size_is_for_the_claims_codecs_alone(script: ModuleType) -> None:
    everything = CompressSettings(sizes=[1 << 20], codecs=list(DEFAULT_CODECS), device="cuda")
    alone = script.claims_alone(everything)

    assert alone.sizes == [256 << 20] and set(alone.codecs) == {"Int8()", "Sign()", "BFloat16()", "TopK(0.01)"}


def test_the_gpus_claims_are_three_codecs_each_way_and_top_k(script: ModuleType) -> None:
    claims = {(claim.codec, claim.calls): claim.target for claim in script.CLAIMS["cuda"]}

    assert {target for (codec, _), target in claims.items() if codec != "TopK(0.01)"} == {0.75} and len(claims) == 7
    assert claims["TopK(0.01)", ("encode",)] == pytest.approx(1 / 3)
