"""`stretto run --trace` and `stretto trace`, as they are called."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import msgspec
import pytest

from preloaded import Preloaded
from stretto.observe.command import show_trace
from stretto.observe.trace import About, TraceEvent, TraceFile

LIMIT_S = 110
SCRIPT = """
import sys
import torch
import stretto
from stretto.distributing import distribute

job = stretto.init()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
stretto.distribute(model, optimizer)
for _ in range(3):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
if stretto.rank() == 1:
    raise ValueError("on purpose")
stretto.barrier()
"""


def stretto(preloaded: Preloaded, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    return preloaded.shell(shlex.join(["stretto", *arguments]), folder=folder, timeout_s=LIMIT_S)


@pytest.mark.processes
def test_a_traced_job_leaves_the_files_of_all_ranks_even_if_it_fails_and_they_become_one(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    """One that succeeds is on the page about tracing, which `test_docs.py` runs."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "trace-rank7.json").write_text("of an earlier run")
    done = stretto(preloaded, "run", "-n", "2", "--trace", "out", "train.py", folder=tmp_path)
    assert done.returncode == 1 and "on purpose" in done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"plan.json", "trace-rank0.json", "trace-rank1.json"}
    for rank in range(2):
        file = json.loads((tmp_path / "out" / f"trace-rank{rank}.json").read_text())
        assert "update" in {event["name"] for event in file["traceEvents"]}

    shown = stretto(preloaded, "trace", "out", "-o", "all.json", folder=tmp_path)
    assert shown.returncode == 0 and "written: all.json" in shown.stdout, shown.stderr
    merged = json.loads((tmp_path / "all.json").read_text())
    names = {event["name"] for event in merged["traceEvents"]}
    assert {"forward Linear", "backward Linear", "update"} <= names
    offsets = [each["clock_offset_ns"] for each in merged["otherData"]["ranks"]]
    assert offsets == [0, 0]  # workers of one machine share a clock, and barriers do not contradict it


def test_the_table_is_whole_in_80_columns_and_also_where_less_is_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day of training in which the start-up, with its measurements, has sent more than the training."""
    monkeypatch.setenv("COLUMNS", "40")
    for rank in (0, 1023):
        about = About(
            rank=rank, world_size=1024, run="", host="here", num_spans=4, num_dropped=1234567, clock_offset_ns=0,
            clock_uncertainty_ns=0,
        )  # fmt: skip
        day = 86_400e6
        events = [
            TraceEvent("X", "send to 1", rank, 1, 0.0, 5.0, "send", {"bytes": 112_730_504}),
            TraceEvent("X", "forward", rank, 1, 123.45e6, day, "compute"),
            TraceEvent("X", "send to 1", rank, 1, 200e6, 5.0, "send", {"bytes": 102_440}),
            TraceEvent("X", "receive from 1", rank, 1, 200e6, 5.0, "receive", {"bytes": 998_765_432_100}),
        ]
        (tmp_path / f"trace-rank{rank}.json").write_bytes(msgspec.json.encode(TraceFile(events, about)))
    show_trace(tmp_path, None)

    lines = capsys.readouterr().out.split("\nrank 1 left no trace")[0].splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.split()[:1] == ["1023"])
    assert " ".join(row.split()) == "1023 123.45 s 113 MB 86400.00 s 100% 0% 102 KB 999 GB 1234567"
    assert "…" not in "".join(lines)


def test_a_folder_that_cannot_be_or_holds_nothing_is_said_at_once(tmp_path: Path, preloaded: Preloaded) -> None:
    (tmp_path / "file").touch()
    for arguments, said in (
        (("run", "--trace", "file", "train.py"), "--trace file"),
        (("trace", "nowhere"), "nothing was traced"),
    ):
        done = stretto(preloaded, *arguments, folder=tmp_path)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
