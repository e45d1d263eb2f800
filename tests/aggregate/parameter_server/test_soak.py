"""A few kills and pauses over real processes, each counted; twenty of them are `slow`, and `benchmarks/soak.py` does 200."""

from __future__ import annotations

import importlib.util
import shlex
import threading
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType

import pytest

from preloaded import Preloaded

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_no_update_is_lost_or_applied_twice_when_servers_and_a_worker_are_killed_and_workers_stand_still(
    tmp_path: Path, preloaded: Preloaded, soak: ModuleType
) -> None:
    """Servers are forks of the process that has torch here, and no children of their keepers: nobody can stop them."""
    of = soak.Soak(tmp_path, workers=2, servers=2, seed=5)
    ended: list[CompletedProcess[str]] = []

    def run() -> None:
        ended.append(preloaded.shell(shlex.join(of.command(["stretto"])), folder=tmp_path, timeout_s=180))

    running = threading.Thread(target=run, daemon=True)
    running.start()
    try:
        of.wait_for_all()
        for kind in ("kill a server", "pause a worker", "kill a server", "kill a worker"):
            of.hit(kind)
        of.stop()
    finally:
        soak.write_whole(tmp_path / "stop", b"0")
        running.join(100)
        print(*(each.stderr for each in ended))  # shown if it fails
    assert ended[0].returncode == 0, ended[0].stderr  # the worker has come back
    assert "the job has ended with 1 that came back" in ended[0].stderr
    assert of.fired == {"kill a server": 2, "pause a worker": 1, "kill a worker": 1}
    of.check()
    assert max(of.recovery_s) < 10.0  # 2 s on an idle machine


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_twenty_random_faults(tmp_path: Path, soak: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.soak(soak.Soak(tmp_path, workers=3, servers=3, seed=1), faults=20) == 0
    assert "20 faults in" in capsys.readouterr().out


def test_an_update_that_was_lost_or_came_twice_is_noticed(tmp_path: Path, soak: ModuleType) -> None:
    of = soak.Soak(tmp_path, workers=1, servers=1, seed=1)
    (tmp_path / "steps0.1").write_bytes(b"".join(soak.STEP.pack(float(n), n + 0.5) for n in range(10)))
    for values, well in (((11.0, 11.0), True), ((10.0, 11.0), False), ((11.0, 12.0), False)):  # with the reporter's own
        soak.write_whole(tmp_path / "values", soak.struct.pack("<2d", *values))
        if well:
            assert "10 steps" not in of.check()
        else:
            with pytest.raises(AssertionError, match="lost, or applied twice"):
                of.check()
    (tmp_path / "steps1.2").write_bytes(soak.STEP.pack(1.0, 0.0))
    soak.write_whole(tmp_path / "values", soak.struct.pack("<2d", 11.0, 12.0))
    with pytest.raises(AssertionError):
        of.check()  # nobody was killed in the middle of it
    of.fired["kill a worker"] += 1
    assert of.check() == "11 steps have ended, 12 were begun, values are 11 to 12"
