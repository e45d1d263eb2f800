"""`stretto report DIR`: what it writes and prints, and what it says to folders and files that cannot be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from report.traces import job, plan_of, span, step, trace, write
from stretto import cli
from stretto.errors import ConfigurationError
from stretto.observe import trace_files
from stretto.observe.merge import read
from stretto.plan import planned
from stretto.plan.planned import PlannedStep, read_planned, write_planned
from stretto.plan.transfers import Transfer, TransferPlan
from stretto.report.command import write_report

TWO = ({"compute": 60.0, "network": [(40.0, 90.0)], "wait": 38.0},) * 2


def test_it_writes_the_page_and_prints_the_sentence_and_the_figures(tmp_path: Path) -> None:
    folder = write(tmp_path / "traces", job(*TWO))
    write_planned(folder, plan_of("a.weight"))
    done = CliRunner().invoke(cli.app, ["report", str(folder)])

    assert done.exit_code == 0, done.output
    assert done.output.startswith(
        "Poor overlap: 50.0 ms of communication and 60.0 ms of computation take 100 ms (alpha 0.20, rho 0.83)"
    )
    shown = dict(line.strip().split("  ", 1) for line in done.output.splitlines() if line.startswith("  "))
    assert {name: value.strip() for name, value in shown.items()} == {
        "step": "100 ms (100 ms to 100 ms)", "predicted": "110 ms", "computing (U)": "60 %", "overlap (alpha)": "0.20",
        "network/compute (rho)": "0.83", "sent per rank and step": "1.00 MB", "ranks": "2 of 2",
    }  # fmt: skip
    assert f"written: {folder / 'report.html'}" in done.output and (folder / "report.html").read_text().endswith("</html>\n")


def test_the_page_goes_where_it_is_told_and_says_if_it_cannot(tmp_path: Path) -> None:
    folder = write(tmp_path / "traces", [trace(0, [], world_size=1)])
    write_report(folder, tmp_path / "here.html")
    assert "no training step" in (tmp_path / "here.html").read_text() and not (folder / "report.html").exists()
    with pytest.raises(ConfigurationError, match="cannot be written .*-o FILE"):
        write_report(folder, tmp_path / "nowhere" / "report.html")


def test_a_folder_that_is_none_or_has_no_traces(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere is no folder.*\n.*stretto run --trace"):
        write_report(tmp_path / "nowhere", None)
    with pytest.raises(ConfigurationError, match=r"has no trace-rank\*.json.*\n.*stretto run --trace"):
        write_report(tmp_path, None)


GOOD: dict[str, Any] = msgspec.to_builtins(trace(0, step(0, 100, compute=60, network=[(0.0, 10.0)])))


def spoiled(change: dict[str, Any], *, send: bool = False) -> bytes:
    event = GOOD["traceEvents"][-1 if send else 0]
    return msgspec.json.encode({**GOOD, "traceEvents": [{**event, **change}]})


BAD = {
    "truncated": msgspec.json.encode(GOOD)[:-20],
    "empty": b"",
    "not JSON": b"\x80\x04\x95 pickle",
    "another program's": b'{"traceEvents": []}',
    "NaN": spoiled({}).replace(b'"ts":0.0', b'"ts":NaN'),
    "infinite": spoiled({}).replace(b'"ts":0.0', b'"ts":1e999'),
    "huge": spoiled({"ts": 1e300}),
    "negative length": spoiled({"dur": -1.0}),
    "no length": spoiled({"dur": None}),
    "huge length": spoiled({"dur": 1e300}),
    "bytes as text": spoiled({"args": {"bytes": "1000"}}, send=True),
    "negative bytes": spoiled({"args": {"bytes": -1}}, send=True),
    "huge bytes": spoiled({"args": {"bytes": 1 << 60}}, send=True),
    "peer as list": spoiled({"args": {"peer": [1]}}, send=True),
    "huge peer": spoiled({"args": {"peer": 1 << 40}}, send=True),
    "collective as number": spoiled({"args": {"collective": 5}}, send=True),
    "nested": b'{"traceEvents":[{"ph":"X","name":"","pid":0,"tid":0,"ts":0,"args":{"a":' + b"[" * 100_000,
    "a rank that is none": msgspec.json.encode({**GOOD, "otherData": {**GOOD["otherData"], "rank": 5}}),
    "a negative rank": msgspec.json.encode({**GOOD, "otherData": {**GOOD["otherData"], "rank": -1}}),
    "another rank": msgspec.json.encode({**GOOD, "otherData": {**GOOD["otherData"], "rank": 1}}),
    "a huge world": msgspec.json.encode({**GOOD, "otherData": {**GOOD["otherData"], "world_size": 1 << 50}}),
    "negative drops": msgspec.json.encode({**GOOD, "otherData": {**GOOD["otherData"], "num_dropped": -5}}),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_stretto_did_not_write_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace-rank0.json"
    path.write_bytes(msgspec.json.encode(GOOD))
    assert len(read(tmp_path)) == 1
    path.write_bytes(BAD[kind])
    with pytest.raises(ConfigurationError, match=r"trace-rank0.json is not a trace that stretto wrote \(.+\). Remove it"):
        write_report(tmp_path, None)
    assert not (tmp_path / "report.html").exists()


def test_a_clock_that_is_behind_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """Rank 0's clock may have begun later than this one's offset: times before 0 are right."""
    write(tmp_path, [trace(0, step(-500, 100, compute=60))])
    assert read(tmp_path)[0].traceEvents[0].ts == -500_000


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """Reading a pipe that nobody writes to would never end."""
    os.mkfifo(tmp_path / "trace-rank0.json")
    with pytest.raises(ConfigurationError, match="no regular file"):
        write_report(tmp_path, None)


def test_files_that_are_too_large_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, job(*TWO))
    large = (tmp_path / "trace-rank0.json").stat().st_size
    monkeypatch.setattr(trace_files, "MAX_FILE_BYTES", large - 1)
    with pytest.raises(ConfigurationError, match="more than 0 MiB"):
        write_report(tmp_path, None)
    monkeypatch.setattr(trace_files, "MAX_FILE_BYTES", 10 * large)
    monkeypatch.setattr(trace_files, "MAX_FOLDER_BYTES", large + 1)
    with pytest.raises(ConfigurationError, match="the 2 trace files .* are read at once.\nCopy those of a few ranks"):
        write_report(tmp_path, None)


def test_a_plan_is_read_as_it_was_written_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_planned(tmp_path) is None
    good = plan_of("a.weight", "b.weight")
    path = write_planned(tmp_path, good)
    assert read_planned(tmp_path) == good and [each.name for each in tmp_path.iterdir()] == ["plan.json"]

    whole = path.read_bytes()
    transfer = Transfer(parameters=("a",), num_bytes=10, part_bytes=0)
    for bad in (
        whole[:-5],
        b'{"plan":' * 100_000,
        whole.replace(b"0.11", b"-1"),
        whole.replace(b"0.11", b"1e300"),
        msgspec.json.encode(PlannedStep(plan=TransferPlan(schedule="", transfers=(transfer,)))),
        msgspec.json.encode(PlannedStep(plan=TransferPlan(schedule="", transfers=(Transfer(parameters=(), num_bytes=10),)))),
    ):
        path.write_bytes(bad)
        with pytest.raises(ConfigurationError, match=r"plan.json is not a plan that stretto wrote \(.+\).\nRemove it"):
            read_planned(tmp_path)
    path.write_bytes(whole)
    monkeypatch.setattr(planned, "MAX_FILE_BYTES", 10)
    with pytest.raises(ConfigurationError, match="more than"):
        read_planned(tmp_path)


def test_names_of_a_category_that_nobody_knows_do_no_harm(tmp_path: Path) -> None:
    spans = [*step(0, 100, compute=60), span("?", "?" * 10_000, 0, 1), span("", "", 0, 0, tid=-5)]
    write(tmp_path, [trace(0, spans, world_size=1)])
    write_report(tmp_path, None)
    assert "?" * 200 not in (tmp_path / "report.html").read_text()
