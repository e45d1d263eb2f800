"""The scripts of `benchmarks/` say how they are used, and refuse what they cannot measure."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from stretto.bench.machine import describe
from stretto.bench.turns import now
from stretto.errors import ConfigurationError

FOLDER = Path(__file__).parents[2] / "benchmarks"


def script_of(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)  # as dataclasses need it
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize(
    "name",
    [
        "all_reduce",
        "before_after",
        "compress",
        "compress_gpu",
        "compress_loss",
        "compress_step",
        "profile_overhead",
        "race",
        "schedule",
        "step",
        "strangers",
        "torch_backend",
        "zero",
        "zero_large",
    ],  # fmt: skip
)
def test_help_is_printed(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of(name, monkeypatch)
    with pytest.raises(SystemExit) as ended:
        script.main(["--help"])
    assert ended.value.code == 0 and "--output" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["compress_step", "step"])
def test_a_cpu_is_never_measured_as_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="torch sees no GPU"):
        script_of(name, monkeypatch).main(["--device", "cuda", "--rounds", "1"])


@pytest.mark.parametrize("name", ["compress_step", "profile_overhead", "schedule", "step", "strangers", "torch_backend"])
def test_no_rounds_are_nothing_to_report(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="nothing to report"):
        script_of(name, monkeypatch).main(["--rounds", "0"])


def test_a_codec_that_has_no_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="Int9: there is no such row. Write some of Float16,"):
        script_of("compress_step", monkeypatch).main(["--codecs", "Int8,Int9"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--servers", "--schedules", "Tac()"], "--schedules Tac.*no such row. Write some of 4 servers, Buckets"),
        (["--compressed", "--models", "gpd"], "--models gpd: there is no such row. Write some of mlp,gpt,small"),
        (["--late", "--rho", "1,-2"], "--rho 1,-2: not one or several positive numbers"),
    ],
)
def test_a_row_that_there_is_not_is_refused_in_every_comparison_of_schedules(
    arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        script_of("schedule", monkeypatch).main(arguments)


@pytest.mark.parametrize(
    ("kind", "row", "rho", "stem", "claim"),
    [
        ([], "Priority()", "1", "schedule_", ""),
        (
            ["--servers"],
            "4 servers, Tac();4 servers, Tac(cross_barrier=False)",
            "1",
            "schedule_servers_",
            "at least | 1.15 | 1.50",
        ),
        (["--servers"], "4 servers, Tac();4 servers, Tac(cross_barrier=False)", "3", "schedule_servers_", ""),
        (["--compressed"], "EF Sign, Buckets()", "10", "schedule_compressed_", "EF Sign, Buckets(), x no communication"),
        (["--late"], "Buckets();StaleSynchronous(1)", "1", "late_", "StaleSynchronous(1), x Buckets(), at least | 1.10"),
    ],
)
def test_every_comparison_of_schedules_measures_what_was_asked_for_and_writes_files_of_its_own(
    kind: list[str], row: str, rho: str, stem: str, claim: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = script_of("schedule", monkeypatch)
    asked: list[Any] = []

    def run(settings: Any) -> Any:
        asked.append(settings)
        names = [*settings.peers, *settings.strategies]
        rows = [
            importlib.import_module("schedule_worker").ScheduleRow(
                contender=name, seconds=[1.5 if "False" in name else 1.0] * settings.rounds
            )
            for name in names
        ]
        return script.ScheduleReport(settings=settings, machine=describe(), date=now(), num_bytes=1, rows=rows)

    monkeypatch.setattr(script, "run", run)
    script.main([*kind, "--models", "small", "--rho", rho, "--schedules", row, "--output", str(tmp_path)])
    (settings,) = asked
    assert (settings.model, settings.rho, list(settings.strategies)) == ("small", float(rho), row.split(";"))
    (written,) = tmp_path.glob("*.md")
    theme = written.name.removesuffix(written.name.removeprefix(stem))
    assert theme == stem and not written.name.removeprefix(stem).startswith(("servers", "compressed"))
    claims = [line for line in written.read_text().splitlines() if line.startswith("| small, rho") and "predicted" not in line]
    assert any(claim in line for line in claims) if claim else not [line for line in claims if "Tac" in line]


def test_a_contender_that_is_not_in_a_race_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="dppd: not in this race. Write some of DDP, "):
        script_of("race", monkeypatch).main(["rho10", "--only", "dppd"])


@pytest.mark.parametrize("known", [True, False])
def test_strangers_are_judged_against_quiet_and_against_strangers_elsewhere(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    script = script_of("strangers", monkeypatch)

    def case(kind: str, peaks: dict[int, int]) -> object:
        seconds = {script.QUIET: [1.0], script.ELSEWHERE: [2.0], script.FLOODED: [3.0]}
        worker = script.Worker(seconds=seconds, peak_bytes=peaks, peaks_are_of_phases=known)
        return script.Flood(wire="plain", kind=kind, formed_s=1.0, coordinator_bytes=0, workers=[worker], goes_on=True)

    quiet = case("none", {script.FORMING: 0, script.QUIET: 0, script.FLOODED: 0})
    flooded = case("idle", {script.FORMING: 65 << 20, script.QUIET: 10 << 20, script.FLOODED: 11 << 20})
    rows = "\n".join(script.flood_claims(flooded, quiet))
    assert "x without strangers, at most | 2 | 3.00 | **missed**" in rows
    assert "x with strangers elsewhere, at most | 2 | 1.50 | met" in rows
    if known:
        assert "until the job has formed, at most | 64 MB | +68.2 MB | **missed**" in rows
        assert "of a running job, at most | 64 MB | +1.0 MB | met" in rows
    else:
        assert rows.count("not judged") == 2
