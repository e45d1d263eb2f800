"""The line on how training goes."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
from preloaded import Preloaded
from stretto import api
from stretto.aggregate.parameter_server import ParameterServer
from stretto.distributing import distribute
from stretto.errors import ConfigurationError
from stretto.job import Job
from stretto.launching.detect import detect
from stretto.observe.ledger import Ledger
from stretto.observe.progress import Progress, Reading, line, read
from stretto.strategy import Strategy
from stretto.sync.stale_synchronous import StaleSynchronous
from stretto.testing import run_jobs

PATIENCE_S = 20.0
LINE = re.compile(
    r"stretto: [\d,]+ steps, [\d.e+]+ steps/s(, staleness [\d.]+ \(at most \d+\))?, "
    r"waiting \d+ %, [\d.]+ .?B/s (to servers|sent)"
)


class Lines(io.StringIO):
    """A stream that says when it has so many lines."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.wanted, self.there = wanted, threading.Event()

    def flush(self) -> None:
        if self.getvalue().count("\n") >= self.wanted:
            self.there.set()


def reading(at_s: float, staleness: dict[int, int], waited_s: float, sent: int, to_servers: int = 0) -> Reading:
    return Reading(at_s, Counter(staleness), waited_s, sent, to_servers)


def test_a_line_is_about_the_time_since_the_last_one() -> None:
    before = reading(10.0, {0: 1000, 7: 3}, 5.0, 1_000_000)
    after = reading(15.0, {0: 1030, 7: 3, 2: 20}, 6.0, 51_000_000, 50_000_000)
    assert line(before, after) == (
        "stretto: 1,053 steps, 10 steps/s, staleness 0.8 (at most 2), waiting 20 %, 10.0 MB/s to servers"
    )


def test_synchronous_training_has_no_staleness_in_it_and_sends_to_workers() -> None:
    assert (
        line(reading(0, {}, 0, 0), reading(2, {0: 5}, 4.0, 3_000))
        == "stretto: 5 steps, 2.5 steps/s, waiting 100 %, 1.50 KB/s sent"
    )


def test_a_time_in_which_nothing_happens_is_said() -> None:
    stuck = reading(0, {0: 5}, 1.0, 10), reading(5, {0: 5}, 6.0, 10)
    assert line(*stuck) == "stretto: 5 steps, 0 steps/s, waiting 100 %, 0 B/s sent"


def test_bytes_to_servers_are_those_of_peers_beyond_the_workers() -> None:
    ledger = Ledger()
    ledger.count_message("push", 2, sent=10)
    ledger.count_message("push", 1, sent=3)
    ledger.count_round(4)
    ledger.count_wait(2_000_000_000)
    assert read(ledger, 2, 7.0) == reading(7.0, {4: 1}, 2.0, 13, 10)


def test_lines_come_from_the_first_step_on_until_it_is_stopped() -> None:
    ledger, stream = Ledger(), Lines(2)
    progress = Progress(ledger, 1, 0.01, stream)
    assert not stream.there.wait(0.1) and stream.getvalue() == ""
    ledger.count_round()
    assert stream.there.wait(PATIENCE_S)
    progress.stop()
    assert not progress._thread.is_alive()
    assert all(LINE.fullmatch(each) for each in stream.getvalue().splitlines())


def test_a_stream_that_nobody_reads_ends_it() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    ledger = Ledger()
    ledger.count_round()
    progress = Progress(ledger, 1, 0.01, Gone())
    progress._thread.join(PATIENCE_S)
    assert not progress._thread.is_alive()


def test_rank_0_says_how_training_with_servers_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Lines(2)
    monkeypatch.setattr(sys, "stderr", stream)

    def program(job: Job) -> bool:
        token = api._job.set(job)
        try:
            stretto.progress(every_s=0.02)
            model = torch.nn.Linear(8, 1)
            strategy = Strategy(aggregate=ParameterServer(1), sync=StaleSynchronous(0))
            _, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, job=job)
            deadline = time.monotonic() + PATIENCE_S
            while not job.gather_object(stream.there.is_set())[0] and time.monotonic() < deadline:
                model(torch.ones(1, 8)).sum().backward()
                optimizer.step()
            said = job.progress is not None
            stretto.progress(None)
            assert job.progress is None
            return said
        finally:
            api._job.reset(token)

    assert run_jobs(2, program) == [True, False]
    found = stream.getvalue().splitlines()
    assert len(found) >= 2 and all(LINE.fullmatch(each) for each in found) and any("to servers" in each for each in found)


@pytest.mark.parametrize("wrong", [0, -1.0, 1e10])
def test_a_time_that_cannot_be_is_refused(wrong: Any) -> None:
    def program(job: Job) -> None:
        token = api._job.set(job)
        try:
            with pytest.raises(ConfigurationError, match="seconds between two lines"):
                stretto.progress(every_s=wrong)
        finally:
            api._job.reset(token)

    run_jobs(1, program)


def test_the_launcher_says_whether_it_is_wanted() -> None:
    assert detect({"STRETTO_PROGRESS": "on"}).progress and not detect({}).progress


@pytest.mark.slow
@pytest.mark.processes
def test_stretto_run_shows_the_line_of_rank_0(tmp_path: Path, preloaded: Preloaded) -> None:
    (tmp_path / "train.py").write_text(
        "import time, torch, stretto\n"
        "job = stretto.init()\n"
        "assert job.progress is not None or job.rank\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "stretto.distribute(model, optimizer)\n"
        "end = time.monotonic() + 6\n"
        "while stretto.gather_object(time.monotonic() < end)[0]:\n"
        "    model(torch.ones(1, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    time.sleep(0.01)\n"
        "stretto.shutdown()\n"
    )
    done = preloaded.shell("stretto run -n 2 --progress train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said = [each for each in done.stderr.splitlines() if "steps/s" in each]
    assert said and all(each.startswith("[0] stretto: ") for each in said)
