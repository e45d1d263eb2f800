"""`stretto run --min-workers`: which failures end a job, what is said about them, and the exit code."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launching.test_launch import LIMIT_S, Start
from launching.test_launch import start as start  # the fixture
from stretto.errors import ConfigurationError
from stretto.launching.launch import _NodeJob
from stretto.launching.launch_plan import check_min_workers
from stretto.launching.launch_report import Failure
from stretto.launching.survivors import WENT_ON, Survivors

pytestmark = pytest.mark.timeout(120)

KILLED = Failure(1, 4711, -9, 2.5, b"")


@pytest.mark.parametrize(
    ("num_workers", "least", "alive", "ended", "suffice"),
    [
        (2, None, ["0"], {"1": -9}, False),
        (2, None, ["0"], {"1": 0}, True),
        (2, 1, ["0"], {"1": -9}, True),
        (2, 1, [], {"0": 0, "1": -9}, True),
        (2, 1, [], {"0": 1, "1": -9}, False),
        (4, 3, ["0", "2"], {"1": -9, "3": 1}, False),
    ],
    ids=["as ever", "ended well", "one is enough", "the other ended well", "all failed", "too few"],
)
def test_enough_workers_are_those_that_run_or_have_ended_well(
    num_workers: int, least: int | None, alive: list[str], ended: dict[str, int], suffice: bool
) -> None:
    assert Survivors(num_workers, least).suffice(alive, ended) is suffice


def test_what_is_said_names_who_died_how_and_when() -> None:
    survivors = Survivors(3, 1)

    assert survivors.note(KILLED, ["0", "2"]) == (
        "stretto: rank 1 was killed by SIGKILL after 2.5 s (pid 4711); ranks 0, 2 go on"
    )
    assert survivors.note(Failure(2, 4712, 7, 3.0, b""), ["0"]).endswith("rank 0 goes on")
    assert survivors.summary(3, {"0": 0, "1": -9, "2": 7}) == (
        "stretto: the job has ended without 2 of 3 workers: rank 1 was killed by SIGKILL after 2.5 s; "
        "rank 2 exited with code 7 after 3.0 s"
    )


@pytest.mark.parametrize(("alive", "stop", "waits"), [({"0"}, None, False), (set(), None, True), ({"0"}, object(), True)])
def test_a_launcher_does_not_spin_over_a_worker_that_it_will_not_start_again(alive: set[str], stop: object, waits: bool) -> None:
    survivors = Survivors(2, 1, restarts=1)
    survivors.note(KILLED, ["0"], restart_at=0.0)  # which is over
    job: Any = SimpleNamespace(
        survivors=survivors,
        alive=alive,
        stop=None if stop is None else SimpleNamespace(killed=True),
        last_words_until=None,
        ended_workers=SimpleNamespace(due_at=None),
        screen=SimpleNamespace(congested=False),
    )
    assert (_NodeJob._patience(job, None) > 0) is waits


def test_the_others_go_on_and_the_exit_code_says_that_somebody_is_missing(start: Start) -> None:
    launcher = start(
        """
        if rank == 0:
            mark("dies", os.getpid())
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for("dies")
        wait_for_state(int(open(f"{folder}/dies").read()), ["", "Z"])
        print("went on", flush=True)
        """,
        "-n", "3", "--min-workers", "2",
    )  # fmt: skip
    output, errors = launcher.communicate(timeout=LIMIT_S)

    assert launcher.returncode == WENT_ON
    assert sorted(output.splitlines()) == ["[1] went on", "[2] went on"]
    assert re.search(r"rank 0 was killed by SIGKILL after [\d.]+ s \(pid \d+\); ranks 1, 2 go on", errors)
    assert errors.splitlines()[-1].startswith("stretto: the job has ended without 1 of 3 workers: rank 0 was killed by SIGKILL")


def test_with_too_few_left_the_job_ends_as_ever(start: Start, tmp_path: Path) -> None:
    launcher = start(
        """
        if rank == 2: time.sleep(600)
        if rank == 1: wait_for("first"); wait_for_state(int(open(f"{folder}/first").read()), ["", "Z"])
        mark("first", os.getpid())
        sys.exit(5 + rank)
        """,
        "-n", "3", "--min-workers", "2",
    )  # fmt: skip
    _, errors = launcher.communicate(timeout=LIMIT_S)

    assert launcher.returncode == 5
    assert "rank 0 exited with code 5" in errors and "go on" in errors
    assert "rank 0 of 3 failed first" in errors and "1 other worker was stopped" in errors


def test_who_is_started_again_is_started_alone_and_so_often() -> None:
    survivors = Survivors(3, 1, restarts=2)
    assert survivors.note(KILLED, ["0", "2"], 10.0).endswith("go on, and it is started again (restart 1 of 2)")
    assert survivors.next_at == 10.0 and survivors.due(9.9) == []
    assert survivors.due(10.0) == [("1", 1)] and survivors.next_at is None
    survivors.note(KILLED, ["0", "2"], 20.0)
    assert survivors.due(20.0) == [("1", 2)]
    assert survivors.note(Failure(2, 4712, 7, 3.0, b""), ["0"], 30.0).endswith("rank 0 goes on") and survivors.next_at is None
    assert survivors.summary(3, {"0": 0, "1": 0, "2": 7}) == (
        "stretto: the job has ended without 1 of 3 workers: rank 2 exited with code 7 after 3.0 s, and with 1 that came back: "
        "rank 1 was killed by SIGKILL after 2.5 s"
    )


def test_a_worker_that_dies_is_started_again_with_its_pipes_and_the_job_ends_well(start: Start) -> None:
    launcher = start(
        """
        life = os.environ["STRETTO_RESTART_COUNT"]
        print(f"life {life}", os.environ.get("STRETTO_MEET_TIMEOUT"), flush=True)
        print("to stderr", file=sys.stderr, flush=True)
        if rank == 1 and life == "0": os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1: mark("back")
        wait_for("back")
        """,
        "-n", "2", "--min-workers", "1", "--max-restarts", "1",
        patience={"RESTART_S": 0.05},
    )  # fmt: skip
    output, errors = launcher.communicate(timeout=LIMIT_S)

    assert launcher.returncode == 0, errors
    assert sorted(output.splitlines()) == ["[0] life 0 None", "[1] life 0 None", "[1] life 1 30"], "not 10 minutes"
    assert errors.count("[1] to stderr") == 2 and "rank 0 goes on, and it is started again (restart 1 of 1)" in errors
    assert "the job has ended with 1 that came back: rank 1 was killed by SIGKILL" in errors.splitlines()[-1]


@pytest.mark.parametrize("least", [0, 3])
def test_what_cannot_be_is_refused(least: int) -> None:
    with pytest.raises(ConfigurationError, match="1 to 2"):
        check_min_workers(least, 2)
