"""Server processes are killed, started again by their keepers, and take their ranges over while training runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from preloaded import Preloaded
from stretto.aggregate.parameter_server import keeper as keeping
from stretto.aggregate.parameter_server import network
from stretto.aggregate.parameter_server.keeper import NOT_JOINED, REFUSED, Keeper

KILLS_BOTH = """
import os, signal, time
import torch, stretto
from stretto import Asynchronous, ParameterServer, Strategy

job = stretto.init(timeouts=stretto.Timeouts(arrive_s=60.0))
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
with torch.no_grad():
    for parameter in model.parameters(): parameter.zero_()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
stretto.distribute(model, optimizer, Strategy(aggregate=ParameterServer(shards=2, replicas=1), sync=Asynchronous()))
(network,) = job.server_networks.values()
steps = 0

def step():
    global steps
    optimizer.zero_grad()
    (-sum(parameter.sum() for parameter in model.parameters())).backward()
    optimizer.step()
    steps += 1
    time.sleep(0.02)  # a computation

def server():
    keeper = network.processes[0].pid
    return int(open(f"/proc/{keeper}/task/{keeper}/children").read())

for victim in (0, 1):  # the second one dies when the first is back: what it had is nowhere else
    for _ in range(3): step()
    life = network.lives[victim]
    if job.rank == victim:
        os.kill(server(), signal.SIGKILL)
    end = time.monotonic() + 60
    while network.lives[victim] <= life:
        assert time.monotonic() < end, "it did not come back"
        step()
    for _ in range(100): step()  # while ranges are handed over
total = sum(stretto.gather_object(steps))
for rank in (0, 1):  # one after the other: each reads all steps before it, and its own
    if job.rank == rank:
        step()
    stretto.barrier()
found = {float(value) for parameter in model.parameters() for value in parameter.detach().flatten()}
print("exact", found == {total + 1 + job.rank}, flush=True)
print("server", server(), flush=True)
stretto.shutdown()
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(180)
def test_both_servers_die_one_after_the_other_and_no_update_is_lost(tmp_path: Path, preloaded: Preloaded) -> None:
    (tmp_path / "kills.py").write_text(KILLS_BOTH)
    done = preloaded.shell("stretto run -n 2 kills.py", folder=tmp_path, timeout_s=170)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"\[(\d)\] exact True", done.stdout)) == ["0", "1"]
    for number in (0, 1):
        assert done.stderr.count(f"has lost server {number}") == 2
        assert done.stderr.count(f"server {number} has been started again, and has joined") == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in re.findall(r"server (\d+)", done.stdout))


def test_servers_beside_workers_do_not_inherit_the_secret_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_SECRET", "5e" * 32)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    environ = network._environment_of_servers()
    assert "5e" * 32 not in environ.values() and environ["OMP_NUM_THREADS"] == "3" and environ["PYTHONPATH"]


# -- the keeper -------------------------------------------------------------------------------------------------------

TELLS = "import sys; sys.stdout.write(sys.argv[1] + sys.stdin.read()); sys.stdout.flush(); "


def kept(tmp_path: Path, restarts: int, ends: str) -> tuple[int, str]:
    command = [sys.executable, "-I", "-S", str(keeping.__file__), str(restarts), sys.executable, "-I", "-S", "-c", TELLS + ends]
    done = subprocess.run(command, input="place ", capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("restarts", "ends", "code", "lives"),
    [
        (3, "sys.exit(0)", 0, 1),
        (2, "sys.exit(1)", 1, 3),
        (0, "sys.exit(1)", 1, 1),
        (2, "import os; os.kill(os.getpid(), 9 if sys.argv[1] < '2' else 15)", 128 + 15, 3),
        (5, "sys.exit(sys.argv[1] != '1')", 0, 2),
        (5, f"sys.exit({NOT_JOINED})", NOT_JOINED, 1),
        (5, f"sys.exit({REFUSED})", REFUSED, 1),
    ],
    ids=["ended well", "fails", "never again", "killed", "the second time well", "nobody there", "nobody came"],
)
def test_a_keeper_starts_a_server_again_so_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int, ends: str, code: int, lives: int
) -> None:
    assert kept(tmp_path, restarts, ends) == (code, "".join(f"{life}place " for life in range(lives)))


@pytest.fixture
def handlers_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers_restored")
def test_a_keeper_that_was_told_to_stop_starts_nothing_any_more() -> None:
    tells = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); exit(1)"
    assert Keeper(3, [sys.executable, "-I", "-S", "-c", tells], b"").run() == 1


@pytest.mark.usefixtures("handlers_restored")
def test_a_keeper_that_is_told_to_stop_between_two_lives_starts_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(keeping, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))
    lives = tmp_path / "lives"
    lives.touch()
    notes = f"import sys; open({str(lives)!r}, 'a').write(sys.argv[1]); exit(1)"
    assert Keeper(3, [sys.executable, "-I", "-S", "-c", notes], b"").run() == 1
    assert len(pauses) == 1 and lives.read_text() == "0"
